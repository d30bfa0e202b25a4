"""Is a call still getting on? Told from counters in the processes that work on it, not from how long it takes."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from ray.exceptions import RayError

from orchestrator.failures.faults import Stalled
from orchestrator.pools.members import Member
from orchestrator.pools.stacks import dump_member

T = TypeVar("T")

POLLS_PER_STALL = 8
LONGEST_POLL_SECONDS = 15.0


async def watched(
    result: Awaitable[T],
    actors: Sequence[tuple[Member, Callable[[], Awaitable[int]]]],
    stall_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    poll_seconds: float | None = None,
) -> T:
    """The result of a call, as long as a counter of any of its processes moves.

    Args:
        result: of the call.
        actors: the processes that work on it together, each with a way to ask for its counter. One that does not answer does not
            move.
        stall_seconds: how long no counter may move.
        clock: seconds; a jump of it counts as two polls at most.
        poll_seconds: time between two looks; a call that is shorter is not looked at.

    Raises:
        Stalled: no counter has moved for ``stall_seconds``; the call itself goes on in its processes.
    """
    poll = poll_seconds or min(stall_seconds / POLLS_PER_STALL, LONGEST_POLL_SECONDS)
    future = asyncio.ensure_future(result)
    counters = [_Counter(ask) for _, ask in actors]
    idle = 0.0
    looked = clock()
    try:
        while not (await asyncio.wait({future}, timeout=poll))[0]:
            now = clock()
            idle += min(max(now - looked, 0.0), 2 * poll)
            looked = now
            moved = [counter.moved() for counter in counters]
            if any(moved):
                idle = 0.0
            if idle >= stall_seconds:
                stacks = await asyncio.gather(*(dump_member(member) for member, _ in actors))
                raise Stalled([member.role for member, _ in actors], idle, "\n".join(stacks))
        return future.result()
    finally:
        future.cancel()
        for counter in counters:
            counter.close()


def abandon(future: asyncio.Future[Any]) -> None:
    """Wait no longer for a future, whatever it ends or has ended with."""
    if not future.cancel() and not future.cancelled():
        future.exception()  # looked at, or asyncio would report that nobody did


class _Counter:
    """The last known value of one process's counter, asked for without waiting."""

    def __init__(self, ask: Callable[[], Awaitable[int]]) -> None:
        self._ask = ask
        self._asked: asyncio.Future[int] | None = None
        self._value: int | None = None

    def moved(self) -> bool:
        """Whether an answer has come that differs from the one before; asks again when one has come."""
        if self._asked is None:
            self._asked = asyncio.ensure_future(self._ask())
        if not self._asked.done():
            return False
        asked, self._asked = self._asked, asyncio.ensure_future(self._ask())
        try:
            value = asked.result()
        except RayError:
            return False  # dead or out of reach; the call itself says so
        moved, self._value = value != self._value, value
        return moved

    def close(self) -> None:
        """Wait for no answer any more."""
        if self._asked is not None:
            abandon(self._asked)
