"""How long a large run folder takes to load and to fit without bootstrap.

``python -m benchmarks.load_many`` writes a run folder of 5,000 cells with about 200 evaluated steps each into a temporary
folder (50 allocations with 100 seeds, all documented columns of a history but per-problem scores unless ``--problems`` is
given), then times reading it and the analysis.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.findings import analyse
from analysis.options import FitOptions
from analysis.reading.sources import read_run
from analysis.synthetic import SyntheticGrid, synthetic_grid
from analysis.tables import GridTables
from benchmarks import command
from grids.spec import EvaluationSpec

_COLUMNS = (
    *("train_reward", "response_tokens", "truncated", "entropy", "kl", "grad_norm", "loss"),
    *(
        "zero_variance_right",
        "zero_variance_wrong",
        "importance_ratio",
        "tis_capped",
        "logprob_mean_difference",
    ),
    *("seconds_sampling", "seconds_learning", "seconds_evaluating"),
)
"""Columns that the analysis reads but that a synthetic grid does not have: filled with random numbers."""


def design(cells: int, problems: int) -> SyntheticGrid:
    """A grid of about this many cells: 50 allocations, the rest is seeds."""
    return SyntheticGrid(
        problems_per_batch=(4, 8, 16, 32, 64),
        rollouts_per_problem=tuple(2**power for power in range(1, 11)),
        seeds=tuple(range(max(1, cells // 50))),
        compute_rollouts=2**26,
        evaluation=EvaluationSpec(first_mark=2**18, marks_per_doubling=25),
        validation_problems=problems or 32,
    )


def write_run(tables: GridTables, folder: Path, per_problem: bool, rng: np.random.Generator) -> None:
    """Write tables as a run folder does: ``cells/<id>/history.jsonl`` and ``state.json``, ``base.json``."""
    extra = pd.DataFrame(rng.random((len(tables.history), len(_COLUMNS))), columns=list(_COLUMNS))
    frame = pd.concat([tables.history, extra], axis=1)
    base = dict(tables.base or {})
    if not per_problem:
        frame = frame.drop(columns="eval_right")
        base.pop("eval_right", None)
    for cell, rows in frame.groupby("cell"):
        target = folder / "cells" / str(cell)
        target.mkdir(parents=True)
        records = rows.to_dict(orient="records")
        lines = (json.dumps(record, default=lambda counts: counts.tolist()) for record in records)
        (target / "history.jsonl").write_text("".join(line + "\n" for line in lines))
        (target / "state.json").write_text(json.dumps({"version": 1, "cell": cell, "state": "finished"}))
    (folder / "base.json").write_text(json.dumps(base))


def measure(cells: int, problems: int, seed: int) -> dict[str, Any]:
    """Everything that the command prints, as JSON values."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory(prefix="isocompute-load-") as name:
        folder = Path(name)
        write_run(synthetic_grid(design(cells, problems), rng), folder, problems > 0, rng)
        megabytes = sum(path.stat().st_size for path in folder.rglob("*.json*")) / 1e6
        began = time.perf_counter()
        tables = read_run(folder)
        loaded = time.perf_counter()
        analyse(tables, FitOptions(replicates=0))
        fitted = time.perf_counter()
    return {
        "cells": tables.history["cell"].nunique(),
        "rows": len(tables.history),
        "columns": len(tables.history.columns),
        "problems": problems,
        "megabytes": megabytes,
        "complaints": sum(len(found) for found in tables.complaints.values()),
        "load_seconds": loaded - began,
        "fit_seconds": fitted - loaded,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load_many", description=__doc__)
    parser.add_argument("--cells", type=command.count, default=5000)
    parser.add_argument(
        "--problems", type=command.natural, default=0, help="per-problem scores in each row; 0: none"
    )
    parser.add_argument("--seed", type=command.natural, default=0)
    parser.add_argument("--format", choices=["table", "json"], default="table")
    options = parser.parse_args()
    result = measure(options.cells, options.problems, options.seed)
    if options.format == "json":
        print(json.dumps(result, indent=1))
        return
    print(
        f"{result['cells']:,} cells, {result['rows']:,} rows of {result['columns']} columns, {result['megabytes']:,.0f} MB, "
        f"{result['complaints']} complaints\n"
        f"load {result['load_seconds']:.1f} s, fit {result['fit_seconds']:.1f} s, "
        f"together {result['load_seconds'] + result['fit_seconds']:.1f} s"
    )


if __name__ == "__main__":
    command.run(main)
