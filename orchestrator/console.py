"""What a person sees while a grid runs: bars on a terminal, one line for each event elsewhere."""

import time
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from grids.expansion import Cell
from orchestrator.store.cell_state import CellState, State
from orchestrator.tables import make_console


class Console:
    """Progress of a run. On a terminal it shows a bar for each running cell; otherwise only lines are printed."""

    def __init__(self) -> None:
        """Write to standard output."""
        self.rich = make_console()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeRemainingColumn(),
            console=self.rich,
            disable=not self.rich.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "Console":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """One line with the time of day."""
        self.rich.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False)

    def started(self, cell: Cell, before: CellState) -> None:
        """A cell's attempt begins, from the state ``before`` it."""
        done = before.committed_step
        self._tasks[cell.id] = self._bars.add_task(cell.id, total=cell.update_steps, completed=done)
        again = f" again (attempt {before.attempt + 1}) after step {done}" if before.attempt else ""
        self.say(f"{cell.id} started{again}: {cell.update_steps} steps of {cell.batch_rollouts} rollouts")

    def step(self, cell: Cell, step: int) -> None:
        """A cell has made a step."""
        self._bars.update(self._tasks[cell.id], completed=step)

    def row(self, cell: Cell, row: dict[str, Any]) -> None:
        """A cell has been evaluated."""
        self.say(
            f"{cell.id} step {row['step']}/{cell.update_steps} C {row['compute_rollouts']:,} {format_scores(row)} "
            f"train {row['train_reward']:.3f}"
        )

    def ended(self, cell: Cell, state: State, reason: str | None) -> None:
        """A cell's attempt has ended."""
        self._bars.remove_task(self._tasks.pop(cell.id))
        self.say(f"{cell.id} {state}" + (f": {reason}" if reason else ""))


def format_scores(columns: dict[str, Any]) -> str:
    """``avg@4 0.512 best@4 ...`` of the validation columns in a row."""
    scores = [
        (name, value)
        for name, value in columns.items()
        if name.startswith(("avg_at_", "best_at_", "worst_at_"))
    ]
    return " ".join(f"{name.replace('_at_', '@')} {value:.3f}" for name, value in scores)
