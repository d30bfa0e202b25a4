"""The attempts at a cell, ``attempts/<K>/``: their records and what lies beside them for people."""

import os
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.store.cell_state import AttemptRecord
from orchestrator.store.files import FencedFiles, read_bytes

RECORD = "attempt.json"
LOG = "log.txt"
TRACEBACK = "traceback.txt"
STACKS = "stacks.txt"


class Attempts:
    """The folder of a cell's attempts. For writing where ``files`` are."""

    def __init__(self, files: FencedFiles) -> None:
        self._files = files

    def folder(self, attempt: int) -> Path:
        """Where an attempt's files lie; need not exist."""
        return self._files.folder / "attempts" / str(attempt)

    def record(self, attempt: int) -> AttemptRecord | None:
        """The record of an attempt, None where there is none (format 1 kept none). Raises StoreDamaged."""
        path = self.folder(attempt) / RECORD
        try:
            data = read_bytes(path)
        except FileNotFoundError:
            return None
        return AttemptRecord.from_bytes(data, path)

    def records(self) -> list[AttemptRecord]:
        """The records in order; attempts without one are left out. Raises StoreDamaged."""
        try:
            names = os.listdir(self._files.folder / "attempts")
        except FileNotFoundError:
            return []
        records = (self.record(number) for number in sorted(int(name) for name in names if name.isdecimal()))
        return [record for record in records if record is not None]

    def write_record(self, record: AttemptRecord) -> None:
        """Replace the record of its attempt."""
        self._files.replace(self.folder(record.attempt) / RECORD, record.to_bytes())

    def log(self, attempt: int, text: str) -> None:
        """Append a line with the time (UTC); it may be lost in a power failure."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._append(attempt, LOG, f"{now} {text}")

    def write_stacks(self, attempt: int, text: str) -> Path:
        """Append the stacks of a stuck process; the file."""
        return self._append(attempt, STACKS, text)

    def write_traceback(self, attempt: int, text: str) -> Path:
        """Keep the traceback of a failure; the file."""
        path = self.folder(attempt) / TRACEBACK
        self._files.replace(path, text.encode(errors="backslashreplace"))
        return path

    def _append(self, attempt: int, name: str, text: str) -> Path:
        path = self.folder(attempt) / name
        self._files.append(path, (text.rstrip("\n") + "\n").encode(errors="backslashreplace"))
        return path
