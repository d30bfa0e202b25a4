"""What an error means for the cell in which it happened: one pure decision."""

from dataclasses import dataclass

from ray.exceptions import RayActorError

from orchestrator.pools import GroupBroken
from orchestrator.ray_errors import first_line, root_cause
from orchestrator.store import State
from workers.learner import Diverged


@dataclass(frozen=True)
class Decision:
    """What becomes of a cell, and whether the other cells can go on."""

    state: State
    reason: str
    stops_run: bool = False


def decide(error: BaseException) -> Decision:
    """Divergence is a result; a lost actor stops the run, whose cells go on at the next start; all else fails."""
    cause = root_cause(error)
    reason = f"{type(cause).__name__}: {first_line(cause)}"
    if isinstance(cause, Diverged):
        return Decision(State.DIVERGED, reason)
    if isinstance(cause, RayActorError | GroupBroken):
        return Decision(
            State.PAUSED, f"an engine, learner or grader was lost: {first_line(cause)}", stops_run=True
        )
    return Decision(State.FAILED, reason)
