"""Who is served next: members that are free, and callers that wait for one, the most urgent first."""

import asyncio
from dataclasses import dataclass, field
from typing import Generic, TypeVar

M = TypeVar("M")


@dataclass(eq=False)
class _Caller(Generic[M]):
    urgency: float
    wanted: M | None
    turn: "asyncio.Future[M]" = field(default_factory=asyncio.Future)


class Turns(Generic[M]):
    """Members of a pool that are free, and callers that wait for one.

    A free member goes to the most urgent caller; of equally urgent ones to the one that has waited longest.
    """

    def __init__(self) -> None:
        """No member is free yet."""
        self._free: list[M] = []
        self._callers: list[_Caller[M]] = []
        self._closed: Exception | None = None

    @property
    def free(self) -> int:
        """Members that nobody has taken."""
        return len(self._free)

    def give(self, member: M) -> None:
        """A member is free (again)."""
        # One that has just given up stands among them until its task runs.
        fitting = [one for one in self._callers if one.wanted in (None, member) and not one.turn.done()]
        if not fitting:
            self._free.append(member)
            return
        # The first of several most urgent ones, which are in the order of their coming.
        served = max(fitting, key=lambda caller: caller.urgency)
        self._callers.remove(served)
        served.turn.set_result(member)

    async def take(self, urgency: float, wanted: M | None = None) -> M:
        """A member, as soon as it is this caller's turn; the caller gives it back.

        Args:
            urgency: higher is served earlier.
            wanted: only this member will do; any when None.

        Raises:
            Exception: the error that ``close`` was told of.
        """
        if self._closed is not None:
            raise self._closed
        for member in self._free:
            if wanted in (None, member):
                self._free.remove(member)
                return member
        caller = _Caller(urgency, wanted)
        self._callers.append(caller)
        try:
            return await caller.turn
        except asyncio.CancelledError:
            if caller in self._callers:
                self._callers.remove(caller)
            elif caller.turn.exception() is None:
                # It got one in the very moment that it gave up.
                self.give(caller.turn.result())
            raise

    def refuse(self, member: M, error: Exception) -> None:
        """Raise ``error`` for all who want just this member, which will never be free again."""
        self._end([caller for caller in self._callers if caller.wanted is member], error)

    def close(self, error: Exception) -> None:
        """Raise ``error`` for everyone who waits, and for everyone who comes."""
        self._closed = error
        self._end(self._callers, error)

    def _end(self, callers: list[_Caller[M]], error: Exception) -> None:
        self._callers = [caller for caller in self._callers if caller not in callers]
        for caller in callers:
            if not caller.turn.done():
                caller.turn.set_exception(error)
