"""What operators ask of a run: files in its folder, answered by whoever holds the lease.

A request is one file in ``requests/``, made by exclusive create, so that it can be filed while a controller
runs and is not lost when none does. The holder answers it, writes the cell's state and removes the file, in
this order: a crash in between leaves a request that is refused when it is met again.
"""

import json
import logging
import os
import re
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from grids.expansion import expand
from grids.spec import GridSpec
from orchestrator.store.cell_state import CellState, Spent, State
from orchestrator.store.files import create_exclusively, make_folder, read_bytes
from orchestrator.store.run_store import RunStore

log = logging.getLogger(__name__)

FOLDER = "requests"
SET_ASIDE = "set_aside"
"""Inside ``requests``: what could not be answered, kept for people until ``gc`` removes it."""
_CELL = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")

_CANCELLABLE = {State.PENDING, State.RUNNING, State.PAUSED, State.FAILED}
_RETRIABLE = {State.FAILED, State.CANCELLED, State.PAUSED}
_REFUSALS = {
    State.PENDING: "waits for its turn already",
    State.RUNNING: "is running",
    State.FINISHED: "is finished",
    State.DIVERGED: "has diverged, which is a result",
    State.CANCELLED: "is cancelled already",
}


@dataclass(frozen=True)
class Request:
    """``by`` says who asks, for people; ``at`` is unix seconds. ``reset_budget`` (retry only) forgets spent retries."""

    action: Literal["cancel", "retry"]
    cell: str
    reset_budget: bool
    by: str
    at: float


def file_request(run_dir: Path, request: Request) -> Path:
    """Put a request where the holder of the lease finds it; the file. Needs no lease."""
    folder = make_folder(run_dir / FOLDER)
    data = (json.dumps(asdict(request)) + "\n").encode()
    while True:
        path = folder / f"{int(request.at * 1e9):020d}-{uuid.uuid4().hex[:12]}.json"
        if create_exclusively(path, data):
            return path


def pending(run_dir: Path) -> list[tuple[Path, Request]]:
    """The requests that wait for an answer, oldest first. For the holder of the lease.

    A file that is no request is set aside with a warning.
    """
    found = []
    for path in waiting(run_dir):
        try:
            found.append((path, _parse(read_bytes(path))))
        except FileNotFoundError:
            continue  # answered meanwhile
        except (ValueError, IsADirectoryError, PermissionError) as error:
            log.warning("%s", set_aside(path, f"not a request ({error})"))
    return found


def waiting(run_dir: Path) -> list[Path]:
    """The files of requests that wait, oldest first, unread."""
    folder = run_dir / FOLDER
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    return [folder / name for name in names if name.endswith(".json")]


def answer(state: CellState, request: Request) -> CellState | str:
    """The cell's new state, or why the request is refused, in words."""
    allowed = _CANCELLABLE if request.action == "cancel" else _RETRIABLE
    if state.state not in allowed:
        return f"{state.cell} {_REFUSALS[state.state]}: not {_past(request.action)}"
    if request.action == "cancel":
        return replace(state, state=State.CANCELLED, reason=f"cancelled by {request.by}")
    spent = Spent() if request.reset_budget else state.spent
    return replace(
        state, state=State.PENDING, reason=f"to be tried again, asked by {request.by}", spent=spent
    )


def apply(run_store: RunStore, path: Path, request: Request) -> str:
    """Answer one request on a held store: write the cell's state, remove the file; a line for people.

    A cell that runs must have been stopped before. A request for an unknown cell is set aside.

    Raises:
        LeaseLost: another controller has taken over; the request waits for it.
        StoreDamaged: the cell's state cannot be read.
    """
    if not _is_cell(run_store, request.cell):
        return set_aside(path, f"the grid has no cell {request.cell!r}")
    store = run_store.cell(request.cell)
    outcome = answer(store.read(), request)
    if isinstance(outcome, CellState):
        store.write(outcome)
        line = f"{request.cell} {_past(request.action)} as {request.by} asked"
    else:
        line = outcome
    path.unlink(missing_ok=True)
    return line


def set_aside(path: Path, why: str) -> str:
    """Move a request that cannot be answered out of the way; a line for people."""
    folder = make_folder(path.parent / SET_ASIDE)
    with suppress(FileNotFoundError):  # whoever held the lease before has done it
        os.replace(path, folder / path.name)
    return f"request {path.name} set aside: {why}"


def _is_cell(run_store: RunStore, cell: str) -> bool:
    # Where the cell has a state the grid need not be expanded, which takes long for each of 10,000 requests.
    return (run_store.cell(cell).folder / "state.json").exists() or cell in _grid_cells(run_store)


def _grid_cells(run_store: RunStore) -> set[str]:
    return {cell.id for cell in expand(GridSpec.model_validate(run_store.resolved["spec"]))}


def _parse(data: bytes) -> Request:
    """Raises ValueError with what is wrong."""
    fields = json.loads(data)
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    wanted: dict[str, type | tuple[type, ...]] = {
        "action": str,
        "cell": str,
        "reset_budget": bool,
        "by": str,
        "at": (int, float),
    }
    for name, kind in wanted.items():
        if not isinstance(fields.get(name), kind):
            raise ValueError(f"field {name}: {fields.get(name)!r}")
    if fields["action"] not in ("cancel", "retry"):
        raise ValueError(f"field action: {fields['action']!r}")
    if not _CELL.match(fields["cell"]):
        raise ValueError(f"field cell: {fields['cell']!r}")
    return Request(**{name: fields[name] for name in wanted})


def _past(action: str) -> str:
    return "cancelled" if action == "cancel" else "put back for another try"
