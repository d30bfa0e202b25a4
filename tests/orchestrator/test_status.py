"""What a run's folder says about its cells and about who holds it."""

import csv
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from grids.errors import UserError
from grids.expansion import canary_of
from orchestrator.operating.outlook import Outlook
from orchestrator.operating.status import chosen_rows, counts_line, status_rows
from orchestrator.operating.status_view import StatusView, watch_status
from orchestrator.store.cell_state import Spent, State
from orchestrator.store.holding import HolderWatch, holder_line
from orchestrator.store.lease import Lease
from orchestrator.store.phase_log import PhaseKind, PhaseLog, PhaseRecord
from orchestrator.tables import FOLDED_ROWS, Format, Seconds, aligned_lines, print_rows
from tests.orchestrator.small_run import attempt, held, make_run, small_grid


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Four cells of 8 steps: finished, failed at step 3, never tried, running at step 2 with a row of step 3."""
    folder = tmp_path / "run"
    make_run(folder, small_grid(seeds=4))
    with held(folder) as store:
        attempt(store, "bp2-n4-s0", 8, State.FINISHED)
        attempt(store, "bp2-n4-s1", 3, State.FAILED, "[rank 0] broke")
        store.cell("bp2-n4-s1").set_state(State.FAILED, "[rank 0] broke", spent=Spent(2, 1, at_step=3))
        attempt(store, "bp2-n4-s3", 2)
        store.cell("bp2-n4-s3").set_state(State.RUNNING, spent=Spent(1, 0, at_step=0))
        with (folder / "cells" / "bp2-n4-s3" / "history.jsonl").open("a") as history:
            history.write('{"step": 3, "compute_rollouts": 24, "avg_at_4": 0.3}\n{"step": 4, "compu')
    return folder


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return StatusView(run_dir).read(None)[0]


def test_each_cell_of_the_grid_has_a_row(run_dir: Path) -> None:
    shown = [
        (
            row["cell"],
            row["state"],
            row["step"],
            row["M"],
            row["C"],
            row["avg@4"],
            row["attempt"],
            row["committed"],
        )
        for row in rows_of(run_dir)
    ]
    assert shown == [
        ("bp2-n4-s0", "finished", 8, 8, 64, 0.8, 1, 8),
        ("bp2-n4-s1", "failed", 3, 8, 24, 0.3, 1, 3),
        ("bp2-n4-s2", "pending", 0, 8, 0, None, 0, 0),
        ("bp2-n4-s3", "running", 3, 8, 24, 0.3, 1, 2),
    ]


def test_a_canary_has_its_own_cells_and_no_others(tmp_path: Path) -> None:
    spec = canary_of(small_grid(seeds=4))
    make_run(tmp_path / "run", spec)
    assert [(row["cell"], row["M"]) for row in rows_of(tmp_path / "run")] == [("bp2-n4-s0", 2)]


def test_csv_has_a_header_also_where_no_cell_is_chosen(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    StatusView(run_dir, states="cancelled", format_=Format.CSV).show(None)
    assert capsys.readouterr().out.strip() == ",".join(rows_of(run_dir)[0])


def test_retries_count_from_the_last_commit_on(run_dir: Path) -> None:
    # The failed cell has spent 2 + 1 at its commit; the running one has committed beyond the step that it spent one at.
    assert [row["retries"] for row in rows_of(run_dir)] == [0, 3, 0, 0]


def test_the_last_sign_of_life_is_a_new_row_or_a_new_state(run_dir: Path) -> None:
    now = time.time() + 1000
    history = run_dir / "cells" / "bp2-n4-s3" / "history.jsonl"
    os.utime(history, (now - 40, now - 40))
    spec = small_grid(seeds=4)
    ages = [row["age"] for row in status_rows(make_run(run_dir, spec), spec, Outlook(spec, []), now)]
    assert ages[0] == pytest.approx(1000, abs=60)
    assert ages[2:] == [None, pytest.approx(40, abs=1)]


def test_cells_to_be_trained_have_an_eta_once_phases_are_on_record(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [row["eta"] for row in rows_of(run_dir)] == [None] * 4
    with PhaseLog(run_dir, 1, lambda: None, print) as log:
        for kind in (PhaseKind.SAMPLING, PhaseKind.GRADING, PhaseKind.LEARNING):
            log.add(PhaseRecord("grader", kind, "bp2-n4-s3", 3, 0.0, 10.0, 0.0, 8, 40, 1))
    # 30 s a step: the running cell has made 3 of 8, the one that waits none; no evaluation was seen.
    etas = [row["eta"] for row in rows_of(run_dir)]
    assert etas[:2] == [None, None] and etas[2:] == pytest.approx([240, 150], rel=0.02)
    StatusView(run_dir).show(None)
    assert "4m00s" in capsys.readouterr().out.splitlines()[-1]


def test_a_finished_cell_of_a_larger_budget_is_pending(tmp_path: Path) -> None:
    store = make_run(tmp_path / "run", small_grid(compute_rollouts=128))
    with held(store.run_dir) as writable:
        attempt(writable, "bp2-n4-s0", 8, State.FINISHED)
    row = rows_of(store.run_dir)[0]
    assert (row["state"], row["step"], row["M"]) == ("pending", 8, 16)


def test_rows_of_chosen_states(run_dir: Path) -> None:
    rows = rows_of(run_dir)
    assert [row["cell"] for row in chosen_rows(rows, "failed,running", None, False)] == [
        "bp2-n4-s1",
        "bp2-n4-s3",
    ]
    with pytest.raises(UserError, match=r"--state: no state 'fialed'; states are pending, running"):
        chosen_rows(rows, "fialed", None, False)


def test_rows_in_the_order_of_a_column_with_missing_values_last(run_dir: Path) -> None:
    def seeds(sort: str, descending: bool) -> str:
        return "".join(row["cell"][-1] for row in chosen_rows(rows_of(run_dir), None, sort, descending))

    assert seeds("step", False) == "2130"
    assert seeds("step", True) == "0132"
    assert seeds("AVG@4", False) == "1302"
    assert seeds("avg@4", True) == "0132"
    with pytest.raises(UserError, match=r"--sort: no column 'speed'; columns are cell, state, step, M"):
        chosen_rows(rows_of(run_dir), None, "speed", False)


def test_counts_in_words(run_dir: Path) -> None:
    assert counts_line(rows_of(run_dir)) == "4 cells: 1 pending, 1 running, 1 finished, 1 failed"


def test_who_holds_the_run(tmp_path: Path) -> None:
    lease_dir = tmp_path / "controller.lease"
    assert holder_line(HolderWatch(lease_dir).look()) == "nobody holds the run"
    with Lease.acquire(lease_dir, "node7:123 (job-5)", time_to_live=5.0):
        line = holder_line(HolderWatch(lease_dir).look())
        assert line.startswith("held by node7:123 (job-5) since 20")
    assert HolderWatch(lease_dir).look() is None


def test_a_holder_that_stands_still_for_its_time_to_live_is_gone(tmp_path: Path) -> None:
    lease = Lease.acquire(tmp_path, "node7:123", time_to_live=5.0)
    seconds = 100.0
    watch = HolderWatch(tmp_path, clock=lambda: seconds)
    assert watch.look() is not None
    seconds = 104.0
    lease.beat()
    assert watch.look() is not None
    seconds = 108.0
    assert watch.look() is not None
    seconds = 109.5
    assert watch.look() is None


def test_watching_ends_when_nobody_holds_the_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    looks = 0
    with Lease.acquire(run_dir / "controller.lease", "node7:123", time_to_live=5.0) as lease:

        def sleep(_: float) -> None:
            nonlocal looks
            looks += 1
            if looks == 2:
                lease.release()

        watch_status(StatusView(run_dir, format_=Format.JSON), 1.0, sleep)
    captured = capsys.readouterr()
    assert captured.out.count('"cell": "bp2-n4-s0"') == 3
    held_lines = captured.err.splitlines()
    assert ["held by node7" in line for line in held_lines] == [True, True, False]


def test_the_three_formats_hold_the_same(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    StatusView(run_dir, sort="step", format_=Format.JSON).show(None)
    from_json = json.loads(capsys.readouterr().out)
    StatusView(run_dir, sort="step", format_=Format.CSV).show(None)
    from_csv = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    StatusView(run_dir, sort="step").show(None)
    lines = capsys.readouterr().out.splitlines()
    assert [row["cell"] for row in from_json] == [row["cell"] for row in from_csv]
    assert [line.split()[0] for line in lines] == ["cell", *(row["cell"] for row in from_json), "4"]
    assert float(from_csv[-1]["age"]) >= 0
    # Brackets in a reason are no markup.
    assert from_json[1]["reason"] == "[rank 0] broke" and "[rank 0] broke" in lines[2]


def test_a_long_table_has_one_line_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"cell": f"c{index}", "step": index, "age": Seconds(3725.0), "reason": "two\nlines"}
        for index in range(FOLDED_ROWS + 1)
    ]
    print_rows(rows, Format.TABLE)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(rows) + 1
    assert lines[0] == "cell  step    age  reason"
    assert lines[8] == "c7       7  1h02m  two lines"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (60, "1m00s"),
        (3599, "59m59s"),
        (3600, "1h00m"),
        (172_799, "47h59m"),
        (180_000, "2d02h"),
    ],
)
def test_durations_for_people(seconds: float, shown: str) -> None:
    assert aligned_lines([{"age": Seconds(seconds)}])[1].strip() == shown
