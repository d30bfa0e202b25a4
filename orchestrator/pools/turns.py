"""Who is served next: members that are free, and callers that wait for one, the most urgent first."""

import asyncio
import heapq
import itertools
from typing import Generic, TypeVar

M = TypeVar("M")

_Caller = tuple[float, int, asyncio.Future[M]]
"""(urgency, negated; number of its coming; its turn): the smallest is served first."""


class Turns(Generic[M]):
    """Members of a pool that are free, and callers that wait for one.

    A free member goes to the most urgent caller; of equally urgent ones to the one that has waited longest.
    """

    def __init__(self) -> None:
        """No member is free yet."""
        self._free: list[M] = []
        self._callers: list[_Caller[M]] = []
        """Heap of those whom any member serves. One that gave up, was told of an error, or was served at a higher urgency, stands
        in it until it comes up."""
        self._wanting: dict[M, list[_Caller[M]]] = {}
        """Heaps of those whom only one member will do."""
        self._coming = itertools.count()
        self._closed: Exception | None = None

    @property
    def free(self) -> int:
        """Members that nobody has taken."""
        return len(self._free)

    def give(self, member: M) -> None:
        """A member is free (again)."""
        queues = [queue for queue in (self._callers, self._wanting.get(member, [])) if _waits(queue)]
        if not queues:
            self._free.append(member)
            return
        _, _, turn = heapq.heappop(min(queues, key=lambda queue: queue[0]))
        turn.set_result(member)

    async def take(
        self, urgency: float, wanted: M | None = None, hurry: asyncio.Future[float] | None = None
    ) -> M:
        """A member, as soon as it is this caller's turn; the caller gives it back.

        Args:
            urgency: higher is served earlier.
            wanted: only this member will do; any when None.
            hurry: brings a higher urgency, while the caller waits or before.

        Raises:
            Exception: the error that ``close`` was told of.
        """
        if self._closed is not None:
            raise self._closed
        for member in self._free:
            if wanted in (None, member):
                self._free.remove(member)
                return member
        turn: asyncio.Future[M] = asyncio.get_running_loop().create_future()
        queue = self._callers if wanted is None else self._wanting.setdefault(wanted, [])
        coming = next(self._coming)
        heapq.heappush(queue, (-urgency, coming, turn))

        def raise_urgency(hurry: asyncio.Future[float]) -> None:
            if not hurry.cancelled() and not turn.done():
                heapq.heappush(queue, (-hurry.result(), coming, turn))

        if hurry is not None:
            hurry.add_done_callback(raise_urgency)
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancel() and not turn.cancelled() and turn.exception() is None:
                # It got one in the very moment that it gave up.
                self.give(turn.result())
            raise
        finally:
            if hurry is not None:
                hurry.remove_done_callback(raise_urgency)

    def refuse(self, member: M, error: Exception) -> None:
        """Raise ``error`` for all who want just this member, which will never be free again."""
        _end(self._wanting.pop(member, []), error)

    def close(self, error: Exception) -> None:
        """Raise ``error`` for everyone who waits, and for everyone who comes."""
        self._closed = error
        for queue in (self._callers, *self._wanting.values()):
            _end(queue, error)


def _waits(queue: list[_Caller[M]]) -> bool:
    """Whether somebody waits in a queue; those who wait no longer are taken off its top."""
    while queue and queue[0][2].done():
        heapq.heappop(queue)
    return bool(queue)


def _end(queue: list[_Caller[M]], error: Exception) -> None:
    for _, _, turn in queue:
        if not turn.done():
            turn.set_exception(error)
