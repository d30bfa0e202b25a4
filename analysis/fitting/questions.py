"""The three questions of allocation: what is fixed, what is free, and the frontier and law of each.

1. fixed B_p: n against M;  2. fixed B: n against B_p, at each number of steps M = C / B;  3. all three free.
Source: "IsoCompute Playbook" (arXiv 2603.12151).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from analysis.fitting.curves import AllocationCurve
from analysis.fitting.frontier import Crossover, FrontierPoint, crossovers, frontier_points
from analysis.fitting.landscape import BestN, Landscape, best_by_n
from analysis.fitting.law import Axis
from analysis.fitting.logistic import Array
from analysis.fitting.observations import Allocation, Observations
from analysis.fitting.threads import in_threads
from analysis.fitting.verdict import LawVerdict, NStar, judge_law


@dataclass(frozen=True)
class Question:
    """What the allocation is optimised over."""

    fixed: Literal["nothing", "problems_per_batch", "batch_rollouts"]
    value: int | None = None
    """Of what is fixed."""

    @property
    def title(self) -> str:
        """In words, for people."""
        if self.fixed == "nothing":
            return "n, B_p and M free"
        name = {"problems_per_batch": "B_p", "batch_rollouts": "B"}[self.fixed]
        return f"{name} = {self.value}"


@dataclass(frozen=True)
class Frontier:
    """The answer to one question."""

    question: Question
    land: Landscape
    """The allocations that take part."""
    points: list[FrontierPoint]
    changes: list[Crossover]
    law: LawVerdict
    """n* in log10 C; where B is fixed this is the law in log10 M, moved by log10 B."""
    law_in_steps: LawVerdict | None
    """Where B is fixed: the published form, n* in M on a linear axis. The law of B_p* = B / n* is its mirror image: the same M0
    and L, -k, and a floor of B / plateau. Elsewhere None."""


def questions(curves: Sequence[AllocationCurve], in_rollouts: bool) -> list[Question]:
    """The questions that a grid can ask: what is fixed must leave two values of n. With one B_p alone the first question is the
    third, and is not asked twice. Fixed B needs compute in rollouts, where M = C / B."""
    found = [Question("nothing")]
    problems = sorted({curve.allocation.problems_per_batch for curve in curves})
    batches = sorted({curve.allocation.batch_rollouts for curve in curves})
    if len(problems) > 1:
        found += [Question("problems_per_batch", value) for value in problems]
    if in_rollouts:
        found += [Question("batch_rollouts", value) for value in batches]
    return [question for question in found if _asks(curves, question)]


def _asks(curves: Sequence[AllocationCurve], question: Question) -> bool:
    takes_part = {curve.allocation.rollouts_per_problem for curve in curves if _fits(curve, question)}
    return question.fixed == "nothing" or len(takes_part) > 1


def _fits(curve: AllocationCurve, question: Question) -> bool:
    return question.fixed == "nothing" or getattr(curve.allocation, question.fixed) == question.value


def answer(
    asked: Sequence[Question], land: Landscape, groups: Sequence[Observations], confidence: float
) -> list[Frontier]:
    """The frontier and the law of each question, in order.

    groups: the observations behind the landscape's curves.
    """
    return in_threads(lambda question: _answer(question, land, groups, confidence), asked)


def _answer(
    question: Question, land: Landscape, groups: Sequence[Observations], confidence: float
) -> Frontier:
    part = land.only([row for row, curve in enumerate(land.curves) if _fits(curve, question)])
    best = best_by_n(part)
    points = frontier_points(part, best, confidence)
    in_steps = None
    if question.fixed == "batch_rollouts" and question.value:
        stars = n_star(part, best, points, groups, confidence, "linear", question.value)
        in_steps = judge_law(stars, confidence)
    return Frontier(
        question=question,
        land=part,
        points=points,
        changes=crossovers(part, points, confidence),
        law=judge_law(n_star(part, best, points, groups, confidence), confidence),
        law_in_steps=in_steps,
    )


def n_star(
    land: Landscape,
    best: BestN,
    points: Sequence[FrontierPoint],
    groups: Sequence[Observations],
    confidence: float,
    axis: Axis = "log10",
    batch: int = 1,
) -> NStar:
    """What the law is fitted to: n* where two or more n were compared.

    best: ``best_by_n`` of the landscape. points: its frontier. groups: observations, of these allocations and perhaps of
    others. batch: what turns compute into the axis' unit (B: steps).
    """
    grid_n = tuple(sorted({allocation.rollouts_per_problem for allocation in land.allocations}))
    contested = [point for point in points if point.is_contested]
    if not contested:
        return NStar(np.empty(0), np.empty(0), None, grid_n, 0, None, None, axis)
    compute = land.compute[best.contested]
    replicates = best.log2_n_star_replicates
    value = compute / batch
    return NStar(
        x=np.log10(value) if axis == "log10" else value,
        log2_n=best.log2_n_star[best.contested],
        replicates=None if replicates is None else replicates[best.contested],
        grid_n=grid_n,
        evaluations=_evaluations(land, groups, compute),
        unrejected_n=constant_n(best, confidence),
        edge=_edge(land, contested),
        axis=axis,
    )


def constant_n(best: BestN, confidence: float) -> tuple[int, ...] | None:
    """The values of n of which one alone may be the best at every compute; None without replicates.

    Such an n is rejected where it falls behind the leader, anywhere, by more than an n does by chance if all are equally good: the
    largest of its standardised gaps over all computes is judged against the same in replicates centred on no difference. So
    looking at many computes and taking the leader after the fact are allowed for.
    """
    if best.replicates is None:
        return None
    compared = best.contested & best.observed.any(axis=0)
    seen = best.observed[:, compared]
    reward = np.where(seen, best.reward[:, compared], -1e9)  # what was not observed never leads
    drawn = np.where(seen[:, :, None], best.replicates[:, compared], 0.0)
    noise = np.where(seen[:, :, None], drawn - drawn.mean(axis=-1, keepdims=True), -1e9)
    behind, by_chance = reward.max(axis=0) - reward, noise.max(axis=0) - noise
    found = []
    for row, n in enumerate(best.values):
        here = seen[row]
        scale = np.maximum(by_chance[row, here].std(axis=1), 1e-9)
        largest = (by_chance[row, here] / scale[:, None]).max(axis=0, initial=0.0)
        if (behind[row, here] / scale).max(initial=0.0) <= np.quantile(largest, confidence):
            found.append(n)
    return tuple(found)


def _evaluations(land: Landscape, groups: Sequence[Observations], compute: Array) -> int:
    """At how many computes in a range the landscape's allocations were evaluated."""
    own = set(land.allocations)
    evaluated = np.concatenate([group.compute for group in groups if group.allocation in own])
    inside = evaluated[(evaluated >= compute[0]) & (evaluated <= compute[-1])]
    # Marks that differ by less than a step of the grid are one mark, rounded up by batches of different sizes.
    return len(np.unique(np.searchsorted(compute, inside)))


def _edge(land: Landscape, contested: Sequence[FrontierPoint]) -> Allocation | None:
    """The leading allocation with the largest n*, if that n is the largest that its B_p was tried with (or, where B is fixed, that
    any was); None when a larger n was tried and did not lead."""
    largest = max(point.rollouts_per_problem for point in contested)
    leaders = {point.allocation for point in contested if point.rollouts_per_problem == largest}
    one_batch = len({allocation.batch_rollouts for allocation in land.allocations}) == 1
    for leader in leaders:
        rivals = [
            a for a in land.allocations if one_batch or a.problems_per_batch == leader.problems_per_batch
        ]
        if any(rival.rollouts_per_problem > leader.rollouts_per_problem for rival in rivals):
            return None
    return min(leaders)
