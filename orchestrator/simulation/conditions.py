"""What a simulation is told of the world: how long phases take, what an evaluation samples, how often members are lost."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.store.phase_log import PhaseKind


class PhaseTimes(Protocol):
    """How long members are busy with a call."""

    def seconds(self, kind: PhaseKind, sequences: int) -> float:
        """Of one call about so many rollouts (0 where it is about none). May be drawn anew each time."""


@dataclass(frozen=True)
class Conditions:
    """The world in which a grid is simulated. A cell's last step ends it; no cell diverges, and no storage is full."""

    times: PhaseTimes
    evaluation: tuple[tuple[int, int], ...] = ()
    """(problems, samples of each) of each set that an evaluation samples, in order."""
    handovers: Mapping[PhaseKind, float] = field(default_factory=dict)
    """Seconds between the end of a cell's last phase and its asking for one of this kind."""
    failures_per_hour: float = 0.0
    """Of each process: engine, rank or grader. At random times, also while it is idle."""
    restart_seconds: float = 0.0
    """From the loss of a member until it serves again."""
    seed: int = 0
    """Of the losses."""
