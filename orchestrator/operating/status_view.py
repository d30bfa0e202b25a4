"""What ``status`` prints, once or again and again."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import rich.console
import rich.live
import rich.text

from grids.spec import GridSpec
from orchestrator.operating.outlook import Outlook
from orchestrator.operating.status import Row, chosen_rows, counts_line, status_rows
from orchestrator.store.holding import HolderWatch, holder_line
from orchestrator.store.lease import LeaseRecord
from orchestrator.store.phase_log import recent_records
from orchestrator.store.run_store import RunStore
from orchestrator.tables import FOLDED_ROWS, Format, aligned_lines, make_console, print_rows, table

JUDGED_RECORDS = 2_000
"""Phases from which ``status`` judges: it is asked often, and must answer at once also for a large run."""


@dataclass(frozen=True)
class StatusView:
    """Which cells of a run are shown, in which order and how."""

    run_dir: Path
    states: str | None = None
    sort: str | None = None
    descending: bool = False
    format_: Format = Format.TABLE

    def read(self, holder: LeaseRecord | None) -> tuple[list[Row], list[str], str]:
        """The rows to show; their columns; the counts over all cells, who holds the run, what is left and how the pools do.

        Raises:
            UserError: no run folder, an unknown state or column.
        """
        run_store = RunStore.existing(self.run_dir)
        spec = GridSpec.model_validate(run_store.resolved["spec"])
        outlook = Outlook(spec, recent_records(self.run_dir, JUDGED_RECORDS))
        rows = status_rows(run_store, spec, outlook)
        notes = [f"{counts_line(rows)}; {holder_line(holder)}", outlook.line()]
        chosen = chosen_rows(rows, self.states, self.sort, self.descending)
        return chosen, list(rows[0]), "\n".join(note for note in notes if note)

    def watch(self) -> HolderWatch:
        """Who holds the run, to be looked at."""
        return HolderWatch(RunStore.existing(self.run_dir).lease_dir)

    def show(self, holder: LeaseRecord | None) -> None:
        """Print it once. ``holder``: who holds the run."""
        rows, columns, notes = self.read(holder)
        print_rows(rows, self.format_, columns=columns)
        print(notes, file=sys.stdout if self.format_ is Format.TABLE else sys.stderr, flush=True)


def watch_status(view: StatusView, every: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show a run until nobody holds it: in place on a terminal, one block after the other elsewhere."""
    console = make_console()
    watch = view.watch()
    try:
        if view.format_ is Format.TABLE and console.is_terminal:
            with rich.live.Live(console=console, auto_refresh=False) as live:
                while True:
                    holder = watch.look()
                    rows, _, notes = view.read(holder)
                    live.update(_block(rows, notes), refresh=True)
                    if holder is None:
                        return
                    sleep(every)
        while True:
            holder = watch.look()
            view.show(holder)
            if holder is None:
                return
            sleep(every)
    except KeyboardInterrupt:
        return


def _block(rows: list[Row], notes: str) -> rich.console.RenderableType:
    """The notes come first: what does not fit on the terminal is cut off at its lower end."""
    body: rich.console.RenderableType = table(rows)
    if len(rows) > FOLDED_ROWS:
        body = rich.text.Text("\n".join(aligned_lines(rows[:FOLDED_ROWS])), no_wrap=True)
    return rich.console.Group(rich.text.Text(notes), body)
