"""Overfitting: has a cell's validation score fallen from its best while its training score has not?

How a fall is told from noise is in ``falls``. The noise is that of the answers: the validation problems are the
same in all rows, so differences are paired by problem. It says whether this run's policy has fallen on these
problems, not whether another seed would fall too.

With 300 problems and 4 answers each, a slow fall of 5 points over the second half of a dozen rows is found nearly
always after a plateau and in three cases of four after a rise to a single best row. False alarms at the level of 5 % are 5 % at 300
problems, 7 % at 50 and up to 11 % at 20 (simulated, 6 to 200 rows).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import norm

from analysis.diagnostics.falls import (
    Floats,
    Noise,
    binomial_noise,
    largest_fall,
    paired_noise,
    start_of_fall,
)
from analysis.diagnostics.training import CELL_COLUMNS, probe_columns, right_counts

Verdict = Literal["overfits", "collapses", "falls", "no fall", "unknown"]
"""``overfits``: validation has fallen, training has not. ``collapses``: both have. ``falls``: validation has,
and the table has no training score to compare. ``unknown``: too few rows or no known noise; see the reason."""

LEVEL = 0.05
"""Chance of a false alarm for one cell. In a grid of 40 flat cells two alarms are to be expected."""

MIN_ROWS = 5
"""Fewer evaluated rows, the base model's counted, give no verdict."""


@dataclass(frozen=True)
class OverfittingOnset:
    """The verdict on one cell; numbers are NaN where there is no fall."""

    cell: str
    problems_per_batch: int
    rollouts_per_problem: int
    seed: int
    verdict: Verdict
    reason: str
    """Why the verdict is ``unknown`` or the training score unjudged; else empty."""
    p: float
    """Chance of so large a difference in a cell that never falls, over all windows; NaN when unknown."""
    onset_compute: float
    """compute_rollouts of the row after which the score falls; 0 for the base model."""
    onset_epochs: float
    drop: float
    """Mean of the best window minus mean of the last window. The window was chosen, so this is a little high:
    ``drop_at_least`` is not."""
    drop_se: float
    """Standard error of ``drop`` for windows named in advance."""
    drop_at_least: float
    """Lower bound of the fall at confidence 1 - level, over all windows."""
    noise: Literal["paired", "binomial", ""]
    """Where the noise comes from: per-problem scores, or K and the number of problems."""
    training: str
    """The training column compared; empty without one."""
    training_change: float
    """Its change between the same two windows."""
    training_se: float


def overfitting_onset(
    history: pd.DataFrame,
    metric: str,
    base: Mapping[str, Any] | None = None,
    validation_problems: int | None = None,
    level: float = LEVEL,
) -> pd.DataFrame:
    """Judge every cell; one row each, columns as in OverfittingOnset, ordered by cell.

    - Rows: those with a finite ``metric``, the base model's before them where it has the same columns.
    - Noise: from ``eval_right`` where every row has it and its mean agrees with the metric (covariance
      of the rows over problems, t-corrected for their number). Else binomial, rows independent: variance
      R(1-R)/(P K) for avg_at_K and R(1-R)/P for best_at_K and worst_at_K, which is never too small for one
      row; P is ``validation_problems`` or the length of ``eval_right``. Else no verdict.
    - A fall: the largest standardised difference exceeds the 1 - level quantile of its distribution for a
      flat truth (simulated, Gaussian). A curve that rises gives fewer alarms than a flat one.
    - Onset: the last row before the fall in the least-squares curve that never falls up to that row and then
      goes down a straight line (in the rows, so in log C where marks are evenly spaced there) or a step.
      For a slow fall from a plateau it is rough: half of the simulated onsets lie within 3 rows of 20.
    - Training: the probe's score where it has per-problem counts, else ``train_reward``; it has fallen when it
      is lower by more than noise (one-sided, at ``level``) between the two windows that the validation differs
      in most. The noise of ``train_reward`` is taken as if all rollouts of a group agreed, never too small.
    """
    columns = list(OverfittingOnset.__dataclass_fields__)
    if metric not in history:
        return pd.DataFrame(columns=columns)
    found = [
        asdict(_judge_cell(rows, metric, base, validation_problems, level))
        for _cell, rows in history.groupby("cell", sort=True)
    ]
    return pd.DataFrame(found, columns=columns)


def train_validation_gap(history: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Training minus validation score for each row that has both.

    The training score is the probe's where the row has it, else ``train_reward`` (which lags: it averages the
    rollouts since the previous row). Its column is named in ``training_column``: gaps of different columns
    do not compare. The two problem sets differ, so the level of the gap says little; its growth does.

    Columns: CELL_COLUMNS, step, compute_rollouts, epochs (where the table has them), training_column,
    training, validation, gap.
    """
    keys = [*CELL_COLUMNS, "step", "compute_rollouts", *(["epochs"] if "epochs" in history else [])]
    values = ["training_column", "training", "validation", "gap"]
    if metric not in history:
        return pd.DataFrame(columns=[*keys, *values])
    training = pd.Series(np.nan, index=history.index, dtype=float)
    column = pd.Series("", index=history.index, dtype=object)
    for name in (*probe_columns(history), "train_reward"):
        if name in history:
            fill = training.isna() & history[name].notna()
            training[fill], column[fill] = history.loc[fill, name].astype(float), name
    frame = history[keys].assign(training_column=column, training=training, validation=history[metric])
    frame["gap"] = frame["training"] - frame["validation"]
    return frame[frame["gap"].notna()].reset_index(drop=True)


def _judge_cell(
    rows: pd.DataFrame, metric: str, base: Mapping[str, Any] | None, problems: int | None, level: float
) -> OverfittingOnset:
    identity = rows.iloc[0]
    rows = rows[rows[metric].notna()].sort_values("compute_rollouts")
    rows = _with_base(rows, metric, base)

    def result(verdict: Verdict, reason: str = "", **values: Any) -> OverfittingOnset:
        numbers = ("p", "onset_compute", "onset_epochs", "drop", "drop_se", "drop_at_least")
        absent = dict.fromkeys((*numbers, "training_change", "training_se"), np.nan)
        return OverfittingOnset(
            cell=str(identity["cell"]),
            problems_per_batch=int(identity["problems_per_batch"]),
            rollouts_per_problem=int(identity["rollouts_per_problem"]),
            seed=int(identity["seed"]),
            verdict=verdict,
            reason=reason,
            **(absent | {"noise": "", "training": ""} | values),
        )

    if len(rows) < MIN_ROWS:
        return result("unknown", f"{len(rows)} evaluated rows; a verdict needs {MIN_ROWS}")
    validation = _validation_noise(rows, metric, problems)
    if validation is None:
        return result(
            "unknown",
            f"the noise of {metric} is not known: eval_right is missing, and the number of validation problems too",
        )
    means = rows[metric].to_numpy(dtype=float)
    fall = largest_fall(means, validation, level)
    noise = "paired" if validation.per_problem else "binomial"
    if fall is None or fall.p > level:
        return result("no fall", p=1.0 if fall is None else fall.p, noise=noise)
    onset = rows.iloc[start_of_fall(means)]
    training, change, error = _training_change(rows, fall.weights)
    verdict: Verdict = "falls"
    if training:
        # The weights are best minus last, so the change of training is their negative.
        verdict = "collapses" if change < -norm.isf(level) * error else "overfits"
    return result(
        verdict,
        "" if training else "no training score in both windows",
        p=fall.p,
        onset_compute=float(onset["compute_rollouts"]),
        onset_epochs=float(onset["epochs"]) if "epochs" in rows else np.nan,
        drop=fall.drop,
        drop_se=fall.drop_se,
        drop_at_least=fall.drop_at_least,
        noise=noise,
        training=training,
        training_change=change,
        training_se=error,
    )


def _with_base(rows: pd.DataFrame, metric: str, base: Mapping[str, Any] | None) -> pd.DataFrame:
    """The rows with the base model's in front, unless it lacks the metric or breaks the pairing by problem."""
    if base is None or rows.empty or pd.isna(base.get(metric)):
        return rows
    counts = [right_counts(value) for value in rows["eval_right"]] if "eval_right" in rows else [None]
    own = right_counts(base.get("eval_right"))
    if counts[0] is not None and (own is None or len(own) != len(counts[0])):
        return rows
    start = {name: base.get(name) for name in rows.columns if name in base and name not in CELL_COLUMNS}
    start |= {name: rows.iloc[0][name] for name in CELL_COLUMNS}
    start |= {"compute_rollouts": 0} | ({"epochs": 0.0} if "epochs" in rows else {})
    records = [{name: start.get(name) for name in rows.columns}, *rows.to_dict("records")]
    return pd.DataFrame(records, columns=rows.columns)


def _validation_noise(rows: pd.DataFrame, metric: str, problems: int | None) -> Noise | None:
    kind, _at, number = metric.rpartition("_at_")
    if not number.isdigit():
        return None
    answers = int(number)
    counts = [right_counts(value) for value in rows["eval_right"]] if "eval_right" in rows else []
    sizes = {0 if right is None else len(right) for right in counts}
    if len(sizes) == 1 and min(sizes) > 1:
        right = np.stack([value for value in counts if value is not None], axis=1)
        scores = {"best": right > 0, "worst": right == answers}.get(kind, right / answers).astype(float)
        # A table with several K has its counts for one of them only.
        if np.allclose(scores.mean(axis=0), rows[metric].to_numpy(dtype=float), atol=1e-4):
            return paired_noise(scores)
    known = problems or max(sizes, default=0)
    if not known:
        return None
    trials = known * (1 if kind in ("best", "worst") else answers)
    return binomial_noise(rows[metric].to_numpy(dtype=float), float(trials))


def _training_change(rows: pd.DataFrame, weights: Floats) -> tuple[str, float, float]:
    """Training column, its change from the best window to the last, and the standard error; an empty name
    when no column has a value in both windows."""
    for name, answers in probe_columns(rows).items():
        probe = _probe_noise(rows, answers, weights != 0.0)
        if probe is not None:
            change, factor = _change(rows[name].to_numpy(dtype=float), probe.factor, weights)
            if np.isfinite(change):
                return name, change, factor
    if "train_reward" in rows:
        rewards = rows["train_reward"].to_numpy(dtype=float)
        sampled = np.diff(rows["compute_rollouts"].to_numpy(dtype=float), prepend=0.0)
        groups = np.maximum(sampled / rows["rollouts_per_problem"].to_numpy(dtype=float), 1.0)
        noise = binomial_noise(rewards, groups)
        change, error = _change(rewards, noise.factor, weights)
        if np.isfinite(change):
            return "train_reward", change, error
    return "", np.nan, np.nan


def _probe_noise(rows: pd.DataFrame, answers: int, used: NDArray[np.bool_]) -> Noise | None:
    """Noise of the probe's score; None unless every used row has counts for the same number of problems."""
    if "train_probe_right" not in rows:
        return None
    counts = [right_counts(value) for value in rows["train_probe_right"]]
    sizes = {0 if right is None else len(right) for right, use in zip(counts, used, strict=True) if use}
    if len(sizes) != 1 or min(sizes) < 2:
        return None
    size = min(sizes)
    blank = np.full(size, np.nan)
    fitting = [blank if right is None or len(right) != size else right / answers for right in counts]
    return paired_noise(np.stack(fitting, axis=1))


def _change(values: Floats, factor: Floats, weights: Floats) -> tuple[float, float]:
    """Change from the best window to the last over the rows that have a value; NaN when a window has none."""
    kept = np.zeros_like(weights)
    for window in (weights > 0.0, weights < 0.0):
        there = window & np.isfinite(values)
        if not there.any():
            return np.nan, np.nan
        kept[there] = weights[there] / np.abs(weights[there]).sum()
    used = kept != 0.0
    return -float(kept[used] @ values[used]), float(np.linalg.norm(factor[:, used] @ kept[used]))
