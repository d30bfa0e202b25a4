"""What all figures share: type, the look of each n, axes, legends, and saving with equal bytes.

Figures are built on matplotlib's objects, without pyplot's state. Each value of n has one colour (ordered from
dark to light), one marker and one dash pattern, the same in every figure of a study, so figures also read in
greyscale.
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
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

from analysis.findings import Analysis, short_count

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10.0,
    "axes.labelsize": 10.0,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "legend.handlelength": 2.8,
    "xtick.labelsize": 9.0,
    "ytick.labelsize": 9.0,
    "lines.linewidth": 1.5,
    "hatch.linewidth": 0.6,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "isocompute",  # the same figure gives the same bytes
    "savefig.dpi": 200,  # of the parts that are rasterised
}
INK = "#111111"
MUTED = "#666666"
BAND = "#c9c9c9"
LAW = "#d55e00"
"""Vermilion, apart from every shade of n for all kinds of sight."""
SMALL = 8.0
"""Smallest type, in points."""
B_P = "$B_p$"
"""Problems per batch, as text in a figure."""
WIDTH = 7.6
"""Inches, of every figure."""

Look = Mapping[str, Any]
"""Line properties of one n: color, marker, linestyle."""

_ROWS = 4000  # drawn in one figure, about
_LEAST_ROWS = 16  # of each line
_MARKERS = "osD^vP*Xhp<>"
_DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (9, 2)))


@contextmanager
def canvas(
    rows: int = 1, columns: int = 1, height: float = 4.2, **grid: Any
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure and its axes in reading order, in the house's style; draw inside the context.

    grid: options of ``Figure.subplots``.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure, list(figure.subplots(rows, columns, squeeze=False, **grid).flat)


def plain(text: str) -> str:
    """Text from a source, such as a cell's name, for a label: a dollar sign in it begins no formula."""
    return text.replace("$", r"\$")


def looks(analysis: Analysis) -> dict[int, Look]:
    """The look of each n of the study, by n."""
    ordered = sorted({int(n) for n in analysis.tables.history["rollouts_per_problem"]})
    shades = colormaps["viridis"](np.linspace(0.0, 0.8, max(len(ordered), 2)))
    return {
        n: {"color": tuple(shade), "marker": marker, "linestyle": dash}
        for n, shade, marker, dash in zip(ordered, shades, cycle(_MARKERS), cycle(_DASHES), strict=False)
    }


def n_handles(values: Sequence[int], look: Mapping[int, Look]) -> list[Line2D]:
    """Legend entries of values of n: their dash and marker."""
    return [
        Line2D([], [], markerfacecolor="white", markersize=4.5, label=f"n = {n}", **look[n]) for n in values
    ]


def legend_right(axes: Axes, handles: Sequence[Any]) -> None:
    """A legend to the right of the axes, where it hides nothing."""
    if handles:
        axes.legend(handles=list(handles), loc="center left", bbox_to_anchor=(1.01, 0.5), borderaxespad=0.0)


def legend_below(figure: Figure, handles: Sequence[Any], columns: int) -> None:
    """A legend under all panels."""
    if handles:
        figure.legend(handles=list(handles), loc="outside lower center", ncols=columns)


def count_axis(axes: Axes, values: Any, label: str, which: str = "x", labels: int = 8) -> None:
    """A logarithmic axis of counts around the positive ones of ``values``, labelled 1k, 2k, 5k, ...

    labels: about how many tick labels there is room for.
    """
    axis = axes.xaxis if which == "x" else axes.yaxis
    getattr(axes, f"set_{which}scale")("log")
    getattr(axes, f"set_{which}label")(label)
    positive = np.asarray(values, dtype=np.float64)
    positive = positive[np.isfinite(positive) & (positive > 0)]
    low, high = (float(positive.min()), float(positive.max())) if len(positive) else (1e3, 1e5)
    room = max((high / low) ** 0.03, 1.04)
    getattr(axes, f"set_{which}lim")(low / room, high * room)
    decades = np.log10(high / low) + 0.1
    subs = next((subs for subs in ((1.0, 2.0, 5.0), (1.0, 3.0)) if decades * len(subs) <= labels), (1.0,))
    axis.set_major_locator(LogLocator(base=10.0, subs=subs, numticks=30))
    axis.set_major_formatter(FuncFormatter(lambda value, _position: short_count(value)))
    axis.set_minor_formatter(NullFormatter())
    axis.set_minor_locator(NullLocator())


def doubling_axis(axes: Axes, values: Sequence[int], label: str, which: str = "y") -> None:
    """A logarithmic axis with a tick at each of some values, as of n or of B_p."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    getattr(axes, f"set_{which}scale")("log", base=2)
    getattr(axes, f"set_{which}label")(label)
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(FixedFormatter([str(value) for value in values]))
    axis.set_minor_locator(NullLocator())
    getattr(axes, f"set_{which}lim")(min(values) / 1.5, max(values) * 1.5)


def say(axes: Axes, words: str) -> None:
    """A remark in the upper left corner of the axes."""
    axes.text(0.02, 0.97, words, transform=axes.transAxes, va="top", color=MUTED, style="italic", fontsize=9)


def over_seeds(
    history: pd.DataFrame, columns: Sequence[str], panels: int = 1
) -> Iterator[tuple[int, int, pd.DataFrame]]:
    """n, B_p and the means over seeds at each evaluated step, by compute, of each allocation.

    Only the seeds that got furthest are averaged, so that a mean does not jump where another seed ends. Where
    all the allocations' lines in so many panels would make a large file, every second, third ... row is drawn.
    """
    keys = ["rollouts_per_problem", "problems_per_batch"]
    groups = history.groupby(keys, sort=True)
    most = max(_LEAST_ROWS, _ROWS // max(1, groups.ngroups * panels))
    for (n, problems), rows in groups:
        furthest = rows[rows["cell"].isin(furthest_cells(rows))]
        means = furthest.groupby("step")[["compute_rollouts", *columns]].mean().reset_index()
        yield int(n), int(problems), means.iloc[:: -(-len(means) // most)]


def furthest_cells(rows: pd.DataFrame) -> list[str]:
    """The cells that have the last of the steps in some rows."""
    return sorted(rows.loc[rows["step"] == rows["step"].max(), "cell"].unique())


def svg_bytes(figure: Figure) -> bytes:
    """A figure as a stand-alone SVG file; equal figures give equal bytes."""
    return _saved(FigureCanvasSVG(figure).print_svg, figure, {"Date": None})


def pdf_bytes(figure: Figure) -> bytes:
    """A figure as a PDF file; equal figures give equal bytes."""
    return _saved(FigureCanvasPdf(figure).print_pdf, figure, {"CreationDate": None})


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


def _saved(write: Callable[..., object], figure: Figure, metadata: dict[str, Any]) -> bytes:
    """The same bytes as ``figure.savefig``, which draws everything twice: to arrange the panels and to write them."""
    buffer = io.BytesIO()
    with rc_context(STYLE):
        figure.set_dpi(STYLE["savefig.dpi"])
        write(buffer, metadata=metadata)
    return buffer.getvalue()
