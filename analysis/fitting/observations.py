"""What of a history is fitted: the evaluations of each allocation, pooled over its cells."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.fitting.logistic import Array

MIN_POINTS = 4
"""Fewest different computes for a curve, which has four parameters."""

_AT_K = re.compile(r"(avg|best|worst)_at_([1-9][0-9]*)")


@dataclass(frozen=True, order=True)
class Allocation:
    """(B_p, n): how a batch is split. Cells of one allocation differ in the seed only."""

    rollouts_per_problem: int
    problems_per_batch: int

    @property
    def batch_rollouts(self) -> int:
        """B = B_p * n."""
        return self.problems_per_batch * self.rollouts_per_problem

    @property
    def name(self) -> str:
        """For people, for example ``bp32-n64``."""
        return f"bp{self.problems_per_batch}-n{self.rollouts_per_problem}"


@dataclass(frozen=True)
class Observations:
    """N evaluations at C > 0 with a finite metric, of one allocation or one cell."""

    allocation: Allocation
    cells: tuple[str, ...]
    seeds: tuple[int, ...]
    """Of each cell."""
    cell_index: NDArray[np.intp]
    """(N,) which of ``cells`` each evaluation belongs to."""
    compute: Array
    """(N,) in the unit of the fit."""
    rollouts: Array
    """(N,) in rollouts."""
    reward: Array
    """(N,)"""
    scores: Array | None
    """(N, P) score of each validation problem, in [0, 1]; their means are ``reward``."""

    def up_to(self, compute: float) -> "Observations":
        """The evaluations with C <= compute."""
        kept = self.compute <= compute
        return Observations(
            self.allocation,
            self.cells,
            self.seeds,
            self.cell_index[kept],
            self.compute[kept],
            self.rollouts[kept],
            self.reward[kept],
            None if self.scores is None else self.scores[kept],
        )

    def of_cell(self, index: int) -> "Observations":
        """The evaluations of one of the cells."""
        kept = self.cell_index == index
        return Observations(
            self.allocation,
            (self.cells[index],),
            (self.seeds[index],),
            np.zeros(int(kept.sum()), dtype=np.intp),
            self.compute[kept],
            self.rollouts[kept],
            self.reward[kept],
            None if self.scores is None else self.scores[kept],
        )


@dataclass(frozen=True)
class BasePoint:
    """The base model: an observation at C = 0 that all allocations share."""

    reward: float
    scores: Array | None
    """(P,)"""


def base_point(base: Mapping[str, Any] | None, metric: str) -> BasePoint | None:
    """The base model's row as an observation; None without a finite score."""
    value = (base or {}).get(metric)
    if base is None or not isinstance(value, (int, float)) or not np.isfinite(value):
        return None
    right = base.get("eval_right")
    match = _AT_K.fullmatch(metric)
    scores = None if right is None or match is None else _scores([right], match, np.array([value]))
    return BasePoint(float(value), None if scores is None else scores[0])


def observe(
    history: pd.DataFrame, metric: str, compute_column: str, with_scores: bool
) -> tuple[list[Observations], dict[str, str]]:
    """The evaluations of each allocation, by n and B_p, and for cells that have too few the reason.

    with_scores: also collect per-problem scores, where every evaluation of an allocation has them.
    A cell with fewer than MIN_POINTS different computes is left out.
    """
    unfitted: dict[str, str] = {}
    if history.empty:
        return [], unfitted
    if compute_column not in history.columns:
        reason = f"column {compute_column} is absent"
        return [], {str(cell): reason for cell in history["cell"].unique()}
    values = pd.to_numeric(history[metric], errors="coerce").to_numpy(dtype=np.float64)
    compute = pd.to_numeric(history[compute_column], errors="coerce").to_numpy(dtype=np.float64)
    usable = np.isfinite(values) & np.isfinite(compute) & (compute > 0)
    table = history[usable]
    frame = pd.DataFrame({"cell": table["cell"].to_numpy(), "compute": compute[usable]})
    counts = frame.groupby("cell")["compute"].nunique()
    for cell in sorted(history["cell"].unique()):
        points = int(counts.get(cell, 0))
        if points < MIN_POINTS:
            unfitted[str(cell)] = f"{points} usable points of {metric}; a curve needs at least {MIN_POINTS}"
    match = _AT_K.fullmatch(metric) if with_scores and "eval_right" in table.columns else None
    found = []
    kept = ~table["cell"].isin(list(unfitted)).to_numpy()
    table, values, compute = table[kept], values[usable][kept], compute[usable][kept]
    order = np.lexsort((compute, table["seed"], table["problems_per_batch"], table["rollouts_per_problem"]))
    table, values, compute = table.iloc[order], values[order], compute[order]
    shapes = table[["rollouts_per_problem", "problems_per_batch"]].to_numpy(dtype=np.int64)
    if not len(shapes):
        return [], unfitted
    starts = np.flatnonzero(np.r_[True, (shapes[1:] != shapes[:-1]).any(axis=1)])
    for start, end in zip(starts, [*starts[1:], len(table)], strict=True):
        rows = table.iloc[start:end]
        index, cells = pd.factorize(rows["cell"])
        seeds = rows["seed"].to_numpy()
        found.append(
            Observations(
                allocation=Allocation(int(shapes[start, 0]), int(shapes[start, 1])),
                cells=tuple(str(cell) for cell in cells),
                seeds=tuple(int(seeds[np.argmax(index == i)]) for i in range(len(cells))),
                cell_index=index,
                compute=compute[start:end],
                rollouts=rows["compute_rollouts"].to_numpy(dtype=np.float64),
                reward=values[start:end],
                scores=None if match is None else _scores(list(rows["eval_right"]), match, values[start:end]),
            )
        )
    return found, unfitted


def _scores(right: list[Any], match: re.Match[str], reward: Array) -> Array | None:
    """(N, P) scores of a metric from counts of right answers; None where a count is missing, or where they are counts
    of something else: their means are not the rewards."""
    kind, answers = match[1], int(match[2])
    lengths = {len(counts) if isinstance(counts, (list, np.ndarray)) else 0 for counts in right}
    if len(lengths) != 1 or 0 in lengths:
        return None
    counts = np.asarray(right, dtype=np.float64)
    by_kind = {"avg": counts / answers, "best": counts > 0, "worst": counts == answers}
    scores = by_kind[kind].astype(np.float64)
    return scores if np.allclose(scores.mean(axis=1), reward, atol=1e-6) else None
