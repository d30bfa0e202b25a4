"""Finding and ending recorded processes by pid *and* creation time: a recycled pid is never touched."""

import os
from collections.abc import Callable
from typing import TypedDict

import psutil

GRACE_SECONDS = 10.0


class Identity(TypedDict):
    """One process of this boot: its pid and its creation time (seconds since the epoch)."""

    pid: int
    create_time: float


def stop_processes(identities: list[Identity]) -> None:
    """Ends processes and all their descendants; a recycled pid is left alone.

    A service whose first process is dead is still found by the session that it led.
    """
    roots = [root for given in identities if (root := find(given)) is not None]
    doomed = set(roots)
    for given in identities:
        doomed.update(_members_of_session(given))
    for process in list(doomed):
        try:
            doomed.update(process.children(recursive=True))
        except psutil.NoSuchProcess:
            continue
    for root in roots:
        _signal(root.terminate)
    _, alive = psutil.wait_procs(doomed, timeout=GRACE_SECONDS if roots else 0)
    for process in alive:
        _signal(process.kill)
    psutil.wait_procs(alive, timeout=GRACE_SECONDS)


def _members_of_session(leader: Identity) -> list[psutil.Process]:
    members = []
    for process in psutil.process_iter():
        try:
            # The kernel gives no pid away that still names a session: created later means a member.
            if os.getsid(process.pid) == leader["pid"] and process.create_time() >= leader["create_time"]:
                members.append(process)
        except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            continue
    return members


def _signal(send: Callable[[], None]) -> None:
    try:
        send()
    except psutil.NoSuchProcess:
        return  # it ended by itself: what was wanted


def identity(pid: int) -> Identity:
    """What tells this process from a later one with the same pid."""
    return {"pid": pid, "create_time": psutil.Process(pid).create_time()}


def find(given: Identity) -> psutil.Process | None:
    """The very process with this pid and creation time, if it still runs."""
    try:
        process = psutil.Process(given["pid"])
        same = process.create_time() == given["create_time"]
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None
