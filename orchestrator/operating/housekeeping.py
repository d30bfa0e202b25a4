"""What a run has left behind and no resume needs: found first, removed only when told to, under the run's lease."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.operating.asking import grid_cells
from orchestrator.operating.status import shown_state
from orchestrator.pools import members
from orchestrator.store import checkpoint_folders
from orchestrator.store.cell_state import CellState, State
from orchestrator.store.files import is_temporary
from orchestrator.store.requests import FOLDER as REQUESTS
from orchestrator.store.requests import SET_ASIDE
from orchestrator.store.run_store import RunStore

FRESH_SECONDS = 3600.0
"""A younger temporary may belong to somebody who is writing it at this moment (a request being filed, say)."""
_DONE = (State.FINISHED, State.DIVERGED, State.CANCELLED)


@dataclass(frozen=True)
class Garbage:
    """Something to remove: a file or folder (``path``) or a process (``member``)."""

    kind: str
    what: str
    why: str
    bytes: int = 0
    path: Path | None = None
    member: members.Member | None = None

    def row(self) -> dict[str, Any]:
        """For a table."""
        return {"kind": self.kind, "what": self.what, "MB": round(self.bytes / 1e6, 3), "why": self.why}


def garbage(run_store: RunStore, now: float | None = None) -> list[Garbage]:
    """All that may go. Removes nothing, and is exact while nobody trains; while a controller does, it may list a checkpoint that
    is being written.

    Raises:
        StoreDamaged: a cell's state cannot be read, so it is not known what the cell needs.
    """
    run_dir = run_store.run_dir
    cells = grid_cells(run_store)
    found: list[Garbage] = []
    for cell, state in run_store.states().items():
        shown = shown_state(state, cells[cell]) if cell in cells else state.state
        found += _checkpoints(run_store.cell(cell).folder, state, shown)
    found += _temporaries(run_dir, time.time() if now is None else now)
    for path in sorted((run_dir / REQUESTS / SET_ASIDE).glob("*")):
        found.append(_file("request", run_dir, path, "could not be answered"))
    for member in members.leftovers(run_dir):
        what = f"{member.role}, process {member.pid} on {member.host}"
        found.append(Garbage("process", what, "its controller is gone", member=member))
    return found


def remove(run_store: RunStore, found: list[Garbage], epoch: int, check: Callable[[], None]) -> list[str]:
    """Remove what ``garbage`` found under a lease held by the caller; what could not be removed, in words.

    Args:
        run_store: of the run.
        found: as found while this lease was held.
        epoch: of the lease.
        check: raises LeaseLost when another controller has taken over.
    """
    faults = []
    for item in found:
        check()
        if item.path is None:
            continue
        try:
            if item.kind == "checkpoint":
                checkpoint_folders.remove(item.path)
            elif item.path.is_dir():
                shutil.rmtree(item.path)
            else:
                item.path.unlink(missing_ok=True)
        except OSError as error:
            faults.append(f"{item.what}: not removed ({error.strerror})")
    if any(item.member for item in found):
        check()
        members.sweep(run_store.run_dir, epoch)
        faults += [
            f"{member.role}, process {member.pid} on {member.host}: still there"
            for member in members.leftovers(run_store.run_dir)
        ]
    return faults


def _checkpoints(folder: Path, state: CellState, shown: State) -> Iterator[Garbage]:
    """Of a cell that is done all but the committed one; of others what ``restore`` would drop."""
    root = folder / "checkpoints"
    committed = folder / state.commit.checkpoint if state.commit and state.commit.checkpoint else None
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        step = checkpoint_folders.step_of(path.name)
        if step is None or path == committed:
            continue
        if not (path / checkpoint_folders.MARKER).exists():
            why = "incomplete"
        elif step > state.committed_step:
            why = "newer than the cell's commit"
        elif shown in _DONE:
            why = f"the cell is {shown}, a newer one is committed"
        else:
            continue
        yield Garbage("checkpoint", path.relative_to(folder.parents[1]).as_posix(), why, _bytes(path), path)


def _temporaries(run_dir: Path, now: float) -> Iterator[Garbage]:
    for parent, _, names in os.walk(run_dir):
        for name in sorted(names):
            path = Path(parent, name)
            try:
                if is_temporary(name) and now - path.stat().st_mtime > FRESH_SECONDS:
                    yield _file("temporary", run_dir, path, "left by a write that was broken off")
            except FileNotFoundError:
                continue  # renamed into place meanwhile


def _file(kind: str, run_dir: Path, path: Path, why: str) -> Garbage:
    return Garbage(kind, path.relative_to(run_dir).as_posix(), why, _bytes(path), path)


def _bytes(path: Path) -> int:
    if not path.is_dir():
        return path.lstat().st_size
    return sum(
        os.lstat(os.path.join(parent, name)).st_size for parent, _, names in os.walk(path) for name in names
    )
