"""One cell's folder in a run: state, history, checkpoints, samples and attempts, written by one writer at a
time.

A commit is the point that a cell resumes from. It is taken in this order: the checkpoint is complete (marker
on disk), the history is on disk, ``state.json`` is replaced. Whatever is newer than the last commit is
dropped by ``CellStore.restore``.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.store import checkpoint_folders
from orchestrator.store.attempts import Attempts
from orchestrator.store.cell_state import (
    FORMAT_VERSION,
    AttemptRecord,
    CellState,
    Commit,
    Spent,
    State,
    StoreDamaged,
)
from orchestrator.store.checkpoint_folders import MARKER, MEND
from orchestrator.store.files import (
    FencedFiles,
    append_all,
    make_folder,
    read_bytes,
    read_last_line,
    remove_temporaries,
)

log = logging.getLogger(__name__)

CHECKPOINTS_KEPT = 2


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
        self._files = FencedFiles(folder, epoch, check)
        self._attempts = Attempts(self._files)
        self._keep = keep
        self._history: int | None = None  # descriptor for appending, opened by restore
        self._history_rows = 0
        self._attempt: int | None = None  # the one that this store started

    # State

    def read(self) -> CellState:
        """The cell's state; pending when it was never written. Raises StoreDamaged."""
        return read_state(f"{self.folder}/state.json", self.cell)

    def write(self, state: CellState) -> CellState:
        """Replace the state, stamped with epoch and time; what was written.

        Raises LeaseLost when another controller has taken over, RuntimeError for a cell that is finished.
        """
        self._refuse_finished()
        return self._write_state(state)

    def set_state(
        self,
        state: State,
        reason: str | None = None,
        *,
        spent: Spent | None = None,
        deviations: tuple[str, ...] | None = None,
    ) -> CellState:
        """Change the state and its reason; attempt and commit stay, ``spent`` and ``deviations`` where None."""
        present = self.read()
        return self.write(
            replace(
                present,
                state=state,
                reason=reason,
                spent=present.spent if spent is None else spent,
                deviations=present.deviations if deviations is None else deviations,
            )
        )

    def reopen(self, update_steps: int) -> CellState:
        """Make a finished cell pending again that now has ``update_steps`` to do; its commit stays.

        Raises RuntimeError for a cell that is not finished or has done as many.
        """
        present = self.read()
        if present.state is not State.FINISHED or not present.commit or present.commit.step >= update_steps:
            done = present.committed_step
            raise RuntimeError(
                f"{self.cell} is {present.state} at step {done} of {update_steps}; only a finished cell that has "
                "more steps to do is opened again"
            )
        return self._write_state(replace(present, state=State.PENDING, reason=None))

    # History

    def append_row(self, row: dict[str, Any]) -> None:
        """Append one evaluated step to the history; it survives a restart once a commit covers it.

        Needs ``restore`` (or ``start_attempt``) first. Raises ValueError for NaN and infinities: decide what
        they mean before.
        """
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        history = self._open_history()
        self._files.fence()
        append_all(history, line)
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
        self._files.fence()
        state = self.read()
        name = checkpoint_folders.folder_name(step, self._files.epoch, state.attempt)
        if state.commit and state.commit.checkpoint == f"checkpoints/{name}":
            raise RuntimeError(
                f"{self.cell}: {name} is committed; commit it again instead of writing it anew"
            )
        path = make_folder(self.folder / "checkpoints") / name
        if path.exists():
            checkpoint_folders.remove(path)
        path.mkdir()
        return path

    def complete_checkpoint(self, path: Path) -> None:
        """Force everything under ``path`` to disk, then mark it complete; the marker lists the files and
        their sizes.
        """
        with self._explained():
            sizes = checkpoint_folders.sync(path)
        marker = {"version": FORMAT_VERSION, "files": sizes}
        self._files.replace(path / MARKER, (json.dumps(marker, indent=1) + "\n").encode())

    def discard_checkpoint(self, path: Path) -> None:
        """Remove a checkpoint that could not be completed: on a full disk, saying so needs its space."""
        try:
            checkpoint_folders.remove(path)
        except OSError as error:
            log.warning("incomplete checkpoint %s not removed, the next attempt sweeps it: %s", path, error)

    def commit(
        self,
        step: int,
        checkpoint: Path | None,
        progress: dict[str, Any],
        state: State = State.RUNNING,
        reason: str | None = None,
        layout: dict[str, Any] | None = None,
    ) -> CellState:
        """Make ``step`` what the cell resumes from, with all rows appended so far; then sweep all but the
        newest checkpoints.

        The checkpoint must be complete. No other checkpoint of this cell may be under way. ``layout`` is what
        bit-exactness rests on (ranks, versions ...). Returns the state written.
        """
        relative = None
        if checkpoint is not None:
            with self._explained():
                checkpoint_folders.verify(checkpoint)
            relative = checkpoint.relative_to(self.folder).as_posix()
        history = self._open_history()
        os.fsync(history)
        commit = Commit(step, os.fstat(history).st_size, self._history_rows, relative, progress, layout)
        written = self.write(replace(self.read(), state=state, reason=reason, commit=commit))
        checkpoint_folders.sweep(self.folder, commit, self._files.epoch, self._keep)
        return written

    def restore(self) -> Commit | None:
        """Bring the folder back to the last commit (None: the cell starts from nothing) and open it for
        appending.

        Removes incomplete and later checkpoints and the temporaries of killed writers, cuts the history to the
        commit. Raises StoreDamaged when the committed checkpoint or history is not whole, RuntimeError when the
        cell is finished.
        """
        self._refuse_finished()
        self._files.make_folder(self.folder)
        remove_temporaries(self.folder, self._files.epoch, levels=None)
        commit = self.read().commit
        if commit and commit.checkpoint:
            with self._explained():
                checkpoint_folders.verify(self.folder / commit.checkpoint)
        path = self.folder / "history.jsonl"
        committed = read_bytes(path)[: commit.history_bytes] if commit and commit.history_bytes else b""
        rows = committed.count(b"\n")
        if commit and (len(committed), rows) != (commit.history_bytes, commit.history_rows):
            raise StoreDamaged(
                f"{path}: holds {rows} of the {commit.history_rows} rows committed by step {commit.step}; "
                f"{MEND}"
            )
        self.close()
        # Always a new file: a writer of an older epoch with the old one open appends where nobody reads.
        self._files.replace(path, committed)
        self._history = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._history_rows = rows
        checkpoint_folders.sweep(self.folder, commit, self._files.epoch, self._keep)
        return commit

    def close(self) -> None:
        """Force the history to disk and close it; ``restore`` opens it again.

        A cell that has diverged keeps its rows after the last commit, so these must last too.
        """
        if self._history is not None:
            history, self._history = self._history, None
            try:
                os.fsync(history)
            finally:
                os.close(history)

    # For people

    def write_samples(self, step: int, samples: list[dict[str, Any]]) -> Path:
        """Keep rollouts of one evaluated step, one JSON line each; written again by a replay. Raises
        ValueError for NaN.
        """
        path = self.folder / "samples" / f"step_{step:08d}.jsonl"
        lines = "".join(json.dumps(sample, ensure_ascii=False, allow_nan=False) + "\n" for sample in samples)
        self._files.replace(
            path, lines.encode(errors="backslashreplace")
        )  # a lone surrogate: its JSON escape
        return path

    # Attempts

    def start_attempt(self) -> CellState:
        """Count one more attempt, with a record of it, and restore to the last commit; the new state (running),
        whose ``commit`` to resume from.

        In this order, so that what keeps a cell from being restored is on record as an attempt of its own.
        """
        state = self.read()
        started = self.write(replace(state, state=State.RUNNING, attempt=state.attempt + 1, reason=None))
        self._attempt = started.attempt
        self._attempts.write_record(
            AttemptRecord(
                attempt=started.attempt,
                epoch=self._files.epoch,
                started_at=started.updated_at,
                first_step=state.committed_step + 1,
            )
        )
        self.restore()
        return started

    def end_attempt(
        self,
        outcome: str,
        reason: str | None = None,
        *,
        fault: str | None = None,
        phase: str | None = None,
        problems: tuple[str, ...] = (),
    ) -> None:
        """Complete the record of the current attempt; nothing where it has none."""
        record = self._attempts.record(self._current_attempt())
        if record is None:
            return
        self._attempts.write_record(
            replace(
                record,
                ended_at=time.time(),
                last_step=self.read().committed_step,
                outcome=outcome,
                reason=reason,
                fault=fault,
                phase=phase,
                problems=problems,
            )
        )

    def attempts(self) -> list[AttemptRecord]:
        """The records of the attempts in order; attempts of format 1 have none. Raises StoreDamaged."""
        return self._attempts.records()

    def attempt_dir(self, attempt: int) -> Path:
        """The folder of one attempt; need not exist."""
        return self._attempts.folder(attempt)

    def log(self, text: str) -> None:
        """Append a line with the time to the current attempt's log; it may be lost in a power failure."""
        self._attempts.log(self._current_attempt(), text)

    def write_stacks(self, attempt: int, text: str) -> Path:
        """Append the stacks of a stuck process to an attempt's file; the file."""
        return self._attempts.write_stacks(attempt, text)

    def write_failure(self, attempt: int, traceback_text: str) -> Path:
        """Keep an attempt's traceback; the file."""
        return self._attempts.write_traceback(attempt, traceback_text)

    def _current_attempt(self) -> int:
        return self.read().attempt if self._attempt is None else self._attempt

    def _write_state(self, state: CellState) -> CellState:
        stamped = replace(state, epoch=self._files.epoch, updated_at=time.time())
        self._files.replace(self.folder / "state.json", stamped.to_bytes())
        return stamped

    def _refuse_finished(self) -> None:
        if self.read().state is State.FINISHED:
            raise RuntimeError(f"{self.cell} is finished; a finished cell is never written again")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Whoever has taken the lease over sweeps what this writer was at: that is told, not its consequences."""
        try:
            yield
        except (FileNotFoundError, RuntimeError, StoreDamaged):
            self._files.fence()
            raise

    def _open_history(self) -> int:
        if self._history is None:
            raise RuntimeError(f"{self.cell}: restore the cell before writing its history")
        return self._history


def read_state(path: str, cell: str) -> CellState:
    """The state of ``cell`` in the file ``path``; pending when there is none. Raises StoreDamaged."""
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        return CellState(cell=cell)
    return CellState.from_bytes(data, path)


def last_row(path: str) -> dict[str, Any] | None:
    """The last complete row of a history file, None when there is none; reads only the end of the file.

    Raises StoreDamaged.
    """
    line = read_last_line(path)
    try:
        return json.loads(line) if line is not None else None
    except ValueError as error:
        raise StoreDamaged(
            f"{path}: its last row is not JSON; remove the cell's folder to train it again"
        ) from error
