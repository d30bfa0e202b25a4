"""Tables that people can read and pipes can parse."""

import csv
import functools
import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Literal

import rich.console
import rich.table
import rich.text

PIPE_COLUMNS = 400
"""Where the output is no terminal nothing is folded to the 80 columns that rich assumes there."""
FOLDED_ROWS = 200
"""Up to so many rows a table is folded to the terminal's width."""


def make_console() -> rich.console.Console:
    """A console on standard output."""
    console = rich.console.Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    return console


class Format(StrEnum):
    """How a table is printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


class Seconds(float):
    """A duration: a number to programs, ``2h05m`` to people."""


def print_rows(
    rows: Sequence[dict[str, Any]],
    format_: Format,
    console: rich.console.Console | None = None,
    columns: Sequence[str] = (),
) -> None:
    """Print rows that share their keys: a table for people, a JSON array, or CSV with a header (of ``columns`` where no row is)."""
    if format_ is Format.JSON:
        print("[" + ",".join("\n " + json.dumps(row) for row in rows) + "\n]")
    elif format_ is Format.CSV:
        if fields := list(rows[0] if rows else columns):
            writer = csv.DictWriter(sys.stdout, fieldnames=fields)
            writer.writeheader()
            writer.writerows(rows)
    elif not rows:
        return  # no keys, so no header either
    elif len(rows) > FOLDED_ROWS:
        print("\n".join(aligned_lines(rows)))
    else:
        (console or make_console()).print(table(rows))


def table(rows: Sequence[dict[str, Any]]) -> rich.table.Table:
    """A table that folds long texts to the width of the terminal."""
    shown = rich.table.Table(box=None, pad_edge=False)
    for name in rows[0] if rows else []:
        justify: Literal["left", "right"] = "right" if _is_numeric(rows, name) else "left"
        shown.add_column(name, justify=justify, overflow="fold")
    for row in rows:
        # Text: a reason with [brackets] is no markup.
        shown.add_row(*(rich.text.Text(_text(value)) for value in row.values()))
    return shown


def aligned_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The same columns, one line for each row whatever the terminal's width: rich needs seconds for thousands of rows."""
    columns = []
    for name in rows[0] if rows else []:
        # Most columns hold few values: each is written out once.
        line = functools.lru_cache(maxsize=len(rows), typed=True)(_one_line)
        texts = [name, *(line(row[name]) for row in rows)]
        width = max(map(len, texts))
        numeric = _is_numeric(rows, name)
        columns.append([text.rjust(width) if numeric else text.ljust(width) for text in texts])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]


def _is_numeric(rows: Sequence[dict[str, Any]], name: str) -> bool:
    return all(isinstance(row[name], int | float | None) for row in rows)


def _one_line(value: Any) -> str:
    return " ".join(value.split()) if isinstance(value, str) else _text(value)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Seconds):
        return duration(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def duration(seconds: float) -> str:
    """For people, for example ``2h05m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 48 * 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"
