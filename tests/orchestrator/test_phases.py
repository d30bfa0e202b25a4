"""Phases of a cell over stand-ins for the pools: what is graded while the engine goes on, and what of it counts."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import pytest
import ray.exceptions

from grids.loading import parse_grid
from orchestrator.control.batches import Batch, probe_batch
from orchestrator.control.phases import GradedBatch, Phases
from orchestrator.pools.pools import Pools
from orchestrator.pools.work import Work
from orchestrator.store.cell_state import CellState
from orchestrator.store.phase_log import PhaseKind
from tests.grids.test_spec import GRID, PATH
from tests.orchestrator.test_batches import DATA
from workers.sampler import Sampled, SamplingRequest

SPEC = parse_grid(
    GRID.replace("first_mark: 1024", "first_mark: 1024, train_probe: {problems: 6, samples_per_problem: 256}")
    + "failures: {backoff_seconds: 0.001, phase_repeats: 1}\n",
    PATH,
)
WORK = Work(PhaseKind.SAMPLING, "cell", 1)

Each = Callable[[Sampled, Any], None]
Generate = Callable[[Sequence[int], Each], Awaitable[None]]


class Engines:
    """One engine, which ``generate`` makes slices with."""

    free = 1

    def __init__(self, generate: Generate) -> None:
        self._generate = generate

    async def values_and_references(
        self,
        method: str,
        request: SamplingRequest,
        weights: Any,
        groups: Sequence[int],
        work: Work,
        each: Each,
    ) -> list[tuple[Sampled, Any]]:
        pairs: list[tuple[Sampled, Any]] = []

        def give(sampled: Sampled, rollouts: Any) -> None:
            pairs.append((sampled, rollouts))
            each(sampled, rollouts)

        await self._generate(groups, give)
        return pairs


class Grading:
    """Rewards name what was graded."""

    def __init__(self) -> None:
        self.graded: list[tuple[str, list[str]]] = []
        self.changed = asyncio.Event()

    async def reference_and_value(
        self, method: str, rollouts: str, golds: list[str], work: Work
    ) -> tuple[str, tuple[int, float]]:
        await asyncio.sleep(0)
        if rollouts == "lost":
            raise ray.exceptions.ObjectLostError("ab", None, "")
        self.graded.append((rollouts, golds))
        self.changed.set()
        return f"rewards of {rollouts}", (1, 0.25)


def sample_and_grade(generate: Callable[[Grading], Generate]) -> tuple[GradedBatch, Grading, Batch]:
    batch = probe_batch(SPEC, DATA)

    async def run() -> tuple[GradedBatch, Grading]:
        grader = Grading()
        pools = Pools(cast(Any, Engines(generate(grader))), [], cast(Any, grader))
        phases = Phases(SPEC, DATA, pools, lambda: CellState(cell="cell"), lambda fault, decision: None)
        return await asyncio.wait_for(phases.sample_and_grade(batch, "weights", WORK), 10), grader

    return *asyncio.run(run()), batch


def test_a_slice_is_graded_while_the_engine_goes_on_with_the_next() -> None:
    def generate(grader: Grading) -> Generate:
        async def until_the_last_is_graded(groups: Sequence[int], each: Each) -> None:
            assert groups == [2, 2, 2]
            for number in range(3):
                each(Sampled(10 + number, 0.5), f"slice {number}")
                # An engine whose slices were graded only at its end would wait here for ever.
                await grader.changed.wait()
                grader.changed.clear()

        return until_the_last_is_graded

    graded, grader, batch = sample_and_grade(generate)
    assert grader.graded == [(f"slice {i}", batch.golds[2 * i : 2 * i + 2]) for i in range(3)]
    assert graded == GradedBatch(
        ["slice 0", "slice 1", "slice 2"],
        ["rewards of slice 0", "rewards of slice 1", "rewards of slice 2"],
        tokens=33,
        failures=3,
        seconds_sampling=1.5,
        seconds_grading=0.75,
    )


@pytest.mark.parametrize("first", ["old slice", "lost"])
def test_what_was_graded_of_a_try_that_failed_counts_for_nothing(first: str) -> None:
    """Whether its grading had come to its end or failed with it."""

    def generate(grader: Grading) -> Generate:
        tries = 0

        async def second_try(groups: Sequence[int], each: Each) -> None:
            nonlocal tries
            tries += 1
            if tries == 1:
                each(Sampled(10, 0.5), first)
                await asyncio.sleep(0.01)
                raise ray.exceptions.RayActorError
            for number in range(3):
                each(Sampled(10, 0.5), f"slice {number}")

        return second_try

    graded, _, _ = sample_and_grade(generate)
    assert graded.rollouts == ["slice 0", "slice 1", "slice 2"]
    assert graded.rewards == [f"rewards of slice {number}" for number in range(3)]
    assert (graded.tokens, graded.failures) == (30, 3)
