"""What an attempt at a cell left for people to read: its log, traceback, and stacks of stuck processes."""

from collections.abc import Callable, Iterator
from pathlib import Path

from grids.errors import UserError
from orchestrator.store.attempts import LOG, STACKS, TRACEBACK
from orchestrator.store.cell_state import State
from orchestrator.store.run_store import CellStore

FOLLOWED = (LOG, TRACEBACK, STACKS)
"""In the order in which they are shown."""
_GOES_ON = (State.PENDING, State.RUNNING)


def attempt_text(cell: CellStore, attempt: int | None = None) -> str:
    """The files of an attempt (the last one when None), each under its path.

    Raises:
        UserError: there is no such attempt, or it left nothing.
    """
    number = _existing_attempt(cell, attempt)
    folder = cell.attempt_dir(number)
    parts = []
    for name in FOLLOWED:
        path = folder / name
        if path.exists():
            parts.append(f"== {path}\n{_ended(path.read_text(errors='replace'))}")
    if not parts:
        raise UserError(
            f"{folder}: attempt {number} of {cell.cell} left no log; 'explain' shows what is known of it"
        )
    return "".join(parts)


def follow(
    cell: CellStore, attempt: int | None, held: Callable[[], bool], sleep: Callable[[], None]
) -> Iterator[str]:
    """The same in pieces as they are written, going over to newer attempts unless one is named.

    Ends when the cell does not go on (it is done, paused or failed, or nobody holds the run) or, of a named attempt, when a
    newer one has begun.

    Args:
        cell: the cell's store, for reading.
        attempt: the one to follow, the newest when None.
        held: whether somebody holds the run.
        sleep: waits between two looks.
    """
    shown: dict[Path, int] = {}
    last: Path | None = None
    number = attempt or max(1, cell.read().attempt)
    while True:
        # Looked at before the files: what an ending attempt writes last is still read.
        state, is_held = cell.read(), held()
        newest = attempt or max(number, state.attempt)
        # An attempt that ended between two looks is shown to its end before the newer one.
        for path in [
            cell.attempt_dir(each) / name for each in range(number, newest + 1) for name in FOLLOWED
        ]:
            fresh = _from(path, shown.get(path, 0))
            if fresh:
                shown[path] = shown.get(path, 0) + len(fresh)
                header = "" if path == last else f"== {path}\n"
                last = path
                yield header + fresh.decode(errors="replace")
        number = newest
        if state.attempt > number or not is_held or state.state not in _GOES_ON:
            return
        sleep()


def _existing_attempt(cell: CellStore, attempt: int | None) -> int:
    made = cell.read().attempt
    if made == 0:
        raise UserError(f"{cell.cell} was never tried, so there is no log; 'explain' says what it waits for")
    if attempt is not None and not 1 <= attempt <= made:
        raise UserError(f"--attempt: {cell.cell} has no attempt {attempt}; it has 1 to {made}")
    return attempt or made


def _from(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()
    except FileNotFoundError:
        return b""


def _ended(text: str) -> str:
    return text if text.endswith("\n") or not text else text + "\n"
