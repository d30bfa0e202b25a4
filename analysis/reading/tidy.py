"""Tidy tables of other trainers: CSV and Parquet files, their columns and settings."""

import csv
import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from analysis.reading.raw_rows import is_text
from analysis.tables import column_rank, is_measured, is_metric
from grids.errors import UserError

_SETTING_COLUMNS = ("model", "problems")
_SEPARATORS = {";": "semicolons", "\t": "tabs"}
_SCORE_NAME = re.compile(r"(avg|mean|pass|best|worst)\W*_?(?:at)?_?([1-9]\d*)", re.IGNORECASE)
"""Other people's names of a validation score at K answers a problem, such as avg@4 and pass@8."""
_AVERAGE_NAMES = ("accuracy", "acc", "reward", "score", "correct", "pass_rate", "solve_rate", "success_rate")


@dataclass(frozen=True)
class TidySetting:
    """The rows of one setting."""

    name: str | None
    """Model and problems in words; None where the table does not tell."""
    key: str | None
    """The same for tables of one setting; None where the table does not tell."""
    rows: pa.Table
    """Without the columns ``cell``, ``state``, ``model`` and ``problems``."""
    cells: pd.Series
    """Each row's cell."""
    states: dict[str, str]
    """By cell, the last that the table tells."""
    remarks: tuple[str, ...] = ()
    """What is wrong with the table as a whole, one sentence each."""


def open_table(path: Path) -> pa.Table:
    """A file's columns; those of a CSV file are text. Raises UserError when it is no CSV or Parquet file."""
    if not path.is_file():
        raise UserError(f"{path}: no such file or run folder; give a run folder, a .csv or a .parquet file")
    try:
        if path.suffix == ".csv":
            return _open_csv(path)
        if path.suffix == ".parquet":
            return pa.parquet.read_table(path)
    except (pa.ArrowException, UnicodeDecodeError, csv.Error) as error:
        if path.suffix == ".parquet" and _is_csv(path):
            raise UserError(f"{path}: looks like CSV; rename it to {path.stem}.csv") from error
        words = " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read as {path.suffix[1:]} ({words}); write it again") from error
    raise UserError(f"{path}: neither a run folder nor a .csv or .parquet file; give one of these")


def _is_csv(path: Path) -> bool:
    with path.open("rb") as file:
        line = file.readline(10_000)
    return b"," in line and line.decode(errors="replace").strip().isprintable()


def _open_csv(path: Path) -> pa.Table:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        names = next(csv.reader(lines), [])
    if not names:
        raise UserError(f"{path}: holds no header; give the column names in the first row")
    separator = next((mark for mark in _SEPARATORS if len(names) == 1 and mark in names[0]), None)
    if separator is not None:
        raise UserError(f"{path}: looks separated by {_SEPARATORS[separator]}; write it with commas")
    # As text: Arrow guesses types from the first block, and a column may begin with whole numbers.
    return pa.csv.read_csv(
        path,
        parse_options=pa.csv.ParseOptions(newlines_in_values=False),
        convert_options=pa.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True
        ),
    )


def split_settings(table: pa.Table, source: str) -> list[TidySetting]:
    """One for each pair of ``model`` and ``problems``, in the order of their first rows.

    source: for messages. Raises UserError for missing or doubled columns, for seeds that are no numbers, and for a table
    without a row.
    """
    _refuse_wrong_columns(table.column_names, source)
    if not table.num_rows:
        raise UserError(f"{source}: holds no row; give at least one evaluated step")
    seeded = "seed" in table.column_names
    if seeded:
        _refuse_named_seeds(_texts(table, "seed"), source)
    else:
        table = table.append_column("seed", pa.array([0] * table.num_rows))
    named = [name for name in _SETTING_COLUMNS if name in table.column_names]
    cells, states = _cells(table), _texts(table, "state")
    labels = pd.DataFrame({name: _texts(table, name).fillna("unknown") for name in named})
    hidden = {"cell", "state", *named} & set(table.column_names)
    hidden |= {name for name in table.column_names if name.startswith("__index_level_")}
    rows = table.drop_columns(sorted(hidden))
    if not named:
        remarks = () if seeded else _without_seed(rows, cells)
        return [TidySetting(None, None, rows, cells, _last_states(cells, states), remarks)]
    settings = []
    for _, part in labels.groupby(named, sort=False):
        values = part.iloc[0].to_dict()
        own_cells = cells.loc[part.index].reset_index(drop=True)
        own_rows = rows.take(pa.array(part.index)) if len(part) < len(rows) else rows
        settings.append(
            TidySetting(
                name=", ".join(values.values()),
                key=json.dumps(values, sort_keys=True),
                rows=own_rows,
                cells=own_cells,
                states=_last_states(own_cells, states.loc[part.index].reset_index(drop=True)),
                remarks=() if seeded else _without_seed(own_rows, own_cells),
            )
        )
    return settings


def _refuse_wrong_columns(names: list[str], source: str) -> None:
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise UserError(f"{source}: column '{doubled}' occurs twice; keep one of them")
    missing = [name for name in ("problems_per_batch", "rollouts_per_problem") if name not in names]
    if not {"step", "compute_rollouts"} & set(names):
        missing.append("compute_rollouts")
    words = []
    for name in missing:
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
        alternative = " (or 'step')" if name == "compute_rollouts" else ""
        words.append(f"'{name}'{alternative}" + (f", is '{close[0]}' meant?" if close else ""))
    faults = [f"lacks column {'; '.join(words)}; add or rename it"] if words else []
    if not any(is_metric(name) for name in names):
        faults.append(
            "needs a score: avg_at_K, best_at_K or worst_at_K with the real K, such as avg_at_4"
            + _score_hint(names)
        )
    if faults:
        raise UserError(f"{source}: {'; '.join(faults)}")


def _score_hint(names: list[str]) -> str:
    """Which column may be the score, and what to call it."""
    for name in names:
        found = _SCORE_NAME.fullmatch(name)
        if found and found[0].lower() != "pass@1":
            kind = {"mean": "avg", "pass": "best"}.get(found[1].lower(), found[1].lower())
            return f"; is '{name}' {kind}_at_{found[2]}? rename it"
    for name in names:
        if name.lower() in ("pass@1", *_AVERAGE_NAMES):
            return f"; is '{name}' the mean over K answers a problem? rename it to avg_at_K"
    return ""


def _refuse_named_seeds(seeds: pd.Series, source: str) -> None:
    """A few seeds that are no numbers are their cells' concern; a column without any number is not one of seeds."""
    told = seeds.dropna()
    if len(told) and pd.to_numeric(told, errors="coerce").isna().all():
        raise UserError(
            f"{source}: column 'seed' holds text ('{told.iloc[0]}'); number the seeds (0, 1, ...)"
        )


def _without_seed(rows: pa.Table, cells: pd.Series) -> tuple[str, ...]:
    """What to say of a table without seeds: nothing, unless rows that differ share their cell and compute."""
    known = [name for name in rows.column_names if column_rank(name) is not None and not is_measured(name)]
    compared = [name for name in known if not pa.types.is_nested(rows.column(name).type)]
    distinct = pd.DataFrame(
        {"cell": cells} | {name: _texts(rows, name) for name in compared}
    ).drop_duplicates()
    marks = [name for name in ("compute_rollouts", "step") if name in compared]
    trained = distinct[
        pd.to_numeric(distinct[marks[0]], errors="coerce") != 0
    ]  # rows at C = 0 are the base model's
    if not trained.duplicated(["cell", marks[0]]).any():
        return ()
    return ("several rows at the same compute and no column 'seed'; add it",)


def _cells(table: pa.Table) -> pd.Series:
    """Each row's cell: as the table names it, else after its allocation and seed."""
    given = _texts(table, "cell")
    if given.notna().all():
        return given
    keys = pd.DataFrame(
        {name: _texts(table, name) for name in ("problems_per_batch", "rollouts_per_problem", "seed")}
    )
    keys = keys.apply(lambda column: column.str.removesuffix(".0").fillna("?"))
    named = "bp" + keys["problems_per_batch"] + "-n" + keys["rollouts_per_problem"] + "-s" + keys["seed"]
    return given.fillna(named)


def _texts(table: pa.Table, name: str) -> pd.Series:
    """A column as text, missing where the table has none."""
    if name not in table.column_names:
        return pd.Series([None] * table.num_rows, dtype=str)
    values = table.column(name)
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    return pd.Series(
        (values if is_text(values.type) else pc.cast(values, pa.string())).to_pandas(), dtype=str
    )


def _last_states(cells: pd.Series, states: pd.Series) -> dict[str, str]:
    told = states.notna()
    return dict(zip(cells[told], states[told], strict=True))
