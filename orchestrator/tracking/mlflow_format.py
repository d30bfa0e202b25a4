"""How a grid's values look in MLflow: statuses, names, metrics, parameters, errors."""

import hashlib
import json
import math
import string
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Literal

from requests import RequestException

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]
Row = Mapping[str, Any]

STEP_COLUMN = "compute_rollouts"
TIME_COLUMN = "logged_at_ms"
LONGEST_PARAM = 6000
LONGEST_NAME = 250

RUN_TAG = "isocompute.run"
CELL_TAG = "isocompute.cell"
STATE_TAG = "isocompute.state"
REASON_TAG = "isocompute.reason"
PARENT_TAG = "mlflow.parentRunId"

PER_PROBLEM_FILE = "per_problem.jsonl"
PER_PROBLEM_COLUMNS = ("eval_right", "train_probe_right")
"""History columns that hold a list: no metrics, so they travel as a file of the cell's run."""
GRID_FILE = "grid.yaml"
"""The run folder's resolved grid, a file of the parent run."""


def mlflow_status(state: str) -> RunStatus:
    """MLflow's status for a cell state; it knows no other ones. Diverged is a result: FINISHED, and a tag."""
    statuses: dict[str, RunStatus] = {"finished": "FINISHED", "diverged": "FINISHED", "failed": "FAILED"}
    return statuses.get(state, "KILLED")


ENDED_STATES = frozenset({"finished", "failed", "diverged", "cancelled", "paused"})
"""States in which no process works on a cell; the run of any other one was interrupted when its controller has gone."""

_PLAIN = frozenset(string.ascii_lowercase + string.digits + "_")


@cache
def valid_name(name: str) -> str:
    """A name that MLflow takes for a metric, a tag or a part of a parameter; different names stay different.

    Lower-case letters, digits and underscores stay as they are, so the columns of a history do. Any other
    character becomes its code point in hexadecimal between hyphens: ``pass@1`` is ``pass-40-1``. That leaves no
    slash, by which one name could be a folder of another, and no capital, which some databases take for its
    small letter. A name that is too long ends in its digest.
    """
    return _limited("".join(c if c in _PLAIN else f"-{ord(c):x}-" for c in name) or "--")


def dotted_name(parts: Iterable[str]) -> str:
    """A name of several parts, each made valid, between dots."""
    return _limited(".".join(valid_name(part) for part in parts))


def _limited(name: str) -> str:
    if len(name) <= LONGEST_NAME:
        return name
    # Longer than any code point: no other name ends so.
    digest = f"-{hashlib.sha256(name.encode()).hexdigest()[:32]}-"
    return name[: LONGEST_NAME - len(digest)] + digest


def metrics_of(row: Row) -> list[tuple[str, float]]:
    """The finite numeric columns of a history row, without its time.

    ``compute_rollouts`` comes last: once MLflow has that one, it has the whole row. NaN and infinity are left
    out: MLflow would store infinity as 1.8e308 and draw it.
    """
    numbers = {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }
    numbers.pop(TIME_COLUMN, None)
    return [(valid_name(name), value) for name, value in numbers.items() if name != STEP_COLUMN] + [
        (STEP_COLUMN, numbers[STEP_COLUMN])
    ]


def per_problem_text(rows: Iterable[Row]) -> str:
    """The content of ``per_problem.jsonl``: one line for each row, its ``compute_rollouts`` and its per-problem columns."""
    columns = (STEP_COLUMN, *PER_PROBLEM_COLUMNS)
    lines = [{name: row[name] for name in columns if name in row} for row in rows]
    return "".join(json.dumps(line) + "\n" for line in lines)


def flat_params(params: Mapping[str, Any], above: tuple[str, ...] = ()) -> dict[str, str]:
    """Nested settings as MLflow parameters ``group.field``; too long a value is cut, visibly."""
    flat: dict[str, str] = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            flat |= flat_params(value, (*above, name))
        else:
            flat[dotted_name((*above, name))] = shortened(str(value), LONGEST_PARAM)
    return flat


def is_transient(error: Exception) -> bool:
    """Whether a request failed because the server is away or overloaded, not because it was refused."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        status = error.get_http_status_code()
    elif isinstance(error, RequestException):
        status = error.response.status_code if error.response is not None else 503
    else:
        return isinstance(error, ConnectionError)
    return status >= 500 or status in (408, 429)


def quoted(text: str) -> str:
    """A string literal of MLflow's search language, which knows no escapes."""
    return f'"{text}"' if "'" in text else f"'{text}'"


def shortened(text: str, longest: int) -> str:
    """The text, or its beginning and a note of its length."""
    if len(text) <= longest:
        return text
    note = f"... [cut: {len(text)} characters]"
    return text[: longest - len(note)] + note
