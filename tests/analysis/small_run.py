"""A run folder of the quickstart's three cells, with every column that a report uses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from grids.loading import dump_grid, load_grid

GRID = Path(__file__).parents[2] / "grids" / "quickstart.yaml"
CELLS = {"bp16-n4-s0": (0.60, 3e3), "bp16-n16-s0": (0.75, 8e3), "bp16-n64-s0": (0.85, 3e4)}
"""Ceiling and midpoint of each cell's score, from 0.3 on with s = 1."""
PROBLEMS, PROBE = 40, 12


def write_small_run(run: Path, rows: int = 7) -> Path:
    """Three finished cells evaluated at C = 1024, 2048, ...; scores are drawn with K = 4, the probe with K = 8."""
    rng = np.random.default_rng(0)
    run.mkdir(parents=True)
    spec = dump_grid(load_grid(GRID))
    content = {"version": 1, "resolved": {"spec": spec}, "identity": {"name": "quickstart"}}
    (run / "grid.yaml").write_text(yaml.safe_dump(content))
    (run / "base.json").write_text(json.dumps({"compute_rollouts": 0} | _scores(0.3, rng)))
    for cell, (ceiling, midpoint) in CELLS.items():
        batch = 16 * int(cell.split("-")[1][1:])
        history = []
        for compute in 1024 * 2 ** np.arange(rows):
            reward = 0.3 + (ceiling - 0.3) / (1 + midpoint / compute)
            step = int(compute) // batch
            history.append(
                {
                    "cell": cell,
                    "problems_per_batch": 16,
                    "rollouts_per_problem": batch // 16,
                    "seed": 0,
                    "step": step,
                }
                | {
                    "compute_rollouts": step * batch,
                    "compute_tokens": 5 * step * batch,
                    "epochs": step * 16 / 2000,
                }
                | _scores(reward, rng)
                | {"accelerator_seconds": 0.01 * step * batch, "train_reward": reward, "response_tokens": 5.0}
                | {"entropy": 1 - reward, "zero_variance_right": 0.1, "zero_variance_wrong": 0.2}
            )
        write_cell(run, cell, history, "finished")
    return run


def write_cell(
    run: Path, cell: str, history: list[dict[str, Any]], state: str, reason: str | None = None
) -> None:
    """A cell's folder as a run leaves it."""
    folder = run / "cells" / cell
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))
    set_state(run, cell, state, len(history), reason)


def set_state(run: Path, cell: str, state: str, rows: int, reason: str | None = None) -> None:
    """A cell's state.json."""
    record = {"cell": cell, "state": state, "reason": reason, "commit": {"history_rows": rows}}
    (run / "cells" / cell / "state.json").write_text(json.dumps(record))


def _scores(reward: float, rng: np.random.Generator) -> dict[str, Any]:
    right, probe = rng.binomial(4, reward, PROBLEMS), rng.binomial(8, reward, PROBE)
    return {
        "avg_at_4": right.mean() / 4,
        "best_at_4": float((right > 0).mean()),
        "worst_at_4": float((right == 4).mean()),
        "eval_right": right.tolist(),
        "train_probe_avg_at_8": probe.mean() / 8,
        "train_probe_right": probe.tolist(),
    }
