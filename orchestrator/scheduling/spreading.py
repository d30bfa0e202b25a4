"""In which parts a batch is sampled, and in which slices a part is graded: rules of sizes, for real and for simulated grids."""

from itertools import pairwise
from math import ceil

GRADED_AT_ONCE = 512
"""Rollouts that are graded together at least, while the engine goes on with others: fewer would cost more than they save."""


def parts_of_batch(groups: int, rollouts_per_problem: int, engines: int, full_engine: int) -> int:
    """In how many parts a batch is sampled: one for each engine, as long as every part fills its engine.

    Args:
        groups: problems of the batch.
        rollouts_per_problem: of each.
        engines: that are free.
        full_engine: sequences that an engine works on at once.
    """
    filled = groups * rollouts_per_problem // full_engine
    return max(1, min(engines, filled, groups))


def slices_of_part(groups: int, rollouts_per_problem: int) -> int:
    """In how many slices a part of so many groups is graded, each as soon as it is sampled."""
    return max(1, groups // _groups_at_once(rollouts_per_problem))


def split(groups: int, pieces: int) -> list[range]:
    """Positions of a batch or part in so many pieces of nearly equal size, in order; none is larger than the last one."""
    bounds = [groups * number // pieces for number in range(pieces + 1)]
    return [range(start, end) for start, end in pairwise(bounds)]


def largest_part(groups: int, rollouts_per_problem: int, engines: int, full_engine: int) -> int:
    """Groups that one engine samples at least, however many of the ``engines`` are free. Arguments as ``parts_of_batch``."""
    return ceil(groups / parts_of_batch(groups, rollouts_per_problem, engines, full_engine))


def graded_last(groups: int, rollouts_per_problem: int) -> int:
    """Groups that are graded at least once a part of so many groups, or a larger one, has been sampled.

    Not its own last slice: where fewer engines are free, parts are larger, and may be cut into smaller slices.
    """
    return min(groups, _groups_at_once(rollouts_per_problem))


def _groups_at_once(rollouts_per_problem: int) -> int:
    return ceil(GRADED_AT_ONCE / rollouts_per_problem)
