"""Histories and curves drawn from known sigmoids, as a run folder, as tables or as fitted curves."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import ArrayLike, NDArray

from analysis.fitting.curves import AllocationCurve, CurveFit
from analysis.fitting.logistic import Logistics
from analysis.fitting.observations import Allocation
from analysis.fitting.records import IsotonicCurve
from analysis.tables import GridTables

Sigmoid = tuple[float, float, float, float]
"""R0, A, Cmid, s."""

MakeRun = Callable[..., Path]


def sigmoid(compute: Any, r0: float, a: float, mid: float, s: float) -> Any:
    """The curve as the issue states it, written apart from the package's own."""
    return r0 + (a - r0) / (1 + (mid / np.asarray(compute, dtype=float)) ** s)


MARKS = 1000 * 2.0 ** np.arange(0, 8, 0.5)
"""Compute of the evaluations of ``cell_rows``, rounded up to whole batches, the last one down: it is the budget."""


def cell_rows(
    n: int,
    shape: Sigmoid,
    problems: int = 16,
    seed: int = 0,
    marks: ArrayLike = MARKS,
    draw: np.random.Generator | None = None,
    validation_problems: int = 100,
) -> pd.DataFrame:
    """The history of one cell. draw: score each problem with 4 right-or-wrong answers; None: no noise, no scores."""
    batch = problems * n
    at = np.asarray(marks, dtype=float)
    steps = sorted({min(int(-(-mark // batch)), int(at.max() // batch)) for mark in at} - {0})
    rows = []
    for step in steps:
        reward = float(sigmoid(step * batch, *shape))
        row: dict[str, Any] = {
            "cell": f"bp{problems}-n{n}-s{seed}",
            "problems_per_batch": problems,
            "rollouts_per_problem": n,
            "seed": seed,
            "step": step,
            "compute_rollouts": step * batch,
            "compute_tokens": 1000 * step * batch,
            "accelerator_seconds": 0.5 * step * batch,
            "avg_at_4": reward,
        }
        if draw is not None:
            right = draw.binomial(4, reward, validation_problems)
            row["avg_at_4"] = right.mean() / 4
            row["best_at_4"], row["worst_at_4"] = (right > 0).mean(), (right == 4).mean()
            row["eval_right"] = right.astype(np.int32)
        rows.append(row)
    return pd.DataFrame(rows)


def tables_of(*cells: pd.DataFrame, base: dict[str, Any] | None = None, **states: str) -> GridTables:
    """A study of finished cells. states: of cells, with _ for - in their names."""
    history = (
        pd.concat(cells, ignore_index=True)
        if cells
        else pd.DataFrame(columns=cell_rows(4, (0, 1, 1, 1)).columns)
    )
    history = history.sort_values(["cell", "step"], ignore_index=True)
    known = dict.fromkeys((str(cell) for cell in history["cell"].unique()), "finished")
    known |= {cell.replace("_", "-"): state for cell, state in states.items()}
    return GridTables("study", history, base, known, {}, {}, None)


def curve_of(
    n: int,
    shape: Sigmoid,
    problems: int = 16,
    span: tuple[float, float] = (1e3, 1e5),
    replicates: NDArray[np.float64] | None = None,
) -> AllocationCurve:
    """A curve that was fitted to perfection. replicates: (R,) shifts of the whole curve; None: no intervals."""
    r0, a, mid, s = shape
    fit = CurveFit(r0, a, mid, s, True, (), 8, 0.0, *span)
    drawn = None
    if replicates is not None:
        level = np.ones_like(replicates)
        middle, slope = np.log10(mid) * level, s * np.log(10) * level
        drawn = Logistics(r0 + replicates, a + replicates, middle, slope, 0 * level, level > 0)
    at = np.log10(np.geomspace(*span, 8))
    isotonic = IsotonicCurve(at, sigmoid(10**at, *shape))
    return AllocationCurve(
        Allocation(n, problems), (f"bp{problems}-n{n}-s0",), (0,), fit, None, isotonic, drawn
    )


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Make a run folder: one finished cell per (B_p, n, sigmoid), evaluated at 1000 * 2^k and the end."""

    def make(
        cells: Sequence[tuple[int, int, Sigmoid]],
        budget: int = 64_000,
        noise: float = 0.0,
        base: float | None = 0.3,
        ratio: float = 2.0,
    ) -> Path:
        run = tmp_path / "grid"
        rng = np.random.default_rng(0)
        for problems, n, shape in cells:
            cell = f"bp{problems}-n{n}-s0"
            folder = run / "cells" / cell
            folder.mkdir(parents=True)
            (folder / "state.json").write_text(json.dumps({"state": "finished"}))
            batch = problems * n
            marks = 1000 * ratio ** np.arange(60)
            last = budget // batch
            steps = sorted({min(int(-(-mark // batch)), last) for mark in marks} - {0})
            rows = []
            for step in steps:
                reward = float(sigmoid(step * batch, *shape)) + noise * rng.standard_normal()
                rows.append(
                    {
                        "cell": cell,
                        "problems_per_batch": problems,
                        "rollouts_per_problem": n,
                        "seed": 0,
                        "step": step,
                        "compute_rollouts": step * batch,
                        "avg_at_4": reward,
                        "best_at_4": min(1.0, reward + 0.2),
                        "worst_at_4": max(0.0, reward - 0.2),
                    }
                )
            (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if base is not None:
            (run / "base.json").write_text(
                json.dumps({"compute_rollouts": 0, "avg_at_4": base, "best_at_4": 0.5})
            )
        return run

    return make
