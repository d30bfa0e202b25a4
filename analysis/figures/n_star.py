"""n* along a frontier with its law, and n* against B_p* where the batch is fixed."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis.figures.style import (
    B_P,
    BAND,
    INK,
    LAW,
    MUTED,
    SMALL,
    Look,
    canvas,
    count_axis,
    doubling_axis,
    legend_below,
    looks,
    say,
)
from analysis.findings import Analysis, short_count
from analysis.fitting.frontier import Crossover, FrontierPoint
from analysis.fitting.law import LawFit
from analysis.fitting.questions import Frontier
from analysis.tables import compute_label

_SHOWN = 40  # marks along n*; the line and the band use every point
_CHANGE_ROOM = 0.045  # of the axis's length, between two numbers at crossings
_LAW_DASH = (0, (5, 1.5))
_DrawnLaw = tuple[LawFit | None, float, str, Any]  # None: not identified; the rest as in ``_law_lines``
_LAW_IN_STEPS_DASH = (0, (1.2, 1.2))


def n_star_figure(analysis: Analysis) -> Figure | None:
    """n*(C) with its interval, the n that cannot be told from the best, the crossovers and the law; in the second
    panel the same by record-breaking points and by isotonic regression. None without a frontier."""
    frontier = analysis.frontier
    if not frontier.points:
        return None
    look = looks(analysis)
    with canvas(1, 2, height=4.6, sharey=True, width_ratios=[1.9, 1]) as (figure, (axes, beside)):
        compute = [point.compute for point in frontier.points]
        handles = _n_star_line(axes, frontier.points, 1.0, look)
        for panel, labels in ((axes, 7), (beside, 4)):
            count_axis(panel, compute, compute_label(analysis.options.compute), labels=labels)
        doubling_axis(axes, sorted(look), "compute-optimal rollouts per problem, n*(C)")
        _mark_changes(axes, frontier.changes)
        handles += _law_lines(axes, [(frontier.law.fit, 1.0, "law", _LAW_DASH)], _contested(frontier.points))
        if frontier.law.fit is None:
            say(axes, "law not identified")
        axes.set_title("curves through all points")
        beside.set_title("other views")
        handles += _other_views(beside, analysis)
        legend_below(figure, handles, columns=3)
    return figure


def fixed_batch_figure(analysis: Analysis) -> Figure | None:
    """n*(M) and B_p*(M) where B is fixed, for the B with the most values of n (the smallest of several, which has
    the most steps). None where no B leaves two values of n."""
    frontier = fixed_batch(analysis)
    if frontier is None:
        return None
    batch = int(frontier.question.value or 0)
    look = looks(analysis)
    allocations = frontier.land.allocations
    laws: list[_DrawnLaw] = [(frontier.law.fit, float(batch), "law in log M", _LAW_DASH)]
    in_steps = frontier.law_in_steps.fit if frontier.law_in_steps else None
    laws.append((in_steps, 1.0, "law in M", _LAW_IN_STEPS_DASH))
    span = tuple(value / batch for value in _contested(frontier.points))
    with canvas(1, 2, height=4.4) as (figure, (left, right)):
        handles = _n_star_line(left, frontier.points, 1.0 / batch, look)
        handles += _law_lines(left, laws, span)
        _n_star_line(right, frontier.points, 1.0 / batch, look, batch)
        _law_lines(right, laws, span, batch)
        for axes in (left, right):
            count_axis(axes, [p.compute / batch for p in frontier.points], "update steps M", labels=6)
            if frontier.law.fit is None and in_steps is None:
                say(axes, "law not identified")
        doubling_axis(left, sorted({a.rollouts_per_problem for a in allocations}), "n*(M)")
        doubling_axis(right, sorted({a.problems_per_batch for a in allocations}), f"{B_P}*(M)")
        left.set_title(f"batch of {batch:,} rollouts: n*")
        right.set_title(f"{B_P}* = B / n*")
        legend_below(figure, handles, columns=5)
    return figure


def fixed_batch(analysis: Analysis) -> Frontier | None:
    """The frontier of the fixed B that ``fixed_batch_figure`` shows."""
    answers = [f for f in analysis.frontiers if f.question.fixed == "batch_rollouts" and f.points]

    def values_of_n(frontier: Frontier) -> int:
        return len({allocation.rollouts_per_problem for allocation in frontier.land.allocations})

    return max(answers, key=lambda f: (values_of_n(f), -(f.question.value or 0)), default=None)


def _n_star_line(
    axes: Axes,
    points: Sequence[FrontierPoint],
    scale: float,
    look: Mapping[int, Look],
    batch: int | None = None,
) -> list[Any]:
    """n* as a step line with its band and marks, at compute times ``scale``; batch: draw B_p* = batch / n*."""

    def shown(n: float) -> float:
        return n if batch is None else batch / n

    at = np.array([point.compute for point in points]) * scale
    axes.step(
        at, [shown(p.rollouts_per_problem) for p in points], where="post", color=INK, linewidth=1.2, zorder=3
    )
    handles: list[Any] = [Line2D([], [], color=INK, linewidth=1.2, marker="o", markersize=5, label="optimum")]
    intervals = [point.rollouts_per_problem_interval for point in points]
    if all(interval is not None for interval in intervals):
        low, high = np.transpose([[shown(n) for n in interval or ()] for interval in intervals])
        axes.fill_between(at, low, high, step="post", color=BAND, alpha=0.5, linewidth=0, zorder=1)
        handles.append(Patch(color=BAND, alpha=0.5, linewidth=0, label="its interval"))
    every = slice(None, None, max(1, len(points) // _SHOWN))
    rivals = [
        (place, shown(n))
        for place, point in list(zip(at, points, strict=True))[every]
        for n in point.not_worse_n or ()
        if n != point.rollouts_per_problem
    ]
    if rivals:
        axes.plot(*np.transpose(rivals), linestyle="none", marker="_", markersize=5, color=MUTED, zorder=2)
        handles.append(
            Line2D(
                [],
                [],
                linestyle="none",
                marker="_",
                markersize=7,
                color=MUTED,
                label="not told from the best",
            )
        )
    for place, point in list(zip(at, points, strict=True))[every]:
        own = look[point.rollouts_per_problem]
        axes.plot(
            place,
            shown(point.rollouts_per_problem),
            marker=own["marker"],
            color=own["color"],
            markerfacecolor=own["color"] if point.is_contested else "white",
            markersize=5.5,
            zorder=4,
        )
    if any(not point.is_contested for point in points):
        handles.append(
            Line2D(
                [],
                [],
                linestyle="none",
                marker="o",
                markerfacecolor="white",
                color=MUTED,
                label="one n observed",
            )
        )
    return handles


def _law_lines(
    axes: Axes,
    laws: Sequence[_DrawnLaw],
    span: tuple[float, ...],
    batch: int | None = None,
) -> list[Line2D]:
    """Each identified law over the contested span. A law: its fit, what turns the figure's axis into its own, its name and
    its dash."""
    handles = []
    for fit, factor, label, dash in laws:
        if fit is None or not span:
            continue
        at = np.geomspace(span[0], span[-1], 200)
        n = fit.predict(at * factor)
        axes.plot(at, n if batch is None else batch / n, color=LAW, linewidth=2.0, linestyle=dash, zorder=5)
        handles.append(Line2D([], [], color=LAW, linewidth=2.0, linestyle=dash, label=label))
    return handles


def _contested(points: Sequence[FrontierPoint]) -> tuple[float, ...]:
    compute = [point.compute for point in points if point.is_contested]
    return (min(compute), max(compute)) if compute else ()


def _mark_changes(axes: Axes, changes: Sequence[Crossover]) -> None:
    """At each crossing its compute, and its interval as a bar; numbers without room are left out."""
    left, right = np.log10(axes.get_xlim())
    last = -np.inf
    for change in changes:
        if change.kind != "crossing":
            continue
        middle = float(np.sqrt(change.before * change.after))
        if change.compute_interval is not None:
            axes.plot(
                change.compute_interval,
                [middle, middle],
                color=INK,
                linewidth=1.0,
                marker="|",
                markersize=5,
                zorder=3,
            )
        place = (np.log10(change.compute) - left) / (right - left)
        if place - last < _CHANGE_ROOM:
            continue
        last = place
        axes.annotate(
            short_count(change.compute),
            (change.compute, change.after),
            xytext=(-6, 0),  # left of the step's far end, where neither the steps nor the law pass
            textcoords="offset points",
            ha="right",
            va="center",
            color=INK,
            fontsize=SMALL,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.7},
            zorder=6,
        )


def _other_views(axes: Axes, analysis: Analysis) -> list[Line2D]:
    views = analysis.views
    axes.plot(
        [p.compute for p in analysis.frontier.points],
        [p.rollouts_per_problem for p in analysis.frontier.points],
        drawstyle="steps-post",
        color=INK,
        linewidth=1.2,
        alpha=0.4,
    )
    handles = []
    for name, label, marker, color, size in (
        ("record_points", "curves through record points", "x", INK, 5.5),
        ("isotonic", "isotonic regression", "o", LAW, 6.5),
    ):
        seen = views.table[["compute", name]].dropna()
        if seen.empty:
            continue
        style: dict[str, Any] = {
            "linestyle": "none",
            "marker": marker,
            "color": color,
            "markerfacecolor": "none",
            "markersize": size,
        }
        axes.plot(seen["compute"], seen[name].astype(float), **style)
        handles.append(Line2D([], [], label=label, **style))
    records: pd.DataFrame = views.record_frontier
    if len(records):
        axes.plot(
            records["compute"], records["rollouts_per_problem"], color=MUTED, linewidth=0.7, linestyle=":"
        )
        handles.append(
            Line2D([], [], color=MUTED, linewidth=0.7, linestyle=":", label="record-breaking points")
        )
    return handles
