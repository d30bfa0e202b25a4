"""The accounts: every accelerator-second of the pools is in one of them."""

from dataclasses import astuple

import pytest

from orchestrator.scheduling.accounts import Accounts, accounts
from orchestrator.store.phase_log import PhaseKind, PhaseRecord

SAMPLING, LEARNING, EVALUATION = PhaseKind.SAMPLING, PhaseKind.LEARNING, PhaseKind.EVALUATION


def phase(
    kind: PhaseKind, step: int, start: float, busy: float, cell: str = "a", failed: bool = False
) -> PhaseRecord:
    """On an engine of 2 accelerators, or a learner group of 4."""
    samples = kind in (SAMPLING, EVALUATION)
    member, accelerators = ("sampler 0", 2) if samples else ("learner 0", 4)
    return PhaseRecord(member, kind, cell, step, start, busy, 0.0, 8, 40, accelerators, failed)


STEP_1 = [
    phase(PhaseKind.TAKING_UP, 0, 0.0, 1.0),
    phase(SAMPLING, 1, 1.0, 3.0),
    phase(LEARNING, 1, 4.0, 2.0),
    phase(EVALUATION, 1, 6.0, 2.0),
    phase(PhaseKind.COMMIT, 1, 8.0, 1.0),
]
STEP_2 = [phase(SAMPLING, 2, 9.0, 3.0), phase(LEARNING, 2, 12.0, 2.0), phase(EVALUATION, 2, 14.0, 2.0)]


def test_what_was_done_once_is_training_evaluation_or_upkeep_and_the_rest_is_idle() -> None:
    found = accounts([[*STEP_1, *STEP_2]])
    # Training 2 * (3 + 3) + 4 * (2 + 2), evaluation 2 * (2 + 2), upkeep 4 * (1 + 1); 6 accelerators for 16 s.
    assert astuple(found) == (28.0, 8.0, 8.0, 0.0, 96.0 - 44.0)
    assert found.total == 96


def test_steps_beyond_the_commit_that_a_cell_goes_back_to_are_replayed() -> None:
    back = [phase(PhaseKind.TAKING_UP, 1, 16.0, 1.0), phase(SAMPLING, 2, 17.0, 3.0)]
    found = accounts([[*STEP_1, *STEP_2, *back]])
    # Step 2 and its evaluation, 2 * 3 + 4 * 2 + 2 * 2, were in vain; step 1 and its evaluation were not.
    assert (found.replayed, found.training, found.evaluation) == (18.0, 6.0 + 8.0 + 6.0, 4.0)
    assert found.total == 6 * 20


def test_another_cell_that_is_taken_up_changes_nothing() -> None:
    other = phase(PhaseKind.TAKING_UP, 0, 16.0, 1.0, cell="b")
    assert accounts([[*STEP_1, *STEP_2, other]]).replayed == 0


def test_failed_phases_are_replayed_work_whatever_they_were_for() -> None:
    failed = [phase(kind, 2, 9.0, 1.0, failed=True) for kind in (SAMPLING, PhaseKind.COMMIT, EVALUATION)]
    assert accounts([[*STEP_1, *failed]]).replayed == 2 + 4 + 2


def test_a_cell_goes_back_also_under_the_next_controller_and_the_time_between_them_is_nobodys() -> None:
    resumed = [phase(PhaseKind.TAKING_UP, 1, 1000.0, 1.0), phase(SAMPLING, 2, 1001.0, 3.0)]
    found = accounts([[*STEP_1, *STEP_2], resumed])
    assert found.replayed == 18
    assert found.total == 6 * 16 + 6 * 4


def test_graders_hold_no_accelerators() -> None:
    grading = PhaseRecord("grader", PhaseKind.GRADING, "a", 1, 0.0, 100.0, 0.0, 8, 40, 0)
    assert accounts([[grading]]).total == 0


@pytest.mark.parametrize("epochs", [[], [[]]])
def test_nothing_was_spent_without_phases(epochs: list[list[PhaseRecord]]) -> None:
    assert accounts(epochs) == Accounts()


def test_the_line_tells_shares_of_all_hours() -> None:
    assert Accounts(1800.0, 360.0, 0.0, 180.0, 1260.0).line() == (
        "1 accelerator-hours: 50.0% training, 10.0% evaluation, 0.0% upkeep, 5.0% replayed, 35.0% idle"
    )
