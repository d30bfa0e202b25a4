"""A run folder with histories drawn from known sigmoids."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Sigmoid = tuple[float, float, float, float]
"""R0, A, Cmid, s."""

MakeRun = Callable[..., Path]


def sigmoid(compute: Any, r0: float, a: float, mid: float, s: float) -> Any:
    """The curve as the issue states it, written apart from the package's own."""
    return r0 + (a - r0) / (1 + (mid / np.asarray(compute, dtype=float)) ** s)


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
