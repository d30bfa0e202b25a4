"""What is done about a fault: the table of failures, row by row, and the budgets."""

import errno
import pickle
from dataclasses import replace

import pytest
import torch
from ray.exceptions import ActorDiedError, ObjectLostError, OutOfMemoryError, RayTaskError

from grids.errors import UserError
from grids.spec import FailuresSpec
from orchestrator.failures.attempt_end import after_fault
from orchestrator.failures.decisions import Action, Decision, decide
from orchestrator.failures.faults import (
    Fault,
    FaultKind,
    MemberLost,
    Phase,
    PoisonedProblems,
    Stalled,
    classify,
)
from orchestrator.store.cell_state import CellState, Commit, Spent, State
from workers.checkpoints import StorageFull
from workers.learning import Diverged, StaleRollouts

POLICY = FailuresSpec(
    phase_repeats=2, own_failures=3, preemptions=5, backoff_seconds=2, longest_backoff_seconds=10
)
FRESH = CellState(cell="bp8-n4-s0")


def at_step(step: int, spent: Spent) -> CellState:
    return replace(FRESH, attempt=4, commit=Commit(step, 100, 2, None, {}), spent=spent)


def of_worker(cause: Exception) -> RayTaskError:
    return RayTaskError("update", "traceback", cause)


# From an error to a fault


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (of_worker(Diverged("loss nan")), FaultKind.DIVERGED),
        (MemberLost("sampler 0", "its process died"), FaultKind.LOST),
        (MemberLost("sampler 0", "its node died", preempted=True), FaultKind.PREEMPTED),
        (MemberLost("learner 0 rank 1", "killed by the memory monitor", out_of_memory=True), FaultKind.OUT_OF_MEMORY),
        (ActorDiedError(), FaultKind.LOST),
        (of_worker(ObjectLostError("00ff", None, "call site")), FaultKind.PREEMPTED),
        (Stalled(["sampler 0"], 60.0, "stacks"), FaultKind.STALLED),
        (of_worker(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")), FaultKind.OUT_OF_MEMORY),
        (of_worker(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes")), FaultKind.OUT_OF_MEMORY),
        (OutOfMemoryError("killed"), FaultKind.OUT_OF_MEMORY),
        (of_worker(MemoryError()), FaultKind.OUT_OF_MEMORY),
        (OSError(errno.ENOSPC, "No space left on device"), FaultKind.STORAGE_FULL),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), FaultKind.STORAGE_FULL),
        (of_worker(StorageFull(errno.EFBIG, "checkpoints: File too large")), FaultKind.STORAGE_FULL),
        (of_worker(StaleRollouts("rollouts of 3 for a learner at 4")), FaultKind.REFUSED),
        (UserError("model: differ"), FaultKind.REFUSED),
        (of_worker(IndexError("index out of range in self")), FaultKind.REFUSED),
        (PoisonedProblems(["train.jsonl, row 17"], "IndexError"), FaultKind.POISONED),
        (of_worker(RuntimeError("CUDA error: unspecified launch failure")), FaultKind.UNKNOWN),
        (OSError(errno.EIO, "Input/output error"), FaultKind.UNKNOWN),
    ],
)  # fmt: skip
def test_each_error_is_of_the_kind_that_decides_about_it(error: Exception, kind: FaultKind) -> None:
    assert classify(error).kind is kind


def test_the_reason_is_the_first_line_with_the_kind_of_error() -> None:
    fault = classify(of_worker(ValueError("bad row 7\nlong details")), Phase.SAMPLING)
    assert (fault.reason, fault.phase) == ("ValueError: bad row 7", Phase.SAMPLING)


def test_full_storage_in_a_worker_is_seen_after_its_way_through_ray() -> None:
    sent = pickle.loads(pickle.dumps(StorageFull(errno.ENOSPC, "step_3: No space left on device")))
    assert classify(of_worker(sent)).kind is FaultKind.STORAGE_FULL


# From a fault to a decision


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        (FaultKind.DIVERGED, Action.DIVERGE),
        (FaultKind.STORAGE_FULL, Action.PAUSE),
        (FaultKind.OUT_OF_MEMORY, Action.FAIL),
        (FaultKind.REFUSED, Action.FAIL),
        (FaultKind.POISONED, Action.FAIL),
        (FaultKind.LOST, Action.NEW_ATTEMPT),
        (FaultKind.PREEMPTED, Action.NEW_ATTEMPT),
        (FaultKind.STALLED, Action.NEW_ATTEMPT),
        (FaultKind.UNKNOWN, Action.NEW_ATTEMPT),
    ],
)
def test_each_kind_of_fault_of_a_learner_has_its_answer(kind: FaultKind, action: Action) -> None:
    assert decide(Fault(kind, "why", Phase.LEARNING), FRESH, POLICY, repeats=0).action is action


@pytest.mark.parametrize("kind", [FaultKind.LOST, FaultKind.PREEMPTED, FaultKind.STALLED, FaultKind.UNKNOWN])
@pytest.mark.parametrize("phase", [Phase.SAMPLING, Phase.GRADING])
def test_a_phase_without_state_is_repeated_up_to_its_limit_at_no_cost_to_the_cell(
    kind: FaultKind, phase: Phase
) -> None:
    fault = Fault(kind, "why", phase)
    for repeats in (0, 1):
        decision = decide(fault, FRESH, POLICY, repeats)
        assert (decision.action, decision.spent) == (Action.REPEAT_PHASE, Spent())
    assert decide(fault, FRESH, POLICY, repeats=2).action is Action.NEW_ATTEMPT
    assert decide(fault, FRESH, POLICY, repeats=None).action is Action.NEW_ATTEMPT


def test_wrong_input_is_not_repeated_even_in_a_phase_without_state() -> None:
    decision = decide(Fault(FaultKind.REFUSED, "bad", Phase.SAMPLING), FRESH, POLICY, repeats=0)
    assert decision == Decision(Action.FAIL, "bad", Spent())


def attempts_until_failed(kind: FaultKind, state: CellState) -> list[Decision]:
    decisions = []
    while True:
        decision = decide(Fault(kind, "why", Phase.LEARNING), state, POLICY)
        decisions.append(decision)
        if decision.action is not Action.NEW_ATTEMPT:
            return decisions
        state = replace(state, spent=decision.spent)


def test_own_failures_without_progress_end_in_failure_after_the_budget_with_growing_waits() -> None:
    decisions = attempts_until_failed(FaultKind.LOST, FRESH)
    assert [decision.delay_seconds for decision in decisions] == [2, 4, 8, 0]
    assert decisions[-1].action is Action.FAIL
    assert decisions[-1].reason == "why (failures.own_failures: all 3 retries since step 0 are spent)"


def test_lost_nodes_have_a_budget_of_their_own_and_waits_up_to_the_cap() -> None:
    spent = Spent(own_failures=3)
    decisions = attempts_until_failed(FaultKind.PREEMPTED, replace(FRESH, spent=spent))
    assert [decision.delay_seconds for decision in decisions] == [2, 4, 8, 10, 10, 0]
    assert decisions[-1].spent == Spent(own_failures=3, preemptions=5)
    assert "failures.preemptions: all 5" in decisions[-1].reason


def test_budgets_start_anew_with_each_commit_further_on() -> None:
    spent = Spent(own_failures=3, preemptions=5, at_step=6)
    fault = Fault(FaultKind.LOST, "why", Phase.LEARNING)
    assert decide(fault, at_step(6, spent), POLICY).action is Action.FAIL
    decision = decide(fault, at_step(7, spent), POLICY)
    assert (decision.action, decision.spent) == (Action.NEW_ATTEMPT, Spent(own_failures=1, at_step=7))
    assert decision.delay_seconds == 2


def test_a_learner_that_is_lost_for_ever_goes_on_while_each_attempt_commits() -> None:
    state = FRESH
    for step in range(1, 200):
        decision = decide(Fault(FaultKind.LOST, "why", Phase.LEARNING), state, POLICY)
        assert decision.action is Action.NEW_ATTEMPT
        state = at_step(step, decision.spent)


def test_no_number_of_retries_overflows_the_wait() -> None:
    policy = POLICY.model_copy(update={"preemptions": 100_000})
    state = replace(FRESH, spent=Spent(preemptions=99_999))
    assert decide(Fault(FaultKind.PREEMPTED, "why"), state, policy).delay_seconds == 10


# From a decision to the record


def test_an_attempt_that_will_be_tried_again_is_lost_and_its_cell_waits() -> None:
    fault = Fault(FaultKind.LOST, "learner 0 rank 0 was lost", Phase.LEARNING)
    end = after_fault(fault, decide(fault, FRESH, POLICY), "learning of step 7")
    assert (end.state, end.outcome, end.phase) == (State.PENDING, "lost", "learning of step 7")
    assert (end.fault, end.spent) == ("process lost", Spent(own_failures=1))
    assert end.reason == "learner 0 rank 0 was lost; tried again in 2 s"


def test_a_poisoned_cell_fails_with_its_problems_on_record() -> None:
    fault = classify(PoisonedProblems(["train.jsonl, row 17"], "IndexError: index out of range"))
    end = after_fault(fault, decide(fault, FRESH, POLICY), "sampling of step 3")
    assert (end.state, end.outcome, end.problems) == (State.FAILED, "failed", ("train.jsonl, row 17",))
    assert end.reason == "train.jsonl, row 17: IndexError: index out of range"
