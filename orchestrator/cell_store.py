"""One cell's folder in a run: state, history, checkpoints, samples and attempts, written by one writer at a
time.

A commit is the point that a cell resumes from. It is taken in this order: the checkpoint is complete (marker
on disk), the history is on disk, ``state.json`` is replaced. Whatever is newer than the last commit is
dropped by ``CellStore.restore``.
"""

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.cell_state import FORMAT_VERSION, CellState, Commit, State, StoreDamaged
from orchestrator.files import (
    is_temporary,
    make_folder,
    read_bytes,
    sync_file,
    sync_folder,
    write_all,
    write_atomically,
)

log = logging.getLogger(__name__)

MARKER = "COMPLETE"
CHECKPOINTS_KEPT = 2
_MEND = "put it back, or remove the cell's folder to train the cell again"
_CHECKPOINT = re.compile(r"^step_(\d+)-e(\d+)-a(\d+)$")


class CellStore:
    """A cell's folder. Without an epoch and a lease check it is read-only. For one thread at a time."""

    def __init__(
        self,
        folder: Path,
        cell: str,
        epoch: int = 0,
        check: Callable[[], None] | None = None,
        keep: int = CHECKPOINTS_KEPT,
    ) -> None:
        self.folder = folder
        self.cell = cell
        self._epoch = epoch
        self._check = check
        self._keep = keep
        self._history: int | None = None  # descriptor for appending, opened by restore
        self._history_rows = 0

    # State

    def read(self) -> CellState:
        """The cell's state; pending when it was never written. Raises StoreDamaged."""
        path = self.folder / "state.json"
        try:
            data = read_bytes(path)
        except FileNotFoundError:
            return CellState(cell=self.cell)
        return CellState.from_bytes(data, path)

    def write(self, state: CellState) -> CellState:
        """Replace the state, stamped with epoch and time; what was written.

        Raises LeaseLost when another controller has taken over, RuntimeError for a cell that is finished.
        """
        self._refuse_finished()
        stamped = replace(state, epoch=self._epoch, updated_at=time.time())
        self._write_file(self.folder / "state.json", stamped.to_bytes())
        return stamped

    def set_state(self, state: State, reason: str | None = None) -> CellState:
        """Change the state and its reason; attempt and commit stay."""
        return self.write(replace(self.read(), state=state, reason=reason))

    def start_attempt(self) -> CellState:
        """Restore to the last commit and count one more attempt; the new state (running), whose ``commit`` to
        resume from.
        """
        self.restore()
        state = self.read()
        return self.write(replace(state, state=State.RUNNING, attempt=state.attempt + 1, reason=None))

    # History

    def append_row(self, row: dict[str, Any]) -> None:
        """Append one evaluated step to the history; it survives a restart once a commit covers it.

        Needs ``restore`` (or ``start_attempt``) first. Raises ValueError for NaN and infinities: decide what
        they mean before.
        """
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        history = self._open_history()
        self._fence()
        end = os.fstat(history).st_size
        try:
            write_all(history, line)
        except OSError:
            os.ftruncate(history, end)  # a full disk took half the line: the next row must not be glued to it
            raise
        self._history_rows += 1

    def rows(self) -> list[dict[str, Any]]:
        """All complete history rows, also those after the last commit; a last line still being written is
        left out.
        """
        path = self.folder / "history.jsonl"
        try:
            data = read_bytes(path)
        except FileNotFoundError:
            return []
        rows = []
        for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise StoreDamaged(
                    f"{path}: row {number} is not JSON; remove the cell's folder to train it again"
                ) from error
        return rows

    # Checkpoints and commits

    def begin_checkpoint(self, step: int) -> Path:
        """An empty folder to write the checkpoint of ``step`` into; it counts once ``complete_checkpoint``
        has marked it.
        """
        self._fence()
        state = self.read()
        name = f"step_{step:08d}-e{self._epoch:04d}-a{state.attempt}"
        if state.commit and state.commit.checkpoint == f"checkpoints/{name}":
            raise RuntimeError(
                f"{self.cell}: {name} is committed; commit it again instead of writing it anew"
            )
        path = make_folder(self.folder / "checkpoints") / name
        if path.exists():
            _remove_checkpoint(path)
        path.mkdir()
        return path

    def complete_checkpoint(self, path: Path) -> None:
        """Force everything under ``path`` to disk, then mark it complete; the marker lists the files and
        their sizes.
        """
        sizes = _sizes(path)
        if not sizes:
            raise RuntimeError(f"{path}: an empty checkpoint cannot be complete")
        for name in sizes:
            sync_file(path / name)
        for folder in sorted({(path / name).parent for name in sizes} | {path, path.parent}):
            sync_folder(folder)
        marker = {"version": FORMAT_VERSION, "files": sizes}
        self._write_file(path / MARKER, (json.dumps(marker, indent=1) + "\n").encode())

    def commit(
        self,
        step: int,
        checkpoint: Path | None,
        progress: dict[str, Any],
        state: State = State.RUNNING,
        reason: str | None = None,
    ) -> CellState:
        """Make ``step`` what the cell resumes from, with all rows appended so far; then sweep all but the
        newest checkpoints.

        The checkpoint must be complete. No other checkpoint of this cell may be under way. Returns the state
        written.
        """
        relative = None
        if checkpoint is not None:
            self._verify_checkpoint(checkpoint)
            relative = checkpoint.relative_to(self.folder).as_posix()
        history = self._open_history()
        os.fsync(history)
        commit = Commit(step, os.fstat(history).st_size, self._history_rows, relative, progress)
        written = self.write(replace(self.read(), state=state, reason=reason, commit=commit))
        self._sweep_checkpoints(commit)
        return written

    def restore(self) -> Commit | None:
        """Bring the folder back to the last commit (None: the cell starts from nothing) and open it for
        appending.

        Removes incomplete and later checkpoints, cuts the history to the commit. Raises StoreDamaged when the
        committed checkpoint or history is not whole, RuntimeError when the cell is finished.
        """
        self._refuse_finished()
        make_folder(self.folder)
        commit = self.read().commit
        if commit and commit.checkpoint:
            self._verify_checkpoint(self.folder / commit.checkpoint)
        path = self.folder / "history.jsonl"
        committed = read_bytes(path)[: commit.history_bytes] if commit and commit.history_bytes else b""
        rows = committed.count(b"\n")
        if commit and (len(committed), rows) != (commit.history_bytes, commit.history_rows):
            raise StoreDamaged(
                f"{path}: holds {rows} of the {commit.history_rows} rows committed by step {commit.step}; "
                f"{_MEND}"
            )
        self.close()
        # Always a new file: a writer of an older epoch with the old one open appends where nobody reads.
        self._write_file(path, committed)
        self._history = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._history_rows = rows
        self._sweep_checkpoints(commit)
        return commit

    def close(self) -> None:
        """Close the history; ``restore`` opens it again."""
        if self._history is not None:
            os.close(self._history)
            self._history = None

    # For people

    def write_samples(self, step: int, samples: list[dict[str, Any]]) -> Path:
        """Keep rollouts of one evaluated step, one JSON line each; written again by a replay. Raises
        ValueError for NaN.
        """
        path = self.folder / "samples" / f"step_{step:08d}.jsonl"
        lines = "".join(json.dumps(sample, ensure_ascii=False, allow_nan=False) + "\n" for sample in samples)
        self._write_file(path, lines.encode(errors="backslashreplace"))  # a lone surrogate: its JSON escape
        return path

    def attempt_dir(self, attempt: int) -> Path:
        """The folder for logs of one attempt, made when missing."""
        return make_folder(self.folder / "attempts" / str(attempt))

    def write_failure(self, attempt: int, traceback_text: str) -> Path:
        """Keep an attempt's traceback; the file."""
        path = self.attempt_dir(attempt) / "traceback.txt"
        self._write_file(path, traceback_text.encode(errors="backslashreplace"))
        return path

    def _write_file(self, path: Path, data: bytes) -> None:
        self._fence()  # before anything is made in the folder
        make_folder(path.parent)
        write_atomically(path, data, epoch=self._epoch, fence=self._fence)

    def _fence(self) -> None:
        if self._check is None:
            raise RuntimeError(f"{self.folder}: opened for reading; hold the run's lease to write")
        self._check()

    def _refuse_finished(self) -> None:
        if self.read().state is State.FINISHED:
            raise RuntimeError(f"{self.cell} is finished; a finished cell is never written again")

    def _open_history(self) -> int:
        if self._history is None:
            raise RuntimeError(f"{self.cell}: restore the cell before writing its history")
        return self._history

    def _verify_checkpoint(self, path: Path) -> None:
        try:
            expected = json.loads(read_bytes(path / MARKER))["files"]
        except (FileNotFoundError, NotADirectoryError):
            raise StoreDamaged(f"{path}: checkpoint without its {MARKER} marker; {_MEND}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise StoreDamaged(f"{path}: checkpoint with an unreadable {MARKER} marker; {_MEND}") from error
        found = _sizes(path)
        for name, size in expected.items():
            if found.get(name) != size:
                raise StoreDamaged(
                    f"{path}: {name} has {found.get(name, 'no')} bytes, {size} were committed; {_MEND}"
                )

    def _sweep_checkpoints(self, commit: Commit | None) -> None:
        """Keep the committed checkpoint and the newest complete ones before it, ``keep`` in all; remove the
        others.

        Folders of a higher epoch belong to whoever has taken the run over and are left alone.
        """
        root = self.folder / "checkpoints"
        found = {}
        for path in root.iterdir() if root.is_dir() else ():
            match = _CHECKPOINT.match(path.name)
            if match and int(match[2]) <= self._epoch:
                found[path] = (int(match[1]), int(match[2]), int(match[3]))  # step, epoch, attempt
        committed = self.folder / commit.checkpoint if commit and commit.checkpoint else None
        earlier = [
            path
            for path in sorted(found, key=lambda path: found[path], reverse=True)
            if commit and path != committed and found[path][0] <= commit.step and (path / MARKER).exists()
        ]
        kept = {committed, *earlier[: self._keep - (committed is not None)]}
        for path in found.keys() - kept:
            try:
                _remove_checkpoint(path)
            except OSError as error:
                # Harmless to resuming: a reader elsewhere (NFS) or an orphaned writer still uses the folder.
                log.warning("old checkpoint %s not removed, tried again at the next commit: %s", path, error)


def _sizes(path: Path) -> dict[str, int]:
    """Bytes of every file under a checkpoint, by relative name."""
    return {
        found.relative_to(path).as_posix(): found.stat().st_size
        for found in sorted(path.rglob("*"))
        if found.is_file() and found != path / MARKER and not is_temporary(found.name)
    }


def _remove_checkpoint(path: Path) -> None:
    (path / MARKER).unlink(missing_ok=True)  # first: a half-removed checkpoint must not pass for a whole one
    shutil.rmtree(path)
