"""What a study's tables hold: the columns of a history, their names in words, and ``GridTables``.

A history holds one row per evaluated step of a cell. ``sources`` makes these tables.
"""

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pandas as pd

HISTORY_COLUMNS: dict[str, str] = {
    "cell": "the cell's id, for example bp16-n64-s0",
    "problems_per_batch": "B_p, problems per batch",
    "rollouts_per_problem": "n, rollouts sampled per problem",
    "seed": "the cell's seed",
    "step": "update steps done",
    "compute_rollouts": "C, training rollouts so far: step * B_p * n",
    "compute_tokens": "generated training tokens so far",
    "accelerator_seconds": "accelerator time of training so far: seconds of sampling times the accelerators of the engine "
    "that sampled, plus seconds of learning times those of the learner group; GPUs, or cores in a pool without GPUs; neither "
    "evaluation nor grading nor waiting; measured, no replay reproduces it",
    "epochs": "passes over the training set: step * B_p / number of training problems",
    "avg_at_K": "mean validation score over K answers a problem; K is the real number (avg_at_4)",
    "best_at_K": "share of validation problems with at least one of K answers right",
    "worst_at_K": "share of validation problems with all K answers right",
    "eval_right": "per validation problem, in the set's order: how many of its K answers were right",
    "eval_response_tokens": "mean tokens of a validation answer",
    "eval_truncated": "share of validation answers cut at the token limit",
    "eval_verifier_failures": "answers of an evaluation, validation and train probe, whose grading crashed or hung; each scored 0",
    "train_probe_avg_at_K": "mean score of a fixed probe of training problems over K answers a problem; K may differ "
    "from the validation's",
    "train_probe_right": "per problem of the training probe, in the probe's order: how many of its K answers were right",
    "train_reward": "mean reward of the training rollouts since the previous row, as all below unless they say otherwise",
    "response_tokens": "mean tokens of an answer",
    "truncated": "share of answers cut at the token limit",
    "entropy": "mean token entropy of the policy, nats; from -log p of all sampled tokens where some answers were not computed",
    "kl": "mean k3 estimate of the divergence from the base model over the tokens of computed answers, nats",
    "grad_norm": "norm of the gradient before clipping",
    "loss": "training loss",
    "computed_share": "share of training answers that the gradient depends on; the others are not computed",
    "zero_variance_right": "share of groups with every rollout right",
    "zero_variance_wrong": "share of groups with every rollout wrong",
    "importance_ratio": "mean of p_learner / p_sampler over the tokens of computed answers",
    "staleness": "most updates by which rollouts were older than the weights that learnt from them: 0, strictly on-policy",
    "tis_capped": "share of the same tokens whose importance ratio exceeds the cap",
    "logprob_mean_difference": "mean |log p_learner - log p_sampler| over the same tokens",
    "verifier_failures": "training answers since the previous row whose grading crashed or hung; each scored 0",
    "logprob_difference": "largest |log p_learner - log p_sampler| over the same tokens",
    "learning_rate": "learning rate of the latest step",
    "seconds_*": "measured time that a phase kept an engine, the grader or a learner group at work, per step "
    "(seconds_evaluating: the engines, for this evaluation); no replay reproduces it",
    "logged_at_ms": "when the row was written, milliseconds since 1970; no replay reproduces it",
}
"""Every column of a history with its meaning. ``K`` stands for a number and ``*`` for a phase's name."""

COMPUTE_COLUMNS = {
    "rollouts": "compute_rollouts",
    "tokens": "compute_tokens",
    "accelerator_seconds": "accelerator_seconds",
}
"""The column of each compute unit."""

REQUIRED_COLUMNS = ("cell", "problems_per_batch", "rollouts_per_problem", "seed", "step", "compute_rollouts")
"""Columns that a history always has, besides at least one validation metric."""

PER_PROBLEM_COLUMNS = ("eval_right", "train_probe_right")
"""Columns with one count for each problem."""

_METRIC = re.compile(r"(avg|best|worst)_at_([1-9][0-9]*)")
_SCORE = re.compile(rf"{_METRIC.pattern}|train_probe_avg_at_[1-9][0-9]*")
_PATTERNS = [
    re.compile(name.removesuffix("K") + "[1-9][0-9]*" if name.endswith("_at_K") else name.replace("*", ".+"))
    for name in HISTORY_COLUMNS
]


@dataclass(frozen=True)
class GridTables:
    """What is known of one *setting*: cells that differ in allocation, seed and budget only."""

    name: str
    """For titles: the run folder's name, the file's stem, the experiment's name."""
    history: pd.DataFrame
    """Usable rows only, sorted by cell and step, columns as in ``HISTORY_COLUMNS``. Per-problem columns hold an int32
    array a row, or None."""
    base: dict[str, Any] | None
    """The base model's row (C = 0), as JSON values; None where it is not known."""
    states: dict[str, str]
    """By cell, also for cells without a row; empty where the source has no states."""
    reasons: dict[str, str]
    """Why a cell is in its state, for those that tell."""
    complaints: dict[str, list[str]]
    """By cell: what is wrong with its rows and what was done about it, one sentence each. ``base`` and ``grid`` stand for
    the base model's row and the grid as a whole."""
    spec: dict[str, Any] | None
    """The resolved grid (JSON form of ``grids.spec.GridSpec``), where the source has it."""
    deviations: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By cell: what may have changed the last bits of its numbers against an undisturbed run, one phrase each (resumed with
    another number of ranks, for example). Its rows are as good as any."""
    phases: pd.DataFrame | None = None
    """What the members of the pools did, one row for each call that one has served: ``start`` (which start of the run),
    ``member``, ``kind``, ``cell``, ``started_at`` (unix seconds), ``busy_seconds``, ``waited_seconds``, ``failed``, as
    docs/scheduling.md describes them. None where the source has no such record; of several sources the first that has one."""


def is_metric(name: str) -> bool:
    """Whether a name is a validation metric's: avg_at_K, best_at_K or worst_at_K."""
    return _METRIC.fullmatch(name) is not None


def metric_columns(history: pd.DataFrame) -> list[str]:
    """The validation metrics of a table (avg_at_K, best_at_K, worst_at_K), in the table's order."""
    return [column for column in history.columns if is_metric(column)]


def headline_metric(names: list[str]) -> str | None:
    """The first avg_at_K among column names; None when there is none."""
    return next((name for name in names if name.startswith("avg_at_") and _METRIC.fullmatch(name)), None)


def metric_label(metric: str) -> str:
    """A metric's name as people write it: ``avg_at_4`` is ``avg@4``."""
    return metric.replace("_at_", "@")


def compute_label(unit: str) -> str:
    """An axis's words for a compute unit: a key of ``COMPUTE_COLUMNS``."""
    return {
        "rollouts": "compute C (rollouts)",
        "tokens": "compute C (generated tokens)",
        "accelerator_seconds": "compute C (accelerator-seconds)",
    }[unit]


def score_columns(names: list[str]) -> list[str]:
    """The columns that are shares of right answers, in [0, 1]: validation metrics and the training probe."""
    return [name for name in names if _SCORE.fullmatch(name)]


def samples_per_problem(name: str) -> int:
    """K of a score's name: 4 for ``avg_at_4``."""
    return int(name.rpartition("_")[2])


def is_measured(name: str) -> bool:
    """Whether a column is a measurement that no replay of a cell reproduces."""
    return name.startswith("seconds_") or name in ("accelerator_seconds", "logged_at_ms")


@cache
def column_rank(name: str) -> int | None:
    """A column's place in ``HISTORY_COLUMNS``; None for a name that is not one of them."""
    return next((rank for rank, pattern in enumerate(_PATTERNS) if pattern.fullmatch(name)), None)


def in_order(names: list[str]) -> list[str]:
    """Names as ``HISTORY_COLUMNS`` orders them, smaller K first; unknown ones last, by name."""

    def key(name: str) -> tuple[int, int, str]:
        rank = column_rank(name)
        return (len(_PATTERNS) if rank is None else rank, len(name) if rank is not None else 0, name)

    return sorted(names, key=key)
