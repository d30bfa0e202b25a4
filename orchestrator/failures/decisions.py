"""What is done about a fault: one pure decision."""

from dataclasses import dataclass, replace
from enum import StrEnum

from grids.spec import FailuresSpec
from orchestrator.failures.faults import Fault, FaultKind, Phase
from orchestrator.store.cell_state import CellState, Spent

REPEATABLE_PHASES = (Phase.SAMPLING, Phase.GRADING)
"""Phases that keep no state: repeated with the same seeds they give the same bits."""


class Action(StrEnum):
    """What a cell does next."""

    REPEAT_PHASE = "repeat the phase"
    NEW_ATTEMPT = "new attempt from the last commit"
    FAIL = "fail"
    DIVERGE = "mark diverged"
    PAUSE = "pause"


@dataclass(frozen=True)
class Decision:
    """What to do, and the budgets after it."""

    action: Action
    reason: str
    spent: Spent
    delay_seconds: float = 0.0


def decide(fault: Fault, state: CellState, policy: FailuresSpec, repeats: int | None = None) -> Decision:
    """What to do about a fault of a cell in this state.

    Divergence is a result. Wrong input and too little memory fail at once, since they would come again; full storage pauses.
    A lost, stuck or unaccountable process costs a repeat of the phase, where the phase keeps no state, or else a new attempt,
    from separate budgets for the cell's own failures and for lost nodes. Budgets start anew once a commit lies beyond the one
    that they were counted from.

    Args:
        fault: what happened.
        state: the cell's state as it is stored.
        policy: the grid's ``failures``.
        repeats: how often this very phase has been repeated already; None where it cannot be repeated (any more).
    """
    spent = state.spent_now
    final = {
        FaultKind.DIVERGED: Action.DIVERGE,
        FaultKind.STORAGE_FULL: Action.PAUSE,
        FaultKind.OUT_OF_MEMORY: Action.FAIL,
        FaultKind.REFUSED: Action.FAIL,
        FaultKind.POISONED: Action.FAIL,
    }
    if fault.kind in final:
        return Decision(final[fault.kind], fault.reason, spent)
    if repeats is not None and fault.phase in REPEATABLE_PHASES and repeats < policy.phase_repeats:
        return Decision(Action.REPEAT_PHASE, fault.reason, spent, _backoff(repeats, policy))
    if fault.kind is FaultKind.PREEMPTED:
        used, allowed, budget = spent.preemptions, policy.preemptions, "preemptions"
        counted = replace(spent, preemptions=used + 1)
    else:
        used, allowed, budget = spent.own_failures, policy.own_failures, "own_failures"
        counted = replace(spent, own_failures=used + 1)
    if used >= allowed:
        reason = (
            f"{fault.reason} (failures.{budget}: all {allowed} retries since step {spent.at_step} are spent)"
        )
        return Decision(Action.FAIL, reason, spent)
    return Decision(Action.NEW_ATTEMPT, fault.reason, counted, _backoff(used, policy))


def _backoff(retries: int, policy: FailuresSpec) -> float:
    """Seconds before the next retry: doubled each time, up to the cap."""
    # 2^40 times anything that may be configured is beyond the cap already, and no float overflows.
    return min(policy.backoff_seconds * 2.0 ** min(retries, 40), policy.longest_backoff_seconds)
