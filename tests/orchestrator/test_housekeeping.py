"""What may go, and that nothing else does."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.operating.housekeeping import garbage, remove
from orchestrator.pools import members
from orchestrator.store import checkpoint_folders
from orchestrator.store.cell_state import State
from orchestrator.store.lease import Lease
from orchestrator.store.requests import pending
from orchestrator.store.run_store import RunStore
from tests.orchestrator.small_run import attempt, held, make_run, small_grid

DONE, FAILED, RUNNING = "bp2-n4-s0", "bp2-n4-s1", "bp2-n4-s2"


def files(run_dir: Path) -> dict[str, int]:
    return {
        found.relative_to(run_dir).as_posix(): found.stat().st_size
        for found in run_dir.rglob("*")
        if found.is_file() and "controller.lease" not in found.parts
    }


def clean(run_dir: Path) -> list[str]:
    """What ``gc --yes`` does; what it says could not be removed."""
    store = RunStore.existing(run_dir)
    with Lease.acquire(store.lease_dir, "gc:1", time_to_live=5.0) as lease:
        found = garbage(store)
        store.hold(lease.epoch, lease.check)
        return remove(store, found, lease.epoch, lease.check)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished cell with two checkpoints, a failed one with two and one half-written, and one that was never tried."""
    folder = tmp_path / "run"
    make_run(folder)
    with held(folder) as store:
        attempt(store, DONE, 4, checkpoint=True)
        attempt(store, DONE, 4, State.FINISHED, checkpoint=True)
        attempt(store, FAILED, 2, checkpoint=True)
        attempt(store, FAILED, 2, State.FAILED, "broken", checkpoint=True)
        writer = store.cell(FAILED)
        (writer.begin_checkpoint(5) / "weights").write_text("half")
        whole = writer.begin_checkpoint(6)
        (whole / "weights").write_text("6")
        writer.complete_checkpoint(whole)
    return folder


def kinds(run_dir: Path) -> set[tuple[str, str]]:
    return {(item.kind, item.what) for item in garbage(RunStore.existing(run_dir))}


OLD = {
    ("checkpoint", f"cells/{DONE}/checkpoints/step_00000004-e0001-a1"),
    ("checkpoint", f"cells/{FAILED}/checkpoints/step_00000005-e0001-a2"),
    ("checkpoint", f"cells/{FAILED}/checkpoints/step_00000006-e0001-a2"),
}


def test_a_dry_run_lists_old_and_uncommitted_checkpoints_and_removes_nothing(run_dir: Path) -> None:
    before = files(run_dir)
    found = garbage(RunStore.existing(run_dir))
    assert {(item.kind, item.what) for item in found} == OLD
    assert {item.why for item in found} == {
        "the cell is finished, a newer one is committed",
        "incomplete",
        "newer than the cell's commit",
    }
    assert files(run_dir) == before


def test_sizes_are_those_of_the_files(run_dir: Path) -> None:
    for item in garbage(RunStore.existing(run_dir)):
        assert item.path is not None
        assert item.bytes == sum(path.stat().st_size for path in item.path.rglob("*"))


def test_all_that_a_resume_needs_is_left(run_dir: Path) -> None:
    before = files(run_dir)
    assert clean(run_dir) == []
    gone = {name for name in before if any(name.startswith(f"{what}/") for _, what in OLD)}
    assert files(run_dir) == {name: size for name, size in before.items() if name not in gone}
    assert kinds(run_dir) == set()
    store = RunStore.existing(run_dir)
    for cell in (DONE, FAILED):
        commit = store.cell(cell).read().commit
        assert commit is not None and commit.checkpoint is not None
        checkpoint_folders.verify(store.cell(cell).folder / commit.checkpoint)


def test_a_finished_cell_with_more_steps_to_do_keeps_its_earlier_checkpoints(tmp_path: Path) -> None:
    store = make_run(tmp_path / "run", small_grid(compute_rollouts=128))
    with held(store.run_dir) as writable:
        attempt(writable, DONE, 4, checkpoint=True)
        attempt(writable, DONE, 4, State.FINISHED, checkpoint=True)
    assert kinds(store.run_dir) == set()


def test_temporaries_of_broken_off_writes_and_requests_set_aside(run_dir: Path) -> None:
    hour_ago = time.time() - 3700
    old = run_dir / "cells" / RUNNING / ".state.json.e000001.0123456789ab.tmp"
    fresh = run_dir / "requests" / ".1-a.json.e000000.0123456789ab.tmp"
    strange = run_dir / "requests" / "strange.json"
    for path in (old, fresh, strange):
        path.parent.mkdir(exist_ok=True)
        path.write_text("{")
    os.utime(old, (hour_ago, hour_ago))
    pending(run_dir)
    assert kinds(run_dir) - OLD == {
        ("temporary", old.relative_to(run_dir).as_posix()),
        ("request", "requests/set_aside/strange.json"),
    }
    clean(run_dir)
    assert (
        fresh.exists()
        and not old.exists()
        and not (run_dir / "requests" / "set_aside" / "strange.json").exists()
    )


def test_what_cannot_be_removed_is_said_and_the_rest_goes(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = checkpoint_folders.remove

    def refuse_one(path: Path) -> None:
        if path.name.startswith("step_00000005"):
            raise PermissionError(13, "Permission denied")
        really(path)

    monkeypatch.setattr(checkpoint_folders, "remove", refuse_one)
    faults = clean(run_dir)
    assert faults == [f"cells/{FAILED}/checkpoints/step_00000005-e0001-a2: not removed (Permission denied)"]
    assert len(kinds(run_dir)) == 1


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    yield started
    started.kill()
    started.wait()


def test_a_process_that_a_controller_left_is_found_and_ended(
    run_dir: Path, process: "subprocess.Popen[bytes]"
) -> None:
    created = psutil.Process(process.pid).create_time()
    left = members.Member("sampler 0", "0" * 40, socket.gethostname(), process.pid, created)
    with held(run_dir) as store:
        members.record(run_dir, 2, left, lambda: None)  # the fixture's controller had epoch 1
        assert not [item for item in garbage(store) if item.member], "its controller lives"
    assert [item.member for item in garbage(RunStore.existing(run_dir)) if item.member] == [left]
    assert process.poll() is None
    assert clean(run_dir) == []
    assert not psutil.pid_exists(process.pid)
