"""The clocks of a run, handed in so that a jump of either can be tried without touching the machine's."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """``monotonic`` seconds decide when something is due; ``wall`` (unix seconds) is only ever shown."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


SYSTEM_CLOCK = Clock()
"""This machine's clocks."""
