"""When cells and the grid will be done, as ``status`` tells."""

import pytest

from grids.expansion import expand
from orchestrator.operating.outlook import Outlook
from orchestrator.scheduling.eta import expected_ends
from orchestrator.store.cell_state import State
from orchestrator.store.phase_log import PhaseKind, PhaseRecord
from tests.orchestrator.stand_in_pools import trial_grid

SECONDS = {
    PhaseKind.SAMPLING: 2.0,
    PhaseKind.GRADING: 0.5,
    PhaseKind.LEARNING: 1.5,
    PhaseKind.EVALUATION: 4.0,
    PhaseKind.EVALUATION_GRADING: 1.0,
}
MEMBERS = {
    PhaseKind.SAMPLING: "sampler 0",
    PhaseKind.LEARNING: "learner 0",
    PhaseKind.EVALUATION: "sampler 0",
}


def phase(kind: PhaseKind, cell: str = "base", step: int = 1, waited: float = 0.0) -> PhaseRecord:
    """Of a batch of ``trial_grid``."""
    return PhaseRecord(MEMBERS.get(kind, "grader"), kind, cell, step, 0.0, SECONDS[kind], waited, 8, 40, 1)


def test_waiting_cells_take_places_as_these_become_free_longest_first() -> None:
    running, waiting = {"a": 5.0, "b": 1.0}, {"c": 2.0, "d": 10.0, "e": 2.0}
    # b ends at 1, then d until 11; a at 5, then c until 7, then e until 9.
    assert expected_ends(running, waiting, 2) == {"a": 5, "b": 1, "d": 11, "c": 7, "e": 9}
    # Two places are free at once.
    assert expected_ends(running, waiting, 4) == {"a": 5, "b": 1, "d": 10, "c": 2, "e": 3}
    # Pools have become smaller: those in flight are not fewer for it.
    assert expected_ends(running, {"c": 2.0}, 1) == {"a": 5, "b": 1, "c": 3}


def test_cells_that_are_trained_or_wait_have_an_end_and_others_have_none() -> None:
    spec = trial_grid(seeds=5, slots=2)  # 6 steps, evaluated after 2 and 4
    cells = expand(spec)
    outlook = Outlook(spec, [phase(kind) for kind in SECONDS])
    states = (State.RUNNING, State.PENDING, State.PAUSED, State.FINISHED, State.FAILED)
    for cell, state, step in zip(cells, states, (4, 0, 3, 6, 2), strict=True):
        outlook.add(cell, state, step)
    # 4 s a step. Running: 2 steps, no evaluation. The other place is free: 6 steps and the last evaluation, 29 s.
    # Paused: 3 steps and an evaluation, 17 s, after the running one.
    ends = outlook.ends()
    assert [ends[cell.id] for cell in cells[:3]] == pytest.approx([8, 29, 25], rel=0.02)
    assert set(ends) == {cell.id for cell in cells[:3]}


def test_a_cell_in_flight_is_as_far_as_its_phases_tell() -> None:
    spec = trial_grid()
    cell = expand(spec)[0]
    records = [
        *(phase(kind) for kind in SECONDS),
        phase(PhaseKind.LEARNING, cell.id, 5),
        phase(PhaseKind.LEARNING, cell.id, 6)._replace(failed=True),
    ]
    outlook = Outlook(spec, records)
    outlook.add(cell, State.RUNNING, 2)
    assert outlook.ends()[cell.id] == pytest.approx(4, rel=0.02)
    # After a crash it has gone back to its commit.
    back = phase(PhaseKind.LEARNING, cell.id, 4)._replace(kind=PhaseKind.TAKING_UP)
    taken_up = Outlook(spec, [*records, back])
    taken_up.add(cell, State.RUNNING, 2)
    assert taken_up.ends()[cell.id] == pytest.approx(8, rel=0.02)


def test_waits_in_queues_put_ends_off() -> None:
    spec = trial_grid()
    cell = expand(spec)[0]
    # 4 s of training waited 2 s in all.
    records = [phase(kind, waited=2.0 if kind is PhaseKind.SAMPLING else 0.0) for kind in SECONDS]
    outlook = Outlook(spec, records)
    outlook.add(cell, State.RUNNING, 4)
    assert outlook.ends()[cell.id] == pytest.approx(12, rel=0.02)


def test_the_line_tells_what_is_left_and_how_the_pools_did() -> None:
    spec = trial_grid(seeds=4, slots=2)
    records = [
        *(phase(kind) for kind in SECONDS),
        phase(PhaseKind.SAMPLING)._replace(started_at=8.0, busy_seconds=2.0),
    ]
    outlook = Outlook(spec, records)
    for cell in expand(spec):
        outlook.add(cell, State.PENDING, 0)
    # Sampling 4 * (6 * 2 + 2 * 4) = 80 s of one engine; two places take 2 * 29 s in turn.
    # In 10 s: sampling 2 + 4 + 2, learning 1.5, grading 1.5; 8 rollouts of 40 tokens learnt from.
    assert outlook.line() == (
        "about 1m20s to go, at least 1m20s; busy over the last 10s: samplers 80%, learners 15%, graders 15%; "
        "0.8 rollouts/s, 4 tokens/s"
    )


def test_nothing_is_known_without_phases() -> None:
    spec = trial_grid()
    outlook = Outlook(spec, [])
    outlook.add(expand(spec)[0], State.PENDING, 0)
    assert outlook.ends() == {}
    assert outlook.line() is None
