"""Finding the problems that make a batch fail."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from orchestrator.failures.isolation import isolate

Trial = Callable[[Sequence[int]], Awaitable[bool]]


def trial_of(poisons: set[int], together: set[int] | None = None) -> tuple[list[list[int]], Trial]:
    """A batch that fails when it holds one of ``poisons``, or all of ``together``; and what was tried."""
    tried: list[list[int]] = []

    async def fails(positions: Sequence[int]) -> bool:
        tried.append(list(positions))
        assert positions
        return bool(poisons & set(positions)) or (together is not None and together <= set(positions))

    return tried, fails


@pytest.mark.parametrize("count", [2, 3, 8, 33])
def test_a_single_problem_is_found_wherever_it_stands_in_few_trials(count: int) -> None:
    for position in range(count):
        tried, fails = trial_of({position})
        assert asyncio.run(isolate(fails, count)) == [position]
        assert len(tried) <= count.bit_length() + 2


def test_two_and_three_problems_are_found_together() -> None:
    for poisons in ({0, 1}, {2, 13}, {0, 7, 15}):
        _, fails = trial_of(set(poisons))
        assert asyncio.run(isolate(fails, 16)) == sorted(poisons)


def test_nothing_is_blamed_where_everything_fails() -> None:
    _, fails = trial_of(set(range(16)))
    assert asyncio.run(isolate(fails, 16)) == []


def test_nothing_is_blamed_where_problems_fail_only_together() -> None:
    _, fails = trial_of(set(), together={3, 12})
    assert asyncio.run(isolate(fails, 16)) == []


def test_a_batch_of_one_problem_has_nothing_to_be_told_apart_from() -> None:
    _, fails = trial_of({0})
    assert asyncio.run(isolate(fails, 1)) == []


def test_a_problem_that_fails_alone_is_named_though_others_fail_together() -> None:
    _, fails = trial_of({5}, together={3, 12})
    assert asyncio.run(isolate(fails, 16)) == [5]
