"""An event loop whose time jumps to the next timer: whoever sleeps in it has slept, and nothing waits for a clock."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingHappens(RuntimeError):
    """Every task waits for another one."""


class _JumpingSelector(selectors.SelectSelector):
    """Where a loop would wait for its next timer, time goes on by as much. Files and sockets are never looked at."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingHappens("every task waits for another one, and none for a time")
        self.now += max(timeout, 0.0)
        return []


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """The result of work that begins at time 0 and only sleeps, or waits for others that do.

    Raises:
        NothingHappens: the work would never end.
    """
    with asyncio.Runner(loop_factory=_VirtualTimeLoop) as runner:
        return runner.run(work)
