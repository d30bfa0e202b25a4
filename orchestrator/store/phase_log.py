"""Every phase that a member of a pool has served, as lines in the run folder: written beside the work, read at any time.

A lost line costs a little knowledge and no result, so nothing here is forced to disk, and a full disk stops nothing.
"""

import json
import threading
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from orchestrator.store.files import FencedFiles, read_bytes
from orchestrator.store.lease import LeaseLost

RECORDS_PER_SEGMENT = 20_000
SEGMENTS_KEPT = 10
"""Of a run: about 50 MB."""
RECORDS_PER_WRITE = 1000
WRITE_SECONDS = 1.0
"""How long a record waits in memory at most, unless ``RECORDS_PER_WRITE`` come together before."""
CLOSE_SECONDS = 5.0
"""How long the end of a run waits for the last write; storage that hangs takes for ever."""
RECENT_RECORDS = 10_000
"""What is read where the latest phases are enough."""


class PhaseKind(StrEnum):
    """What a member did."""

    SAMPLING = "sampling"
    GRADING = "grading"
    LEARNING = "learning"
    EVALUATION = "evaluation"
    """Sampling for an evaluation."""
    EVALUATION_GRADING = "evaluation grading"
    TAKING_UP = "taking up"
    """Loading a cell's commit, or the base model."""
    COMMIT = "commit"
    START_UP = "start-up"
    """What shows, before the first cell, that the pools serve."""


class PhaseRecord(NamedTuple):
    """One call that a member has served."""

    member: str
    """``sampler 0``, ``learner 1`` (a group), ``grader``"""
    kind: PhaseKind
    cell: str
    """Or ``base``, ``probe-...`` and ``start-up``, which are no cells."""
    step: int
    """Of sampling, grading and learning the step that is made; else the steps that the weights have behind them."""
    started_at: float
    """Unix seconds at which the member began."""
    busy_seconds: float
    waited_seconds: float
    """In the pool's queue, before that."""
    sequences: int
    """Rollouts that it was about."""
    tokens: int
    """Of their responses."""
    accelerators: int
    """That the member holds: GPUs, or cores in a pool without GPUs. 0 for a grader."""
    failed: bool = False
    """It ended with an error, or was given up: nothing came of it."""

    @property
    def ended_at(self) -> float:
        """Unix seconds."""
        return self.started_at + self.busy_seconds

    def to_line(self) -> bytes:
        """As a line of a segment, times to the microsecond."""
        fields = self._asdict()
        for name in ("started_at", "busy_seconds", "waited_seconds"):
            fields[name] = round(fields[name], 6)
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "PhaseRecord | None":
        """The record; None for a line that was cut off by a kill."""
        try:
            fields = json.loads(line)
            fields["kind"] = PhaseKind(fields["kind"])
            return cls(**fields)
        except (ValueError, TypeError, KeyError):
            return None


class PhaseLog:
    """Appends records to ``phases/e<epoch>-<segment>.jsonl`` from a thread of its own, between ``with`` and its end."""

    def __init__(
        self, run_dir: Path, epoch: int, fence: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        """``fence`` raises LeaseLost when another controller has taken over; ``say`` is told when records are lost."""
        self._folder = run_dir / "phases"
        self._files = FencedFiles(self._folder, epoch, fence)
        self._epoch, self._say = epoch, say
        self._segment, self._in_segment = 1, 0
        self._waiting: list[PhaseRecord] = []
        self._changed = threading.Condition()
        self._closed = self._told = False
        self._thread = threading.Thread(target=self._write_all, name="phase-log", daemon=True)

    def __enter__(self) -> "PhaseLog":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(CLOSE_SECONDS)

    def add(self, record: PhaseRecord) -> None:
        """Have a record written. Returns at once, from any thread, and never raises."""
        with self._changed:
            self._waiting.append(record)
            if len(self._waiting) >= RECORDS_PER_WRITE:
                self._changed.notify()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or len(self._waiting) >= RECORDS_PER_WRITE, WRITE_SECONDS
                )
                records, self._waiting = self._waiting, []
                closed = self._closed
            try:
                self._write(records)
            except LeaseLost:
                return  # the run belongs to another controller
            except OSError as error:
                if not self._told:
                    self._told = True
                    self._say(
                        f"phases are not on record for now ({error}); the run goes on, and its timeline has gaps"
                    )
            if closed:
                return

    def _write(self, records: list[PhaseRecord]) -> None:
        while records:
            room = RECORDS_PER_SEGMENT - self._in_segment
            part, records = records[:room], records[room:]
            path = self._folder / f"e{self._epoch:06d}-{self._segment:06d}.jsonl"
            self._files.append(path, b"".join(record.to_line() for record in part))
            if self._in_segment == 0:
                for old in segments(self._folder.parent)[:-SEGMENTS_KEPT]:
                    old.unlink(missing_ok=True)
            self._in_segment += len(part)
            if self._in_segment == RECORDS_PER_SEGMENT:
                self._segment, self._in_segment = self._segment + 1, 0


def segments(run_dir: Path) -> list[Path]:
    """A run's segments, oldest first."""
    return sorted((run_dir / "phases").glob("e*-*.jsonl"))


def read_epochs(run_dir: Path) -> Iterator[list[PhaseRecord]]:
    """The records kept of each controller that the run has had, oldest first, in the order in which their phases ended."""
    epochs: dict[str, list[PhaseRecord]] = {}
    for path in segments(run_dir):
        epochs.setdefault(path.name.partition("-")[0], []).extend(_records(_lines(path)))
    yield from epochs.values()


def recent_records(run_dir: Path, count: int | None = None) -> list[PhaseRecord]:
    """The latest ``count`` of a run, ``RECENT_RECORDS`` when None, oldest first."""
    count = RECENT_RECORDS if count is None else count
    lines: list[bytes] = []
    for path in reversed(segments(run_dir)):
        lines = [*_lines(path)[-(count - len(lines)) :], *lines]
        if len(lines) >= count:
            break
    return _records(lines)


def _lines(path: Path) -> list[bytes]:
    try:
        return read_bytes(path).splitlines()
    except FileNotFoundError:
        return []  # an old one that was removed meanwhile


def _records(lines: list[bytes]) -> list[PhaseRecord]:
    return [record for line in lines if (record := PhaseRecord.from_line(line)) is not None]
