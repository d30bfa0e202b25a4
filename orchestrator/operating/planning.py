"""What a grid would do, before anything is spent."""

import json
from math import prod
from pathlib import Path
from typing import Any

from grids.expansion import Cell, axis_values, evaluated_steps, expand
from grids.spec import GridSpec
from orchestrator.pools.resources import needed_resources

BYTES_PER_PARAMETER = 12
"""Of a checkpoint: weights and two moments in float32."""
NO_MEASURE = "predicted: no measure yet of what phases take; --like RUN takes an earlier run's, --canary trains a few steps"


def plan_rows(spec: GridSpec) -> list[dict[str, Any]]:
    """One row for each cell, in the grid's order."""
    return [
        {
            "cell": cell.id,
            "B_p": cell.problems_per_batch,
            "n": cell.rollouts_per_problem,
            "seed": cell.seed,
            "B": cell.batch_rollouts,
            "M": cell.update_steps,
            "C": cell.compute_rollouts,
            "learning_rate": cell.learning_rate,
            "evaluations": len(evaluated_steps(cell, spec.evaluation)),
        }
        for cell in expand(spec)
    ]


def summary(spec: GridSpec) -> str:
    """Totals of a grid in one line."""
    cells = expand(spec)
    training = sum(cell.compute_rollouts for cell in cells)
    evaluations = sum(len(evaluated_steps(cell, spec.evaluation)) for cell in cells)
    needed = needed_resources(spec)
    return (
        f"{len(cells)} cells, {training:,} training rollouts, {sum(cell.update_steps for cell in cells):,} update steps, "
        f"{evaluations:,} evaluations; pools need {needed['CPU']:,} CPUs and {needed['GPU']:,} GPUs"
    )


def checkpoint_bytes(spec: GridSpec) -> int | None:
    """Disk that checkpoints of all cells take at most; None where the base model is not on this machine."""
    parameters = _parameters(Path(spec.model.path))
    if parameters is None:
        return None
    return len(expand(spec)) * spec.commits.keep * parameters * BYTES_PER_PARAMETER


def _parameters(model: Path) -> int | None:
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else []
    if not files:
        return None
    return sum(prod(shape) for path in files for shape in _shapes(path))


def _shapes(path: Path) -> list[list[int]]:
    """Of all tensors in a safetensors file: 8 bytes tell the length of a header in JSON."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return [entry["shape"] for name, entry in header.items() if name != "__metadata__"]


def disk_line(spec: GridSpec) -> str:
    """For people: what the checkpoints take."""
    bytes_ = checkpoint_bytes(spec)
    if bytes_ is None:
        return "disk: not known, the base model is not on this machine"
    return f"disk: checkpoints take {bytes_ / 1e9:,.3g} GB at most, {spec.commits.keep} of each cell"


def warnings(spec: GridSpec) -> list[str]:
    """What a run of this grid would meet: rounding, assumptions, and files that are not on this machine."""
    cells = expand(spec)
    found = [f"assumption: {text}" for text in spec.assumptions]
    found += _rounding(spec, cells)
    combinations = len(axis_values(spec.grid.problems_per_batch)) * len(
        axis_values(spec.grid.rollouts_per_problem)
    )
    left_out = combinations - len(cells) // len(spec.grid.seeds)
    if left_out:
        found.append(
            f"grid.max_batch_rollouts: {left_out} of {combinations} combinations of B_p and n exceed "
            f"B_max = {spec.grid.max_batch_rollouts:,} and are left out"
        )
    for field, path in (
        ("problems.train", spec.problems.train),
        ("problems.validation", spec.problems.validation),
    ):
        if not Path(path).is_file():
            found.append(
                f"{field}: {path} is not on this machine; 'run' needs it on storage that all nodes share"
            )
    if not Path(spec.model.path).is_dir():
        found.append(
            f"model.path: {spec.model.path} is no folder on this machine; 'run' loads it from the Hugging Face hub or its cache"
        )
    return found


def _rounding(spec: GridSpec, cells: list[Cell]) -> list[str]:
    found = []
    rounded = [cell for cell in cells if cell.compute_rollouts < spec.grid.compute_rollouts]
    if rounded:
        worst = min(rounded, key=lambda cell: cell.compute_rollouts)
        found.append(
            f"grid.compute_rollouts: {spec.grid.compute_rollouts:,} is no multiple of the batch in {len(rounded)} cells, "
            f"rounded down; most in {worst.id}, to {worst.compute_rollouts:,}"
        )
    early = [
        cell for cell in cells if (evaluated_steps(cell, spec.evaluation) or [0])[-1] < cell.update_steps
    ]
    if early:
        found.append(
            f"evaluation: the last mark falls before the end of {len(early)} cells, whose last steps are not evaluated; "
            f"choose grid.compute_rollouts on a mark (first_mark times a power of two)"
        )
    return found
