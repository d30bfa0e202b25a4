"""Figures of a study: one kind for each that the paper publishes. ``FIGURES`` lists them in the report's order."""

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from analysis.diagnostics.diagnosis import Diagnosis
from analysis.figures.frontiers import frontier_figure, joint_figure
from analysis.figures.n_star import fixed_batch_figure, n_star_figure
from analysis.figures.pools import pools_figure
from analysis.figures.scores import metrics_figure, sensitivity_figure
from analysis.figures.style import inline_svg, pdf_bytes, svg_bytes
from analysis.figures.training import histograms_figure, overfitting_figure, tokens_figure, training_figure
from analysis.findings import Analysis

__all__ = ["FIGURES", "FigureKind", "inline_svg", "pdf_bytes", "svg_bytes"]


@dataclass(frozen=True)
class FigureKind:
    """One kind of figure. Titles and captions are plain text without markup."""

    key: str
    """Stem of its files."""
    title: str
    caption: str
    """What is drawn and how to read it."""
    needs: str
    """Said in the figure's place when it cannot be drawn."""
    draw: Callable[[Analysis, Diagnosis], Figure | None]
    """From an analysis and its own diagnosis; None when the data has not what the figure needs."""


def _of_analysis(draw: Callable[[Analysis], Figure | None]) -> Callable[[Analysis, Diagnosis], Figure | None]:
    """A figure that needs no diagnosis."""
    return lambda analysis, _diagnosis: draw(analysis)


FIGURES = (
    FigureKind(
        "frontier",
        "Reward against compute",
        "Points are evaluations, lines the fitted curves inside observed compute; the broad grey line is the frontier, the "
        "best that any allocation reaches at each compute. In a large grid points are means over seeds, thin lines single "
        "allocations, and each thick line is the best over B_p of one n.",
        "No allocation has enough evaluations for a curve yet.",
        _of_analysis(frontier_figure),
    ),
    FigureKind(
        "joint_frontier",
        "The frontier with n, B_p and M free",
        "The best reward at each compute, coloured by the n that attains it. Each label names the allocation (B_p, n) that "
        "takes the lead there; where changes crowd, only those that lead for longest are named.",
        "No allocation has enough evaluations for a curve yet.",
        _of_analysis(joint_figure),
    ),
    FigureKind(
        "n_star",
        "Compute-optimal n and its law",
        "The step line is n*(C), the band its interval, and dashes are values of n that cannot be told from the best; hollow "
        "marks rest on one n alone. Numbers and bars are the crossings and their intervals. If the views on the right part "
        "from the line, the choice of n* there depends on the method.",
        "No allocation has enough evaluations for a curve yet.",
        _of_analysis(n_star_figure),
    ),
    FigureKind(
        "fixed_batch",
        "n* against B_p* at a fixed batch",
        "With B = B_p n fixed, a larger n means fewer problems, so the panels mirror each other. The law is "
        "fitted in log M and, as published, in M.",
        "It needs two values of n with the same batch B = B_p n, and compute counted in rollouts.",
        _of_analysis(fixed_batch_figure),
    ),
    FigureKind(
        "metric_bars",
        "Best n at each B_p, by metric",
        "Bars are the n with the highest score near the end of compute: avg@K, best@K (coverage) and worst@K (sharpening). A "
        "star marks an n on the edge of what was tried at that B_p: the best may lie outside the grid.",
        "It needs two values of n at the same B_p that were evaluated at a common compute.",
        metrics_figure,
    ),
    FigureKind(
        "sensitivity",
        "What the choices of n and B_p are worth",
        "Bars are the range of the fitted reward when one choice varies and the other is equal, or is the best for each. The "
        "dashed frame is what equal allocations would show by noise: a bar inside it is no evidence. Noise pushes ranges "
        "up and the intervals correct for it, so an interval may lie below its bar's end.",
        "It needs two fitted allocations that differ in n or in B_p alone.",
        sensitivity_figure,
    ),
    FigureKind(
        "histograms",
        "Pass rates of the training probe",
        "How many problems of a fixed training probe are solved how often out of K, for the base model, half-way (in log C) "
        "and at the end. Problems that move to 0 are unlearned while others improve (interference). All bars are at the same K.",
        "It needs a training probe: train_probe_avg_at_K and train_probe_right in the table.",
        histograms_figure,
    ),
    FigureKind(
        "training",
        "Health of training",
        "Means over seeds of each allocation, coloured by n. Groups that are all right or all wrong give no gradient: where "
        "they become most of the batch, rollouts are wasted.",
        "It needs one of zero_variance_right, zero_variance_wrong, entropy, response_tokens, kl, truncated in the table.",
        _of_analysis(training_figure),
    ),
    FigureKind(
        "overfitting",
        "Training against validation",
        "Cells whose validation score falls by more than noise, largest fall first, with the onset marked; where no cell "
        "falls, the smallest, the best and the largest n. Overfitting is a fall of validation that training does not share.",
        "It needs a training score beside the validation score: train_probe_avg_at_K or train_reward in the table.",
        overfitting_figure,
    ),
    FigureKind(
        "tokens",
        "Rollouts against generated tokens",
        "Cumulative generated tokens, and tokens per rollout so far, of each allocation. Where the lines of n part, budgets in "
        "rollouts and in tokens rank allocations differently.",
        "It needs compute_tokens in the table.",
        _of_analysis(tokens_figure),
    ),
    FigureKind(
        "pools",
        "The pools at work",
        "What each member did over a stretch in the middle of the run: a bar for each call that it served, gaps where it had "
        "nothing to do. Where rows are full, cells fill each other's gaps. Of several sources the first with a record is shown.",
        "It needs phases on record in a run folder.",
        pools_figure,
    ),
)
"""Every kind, in the report's order."""
