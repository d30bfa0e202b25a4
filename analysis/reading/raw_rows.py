"""From stored rows, whatever their form, to one frame with a number (or NaN) in every cell of the table.

Everything goes through Arrow, so that JSON lines, rows in memory, CSV, Parquet and data frames give the very same numbers.
What cannot be understood is left out with a sentence by cell, in a ``Complaints``.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from analysis.tables import PER_PROBLEM_COLUMNS, column_rank

Complaints = defaultdict[str, list[str]]
"""By cell: what was wrong and what was done about it, one sentence each."""

_BLOCK_BYTES = 4 * 2**20
"""Of one parser block; a row must be shorter."""


def frame_of_table(table: pa.Table, cells: pd.Series, complaints: Complaints) -> pd.DataFrame:
    """Numbers of an Arrow table, row by row.

    ``cells``: each row's cell. In the frame ``cell`` holds them, a per-problem column int32 arrays or None, every other
    column float64 with NaN for what is missing, infinite or no number. Text columns that are no history columns are dropped.
    """
    columns: dict[str, Any] = {"cell": cells}
    for name in table.column_names:
        values = table.column(name)
        if name == "cell":
            continue
        if name in PER_PROBLEM_COLUMNS:
            columns[name] = _counts(name, values, cells, complaints)
        elif _is_number(values.type) or column_rank(name) is not None:
            columns[name] = _numbers(name, values, cells, complaints)
    return pd.DataFrame(columns)


def table_of_rows(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """An Arrow table of rows in memory; a key that a row lacks is null."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({_encodable(name): arrow_column([row.get(name) for row in rows]) for name in names})


def table_of_frame(frame: pd.DataFrame) -> pa.Table:
    """An Arrow table of a data frame, its index left out."""
    return pa.table({str(name): arrow_column(values) for name, values in frame.items()})


def arrow_column(values: Any) -> pa.Array:
    """Values as Arrow; as text where their types are mixed."""
    try:
        return pa.array(values, from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError):
        return pa.array([None if value is None else _encodable(str(value)) for value in values])


def _encodable(text: str) -> str:
    """The text with a question mark for each lone surrogate."""
    return text.encode(errors="replace").decode()


def read_histories(paths: Mapping[str, Path], complaints: Complaints) -> tuple[pd.DataFrame, dict[str, int]]:
    """The rows of many cells' ``history.jsonl``, and how many there are by cell.

    paths: each cell's file, which need not exist. A line that is no JSON object, or cut off, is left out and named.
    """
    frames: list[pd.DataFrame] = []
    counts: dict[str, int] = {}
    for chunk in _chunks(paths, complaints):
        try:
            table, cells = _parse_together(chunk)
        except pa.ArrowInvalid:
            table, cells = _parse_line_by_line(chunk, complaints)
        counts |= cells.value_counts().to_dict()
        frames.append(frame_of_table(table, cells, complaints))
    filled = [frame for frame in frames if len(frame)]
    return pd.concat(filled, ignore_index=True) if filled else pd.DataFrame({"cell": []}, dtype=str), counts


def _chunks(
    paths: Mapping[str, Path], complaints: Complaints, size: int = 64 * 2**20
) -> Iterable[dict[str, bytes]]:
    """Contents by cell, so many bytes at a time."""
    chunk: dict[str, bytes] = {}
    held = 0
    for cell, path in paths.items():
        try:
            chunk[cell] = path.read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            complaints[cell].append(f"history.jsonl cannot be read ({error.strerror})")
            continue
        held += len(chunk[cell])
        if held >= size:
            yield chunk
            chunk, held = {}, 0
    if chunk:
        yield chunk


def _parse_together(chunk: Mapping[str, bytes]) -> tuple[pa.Table, pd.Series]:
    """Fast, for sound files only: raises ArrowInvalid unless every line is one row of its cell."""
    contents = [data + b"\n" if data and not data.endswith(b"\n") else data for data in chunk.values()]
    cells = np.repeat(np.array(list(chunk), dtype=object), [data.count(b"\n") for data in contents])
    if not len(cells):
        return pa.table({}), pd.Series([], dtype=str)
    text, counts = b"".join(contents), {}
    if not text.isascii():  # as every history is that was not damaged
        raise pa.ArrowInvalid("not ASCII")
    for name in PER_PROBLEM_COLUMNS:
        text, lists = _cut_counts(text, name, len(cells))
        if lists is not None:
            counts[name] = lists
    table = pa.json.read_json(pa.BufferReader(text), pa.json.ReadOptions(block_size=_BLOCK_BYTES))
    aligned = table.num_rows == len(cells) and "cell" in table.column_names
    if not (aligned and table.column("cell").to_numpy().tolist() == cells.tolist()):
        raise pa.ArrowInvalid("lines and rows differ")
    for name, lists in counts.items():
        table = table.set_column(table.column_names.index(name), name, lists)
    return table, pd.Series(cells, dtype=str)


def _cut_counts(text: bytes, name: str, rows: int) -> tuple[bytes, pa.Array | None]:
    """JSON lines without a per-problem column, and the column; unchanged unless every row has one.

    A JSON parser takes several times as long for these long lists of small numbers.
    """
    if text.count(b'"%b": [' % name.encode()) != rows:
        return text, None
    pattern = re.compile(rb'"%b": \[([0-9, ]+)\]' % name.encode())
    found = pattern.findall(text)
    if len(found) != rows:
        return text, None
    offsets = np.cumsum([0, *(numbers.count(b",") + 1 for numbers in found)])
    try:
        values = np.fromstring(b",".join(found), dtype=np.int64, sep=",")
    except ValueError:  # "1 2" or "1,": no JSON
        return text, None
    if len(values) != offsets[-1]:
        return text, None
    return pattern.sub(b'"%b": null' % name.encode(), text), pa.LargeListArray.from_arrays(offsets, values)


def _parse_line_by_line(chunk: Mapping[str, bytes], complaints: Complaints) -> tuple[pa.Table, pd.Series]:
    rows: list[dict[str, Any]] = []
    cells: list[str] = []
    for cell, data in chunk.items():
        lines = data.split(b"\n")
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            row = _json_object(line)
            if row is not None:
                rows.append(row)
                cells.append(cell)
            elif number == len(lines):
                complaints[cell].append(f"history.jsonl ends inside row {number}; that row is left out")
            else:
                complaints[cell].append(f"history.jsonl row {number} is no JSON object; it is left out")
    return table_of_rows(rows), pd.Series(cells, dtype=str)


def _json_object(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _is_number(kind: pa.DataType) -> bool:
    return (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    )


def _numbers(name: str, values: pa.ChunkedArray, cells: pd.Series, complaints: Complaints) -> np.ndarray:
    try:
        numbers = values.cast(pa.float64(), safe=False).to_numpy()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        texts = pd.Series(values.to_pylist(), dtype=object)
        numbers = pd.to_numeric(texts.where(texts.map(np.isscalar)), errors="coerce").to_numpy(float)
        lost = np.isnan(numbers) & texts.notna().to_numpy()
        for cell, count in cells[lost].value_counts(sort=False).items():
            complaints[str(cell)].append(f"{name} is no number in {rows_in_words(count)}; taken as missing")
    return np.where(np.isfinite(numbers), numbers, np.nan)


def _counts(name: str, values: pa.ChunkedArray, cells: pd.Series, complaints: Complaints) -> np.ndarray:
    """A per-problem column: one int32 array a row, None where there is none."""
    parts = []
    for chunk in values.chunks:
        lists = _parse_lists(chunk) if is_text(chunk.type) else chunk
        parts.append(_split(lists))
    counts = np.concatenate(parts) if parts else np.empty(0, dtype=object)
    lost = np.array([value is None for value in counts], dtype=bool) & values.is_valid().to_numpy()
    for cell, count in cells[lost].value_counts(sort=False).items():
        complaints[str(cell)].append(
            f"{name} is no list of counts in {rows_in_words(count)}; taken as missing"
        )
    return counts


def is_text(kind: pa.DataType) -> bool:
    """Whether an Arrow type holds text."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _parse_lists(texts: pa.Array) -> pa.Array:
    """JSON texts as lists; a list of its own where one is no JSON."""
    lines = pc.binary_join_element_wise('{"v":', pc.fill_null(texts, "null"), "}\n", "").to_numpy(
        zero_copy_only=False
    )
    try:
        table = pa.json.read_json(
            pa.BufferReader("".join(lines).encode()), pa.json.ReadOptions(block_size=_BLOCK_BYTES)
        )
        if table.num_rows == len(texts):
            return table.column("v").combine_chunks()
    except (pa.ArrowInvalid, KeyError):
        pass  # at least one text is no JSON: each on its own
    return pa.array([_whole_numbers(text) for text in texts.to_pylist()], pa.list_(pa.int64()))


def _whole_numbers(text: str | None) -> list[int] | None:
    if text is None or not re.fullmatch(r"\s*\[[\d\s,]*\]\s*", text):
        return None
    return [int(number) for number in re.findall(r"\d+", text)]


def _split(lists: pa.Array) -> np.ndarray:
    """A list array as one int32 array a row; None for null, empty, fractional or negative lists."""
    split = np.empty(len(lists), dtype=object)
    kind = lists.type
    if not (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    ) or not _is_number(kind.value_type):
        return split
    flat = lists.flatten()
    if flat.null_count or not pa.types.is_integer(flat.type):
        flat = flat.cast(pa.float64())
    numbers = flat.to_numpy(zero_copy_only=False)
    sound = (numbers >= 0) & (numbers < 2**31)
    if numbers.dtype.kind == "f":
        sound &= numbers == np.floor(numbers)
    whole = (numbers if sound.all() else np.where(sound, numbers, 0)).astype(np.int32)
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    ends = np.cumsum(lengths)
    for index, (start, end) in enumerate(zip((ends - lengths).tolist(), ends.tolist(), strict=True)):
        split[index] = whole[start:end] if end > start else None
    if not sound.all():
        rows = np.repeat(np.arange(len(lengths)), lengths)
        split[np.unique(rows[~sound])] = None
    return split


def rows_in_words(count: int) -> str:
    """``1 row``, ``3 rows``."""
    return f"{count} row{'' if count == 1 else 's'}"
