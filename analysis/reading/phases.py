"""What the pools of a run have done, from ``phases/e<epoch>-<segment>.jsonl``, whose lines docs/scheduling.md describes."""

import json
import math
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from analysis.reading.raw_rows import Complaints
from analysis.reading.settings import GRID


class _Phase(NamedTuple):
    """A row of ``GridTables.phases``."""

    start: str
    member: str
    kind: str
    cell: str
    started_at: float
    busy_seconds: float
    waited_seconds: float
    failed: bool


def read_phases(run_dir: Path, complaints: Complaints) -> pd.DataFrame | None:
    """The phases on record of a run, as ``GridTables.phases`` describes them; None where there are none.

    A line that was cut off by a kill, or lacks a field that is needed, is left out: it costs a little knowledge only.
    """
    phases: list[_Phase] = []
    for path in sorted((run_dir / "phases").glob("e*-*.jsonl")):
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:
            continue  # an old one that the run has removed meanwhile
        except OSError as error:
            complaints[GRID].append(f"phases/{path.name} cannot be read ({error.strerror}); it is ignored")
            continue
        start = path.name.partition("-")[0]
        phases += [phase for line in lines if (phase := _phase(start, line)) is not None]
    return pd.DataFrame(phases) if phases else None


def _phase(start: str, line: bytes) -> _Phase | None:
    try:
        fields = json.loads(line)
        begin, busy, waited = (
            float(fields[name]) for name in ("started_at", "busy_seconds", "waited_seconds")
        )
        member, kind, cell = (fields[name] for name in ("member", "kind", "cell"))
        failed = fields.get("failed") is True
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    if not all(isinstance(word, str) and word.strip() for word in (member, kind, cell)):
        return None
    if not all(math.isfinite(seconds) and seconds >= 0.0 for seconds in (begin, busy, waited)):
        return None
    return _Phase(start, member, kind, cell, begin, busy, waited, failed)
