"""How benchmarks read their figures from run folders, on folders made up by hand."""

import json
from pathlib import Path

import pytest

from benchmarks.grid_rate import read_rate
from benchmarks.interleaving import Timing, stale_rows, timing
from benchmarks.predict import compare_run
from grids.errors import UserError
from grids.expansion import expand
from orchestrator.store.cell_state import State
from orchestrator.store.run_store import RunStore
from tests.orchestrator.small_run import held, make_run, small_grid

Row = dict[str, float]


def write_cell(run_dir: Path, cell: str, started_at: float, ended_at: float, rows: list[Row]) -> None:
    attempt = run_dir / "cells" / cell / "attempts" / "1"
    attempt.mkdir(parents=True)
    (attempt / "attempt.json").write_text(json.dumps({"started_at": started_at, "ended_at": ended_at}))
    lines = [f"{json.dumps(row)}\n" for row in rows]
    (run_dir / "cells" / cell / "history.jsonl").write_text("".join(lines))


def row(step: int, sampling: float, learning: float, evaluating: float, staleness: float = 0.0) -> Row:
    return {
        "step": step,
        "seconds_sampling": sampling,
        "seconds_learning": learning,
        "seconds_evaluating": evaluating,
        "staleness": staleness,
    }


def test_sums_of_phases_count_every_step_of_an_interval_and_wall_clock_spans_all_attempts(
    tmp_path: Path,
) -> None:
    write_cell(tmp_path, "a", 100.0, 130.0, [row(2, 1.0, 0.5, 3.0), row(6, 2.0, 0.25, 4.0)])
    write_cell(tmp_path, "b", 90.0, 125.0, [row(1, 0.5, 0.5, 0.25)])
    # 2 * 1 + 3 + 4 * 2 + 4, and 0.5 + 0.25; 2 * 0.5 + 4 * 0.25, and 0.5.
    assert timing(tmp_path) == Timing(wall=40.0, sampling=17.75, learning=2.5)


def test_stale_rows_are_named(tmp_path: Path) -> None:
    write_cell(tmp_path, "a", 0.0, 1.0, [row(2, 1, 1, 1), row(4, 1, 1, 1, staleness=1.0)])
    assert stale_rows(tmp_path) == [f"{tmp_path.name}: a trained on stale rollouts before step 4"]


COLUMNS = {
    "seconds_sampling": 0.5,
    "seconds_learning": 0.25,
    "train_reward": 0.5,
    "response_tokens": 4.0,
    "zero_variance_right": 0.25,
    "zero_variance_wrong": 0.125,
}


def run_of_two_cells(run_dir: Path, ends: tuple[State, State]) -> None:
    """Two cells of 5 steps of 8 rollouts, tried one after the other."""
    spec = small_grid(2, compute_rollouts=40)
    make_run(run_dir, spec)
    with held(run_dir) as store:
        for cell, end in zip(expand(spec), ends, strict=True):
            writer = store.cell(cell.id)
            writer.start_attempt()
            writer.append_row({"cell": cell.id, "step": 5, "compute_rollouts": 40, **COLUMNS})
            writer.commit(5, None, {}, end)
            writer.end_attempt(str(end))
            writer.close()


def test_a_rate_counts_all_rollouts_from_the_first_start_to_the_last_end(tmp_path: Path) -> None:
    run_of_two_cells(tmp_path, (State.FINISHED, State.FINISHED))
    spec = small_grid(2, compute_rollouts=40)
    attempts = [
        attempt for cell in expand(spec) for attempt in RunStore.existing(tmp_path).cell(cell.id).attempts()
    ]
    first = min(attempt.started_at for attempt in attempts)
    last = max(attempt.ended_at or 0.0 for attempt in attempts)
    rate = read_rate(tmp_path, spec, submitted_at=first - 7.0)
    assert (rate.rollouts, rate.batch_rollouts) == (80, 8)
    assert rate.seconds == pytest.approx(last - first) and rate.start_up_seconds == pytest.approx(7.0)
    assert rate.core_seconds_per_rollout == pytest.approx(0.75 / 8)
    assert rate.zero_variance == pytest.approx(0.375)


def test_a_grid_with_a_cell_that_did_not_finish_has_no_rate(tmp_path: Path) -> None:
    run_of_two_cells(tmp_path, (State.FINISHED, State.FAILED))
    with pytest.raises(UserError, match="did not finish at its first try"):
        read_rate(tmp_path, small_grid(2, compute_rollouts=40), submitted_at=0.0)


def test_a_run_with_a_cell_that_is_not_finished_is_not_predicted(tmp_path: Path) -> None:
    run_of_two_cells(tmp_path, (State.FINISHED, State.FAILED))
    last = expand(small_grid(2, compute_rollouts=40))[1].id
    with pytest.raises(UserError, match=f"{last} is not finished"):
        compare_run(tmp_path)
