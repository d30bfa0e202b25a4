"""Other views of the frontier, and the check on budgets that a fit was not shown."""

import numpy as np
import pandas as pd
import pytest

from analysis.findings import Analysis, analyse
from analysis.options import FitOptions
from tests.analysis.conftest import Sigmoid, cell_rows, sigmoid, tables_of

FAST: Sigmoid = (0.3, 0.6, 2000.0, 1.0)
HIGH: Sigmoid = (0.3, 0.7, 5000.0, 1.0)
"""Crosses FAST at C = 7000."""
NO_INTERVALS = FitOptions(replicates=0)


def analysed(*cells: pd.DataFrame, base: float | None = 0.3, options: FitOptions = NO_INTERVALS) -> Analysis:
    return analyse(tables_of(*cells, base=None if base is None else {"avg_at_4": base}), options)


def test_all_views_agree_on_curves_without_noise() -> None:
    views = analysed(cell_rows(4, FAST), cell_rows(16, HIGH)).views
    expected = [4 if compute < 7000 else 16 for compute in views.table["compute"]]
    for view in ("all_points", "record_points", "isotonic"):
        assert views.table[view].tolist() == expected


def test_a_lucky_evaluation_moves_the_views_that_trust_single_points() -> None:
    # n = 16 is better throughout; the last evaluation of n = 4 is an outlier.
    lucky = cell_rows(4, (0.3, 0.55, 2000.0, 1.0))
    lucky.loc[len(lucky) - 1, "avg_at_4"] = 0.75
    views = analysed(lucky, cell_rows(16, (0.3, 0.65, 2000.0, 1.0), problems=4)).views
    last = views.table.iloc[-1]
    assert last["all_points"] == 16
    assert last["isotonic"] == 4
    record = views.record_frontier.iloc[-1]
    assert (record["rollouts_per_problem"], record["reward"]) == (4, 0.75)


def test_the_record_frontier_holds_the_rising_maxima_of_all_evaluations() -> None:
    cells = [cell_rows(4, FAST), cell_rows(16, HIGH)]
    found = analysed(*cells).views.record_frontier
    everything = pd.concat(cells).sort_values("compute_rollouts")
    bins, best = [], -1
    for compute, reward in zip(everything["compute_rollouts"], everything["avg_at_4"], strict=True):
        if int(reward / 0.01) > best:
            best = int(reward / 0.01)
            bins.append(compute)
    assert found["compute"].tolist() == bins
    assert (found["reward"].diff().dropna() > 0).all()


def test_the_law_of_the_record_frontier_knows_the_n_that_broke_no_record() -> None:
    # n = 8 and 32 never lead; the grid nevertheless holds four values.
    low: Sigmoid = (0.3, 0.32, 2000.0, 1.0)
    found = analysed(cell_rows(4, FAST), cell_rows(16, HIGH), cell_rows(8, low), cell_rows(32, low))
    assert "n* takes 2 values (4, 16)" in found.views.law_of_record_frontier.text
    assert "the fitted cells hold" not in found.views.law_of_record_frontier.text


def test_where_nothing_was_evaluated_no_view_has_a_value() -> None:
    early = cell_rows(4, FAST, marks=1000 * 2.0 ** np.arange(4))
    late = cell_rows(16, HIGH, marks=64_000 * 2.0 ** np.arange(4))
    table = analysed(early, late).views.table.set_index("compute")
    assert table.loc[16_384.0].isna().all()
    assert (table.loc[4096.0, "all_points"], table.loc[131_072.0, "all_points"]) == (4, 16)


def test_the_held_out_check_is_exact_on_curves_without_noise() -> None:
    marks = 1000 * 2.0 ** np.arange(0, 8, 0.25)
    check = analysed(cell_rows(4, FAST, marks=marks), cell_rows(16, HIGH, marks=marks)).held_out
    assert check is not None
    assert check.allocations == 2
    end = 1000 * 2.0**7.75
    assert check.fitted_to == pytest.approx(end / 4, rel=0.01)
    assert (check.table["compute"] > check.fitted_to).all()
    assert check.table["compute"].iloc[-1] == pytest.approx(end, rel=0.01)
    expected = sigmoid(check.table["compute"], *HIGH)
    assert check.table["reward"].to_numpy() == pytest.approx(expected, abs=1e-4)
    assert check.table["reward_by_curves"].to_numpy() == pytest.approx(expected, abs=2e-3)
    assert check.table["regret"].to_numpy() == pytest.approx(0.0, abs=1e-9)
    assert check.reward_error is not None and check.reward_error < 2e-3
    assert check.doublings_error == 0.0


def test_the_held_out_check_counts_what_a_late_bloomer_costs() -> None:
    # Up to a quarter of the budget n = 16 looks level; then it takes off.
    late = cell_rows(16, FAST)
    compute = late["compute_rollouts"]
    late["avg_at_4"] = np.where(compute < 60_000, 0.3, 0.8)
    check = analysed(cell_rows(4, FAST), late).held_out
    assert check is not None
    last = check.table.iloc[-1]
    assert (last["n_by_curves"], last["n_star"]) == (4, 16)
    assert last["regret"] == pytest.approx(0.8 - float(sigmoid(last["compute"], *FAST)), abs=0.02)
    assert check.doublings_error is not None and check.doublings_error > 0


@pytest.mark.parametrize("options", [NO_INTERVALS, FitOptions(replicates=0, held_out=1e-4)])
def test_no_held_out_check_where_fewer_than_two_allocations_reach_into_it(options: FitOptions) -> None:
    cells = [cell_rows(4, FAST)] if options.held_out == 0.25 else [cell_rows(4, FAST), cell_rows(16, HIGH)]
    assert analysed(*cells, options=options).held_out is None


def test_an_allocation_that_stopped_early_is_chosen_without_a_gain_from_it() -> None:
    # n = 16 stopped at a third of the budget: what it would have reached later was never seen.
    stopped = cell_rows(16, (0.3, 0.9, 2000.0, 1.0), marks=1000 * 2.0 ** np.arange(0, 5.5, 0.5))
    check = analysed(cell_rows(4, FAST), stopped).held_out
    assert check is not None
    assert not (check.table["regret"] < -1e-9).any()
