"""What a grid would do, before anything is spent."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grids.expansion import Cell, axis_values, evaluated_steps, expand
from grids.spec import GridSpec

Resources = dict[str, float]
"""Amounts of ``CPU`` and ``GPU``."""


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


def needed_resources(spec: GridSpec) -> Resources:
    """What all pools of a grid take together."""
    samplers, learners = spec.pools.samplers, spec.pools.learners
    ranks = learners.count * learners.ranks
    return {
        "CPU": samplers.count * samplers.cpus + ranks * learners.cpus + spec.verifier.workers,
        "GPU": samplers.count * samplers.gpus + ranks * learners.gpus,
    }


def resource_faults(spec: GridSpec, nodes: Sequence[Resources]) -> list[str]:
    """Why a grid does not fit on a cluster of these nodes; empty when it fits.

    Both count: all nodes together, and the largest single one, since an actor that no node can hold would wait for ever.
    """
    faults = []
    for resource, needed in needed_resources(spec).items():
        there = sum(node.get(resource, 0) for node in nodes)
        if needed > there:
            faults.append(
                f"pools: the grid needs {needed:g} {resource}s, the cluster has {there:g}; lower count, ranks, cpus or gpus "
                f"under pools, or add nodes"
            )
    for field, single in (
        ("pools.samplers", {"CPU": spec.pools.samplers.cpus, "GPU": spec.pools.samplers.gpus}),
        ("pools.learners", {"CPU": spec.pools.learners.cpus, "GPU": spec.pools.learners.gpus}),
        ("verifier.workers", {"CPU": spec.verifier.workers}),
    ):
        for resource, needed in single.items():
            largest = max((node.get(resource, 0) for node in nodes), default=0)
            if needed > largest:
                faults.append(
                    f"{field}: one takes {needed} {resource}s, the largest node has {largest:g}; lower it"
                )
    return faults
