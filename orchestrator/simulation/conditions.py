"""What a simulation is told of the world: how long phases take, what an evaluation samples, when members are lost."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.store.phase_log import PhaseKind


class PhaseTimes(Protocol):
    """How long members are busy with a call."""

    def seconds(self, kind: PhaseKind, sequences: int) -> float:
        """Of one call about so many rollouts (0 where it is about none). May be drawn anew each time."""


class Lifetimes(Protocol):
    """How long members live; also while they are idle."""

    def draw(self, member: str, processes: int) -> float:
        """Seconds from the start of a member of so many processes to its death."""


class NoLosses:
    """All members live for ever."""

    def draw(self, member: str, processes: int) -> float:
        """Without an end."""
        return math.inf


class RandomLosses:
    """Each process is lost at a constant rate, and takes its member along."""

    def __init__(self, failures_per_hour: float, seed: int) -> None:
        """A rate of 0.01: one process in a hundred is lost in an hour."""
        self._rate = failures_per_hour / 3600
        self._draws = random.Random(seed)

    def draw(self, member: str, processes: int) -> float:
        """Exponentially distributed."""
        return self._draws.expovariate(self._rate * processes) if self._rate > 0 else math.inf


@dataclass(frozen=True)
class Conditions:
    """The world in which a grid is simulated. A cell's last step ends it; no cell diverges, and no storage is full."""

    times: PhaseTimes
    evaluation: tuple[tuple[int, int], ...] = ()
    """(problems, samples of each) of each set that an evaluation samples, in order."""
    handovers: Mapping[PhaseKind, float] = field(default_factory=dict)
    """Seconds between the end of a cell's last phase and its asking for one of this kind."""
    lifetimes: Lifetimes = field(default_factory=NoLosses)
    restart_seconds: float = 0.0
    """From the loss of a member until it serves again."""
