"""How an attempt at a cell ends, as it is written down."""

from dataclasses import dataclass

from orchestrator.failures.decisions import Action, Decision
from orchestrator.failures.faults import Fault
from orchestrator.store.cell_state import Spent, State


@dataclass(frozen=True)
class AttemptEnd:
    """The cell's state after an attempt, and what the attempt's record says of its end."""

    state: State
    outcome: str
    reason: str | None = None
    fault: str | None = None
    phase: str | None = None
    problems: tuple[str, ...] = ()
    spent: Spent | None = None
    """Budgets after it; None: as they were."""


def after_fault(fault: Fault, decision: Decision, phase: str) -> AttemptEnd:
    """The end of an attempt that ran into ``fault`` while it was at ``phase``."""
    state, outcome = {
        Action.NEW_ATTEMPT: (State.PENDING, "lost"),
        Action.FAIL: (State.FAILED, "failed"),
        Action.DIVERGE: (State.DIVERGED, "diverged"),
        Action.PAUSE: (State.PAUSED, "paused"),
    }[decision.action]
    reason = decision.reason
    if decision.action is Action.NEW_ATTEMPT:
        reason = f"{reason}; tried again in {decision.delay_seconds:.3g} s"
    return AttemptEnd(state, outcome, reason, str(fault.kind), phase, fault.problems, decision.spent)
