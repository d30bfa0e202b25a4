"""Phases on record: every line that was written is read again, a bounded number of them, and nothing here stops a run."""

import errno
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.diagnostics.pools import pools_at_work
from analysis.figures.pools import LOOKS
from analysis.reading.phases import read_phases
from analysis.reading.raw_rows import Complaints
from orchestrator.store import phase_log
from orchestrator.store.lease import LeaseLost
from orchestrator.store.phase_log import PhaseKind, PhaseLog, PhaseRecord, read_epochs, recent_records

RECORD = PhaseRecord("sampler 0", PhaseKind.SAMPLING, "bp2-n4-s0", 1, 1000.0, 2.5, 0.25, 8, 40, 2)


def written(
    run_dir: Path,
    records: list[PhaseRecord],
    epoch: int = 1,
    fence: Callable[[], None] = lambda: None,
) -> list[str]:
    """Records given to a log that is then closed; what it said."""
    said: list[str] = []
    with PhaseLog(run_dir, epoch, fence, said.append) as log:
        for record in records:
            log.add(record)
    return said


def test_what_was_recorded_is_read_as_it_was(tmp_path: Path) -> None:
    records = [
        RECORD,
        RECORD._replace(member="learner 1", kind=PhaseKind.LEARNING, started_at=1.234567, failed=True),
        RECORD._replace(kind=PhaseKind.EVALUATION_GRADING, accelerators=0, cell="base"),
    ]
    written(tmp_path, records)
    assert recent_records(tmp_path) == records
    assert list(read_epochs(tmp_path)) == [records]


def test_a_line_tells_all_in_plain_names(tmp_path: Path) -> None:
    written(tmp_path, [RECORD])
    assert json.loads((tmp_path / "phases" / "e000001-000001.jsonl").read_text()) == {
        "member": "sampler 0",
        "kind": "sampling",
        "cell": "bp2-n4-s0",
        "step": 1,
        "started_at": 1000.0,
        "busy_seconds": 2.5,
        "waited_seconds": 0.25,
        "sequences": 8,
        "tokens": 40,
        "accelerators": 2,
        "failed": False,
    }


def test_the_report_reads_every_kind_and_start_of_what_a_run_writes(tmp_path: Path) -> None:
    records = [RECORD._replace(kind=kind, failed=kind is PhaseKind.COMMIT) for kind in PhaseKind]
    written(tmp_path, records)
    written(tmp_path, [RECORD], epoch=12)
    complaints: Complaints = defaultdict(list)
    phases = read_phases(tmp_path, complaints)
    assert phases is not None
    assert list(zip(phases["start"], phases["kind"], phases["failed"], strict=True)) == [
        *(("e000001", str(kind), kind is PhaseKind.COMMIT) for kind in PhaseKind),
        ("e000012", "sampling", False),
    ]
    assert set(phases["busy_seconds"]) == {2.5}
    shown = pools_at_work(phases)
    assert shown is not None
    assert {*shown.stretch.bars["kind"]} == {str(kind) for kind in PhaseKind}
    assert {*shown.stretch.bars["kind"]} <= {*LOOKS}


def test_a_record_is_on_disk_soon_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phase_log, "WRITE_SECONDS", 0.01)
    with PhaseLog(tmp_path, 1, lambda: None, print) as log:
        log.add(RECORD)
        limit = time.monotonic() + 10
        while not recent_records(tmp_path):
            assert time.monotonic() < limit
            time.sleep(0.005)


def test_segments_are_full_and_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase_log, "RECORDS_PER_SEGMENT", 3)
    monkeypatch.setattr(phase_log, "SEGMENTS_KEPT", 2)
    written(tmp_path, [RECORD._replace(step=step) for step in range(8)], epoch=1)
    written(tmp_path, [RECORD._replace(step=step) for step in range(8, 12)], epoch=2)
    # Epoch 1 wrote 0-2, 3-5, 6-7; epoch 2 wrote 8-10, 11.
    assert [[record.step for record in epoch] for epoch in read_epochs(tmp_path)] == [[8, 9, 10, 11]]
    assert sorted(path.name for path in (tmp_path / "phases").iterdir()) == [
        "e000002-000001.jsonl",
        "e000002-000002.jsonl",
    ]


def test_the_latest_records_come_from_as_many_segments_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phase_log, "RECORDS_PER_SEGMENT", 3)
    monkeypatch.setattr(phase_log, "RECENT_RECORDS", 6)
    for epoch, steps in ((1, range(4)), (2, range(4, 8))):
        written(tmp_path, [RECORD._replace(step=step) for step in steps], epoch)
    assert [record.step for record in recent_records(tmp_path)] == [2, 3, 4, 5, 6, 7]


def test_a_line_that_a_kill_cut_off_is_passed_over(tmp_path: Path) -> None:
    written(tmp_path, [RECORD])
    path = tmp_path / "phases" / "e000001-000001.jsonl"
    path.write_bytes(path.read_bytes() + RECORD.to_line()[:40])
    assert recent_records(tmp_path) == [RECORD]


def test_full_storage_is_said_once_and_later_records_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phase_log, "RECORDS_PER_WRITE", 1)
    looks = 0

    def fence() -> None:
        nonlocal looks
        looks += 1
        if looks <= 4:  # two writes: the folder is looked at too
            raise OSError(errno.ENOSPC, "No space left on device")

    said: list[str] = []
    with PhaseLog(tmp_path, 1, fence, said.append) as log:
        for step in range(8):
            log.add(RECORD._replace(step=step))
            time.sleep(0.02)
    assert looks > 4
    assert len(said) == 1 and "No space left" in said[0]
    assert [record.step for record in recent_records(tmp_path)][-1] == 7


def test_nothing_is_written_once_another_controller_has_taken_over(tmp_path: Path) -> None:
    def fence() -> None:
        raise LeaseLost("another controller")

    assert written(tmp_path, [RECORD], fence=fence) == []
    assert recent_records(tmp_path) == []
