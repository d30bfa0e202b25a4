"""Who may write a run folder: a lease that needs neither locks nor clocks that agree.

The lease is a folder with one file per epoch, ``000001.json`` and so on. A new epoch is taken by exclusive
create, so of several starters one gets it; the holder is the highest epoch. The holder raises a counter in
its own file (a heartbeat). A starter watches that counter for one time-to-live on its *own* monotonic clock:
times of two machines are never compared. Epoch files are never removed, so a slow starter cannot take a
number that was taken before.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from grids.errors import UserError
from orchestrator.store.files import create_exclusively, make_folder, read_bytes, write_atomically

log = logging.getLogger(__name__)

BEATS_PER_TIME_TO_LIVE = 5
LOOKS_PER_TIME_TO_LIVE = 10


class LeaseHeld(UserError):
    """Another controller is alive and writes this run folder."""


class LeaseLost(UserError):
    """Another controller has taken the run folder over: this one must stop writing."""


@dataclass(frozen=True)
class LeaseRecord:
    """One epoch's file. ``since`` (unix seconds) is for people to read and is never compared;
    ``time_to_live`` in seconds.
    """

    epoch: int
    holder: str
    since: float
    time_to_live: float
    counter: int = 0
    released: bool = False

    def to_bytes(self) -> bytes:
        return (json.dumps(asdict(self)) + "\n").encode()


class Lease:
    """The right to write a run folder, from ``Lease.acquire``; as a context manager it beats in the
    background.
    """

    def __init__(
        self,
        folder: Path,
        record: LeaseRecord,
        time_to_live: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.time_to_live = time_to_live
        self.lost = threading.Event()
        self._record = record
        self._clock = clock
        self._last_beat = clock()
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def acquire(
        cls,
        folder: Path,
        holder: str,
        time_to_live: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> "Lease":
        """Take the lease in ``folder`` (the run's ``controller.lease``), to be kept by a beat every
        ``time_to_live`` / 5 s.

        Takes at once what is free or released; waits one time-to-live (the holder's or this one, whichever is
        longer) before taking over from a holder that stands still. Raises LeaseHeld as soon as the present
        holder's counter moves.
        """
        make_folder(folder)
        while True:
            newest = _newest_epoch(folder)
            if newest:
                _wait_until_free(folder, newest, time_to_live, clock, sleep)
            record = LeaseRecord(newest + 1, holder, since=time.time(), time_to_live=time_to_live)
            if create_exclusively(_epoch_file(folder, record.epoch), record.to_bytes()):
                return cls(folder, record, time_to_live, clock)
            # Another starter was faster: watch that one in turn.

    @property
    def epoch(self) -> int:
        """This holder's epoch, 1 for the first; every later holder has a higher one."""
        return self._record.epoch

    def beat(self) -> None:
        """Show that the holder lives. Raises LeaseLost when a higher epoch exists."""
        with self._lock:
            self._write(replace(self._record, counter=self._record.counter + 1))
            self._last_beat = self._clock()
            # Looked up after the write: the write makes an NFS client fetch the folder afresh.
            self._raise_if_lost()

    def check(self) -> None:
        """Raises LeaseLost when a higher epoch exists. Cheap: to be called before every write to the run
        folder.
        """
        if self._clock() - self._last_beat > self.time_to_live / 2:
            self.beat()  # this process slept or its storage hung: do not trust a cached view of the folder
        else:
            self._raise_if_lost()

    def start(self, on_lost: Callable[[LeaseLost], None] | None = None) -> Self:
        """Beat from a background thread until ``release``; on loss set ``lost`` and call ``on_lost`` from
        that thread.
        """
        if self._thread is not None:
            raise RuntimeError("the lease beats already")
        self._thread = threading.Thread(
            target=self._beat_until_stopped, args=(on_lost,), daemon=True, name="lease"
        )
        self._thread.start()
        return self

    def release(self) -> None:
        """Stop beating and let the next starter in without a wait. Harmless when repeated or when the lease
        is lost.
        """
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        try:
            with self._lock:
                self._write(replace(self._record, released=True))
        except OSError as error:
            # A full disk, say: the next starter waits one time-to-live.
            log.warning("lease not released: %s", error)

    def __enter__(self) -> Self:
        return self.start() if self._thread is None else self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _beat_until_stopped(self, on_lost: Callable[[LeaseLost], None] | None) -> None:
        while not self._stop.wait(self.time_to_live / BEATS_PER_TIME_TO_LIVE):
            try:
                self.beat()
            except LeaseLost as error:
                if on_lost is not None:
                    on_lost(error)
                return
            except OSError as error:
                # Storage that is away for a moment: the lease stands until someone takes a higher epoch.
                log.warning("lease heartbeat failed, trying again: %s", error)

    def _write(self, record: LeaseRecord) -> None:
        # No fsync: a heartbeat lost in a power failure costs nothing, a slow one could cost the lease.
        write_atomically(_epoch_file(self.folder, record.epoch), record.to_bytes(), durable=False)
        self._record = record

    def _raise_if_lost(self) -> None:
        newest = _newest_epoch(self.folder)
        if newest > self.epoch:
            self.lost.set()
            raise LeaseLost(
                f"{self.folder}: {_describe(self.folder, newest)} has taken this run over "
                f"(epoch {newest} after {self.epoch}); this controller stops, leave the run to the other one"
            )


def read_record(folder: Path) -> LeaseRecord | None:
    """The newest epoch's record; None where the lease was never taken, or the record cannot be read."""
    try:
        newest = _newest_epoch(folder)
    except FileNotFoundError:
        return None
    return _parse(_read(folder, newest)) if newest else None


def _wait_until_free(
    folder: Path, epoch: int, time_to_live: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> None:
    """Return when ``epoch`` is released or stood still for a time-to-live; raise LeaseHeld when it moves."""
    first = _read(folder, epoch)
    looked, waited = clock(), 0.0
    if present := _parse(first):
        time_to_live = max(time_to_live, present.time_to_live)
    while True:
        # The clock is read before the file: the last look lies a full time-to-live after the first. Between two looks
        # no more counts than two pauses: a clock that jumps must not take a run from a living holder.
        now = clock()
        waited += min(max(now - looked, 0.0), 2 * time_to_live / LOOKS_PER_TIME_TO_LIVE)
        looked = now
        seen, newest = _read(folder, epoch), _newest_epoch(folder)
        record = _parse(seen)
        if newest > epoch or (seen != first and not (record and record.released)):
            raise LeaseHeld(
                f"{folder}: {_describe(folder, newest)} is running this grid; stop it first, or start again "
                f"{time_to_live:g} s after it has died"
            )
        if (record and record.released) or waited >= time_to_live:
            return
        sleep(min(time_to_live / LOOKS_PER_TIME_TO_LIVE, max(time_to_live - waited, 0.0) + 1e-3))


def _epoch_file(folder: Path, epoch: int) -> Path:
    return folder / f"{epoch:06d}.json"


def _newest_epoch(folder: Path) -> int:
    """The highest epoch taken so far, 0 when none."""
    names = (name.removesuffix(".json") for name in os.listdir(folder) if name.endswith(".json"))
    return max((int(name) for name in names if name.isdigit()), default=0)


def _read(folder: Path, epoch: int) -> bytes:
    return read_bytes(_epoch_file(folder, epoch))


def _parse(data: bytes) -> LeaseRecord | None:
    """The record, or None for bytes that a power failure left unreadable (their holder is dead or will beat
    again).
    """
    try:
        return LeaseRecord(**json.loads(data))
    except (ValueError, TypeError):
        return None


def _describe(folder: Path, epoch: int) -> str:
    record = _parse(_read(folder, epoch))
    if record is None:
        return f"another controller (epoch {epoch})"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.since))
    return f"the controller {record.holder} (since {since})"
