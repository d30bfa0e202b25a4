"""Ordered work against a server that may be away, off the critical path."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

FIRST_DELAY_SECONDS = 0.25
LONGEST_DELAY_SECONDS = 10.0


@dataclass(frozen=True)
class _Operation:
    what: str
    call: Callable[[], object]
    refused: Callable[[], object]


class Outbox:
    """Runs operations one after the other on one background thread; ``put`` never waits and never raises.

    An operation that fails for the server's absence is repeated, with a growing pause, and holds up the later
    ones: their order is part of their meaning. One that fails for another reason is logged, told ``refused``
    and passed over. Operations must be safe to repeat.

    Args:
        is_transient: whether an error means "the server is away, try again".
        may_go_on: asked before every operation; once it is False, nothing more is done.
    """

    def __init__(
        self,
        name: str,
        is_transient: Callable[[Exception], bool],
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> None:
        self._is_transient = is_transient
        self._may_go_on = may_go_on
        self._waiting: deque[_Operation] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(
        self, what: str, call: Callable[[], object], refused: Callable[[], object] = lambda: None
    ) -> None:
        """Queues an operation; ``what`` says in the log what is being done."""
        with self._changed:
            self._waiting.append(_Operation(what, call, refused))
            self._changed.notify()

    def close(self, timeout: float) -> bool:
        """Waits at most ``timeout`` seconds until all is done; whether it is. What is left is given up."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        self._abandoned.set()
        return not self._thread.is_alive()

    def _work(self) -> None:
        while not self._abandoned.is_set():
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if not self._waiting:
                    return
                operation = self._waiting.popleft()
            self._do(operation)

    def _do(self, operation: _Operation) -> None:
        delay = FIRST_DELAY_SECONDS
        away_since: float | None = None
        while not self._abandoned.is_set():
            try:
                if not self._may_go_on():
                    self._abandoned.set()
                    return
                operation.call()
            except Exception as error:  # nothing about tracking may reach training
                if not self._is_transient(error):
                    logger.warning("%s was refused: %s", operation.what, one_line(error))
                    operation.refused()
                    return
                if away_since is None:
                    away_since = time.monotonic()
                    logger.warning("%s waits until the server is back: %s", operation.what, one_line(error))
                self._abandoned.wait(delay)
                delay = min(2 * delay, LONGEST_DELAY_SECONDS)
            else:
                if away_since is not None:
                    logger.warning("the server is back after %.0f s", time.monotonic() - away_since)
                return


def one_line(error: Exception, longest: int = 200) -> str:
    """An error's message on one line of limited length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= longest else text[: longest - 3] + "..."
