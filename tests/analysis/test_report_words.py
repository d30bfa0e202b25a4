"""The verdict in words, from analyses made by hand."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from analysis.diagnostics.diagnosis import Diagnosis, diagnose, score_noise
from analysis.diagnostics.overfitting import overfitting_onset
from analysis.findings import Analysis, analyse
from analysis.fitting.frontier import Crossover, FrontierPoint
from analysis.fitting.law import LawFit
from analysis.fitting.verdict import Form, LawVerdict
from analysis.options import FitOptions
from analysis.report.words import (
    best_n_words,
    end_words,
    epoch_words,
    form_words,
    held_out_words,
    interval_words,
    law_words,
    overfitting_words,
    sensitivity_words,
    verdict,
    view_words,
)
from analysis.synthetic import FLAT, SyntheticGrid, synthetic_grid

LAW = LawVerdict(
    fit=LawFit(6.0, 5.0, 6.0, 3.0, 1.5, 50, (), "log10"),
    intervals={"rise": (5.5, 6.5), "midpoint": (5.9, 6.1), "log2_plateau": (8.0, 10.0)},
    forms=(),
    reasons=(),
    notes=("the fit rests on a bound: k at its upper bound 50",),
    plateau_identified=True,
    floor_identified=True,
)


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    """Two B_p, three n, two seeds."""
    design = SyntheticGrid(
        problems_per_batch=(32, 64), rollouts_per_problem=(8, 32, 128), seeds=(0, 1), validation_problems=60
    )
    return analyse(synthetic_grid(design, np.random.default_rng(0)), FitOptions(replicates=40))


def point(
    compute: float, n: int, not_worse: tuple[int, ...] | None, compared: tuple[int, ...] = (8, 32)
) -> FrontierPoint:
    return FrontierPoint(compute, 0.75, (0.7, 0.8), n, (8.0, 32.0), 64, compared, not_worse)


def with_frontier(analysis: Analysis, points: list[FrontierPoint], changes: list[Crossover]) -> Analysis:
    first = replace(analysis.frontier, points=points, changes=changes)
    return replace(analysis, frontiers=[first, *analysis.frontiers[1:]])


def test_changes_of_n_are_told_with_their_intervals_and_apart_from_changes_of_coverage(
    analysis: Analysis,
) -> None:
    changes = [
        Crossover(1e6, (5e5, 2e6), 8, 32, 64, "crossing"),
        Crossover(2e6, None, 32, 128, 64, "crossing"),
        Crossover(4e6, None, 128, 8, 64, "coverage"),
    ]
    told = best_n_words(with_frontier(analysis, [point(1e5, 8, (8,)), point(5e6, 128, (128,))], changes))
    assert told == [
        "The best n changes with compute (C in rollouts): from 8 to 32 at C = 1M (500k to 2M) and from 32 to 128 at "
        "C = 2M (uncertain: fewer than 9 in 10 replicates cross).",
        "n* also changes at C = 4M (128 to 8), where an allocation's evaluations begin or end: that says nothing about "
        "which n is better.",
    ]


def test_one_leader_throughout_is_called_so(analysis: Analysis) -> None:
    told = best_n_words(with_frontier(analysis, [point(1e5, 8, (8,)), point(2e6, 8, (8,))], []))
    assert told == [
        "No two curves of different n cross between C = 100k to 2M rollouts; the leader there is n = 8."
    ]
    alone = best_n_words(with_frontier(analysis, [point(1e5, 8, (8,), (8,))], []))
    assert alone == ["No two values of n were observed at the same C, so they cannot be compared."]


def test_rivals_at_the_largest_contested_compute_are_named(analysis: Analysis) -> None:
    lone = point(4e6, 8, (8,), (8,))
    (told,) = end_words(with_frontier(analysis, [point(1e6, 8, (8,)), point(2e6, 32, (8, 32)), lone], []))
    assert told == (
        "At C = 2M rollouts, the largest at which several n were compared, the best is n = 32 with B_p = 64: "
        "avg@4 0.750 (0.700 to 0.800). It cannot be told from n = 8 there."
    )
    (told,) = end_words(with_frontier(analysis, [point(2e6, 32, (32,))], []))
    assert told.endswith("Taken by itself, this compute tells every other n compared there from it.")
    (told,) = end_words(with_frontier(analysis, [point(2e6, 32, None)], []))
    assert told.endswith("avg@4 0.750 (0.700 to 0.800).")


def test_a_law_is_told_in_doublings_and_as_floor_and_plateau() -> None:
    assert law_words(LAW, "tokens") == [
        "The allocation law is identified: log2 n* rises by L = 6.00 (5.50 to 6.50) doublings, half of them by "
        "C0 = 1M tokens (794k to 1.26M).",
        "Beyond that, n* levels at a plateau of 512 (256 to 1024).",
        "At small C, n* levels at a floor of 8.",
        "The fit rests on a bound: k at its upper bound 50.",
    ]


def test_a_law_without_plateau_and_floor_does_not_show_them() -> None:
    law = replace(
        LAW, plateau_identified=False, floor_identified=False, notes=("plateau not identified: edge",)
    )
    told = law_words(law, "rollouts")
    assert len(told) == 2
    assert told[-1] == "Plateau not identified: edge."
    unidentified = replace(LAW, fit=None, reasons=("two n only",))
    assert law_words(unidentified, "rollouts") == ["The law is not identified: two n only."]


def test_forms_are_compared_by_their_distance_in_aicc() -> None:
    forms = (
        Form("log-linear", 2, 3.0, 10.0, 0.75),
        Form("sigmoid", 4, 2.0, 14.5, 0.25),
        Form("flat", 1, 9.0, 50.0, 0.0),
    )
    assert form_words(forms) == [
        "A straight line in log C describes n* best by AICc, which weighs the fit against the number of parameters: "
        "a sigmoid is 4.5 behind and a constant n is 40 behind (10 or more: hardly tenable). "
        "It is also the best in 75% of the bootstrap replicates."
    ]
    assert form_words(()) == []


def test_intervals_say_what_they_hold_and_what_they_lack(analysis: Analysis) -> None:
    told = interval_words(analysis)
    assert told[0] == (
        "Intervals are central 90% of 40 bootstrap replicates; they hold the luck of which seeds were trained and of "
        "which problems the validation set holds."
    )
    lacking = replace(analysis.resampling, over_seeds=False, missing=("seeds: one each",))
    assert interval_words(replace(analysis, resampling=lacking))[1:] == [
        "The intervals lack seeds: one each."
    ]
    nothing = replace(lacking, problem_weights=None)
    assert interval_words(replace(analysis, resampling=nothing)) == [
        "There are no intervals: one seed per allocation and no per-problem scores; give eval_right or more seeds."
    ]


def test_views_that_differ_are_named_with_their_budget(analysis: Analysis) -> None:
    table = pd.DataFrame(
        {
            "compute": [1e5, 2e5, 4e5],
            "all_points": pd.array([8, 8, 32], dtype="Int64"),
            "record_points": pd.array([8, pd.NA, 32], dtype="Int64"),
            "isotonic": pd.array([8, 8, 128], dtype="Int64"),
        }
    )
    differing = replace(analysis, views=replace(analysis.views, table=table))
    ways = "The views by all points, record-breaking points and isotonic regression"
    assert view_words(differing) == [
        f"{ways} agree at 2 of 3 budgets and differ at C = 400k (32 against 128 by isotonic regression)."
    ]
    agreeing = replace(analysis, views=replace(analysis.views, table=table.iloc[:2]))
    assert view_words(agreeing) == [f"{ways} name the same n* at each of the 2 budgets of the table."]


def test_the_held_out_check_is_told_in_points_and_doublings(analysis: Analysis) -> None:
    assert analysis.held_out is not None
    table = pd.DataFrame(
        {
            "compute": [3e6, 8e6],
            "n_star": [32, 64],
            "n_by_curves": [32, 128],
            "reward": [0.6, 0.7],
            "reward_by_curves": [0.61, 0.73],
            "regret": [0.0, 0.015],
        }
    )
    told = held_out_words(replace(analysis, held_out=replace(analysis.held_out, fitted_to=2e6, table=table)))
    assert told == [
        "Held-out check: curves fitted to C <= 2M and extrapolated to 8M miss the best reward by 2.0 points and n* by "
        "0.5 doublings on average; training with the predicted allocation would have lost 1.5 points at most."
    ]
    (told,) = [held_out_words(replace(analysis, held_out=None))]
    assert "fewer than two allocations have 4 evaluations up to 25% of the largest C" in told[0]


def sensitivities(diagnosis: Diagnosis, low: float) -> Diagnosis:
    table = pd.DataFrame(
        {
            "quantity": ["within_n", "within_problems", "best_n"],
            "points": [9.2, 1.9, 5.0],
            "low": [low, low, low],
            "high": [10.0, 2.5, 6.0],
            "noise": [0.5, 0.6, 0.7],
            "noise_high": [1.0, 2.0, 1.0],
        }
    )
    return replace(diagnosis, sensitivity=table, compared_at=8e6)


def test_the_choices_are_weighed_in_points_against_noise(analysis: Analysis) -> None:
    diagnosis = diagnose(analysis)
    assert sensitivity_words(analysis, sensitivities(diagnosis, 1.0)) == [
        "At C = 8M rollouts, the choice of n, at equal B_p, moves avg@4 by 9.2 points (1.0 to 10.0), beyond the 1.0 that "
        "noise shows among equal allocations and the choice of B_p, at equal n, moves avg@4 by 1.9 points (1.0 to 2.5), "
        "no more than the 2.0 that noise shows among equal allocations."
    ]
    (told,) = sensitivity_words(analysis, sensitivities(diagnosis, np.nan))
    assert "noise" not in told


def test_epochs_are_told_for_a_larger_n_that_takes_over(analysis: Analysis) -> None:
    up, down = Crossover(1e6, None, 8, 32, 64, "crossing"), Crossover(2e6, None, 32, 8, 64, "crossing")
    (told,) = epoch_words(replace(diagnose(analysis), epochs={up: 1.25, down: 7.0}))
    assert (
        told == "A larger n takes over after 1.2 epochs (passes over the training problems) of its own run."
    )


def test_cells_whose_score_has_fallen_are_named_and_chance_is_told() -> None:
    rows = pd.DataFrame(
        {
            "cell": [f"bp8-n{n}-s0" for n in (2, 4, 8)],
            "verdict": ["overfits", "no fall", "unknown"],
            "reason": ["", "", "3 evaluated rows; a verdict needs 4"],
            "drop_at_least": [0.031, np.nan, np.nan],
            "onset_compute": [5000.0, np.nan, np.nan],
        }
    )
    assert overfitting_words(rows) == [
        "In 1 of 3 cells validation has fallen by more than noise while training has not (overfitting): bp8-n2-s0 "
        "(by 3.1 points or more after C = 5k).",
        "By chance alone about 0.1 of 2 cells would be named so.",
    ]
    assert overfitting_words(rows.iloc[2:]) == [
        "Overfitting cannot be judged: 3 evaluated rows; a verdict needs 4."
    ]
    assert overfitting_words(rows.iloc[1:2]) == [
        "In none of 1 cells has the validation score fallen from its best by more than noise."
    ]
    assert overfitting_words(overfitting_onset(pd.DataFrame(columns=["cell"]), "avg_at_4")) == []


def test_a_flat_truth_is_not_given_a_law() -> None:
    design = replace(FLAT, problems_per_batch=(64,), seeds=(0,), validation_problems=150)
    flat = analyse(synthetic_grid(design, np.random.default_rng(1)), FitOptions(replicates=60))
    topics = verdict(flat, diagnose(flat))
    assert topics["Law"][0].startswith("The law is not identified")


def test_the_noise_of_a_score_is_that_of_its_answers(analysis: Analysis) -> None:
    cell = analysis.groups[0].of_cell(0)
    right = np.array([[0, 2, 4], [1, 1, 3]])
    few = replace(cell, scores=right / 4)
    # sum of r (1 - r): 1/4 and 3 * 3/16; divided by (K - 1) P^2 = 27; the root of their mean.
    assert score_noise(few, "avg_at_4") == pytest.approx(np.sqrt((0.25 + 9 / 16) / 2 / 27))
    assert score_noise(few, "best_at_4") is None
    assert score_noise(few, "avg_at_1") is None
    assert score_noise(replace(cell, scores=None), "avg_at_4") is None
