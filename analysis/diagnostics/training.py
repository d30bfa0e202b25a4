"""What training did to a cell besides its validation score: tables for the paper's diagnostics.

Each function takes the tidy history (one row per evaluated step of a cell) and returns a frame. Columns that a
table lacks give an empty frame with its columns, never an error; values that are missing in a row stay NaN or
leave the row out, as each function says. Overfitting is in ``overfitting``, sensitivity in ``sensitivity``.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import betabinom

CELL_COLUMNS = ("cell", "problems_per_batch", "rollouts_per_problem", "seed")
"""What identifies a cell in every frame of this module."""

HEALTH_COLUMNS = (
    "epochs",
    "train_reward",
    "zero_variance_right",
    "zero_variance_wrong",
    "entropy",
    "kl",
    "response_tokens",
    "truncated",
)
"""Columns that tell whether a cell trains as it should."""

BASE_CELL = "base"
"""The base model's name where a frame lists it beside cells."""

_PROBE = re.compile(r"train_probe_avg_at_([1-9][0-9]*)")


@dataclass(frozen=True)
class ProbeHistograms:
    """How many probe problems are answered right how often, over training."""

    answers: int | None
    """K, answers for each problem: the same everywhere in ``counts``; None when no row has a probe."""
    problems: int | None
    """Problems of the probe."""
    counts: pd.DataFrame
    """Long form: cell, compute_rollouts, right (0..K), problems (how many have exactly so many right). Every
    evaluated row has K + 1 lines, the base model too (cell ``base``, C = 0)."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Cells (or ``base``) that are not comparable, and why."""


def pass_rate_histograms(history: pd.DataFrame, base: Mapping[str, Any] | None = None) -> ProbeHistograms:
    """Histograms of the number of right answers over the fixed probe of training problems.

    How many problems count as never solved depends on the number of answers K, so only rows of one K and one
    probe size are compared: those that most cells have (a tie goes to the base model's, then to the larger
    K). Other cells are left out and named. Problems are told apart by their position only: the probe is
    taken to be the same in all cells, as one grid's is.
    """
    probes = _probe_rows(history, base)
    if probes.empty:
        return ProbeHistograms(None, None, pd.DataFrame(columns=_HISTOGRAM_COLUMNS))
    answers, problems = _commonest_probe(probes)
    comparable = (probes["answers"] == answers) & (probes["problems"] == problems)
    left_out = {
        cell: f"its probe has {k} answers for each of {size} problems, not {answers} for each of {problems}"
        for cell, k, size in probes.loc[~comparable, ["cell", "answers", "problems"]].itertuples(index=False)
    }
    kept = probes[comparable]
    right = np.stack(list(kept["right"]))
    values = np.arange(answers + 1)
    counts = (right[:, :, None] == values).sum(axis=1)
    frame = pd.DataFrame(
        {
            "cell": np.repeat(kept["cell"].to_numpy(), answers + 1),
            "compute_rollouts": np.repeat(kept["compute_rollouts"].to_numpy(), answers + 1),
            "right": np.tile(values, len(kept)),
            "problems": counts.ravel(),
        }
    )
    return ProbeHistograms(answers, problems, frame, left_out)


def interference(
    history: pd.DataFrame, base: Mapping[str, Any] | None, solved_share: float = 0.0
) -> pd.DataFrame:
    """Probe problems that a cell unlearned and learned: its last probed row against the base model.

    A problem counts as solved by the base model when it has at least one right answer and at least the share
    ``solved_share`` of its K answers right; it is *lost* when the cell's last row has none right. A problem
    with no right answer under the base model is *gained* when the last row has any.

    With K answers a problem of low pass rate is lost by chance alone. ``lost_by_chance`` is the number to be
    expected had nothing changed: the sum over the solved problems of the chance of 0 right out of K, given r
    right out of K before and a uniform prior on the pass rate (beta-binomial). ``gained_by_chance`` likewise.

    Returns one row for each cell that can be compared (same K and probe size as the base model), columns:
    CELL_COLUMNS, compute_rollouts, answers, problems, solved_by_base, lost, lost_share (of those solved),
    lost_by_chance, unsolved_by_base, gained, gained_share, gained_by_chance. A share of no problem is NaN.
    Empty without a base row that has the probe.
    """
    before = _probe_rows(history.iloc[:0], base)
    if before.empty:
        return pd.DataFrame(columns=_INTERFERENCE_COLUMNS)
    start, answers = before["right"].iloc[0], int(before["answers"].iloc[0])
    solved = (start > 0) & (start >= solved_share * answers)
    unsolved = start == 0
    stays_unsolved = betabinom.pmf(0, answers, start + 1, answers - start + 1)
    probes = _probe_rows(history, None)
    last = probes.groupby("cell", sort=False).tail(1)
    last = last[(last["answers"] == answers) & (last["problems"] == len(start))]
    rows = []
    for row in last.to_dict("records"):
        lost, gained = int((solved & (row["right"] == 0)).sum()), int((unsolved & (row["right"] > 0)).sum())
        rows.append(
            {
                **{name: row[name] for name in (*CELL_COLUMNS, "compute_rollouts", "answers", "problems")},
                "solved_by_base": int(solved.sum()),
                "lost": lost,
                "lost_share": lost / solved.sum() if solved.any() else np.nan,
                "lost_by_chance": float(stays_unsolved[solved].sum()),
                "unsolved_by_base": int(unsolved.sum()),
                "gained": gained,
                "gained_share": gained / unsolved.sum() if unsolved.any() else np.nan,
                "gained_by_chance": float((1.0 - stays_unsolved[unsolved]).sum()),
            }
        )
    return pd.DataFrame(rows, columns=_INTERFERENCE_COLUMNS)


def training_health(history: pd.DataFrame) -> pd.DataFrame:
    """The columns of HEALTH_COLUMNS that the table has, for each evaluated row: wide form, after
    CELL_COLUMNS, step and compute_rollouts."""
    present = [name for name in HEALTH_COLUMNS if name in history and history[name].notna().any()]
    return history[[*CELL_COLUMNS, "step", "compute_rollouts", *present]].reset_index(drop=True)


def training_summary(history: pd.DataFrame) -> pd.DataFrame:
    """Each health column of each cell in one line, NaN rows left out.

    Columns: CELL_COLUMNS, quantity, rows (with a value), first, last, smallest, largest, smallest_at and
    largest_at (compute_rollouts of the first row with that value).
    """
    health = training_health(history)
    present = [name for name in HEALTH_COLUMNS if name in health]
    keys = [*CELL_COLUMNS, "quantity"]
    columns = [*keys, "rows", "first", "last", "smallest", "largest", "smallest_at", "largest_at"]
    long = health.melt([*CELL_COLUMNS, "compute_rollouts"], present, var_name="quantity").dropna(
        subset=["value"]
    )
    if long.empty:
        return pd.DataFrame(columns=columns)
    long = long.sort_values([*keys, "compute_rollouts"], ignore_index=True)
    long["value"] = long["value"].astype(float)
    groups = long.groupby(keys, sort=False)["value"]
    summary = groups.agg(rows="size", first="first", last="last", smallest="min", largest="max")
    summary["smallest_at"] = long.loc[groups.idxmin(), "compute_rollouts"].to_numpy()
    summary["largest_at"] = long.loc[groups.idxmax(), "compute_rollouts"].to_numpy()
    summary = summary.reset_index()
    order = {name: place for place, name in enumerate(HEALTH_COLUMNS)}
    summary = summary.sort_values(
        ["cell", "quantity"], key=lambda s: s.map(order) if s.name == "quantity" else s
    )
    return summary[columns].reset_index(drop=True)


def tokens_per_rollout(history: pd.DataFrame) -> pd.DataFrame:
    """Training tokens against training rollouts, cumulative, for each row that has both.

    Columns: CELL_COLUMNS, step, compute_rollouts, compute_tokens, tokens_per_rollout (their ratio: the mean
    length of an answer over training so far).
    """
    columns = [*CELL_COLUMNS, "step", "compute_rollouts", "compute_tokens"]
    if "compute_tokens" not in history:
        return pd.DataFrame(columns=[*columns, "tokens_per_rollout"])
    frame = history.loc[history["compute_tokens"].notna(), columns].reset_index(drop=True)
    frame["tokens_per_rollout"] = frame["compute_tokens"].astype(float) / frame["compute_rollouts"].astype(
        float
    )
    return frame


def epochs_at(history: pd.DataFrame, crossovers: Sequence[tuple[float, int, int]]) -> pd.DataFrame:
    """How many epochs the overtaking n's own run had done at each crossover.

    ``crossovers`` holds (compute_rollouts, n after the crossover, problems_per_batch). The epochs are
    interpolated between the rows of the allocation's cells, from 0 epochs at C = 0, and averaged over seeds
    (epochs = C / (n D), so seeds differ by rounding only). A draft of the paper's article states the rule
    that a larger n overtakes at about one epoch of its own run.

    Returns one row per crossover, in order, columns: compute_rollouts, rollouts_per_problem,
    problems_per_batch, epochs. Epochs are NaN where the table has none for that allocation, or its cells
    end before the crossover: nothing is extrapolated.
    """
    rows = [
        (float(compute), n, problems, _epochs_of(history, float(compute), n, problems))
        for compute, n, problems in crossovers
    ]
    return pd.DataFrame(
        rows, columns=["compute_rollouts", "rollouts_per_problem", "problems_per_batch", "epochs"]
    )


def right_counts(value: Any) -> NDArray[np.int64] | None:
    """A row's ``eval_right`` or ``train_probe_right`` as an array; None where the row has none."""
    if not isinstance(value, list | tuple | np.ndarray) or len(value) == 0:
        return None
    return np.asarray(value, dtype=np.int64)


def probe_columns(history: pd.DataFrame) -> dict[str, int]:
    """The probe's score columns with their K: ``{"train_probe_avg_at_8": 8}``."""
    matches = ((name, _PROBE.fullmatch(name)) for name in history.columns)
    return {name: int(match.group(1)) for name, match in matches if match}


_HISTOGRAM_COLUMNS = ["cell", "compute_rollouts", "right", "problems"]
_INTERFERENCE_COLUMNS = [
    *CELL_COLUMNS,
    *("compute_rollouts", "answers", "problems", "solved_by_base", "lost", "lost_share", "lost_by_chance"),
    *("unsolved_by_base", "gained", "gained_share", "gained_by_chance"),
]


def _probe_rows(history: pd.DataFrame, base: Mapping[str, Any] | None) -> pd.DataFrame:
    """Rows that have the probe, the base model's first: CELL_COLUMNS, compute_rollouts, right (an array),
    answers (K), problems."""
    wanted = [*CELL_COLUMNS, "compute_rollouts"]
    parts = []
    if base is not None:
        row = {name: base.get(name) for name in wanted} | {"cell": BASE_CELL, "compute_rollouts": 0}
        scores = {name: value for name, value in base.items() if _PROBE.fullmatch(name)}
        row |= scores | {"train_probe_right": base.get("train_probe_right")}
        parts.append(pd.DataFrame([row]))
    parts.append(history)
    rows: list[dict[str, Any]] = []
    for part in parts:
        if "train_probe_right" not in part:
            continue
        probe = probe_columns(part)
        # Cells merged from several runs can have different K: a row's own K is that of the score it has.
        answers = np.zeros(len(part), dtype=int)
        for name, k in probe.items():
            answers[part[name].notna().to_numpy()] = k
        counts = [right_counts(value) for value in part["train_probe_right"]]
        keys = part[wanted].to_dict("records")
        for key, right, k in zip(keys, counts, answers.tolist(), strict=True):
            if right is not None and k > 0:
                rows.append({**key, "right": right, "answers": k, "problems": len(right)})
    return pd.DataFrame(rows, columns=[*wanted, "right", "answers", "problems"])


def _commonest_probe(probes: pd.DataFrame) -> tuple[int, int]:
    cells = probes.groupby(["answers", "problems"])["cell"]
    votes = [
        (group[group != BASE_CELL].nunique(), bool((group == BASE_CELL).any()), *key) for key, group in cells
    ]
    _cells, _base, answers, problems = max(votes)
    return int(answers), int(problems)


def _epochs_of(history: pd.DataFrame, compute: float, n: int, problems: int) -> float:
    if "epochs" not in history:
        return float("nan")
    own = (history["rollouts_per_problem"] == n) & (history["problems_per_batch"] == problems)
    found = []
    for _cell, rows in history[own & history["epochs"].notna()].groupby("cell"):
        rows = rows.sort_values("compute_rollouts")
        c = np.concatenate([[0.0], rows["compute_rollouts"].to_numpy(dtype=float)])
        epochs = np.concatenate([[0.0], rows["epochs"].to_numpy(dtype=float)])
        if compute <= c[-1]:
            found.append(float(np.interp(compute, c, epochs)))
    return float(np.mean(found)) if found else float("nan")
