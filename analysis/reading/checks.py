"""From raw rows to usable rows, with a sentence by cell on everything that was left out. Pure.

A bad row is left out where the rest of its cell is sound, the whole cell where it is not. Nothing here raises for what one
cell holds.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from analysis.reading.raw_rows import Complaints, rows_in_words
from analysis.tables import (
    COMPUTE_COLUMNS,
    PER_PROBLEM_COLUMNS,
    REQUIRED_COLUMNS,
    in_order,
    is_measured,
    metric_columns,
    samples_per_problem,
    score_columns,
)

BASE = "base"
"""The name under which the base model's row is complained about."""
_IDENTITY = ("problems_per_batch", "rollouts_per_problem", "seed")
_SCORE_TOLERANCE = 2e-3  # a score may have been rounded to three digits


def usable_rows(
    raw: pd.DataFrame, base: pd.DataFrame, complaints: Complaints
) -> tuple[pd.DataFrame, dict[str, Any] | None]:
    """The history and the base model's row.

    raw, base: as ``raw_rows.frame_of_table`` gives them. Rows of ``raw`` at C = 0 are the base model's where ``base`` is
    empty. The history is sorted by cell and step.
    """
    rows = _with_compute(raw)
    at_zero = (rows["compute_rollouts"] == 0) | (rows["step"] == 0)
    if at_zero.any():
        base = base if len(base) else rows[at_zero]
        rows = rows[~at_zero]
    rows = _complete(rows, complaints)
    rows = _one_allocation(rows, complaints)
    rows = _consistent_compute(rows, complaints)
    rows = _one_row_per_step(rows, complaints)
    rows = rows.sort_values(["cell", "step"], ignore_index=True, kind="stable")
    base = base.assign(cell=BASE, step=0.0).reset_index(drop=True)
    _name_missing_scores(rows, complaints)
    _clear_backward_compute(rows, complaints)
    usual = _usual_lengths(rows, base)
    for frame in (rows, base):
        _clear_impossible_scores(frame, complaints)
        for name in usual.keys() & set(frame.columns):
            _clear_doubtful_counts(frame, name, usual[name], complaints)
    return _typed(rows), _base_row(base, complaints)


def _blame(complaints: Complaints, bad: pd.DataFrame, words: Callable[[pd.DataFrame], str]) -> None:
    """One sentence for each cell that has a bad row."""
    if len(bad):
        for cell, rows in bad.groupby("cell", sort=False):
            complaints[str(cell)].append(words(rows))


def _count_into(template: str) -> Callable[[pd.DataFrame], str]:
    """Words with the number of a cell's bad rows for ``{rows}`` and the first one's step for ``{step}``."""
    return lambda bad: template.format(rows=rows_in_words(len(bad)), step=f"{bad['step'].iloc[0]:.0f}")


def _with_compute(raw: pd.DataFrame) -> pd.DataFrame:
    """With all required columns; step and compute_rollouts each derived where only the other is there."""
    missing = {name: np.nan for name in REQUIRED_COLUMNS[1:] if name not in raw.columns}
    rows = raw.assign(**missing) if missing else raw.copy(deep=False)
    batch = rows["problems_per_batch"] * rows["rollouts_per_problem"]
    batch = batch.where(batch > 0)
    rows["step"] = rows["step"].fillna(rows["compute_rollouts"] / batch)
    rows["compute_rollouts"] = rows["compute_rollouts"].fillna(rows["step"] * batch)
    return rows


def _complete(rows: pd.DataFrame, complaints: Complaints) -> pd.DataFrame:
    """Without rows that lack an allocation, a seed or compute."""
    least = {"problems_per_batch": 1, "rollouts_per_problem": 1, "seed": 0, "compute_rollouts": 0, "step": 0}
    unusable = pd.DataFrame({name: ~(rows[name] >= bound) for name, bound in least.items()})
    for name in _IDENTITY:
        unusable[name] |= rows[name] % 1 != 0
    bad = unusable.any(axis=1)

    def words(lost: pd.DataFrame) -> str:
        names = [name for name in REQUIRED_COLUMNS if name in least and unusable.loc[lost.index, name].any()]
        return f"{rows_in_words(len(lost))} without a usable {', '.join(names)}; left out"

    return _without(rows, bad, complaints, words)


def _one_allocation(rows: pd.DataFrame, complaints: Complaints) -> pd.DataFrame:
    """Without cells whose B_p, n or seed changes."""
    cells = rows.groupby("cell", sort=False)
    changes = pd.DataFrame({n: cells[n].transform("min") != cells[n].transform("max") for n in _IDENTITY})

    def words(lost: pd.DataFrame) -> str:
        name = next(name for name in _IDENTITY if lost[name].nunique() > 1)
        values = ", ".join(f"{value:.0f}" for value in sorted(lost[name].unique())[:3])
        return f"{name} changes between its rows ({values}); the cell is left out"

    return _without(rows, changes.any(axis=1), complaints, words)


def _consistent_compute(rows: pd.DataFrame, complaints: Complaints) -> pd.DataFrame:
    """Without rows whose compute is not step * B_p * n, or whose step is not whole."""
    expected = rows["step"] * rows["problems_per_batch"] * rows["rollouts_per_problem"]
    bad = ~np.isclose(rows["compute_rollouts"], expected, rtol=1e-9, atol=1e-6)

    def mixed_units(lost: pd.DataFrame) -> str:
        first = lost.iloc[0]
        whole = rows.loc[rows["cell"] == first["cell"]].sort_values("step", kind="stable")
        backward = whole["compute_rollouts"].diff() < 0
        return (
            f"{rows_in_words(len(lost))} where compute_rollouts is not step * problems_per_batch * rollouts_per_problem "
            f"(step {first['step']:g}: {first['compute_rollouts']:g} in place of {expected[first.name]:g}; "
            f"{'compute goes backwards' if backward.any() else 'mixed units?'}); left out"
        )

    def part_steps(lost: pd.DataFrame) -> str:
        first = lost.iloc[0]
        return (
            f"{rows_in_words(len(lost))} where compute_rollouts is no multiple of problems_per_batch * rollouts_per_problem "
            f"({first['compute_rollouts']:g} is {first['step']:g} steps; mixed units?); left out"
        )

    rows = _without(rows, pd.Series(bad, rows.index), complaints, mixed_units)
    steps = rows["step"].round()
    rows = _without(rows, ~np.isclose(rows["step"], steps, rtol=0, atol=1e-6), complaints, part_steps)
    return rows.assign(step=rows["step"].round(), compute_rollouts=rows["compute_rollouts"].round())


def _one_row_per_step(rows: pd.DataFrame, complaints: Complaints) -> pd.DataFrame:
    """With equal rows kept once, and without the rows of a step that differ."""
    repeated = rows.duplicated(["cell", "step"], keep=False)
    if not repeated.any():
        return rows
    compared = [name for name in rows.columns if not is_measured(name)]
    suspects = rows.loc[repeated, compared]
    for name in set(PER_PROBLEM_COLUMNS) & set(compared):
        suspects[name] = suspects[name].map(lambda counts: None if counts is None else counts.tobytes())
    groups = suspects.groupby(["cell", "step"], sort=False)
    differs = (groups.nunique(dropna=False) > 1).any(axis=1)
    conflicts = pd.MultiIndex.from_frame(rows[["cell", "step"]]).isin(differs[differs].index)

    def conflict(lost: pd.DataFrame) -> str:
        steps = [f"{step:.0f}" for step in sorted(lost["step"].unique())]
        named = ", ".join(steps[:3]) + (" and more" if len(steps) > 3 else "")
        return (
            f"{rows_in_words(len(lost))} that differ from another of the same step (step {named}); left out, "
            "keep the right one of each step"
        )

    rows = _without(rows, conflicts, complaints, conflict)
    return _without(
        rows,
        rows.duplicated(["cell", "step"]),
        complaints,
        _count_into("{rows} too many, equal to another; left out"),
    )


def _without(
    rows: pd.DataFrame,
    bad: "pd.Series | np.ndarray",
    complaints: Complaints,
    words: Callable[[pd.DataFrame], str],
) -> pd.DataFrame:
    mask = np.asarray(bad, dtype=bool)
    if not mask.any():
        return rows
    _blame(complaints, rows[mask], words)
    return rows[~mask]


def _name_missing_scores(rows: pd.DataFrame, complaints: Complaints) -> None:
    """A row without a metric stays; the curve of the metric goes without it."""
    names = metric_columns(rows)
    for name in names:
        template = f"{{rows}} without {name}; not used for its curve"
        _blame(complaints, rows[rows[name].isna()], _count_into(template))
    if not names:
        _blame(complaints, rows, _count_into("no validation score (avg_at_K) in any row"))


def _clear_impossible_scores(rows: pd.DataFrame, complaints: Complaints) -> None:
    """A score that leaves [0, 1] anywhere is in other units, so it goes in the whole cell."""
    for name in score_columns(list(rows.columns)):
        low, high = rows[name] < 0, rows[name] > 1
        _clear(rows, name, low, f"{name} is below 0 in {{rows}}; not used", complaints)
        template = f"{name} is above 1 in {{rows}} (percent? divide by 100); not used"
        _clear(rows, name, high, template, complaints)


def _clear_backward_compute(rows: pd.DataFrame, complaints: Complaints) -> None:
    """Cumulative compute that falls is not used in its cell."""
    for name in COMPUTE_COLUMNS.values():
        if name in rows.columns and name != "compute_rollouts":
            highest = rows.groupby("cell", sort=False)[name].cummax()
            backward = (rows[name] < highest.groupby(rows["cell"], sort=False).shift()) | (rows[name] < 0)
            template = f"{name} goes backwards at step {{step}}; not used"
            _clear(rows, name, backward, template, complaints)


def _clear(rows: pd.DataFrame, name: str, bad: pd.Series, template: str, complaints: Complaints) -> None:
    """Make a column missing in all rows of the cells that have a bad one."""
    if bad.any():
        _blame(complaints, rows[bad], _count_into(template))
        rows.loc[rows["cell"].isin(rows.loc[bad, "cell"].unique()), name] = np.nan


def _usual_lengths(*frames: pd.DataFrame) -> dict[str, int]:
    """The most frequent number of problems of each per-problem column."""
    usual = {}
    for name in PER_PROBLEM_COLUMNS:
        lengths = [length for frame in frames if name in frame for length in _lengths(frame[name]) if length]
        if lengths:
            usual[name] = int(np.bincount(lengths).argmax())
    return usual


def _lengths(counts: pd.Series) -> np.ndarray:
    return np.array([0 if value is None else len(value) for value in counts], dtype=int)


def _clear_doubtful_counts(rows: pd.DataFrame, name: str, expected: int, complaints: Complaints) -> None:
    """Counts that are not one a problem, or that belie their score, are not used in their rows."""
    lengths = _lengths(rows[name])
    odd = (lengths > 0) & (lengths != expected)
    template = (
        f"{name} holds another number of problems than the usual {expected} in {{rows}}; not used there"
    )
    _blame(complaints, rows[odd], _count_into(template))
    prefix = "avg_at_" if name == "eval_right" else "train_probe_avg_at_"
    scores = [score for score in score_columns(list(rows.columns)) if score.startswith(prefix)]
    kept = np.flatnonzero(lengths == expected)
    belied = np.zeros(len(rows), dtype=bool)
    if len(kept) and scores:
        for part in np.array_split(kept, -(-len(kept) // 10_000)):  # to spare memory
            counts = np.stack(rows[name].to_numpy()[part])
            belied[part] = ~_agrees(counts, rows[scores].to_numpy()[part], scores)
    template = f"{name} does not agree with {' or '.join(scores)} in {{rows}}; not used there"
    _blame(complaints, rows[belied], _count_into(template))
    if odd.any() or belied.any():
        rows[name] = rows[name].where(~(odd | belied), None)


def _agrees(counts: np.ndarray, scores: np.ndarray, names: list[str]) -> np.ndarray:
    """Per row: whether counts (rows, problems) are those of one of the scores (rows, names), or there is no score."""
    mean, highest = counts.mean(axis=1), counts.max(axis=1)
    agrees = np.isnan(scores).all(axis=1)
    for column, name in enumerate(names):
        samples = samples_per_problem(name)
        close = np.abs(mean / samples - scores[:, column]) < _SCORE_TOLERANCE
        agrees |= close & (highest <= samples)
    return agrees


def _typed(rows: pd.DataFrame) -> pd.DataFrame:
    """Columns in order, counts as int64, without columns that nothing was measured of."""
    names = [n for n in in_order(list(rows.columns)) if n in REQUIRED_COLUMNS or rows[n].notna().any()]
    whole = dict.fromkeys(REQUIRED_COLUMNS[1:], np.int64)
    if "compute_tokens" in names and rows["compute_tokens"].notna().all():
        whole["compute_tokens"] = np.int64
    return rows[names].astype(whole).reset_index(drop=True)


def _base_row(base: pd.DataFrame, complaints: Complaints) -> dict[str, Any] | None:
    """One row as JSON values; the mean where several rows differ."""
    if base.empty:
        return None
    row: dict[str, Any] = {"compute_rollouts": 0}
    differing = []
    for name in in_order(list(base.columns)):
        values = base[name].dropna()
        if name in REQUIRED_COLUMNS or values.empty:
            continue
        if name in PER_PROBLEM_COLUMNS:
            same = all(np.array_equal(values.iloc[0], other) for other in values)
            if same:
                row[name] = values.iloc[0].tolist()
        else:
            same = values.nunique() == 1
            row[name] = float(values.iloc[0] if same else values.mean())
        if not same and not is_measured(name):
            differing.append(name)
    if differing:
        complaints[BASE].append(
            f"the rows at C = 0 differ in {', '.join(differing)}; their mean is used, without per-problem scores that differ"
        )
    return row
