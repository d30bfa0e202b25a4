"""A run folder's files as tables: histories, the base model's row and the cells' states.

This module owns the list of history columns. A history holds one row per evaluated step of a cell; readers
take no lock, so a last line that its writer has not finished yet (no newline) is left out.
"""

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd

from grids.errors import UserError

HISTORY_COLUMNS: dict[str, str] = {
    "cell": "the cell's id, for example bp16-n64-s0",
    "problems_per_batch": "B_p, problems per batch",
    "rollouts_per_problem": "n, rollouts sampled per problem",
    "seed": "the cell's seed",
    "step": "update steps done",
    "compute_rollouts": "C, training rollouts so far: step * B_p * n",
    "compute_tokens": "generated training tokens so far",
    "avg_at_K": "mean validation score over K answers a problem; K is the real number (avg_at_4)",
    "best_at_K": "share of validation problems with at least one of K answers right",
    "worst_at_K": "share of validation problems with all K answers right",
    "eval_response_tokens": "mean tokens of a validation answer",
    "eval_truncated": "share of validation answers cut at the token limit",
    "eval_verifier_failures": "validation answers whose grading crashed or hung; each scored 0",
    "train_reward": "mean reward of the training rollouts since the previous row, as all below unless they say otherwise",
    "response_tokens": "mean tokens of an answer",
    "truncated": "share of answers cut at the token limit",
    "entropy": "mean token entropy of the policy, nats",
    "kl": "mean k3 estimate of the divergence from the base model, nats",
    "grad_norm": "norm of the gradient before clipping",
    "loss": "training loss",
    "zero_variance_right": "share of groups with every rollout right",
    "zero_variance_wrong": "share of groups with every rollout wrong",
    "importance_ratio": "mean of p_learner / p_sampler over training tokens",
    "tis_capped": "share of training tokens whose importance ratio exceeds the cap",
    "logprob_mean_difference": "mean |log p_learner - log p_sampler| over training tokens",
    "verifier_failures": "training answers since the previous row whose grading crashed or hung; each scored 0",
    "logprob_difference": "largest |log p_learner - log p_sampler| over training tokens",
    "learning_rate": "learning rate of the latest step",
    "seconds_*": "measured time of a phase, per step (seconds_evaluating: of this evaluation); no replay reproduces it",
    "logged_at_ms": "when the row was written, milliseconds since 1970; no replay reproduces it",
}
"""Every column of a history with its meaning. ``K`` stands for a number and ``*`` for a phase's name."""

REQUIRED_COLUMNS = ("cell", "problems_per_batch", "rollouts_per_problem", "seed", "step", "compute_rollouts")
"""Columns that every row must hold, besides at least one ``avg_at_K``."""

_METRIC = re.compile(r"(avg|best|worst)_at_([1-9][0-9]*)")


def read_history(run_dir: Path | str) -> pd.DataFrame:
    """Read every ``cells/*/history.jsonl`` of a run into one tidy table, ordered by cell and step.

    Cells without a history or without rows contribute no row; with no rows at all the table is empty and has
    the required columns. Raises UserError for a missing run folder, a broken line, a row that lacks a
    required column, or a step that occurs twice in a cell.
    """
    rows: list[dict[str, Any]] = []
    for path in sorted(_cells_folder(run_dir).glob("*/history.jsonl")):
        cell_rows = _read_rows(path)
        _refuse_repeated_steps(cell_rows, path)
        rows.extend(cell_rows)
    if not rows:
        return pd.DataFrame(columns=list(REQUIRED_COLUMNS))
    return pd.DataFrame(rows).sort_values(["cell", "step"], ignore_index=True)


def read_base(run_dir: Path | str) -> dict[str, Any] | None:
    """Read the base model's evaluation row (C = 0) from ``base.json``; None when it has not been evaluated
    yet."""
    path = _run_folder(run_dir) / "base.json"
    return _read_object(path) if path.exists() else None


def read_states(run_dir: Path | str) -> dict[str, str]:
    """Read each cell's state from its ``state.json``, by cell id in sorted order.

    A cell's folder without a ``state.json`` counts as pending: nothing has been decided about it yet.
    """
    states: dict[str, str] = {}
    for cell, record in _read_state_files(run_dir).items():
        if record is None:
            states[cell] = "pending"
        elif isinstance(record.get("state"), str):
            states[cell] = record["state"]
        else:
            raise UserError(
                f"{run_dir}/cells/{cell}/state.json: field 'state' is missing; resume the run to rewrite it"
            )
    return states


def read_reasons(run_dir: Path | str) -> dict[str, str]:
    """Read why cells are in their state (``reason`` in ``state.json``), for the cells that give a reason."""
    records = _read_state_files(run_dir)
    return {
        cell: str(record["reason"]) for cell, record in records.items() if record and record.get("reason")
    }


def metric_columns(history: pd.DataFrame) -> list[str]:
    """The validation metrics of a table (avg_at_K, best_at_K, worst_at_K), in the table's order."""
    return [column for column in history.columns if _METRIC.fullmatch(column)]


def headline_metric(names: list[str]) -> str | None:
    """The first avg_at_K among column names; None when there is none."""
    return next((name for name in names if name.startswith("avg_at_") and _METRIC.fullmatch(name)), None)


def metric_label(metric: str) -> str:
    """A metric's name as people write it: ``avg_at_4`` is ``avg@4``."""
    return metric.replace("_at_", "@")


def _run_folder(run_dir: Path | str) -> Path:
    folder = Path(run_dir)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder; give the folder that `isocompute run` wrote")
    return folder


def _cells_folder(run_dir: Path | str) -> Path:
    return _run_folder(run_dir) / "cells"


def _read_state_files(run_dir: Path | str) -> dict[str, dict[str, Any] | None]:
    folders = sorted(path for path in _cells_folder(run_dir).glob("*") if path.is_dir())
    paths = {folder.name: folder / "state.json" for folder in folders}
    return {cell: _read_object(path) if path.exists() else None for cell, path in paths.items()}


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); resume the run to rewrite it") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds no JSON object; resume the run to rewrite it")
    return value


def _read_rows(path: Path) -> list[dict[str, Any]]:
    complete, newline, _torn = path.read_bytes().rpartition(b"\n")
    rows = []
    for number, line in enumerate(complete.split(b"\n") if newline else [], start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(
                f"{path}, row {number}: not valid JSON; resume the cell to rewrite its history"
            ) from error
        if not isinstance(row, dict):
            raise UserError(
                f"{path}, row {number}: holds no JSON object; resume the cell to rewrite its history"
            )
        _refuse_missing_columns(row, path, number)
        rows.append(row)
    return rows


def _refuse_missing_columns(row: dict[str, Any], path: Path, number: int) -> None:
    missing = [name for name in REQUIRED_COLUMNS if row.get(name) is None]
    if headline_metric(list(row)) is None:
        missing.append("avg_at_K")
    if missing:
        listed = ", ".join(repr(name) for name in missing)
        raise UserError(f"{path}, row {number}: lacks {listed}; add it or remove the row")


def _refuse_repeated_steps(rows: list[dict[str, Any]], path: Path) -> None:
    seen: set[int] = set()
    for number, row in enumerate(rows, start=1):
        if row["step"] in seen:
            raise UserError(f"{path}, row {number}: step {row['step']} occurs twice; remove the repeated row")
        seen.add(row["step"])
