"""What every member of the pools did when, as a file that Perfetto and chrome://tracing open.

The format is Chrome's Trace Event Format: complete events (``ph`` X) in microseconds, rows named by metadata events (``ph`` M).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grids.errors import UserError
from orchestrator.store.files import write_atomically
from orchestrator.store.phase_log import PhaseRecord, read_epochs

POOLS = ("sampler", "learner", "grader")
"""First words of members' names, in the order in which their rows are shown."""


def write_timeline(run_dir: Path, output: Path) -> int:
    """Write the timeline of a run that goes on, or has ended; the number of phases in it.

    Raises:
        UserError: the run has no phases on record, or the file cannot be written.
    """
    records = [record for epoch in read_epochs(run_dir) for record in epoch]
    if not records:
        raise UserError(
            f"{run_dir / 'phases'}: no phases are on record; they come with the first cells of a run"
        )
    try:
        write_atomically(output, json.dumps(trace(records)).encode(), durable=False)
    except OSError as error:
        raise UserError(
            f"--output {output}: cannot be written ({error.strerror}); name a file in a folder that can be written"
        ) from error
    return len(records)


def trace(records: Sequence[PhaseRecord]) -> dict[str, Any]:
    """The content of the file: one process for each pool, one thread for each member, one slice for each phase.

    Time 0 is the start of the first phase, which ``otherData`` tells in unix seconds.
    """
    start = min(record.started_at for record in records)
    rows = {member: _row(member) for member in sorted({record.member for record in records}, key=_row)}
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": f"{POOLS[pid - 1]}s"}}
        for pid in sorted({pid for pid, _ in rows.values()})
    ]
    events += [
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": member}}
        for member, (pid, tid) in rows.items()
    ]
    events += [_slice(record, start, *rows[record.member]) for record in records]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"started_at": start}}


def _row(member: str) -> tuple[int, int]:
    """(process, thread), both from 1, of ``sampler 0``, ``learner 3`` or ``grader``."""
    pool, _, number = member.partition(" ")
    return POOLS.index(pool) + 1, int(number or 0) + 1


def _slice(record: PhaseRecord, start: float, pid: int, tid: int) -> dict[str, Any]:
    return {
        "name": f"{record.cell} {record.kind}{' (failed)' if record.failed else ''}",
        "cat": str(record.kind),
        "ph": "X",
        "ts": round((record.started_at - start) * 1e6),
        "dur": round(record.busy_seconds * 1e6),
        "pid": pid,
        "tid": tid,
        "args": {
            "cell": record.cell,
            "step": record.step,
            "waited_seconds": record.waited_seconds,
            "sequences": record.sequences,
            "tokens": record.tokens,
        },
    }
