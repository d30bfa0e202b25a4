"""Reward against compute: every allocation with the frontier, and the frontier alone with its allocations."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis.figures.style import (
    B_P,
    BAND,
    INK,
    MUTED,
    SMALL,
    Look,
    canvas,
    count_axis,
    legend_right,
    looks,
    n_handles,
    plain,
    say,
)
from analysis.findings import Analysis
from analysis.fitting.frontier import FrontierPoint
from analysis.fitting.intervals import interval
from analysis.fitting.landscape import best_by_n
from analysis.fitting.logistic import Array
from analysis.fitting.observations import Observations
from analysis.tables import compute_label, metric_label

_FEW = 6  # allocations, up to which each has its own bold curve and interval
_MANY_POINTS = 1200  # more evaluations than this are rasterised, to keep files small
_JUMP = 0.01  # reward between two neighbouring points of the frontier
_LABEL_ROOM = 0.035  # of the axis's length, for each upright label


def frontier_figure(analysis: Analysis) -> Figure | None:
    """Evaluations, curves inside the observed compute, the frontier with its interval and the base model's
    level. None without an evaluation that could be fitted.

    With more than six allocations each n has one bold curve, the best over B_p, and the allocations' own curves
    stay faint.
    """
    if not analysis.groups:
        return None
    look = looks(analysis)
    few = len(analysis.curves) <= _FEW
    with canvas(height=4.6) as (figure, (axes,)):
        many_points = sum(len(group.compute) for group in analysis.groups) > _MANY_POINTS
        for group in analysis.groups:
            compute, reward = _evaluations(group, each=few)
            own = look[group.allocation.rollouts_per_problem]
            axes.plot(
                compute,
                reward,
                linestyle="none",
                marker=own["marker"],
                markersize=4.5 if few else 2.2,
                markerfacecolor="white" if few else own["color"],
                markeredgecolor=own["color"],
                markeredgewidth=1.0 if few else 0.0,
                alpha=1.0 if few else 0.35,
                rasterized=many_points,
                zorder=3 if few else 2,
            )
        if few:
            _bold_allocations(axes, analysis, look)
        else:
            _faint_allocations(axes, analysis, look)
            _bold_by_n(axes, analysis, look)
        handles: list[Line2D | Patch] = [*n_handles(sorted(look), look)]
        handles += _frontier_band(axes, analysis.frontier.points)
        if analysis.base_reward is not None:
            line = axes.axhline(
                analysis.base_reward, color=MUTED, linewidth=1.2, linestyle=(0, (2, 2)), zorder=1
            )
            line.set_label(f"base model, {analysis.base_reward:.3f}")
            handles.append(line)
        _reward_axes(axes, analysis)
        legend_right(axes, handles)
    return figure


def joint_figure(analysis: Analysis) -> Figure | None:
    """The frontier with n, B_p and M free, coloured by n, with (B_p, n) where the winning allocation changes.
    None without a frontier.

    Where changes crowd, the allocations that lead for longest keep their labels.
    """
    points = analysis.frontier.points
    if not points:
        return None
    look = looks(analysis)
    reigns = [list(own) for _, own in groupby(points, key=lambda point: point.allocation)]
    with canvas(height=4.2) as (figure, (axes,)):
        handles = _interval_band(axes, points)
        for reign, following in zip(reigns, [*reigns[1:], []], strict=True):
            own = look[reign[0].rollouts_per_problem]
            drawn = [*reign, *following[:1]]
            if following and abs(following[0].reward - reign[-1].reward) >= _JUMP:
                drawn = reign
            compute, reward = [p.compute for p in drawn], [p.reward for p in drawn]
            axes.plot(compute, reward, color=own["color"], linestyle=own["linestyle"], linewidth=2.4)
            axes.plot(
                compute[0],
                reward[0],
                color=own["color"],
                marker=own["marker"],
                markerfacecolor="white",
                markersize=6,
                linestyle="none",
            )
        _reward_axes(axes, analysis, [point.compute for point in points])
        _label_reigns(axes, reigns, np.array([point.reward for point in points]))
        values = sorted({point.rollouts_per_problem for point in points})
        legend_right(axes, [*n_handles(values, look), *handles])
    return figure


def _evaluations(group: Observations, each: bool) -> tuple[Array, Array]:
    """Compute and reward of each evaluation, or means over the seeds."""
    if each or len(group.cells) == 1:
        return group.compute, group.reward
    compute, place = np.unique(group.compute, return_inverse=True)
    return compute, np.bincount(place, weights=group.reward) / np.bincount(place)


def _bold_allocations(axes: Axes, analysis: Analysis, look: dict[int, Look]) -> None:
    for curve in analysis.curves:
        own = look[curve.allocation.rollouts_per_problem]
        span = np.geomspace(curve.fit.compute_min, curve.fit.compute_max, 80)
        axes.plot(span, curve.fit.predict(span), color=own["color"], linestyle=own["linestyle"], zorder=4)
        if curve.replicates is not None:
            ranges = [interval(row, analysis.options.confidence) for row in curve.predict_replicates(span)]
            axes.fill_between(
                span, *np.transpose(ranges), color=own["color"], alpha=0.12, linewidth=0, zorder=1
            )


def _faint_allocations(axes: Axes, analysis: Analysis, look: dict[int, Look]) -> None:
    for curve in analysis.curves:
        span = np.geomspace(curve.fit.compute_min, curve.fit.compute_max, 40)
        color = look[curve.allocation.rollouts_per_problem]["color"]
        axes.plot(span, curve.fit.predict(span), color=color, linewidth=0.6, alpha=0.45, zorder=3)


def _bold_by_n(axes: Axes, analysis: Analysis, look: dict[int, Look]) -> None:
    best = best_by_n(replace(analysis.land, replicates=None))
    for n, reward in zip(best.values, best.reward, strict=True):
        own = look[n]
        shown = np.where(np.isfinite(reward), reward, np.nan)
        axes.plot(
            analysis.land.compute,
            shown,
            color=own["color"],
            linestyle=own["linestyle"],
            marker=own["marker"],
            markevery=(3 * best.values.index(n), 30),
            markersize=4.5,
            markerfacecolor="white",
            linewidth=1.6,
            zorder=4,
        )


def _frontier_band(axes: Axes, points: Sequence[FrontierPoint]) -> list[Line2D | Patch]:
    """The frontier as a broad grey line, not drawn over jumps, and its interval."""
    if not points:
        say(axes, "no allocation could be fitted yet")
        return []
    handles: list[Line2D | Patch] = _interval_band(axes, points)
    for stretch in _stretches(points):
        axes.plot(
            [point.compute for point in stretch],
            [point.reward for point in stretch],
            color=INK,
            linewidth=7,
            alpha=0.18,
            solid_capstyle="round",
            zorder=2,
        )
    return [Line2D([], [], color=INK, alpha=0.18, linewidth=7, label="frontier"), *handles]


def _interval_band(axes: Axes, points: Sequence[FrontierPoint]) -> list[Line2D | Patch]:
    if any(point.reward_interval is None for point in points):
        return []
    low, high = np.transpose([point.reward_interval for point in points])
    compute = [point.compute for point in points]
    axes.fill_between(compute, low, high, color=BAND, alpha=0.5, linewidth=0, zorder=1)
    return [Patch(color=BAND, alpha=0.5, linewidth=0, label="its interval")]


def _stretches(points: Sequence[FrontierPoint]) -> list[list[FrontierPoint]]:
    """The frontier, split where another allocation takes over with a jump in reward."""
    stretches: list[list[FrontierPoint]] = []
    for point in points:
        last = stretches[-1][-1] if stretches else None
        if last and (last.allocation == point.allocation or abs(point.reward - last.reward) < _JUMP):
            stretches[-1].append(point)
        else:
            stretches.append([point])
    return stretches


def _reward_axes(axes: Axes, analysis: Analysis, compute: Sequence[float] | None = None) -> None:
    everything = np.concatenate([group.compute for group in analysis.groups]) if compute is None else compute
    count_axis(axes, everything, compute_label(analysis.options.compute))
    axes.set_ylabel(f"validation reward ({plain(metric_label(analysis.metric))})")


def _label_reigns(axes: Axes, reigns: Sequence[Sequence[FrontierPoint]], reward: Array) -> None:
    """Upright (B_p, n) labels on leaders above the frontier, the longest reigns first where there is no room
    for all."""
    left, right = np.log10(axes.get_xlim())
    chosen: list[tuple[float, FrontierPoint]] = []
    for reign in sorted(reigns, key=len, reverse=True):
        place = (np.log10(reign[0].compute) - left) / (right - left)
        if all(abs(place - other) >= _LABEL_ROOM for other, _ in chosen):
            chosen.append((place, reign[0]))
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.28 * (high - low))
    for _place, point in chosen:
        top = point.reward_interval[1] if point.reward_interval else point.reward
        axes.annotate(
            f"({point.problems_per_batch}, {point.rollouts_per_problem})",
            (point.compute, point.reward),
            xytext=(point.compute, max(top, point.reward) + 0.04 * (high - low)),
            ha="center",
            va="bottom",
            rotation=90,
            fontsize=SMALL,
            color=INK,
            arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.6},
        )
    say(axes, f"labels: ({B_P}, n) that takes the lead")
