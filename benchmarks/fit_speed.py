"""The whole analysis against the same fits in a loop over ``scipy.optimize.curve_fit``, side by side.

``python -m benchmarks.fit_speed`` makes a synthetic sweep of the paper's Easy size (39 cells with 201 marks each, 300
problems with 4 answers), runs the analysis with intervals on everything, then times ``curve_fit`` on a random sample of the
very fits that the analysis made for its replicates (the same points, weights and bounds), one after the other on one core as
scripts do. The sample's time per fit is scaled by the number of fits; the output says so. On the sampled fits both
optima are compared too.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.findings import Analysis, analyse
from analysis.fitting.curves import STEEPNESS
from analysis.fitting.landscape import best_by_n
from analysis.fitting.law import K_BOUNDS, LARGEST_LOG2_N
from analysis.fitting.logistic import Limits, fit_logistics
from analysis.options import FitOptions
from analysis.synthetic import PAPER_LAW, SyntheticGrid, synthetic_grid
from analysis.tables import GridTables
from benchmarks import command
from benchmarks.scipy_loop import Array, fit_bounded, fit_unbounded
from grids.spec import EvaluationSpec

# Two hundred marks that are different steps of every cell need many steps of the largest batch, so compute is
# scaled up: the paper's law and the curves lie 1.4 decades later than in the paper.
_LATER = 1.4
SWEEP = SyntheticGrid(
    law=replace(PAPER_LAW, log10_midpoint=PAPER_LAW.log10_midpoint + _LATER),
    first_midpoint=10.0 ** (5.0 + _LATER),
    seeds=(0,),
    compute_rollouts=2**27,
    evaluation=EvaluationSpec(first_mark=2**22, marks_per_doubling=40),
)
WORSE = 1e-3
"""By which share a weighted sum of squares must exceed the other's to count as a worse optimum."""


@dataclass(frozen=True)
class Problem:
    """One fit."""

    x: Array
    y: Array
    weights: Array
    limits: Limits


class Curves:
    """The replicates of the reward curves of a sweep with one seed, drawn at random."""

    def __init__(self, tables: GridTables, replicates: int) -> None:
        assert tables.base is not None
        self.base = np.array(tables.base["eval_right"]) / 4.0
        self.cells = [
            (
                np.append(np.log10(rows["compute_rollouts"].to_numpy(dtype=np.float64)), -np.inf),
                np.vstack([np.stack(rows["eval_right"].to_list()) / 4.0, self.base]),
            )
            for _cell, rows in tables.history.groupby("cell")
        ]
        self.count = len(self.cells) * replicates

    def draw(self, rng: np.random.Generator) -> Problem:
        x, scores = self.cells[rng.integers(len(self.cells))]
        problems = scores.shape[1]
        level = scores.mean(axis=1)
        inside = x[:-1]
        decade = float(np.log(10.0))
        return Problem(
            x=x,
            y=scores @ (rng.multinomial(problems, np.full(problems, 1.0 / problems)) / problems),
            weights=1.0 / np.maximum(level * (1.0 - level), 0.02),
            limits=Limits(
                floor=0.0,
                cap=1.0,
                middle=(float(inside.min()) - 2.0, float(inside.max()) + 1.0),
                slope=(STEEPNESS[0] * decade, STEEPNESS[1] * decade),
            ),
        )


class Laws:
    """The replicates of the law in log10 C, over the frontiers of an analysis, drawn at random."""

    def __init__(self, analysis: Analysis, replicates: int) -> None:
        self.frontiers = []
        for frontier in analysis.frontiers:
            best = best_by_n(frontier.land)
            n_star = best.log2_n_star_replicates
            if frontier.law.intervals and n_star is not None:
                x = np.log10(frontier.land.compute[best.contested])
                self.frontiers.append((x, n_star[best.contested]))
        in_steps = sum(bool(f.law_in_steps and f.law_in_steps.intervals) for f in analysis.frontiers)
        self.count = (len(self.frontiers) + in_steps) * replicates

    def draw(self, rng: np.random.Generator) -> Problem:
        x, n_star = self.frontiers[rng.integers(len(self.frontiers))]
        return Problem(
            x=x,
            y=n_star[:, rng.integers(n_star.shape[1])],
            weights=np.ones(len(x)),
            limits=Limits(0.0, LARGEST_LOG2_N, (float(x.min()) - 1.0, float(x.max()) + 1.0), K_BOUNDS),
        )


@dataclass(frozen=True)
class LoopTime:
    """Seconds of one fit in each round, and the weighted sums of squares of curve_fit and of this package."""

    seconds: list[float]
    theirs: Array
    ours: Array

    @property
    def failed(self) -> float:
        return float(np.isinf(self.theirs).mean())

    @property
    def worse(self) -> float:
        """Share of all fits that ended, but in a worse optimum than this package's."""
        return float((np.isfinite(self.theirs) & _exceeds(self.theirs, self.ours)).mean())

    @property
    def better(self) -> float:
        return float(_exceeds(self.ours, self.theirs).mean())


def time_loop(
    draw: Callable[[np.random.Generator], Problem],
    fit: Callable[[Problem], float],
    starts: int,
    seconds: float,
    rounds: int,
    rng: np.random.Generator,
) -> LoopTime:
    """Fit random problems for ``seconds`` in each round; only the fits are timed. starts: of this package's fit.

    Processor time, which other work on the machine does not lengthen: the loop at its best.
    """
    means, theirs, ours = [], [], []
    for _ in range(rounds):
        spent, fits = 0.0, 0
        while spent < seconds:
            problem = draw(rng)
            began = time.thread_time()
            theirs.append(fit(problem))
            spent += time.thread_time() - began
            fits += 1
            columns = problem.y[:, None], problem.weights[:, None]
            ours.append(float(fit_logistics(problem.x, *columns, problem.limits, starts=starts).sse[0]))
        means.append(spent / fits)
    return LoopTime(means, np.array(theirs), np.array(ours))


def _exceeds(a: Array, b: Array) -> NDArray[np.bool_]:
    return a > b * (1.0 + WORSE) + 1e-9


def measure(replicates: int, seconds: float, rounds: int, seed: int) -> dict[str, Any]:
    """Everything that the command prints, as JSON values."""
    rng = np.random.default_rng(seed)
    tables = synthetic_grid(SWEEP, rng)
    analyse(tables, FitOptions(replicates=2))  # first calls load libraries
    began, processor = time.perf_counter(), time.process_time()
    analysis = analyse(tables, FitOptions(replicates=replicates))
    ours, processor = time.perf_counter() - began, time.process_time() - processor

    curves, laws = Curves(tables, replicates), Laws(analysis, replicates)
    loops = {}
    for name, fit in (("bounded", _bounded), ("unbounded", _unbounded)):
        of_curves = time_loop(curves.draw, fit, 1, seconds, rounds, rng)
        of_laws = time_loop(laws.draw, fit, 2, seconds / 4, rounds, rng)
        totals = [
            c * curves.count + w * laws.count for c, w in zip(of_curves.seconds, of_laws.seconds, strict=True)
        ]
        loops[name] = {
            "seconds": float(np.median(totals)),
            "seconds_of_each_round": totals,
            "ratio": float(np.median(totals)) / ours,
            "curves": _summary(of_curves, curves.count),
            "laws": _summary(of_laws, laws.count),
        }
    return {
        "cells": len(tables.states),
        "rows": len(tables.history),
        "replicates": replicates,
        "cores": os.cpu_count(),
        "analysis_seconds": ours,
        "analysis_processor_seconds": processor,
        "curve_fit": loops,
    }


def _bounded(problem: Problem) -> float:
    return fit_bounded(problem.x, problem.y, problem.weights, problem.limits)


def _unbounded(problem: Problem) -> float:
    return fit_unbounded(problem.x, problem.y, problem.weights)


def _summary(loop: LoopTime, count: int) -> dict[str, Any]:
    return {
        "fits": count,
        "sampled": len(loop.theirs),
        "milliseconds_a_fit": 1e3 * float(np.median(loop.seconds)),
        "failed": loop.failed,
        "worse_optimum": loop.worse,
        "better_optimum": loop.better,
    }


_NAMES = {
    "bounded": "curve_fit, the same bounds (trust region)",
    "unbounded": "curve_fit without bounds (MINPACK), for comparison: its parameters may mean nothing",
}


def _text(result: dict[str, Any]) -> str:
    lines = [
        f"sweep: {result['cells']} cells, {result['rows']:,} evaluations, {result['replicates']:,} bootstrap replicates",
        f"this package, the whole analysis with intervals, {result['cores']} cores: {result['analysis_seconds']:.1f} s "
        f"({result['analysis_processor_seconds']:.1f} s of processor time)",
    ]
    for name, loop in result["curve_fit"].items():
        rounds = ", ".join(f"{value:.0f}" for value in loop["seconds_of_each_round"])
        lines += [
            "",
            f"{_NAMES[name]}, one core: {loop['seconds']:.0f} s of processor time for the replicates' fits alone, "
            f"scaled up from a sample (rounds: {rounds})",
            f"  ratio: {loop['ratio']:.1f}",
        ]
        for kind in ("curves", "laws"):
            part = loop[kind]
            lines.append(
                f"  {kind}: {part['fits']:,} fits, {part['sampled']:,} of them timed, {part['milliseconds_a_fit']:.2f} ms each; "
                f"failed {part['failed']:.2%}, worse optimum than ours {part['worse_optimum']:.2%}, "
                f"better {part['better_optimum']:.2%}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit_speed", description=__doc__)
    parser.add_argument(
        "--replicates", type=command.count, default=1000, help="bootstrap replicates of the analysis"
    )
    parser.add_argument("--seconds", type=command.seconds, default=20.0, help="of curve_fit in each round")
    parser.add_argument("--rounds", type=command.count, default=3)
    parser.add_argument("--seed", type=command.natural, default=0)
    parser.add_argument("--format", choices=["table", "json"], default="table")
    options = parser.parse_args()
    result = measure(options.replicates, options.seconds, options.rounds, options.seed)
    print(json.dumps(result, indent=1) if options.format == "json" else _text(result))


if __name__ == "__main__":
    command.run(main)
