"""The operators' commands: watch a run, and say what becomes of its cells. Each imports what it needs when it runs."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from grids.errors import UserError
from orchestrator.exit_codes import ExitCode
from orchestrator.tables import Format, print_rows

if TYPE_CHECKING:
    from orchestrator.operating.housekeeping import Garbage

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")]
CellArgument = Annotated[str, typer.Argument(metavar="CELL", help="For example bp32-n64-s0.")]
CellOption = Annotated[
    list[str] | None, typer.Option("--cell", metavar="CELL", help="A cell; may be given several times.")
]
FailedOption = Annotated[bool, typer.Option("--failed", help="All failed cells.")]
FormatOption = Annotated[Format, typer.Option("--format", help="How to print tables.")]
JobAddress = Annotated[
    str | None, typer.Option(help="The cluster's job address, http://HOST:8265. Default: RAY_ADDRESS.")
]
FOLLOW_SECONDS = 0.5


def status(
    run: RunPath,
    state: Annotated[str | None, typer.Option(help="Only these states, such as failed,paused.")] = None,
    sort: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Order by a column of the table, such as age, C or step."),
    ] = None,
    descending: Annotated[bool, typer.Option("--descending", help="Largest first.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew until nobody holds the run.")] = False,
    every: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")] = 2.0,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Show every cell of a run: state, step, compute, last score, attempt, retries, last sign of life, reason."""
    from orchestrator.operating.status_view import StatusView, watch_status

    view = StatusView(run.absolute(), state, sort, descending, format_)
    if watch:
        watch_status(view, every)
    else:
        view.show(view.watch().look())


def explain(run: RunPath, cell: CellArgument, format_: FormatOption = Format.TABLE) -> None:
    """Say why a cell is in its state, what was tried, where the evidence lies, and what to do next."""
    from orchestrator.operating import explain as explaining
    from orchestrator.operating.asking import require_cells
    from orchestrator.store.holding import HolderWatch
    from orchestrator.store.run_store import RunStore

    run_store = RunStore.existing(run.absolute())
    facts = explaining.explanation(
        run_store, require_cells(run_store, [cell])[0], HolderWatch(run_store.lease_dir).look()
    )
    if format_ is Format.TABLE:
        print("\n".join(explaining.sentences(facts)))
        if facts["attempts"]:
            print()
            print_rows(explaining.attempt_rows(facts), format_)
        print()
        print_rows([{"evidence": name, "where": place} for name, place in facts["evidence"].items()], format_)
        print(f"\nTo go on: {facts['next']}")
    elif format_ is Format.CSV:
        print_rows(explaining.attempt_rows(facts), format_)
    else:
        import json

        print(json.dumps(facts, indent=1))


def logs(
    run: RunPath,
    cell: CellArgument,
    attempt: Annotated[int | None, typer.Option(min=1, help="Default: the last one.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the cell does not.")] = False,
) -> None:
    """Print an attempt's log, traceback and stacks of stuck processes."""
    from orchestrator.operating import attempt_logs
    from orchestrator.operating.asking import require_cells
    from orchestrator.store.holding import HolderWatch
    from orchestrator.store.run_store import RunStore

    run_store = RunStore.existing(run.absolute())
    require_cells(run_store, [cell])
    store = run_store.cell(cell)
    if not follow:
        print(attempt_logs.attempt_text(store, attempt), end="")
        return
    holder = HolderWatch(run_store.lease_dir)
    try:
        for piece in attempt_logs.follow(
            store, attempt, lambda: holder.look() is not None, lambda: time.sleep(FOLLOW_SECONDS)
        ):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print()


def timeline(
    run: RunPath,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Default: RUN/timeline.json.")
    ] = None,
) -> None:
    """Write what every engine, learner group and grader did when, as a file for ui.perfetto.dev or chrome://tracing."""
    from orchestrator.operating.timeline import write_timeline
    from orchestrator.store.run_store import RunStore

    folder = RunStore.existing(run.absolute()).run_dir
    path = output or folder / "timeline.json"
    print(f"{path}: {write_timeline(folder, path):,} phases; open it in ui.perfetto.dev or chrome://tracing")


def cancel(
    run: RunPath,
    cell: Annotated[list[str], typer.Option("--cell", metavar="CELL", help="A cell; repeatable.")],
) -> None:
    """Cancel cells; the others go on. Works while the run goes on, and when it does not."""
    _ask(run, "cancel", cell, reset_budget=False)


def retry(
    run: RunPath,
    cell: CellOption = None,
    failed: FailedOption = False,
    reset_budget: Annotated[
        bool, typer.Option("--reset-budget", help="Forget the retries that the cells have spent.")
    ] = False,
) -> None:
    """Put failed, cancelled or paused cells back in line: of the run that goes on, or else of the next start."""
    from orchestrator.operating.asking import failed_cells
    from orchestrator.store.run_store import RunStore

    if failed == bool(cell):
        raise UserError("retry: give either --cell CELL or --failed")
    cells = failed_cells(RunStore.existing(run.absolute())) if failed else cell or []
    if not cells:
        print("no cell has failed")
        return
    _ask(run, "retry", cells, reset_budget)


def resume(
    run: RunPath,
    cell: CellOption = None,
    failed: FailedOption = False,
    address: Annotated[
        str | None,
        typer.Option(metavar="http://HOST:8265", help="Continue it in a Ray job there. Default: from here."),
    ] = None,
) -> None:
    """Continue a run from its folder: all cells that are not done, or just some, with their retry budgets afresh."""
    if failed and cell:
        raise UserError("resume: give either --cell CELL or --failed, not both")
    if address is not None:
        from orchestrator.services.submission import submit_and_follow

        chosen = ["--failed"] if failed else [text for name in cell or () for text in ("--cell", name)]
        raise typer.Exit(submit_and_follow(["resume", str(run.absolute()), *chosen], {}, address))
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ and not run.is_absolute():
        raise UserError(
            f"run folder {run}: inside a Ray job it must be absolute; the working directory is thrown away"
        )
    from orchestrator.operating.asking import require_cells
    from orchestrator.store.run_store import RunStore

    folder = run.absolute()
    if cell:
        require_cells(RunStore.existing(folder), cell)
    from orchestrator.control.running import resume_run

    raise typer.Exit(resume_run(folder, tuple(cell or ()), failed))


def gc(
    run: RunPath,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it. Without it, it is only shown.")] = False,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Show, and with --yes remove, what no resume needs: old checkpoints, leftovers of broken-off writes, orphaned processes."""
    from orchestrator.operating import housekeeping
    from orchestrator.store.holding import LEASE_SECONDS, HolderWatch, holder
    from orchestrator.store.lease import Lease
    from orchestrator.store.run_store import RunStore

    run_store = RunStore.existing(run.absolute())
    notes = sys.stdout if format_ is Format.TABLE else sys.stderr
    if not yes:
        found = housekeeping.garbage(run_store)
        print_rows([item.row() for item in found], format_)
        print(f"{_sum_up(found)}; --yes removes it" if found else "nothing to remove", file=notes)
        if found and HolderWatch(run_store.lease_dir).look():
            print("note: the run is held; --yes is refused until its controller has ended", file=notes)
        return
    with Lease.acquire(run_store.lease_dir, holder(), LEASE_SECONDS) as lease:
        found = housekeeping.garbage(run_store)
        run_store.hold(lease.epoch, lease.check)
        faults = housekeeping.remove(run_store, found, lease.epoch, lease.check)
    print_rows([item.row() for item in found], format_)
    print(f"removed: {_sum_up(found)}" if found else "nothing to remove", file=notes)
    for fault in faults:
        print(fault, file=sys.stderr)
    raise typer.Exit(ExitCode.CELLS_FAILED if faults else ExitCode.ALL_FINISHED)


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    for command in (status, explain, logs, timeline, cancel, retry, resume, gc):
        app.command()(command)


def _sum_up(found: "list[Garbage]") -> str:
    return f"{len(found):,} items, {sum(item.bytes for item in found) / 1e6:,.1f} MB"


def _ask(run: Path, action: Literal["cancel", "retry"], cells: list[str], reset_budget: bool) -> None:
    """Exit code 2 when any request was refused; the others are carried out all the same."""
    from orchestrator.operating import asking
    from orchestrator.store.requests import Request
    from orchestrator.store.run_store import RunStore

    run_store = RunStore.existing(run.absolute())
    known = asking.require_cells(run_store, cells)
    by, at = asking.asker(), time.time()
    refusals = asking.ask(
        run_store,
        # A microsecond apart, so that they are answered in this order.
        [Request(action, cell.id, reset_budget, by, at + 1e-6 * i) for i, cell in enumerate(known)],
        lambda line: print(line, flush=True),
    )
    for refusal in refusals:
        print(f"isocompute: {refusal}", file=sys.stderr)
    if refusals:
        raise typer.Exit(ExitCode.REFUSED)
