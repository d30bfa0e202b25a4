"""The pools at work: what their members did when."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.diagnostics.diagnosis import Diagnosis
from analysis.figures.style import LAW, canvas, legend_below, plain
from analysis.findings import Analysis

_FAILED = "failed"
_OTHER = "other"
LOOKS: dict[str, tuple[str, str, str]] = {
    "sampling": ("#5fa3b5", "", "white"),
    "learning": ("#2b3f6b", "", "white"),
    "grading": ("#d9b44a", "", "white"),
    "evaluation": ("#5fa3b5", "////", "white"),
    "evaluation grading": ("#d9b44a", "////", "white"),
    "taking up": ("#c9c9c9", "", "white"),
    "commit": ("#c9c9c9", "\\\\\\\\", "#444444"),
    "start-up": ("#c9c9c9", "....", "#444444"),
    _OTHER: ("#ffffff", "----", "#444444"),
    _FAILED: ("#ffffff", "xxxx", LAW),
}
"""Face, hatch and the hatch's colour of each kind of phase: training is plain, evaluation hatched, so grey tells them apart."""

_GAP = 0.002  # of the window: between bars that follow at once, and the width of the shortest bar
_BARS_AS_LINES = 1500  # more are drawn as an image, for the size of the file
_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
_LEAST_UNITS = 10.0  # that a window has, of the unit that its axis counts


def pools_figure(_analysis: Analysis, diagnosis: Diagnosis) -> Figure | None:
    """One row for each member, one bar for each phase, over a stretch of the record. None without a record."""
    if diagnosis.pools is None:
        return None
    stretch = diagnosis.pools.stretch
    low, high = stretch.window
    unit, size = next((pair for pair in _UNITS if high - low >= _LEAST_UNITS * pair[1]), _UNITS[-1])
    kinds = stretch.bars["kind"].where(stretch.bars["kind"].isin([*LOOKS]), _OTHER)
    bars = stretch.bars.assign(kind=kinds.where(~stretch.bars["failed"], _FAILED))
    with canvas(height=1.3 + 0.28 * len(stretch.members)) as (figure, (axes,)):
        for place, member in enumerate(stretch.members):
            _draw_row(axes, place, bars[bars["member"] == member], stretch.window, size, len(bars))
        axes.set_xlim(0.0, (high - low) / size)
        axes.set_ylim(len(stretch.members) - 0.5, -0.5)
        axes.set_yticks(range(len(stretch.members)), [plain(member) for member in stretch.members])
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"{unit}; 0 is {low / size:,.0f} {unit} after the first phase")
        present = set(bars["kind"])
        legend_below(figure, [_handle(kind) for kind in LOOKS if kind in present], columns=5)
    return figure


def _draw_row(
    axes: Axes, place: int, bars: pd.DataFrame, window: tuple[float, float], unit: float, among: int
) -> None:
    """The bars of one member. unit: seconds of a unit of the axis. among: bars in the whole figure."""
    low, high = window
    gap = _GAP * (high - low)
    for kind, own in bars.groupby("kind"):
        spans = [
            ((begin - low) / unit, max(end - begin - gap, gap) / unit)
            for begin, end in zip(own["begin"], own["end"], strict=True)
        ]
        axes.broken_barh(
            spans, (place - 0.38, 0.76), **_look(str(kind)), label=kind, rasterized=among > _BARS_AS_LINES
        )


def _look(kind: str) -> dict[str, Any]:
    face, hatch, line = LOOKS[kind]
    return {"facecolor": face, "hatch": hatch, "edgecolor": line, "linewidth": 0}


def _handle(kind: str) -> Patch:
    return Patch(**_look(kind), label=kind)
