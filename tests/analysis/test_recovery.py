"""A small, fixed part of ``benchmarks/recovery.py``: the intervals of a few synthetic grids hold the known truth, and truths
that no grid can tell are called what they are. At one B_p and with fixed seeds, so that it takes seconds."""

from dataclasses import replace

import numpy as np
import pytest

from analysis.findings import Analysis, analyse
from analysis.options import FitOptions
from analysis.synthetic import (
    BEYOND_THE_EDGE,
    FLAT,
    ONE_N,
    PAPER_LAW,
    SyntheticGrid,
    synthetic_grid,
    true_grid,
)

AT_THE_BEST_B_P = replace(SyntheticGrid(), problems_per_batch=(64,))
GRIDS = 5


def analysed(design: SyntheticGrid, seed: int) -> Analysis:
    design = replace(design, problems_per_batch=(64,))
    return analyse(synthetic_grid(design, np.random.default_rng(seed)), FitOptions(replicates=100, seed=seed))


@pytest.fixture(scope="module")
def noisy() -> list[Analysis]:
    return [analysed(AT_THE_BEST_B_P, seed) for seed in range(GRIDS)]


def test_without_noise_the_law_comes_back_up_to_the_rounding_of_n() -> None:
    law = analyse(true_grid(AT_THE_BEST_B_P), FitOptions(replicates=0)).frontier.law
    assert law.fit is not None
    assert law.plateau_identified
    # n* takes powers of two: its plateau is 512 = 2^9 where the law's is 2^8.82.
    assert law.fit.rise + law.fit.log2_floor == pytest.approx(9.0, abs=0.1)
    assert law.fit.midpoint == pytest.approx(PAPER_LAW.log10_midpoint, abs=0.06)


def test_most_intervals_hold_the_truth_that_the_analysis_finds_without_noise(noisy: list[Analysis]) -> None:
    truth = analyse(true_grid(AT_THE_BEST_B_P), FitOptions(replicates=0)).frontier
    assert truth.law.fit is not None
    plateau, midpoint, n_star = [], [], []
    for frontier in (analysis.frontier for analysis in noisy):
        low, high = frontier.law.intervals["log2_plateau"]
        plateau.append(low <= truth.law.fit.rise + truth.law.fit.log2_floor <= high)
        low, high = frontier.law.intervals["midpoint"]
        midpoint.append(low <= truth.law.fit.midpoint <= high)
        for point, true_point in zip(frontier.points, truth.points, strict=True):
            assert point.rollouts_per_problem_interval is not None
            low, high = point.rollouts_per_problem_interval
            n_star.append(low <= true_point.rollouts_per_problem <= high)
    # At a coverage of 90 %, 4 or 5 of 5 hold it in 92 % of all draws; this draw is fixed.
    assert sum(plateau) >= GRIDS - 1
    assert sum(midpoint) >= GRIDS - 1
    assert np.mean(n_star) >= 0.85


def test_intervals_are_narrow_enough_to_say_something(noisy: list[Analysis]) -> None:
    for analysis in noisy:
        low, high = analysis.frontier.law.intervals["midpoint"]
        assert 0.0 < high - low < 0.5  # decades, of the 2.4 that were observed
        low, high = analysis.frontier.law.intervals["log2_plateau"]
        assert 0.0 < high - low < 2.5  # doublings, of the 7 that the grid spans


def test_a_flat_truth_has_no_law() -> None:
    law = analysed(FLAT, seed=1).frontier.law
    assert not law.identified
    assert "flat" in law.text


def test_a_truth_that_rises_beyond_the_grid_has_no_plateau() -> None:
    law = analysed(BEYOND_THE_EDGE, seed=1).frontier.law
    assert not law.plateau_identified
    assert any(note.startswith("plateau not identified") and "edge of the grid" in note for note in law.notes)


def test_one_n_alone_has_no_law() -> None:
    law = analysed(ONE_N, seed=1).frontier.law
    assert not law.identified
    assert "1 value of n (64)" in law.text
