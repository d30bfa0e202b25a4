"""A grid of the paper's shape on thousands of accelerators, in virtual time: makespan over its lower bound, cost of decisions.

    python -m benchmarks.simulate --cells 10000 --samplers 1000 --groups 500
    python -m benchmarks.simulate --cells 10000 --samplers 1000 --groups 500 --failures-per-hour 0.01

The decisions are those of a real run; phases take modelled times: ``LAWS``, each call drawn with ``--noise``. Ends with exit code
1 when a figure misses what is asked for: 1.05 without failures, 1 ms for a decision of each kind in the mean, all cells
finished.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import grids
from benchmarks import command
from grids.expansion import Cell, expand
from grids.loading import load_grid
from grids.spec import GridSpec
from orchestrator.scheduling.costs import CostModel
from orchestrator.simulation.bound import makespan_bound
from orchestrator.simulation.conditions import Conditions, RandomLosses
from orchestrator.simulation.simulator import simulate
from orchestrator.store.phase_log import PhaseKind

GRID = Path(grids.__file__).parent / "paper_easy_qwen2.5_7b.yaml"
LAWS: dict[PhaseKind, tuple[float, float]] = {
    PhaseKind.SAMPLING: (40.0, 0.1),
    PhaseKind.GRADING: (0.05, 2e-5),
    PhaseKind.LEARNING: (5.0, 0.045),
    PhaseKind.EVALUATION: (40.0, 0.1),
    PhaseKind.EVALUATION_GRADING: (0.05, 2e-5),
    PhaseKind.TAKING_UP: (30.0, 0.0),
    PhaseKind.COMMIT: (30.0, 0.0),
}
"""(seconds of a call, seconds of each of its rollouts): supposed for a model of 7B parameters, answers of 1,500 tokens, engines of
one GPU, groups of four; nothing here is measured."""
EVALUATION = ((300, 4), (64, 8))
"""Validation and train probe of the paper's grid: (problems, samples)."""
LARGEST_RATIO = 1.05
LARGEST_MEAN_MS = 1.0
"""Of each kind of decision."""


@dataclass
class LawTimes:
    """Seconds of a law times a lognormal of mean 1."""

    laws: Mapping[PhaseKind, tuple[float, float]]
    noise: float = 0.0
    """Standard deviation of the logarithm."""
    draws: random.Random = field(default_factory=random.Random)

    def seconds(self, kind: PhaseKind, sequences: int) -> float:
        """Of one call."""
        constant, of_sequence = self.laws[kind]
        seconds = constant + of_sequence * sequences
        if self.noise:
            seconds *= self.draws.lognormvariate(-self.noise * self.noise / 2, self.noise)
        return seconds


def paper_grid(
    cells: int, compute_rollouts: int, max_batch: int, pools: Mapping[str, int]
) -> tuple[GridSpec, list[Cell]]:
    """The paper's axes, with as many seeds as so many cells take, in the order of their seeds.

    Args:
        cells: how many.
        compute_rollouts: of each cell.
        max_batch: the largest batch.
        pools: how many ``samplers``, ``groups`` and ``slots`` of a group.
    """
    spec = load_grid(GRID)
    limits = {"max_batch_rollouts": max_batch, "compute_rollouts": compute_rollouts}
    axes = spec.grid.model_copy(update=limits)
    of_seed = len(expand(spec.model_copy(update={"grid": axes})))
    axes = axes.model_copy(update={"seeds": list(range(-(-cells // of_seed)))})
    evaluation = spec.evaluation.model_copy(update={"first_mark": max(1, compute_rollouts // 4)})
    samplers = spec.pools.samplers.model_copy(update={"count": pools["samplers"]})
    learners = spec.pools.learners.model_copy(update={"count": pools["groups"], "slots": pools["slots"]})
    spec = spec.model_copy(
        update={
            "grid": axes,
            "evaluation": evaluation,
            "pools": spec.pools.model_copy(update={"samplers": samplers, "learners": learners}),
        }
    )
    by_seed = sorted(expand(spec), key=lambda cell: cell.seed)
    return spec, by_seed[:cells]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures of one simulation."""
    pools = {"samplers": arguments.samplers, "groups": arguments.groups, "slots": arguments.slots}
    spec, cells = paper_grid(arguments.cells, arguments.compute, arguments.max_batch, pools)
    laws = dict(LAWS)
    steps = [cell.update_steps for cell in cells]
    bound = makespan_bound(spec, cells, Conditions(LawTimes(laws), EVALUATION))
    conditions = Conditions(
        LawTimes(laws, arguments.noise, random.Random(arguments.seed)),
        EVALUATION,
        lifetimes=RandomLosses(arguments.failures_per_hour, arguments.seed),
        restart_seconds=arguments.restart_seconds,
    )
    started = perf_counter()
    outcome = simulate(spec, cells, conditions, CostModel())
    real = perf_counter() - started
    return {
        "cells": len(cells),
        "rollouts_of_a_cell": arguments.compute,
        "largest_batch": max(cell.batch_rollouts for cell in cells),
        "steps_of_a_cell": [min(steps), max(steps)],
        "update_steps": sum(cell.update_steps for cell in cells),
        "phases": outcome.phases,
        **pools,
        "failures_per_hour": arguments.failures_per_hour,
        "makespan_hours": outcome.wall_seconds / 3600,
        "bound_hours": {name: value / 3600 for name, value in bound._asdict().items()},
        "ratio": outcome.wall_seconds / bound.seconds,
        "busy_shares": dict(outcome.busy_shares),
        "idle_share": outcome.idle_share,
        "finished": outcome.finished,
        "failed": outcome.failed,
        "attempts": outcome.attempts,
        "lost_members": dict(outcome.losses),
        "lost_accelerator_hours": outcome.lost_accelerator_seconds / 3600,
        "accelerator_hours": outcome.held_accelerator_seconds / 3600,
        "decisions": {
            kind.value: decision_figures(seconds) for kind, seconds in outcome.decisions.items() if seconds
        },
        "real_seconds": real,
        "real_ms_a_phase": 1000 * real / outcome.phases,
    }


def decision_figures(seconds: Sequence[float]) -> dict[str, float]:
    """How many decisions of a kind there were, and how many milliseconds they took."""
    ms = sorted(1000 * one for one in seconds)
    return {
        "number": len(ms),
        "mean_ms": statistics.fmean(ms),
        "p99_ms": ms[int(0.99 * len(ms))],
        "longest_ms": ms[-1],
    }


def faults_of(figures: Mapping[str, Any]) -> list[str]:
    """What misses what is asked for."""
    faults = []
    if figures["finished"] != figures["cells"]:
        faults.append(f"{figures['cells'] - figures['finished']} cells have not finished")
    if not figures["failures_per_hour"] and figures["ratio"] > LARGEST_RATIO:
        faults.append(f"the makespan is {figures['ratio']:.3f} of the bound, more than {LARGEST_RATIO}")
    for kind, one in figures["decisions"].items():
        if one["mean_ms"] > LARGEST_MEAN_MS:
            faults.append(
                f"to decide {kind} takes {one['mean_ms']:.3f} ms in the mean, more than {LARGEST_MEAN_MS}"
            )
    return faults


def as_text(figures: Mapping[str, Any]) -> str:
    """The figures for people."""
    hours, shares = figures["bound_hours"], figures["busy_shares"]
    fewest, most = figures["steps_of_a_cell"]
    lines = [
        f"{figures['cells']:,} cells of {figures['rollouts_of_a_cell']:,} rollouts in {fewest:,} to {most:,} steps "
        f"({figures['update_steps']:,} in all), batches up to {figures['largest_batch']:,}, on "
        f"{figures['samplers']:,} engines and {figures['groups']:,} learner groups with {figures['slots']} slots each",
        f"makespan {figures['makespan_hours']:.2f} h; lower bound {max(hours.values()):.2f} h, the largest of "
        + ", ".join(f"{name} {value:.2f}" for name, value in hours.items()),
        f"makespan over lower bound: {figures['ratio']:.3f}",
        "busy: " + ", ".join(f"{pool}s {shares[pool]:.1%}" for pool in ("sampler", "learner", "grader")),
        "decisions: number; mean, 99th percentile and longest in ms",
        *(
            f"  {kind:<28} {one['number']:>10,} {one['mean_ms']:>8.4f} {one['p99_ms']:>8.4f} {one['longest_ms']:>8.2f}"
            for kind, one in figures["decisions"].items()
        ),
        f"simulated {figures['phases']:,} phases in {figures['real_seconds']:.0f} s, {figures['real_ms_a_phase']:.3f} ms each, "
        "everything included",
        f"finished {figures['finished']:,}, failed {figures['failed']:,}, attempts {figures['attempts']:,}",
    ]
    if figures["failures_per_hour"]:
        lost = ", ".join(f"{count:,} {pool}s" for pool, count in sorted(figures["lost_members"].items()))
        lines.append(
            f"{figures['failures_per_hour']:.2%} of processes lost per hour: {lost}; lost work "
            f"{figures['lost_accelerator_hours']:,.0f} of {figures['accelerator_hours']:,.0f} accelerator-hours "
            f"({figures['lost_accelerator_hours'] / figures['accelerator_hours']:.2%})"
        )
    return "\n".join(lines)


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cells", type=command.count, default=10_000)
    parser.add_argument("--samplers", type=command.count, default=1000)
    parser.add_argument("--groups", type=command.count, default=500)
    parser.add_argument("--slots", type=command.count, default=4, help="cells that a group holds")
    parser.add_argument("--compute", type=command.count, default=2**16, help="rollouts of each cell")
    parser.add_argument("--max-batch", type=command.count, default=2**12, help="largest batch, in rollouts")
    parser.add_argument(
        "--noise", type=command.amount, default=0.2, help="spread of phase times (of the logarithm)"
    )
    parser.add_argument(
        "--failures-per-hour", type=command.share, default=0.0, help="share of processes lost"
    )
    parser.add_argument(
        "--restart-seconds", type=command.seconds, default=120.0, help="until a lost one serves again"
    )
    parser.add_argument("--seed", type=command.natural, default=0)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    return parser.parse_args(arguments)


def main() -> int:
    """Print the figures; 1 when one misses what is asked for."""
    arguments = options()
    figures = measure(arguments)
    faults = faults_of(figures)
    print(
        json.dumps(figures | {"faults": faults}, indent=1) if arguments.format == "json" else as_text(figures)
    )
    for fault in faults:
        print(f"fault: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    command.run(main)
