"""What an error means for the cell in which it happened: one pure decision."""

from dataclasses import dataclass

from ray.exceptions import RayActorError, RayTaskError

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
    if isinstance(cause, RayActorError):
        return Decision(
            State.PAUSED, f"an engine, learner or grader was lost: {first_line(cause)}", stops_run=True
        )
    return Decision(State.FAILED, reason)


def root_cause(error: BaseException) -> BaseException:
    """What a worker raised, without Ray's wrapping."""
    return error.cause if isinstance(error, RayTaskError) and error.cause is not None else error


def first_line(error: BaseException) -> str:
    """The first line of an error's message, for tables."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""
