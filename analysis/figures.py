"""The two figures of a grid: reward against compute with the frontier, and n*(C) with the law.

Figures are built on matplotlib's objects, without pyplot's state. Each value of n has one colour (ordered
from dark to light), one marker and one dash pattern, the same in both figures, so they also read in
greyscale.
"""

import io
import re
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    FixedFormatter,
    FixedLocator,
    FuncFormatter,
    LogLocator,
    NullFormatter,
    NullLocator,
)

from analysis.curves import CellCurve, usable_rows
from analysis.findings import short_count
from analysis.frontier import Crossover, FrontierPoint
from analysis.law import LawVerdict
from analysis.tables import metric_label

_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10.0,
    "axes.labelsize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.handlelength": 2.8,
    "lines.linewidth": 1.5,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "isocompute",  # the same figure gives the same bytes
}
_MARKERS = "osD^vP*Xhp<>"
_DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (9, 2)))
_JUMP = 0.01  # reward between two neighbouring points of the frontier
_INK = "#111111"
_MUTED = "#666666"


def frontier_figure(
    history: pd.DataFrame,
    curves: Sequence[CellCurve],
    points: Sequence[FrontierPoint],
    metric: str,
    base_reward: float | None,
) -> Figure:
    """Reward against compute: each cell's points and curve, the frontier drawn over them, the base model's
    level."""
    looks = _looks(history["rollouts_per_problem"])
    with rc_context(_STYLE):
        figure, axes = _canvas()
        for _cell, rows in history.groupby("cell", sort=True):
            used = usable_rows(rows, metric)
            look = looks[int(rows["rollouts_per_problem"].iloc[0])]
            axes.plot(
                used["compute_rollouts"],
                used[metric],
                linestyle="none",
                marker=look["marker"],
                markersize=5,
                markerfacecolor="white",
                markeredgecolor=look["color"],
                markeredgewidth=1.1,
                zorder=3,
            )
        for curve in curves:
            look = looks[curve.rollouts_per_problem]
            span = np.geomspace(curve.fit.compute_min, curve.fit.compute_max, 100)
            axes.plot(
                span, curve.fit.predict(span), color=look["color"], linestyle=look["linestyle"], zorder=4
            )
        for stretch in _stretches(points):
            axes.plot(
                [point.compute_rollouts for point in stretch],
                [point.reward for point in stretch],
                color=_INK,
                linewidth=7,
                alpha=0.18,
                solid_capstyle="round",
                zorder=2,
            )
        handles = [
            Line2D([], [], markerfacecolor="white", label=f"n = {n}", **look) for n, look in looks.items()
        ]
        if points:
            handles.append(Line2D([], [], color=_INK, alpha=0.18, linewidth=7, label="frontier"))
        if base_reward is not None:
            line = axes.axhline(base_reward, color=_MUTED, linewidth=1.2, linestyle=(0, (2, 2)), zorder=1)
            line.set_label(f"base model, {base_reward:.3f}")
            handles.append(line)
        _compute_axis(axes, history.loc[history["compute_rollouts"] > 0, "compute_rollouts"])
        axes.set_ylabel(f"validation reward ({metric_label(metric)})")
        if handles:
            axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5))
        if not points:
            _say(axes, "no cell could be fitted yet")
    return figure


def n_star_figure(
    points: Sequence[FrontierPoint], changes: Sequence[Crossover], verdict: LawVerdict, grid_n: Sequence[int]
) -> Figure:
    """n*(C) along the frontier; hollow where one n alone was observed, with the law's curve when it is
    identified."""
    looks = _looks(grid_n)
    with rc_context(_STYLE):
        figure, axes = _canvas()
        compute = [point.compute_rollouts for point in points]
        handles = []
        if points:
            axes.step(
                compute,
                [point.rollouts_per_problem for point in points],
                where="post",
                color=_INK,
                linewidth=1.2,
            )
            for point in points[:: max(1, len(points) // 40)]:
                look = looks[point.rollouts_per_problem]
                face = look["color"] if point.is_contested else "white"
                axes.plot(
                    point.compute_rollouts,
                    point.rollouts_per_problem,
                    marker=look["marker"],
                    color=look["color"],
                    markerfacecolor=face,
                    markersize=6,
                    zorder=3,
                )
            handles.append(Line2D([], [], color=_INK, linewidth=1.2, label="n*(C)"))
            if any(not point.is_contested for point in points):
                handles.append(
                    Line2D(
                        [],
                        [],
                        linestyle="none",
                        marker="o",
                        markerfacecolor="white",
                        color=_MUTED,
                        label="one n observed",
                    )
                )
        for change in changes:
            if change.kind == "crossing":
                axes.annotate(
                    short_count(change.compute_rollouts),
                    (change.compute_rollouts, change.after),
                    xytext=(-6, 0),  # left of the step's far end, where neither the steps nor the law pass
                    textcoords="offset points",
                    ha="right",
                    va="center",
                    color=_MUTED,
                    fontsize=9,
                )
        if verdict.fit is not None:
            span = np.geomspace(*_contested_range(points), 200)
            axes.plot(
                span,
                verdict.fit.predict(span),
                color="#d55e00",
                linewidth=2.2,
                linestyle=(0, (5, 1.5)),
                zorder=4,
            )
            handles.append(
                Line2D([], [], color="#d55e00", linewidth=2.2, linestyle=(0, (5, 1.5)), label="law")
            )
        else:
            _say(axes, "law not identified")
        _compute_axis(axes, pd.Series(compute))
        _n_axis(axes, sorted(looks))
        if handles:
            axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def svg_bytes(figure: Figure) -> bytes:
    """A figure as a stand-alone SVG file; equal figures give equal bytes."""
    return _saved(figure, "svg", {"Date": None})


def pdf_bytes(figure: Figure) -> bytes:
    """A figure as a PDF file; equal figures give equal bytes."""
    return _saved(figure, "pdf", {"CreationDate": None})


def inline_svg(svg: bytes, prefix: str, title: str) -> str:
    """An SVG file as an element for an HTML page: no prologue, metadata or namespaces; prefixed ids.

    prefix and title must be plain text without markup.
    """
    text = svg.decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    text = re.sub(
        r'<svg width="[^"]*" height="[^"]*"|<svg height="[^"]*" width="[^"]*"', "<svg", text, count=1
    )
    return text.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)


def _canvas() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.6, 4.2), layout="constrained")
    return figure, figure.add_subplot()


def _looks(values: Any) -> dict[int, dict[str, Any]]:
    """Colour, marker and dash pattern of each n, ordered by n."""
    ordered = sorted({int(value) for value in values})
    shades = colormaps["viridis"](np.linspace(0.0, 0.82, max(len(ordered), 2)))
    return {
        n: {"color": tuple(shade), "marker": marker, "linestyle": dash}
        for n, shade, marker, dash in zip(ordered, shades, cycle(_MARKERS), cycle(_DASHES), strict=False)
    }


def _stretches(points: Sequence[FrontierPoint]) -> list[list[FrontierPoint]]:
    """The frontier, split where another cell takes over with a jump in reward: a jump is not drawn."""
    stretches: list[list[FrontierPoint]] = []
    for point in points:
        last = stretches[-1][-1] if stretches else None
        if last and (last.cell == point.cell or abs(point.reward - last.reward) < _JUMP):
            stretches[-1].append(point)
        else:
            stretches.append([point])
    return stretches


def _contested_range(points: Sequence[FrontierPoint]) -> tuple[float, float]:
    compute = [point.compute_rollouts for point in points if point.is_contested]
    return min(compute), max(compute)


def _compute_axis(axes: Axes, compute: pd.Series) -> None:
    axes.set_xscale("log")
    axes.set_xlabel("training compute C (rollouts)")
    if compute.empty:
        axes.set_xlim(1e3, 1e5)
        decades = 2.0
    else:
        low, high = float(compute.min()), float(compute.max())
        axes.set_xlim(low / 1.12, high * 1.12)
        decades = np.log10(high / low)
    axes.xaxis.set_major_locator(
        LogLocator(base=10.0, subs=(1.0,) if decades > 3 else (1.0, 2.0, 5.0), numticks=30)
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: short_count(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_locator(NullLocator())


def _n_axis(axes: Axes, values: list[int]) -> None:
    axes.set_yscale("log", base=2)
    axes.set_ylabel("compute-optimal rollouts per problem, n*(C)")
    shown = values or [1, 2]
    axes.yaxis.set_major_locator(FixedLocator(shown))
    axes.yaxis.set_major_formatter(FixedFormatter([str(n) for n in values] or ["", ""]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(min(shown) / 1.5, max(shown) * 1.5)


def _say(axes: Axes, words: str) -> None:
    axes.text(0.02, 0.97, words, transform=axes.transAxes, va="top", color=_MUTED, style="italic")


def _saved(figure: Figure, kind: str, metadata: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    with rc_context(_STYLE):
        figure.savefig(buffer, format=kind, metadata=metadata)
    return buffer.getvalue()
