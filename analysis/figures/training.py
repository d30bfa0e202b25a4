"""What training did besides the validation score: pass rates, tokens, health and overfitting."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.diagnostics.diagnosis import Diagnosis
from analysis.diagnostics.overfitting import train_validation_gap
from analysis.diagnostics.training import (
    BASE_CELL,
    HEALTH_COLUMNS,
    ProbeHistograms,
    tokens_per_rollout,
    training_health,
)
from analysis.figures.style import (
    B_P,
    INK,
    LAW,
    MUTED,
    SMALL,
    Look,
    canvas,
    count_axis,
    furthest_cells,
    legend_below,
    looks,
    n_handles,
    over_seeds,
    plain,
)
from analysis.findings import Analysis, short_count
from analysis.fitting.logistic import Array
from analysis.tables import compute_label, metric_label

_STAGES = (("#c4c4c4", ""), ("#5fa3b5", "///"), ("#2b3f6b", ""))  # base, middle, end
_HEALTH_WORDS = {
    "zero_variance_right": "groups all right (share)",
    "zero_variance_wrong": "groups all wrong (share)",
    "entropy": "entropy (nats)",
    "response_tokens": "answer length (tokens)",
    "kl": "KL to the base model (nats)",
    "truncated": "answers cut at the limit (share)",
}
_ROLLOUTS = compute_label("rollouts")
_CELLS = 6  # of the overfitting figure


def histograms_figure(analysis: Analysis, diagnosis: Diagnosis) -> Figure | None:
    """How many probe problems are solved how often, at equal K: the base model, the middle and the end of
    training, for the smallest, the best and the largest n. None without a probe in the table.

    Of each n the allocation with the best final score is shown, as the mean over its seeds; the middle is the evaluation
    nearest to the geometric mean of the first and the last compute.
    """
    history, found = analysis.tables.history, diagnosis.histograms
    probed = history[history["cell"].isin(set(found.counts["cell"]))]
    shown = _typical(analysis, probed)
    if not shown:
        return None
    shapes = probed.drop_duplicates("cell").set_index("cell")[["problems_per_batch", "rollouts_per_problem"]]
    bars = np.arange(int(found.answers or 0) + 1)
    width = 0.8 / len(_STAGES)
    with canvas(1, len(shown), height=3.4, sharey=True) as (figure, panels):
        for axes, (words, cells) in zip(panels, shown, strict=True):
            for label, share, place in _stages(found, cells):
                color, hatch = _STAGES[place]
                look: dict[str, Any] = {
                    "facecolor": color,
                    "hatch": hatch,
                    "edgecolor": "white",
                    "linewidth": 0,
                }
                axes.bar(bars + (place - 1) * width, share, width, label=label, **look)
            problems, n = shapes.loc[cells[0]]
            axes.set_title(f"n = {n}, {B_P} = {problems}\n{words} n")
            axes.set_xlabel(f"right answers of {bars[-1]}")
            axes.set_xticks(bars[:: max(1, -(-len(bars) // 9))])
            axes.grid(visible=False, axis="x")
            axes.legend(fontsize=SMALL, handlelength=1.0, loc="upper left")
            axes.margins(y=0.45)
        panels[0].set_ylabel(f"share of {found.problems} probe problems")
    return figure


def tokens_figure(analysis: Analysis) -> Figure | None:
    """Generated tokens against rollouts, and their ratio, for each allocation, coloured by n. None without a
    token count in the table."""
    table = tokens_per_rollout(analysis.tables.history)
    if table.empty:
        return None
    look = looks(analysis)
    with canvas(1, 2, height=3.8) as (figure, (left, right)):
        values = set()
        for n, _problems, rows in over_seeds(table, ["compute_tokens", "tokens_per_rollout"], 2):
            style = _line_style(look[n], len(rows))
            left.plot(rows["compute_rollouts"], rows["compute_tokens"], **style)
            right.plot(rows["compute_rollouts"], rows["tokens_per_rollout"], **style)
            values.add(n)
        count_axis(left, table["compute_rollouts"], _ROLLOUTS, labels=5)
        count_axis(right, table["compute_rollouts"], _ROLLOUTS, labels=5)
        count_axis(left, table["compute_tokens"], "generated tokens", which="y")
        right.set_ylabel("tokens per rollout so far")
        legend_below(figure, n_handles(sorted(values), look), columns=5)
    return figure


def training_figure(analysis: Analysis) -> Figure | None:
    """Shares of groups without a signal (all right, all wrong), entropy, answer length, KL and cut answers
    against compute, as far as the table has them; means over seeds, coloured by n. None without any of them."""
    table = training_health(analysis.tables.history)
    present = [name for name in _HEALTH_WORDS if name in HEALTH_COLUMNS and name in table.columns]
    if not present:
        return None
    look = looks(analysis)
    columns = min(3, len(present))
    rows_of_panels = -(-len(present) // columns)
    with canvas(rows_of_panels, columns, height=0.7 + 2.4 * rows_of_panels, sharex=True) as (figure, panels):
        for axes, name in zip(panels, present, strict=False):
            axes.set_title(_HEALTH_WORDS[name])
        for n, _problems, rows in over_seeds(table, present, len(present)):
            for axes, name in zip(panels, present, strict=False):
                seen = rows[rows[name].notna()]
                axes.plot(seen["compute_rollouts"], seen[name], **_line_style(look[n], len(seen)))
        _label_compute(panels, table["compute_rollouts"], len(present), columns)
        legend_below(figure, n_handles(sorted(look), look), columns=5)
    return figure


def overfitting_figure(analysis: Analysis, diagnosis: Diagnosis) -> Figure | None:
    """Training and validation scores against compute of up to six cells whose validation score falls, largest
    fall first, with the onset marked; of the smallest, best and largest n where none falls. None without a training
    score beside the validation score.
    """
    tables, metric = analysis.tables, analysis.metric
    gap = train_validation_gap(tables.history, metric)
    if gap.empty:
        return None
    onsets = diagnosis.overfitting
    falling = onsets[onsets["onset_compute"].notna() & onsets["cell"].isin(gap["cell"])]
    falling = falling.sort_values("drop", ascending=False, kind="stable")
    cells = list(falling["cell"].head(_CELLS))
    if not cells:
        rows = tables.history[tables.history["cell"].isin(set(gap["cell"]))]
        cells = [own[0] for _words, own in _typical(analysis, rows)]
    look = looks(analysis)
    shown = gap[gap["cell"].isin(cells)]
    columns = min(3, len(cells))
    rows_of_panels = -(-len(cells) // columns)
    with canvas(rows_of_panels, columns, height=1.0 + 2.3 * rows_of_panels, sharex=True, sharey=True) as (
        figure,
        panels,
    ):
        for axes, cell in zip(panels, cells, strict=False):
            _draw_gap(axes, gap[gap["cell"] == cell], look)
            verdict = falling[falling["cell"] == cell]
            words = "no fall"
            if len(verdict):
                onset = verdict.iloc[0]
                axes.axvline(
                    max(onset["onset_compute"], axes.get_xlim()[0]), color=LAW, linewidth=1.4, linestyle="--"
                )
                words = f"{onset['verdict']}, -{100 * onset['drop']:.1f} points"
            axes.set_title(f"{plain(cell)}\n{words}", fontsize=9)
        _label_compute(panels, shown["compute_rollouts"], len(cells), columns)
        for axes in panels[::columns]:
            axes.set_ylabel("score")
        training = " or ".join(sorted({_training_words(name) for name in shown["training_column"]}))
        handles = [
            Line2D([], [], color=INK, label=f"validation ({plain(metric_label(metric))})"),
            Line2D([], [], color=MUTED, linestyle=":", label=training),
        ]
        if len(falling):
            handles.append(
                Line2D([], [], color=LAW, linestyle="--", linewidth=1.4, label="onset of the fall")
            )
        legend_below(figure, handles, columns=3)
    return figure


def _line_style(look: Look, rows: int) -> dict[str, Any]:
    """A thin line of one allocation, with one mark of its n."""
    return {
        **look,
        "linewidth": 0.9,
        "alpha": 0.85,
        "markersize": 3.0,
        "markerfacecolor": "white",
        "markeredgewidth": 0.8,
        "markevery": (rows // 2, max(rows, 1)),
    }


def _training_words(column: str) -> str:
    prefix = "train_probe_"
    return (
        f"training probe ({plain(metric_label(column.removeprefix(prefix)))})"
        if column.startswith(prefix)
        else "training reward"
    )


def _draw_gap(axes: Axes, rows: pd.DataFrame, look: dict[int, Look]) -> None:
    color = look[int(rows["rollouts_per_problem"].iloc[0])]["color"]
    axes.plot(
        rows["compute_rollouts"], rows["validation"], color=color, marker=".", markersize=4, linewidth=1.2
    )
    axes.plot(rows["compute_rollouts"], rows["training"], color=MUTED, linestyle=":", linewidth=1.4)


def _label_compute(panels: Sequence[Axes], compute: pd.Series, used: int, columns: int) -> None:
    """Compute axes of small multiples: words below the lowest used panel of each column, unused panels off."""
    for index, axes in enumerate(panels):
        count_axis(axes, compute, "", labels=4)
        if index >= used:
            axes.set_axis_off()
        elif index + columns >= used:
            axes.set_xlabel(_ROLLOUTS)
            axes.tick_params(labelbottom=True)


def _typical(analysis: Analysis, rows: pd.DataFrame) -> list[tuple[str, list[str]]]:
    """The smallest, the best and the largest n among some rows of the history, each with the furthest cells of
    the allocation of that n that scores best at its last evaluation.

    Best is n* at the frontier's end; an n that plays two parts is listed once.
    """
    metric = analysis.metric
    rows = rows[rows[metric].notna()] if metric in rows else rows.iloc[:0]
    if rows.empty:
        return []
    values = sorted({int(n) for n in rows["rollouts_per_problem"]})
    parts = {values[0]: "smallest", values[-1]: "largest"}
    points = analysis.frontier.points
    best = points[-1].rollouts_per_problem if points else None
    if best in values:
        parts[best] = f"{parts[best]}, best" if best in parts else "best"
    found = []
    for n in sorted(parts):
        own = rows[rows["rollouts_per_problem"] == n]
        last = own[own["step"] == own.groupby("problems_per_batch")["step"].transform("max")]
        problems = last.groupby("problems_per_batch")[metric].mean().idxmax()
        found.append((parts[n], furthest_cells(own[own["problems_per_batch"] == problems])))
    return found


def _stages(found: ProbeHistograms, cells: Sequence[str]) -> list[tuple[str, Array, int]]:
    """Label, share of problems by number of right answers (K + 1,) and place in ``_STAGES`` of the base model, the
    middle and the end, as far as they are there."""
    counts = found.counts.assign(share=found.counts["problems"] / float(found.problems or 1))
    counts["share"] = counts["share"].astype(float)
    mine = counts[counts["cell"].isin(cells)]
    computes = np.unique(mine["compute_rollouts"].to_numpy(dtype=np.float64))
    stages = {}
    if len(computes) > 2:
        halfway = np.log(computes[0] * computes[-1]) / 2.0
        stages[1] = float(computes[np.abs(np.log(computes) - halfway).argmin()])
    stages[2] = float(computes[-1])
    shares = [
        (f"C = {short_count(compute)}", mine[mine["compute_rollouts"] == compute], place)
        for place, compute in stages.items()
    ]
    base = counts[counts["cell"] == BASE_CELL]
    if len(base):
        shares.insert(0, ("base model", base, 0))
    return [(label, rows.groupby("right")["share"].mean().to_numpy(), place) for label, rows, place in shares]
