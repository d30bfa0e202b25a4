"""The report's tables about frontiers, laws and checks, as texts."""

import pandas as pd

from analysis.findings import Analysis
from analysis.fitting.frontier import FrontierPoint
from analysis.fitting.intervals import Interval
from analysis.fitting.verdict import LawVerdict
from analysis.report.blocks import Table
from analysis.report.words import FORM_WORDS, UNIT_WORDS, in_brackets
from analysis.tables import metric_label

NOTHING = "–"
"""Stands for a number that there is not."""


def number(value: float | None, form: str = ".3g") -> str:
    """A number as text; a dash for None and NaN."""
    return NOTHING if value is None or pd.isna(value) else format(value, form)


def compute_heading(analysis: Analysis) -> str:
    """A compute column's heading."""
    return f"C ({UNIT_WORDS[analysis.options.compute]})"


def budgets_table(analysis: Analysis) -> Table:
    """The first frontier at a few budgets."""
    return Table(
        title="The frontier at a few budgets",
        columns=(
            compute_heading(analysis),
            f"best {metric_label(analysis.metric)}",
            "n*",
            "B_p*",
            "M",
            "not worse",
            "compared n",
        ),
        rows=[_budget_row(point, analysis) for point in analysis.budgets],
        text_columns=frozenset({"not worse", "compared n"}),
        note="In brackets: intervals. Not worse: the values of n that cannot be told from n*. M: update steps of the "
        "best allocation, where C is in rollouts.",
    )


def _budget_row(point: FrontierPoint, analysis: Analysis) -> list[str]:
    in_rollouts = analysis.options.compute == "rollouts"
    return [
        f"{point.compute:,.0f}",
        number(point.reward, ".3f") + in_brackets(point.reward_interval, ".3f"),
        (str(point.rollouts_per_problem) if point.is_contested else f"({point.rollouts_per_problem})")
        + in_brackets(point.rollouts_per_problem_interval, ".0f"),
        str(point.problems_per_batch),
        f"{point.compute / point.allocation.batch_rollouts:,.0f}" if in_rollouts else NOTHING,
        NOTHING if point.not_worse_n is None else ", ".join(map(str, point.not_worse_n)),
        ", ".join(map(str, point.compared_n)),
    ]


def crossovers_table(analysis: Analysis, epochs: dict) -> Table:
    """Where n* changes along the first frontier."""
    rows = []
    for change in analysis.frontier.changes:
        rows.append(
            [
                f"{change.before} → {change.after}",
                f"{change.compute:,.0f}" + in_brackets(change.compute_interval, ",.0f"),
                str(change.problems_per_batch),
                number(epochs.get(change), ".2f"),
                "the curves cross" if change.kind == "crossing" else "coverage only",
            ]
        )
    return Table(
        title="Where n* changes",
        columns=("n*", compute_heading(analysis), "B_p after", "epochs", "what happens"),
        rows=rows,
        text_columns=frozenset({"what happens"}),
        note="Epochs: passes over the training problems that the overtaking allocation had made. Coverage only: an "
        "allocation's evaluations begin or end there, which says nothing about which n is better.",
    )


def parameters_table(law: LawVerdict, title: str) -> Table:
    """The law's parameters; without a row when it is not identified."""
    fit, rows = law.fit, []
    if fit is not None:
        x0 = "log10 C0" if fit.axis == "log10" else "M0"
        shown = [
            ("L", "rise", fit.rise, "doublings of n from floor to plateau"),
            ("k", "steepness", fit.steepness, "steepness"),
            (x0, "midpoint", fit.midpoint, "place of half the rise"),
            ("b", "log2_floor", fit.log2_floor, "log2 of the floor"),
            ("L + b", "log2_plateau", fit.rise + fit.log2_floor, "log2 of the plateau"),
        ]
        rows = [
            [name, number(value, ".3f"), _spread(law.intervals.get(key), ".3f"), words]
            for name, key, value, words in shown
        ]
        identified = "identified" if law.plateau_identified else "not identified"
        ends = law.intervals.get("log2_plateau")
        spread = _spread(None if ends is None else (2.0 ** ends[0], 2.0 ** ends[1]), ".0f")
        rows.append(["plateau n", number(fit.plateau, ".0f"), spread, identified])
        rows.append(
            [
                "floor n",
                number(fit.floor, ".1f"),
                NOTHING,
                "identified" if law.floor_identified else "not identified",
            ]
        )
    return Table(
        title, ("parameter", "value", "interval", "meaning"), rows, text_columns=frozenset({"meaning"})
    )


def forms_table(law: LawVerdict) -> Table:
    """The law against simpler forms."""
    rows = [
        [
            FORM_WORDS[form.name],
            str(form.parameters),
            number(form.sse),
            number(form.aicc, ".1f"),
            number(form.preferred_share, ".0%"),
        ]
        for form in law.forms
    ]
    return Table(
        title="Forms of n*(C)",
        columns=("form", "parameters", "squared error", "AICc", "preferred"),
        rows=rows,
        note="AICc weighs the squared error (in log2 n) against the number of parameters; smaller is better. "
        "Preferred: share of bootstrap replicates in which the form has the smallest.",
    )


_LAW_COLUMNS = ("L", "k", "log10\u00a0C0", "b", "plateau", "remarks")


def _law_cells(law: LawVerdict) -> list[str]:
    """A law in one line, under ``_LAW_COLUMNS``."""
    fit = law.fit
    if fit is None:
        return [NOTHING] * 5 + ["not identified: " + "; ".join(law.reasons)]
    values = (fit.rise, fit.steepness, fit.midpoint, fit.log2_floor)
    plateau = number(fit.plateau, ".0f") if law.plateau_identified else NOTHING
    return [*(number(value, ".2f") for value in values), plateau, "; ".join(law.notes)]


def questions_table(analysis: Analysis) -> Table:
    """All questions that the grid can ask."""
    rows = []
    for frontier in analysis.frontiers:
        contested = [point for point in frontier.points if point.is_contested]
        end = NOTHING
        if contested:
            spread = in_brackets(contested[-1].rollouts_per_problem_interval, ".0f")
            end = f"{contested[-1].rollouts_per_problem}{spread}"
        rows.append([frontier.question.title, end, *_law_cells(frontier.law)])
    return Table(
        title="n* by question",
        columns=("what is given", "n* at the largest C", *_LAW_COLUMNS),
        rows=rows,
        text_columns=frozenset({"remarks"}),
        note="The questions: all of n, B_p and M free; B_p given, n against M; B = B_p n given, n against B_p.",
    )


def steps_table(analysis: Analysis) -> Table:
    """The laws in M of the questions with B given."""
    rows = []
    for frontier in analysis.frontiers:
        law = frontier.law_in_steps
        if law is not None and law.fit is not None:
            fit = law.fit
            values = (fit.rise, fit.steepness, fit.midpoint, fit.log2_floor)
            names = ("rise", "steepness", "midpoint", "log2_floor")
            cells = [
                number(value, ".3g") + in_brackets(law.intervals.get(name), ".3g")
                for name, value in zip(names, values, strict=True)
            ]
            plateau = number(fit.plateau, ".0f") if law.plateau_identified else "not identified"
            rows.append([frontier.question.title, *cells, plateau])
    return Table(
        title="The law in update steps, with B given",
        columns=("what is given", "L", "k per step", "M0", "b", "plateau"),
        rows=rows,
        note="log2 n*(M) = L / (1 + exp(-k (M - M0))) + b. Its parameters trade off against each other almost freely, so "
        "read the curve, not the numbers. B_p* = B / n*.",
    )


def views_table(analysis: Analysis) -> Table:
    """n* by three ways at the table's budgets."""
    names = ["all_points", "record_points", "isotonic"]
    rows = []
    for row in analysis.views.table.to_dict("records"):
        values = [row[name] for name in names]
        known = {value for value in values if not pd.isna(value)}
        rows.append(
            [
                f"{row['compute']:,.0f}",
                *(number(value, "d") for value in values),
                "yes" if len(known) < 2 else "no",
            ]
        )
    return Table(
        title="n* by three ways",
        columns=(compute_heading(analysis), "all points", "record-breaking", "isotonic", "agree"),
        rows=rows,
        note="All points: the curves of this report. Record-breaking: curves through the points at which the score "
        "enters a higher bin than ever before, as in the paper. Isotonic: the best non-decreasing line, without a formula.",
    )


def view_laws_table(analysis: Analysis) -> Table:
    """The law in each view."""
    views = analysis.views
    named = {
        "all": analysis.frontier.law,
        "record-breaking, by allocation": views.law_by_record_points,
        "record-breaking, whole grid": views.law_of_record_frontier,
    }
    return Table(
        title="The law by three ways",
        columns=("points", *_LAW_COLUMNS),
        rows=[[name, *_law_cells(law)] for name, law in named.items()],
        text_columns=frozenset({"remarks"}),
        note="Whole grid: the record-breaking evaluations themselves, without curves. A record of noisy scores lies above "
        "the truth, so record-breaking views are biased upwards.",
    )


def held_out_table(analysis: Analysis) -> Table:
    """Predictions beyond the fitted budgets, against what was observed."""
    held_out = analysis.held_out
    rows = []
    for row in [] if held_out is None else held_out.table.to_dict("records"):
        rows.append(
            [
                f"{row['compute']:,.0f}",
                str(row["n_star"]),
                str(row["n_by_curves"]),
                number(row["n_by_law"], ".0f"),
                number(row["reward"], ".3f"),
                number(row["reward_by_curves"], ".3f"),
                number(100.0 * row["regret"], ".1f"),
            ]
        )
    label = metric_label(analysis.metric)
    return Table(
        title="Predicted and observed",
        columns=(
            compute_heading(analysis),
            "n*",
            "n* predicted by curves",
            "n* predicted by law",
            label,
            f"{label} predicted",
            "regret (points)",
        ),
        rows=rows,
        note="Every predicted number is an extrapolation. Regret: what training with the predicted allocation would have "
        "lost, by the curves of the whole grid.",
    )


def _spread(spread: Interval | None, form: str) -> str:
    return NOTHING if spread is None else f"{spread[0]:{form}} to {spread[1]:{form}}"
