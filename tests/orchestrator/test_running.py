"""What signals do to a run: the real shell around the controller in a process of its own, with a stand-in for the controller."""

import asyncio
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import pytest

from grids.expansion import expand
from grids.loading import dump_grid
from orchestrator.control import running, stopping
from orchestrator.control.controller import Controller
from orchestrator.exit_codes import ExitCode
from orchestrator.store.lease import Lease, read_record
from orchestrator.store.phase_log import PhaseKind, PhaseLog, PhaseRecord
from orchestrator.store.run_store import RunStore
from tests.orchestrator.stand_in_pools import RecordingConsole, StandInTracker, trial_grid

LONG = 60.0
"""Seconds that no test may take."""


class ClosingTracker(StandInTracker):
    """Leaves word of how the run was said to end."""

    def __init__(self, run_dir: Path, start: Callable[[], None]) -> None:
        super().__init__()
        self._run_dir, self._start = run_dir, start

    def start(self, params: Any, tags: Any) -> None:
        self._start()

    def artifacts(self, path: Path) -> None:
        pass

    def reconcile(self, states: Any) -> None:
        pass

    def close(self, status: str | None, timeout: float) -> int:
        (self._run_dir / "closed").write_text(str(status))
        return 0


class StandInController:
    """A controller whose cells never end; told to drain it does as ``how`` says."""

    def __init__(self, run_dir: Path, how: str, grace_seconds: float) -> None:
        self.spec = trial_grid(grace_seconds=grace_seconds)
        self.run_store = RunStore(run_dir, {"run_id": "r", "spec": dump_grid(self.spec)})
        self.console = RecordingConsole()
        self.tracker = ClosingTracker(run_dir, self._at_start)
        self._run_dir, self._how = run_dir, how
        self._draining = asyncio.Event()

    def _at_start(self) -> None:
        if self._how == "starts for long":
            self._say("ready")
            time.sleep(LONG)

    async def run(self, *_: Any) -> None:
        self._say("ready")
        await self._draining.wait()
        if self._how == "commits":
            await asyncio.sleep(0.05)
            self._say("committed")
        elif self._how == "cannot commit in time":
            try:
                await asyncio.sleep(LONG)
            finally:
                self._say("cancelled")
        elif self._how == "is stuck":
            while True:
                try:
                    await asyncio.sleep(LONG)
                except asyncio.CancelledError:
                    self._say("cancelled")
        elif self._how == "blocks the loop":
            self._say("blocked")
            time.sleep(LONG)

    def drain(self) -> None:
        self._say("drained")
        self._draining.set()

    def _say(self, word: str) -> None:
        (self._run_dir / word).touch()


def run_held(run_dir: Path, how: str, grace_seconds: float) -> ExitCode:
    controller = StandInController(run_dir, how, grace_seconds)
    with Lease.acquire(controller.run_store.lease_dir, "the child", time_to_live=1.0) as lease:
        controller.run_store.hold(lease.epoch, lease.check)
        cells = expand(controller.spec)
        return running._run_held(cells, cells, {}, cast(Controller, controller), lease)


def child(run_dir: Path, how: str, grace_seconds: float, stuck_seconds: float) -> None:
    stopping.STUCK_SECONDS = stuck_seconds
    stopping.LOST_LEASE_POLL_SECONDS = 0.05
    sys.exit(stopping.interruptible(lambda: run_held(run_dir, how, grace_seconds)))


@contextmanager
def started(
    run_dir: Path, how: str, grace_seconds: float = LONG, stuck_seconds: float = LONG
) -> Generator[BaseProcess, None, None]:
    """A run in a process of its own that is under way."""
    # Forked, so that it need not import Ray and torch again.
    process = multiprocessing.get_context("fork").Process(
        target=child, args=(run_dir, how, grace_seconds, stuck_seconds)
    )
    process.start()
    try:
        wait_for(run_dir / "ready")
        yield process
    finally:
        process.kill()
        process.join()


def wait_for(path: Path) -> None:
    limit = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < limit, f"no {path.name}"
        time.sleep(0.005)


def tell(process: BaseProcess, number: int = signal.SIGTERM) -> None:
    assert process.pid is not None
    os.kill(process.pid, number)


def exit_code(process: BaseProcess, seconds: float = 10.0) -> int | None:
    """None when it has not ended by then."""
    process.join(seconds)
    return process.exitcode


def is_released(run_dir: Path) -> bool:
    record = read_record(run_dir / "controller.lease")
    return record is not None and record.released


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_first_signal_lets_cells_commit_and_ends_as_interrupted(tmp_path: Path, number: int) -> None:
    with started(tmp_path, "commits") as process:
        tell(process, number)
        assert exit_code(process) == ExitCode.INTERRUPTED
    assert (tmp_path / "committed").exists()
    assert (tmp_path / "closed").read_text() == "KILLED"
    assert is_released(tmp_path)


def test_cells_that_cannot_commit_within_the_grace_time_are_cancelled(tmp_path: Path) -> None:
    with started(tmp_path, "cannot commit in time", grace_seconds=0.2) as process:
        tell(process)
        assert exit_code(process) == ExitCode.INTERRUPTED
    assert (tmp_path / "cancelled").exists()
    assert (tmp_path / "closed").read_text() == "KILLED"
    assert is_released(tmp_path)


@pytest.mark.parametrize("how", ["cannot commit in time", "is stuck"])
def test_a_second_signal_ends_the_run_at_once(tmp_path: Path, how: str) -> None:
    with started(tmp_path, how) as process:
        tell(process)
        wait_for(tmp_path / "drained")
        tell(process)
        assert exit_code(process) == ExitCode.INTERRUPTED
    assert is_released(tmp_path)


def test_a_second_signal_ends_also_a_run_whose_event_loop_is_held_up(tmp_path: Path) -> None:
    with started(tmp_path, "blocks the loop") as process:
        tell(process)
        wait_for(tmp_path / "blocked")
        tell(process)
        assert exit_code(process) == ExitCode.INTERRUPTED
    assert is_released(tmp_path)


def test_a_run_that_a_cancellation_does_not_end_is_ended_some_time_later(tmp_path: Path) -> None:
    with started(tmp_path, "is stuck", grace_seconds=0.1, stuck_seconds=0.3) as process:
        tell(process)
        assert exit_code(process) == ExitCode.INTERRUPTED
    assert (tmp_path / "cancelled").exists()
    assert is_released(tmp_path)


def test_a_signal_before_the_cells_start_ends_as_interrupted(tmp_path: Path) -> None:
    with started(tmp_path, "starts for long") as process:
        tell(process)
        assert exit_code(process) == ExitCode.INTERRUPTED
    assert (tmp_path / "closed").read_text() == "KILLED"
    assert is_released(tmp_path)


def test_a_run_that_another_controller_takes_over_leaves_it_to_that_one(tmp_path: Path) -> None:
    with started(tmp_path, "never") as process:
        record = (tmp_path / "controller.lease" / "000001.json").read_text()
        (tmp_path / "controller.lease" / "000002.json").write_text(record.replace('"epoch": 1', '"epoch": 2'))
        assert exit_code(process) == ExitCode.UNFINISHED
    assert (tmp_path / "closed").read_text() == "None"
    assert not is_released(tmp_path)


def test_the_end_of_a_run_tells_where_the_time_of_all_its_starts_went(tmp_path: Path) -> None:
    console = RecordingConsole()
    running._say_spent(tmp_path, console)
    assert console.said == []
    phase = PhaseRecord("sampler 0", PhaseKind.SAMPLING, "c", 1, 0.0, 1800.0, 0.0, 8, 40, 1)
    for epoch in (1, 2):
        with PhaseLog(tmp_path, epoch, lambda: None, print) as log:
            log.add(phase)
    running._say_spent(tmp_path, console)
    assert console.said == [
        "pools: 1 accelerator-hours: 100.0% training, 0.0% evaluation, 0.0% upkeep, 0.0% replayed, 0.0% idle"
    ]
