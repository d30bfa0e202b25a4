"""Tables that people can read and pipes can parse."""

import csv
import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import rich.console
import rich.table

PIPE_COLUMNS = 400
"""Where the output is no terminal nothing is folded to the 80 columns that rich assumes there."""


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


def print_rows(
    rows: Sequence[dict[str, Any]], format_: Format, console: rich.console.Console | None = None
) -> None:
    """Print rows that share their keys: a table for people, a JSON array, or CSV with a header."""
    if format_ is Format.JSON:
        print(json.dumps(list(rows), indent=1))
    elif format_ is Format.CSV:
        if rows:
            writer = csv.DictWriter(sys.stdout, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        table = rich.table.Table(box=None, pad_edge=False)
        for name in rows[0] if rows else []:
            numeric = all(isinstance(row[name], int | float) or row[name] is None for row in rows)
            table.add_column(name, justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*(_text(value) for value in row.values()))
        (console or make_console()).print(table)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
