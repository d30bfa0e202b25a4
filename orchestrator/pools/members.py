"""The processes of a run on the cluster: recorded before they are used, ended for certain, also after a controller's SIGKILL.

A recorded process is known by pid *and* creation time, so a later process with the same pid is never touched. What a dead one left
(workers of an engine, grading processes) is known by two variables in its environment, which only processes of the run have.
"""

import asyncio
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.processes import find
from orchestrator.store.files import append_all, make_folder, read_bytes, sync_folder
from orchestrator.store.lease import read_record

RUN_VARIABLE = "ISOCOMPUTE_RUN_DIR"
"""In the environment of every process that serves a run: its folder."""
MEMBER_VARIABLE = "ISOCOMPUTE_MEMBER"
"""In the environment of a member's children: whose they are."""
DEATH_SECONDS = 5.0
"""How long a process may take to be gone after SIGKILL; only one that hangs in the kernel takes longer."""
REMOTE_SECONDS = 30.0
"""How long another node may take, with the start of a process there."""
ANSWER_SECONDS = 3.0
"""How long a living node may take to accept a connection."""
CONNECT_SECONDS = 2.0
"""How long a living raylet may take to answer."""
ROUNDS = 3
"""A process that is being ended may start another one between the look and the kill."""


@dataclass(frozen=True)
class Member:
    """One process of a pool."""

    role: str
    """``sampler 0``, ``learner 1 rank 0``, ``grader``"""
    node_id: str
    """Ray's hexadecimal id of its node."""
    host: str
    pid: int
    create_time: float
    """Seconds since the epoch."""

    @property
    def tag(self) -> str:
        """What ``MEMBER_VARIABLE`` holds in its children."""
        return f"{self.pid}-{self.create_time}"


def this_member(role: str) -> Member:
    """The calling actor's process; its children will be known as its own."""
    own = psutil.Process()
    node_id: str = ray.get_runtime_context().get_node_id()
    member = Member(role, node_id, socket.gethostname(), own.pid, own.create_time())
    os.environ[MEMBER_VARIABLE] = member.tag
    return member


def record(run_dir: Path, epoch: int, member: Member, fence: Callable[[], None]) -> None:
    """Append a member to the run's record, durably; to be done before it is used.

    ``fence`` raises when another controller has taken over.
    """
    path = make_folder(run_dir / "members") / f"e{epoch:06d}.jsonl"
    fence()
    new = not path.exists()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        append_all(descriptor, (json.dumps(asdict(member)) + "\n").encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if new:
        sync_folder(path.parent)


async def kill(member: Member) -> None:
    """End this process and all that came from it, wherever they run, also stopped ones.

    No error when the process or its node is gone, or when its node does not answer in time: the next start looks again.
    """
    if is_here(member):
        await asyncio.to_thread(_end_family, member)
        return
    node_id = living_node(member)
    if node_id is None:
        return
    reference = on_node(_end_family, node_id).remote(member)
    try:
        await asyncio.wait_for(reference, REMOTE_SECONDS)
    except (TimeoutError, RayError):
        ray.cancel(reference, force=True)


def leftovers(run_dir: Path, epoch: int | None = None) -> list[Member]:
    """Processes of earlier controllers of a run that still live on this host, or on those of the connected cluster.

    ``epoch`` is that of a caller who holds the lease and has no members yet. Without it those of the newest epoch count only when
    its holder has let go of the run, since it may be alive. What dead members left is listed with the role ``unrecorded``.
    """
    if epoch is not None:
        return _on_hosts(run_dir, epoch, _living)
    holder = read_record(run_dir / "controller.lease")
    if holder is None:
        return []
    if holder.released:
        return _on_hosts(run_dir, holder.epoch + 1, _living)
    return _on_hosts(run_dir, holder.epoch, _living_recorded)


def sweep(run_dir: Path, epoch: int) -> list[Member]:
    """End what controllers of epochs below ``epoch`` left, and forget it; what was ended.

    To be called by the holder of the lease before it starts members of its own. Records that name a host out of reach are kept
    for a later start.
    """
    ended = _on_hosts(run_dir, epoch, _end_living)
    for path, members in _records(run_dir, epoch):
        if all(_within_reach(member.host) for member in members):
            path.unlink(missing_ok=True)
    return ended


def is_here(member: Member) -> bool:
    """Whether a member runs on this machine."""
    return member.host == socket.gethostname()


def node_is_alive(node_id: str) -> bool:
    """Whether the connected cluster has this node and its raylet takes connections.

    Ray itself calls a node alive until several health checks have failed, which takes tens of seconds.
    """
    for node in ray.nodes():
        if node["NodeID"] == node_id:
            return node["Alive"] and _takes_connections(node["NodeManagerAddress"], node["NodeManagerPort"])
    return False


def _takes_connections(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def living_node(member: Member) -> str | None:
    """The node of a member, or another one of its machine (its own may have been started anew); None when there is none."""
    alive = _living_nodes(member.host)
    return member.node_id if member.node_id in alive else next(iter(alive), None)


def on_node(function: Callable[..., Any], node_id: str) -> Any:
    """A Ray task that takes no CPU, on this very node."""
    pinned = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=pinned)


def _records(run_dir: Path, below_epoch: int) -> list[tuple[Path, list[Member]]]:
    """The record files of the epochs below one, with what they hold."""
    found = []
    for path in sorted((run_dir / "members").glob("e*.jsonl")):
        number = path.stem.removeprefix("e")
        if not number.isdigit() or int(number) >= below_epoch:
            continue
        members = []
        for line in read_bytes(path).splitlines():
            try:
                members.append(Member(**json.loads(line)))
            except (ValueError, TypeError):
                continue  # cut off by a crash: that member was never used
        found.append((path, members))
    return found


def _on_hosts(
    run_dir: Path, below_epoch: int, function: Callable[[list[Member], str], list[Member]]
) -> list[Member]:
    """The results of a function on every host in reach that members are recorded on, and on this one."""
    hosts: dict[str, list[Member]] = {socket.gethostname(): []}
    for _, members in _records(run_dir, below_epoch):
        for member in members:
            hosts.setdefault(member.host, []).append(member)
    return [
        found for host, members in hosts.items() for found in _on_host(host, function, members, str(run_dir))
    ]


def _living_nodes(host: str) -> list[str]:
    if not ray.is_initialized():
        return []
    return [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeManagerHostname"] == host]


def _within_reach(host: str) -> bool:
    return host == socket.gethostname() or bool(_living_nodes(host))


def _on_host(host: str, function: Callable[..., list[Member]], *arguments: Any) -> list[Member]:
    """The function's result on a host; empty when it is out of reach."""
    if host == socket.gethostname():
        return function(*arguments)
    nodes = _living_nodes(host)
    if not nodes:
        return []
    reference = on_node(function, nodes[0]).remote(*arguments)
    try:
        members: list[Member] = ray.get(reference, timeout=REMOTE_SECONDS)
    except RayError:
        ray.cancel(reference, force=True)
        return []
    return members


# What follows runs on the host of the members.


def _end_family(member: Member) -> None:
    """SIGKILL to a process of this host, its descendants and what it started before it died; waits until they are gone."""
    for _ in range(ROUNDS):
        family = _family(member)
        if not family:
            return
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=DEATH_SECONDS)


def _family(member: Member) -> list[psutil.Process]:
    root = _root(member)
    family = set() if root is None else {root}
    family.update(process for process, variables in _tagged() if variables.get(MEMBER_VARIABLE) == member.tag)
    for process in list(family):
        with suppress(psutil.NoSuchProcess):
            family.update(process.children(recursive=True))
    return [process for process in family if process.pid != os.getpid() and _runs(process)]


def _living_recorded(members: list[Member], run_dir: str) -> list[Member]:
    """Those of these members that live."""
    return [member for member in members if _root(member) is not None]


def _living(members: list[Member], run_dir: str) -> list[Member]:
    """Those of these members that live, and all other processes here that serve the run and did not come from them."""
    found = _living_recorded(members, run_dir)
    families = {process.pid for member in found for process in _family(member)}
    for process, variables in _tagged():
        if variables.get(RUN_VARIABLE) == run_dir and process.pid not in families:
            with suppress(psutil.NoSuchProcess):
                found.append(
                    Member("unrecorded", "", socket.gethostname(), process.pid, process.create_time())
                )
    return found


def _end_living(members: list[Member], run_dir: str) -> list[Member]:
    """End what ``_living`` finds; what was ended."""
    found = _living(members, run_dir)
    for member in found:
        _end_family(member)
    return found


def _root(member: Member) -> psutil.Process | None:
    return find({"pid": member.pid, "create_time": member.create_time})


def _tagged() -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """The other processes here that serve any run, as far as this user may see them, with their environments."""
    for process in psutil.process_iter():
        try:
            variables = process.environ()
            if RUN_VARIABLE in variables and process.pid != os.getpid() and _runs(process):
                yield process, variables
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def _runs(process: psutil.Process) -> bool:
    try:
        status: str = process.status()
    except psutil.NoSuchProcess:
        return False
    return status != psutil.STATUS_ZOMBIE
