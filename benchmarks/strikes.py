"""Faults that strike a running grid, each with a proof that it has struck.

A strike is made at once; what mends the surroundings (a node started again, a disk emptied) is left to the caller, who says when.
"""

import os
import random
import resource
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from benchmarks.jumping_clock import seen_file
from benchmarks.site import Running, Site, cells_of, controllers_of, members_of, state

HOUR = 3600.0
SLACK_BYTES = 512 * 1024
"""Left free on a full disk: enough for the lease, states and rows, far too little for a checkpoint."""
LIMITED_FILE_BYTES = 64 * 1024
"""Largest file that a learner may write where no disk can be filled; a checkpoint is larger."""


class Kind(StrEnum):
    """Kinds of faults."""

    ENGINE = "SIGKILL of a sampler engine"
    LEARNER = "SIGKILL of a learner rank"
    VERIFIER = "SIGKILL of the grader or of a grading process"
    CONTROLLER = "SIGKILL of the controller"
    RAYLET = "SIGKILL of the second node's raylet"
    MLFLOW = "SIGKILL of the MLflow server"
    STOPPED_ENGINE = "SIGSTOP of a sampler engine"
    SIGTERM = "SIGTERM to the job"
    DISK_FULL = "disk full during a checkpoint"
    CUT_HISTORY = "truncated last history line"
    CUT_TEMPORARY = "truncated temporary of state.json"
    CLOCK = "jump of the injected clock by an hour"


class NothingToStrike(Exception):
    """The victim of this kind is not there at this moment."""


@dataclass(frozen=True)
class Target:
    """A grid under fire."""

    site: Site
    run_dir: Path
    running: Running
    """The command that runs it."""
    disk: Path | None
    """A small disk of its own on which the run folder lies; None where none could be mounted."""
    killed: bool
    """Whether an earlier strike has killed its controller, which is not started again before this one."""
    offset_file: Path
    """Where a jumping clock reads how far it has jumped."""
    random: random.Random


@dataclass(frozen=True)
class Strike:
    """A fault that has been made."""

    victim: str
    struck: Callable[[], bool]
    """Whether the fault has come through: the victim is gone, the error was seen."""
    mend: Callable[[], None] = lambda: None
    """Puts right what is no part of the run."""


def strike(kind: Kind, target: Target) -> Strike:
    """Make a fault of this kind.

    Raises:
        NothingToStrike: its victim is not there; nothing was done.
    """
    return _STRIKES[kind](target)


def _engine(target: Target) -> Strike:
    return _killed(_member(target, "sampler"))


def _learner(target: Target) -> Strike:
    return _killed(_member(target, "learner"))


def _verifier(target: Target) -> Strike:
    role, grader = _member(target, "grader")
    workers = [child for child in grader.children(recursive=True) if "resource_tracker" not in _line(child)]
    if workers and target.random.random() < 0.5:
        return _killed(("a grading process", target.random.choice(workers)))
    return _killed((role, grader))


def _stopped_engine(target: Target) -> Strike:
    role, process = _member(target, "sampler")
    process.send_signal(signal.SIGSTOP)
    # Nobody wakes it up again: it is gone once the run has seen that it stands still.
    return Strike(f"{role}, process {process.pid}", lambda: not alive(process))


def _controller(target: Target) -> Strike:
    controllers = controllers_of(target.run_dir)
    if not controllers:
        raise NothingToStrike("no controller")
    for process in controllers:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return Strike(
        f"controller, process {controllers[-1].pid} ({target.running.how})",
        lambda: not any(alive(process) for process in controllers) and target.running.ended(),
    )


def _sigterm(target: Target) -> Strike:
    running = target.running
    if running.how == "direct":
        running.process.send_signal(signal.SIGTERM)
        return Strike(f"controller, process {running.process.pid}", running.ended)
    if running.job_id is None:
        raise NothingToStrike("no job")
    address = target.site.services.ray_address
    command = [sys.executable, "-m", "ray.scripts.scripts", "job", "stop", "--address", address]
    stop = subprocess.run(
        [*command, running.job_id],
        env=target.site.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if stop.returncode != 0:
        raise NothingToStrike(f"ray job stop: {stop.stderr.strip()}")
    return Strike(f"job {running.job_id}", running.ended)


def _raylet(target: Target) -> Strike:
    node = target.site.second_node
    raylet = node.raylet() if node else None
    if node is None or raylet is None:
        raise NothingToStrike("no second node")
    lost = [role for role, process in members_of(target.run_dir) if process.ppid() == raylet.pid]
    if not lost:
        raise NothingToStrike("no member of the run on the second node")
    raylet.kill()
    return Strike(f"node with {', '.join(lost)}", lambda: not alive(raylet), node.start)


def _mlflow(target: Target) -> Strike:
    family = target.site.mlflow_processes()
    if not family:
        raise NothingToStrike("MLflow is away")
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return Strike(
        f"MLflow, {len(family)} processes",
        lambda: not any(alive(process) for process in family),
        lambda: target.site.mlflow.start(("mlflow",)),
    )


def _disk_full(target: Target) -> Strike:
    def signs() -> int:
        # On a disk that is full to the last byte not even the end of the attempt can be put on record.
        return _full_pauses(target.run_dir) + target.running.output.count("storage is full")

    signs_before = signs()

    def seen() -> bool:
        return signs() > signs_before

    if target.disk is None:
        role, learner = _member(target, "learner")
        limits = resource.prlimit(learner.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(learner.pid, resource.RLIMIT_FSIZE, (LIMITED_FILE_BYTES, limits[1]))

        def lift() -> None:
            with suppress(ProcessLookupError):
                resource.prlimit(learner.pid, resource.RLIMIT_FSIZE, limits)

        return Strike(f"{role} (RLIMIT_FSIZE)", seen, lift)
    ballast = target.disk / "ballast"
    free = os.statvfs(target.disk)
    descriptor = os.open(ballast, os.O_WRONLY | os.O_CREAT)
    try:
        os.posix_fallocate(descriptor, 0, max(1, free.f_bavail * free.f_frsize - SLACK_BYTES))
    finally:
        os.close(descriptor)
    return Strike(f"{target.disk} (tmpfs)", seen, lambda: ballast.unlink(missing_ok=True))


def _full_pauses(run_dir: Path) -> int:
    """How many attempts have ended because the storage was full."""
    records = run_dir.glob("cells/*/attempts/*/attempt.json")
    return sum('"storage full"' in path.read_text() for path in records)


def _ended_controller(target: Target) -> Strike:
    """Kill the controller, unless an earlier strike has, and wait for its end."""
    if target.killed:
        wait_for_end(target.running)
        return Strike("the end of the controller", target.running.ended)
    killed = _controller(target)
    wait_for_end(target.running)
    return killed


def _cut_history(target: Target) -> Strike:
    cell = target.random.choice(_unfinished(target.run_dir))
    history = target.run_dir / "cells" / cell / "history.jsonl"
    rows = history.read_bytes().splitlines() if history.exists() else []
    if not rows:
        raise NothingToStrike(f"{cell} has no row yet")
    killed = _ended_controller(target)
    with history.open("ab") as file:
        file.write(rows[-1][: len(rows[-1]) // 2])
    return Strike(
        f"{cell}, after {killed.victim}", lambda: killed.struck() and not history.read_bytes().endswith(b"\n")
    )


def _cut_temporary(target: Target) -> Strike:
    cell = target.random.choice(_unfinished(target.run_dir))
    killed = _ended_controller(target)
    content = (target.run_dir / "cells" / cell / "state.json").read_bytes()
    epoch = state(target.run_dir, cell)["epoch"]
    name = f".state.json.e{epoch:06d}.{uuid.UUID(int=target.random.getrandbits(128)).hex[:12]}.tmp"
    temporary = target.run_dir / "cells" / cell / name
    temporary.write_bytes(content[: len(content) // 2])
    return Strike(f"{cell}, after {killed.victim}", lambda: killed.struck() and temporary.exists())


def _clock(target: Target) -> Strike:
    if target.running.how != "direct" or not target.running.jumping:
        raise NothingToStrike("this controller goes by the machine's clock")
    before = float(target.offset_file.read_text()) if target.offset_file.exists() else 0.0
    jump = target.random.choice((HOUR, -HOUR))
    target.offset_file.write_text(str(before + jump))
    seen = seen_file(target.offset_file)
    return Strike(f"{jump:+.0f} s", lambda: seen.exists() and seen.read_text() == str(before + jump))


_STRIKES: dict[Kind, Callable[[Target], Strike]] = {
    Kind.ENGINE: _engine,
    Kind.LEARNER: _learner,
    Kind.VERIFIER: _verifier,
    Kind.CONTROLLER: _controller,
    Kind.RAYLET: _raylet,
    Kind.MLFLOW: _mlflow,
    Kind.STOPPED_ENGINE: _stopped_engine,
    Kind.SIGTERM: _sigterm,
    Kind.DISK_FULL: _disk_full,
    Kind.CUT_HISTORY: _cut_history,
    Kind.CUT_TEMPORARY: _cut_temporary,
    Kind.CLOCK: _clock,
}


def _member(target: Target, role: str) -> tuple[str, psutil.Process]:
    found = [member for member in members_of(target.run_dir) if member[0].startswith(role)]
    if not found:
        raise NothingToStrike(f"no {role}")
    return target.random.choice(found)


def _killed(victim: tuple[str, psutil.Process]) -> Strike:
    role, process = victim
    if not alive(process):
        raise NothingToStrike(f"{role} has just ended")
    process.kill()
    return Strike(f"{role}, process {process.pid}", lambda: not alive(process))


def _unfinished(run_dir: Path) -> list[str]:
    found = [
        cell for cell in cells_of(run_dir) if state(run_dir, cell).get("state") not in (None, "finished")
    ]
    if not found:
        raise NothingToStrike("every cell is finished")
    return found


def wait_for_end(running: Running) -> None:
    """Wait until a command whose controller was killed has ended."""
    running.process.wait(120)


def alive(process: psutil.Process) -> bool:
    """Whether a process still exists, stopped or not."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _line(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""
