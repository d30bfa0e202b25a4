"""What makes sources one setting, and several sources of one setting into one.

A *setting* is everything but the allocation, the seed, the budget and the compute marks: model, problems, recipe, optimiser,
sampling, verifier and the number of answers in validation.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from analysis.reading.checks import BASE
from analysis.tables import REQUIRED_COLUMNS, GridTables, in_order

GRID = "grid"
"""The name under which the grid as a whole is complained about."""
MISSING = "missing: the grid has this cell, the run has not"
"""The complaint about a cell that its grid has and its source has not."""

NO_ROW = "no evaluated step yet"
"""The complaint about a cell that has no row besides the base model's."""
NO_BASE = "base.json is missing; curves are fitted without the score at C = 0"
"""The complaint about a run that has evaluations, but not the base model's."""


def setting_of(grid: Mapping[str, Any] | None) -> str | None:
    """The setting of a run, from the content of its ``grid.yaml``; None where that is not known."""
    identity = grid.get("identity") if grid else None
    if not isinstance(identity, dict):
        return None
    setting = {key: value for key, value in identity.items() if key not in ("name", "grid", "evaluation")}
    evaluation = identity.get("evaluation")
    if isinstance(evaluation, dict):
        setting["samples_per_problem"] = evaluation.get("samples_per_problem")
    return json.dumps(setting, sort_keys=True)


def merge_settings(parts: Iterable[tuple[str | None, GridTables]]) -> list[GridTables]:
    """One GridTables for each setting, in the order of their first mention, each under a name of its own.

    parts: a setting, None for one that no other part shares, and its tables.
    """
    groups: dict[object, list[GridTables]] = {}
    for number, (setting, tables) in enumerate(parts):
        groups.setdefault(number if setting is None else setting, []).append(tables)
    taken: dict[str, int] = {}
    merged = []
    for group in groups.values():
        tables = merge(group)
        taken[tables.name] = taken.get(tables.name, 0) + 1
        if taken[tables.name] > 1:
            tables = replace(tables, name=f"{tables.name} ({taken[tables.name]})")
        merged.append(tables)
    return merged


def merge(tables: Sequence[GridTables]) -> GridTables:
    """Several sources of one setting as one.

    Of a cell that several have, the source with the most compute is kept (the first of equal ones). The base model's row and
    the spec are the first that there are. Raises ValueError for no tables at all.
    """
    if not tables:
        raise ValueError("no tables to merge")
    if len(tables) == 1:
        return tables[0]
    compute = [part.history.groupby("cell")["compute_rollouts"].max().to_dict() for part in tables]
    known = [{*reached, *part.states} for reached, part in zip(compute, tables, strict=True)]
    owner = {
        cell: max((i for i in range(len(tables)) if cell in known[i]), key=lambda i: compute[i].get(cell, -1))
        for cell in sorted(set().union(*known))
    }
    complaints: dict[str, list[str]] = {}
    for index, part in enumerate(tables):
        for cell, words in part.complaints.items():
            if owner.get(cell, index) == index:
                known_words = complaints.setdefault(cell, [])
                known_words += [sentence for sentence in words if sentence not in known_words]
    for cell, index in owner.items():
        others = [i for i in range(len(tables)) if i != index and cell in known[i]]
        if others:
            complaints.setdefault(cell, []).append(_twice(tables, compute, cell, index, others))
    base = next((part.base for part in tables if part.base is not None), None)
    if base is not None and BASE in complaints:
        complaints[BASE] = [sentence for sentence in complaints[BASE] if sentence != NO_BASE]
    histories = [part.history[part.history["cell"].map(owner) == index] for index, part in enumerate(tables)]
    return GridTables(
        name=_joined_name([part.name for part in tables]),
        history=_stack(histories),
        base=base,
        states={cell: tables[i].states[cell] for cell, i in owner.items() if cell in tables[i].states},
        reasons={cell: tables[i].reasons[cell] for cell, i in owner.items() if cell in tables[i].reasons},
        complaints={cell: words for cell, words in sorted(complaints.items()) if words},
        spec=next((part.spec for part in tables if part.spec is not None), None),
        deviations={
            cell: tables[i].deviations[cell] for cell, i in owner.items() if cell in tables[i].deviations
        },
        phases=next((part.phases for part in tables if part.phases is not None), None),
    )


def _twice(
    tables: Sequence[GridTables], compute: list[dict[str, int]], cell: str, kept: int, others: list[int]
) -> str:
    def place(index: int) -> str:
        return f"{tables[index].name} (to C = {compute[index].get(cell, 0)})"

    return f"in several sources: {place(kept)} is used, not {', '.join(place(other) for other in others)}"


def _stack(histories: list[pd.DataFrame]) -> pd.DataFrame:
    filled = [history for history in histories if len(history)]
    if not filled:
        return histories[0]
    stacked = pd.concat(filled, ignore_index=True)
    for name in stacked.columns[stacked.isna().any()]:
        if stacked[name].dtype == object:
            stacked[name] = stacked[name].where(stacked[name].notna(), None)
    names = [n for n in in_order(list(stacked.columns)) if n in REQUIRED_COLUMNS or stacked[n].notna().any()]
    return stacked[names].sort_values(["cell", "step"], ignore_index=True, kind="stable")


def _joined_name(names: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(names))
    return " + ".join(distinct) if len(distinct) <= 3 else f"{distinct[0]} + {len(distinct) - 1} more"
