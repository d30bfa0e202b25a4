"""What went wrong, told from the error that a phase ended with: pure, and the only place that knows the errors of the stack."""

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import ray.exceptions

from grids.errors import UserError
from orchestrator.failures.ray_errors import first_line, root_cause
from workers.learning import Diverged, StaleRollouts


class FaultKind(StrEnum):
    """Kinds of faults that are answered differently."""

    LOST = "process lost"
    PREEMPTED = "node lost"
    STALLED = "stalled"
    OUT_OF_MEMORY = "out of memory"
    STORAGE_FULL = "storage full"
    DIVERGED = "diverged"
    REFUSED = "refused"
    """Wrong input: it would go wrong again in the same way."""
    POISONED = "poisoned problem"
    UNKNOWN = "unknown"


class Phase(StrEnum):
    """What a cell is doing; the first two keep no state, so that they can be repeated."""

    SAMPLING = "sampling"
    GRADING = "grading"
    LEARNING = "learning"
    COMMITTING = "commit"
    TAKING_UP = "taking up its commit"


@dataclass(frozen=True)
class Fault:
    """One failure of one phase."""

    kind: FaultKind
    reason: str
    """One line for people."""
    phase: Phase | None = None
    problems: tuple[str, ...] = ()
    """The problems that cause it, as ``<path>, row <row>``, where they are known."""
    stacks: str | None = None
    """Where a process that got stuck stood."""


class MemberLost(RuntimeError):
    """A process of a pool has died; ``preempted``: because its node has."""

    def __init__(self, role: str, how: str, *, preempted: bool = False, out_of_memory: bool = False) -> None:
        super().__init__(f"{role} was lost: {how}")
        self.preempted = preempted
        self.out_of_memory = out_of_memory


class Stalled(RuntimeError):
    """Nothing moved for too long in any process that works on a call."""

    def __init__(self, roles: Sequence[str], seconds: float, stacks: str) -> None:
        """``roles`` of the processes, how many seconds nothing moved, and where they stood (``stacks.dump``)."""
        super().__init__(f"{', '.join(roles)}: no sign of progress for {seconds:.0f} s")
        self.roles = tuple(roles)
        self.seconds = seconds
        self.stacks = stacks


class PoisonedProblems(RuntimeError):
    """A phase fails with these problems and succeeds without them."""

    def __init__(self, problems: Sequence[str], cause: str) -> None:
        super().__init__(f"{'; '.join(problems)}: {cause}")
        self.problems = tuple(problems)


STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No space, quota used up, larger than the file system or a limit allows."""
_REFUSED = (UserError, StaleRollouts, ValueError, TypeError, LookupError, AssertionError)
_NO_MEMORY_WORDS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")


def classify(error: BaseException, phase: Phase | None = None) -> Fault:
    """The fault behind an error, with Ray's wrapping taken off."""
    cause = root_cause(error)
    line = first_line(cause)
    named = f"{type(cause).__name__}: {line}" if line else type(cause).__name__
    match cause:
        case Diverged():
            return Fault(FaultKind.DIVERGED, line, phase)
        case PoisonedProblems():
            return Fault(FaultKind.POISONED, line, phase, cause.problems)
        case Stalled():
            return Fault(FaultKind.STALLED, line, phase, stacks=cause.stacks)
        case MemberLost():
            kind = FaultKind.PREEMPTED if cause.preempted else FaultKind.LOST
            return Fault(FaultKind.OUT_OF_MEMORY if cause.out_of_memory else kind, line, phase)
        case ray.exceptions.ObjectLostError():
            return Fault(FaultKind.PREEMPTED, f"data was lost with its node: {line}", phase)
        case ray.exceptions.RayActorError():
            return Fault(FaultKind.LOST, named, phase)
        case ray.exceptions.OutOfDiskError():
            return Fault(FaultKind.STORAGE_FULL, named, phase)
    if is_storage_full(cause):
        return Fault(FaultKind.STORAGE_FULL, line, phase)
    if _is_out_of_memory(cause):
        return Fault(FaultKind.OUT_OF_MEMORY, named, phase)
    if isinstance(cause, _REFUSED):
        return Fault(FaultKind.REFUSED, line if isinstance(cause, UserError) else named, phase)
    return Fault(FaultKind.UNKNOWN, named, phase)


def is_storage_full(error: BaseException) -> bool:
    """Whether the storage takes no more."""
    return isinstance(error, OSError) and error.errno in STORAGE_ERRORS


def _is_out_of_memory(error: BaseException) -> bool:
    # torch's and Ray's errors both have this name; torch is not loaded here for it.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    # torch's CPU allocator and some CUDA libraries say it in words only.
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _NO_MEMORY_WORDS)
