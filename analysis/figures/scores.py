"""Comparisons at one common compute: the best n at each B_p by metric, and what n and B_p change."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis.diagnostics.diagnosis import Diagnosis
from analysis.figures.style import (
    B_P,
    INK,
    LAW,
    MUTED,
    SMALL,
    canvas,
    doubling_axis,
    legend_below,
    legend_right,
    plain,
)
from analysis.findings import Analysis, short_count
from analysis.tables import compute_label, metric_label

_BARS = (("#5d7fb5", ""), ("#7fb2c9", "///"), ("#d9d2a6", "\\\\\\"))
_FEWEST_GROUPS = 3
_NAMES = {
    "within_n": f"n, at equal {B_P}",
    "within_problems": f"{B_P}, at equal n",
    "best_n": f"n, at its best {B_P}",
    "best_problems": f"{B_P}, at its best n",
}


def metrics_figure(analysis: Analysis, diagnosis: Diagnosis) -> Figure | None:
    """The n with the best avg@K, best@K and worst@K at each B_p, as bars on a log2 axis. None where no B_p has two
    values of n at the common compute."""
    table, compute = diagnosis.best_n, diagnosis.compared_at
    table = table[table["smallest_n"] < table["largest_n"]]
    if table.empty or compute is None:
        return None
    problems = sorted(table["problems_per_batch"].unique())
    metrics = list(dict.fromkeys(table["metric"]))
    width = 0.8 / len(metrics)
    with canvas(height=3.8) as (figure, (axes,)):
        handles: list[Any] = []
        for place, metric in enumerate(metrics):
            rows = table[table["metric"] == metric]
            at = [
                problems.index(b) + (place - (len(metrics) - 1) / 2.0) * width
                for b in rows["problems_per_batch"]
            ]
            color, hatch = _BARS[place % len(_BARS)]
            axes.bar(
                at, rows["best_n"], 0.92 * width, color=color, hatch=hatch, edgecolor="white", linewidth=0
            )
            handles.append(
                Patch(facecolor=color, hatch=hatch, edgecolor="white", label=plain(metric_label(metric)))
            )
            for x, row in zip(at, rows.to_dict("records"), strict=True):
                _mark_bar(axes, x, row)
        if table["n_low"].notna().any():
            handles.append(Line2D([], [], color=INK, linewidth=1.2, marker="_", label="interval"))
        if table["on_edge"].any():
            handles.append(
                Line2D(
                    [], [], linestyle="none", marker="*", color=LAW, markersize=7, label="edge of the grid"
                )
            )
        values = sorted({int(n) for name in ("smallest_n", "largest_n", "best_n") for n in table[name]})
        lowest, highest = values[0], values[-1]
        doublings = np.arange(np.ceil(np.log2(lowest)), np.floor(np.log2(highest)) + 1)
        doubling_axis(axes, sorted({*values, *(2.0**doublings).astype(int).tolist()}), "best n")
        axes.set_ylim(lowest / 2.0, highest * 2.0)
        axes.set_xticks(range(len(problems)), [str(value) for value in problems])
        room = max(0.0, (_FEWEST_GROUPS - len(problems)) / 2.0)  # so that few bars do not fill the figure
        axes.set_xlim(-0.5 - room, len(problems) - 0.5 + room)
        axes.grid(visible=False, axis="x")
        axes.set_xlabel(f"problems per batch, {B_P}")
        axes.set_title(
            f"at {compute_label(analysis.options.compute).replace('C', f'C = {short_count(compute)}', 1)}"
        )
        legend_right(axes, handles)
    return figure


def sensitivity_figure(analysis: Analysis, diagnosis: Diagnosis) -> Figure | None:
    """The range of the fitted reward over n and over B_p, with intervals and what noise alone would show. None
    without two allocations that differ in n or B_p alone."""
    # With one B_p (or n) alone the two definitions are one.
    table = diagnosis.sensitivity.drop_duplicates(["points", "low", "high"])
    compute = diagnosis.compared_at
    if table.empty or compute is None:
        return None
    with canvas(height=1.5 + 0.45 * len(table)) as (figure, (axes,)):
        place = np.arange(len(table))[::-1]
        with_noise = table["noise"].notna().any()
        axes.barh(place, table["points"], 0.55, color=[_bar_color(name) for name in table["quantity"]])
        handles: list[Any] = []
        if with_noise:
            axes.hlines(place, table["low"], table["high"], color=INK, linewidth=1.4)
            for end in ("low", "high"):
                axes.plot(table[end], place, linestyle="none", marker="|", color=INK, markersize=7)
            axes.barh(
                place, table["noise_high"], 0.78, color="none", edgecolor=LAW, linestyle="--", linewidth=1.1
            )
            axes.plot(table["noise"], place, linestyle="none", marker="D", markersize=4.5, color=LAW)
            handles = [
                Line2D([], [], color=INK, linewidth=1.4, marker="|", label="interval"),
                Line2D(
                    [],
                    [],
                    linestyle="none",
                    marker="D",
                    markersize=4.5,
                    color=LAW,
                    label="noise alone, median",
                ),
                Patch(
                    facecolor="none",
                    edgecolor=LAW,
                    linestyle="--",
                    label=f"noise alone, up to {_upper(analysis):.0%} of the time",
                ),
            ]
        axes.set_yticks(place, [_NAMES[name] for name in table["quantity"]])
        axes.grid(visible=False, axis="y")
        largest = float(np.nanmax(table[["points", "high", "noise_high"]].to_numpy(dtype=float)))
        axes.set_xlim(0.0, 1.12 * largest if largest > 0 else 1.0)
        for y, row in zip(place, table.to_dict("records"), strict=True):
            _write_points(axes, float(y), row)
        axes.set_xlabel(
            f"range of {plain(metric_label(analysis.metric))} at C = {short_count(compute)}, points (1 point = 0.01)"
        )
        legend_below(figure, handles, columns=3)
    return figure


def _mark_bar(axes: Any, x: float, row: dict[str, Any]) -> None:
    top = float(row["best_n"])
    if not pd.isna(row["n_low"]):
        axes.plot([x, x], [row["n_low"], row["n_high"]], color=INK, linewidth=1.2, marker="_", markersize=5)
        top = max(top, float(row["n_high"]))
    if row["on_edge"]:
        axes.plot(x, top * 1.3, marker="*", color=LAW, markersize=6, linestyle="none")


def _bar_color(quantity: str) -> str:
    return _BARS[0][0] if quantity.endswith("_n") else _BARS[1][0]


def _upper(analysis: Analysis) -> float:
    return (1.0 + analysis.options.confidence) / 2.0


def _write_points(axes: Any, y: float, row: dict[str, Any]) -> None:
    ends = [row[name] for name in ("points", "high", "noise_high") if not pd.isna(row[name])]
    axes.annotate(
        f"{row['points']:.1f}",
        (max(ends), y),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=SMALL,
        color=MUTED,
    )
