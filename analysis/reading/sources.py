"""From run folders, tidy tables and rows in memory to ``GridTables``, one for each setting.

Reading takes no lock and never raises for what concerns one cell: that becomes a sentence in ``complaints``.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from pydantic import ValidationError

from analysis.reading import tidy
from analysis.reading.checks import BASE, usable_rows
from analysis.reading.phases import read_phases
from analysis.reading.raw_rows import (
    Complaints,
    frame_of_table,
    read_histories,
    table_of_frame,
    table_of_rows,
)
from analysis.reading.settings import GRID, MISSING, NO_BASE, NO_ROW, merge, merge_settings, setting_of
from analysis.reading.shared import say_once
from analysis.tables import GridTables
from grids.errors import UserError
from grids.expansion import expand
from grids.spec import GridSpec

__all__ = [
    "build_tables",
    "merge",
    "merge_settings",
    "read_run",
    "read_sources",
    "read_table",
    "setting_of",
    "tables_from_frame",
]


def build_tables(
    name: str,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    base: Mapping[str, Any] | None,
    states: Mapping[str, str],
    reasons: Mapping[str, str],
    spec: Mapping[str, Any] | None,
) -> GridTables:
    """Tables of one setting from rows in memory.

    rows: by cell; a row holds history columns by name, numbers as numbers and per-problem counts as lists. base: the base
    model's row, samples and other things in it are ignored. spec: the resolved grid; cells that it has and ``states`` and
    ``rows`` have not are complained about.
    """
    complaints: Complaints = defaultdict(list)
    flat = [row for cell_rows in rows.values() for row in cell_rows]
    cells = np.repeat(np.array(list(rows), dtype=object), [len(cell_rows) for cell_rows in rows.values()])
    frame = frame_of_table(table_of_rows(flat), pd.Series(cells, dtype=str), complaints)
    return _assemble(name, frame, base, dict(states), dict(reasons), spec, {*rows, *states}, complaints)


def _assemble(
    name: str,
    raw: pd.DataFrame,
    base: Mapping[str, Any] | None,
    states: dict[str, str],
    reasons: dict[str, str],
    spec: Mapping[str, Any] | None,
    known: set[str],
    complaints: Complaints,
) -> GridTables:
    """known: the cells that the source has, also those without a row."""
    base_rows = [{key: base[key] for key in base if key != "samples"}] if base else []
    base_cells = pd.Series([BASE] * len(base_rows), dtype=str)
    base_frame = frame_of_table(table_of_rows(base_rows), base_cells, complaints)
    history, base_row = usable_rows(raw, base_frame, complaints)
    present = set(history["cell"].unique())
    for cell in known - present:
        if not complaints[cell]:
            complaints[cell].append(NO_ROW)
    # not cells whose only row was the base model's
    judged = {cell for cell in raw["cell"].unique() if cell in present or complaints.get(cell) != [NO_ROW]}
    say_once(complaints, judged, name, holder=GRID)
    if spec is not None:
        for cell in set(_expected_cells(spec, complaints)) - known:
            complaints[cell].append(MISSING)
    return GridTables(
        name=name,
        history=history,
        base=base_row,
        states=states,
        reasons=reasons,
        complaints={cell: words for cell, words in sorted(complaints.items()) if words},
        spec=dict(spec) if isinstance(spec, Mapping) else None,
    )


def _expected_cells(spec: Mapping[str, Any], complaints: Complaints) -> list[str]:
    try:
        return [cell.id for cell in expand(GridSpec.model_validate(spec))]
    except (ValidationError, UserError) as error:
        first = str(error).splitlines()[0]
        complaints[GRID].append(f"the grid cannot be read ({first}); missing cells are not known")
        return []


def read_sources(paths: Sequence[Path | str]) -> list[GridTables]:
    """Run folders and tidy tables together, one GridTables for each setting, in the order of their first mention.

    Run folders whose inputs and training are the same, and tables with the same ``model`` and ``problems``, are one setting.
    Raises UserError for what is neither.
    """
    parts: list[tuple[str | None, GridTables]] = []
    given = Counter(Path(path).resolve() for path in paths)
    distinct = {Path(path).resolve(): Path(path) for path in reversed(paths)}  # each as first mentioned
    for place in given:
        path = distinct[place]
        if path.is_dir():
            setting, tables = _read_run(path)
            found = [(setting, replace(tables, name=_telling_name(path, [*distinct])))]
        else:
            found = _read_table(path)
        if given[place] > 1:
            times = "twice" if given[place] == 2 else f"{given[place]} times"
            found = [(key, _complained(part, f"{path} is given {times}; used once")) for key, part in found]
        parts += found
    return merge_settings(parts)


def _complained(tables: GridTables, sentence: str) -> GridTables:
    """With a sentence more about the grid as a whole."""
    words = [*tables.complaints.get(GRID, []), sentence]
    return replace(tables, complaints=dict(sorted((tables.complaints | {GRID: words}).items())))


def _telling_name(run_dir: Path, paths: Sequence[Path | str]) -> str:
    """A run folder's name, with its parent's where another source has the same."""
    namesakes = [path for path in paths if Path(path).resolve().name == run_dir.resolve().name]
    return "/".join(run_dir.resolve().parts[-2 if len(namesakes) > 1 else -1 :])


def read_run(run_dir: Path | str) -> GridTables:
    """A run folder's tables. Raises UserError when it is none."""
    return _read_run(Path(run_dir))[1]


def read_table(path: Path | str) -> list[GridTables]:
    """A CSV or Parquet file's tables, one for each pair of its optional columns ``model`` and ``problems``.

    Columns are those of ``HISTORY_COLUMNS``; ``cell``, ``seed`` (0) and ``state`` are optional, and one of ``step`` and
    ``compute_rollouts`` is enough. Per-problem counts are lists in Parquet, JSON texts in CSV. Rows at C = 0 are the base
    model's. Raises UserError for a file of another type, for missing columns and for seeds that are no numbers.
    """
    return merge_settings(_read_table(Path(path)))


def tables_from_frame(
    frame: pd.DataFrame, name: str = "table", base: Mapping[str, Any] | None = None
) -> GridTables:
    """A data frame's tables; columns as in ``read_table``. Raises UserError for missing columns or several settings."""
    settings = tidy.split_settings(table_of_frame(frame), name)
    if len(settings) > 1:
        raise UserError(
            f"{name}: holds {len(settings)} settings (model, problems); give the rows of one of them"
        )
    return _of_setting(settings[0], name, base)


def _read_table(path: Path) -> list[tuple[str | None, GridTables]]:
    settings = tidy.split_settings(tidy.open_table(path), str(path))
    return [(setting.key, _of_setting(setting, path.stem, None)) for setting in settings]


def _of_setting(setting: tidy.TidySetting, name: str, base: Mapping[str, Any] | None) -> GridTables:
    complaints: Complaints = defaultdict(list, {GRID: [*setting.remarks]})
    raw = frame_of_table(setting.rows, setting.cells, complaints)
    states = setting.states
    return _assemble(
        setting.name or name, raw, base, states, {}, None, set(setting.cells.unique()), complaints
    )


def _read_run(run_dir: Path) -> tuple[str | None, GridTables]:
    """The run's setting, None where it is not known, and its tables."""
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such run folder; give the folder that `isocompute run` wrote")
    if not (run_dir / "grid.yaml").exists() and not (run_dir / "cells").is_dir():
        raise UserError(
            f"{run_dir}: no run folder (neither grid.yaml nor cells/ in it); give the folder of a run"
        )
    complaints: Complaints = defaultdict(list)
    grid = _read_grid(run_dir / "grid.yaml", complaints)
    cells = sorted(path.name for path in (run_dir / "cells").glob("*") if path.is_dir())
    states, reasons, deviations, committed, stateless = {}, {}, {}, {}, []
    for cell in cells:  # before the histories, so that each holds at least what its state says
        path = run_dir / "cells" / cell / "state.json"
        record = _read_object(path, cell, complaints, needs="state")
        if record is None:
            if not path.exists():
                stateless.append(cell)
            continue
        states[cell] = record["state"]
        if record.get("reason"):
            reasons[cell] = str(record["reason"])
        if isinstance(record.get("deviations"), list) and record["deviations"]:  # not in format version 1
            deviations[cell] = tuple(str(words) for words in record["deviations"])
        commit = record.get("commit")
        if isinstance(commit, dict) and isinstance(commit.get("history_rows"), int):
            committed[cell] = commit["history_rows"]
    paths = {cell: run_dir / "cells" / cell / "history.jsonl" for cell in cells}
    raw, counts = read_histories(paths, complaints)
    for cell, rows in committed.items():
        if counts.get(cell, 0) < rows:
            complaints[cell].append(f"history holds {counts.get(cell, 0)} of {rows} committed rows")
    for cell in stateless:
        if counts.get(cell):
            complaints[cell].append("state.json is missing; its rows are used")
        else:
            states[cell] = "pending"
    base = _read_object(run_dir / "base.json", BASE, complaints)
    if counts and not (run_dir / "base.json").exists():
        complaints[BASE].append(NO_BASE)
    spec = grid.get("resolved", {}).get("spec") if grid else None
    phases = read_phases(run_dir, complaints)
    tables = _assemble(run_dir.resolve().name, raw, base, states, reasons, spec, set(cells), complaints)
    return setting_of(grid), replace(tables, deviations=deviations, phases=phases)


def _read_grid(path: Path, complaints: Complaints) -> dict[str, Any] | None:
    try:
        grid = yaml.safe_load(path.read_bytes())
    except FileNotFoundError:
        complaints[GRID].append("grid.yaml is missing; missing cells are not known")
        return None
    except (yaml.YAMLError, UnicodeDecodeError):
        grid = None
    if isinstance(grid, dict) and isinstance(grid.get("resolved"), dict):
        return grid
    complaints[GRID].append("grid.yaml cannot be read; missing cells are not known")
    return None


def _read_object(
    path: Path, cell: str, complaints: Complaints, needs: str | None = None
) -> dict[str, Any] | None:
    """A JSON object, with text under the key that it needs; None where there is no file or it cannot be read."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and (needs is None or isinstance(value.get(needs), str)):
        return value
    complaints[cell].append(f"{path.name} cannot be read; it is ignored")
    return None
