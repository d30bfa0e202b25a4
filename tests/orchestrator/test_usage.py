"""How busy the pools are, as phases tell, and what of it goes to MLflow."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from orchestrator.clock import Clock
from orchestrator.control.recording import Recording
from orchestrator.scheduling.usage import PoolUsage, usage
from orchestrator.store.phase_log import PhaseKind, PhaseLog, PhaseRecord, recent_records
from orchestrator.tracking.tracker import Tracker
from tests.orchestrator.stand_in_pools import trial_grid

SIZES = {"sampler": 2, "learner": 1, "grader": 1}


def phase(
    member: str, kind: PhaseKind, start: float, busy: float, waited: float = 0.0, failed: bool = False
) -> PhaseRecord:
    """Of 8 sequences and 40 tokens."""
    return PhaseRecord(member, kind, "c", 1, start, busy, waited, 8, 40, 1, failed)


RECORDS = [
    phase("sampler 0", PhaseKind.SAMPLING, 0.0, 60.0, 2.0),
    phase("sampler 1", PhaseKind.EVALUATION, 50.0, 30.0, 4.0),
    phase("learner 0", PhaseKind.LEARNING, 60.0, 20.0),
    phase("learner 0", PhaseKind.LEARNING, 80.0, 20.0, failed=True),
]


def test_shares_and_rates_over_all_that_is_known() -> None:
    found = usage(RECORDS, SIZES)
    assert found is not None and found.seconds == 100
    # Sampling 60 + 30 of 2 * 100, learning 20 + 20 of 100; one step was made.
    assert found.pools == {
        "sampler": PoolUsage(0.45, 3.0),
        "learner": PoolUsage(0.4, 0.0),
        "grader": PoolUsage(0.0, 0.0),
    }
    assert (found.rollouts_per_second, found.tokens_per_second) == (0.08, 0.4)


def test_of_a_phase_that_began_before_the_window_its_part_counts() -> None:
    found = usage(RECORDS, SIZES, seconds=50.0)
    assert found is not None and found.seconds == 50
    # From 50 on: 10 + 30 of 2 * 50, and 40 of 50.
    assert [pool.busy_share for pool in found.pools.values()] == [0.4, 0.8, 0.0]
    late = usage(RECORDS, SIZES, seconds=20.0)
    assert late is not None and late.pools["sampler"] == PoolUsage(0.0, 0.0)
    assert late.rollouts_per_second == 0


@pytest.mark.parametrize("records", [[], [phase("grader", PhaseKind.START_UP, 5.0, 0.0)]])
def test_nothing_is_said_without_phases_that_took_time(records: list[PhaseRecord]) -> None:
    assert usage(records, SIZES) is None


class FiguresTracker:
    def __init__(self) -> None:
        self.sent: list[tuple[Mapping[str, float], int, int]] = []

    def grid_metrics(self, values: Mapping[str, float], step: int, at_ms: int) -> None:
        self.sent.append((values, step, at_ms))


def test_a_recording_keeps_learns_and_reports_once_a_minute(tmp_path: Path) -> None:
    seconds = 1000.0
    tracker: Any = FiguresTracker()
    said: list[str] = []
    clock = Clock(lambda: seconds, lambda: seconds)
    with PhaseLog(tmp_path, 1, lambda: None, print) as log:
        recording = Recording(
            trial_grid(), tmp_path, log, cast(Tracker, tracker), clock, 800, said.append, began=-20.0
        )
        for record in RECORDS[:3]:
            recording.take(record)
        assert tracker.sent == []
        seconds = 1060.0
        recording.take(RECORDS[3])
        seconds = 1100.0
        recording.take(RECORDS[0])
    assert recent_records(tmp_path) == [*RECORDS, RECORDS[0]]
    assert recording.costs.knows(PhaseKind.LEARNING) and recording.costs.observations == 5
    ((values, step, at_ms),) = tracker.sent
    # ``trial_grid`` has one engine: 90 of 100 s. The failed step is none.
    assert values == {
        "busy_share_sampler": 0.9,
        "busy_share_learner": 0.4,
        "busy_share_grader": 0.0,
        "queue_wait_sampler": 3.0,
        "queue_wait_learner": 0.0,
        "queue_wait_grader": 0.0,
        "rollouts_per_second": 0.08,
        "tokens_per_second": 0.4,
    }
    assert (step, at_ms) == (808, 1_060_000)
    assert said == ["first rollouts to learn from 80 s after the start"]


def test_a_recording_knows_what_earlier_controllers_recorded(tmp_path: Path) -> None:
    with PhaseLog(tmp_path, 1, lambda: None, print) as log:
        log.add(RECORDS[0])
    with PhaseLog(tmp_path, 2, lambda: None, print) as log:
        tracker = cast(Tracker, FiguresTracker())
        recording = Recording(trial_grid(), tmp_path, log, tracker, Clock(), 0, print, 0.0)
    assert recording.costs.seconds(PhaseKind.SAMPLING, 8) == pytest.approx(60)
