"""Who holds a run: as its holder says, and as readers of its folder see it, who trust no clocks to agree."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from orchestrator.store.lease import LeaseRecord, read_record

LEASE_SECONDS = 10.0
"""Time-to-live of the lease: how long a starter watches before it takes over from a controller that stands still."""


def holder() -> str:
    """Who holds the lease, for people: host, process and, inside a Ray job, its id."""
    job = os.environ.get("RAY_JOB_SUBMISSION_ID")
    return f"{socket.gethostname()}:{os.getpid()}" + (f" ({job})" if job else "")


SILENT_FACTOR = 3.0
"""A heartbeat older than so many times-to-live is taken for the last one: more than clocks of machines usually differ."""


class HolderWatch:
    """Looks at a run's lease again and again. A holder whose heartbeat stands still for its time-to-live is gone."""

    def __init__(self, lease_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_dir = lease_dir
        self._clock = clock
        self._seen: LeaseRecord | None = None
        self._changed_at = clock()

    def look(self) -> LeaseRecord | None:
        """The record of the present holder; None when nobody holds the run.

        A holder that died without releasing its lease counts until it has stood still for its time-to-live since the
        first look.
        """
        record = read_record(self._lease_dir)
        if record is None or record.released:
            return None
        if record != self._seen:
            # At the first look, the age of the heartbeat as the storage tells it stands for what was not watched.
            silent = heartbeat_age(self._lease_dir) if self._seen is None else 0.0
            self._seen = record
            self._changed_at = self._clock() - (
                silent if silent > SILENT_FACTOR * record.time_to_live else 0.0
            )
        return record if self._clock() - self._changed_at <= record.time_to_live else None


def heartbeat_age(lease_dir: Path) -> float:
    """Seconds since the newest heartbeat, by this machine's clock and the storage's: for people, decisions never rest on it."""
    beats = [path.stat().st_mtime for path in lease_dir.glob("*.json")]
    return max(time.time() - max(beats), 0.0) if beats else 0.0


def holder_line(record: LeaseRecord | None) -> str:
    """Who holds the run, for people."""
    if record is None:
        return "nobody holds the run"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.since))
    return f"held by {record.holder} since {since}"
