"""The verdict in words: sentences that can each stand alone."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.diagnostics.diagnosis import Diagnosis
from analysis.diagnostics.overfitting import LEVEL
from analysis.findings import Analysis, short_count
from analysis.fitting.frontier import Crossover
from analysis.fitting.intervals import Interval
from analysis.fitting.observations import MIN_POINTS
from analysis.fitting.verdict import Form, LawVerdict
from analysis.tables import is_metric, metric_label

UNIT_WORDS = {"rollouts": "rollouts", "tokens": "tokens", "accelerator_seconds": "accelerator-seconds"}
"""Compute units for people."""

FORM_WORDS = {"sigmoid": "a sigmoid", "log-linear": "a straight line in log C", "flat": "a constant n"}
"""Forms of n* for people."""

_MANY = 8  # more changes, budgets or cells than these are counted, not listed


def verdict(analysis: Analysis, diagnosis: Diagnosis) -> dict[str, list[str]]:
    """What the study says and what it does not: sentences by topic, in order of weight."""
    if not analysis.curves:
        return {
            "Frontier": [
                "There is no frontier yet: no allocation could be fitted, because a curve needs at least "
                f"{MIN_POINTS} evaluations at different C."
            ]
        }
    law = analysis.frontier.law
    topics = {
        "Best n": [*column_words(analysis.metric), *best_n_words(analysis), *end_words(analysis)],
        "Law": [*law_words(law, analysis.options.compute), *form_words(law.forms)],
        "Intervals": interval_words(analysis),
        "Other views": view_words(analysis),
        "Held-out budgets": held_out_words(analysis),
        "What matters": [*sensitivity_words(analysis, diagnosis), *epoch_words(diagnosis)],
        "Overfitting": overfitting_words(diagnosis.overfitting),
    }
    return {topic: sentences for topic, sentences in topics.items() if sentences}


def column_words(metric: str) -> list[str]:
    """A warning for a column that is no validation score."""
    if is_metric(metric):
        return []
    return [f"{metric} is no validation score; it is maximised here as if larger were better."]


def best_n_words(analysis: Analysis) -> list[str]:
    """Which n is best, and where that changes."""
    frontier = analysis.frontier
    values = sorted({curve.allocation.rollouts_per_problem for curve in analysis.curves})
    contested = [point for point in frontier.points if point.is_contested]
    if len(values) == 1:
        return [f"Every fitted cell has n = {values[0]}, so this grid cannot say which n is best."]
    if not contested:
        return ["No two values of n were observed at the same C, so they cannot be compared."]
    crossings = [change for change in frontier.changes if change.kind == "crossing"]
    coverage = [change for change in frontier.changes if change.kind == "coverage"]
    unit = UNIT_WORDS[analysis.options.compute]
    sentences = []
    if crossings:
        steps = [
            f"from {c.before} to {c.after} at C = {short_count(c.compute)}{_uncertainty(c, analysis)}"
            for c in crossings
        ]
        sentences.append(f"The best n changes with compute (C in {unit}): {_listed(steps)}.")
    else:
        leaders = sorted({point.rollouts_per_problem for point in contested})
        span = f"{short_count(contested[0].compute)} to {short_count(contested[-1].compute)} {unit}"
        who = (
            f"the leader there is n = {leaders[0]}"
            if len(leaders) == 1
            else "which n leads changes all the same"
        )
        sentences.append(f"No two curves of different n cross between C = {span}; {who}.")
    if coverage:
        steps = [f"C = {short_count(c.compute)} ({c.before} to {c.after})" for c in coverage]
        sentences.append(
            f"n* also changes at {_listed(steps)}, where an allocation's evaluations begin or end: "
            "that says nothing about which n is better."
        )
    return sentences


def end_words(analysis: Analysis) -> list[str]:
    """The best allocation at the largest C at which several n were compared."""
    contested = [point for point in analysis.frontier.points if point.is_contested]
    if not contested:
        return []
    point, unit = contested[-1], UNIT_WORDS[analysis.options.compute]
    reward = f"{point.reward:.3f}{in_brackets(point.reward_interval, '.3f')}"
    words = (
        f"At C = {short_count(point.compute)} {unit}, the largest at which several n were compared, "
        f"the best is n = {point.rollouts_per_problem} with B_p = {point.problems_per_batch}: "
        f"{metric_label(analysis.metric)} {reward}."
    )
    if point.not_worse_n is None:
        return [words]
    rivals = [str(n) for n in point.not_worse_n if n != point.rollouts_per_problem]
    if not rivals:
        return [f"{words} Taken by itself, this compute tells every other n compared there from it."]
    return [f"{words} It cannot be told from n = {', '.join(rivals)} there."]


def law_words(law: LawVerdict, unit: str) -> list[str]:
    """What the law says, or why it says nothing."""
    fit = law.fit
    if fit is None:
        return [law.text]
    half = f"{short_count(10.0**fit.midpoint)} {UNIT_WORDS[unit]}"
    spread = law.intervals.get("midpoint")
    if spread:
        half += f" ({short_count(10.0 ** spread[0])} to {short_count(10.0 ** spread[1])})"
    words = f"The allocation law is identified: log2 n* rises by L = {fit.rise:.2f}"
    words += f"{in_brackets(law.intervals.get('rise'), '.2f')} doublings, half of them by C0 = {half}."
    sentences = [words]
    if law.plateau_identified:
        ends = law.intervals.get("log2_plateau")
        spread = None if ends is None else (2.0 ** ends[0], 2.0 ** ends[1])
        sentences.append(
            f"Beyond that, n* levels at a plateau of {fit.plateau:.0f}{in_brackets(spread, '.0f')}."
        )
    if law.floor_identified:
        sentences.append(f"At small C, n* levels at a floor of {fit.floor:.0f}.")
    return [*sentences, *(f"{_capitalised(note)}." for note in law.notes)]


def form_words(forms: Sequence[Form]) -> list[str]:
    """How the law compares with simpler forms."""
    if not forms:
        return []
    best, *others = forms
    behind = [f"{FORM_WORDS[form.name]} is {form.aicc - best.aicc:.3g} behind" for form in others]
    words = (
        f"{_capitalised(FORM_WORDS[best.name])} describes n* best by AICc, which weighs the fit against the number of "
        f"parameters: {' and '.join(behind)} (10 or more: hardly tenable)."
    )
    if best.preferred_share is not None:
        words += f" It is also the best in {best.preferred_share:.0%} of the bootstrap replicates."
    return [words]


def interval_words(analysis: Analysis) -> list[str]:
    """What the intervals hold and what they lack."""
    resampling = analysis.resampling
    if not analysis.options.replicates:
        return ["There are no intervals: no bootstrap replicates were asked for."]
    if not resampling.over:
        return [
            "There are no intervals: one seed per allocation and no per-problem scores; give eval_right or more seeds."
        ]
    held = {"seeds": "which seeds were trained", "problems": "which problems the validation set holds"}
    return [
        f"Intervals are central {analysis.options.confidence:.0%} of {resampling.replicates} bootstrap replicates; they "
        f"hold the luck of {' and of '.join(held[name] for name in resampling.over)}.",
        *(f"The intervals lack {words}." for words in resampling.missing),
    ]


def view_words(analysis: Analysis) -> list[str]:
    """Whether the record-breaking and the isotonic view name the same n*."""
    table = analysis.views.table
    if len({curve.allocation.rollouts_per_problem for curve in analysis.curves}) < 2 or table.empty:
        return []
    others = {"record_points": "record-breaking points", "isotonic": "isotonic regression"}
    differing = [
        f"C = {short_count(row['compute'])} ({row['all_points']} against "
        + ", ".join(f"{row[name]} by {words}" for name, words in others.items() if _differs(row, name))
        + ")"
        for row in table.to_dict("records")
        if any(_differs(row, name) for name in others)
    ]
    ways = "all points, record-breaking points and isotonic regression"
    if not differing:
        return [f"The views by {ways} name the same n* at each of the {len(table)} budgets of the table."]
    return [
        f"The views by {ways} agree at {len(table) - len(differing)} of {len(table)} budgets and differ at "
        f"{_listed(differing)}."
    ]


def held_out_words(analysis: Analysis) -> list[str]:
    """How well small budgets would have predicted the large ones."""
    held_out, share = analysis.held_out, analysis.options.held_out
    if held_out is None or held_out.reward_error is None or held_out.doublings_error is None:
        return [
            f"There is no held-out check: fewer than two allocations have {MIN_POINTS} evaluations up to "
            f"{share:.0%} of the largest C."
        ]
    table = held_out.table
    return [
        f"Held-out check: curves fitted to C <= {short_count(held_out.fitted_to)} and extrapolated to "
        f"{short_count(float(table['compute'].iloc[-1]))} miss the best reward by {100 * held_out.reward_error:.1f} "
        f"points and n* by {held_out.doublings_error:.1f} doublings on average; training with the predicted "
        f"allocation would have lost {100 * float(table['regret'].max()):.1f} points at most."
    ]


def sensitivity_words(analysis: Analysis, diagnosis: Diagnosis) -> list[str]:
    """What the choice of n and that of B_p are worth."""
    if diagnosis.compared_at is None:
        return []
    rows = {row["quantity"]: row for row in diagnosis.sensitivity.to_dict("records")}
    names = {"within_n": "n, at equal B_p,", "within_problems": "B_p, at equal n,"}
    parts = []
    for key, words in names.items():
        if key in rows:
            row = rows[key]
            part = (
                f"the choice of {words} moves {metric_label(analysis.metric)} by {row['points']:.1f} points"
            )
            if np.isfinite(row["low"]):
                part += f" ({row['low']:.1f} to {row['high']:.1f})"
                beyond = "beyond" if row["points"] > row["noise_high"] else "no more than"
                part += f", {beyond} the {row['noise_high']:.1f} that noise shows among equal allocations"
            parts.append(part)
    if not parts:
        return []
    at = f"{short_count(diagnosis.compared_at)} {UNIT_WORDS[analysis.options.compute]}"
    return [f"At C = {at}, {' and '.join(parts)}."]


def epoch_words(diagnosis: Diagnosis) -> list[str]:
    """After how many epochs of its own run a larger n takes over."""
    epochs = [value for change, value in diagnosis.epochs.items() if change.after > change.before]
    if not epochs:
        return []
    span = f"{min(epochs):.2g}" if len(epochs) == 1 else f"{min(epochs):.2g} to {max(epochs):.2g}"
    return [f"A larger n takes over after {span} epochs (passes over the training problems) of its own run."]


def overfitting_words(found: pd.DataFrame) -> list[str]:
    """Which cells' validation score has fallen from its best."""
    if found.empty:
        return []
    phrases = {
        "overfits": "validation has fallen by more than noise while training has not (overfitting)",
        "collapses": "validation and training have both fallen by more than noise (collapse)",
        "falls": "validation has fallen by more than noise, and there is no training score to compare",
    }
    sentences = []
    for name, words in phrases.items():
        rows = found[found["verdict"] == name]
        if len(rows):
            cells = [
                f"{row['cell']} (by {100 * row['drop_at_least']:.1f} points or more after C = "
                f"{short_count(row['onset_compute'])})"
                for row in rows.to_dict("records")
            ]
            sentences.append(f"In {len(rows)} of {len(found)} cells {words}: {_listed(cells)}.")
    judged = found[found["verdict"] != "unknown"]
    if judged.empty:
        reason = found["reason"].mode().iloc[0]
        return [f"Overfitting cannot be judged: {reason}."]
    if sentences:
        chance = LEVEL * len(judged)
        sentences.append(f"By chance alone about {chance:.2g} of {len(judged)} cells would be named so.")
    else:
        sentences.append(
            f"In none of {len(judged)} cells has the validation score fallen from its best by more than noise."
        )
    return sentences


def in_brackets(interval: Interval | None, form: str) -> str:
    """`` (low to high)``, empty without an interval."""
    return "" if interval is None else f" ({interval[0]:{form}} to {interval[1]:{form}})"


def _uncertainty(change: Crossover, analysis: Analysis) -> str:
    if change.compute_interval is not None:
        low, high = change.compute_interval
        return f" ({short_count(low)} to {short_count(high)})"
    return " (uncertain: fewer than 9 in 10 replicates cross)" if analysis.resampling.over else ""


def _listed(items: Sequence[str]) -> str:
    shown = list(items[:_MANY])
    if len(items) > _MANY:
        shown.append(f"{len(items) - _MANY} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _capitalised(text: str) -> str:
    """With its first letter in upper case and the rest as it is."""
    return text[0].upper() + text[1:]


def _differs(row: dict, name: str) -> bool:
    """Whether a view names another n than the curves through all points; a missing one does not."""
    both = (row[name], row["all_points"])
    return not any(pd.isna(value) for value in both) and both[0] != both[1]
