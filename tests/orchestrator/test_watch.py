"""Stalls of real Ray actors: told from counters, not from how long a call takes."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psutil
import pytest
import ray

from orchestrator.failures.faults import Stalled
from orchestrator.pools.members import Member, this_member
from orchestrator.pools.watch import watched

pytestmark = pytest.mark.engine

STALL_SECONDS = 2.0
POLL_SECONDS = 0.2


class Worker:
    """An actor that counts while it works."""

    def __init__(self) -> None:
        self.beats = 0

    def identify(self) -> Member:
        return this_member("worker 0")

    @ray.method(concurrency_group="watch")
    def signs_of_life(self) -> int:
        return self.beats

    def count(self, seconds: float) -> str:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            time.sleep(0.05)
            self.beats += 1
        return "counted"

    def sleep_like_a_stuck_collective(self) -> None:
        time.sleep(600)

    def fail(self) -> None:
        raise LookupError("of its own")


@pytest.fixture(scope="module")
def worker(ray_cluster: None) -> Iterator[Any]:
    actor = ray.remote(concurrency_groups={"watch": 1})(Worker).options(num_cpus=0).remote()
    yield actor
    ray.kill(actor)


@pytest.fixture
def stuck(ray_cluster: None) -> Iterator[Any]:
    """A worker of one test alone, which it may leave stuck."""
    actor = ray.remote(concurrency_groups={"watch": 1})(Worker).options(num_cpus=0).remote()
    yield actor
    ray.kill(actor)


def watch(
    call: Callable[[], Awaitable[Any]], *actors: Any, clock: Callable[[], float] = time.monotonic
) -> Any:
    async def run() -> Any:
        members = [
            (await asyncio.wait_for(actor.identify.remote(), 60), actor.signs_of_life.remote)
            for actor in actors
        ]
        return await watched(call(), members, STALL_SECONDS, clock, POLL_SECONDS)

    return asyncio.run(run())


def test_a_call_whose_counter_moves_may_take_longer_than_the_limit(worker: Any) -> None:
    started = time.monotonic()
    assert watch(lambda: worker.count.remote(2 * STALL_SECONDS), worker) == "counted"
    assert time.monotonic() - started > 2 * STALL_SECONDS


def test_one_that_sleeps_is_reported_with_where_it_stands(stuck: Any) -> None:
    with pytest.raises(Stalled, match=r"worker 0: no sign of progress for \d s") as caught:
        watch(stuck.sleep_like_a_stuck_collective.remote, stuck)
    assert "sleep_like_a_stuck_collective" in caught.value.stacks
    assert "\n" not in str(caught.value)


def test_a_stopped_process_is_reported_too(stuck: Any) -> None:
    pid = ray.get(stuck.identify.remote()).pid

    async def run() -> None:
        member = await stuck.identify.remote()
        call = stuck.count.remote(600)
        await asyncio.sleep(3 * POLL_SECONDS)
        os.kill(pid, signal.SIGSTOP)
        await watched(call, [(member, stuck.signs_of_life.remote)], STALL_SECONDS, poll_seconds=POLL_SECONDS)

    try:
        with pytest.raises(Stalled) as caught:
            asyncio.run(run())
    finally:
        psutil.Process(pid).resume()
    assert "count" in caught.value.stacks and "T (stopped)" in caught.value.stacks


def test_a_group_is_alive_while_one_of_it_moves(stuck: Any, worker: Any) -> None:
    """A rank that waits in a collective for a slower one does not move itself."""

    async def one_moves() -> str:
        waiting = asyncio.ensure_future(stuck.sleep_like_a_stuck_collective.remote())
        counted: str = await worker.count.remote(2 * STALL_SECONDS)
        waiting.cancel()
        return counted

    assert watch(one_moves, stuck, worker) == "counted"


def test_a_clock_that_jumps_does_not_look_like_a_stall(stuck: Any) -> None:
    jumps = iter([0.0, 1e6, 0.0, 1e6, -1e6])

    def clock() -> float:
        return time.monotonic() + next(jumps, 0.0)

    async def short() -> str:
        await asyncio.sleep(STALL_SECONDS / 2)
        return "done"

    assert watch(short, stuck, clock=clock) == "done"


def test_an_error_of_the_call_arrives_as_it_is(worker: Any) -> None:
    with pytest.raises(LookupError, match="of its own"):
        watch(worker.fail.remote, worker)


def test_a_short_call_is_not_looked_at() -> None:
    async def run() -> str:
        async def quick() -> str:
            return "done"

        def ask() -> Awaitable[int]:
            raise AssertionError("looked at")

        member = Member("worker 0", "", "elsewhere", 1, 0.0)
        return await watched(quick(), [(member, ask)], STALL_SECONDS)

    assert asyncio.run(run()) == "done"
