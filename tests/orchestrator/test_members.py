"""A run's processes: whatever a killed controller left is found and ended, and nothing else is."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from orchestrator.pools import members
from orchestrator.pools.members import (
    Member,
    kill,
    leftovers,
    living_node,
    node_is_alive,
    record,
    sweep,
    this_member,
)
from orchestrator.store.lease import Lease

Start = Callable[..., "subprocess.Popen[bytes]"]


def no_fence() -> None:
    """The lease is held."""


def member_of(pid: int, role: str = "sampler 0") -> Member:
    return Member(role, "", socket.gethostname(), pid, psutil.Process(pid).create_time())


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes that serve a run, or none."""
    started = []

    def start(run_dir: Path | None = None, of: Member | None = None) -> "subprocess.Popen[bytes]":
        variables = {} if run_dir is None else {members.RUN_VARIABLE: str(run_dir)}
        if of is not None:
            variables[members.MEMBER_VARIABLE] = of.tag
        process = subprocess.Popen(["sleep", "600"], env=os.environ | variables)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


class Engine:
    """An actor with a process of its own."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None

    def identify(self) -> Member:
        return this_member("sampler 0")

    def start_child(self) -> int:
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        return self.child.pid


@pytest.fixture
def engine(ray_cluster: None, tmp_path: Path) -> Iterator[Any]:
    variables = {members.RUN_VARIABLE: str(tmp_path)}
    actor = ray.remote(Engine).options(num_cpus=0, runtime_env={"env_vars": variables}).remote()
    yield actor
    ray.kill(actor)


def test_a_process_with_another_creation_time_is_not_touched(start: Start) -> None:
    process = start()
    own = member_of(process.pid)
    earlier = Member(own.role, own.node_id, own.host, own.pid, own.create_time - 100)
    asyncio.run(kill(earlier))
    assert runs(process.pid)
    asyncio.run(kill(own))
    assert not runs(process.pid)
    asyncio.run(kill(own))  # it is gone: no error


@pytest.mark.engine
def test_a_stopped_engine_and_its_children_are_ended(engine: Any) -> None:
    member, child = ray.get([engine.identify.remote(), engine.start_child.remote()])
    psutil.Process(child).suspend()
    os.kill(member.pid, signal.SIGSTOP)
    asyncio.run(kill(member))
    assert not runs(member.pid)
    assert not runs(child)


@pytest.mark.engine
def test_an_engine_that_its_controller_did_not_come_to_record_is_ended_by_the_next_start(
    engine: Any, tmp_path: Path
) -> None:
    member, child = ray.get([engine.identify.remote(), engine.start_child.remote()])
    assert {found.pid for found in sweep(tmp_path, 1)} == {member.pid, child}
    assert not runs(member.pid)
    assert not runs(child)


@pytest.mark.engine
def test_what_a_dead_engine_left_is_ended_with_it_and_only_that(
    engine: Any, start: Start, tmp_path: Path
) -> None:
    member, child = ray.get([engine.identify.remote(), engine.start_child.remote()])
    of_another = start(tmp_path)
    os.kill(member.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while runs(member.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    # Ray may be quick enough to end the child itself; what it leaves is ours to end.
    asyncio.run(kill(member))
    assert not runs(child)
    assert runs(of_another.pid)


@pytest.mark.engine
def test_a_process_of_another_host_is_ended_by_a_task_on_that_host(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    member, child = ray.get([engine.identify.remote(), engine.start_child.remote()])
    assert living_node(member) == member.node_id
    assert node_is_alive(member.node_id)
    assert not node_is_alive("0" * 56)
    monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
    asyncio.run(kill(member))
    assert not runs(member.pid)
    assert not runs(child)


def test_a_process_of_a_host_that_is_gone_is_left_and_stays_on_record(start: Start, tmp_path: Path) -> None:
    process = start()
    elsewhere = Member("grader", "", "a-host-that-is-gone", process.pid, member_of(process.pid).create_time)
    record(tmp_path, 1, elsewhere, no_fence)
    asyncio.run(kill(elsewhere))
    assert sweep(tmp_path, 2) == []
    assert runs(process.pid)
    assert (tmp_path / "members" / "e000001.jsonl").exists()


def test_a_start_ends_what_earlier_epochs_left_and_nothing_of_others(start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    recorded, current = start(run_dir), start(tmp_path / "current")
    unrecorded = start(run_dir)
    of_another_run, of_nobody = start(tmp_path / "run2"), start()
    record(run_dir, 1, member_of(recorded.pid), no_fence)
    record(run_dir, 3, member_of(current.pid, "learner 0 rank 0"), no_fence)

    ended = sweep(run_dir, 3)

    assert {(member.pid, member.role) for member in ended} == {
        (recorded.pid, "sampler 0"),
        (unrecorded.pid, "unrecorded"),
    }
    assert [runs(p.pid) for p in (recorded, unrecorded)] == [False, False]
    assert [runs(p.pid) for p in (current, of_another_run, of_nobody)] == [True, True, True]
    assert [path.name for path in (run_dir / "members").iterdir()] == ["e000003.jsonl"]
    assert sweep(run_dir, 3) == []


def test_while_a_controller_may_live_only_earlier_epochs_count_as_left(start: Start, tmp_path: Path) -> None:
    first = Lease.acquire(tmp_path / "controller.lease", "first", time_to_live=0.1)
    old, present, starting = start(tmp_path), start(tmp_path), start(tmp_path)
    record(tmp_path, first.epoch, member_of(old.pid), no_fence)
    second = Lease.acquire(tmp_path / "controller.lease", "second", time_to_live=0.1)
    record(tmp_path, second.epoch, member_of(present.pid, "sampler 1"), no_fence)
    assert [member.pid for member in leftovers(tmp_path)] == [old.pid]
    second.release()
    assert {member.pid for member in leftovers(tmp_path)} == {old.pid, present.pid, starting.pid}


def test_a_run_that_nobody_has_started_left_nothing(tmp_path: Path) -> None:
    assert leftovers(tmp_path) == []
    assert sweep(tmp_path, 1) == []


def test_a_record_that_was_cut_off_by_a_crash_is_read_up_to_there(start: Start, tmp_path: Path) -> None:
    process = start()
    record(tmp_path, 1, member_of(process.pid), no_fence)
    path = tmp_path / "members" / "e000001.jsonl"
    whole = path.read_text()
    assert json.loads(whole)["pid"] == process.pid
    path.write_text(whole + whole[:30])
    assert [member.pid for member in sweep(tmp_path, 2)] == [process.pid]


def test_a_writer_that_lost_the_lease_records_nothing(start: Start, tmp_path: Path) -> None:
    def lost() -> None:
        raise RuntimeError("lease lost")

    with pytest.raises(RuntimeError, match="lease lost"):
        record(tmp_path, 1, member_of(start().pid), lost)
    assert list((tmp_path / "members").iterdir()) == []
