"""The ``run`` and ``resume`` commands: take the lease, train what is to be trained, fit the grid."""

import asyncio
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil

from grids.errors import UserError
from grids.expansion import Cell, canary_of, expand
from grids.loading import dump_grid, load_grid
from grids.spec import GridSpec
from orchestrator.clock import SYSTEM_CLOCK, Clock
from orchestrator.console import Console
from orchestrator.control.controller import Controller
from orchestrator.control.data import load_data
from orchestrator.control.layout import versions
from orchestrator.control.recording import Recording
from orchestrator.control.selection import Selection, take_up
from orchestrator.control.stopping import interruptible, train_until_stopped
from orchestrator.exit_codes import ExitCode
from orchestrator.pools import cluster, members
from orchestrator.pools.resources import needed_resources, resource_faults
from orchestrator.pools.shared_pool import PoolLost
from orchestrator.pools.supervision import Supervision
from orchestrator.scheduling.accounts import accounts
from orchestrator.store import requests
from orchestrator.store.cell_state import CellState, Spent
from orchestrator.store.holding import LEASE_SECONDS, holder
from orchestrator.store.lease import Lease, LeaseLost
from orchestrator.store.phase_log import PhaseLog, read_epochs
from orchestrator.store.run_store import RunStore, State
from orchestrator.tracking.ledger import Ledger
from orchestrator.tracking.tracked_rows import restore_tracking
from orchestrator.tracking.tracker import RunStatus, Tracker

FLUSH_SECONDS = 30.0
"""How long the end of a run waits for MLflow; rows that it misses are sent by the next start."""
INTERRUPTED_FLUSH_SECONDS = 0.8
"""The same when told to stop: Ray kills a stopped job after 3 seconds, of which the cells have had most."""
SHOWN_CELLS = 20
"""Unfinished cells that the end of a run tells of one by one; ``status`` shows all."""


def run_grid(grid_path: Path, run_dir: Path, clock: Clock = SYSTEM_CLOCK) -> ExitCode:
    """Run a grid, or continue it, on the Ray cluster that this process is to connect to.

    Failed and cancelled cells are left alone: ``resume_run`` takes them up.

    Raises:
        UserError: anything that a user can mend, told before anything is started where that is possible.
    """
    return interruptible(lambda: _run(load_grid(grid_path), run_dir, Selection(), clock))


def resume_run(
    run_dir: Path, cells: Sequence[str] = (), failed: bool = False, clock: Clock = SYSTEM_CLOCK
) -> ExitCode:
    """Continue a run with the grid that its folder holds. Errors as in ``run_grid``.

    Args:
        run_dir: the run's folder.
        cells: just these, with fresh retry budgets; all that wait or were interrupted when empty.
        failed: just the failed ones, likewise.
        clock: as the lease, commits and time stamps see it.
    """
    spec = GridSpec.model_validate(RunStore.existing(run_dir).resolved["spec"])
    return interruptible(lambda: _run(spec, run_dir, Selection(tuple(cells), failed), clock))


def run_canary(grid: GridSpec, run_dir: Path, clock: Clock = SYSTEM_CLOCK) -> ExitCode:
    """Train a few steps of the grid's smallest and largest cell, in a run without a report. Errors as in ``run_grid``."""
    return interruptible(lambda: _run(canary_of(grid), run_dir, Selection(), clock))


def _run(spec: GridSpec, run_dir: Path, selection: Selection, clock: Clock) -> ExitCode:
    cells = expand(spec)
    console = Console()
    data = load_data(spec)
    repeating = [cell.id for cell in cells if cell.problems_per_batch > len(data.train)]
    if repeating:
        console.say(
            f"note: in {len(repeating)} cells a batch exceeds the {len(data.train)} training problems, so problems repeat in it"
        )
    resolved = {"run_id": uuid.uuid4().hex, "spec": dump_grid(spec), "versions": versions()}
    run_store = RunStore.open(run_dir, data.identity, resolved)
    with Lease.acquire(run_store.lease_dir, holder(), LEASE_SECONDS, clock.monotonic) as lease:
        run_store.hold(lease.epoch, lease.check, spec.commits.keep)
        states = run_store.states()
        states |= _pause_interrupted(run_store, states)
        asked = requests.pending(run_dir)
        for path, request in asked:
            console.say(requests.apply(run_store, path, request))
        if asked:
            states = run_store.states()
        to_do = take_up(cells, states, selection)
        console.say(f"{run_dir}: {len(cells)} cells, {len(to_do)} to do")
        if to_do:
            _connect(spec, console)
        for member in members.sweep(run_dir, lease.epoch):
            console.say(f"ended what an earlier controller left: {member.role}, process {member.pid}")
        ledger = Ledger.open(run_dir, lease.epoch, lease.check)
        tracker = Tracker.connect(
            spec.tracking.mlflow_uri, spec.name, run_store.resolved["run_id"], run_dir.name, ledger
        )
        if tracker.away:
            console.say(tracker.away)
        # Only now: what was refused so far has changed nothing.
        run_store.update_resolved(resolved)
        states |= _prepare(run_store, to_do, states, selection)
        trained = sum(
            states[cell.id].committed_step * cell.batch_rollouts for cell in cells if cell.id in states
        )
        with PhaseLog(run_dir, lease.epoch, lease.check, console.say) as phase_log:
            # What people wait for includes the imports before this.
            began = psutil.Process().create_time()
            recording = Recording(spec, run_dir, phase_log, tracker, clock, trained, console.say, began)
            supervision = Supervision(
                run_dir, lease.epoch, lease.check, spec.failures, clock, console.say, recording.take
            )
            controller = Controller(spec, data, run_store, tracker, console, supervision, recording.costs)
            code = _run_held(cells, to_do, states, controller, lease)
        if to_do and code is not ExitCode.INTERRUPTED:  # then there may be no time left
            _say_spent(run_dir, console)
        return code


def _pause_interrupted(run_store: RunStore, states: dict[str, CellState]) -> dict[str, CellState]:
    """Cells that a killed controller left running are no longer: nobody trains them. Those that this has changed."""
    reason = "its controller was killed; continues at the next run"
    return {
        cell: run_store.cell(cell).set_state(State.PAUSED, reason)
        for cell, state in states.items()
        if state.state is State.RUNNING
    }


def _prepare(
    run_store: RunStore, to_do: list[Cell], states: dict[str, CellState], selection: Selection
) -> dict[str, CellState]:
    """Make the states of cells ready for an attempt; those that this has changed."""
    changed = {}
    for cell in to_do:
        state, store = states.get(cell.id), run_store.cell(cell.id)
        if state is None:
            # So that every cell of the grid is seen by readers of the folder, also when the run breaks off early.
            changed[cell.id] = store.set_state(State.PENDING)
        elif state.state is State.FINISHED:
            changed[cell.id] = store.reopen(cell.update_steps)
        elif selection.cells or selection.failed:
            reason = "to be tried again, asked by resume"
            changed[cell.id] = store.set_state(State.PENDING, reason, spent=Spent())
    return changed


def _connect(spec: GridSpec, console: Console) -> None:
    cluster.connect()
    for fault in resource_faults(spec, cluster.connected_nodes()):
        raise UserError(fault)
    free = cluster.free_resources()
    for resource, needed in needed_resources(spec).items():
        if needed > free.get(resource, 0):
            console.say(
                f"waiting for {needed:g} {resource}s, {free.get(resource, 0):g} are free at the moment"
            )


def _run_held(
    cells: list[Cell],
    to_do: list[Cell],
    states: dict[str, CellState],
    controller: Controller,
    lease: Lease,
) -> ExitCode:
    run_store, tracker, console = controller.run_store, controller.tracker, controller.console
    status: RunStatus | None = "FAILED"
    try:
        tracker.start(dump_grid(controller.spec), {"isocompute.run_dir": str(run_store.run_dir)})
        tracker.artifacts(run_store.run_dir / "grid.yaml")
        tracker.reconcile({cell: str(state.state) for cell, state in states.items()})
        trained = {cell.id for cell in to_do}
        restore_tracking(tracker, run_store, [cell for cell in cells if cell.id not in trained], states)
        try:
            if to_do:
                with console:
                    train_until_stopped(controller, to_do, states, lease)
        except asyncio.CancelledError:
            status = "KILLED"
            console.say("interrupted; the same command continues from each cell's last commit")
            return ExitCode.INTERRUPTED
        except LeaseLost as error:
            status = None  # the run belongs to another controller, which says how it ends
            console.say(f"broken off: {error}")
            return ExitCode.UNFINISHED
        except PoolLost as error:
            console.say(f"broken off: {error}; the same command continues from each cell's last commit")
            return ExitCode.UNFINISHED
        if not controller.spec.grid.canary:
            _report(run_store, tracker, console)
        code = _say_end(cells, run_store, console)
        status = "FINISHED" if code is ExitCode.ALL_FINISHED else "FAILED"
        return code
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        unsent = tracker.close(status, INTERRUPTED_FLUSH_SECONDS if status == "KILLED" else FLUSH_SECONDS)
        if unsent:
            console.say(f"MLflow has missed {unsent} rows; they are on disk, and the same command sends them")


def _report(run_store: RunStore, tracker: Tracker, console: Console) -> None:
    """Write the report of the run as it stands now, and print its table."""
    # Seconds to load, which a run need not wait for before it starts.
    from analysis.reading.sources import read_run
    from analysis.report import write_report
    from orchestrator.results.printing import print_report

    report = write_report(read_run(run_store.run_dir), run_store.report_dir)
    tracker.artifacts(run_store.report_dir)
    print_report(report, console.rich)


def _say_spent(run_dir: Path, console: Console) -> None:
    """Say where the time of the pools went, in all starts of the run as far as they are on record."""
    spent = accounts(read_epochs(run_dir))
    if spent.total > 0:
        console.say(f"pools: {spent.line()}")


def _say_end(cells: list[Cell], run_store: RunStore, console: Console) -> ExitCode:
    """Say which cells are not done and what to do about them; the exit code."""
    states = run_store.states()
    of_grid = [states.get(cell.id, CellState(cell=cell.id)) for cell in cells]
    failed = [state for state in of_grid if state.state is State.FAILED]
    waiting = [state for state in of_grid if state.state in (State.PENDING, State.PAUSED, State.RUNNING)]
    for state in [*failed, *waiting][:SHOWN_CELLS]:
        unsaid = (
            "how its attempt ended could not be written" if state.state is State.RUNNING else "not taken up"
        )
        console.say(f"{state.cell} {state.state}: {state.reason or unsaid}")
    if len(failed) + len(waiting) > SHOWN_CELLS:
        console.say(f"and {len(failed) + len(waiting) - SHOWN_CELLS} more that are not done")
    if failed:
        folder = run_store.run_dir
        console.say(
            f"why: isocompute explain {folder} {failed[0].cell}; again: isocompute resume {folder} --failed"
        )
        return ExitCode.CELLS_FAILED
    return ExitCode.UNFINISHED if waiting else ExitCode.ALL_FINISHED
