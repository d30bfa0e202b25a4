"""Budgets as people write them, and what they pay for."""

import numpy as np
import pytest

from analysis.fitting.observations import Allocation, Observations
from analysis.prescribing.budgets import (
    budget_words,
    compute_for,
    parse_budget,
    rollouts_within,
    surely_pays_for,
)
from grids.errors import UserError


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("5M-rollouts", 5e6, "rollouts"),
        ("40k rollouts", 40e3, "rollouts"),
        ("5,000,000-rollouts", 5e6, "rollouts"),
        ("1_048_576-rollouts", 1048576, "rollouts"),
        ("5e6 rollouts", 5e6, "rollouts"),
        ("2B-tokens", 2e9, "tokens"),
        ("2.5G tokens", 2.5e9, "tokens"),
        ("1T tokens", 1e12, "tokens"),
        ("300-gpu-hours", 1_080_000, "accelerator_seconds"),
        ("1 GPU-hour", 3600, "accelerator_seconds"),
        ("0.5k-accelerator-hours", 1_800_000, "accelerator_seconds"),
        (" 90 accelerator seconds ", 90, "accelerator_seconds"),
    ],
)
def test_a_budget_is_an_amount_and_a_unit(text: str, amount: float, unit: str) -> None:
    budget = parse_budget(text)
    assert (budget.amount, budget.unit) == (pytest.approx(amount, rel=1e-12), unit)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5M",
        "rollouts",
        "5M-steps",
        "0-rollouts",
        "-5M-rollouts",
        "nan-tokens",
        "inf-tokens",
        "1e999-tokens",
        "5Mrollouts",
        "1,5M-rollouts",  # a decimal comma, not fifteen million
        "5X-rollouts",
        "5M-rollouts each",
    ],
)
def test_anything_else_is_refused_in_one_line_that_shows_the_forms(text: str) -> None:
    with pytest.raises(UserError) as error:
        parse_budget(text)
    message = str(error.value)
    assert message.startswith(f"--budget: {text!r}") and "\n" not in message
    assert all(form in message for form in ("5M-rollouts", "2B-tokens", "300-gpu-hours"))


def test_words_name_the_unit_that_people_count_in() -> None:
    assert budget_words(5e6, "rollouts") == "5M rollouts"
    assert budget_words(2.5e9, "tokens") == "2.5B tokens"
    assert budget_words(950, "rollouts") == "950 rollouts"
    assert budget_words(1_080_000, "accelerator_seconds") == "300 accelerator-hours"


@pytest.fixture
def two_cells() -> Observations:
    """Evaluated at 100 and 200 rollouts: after 1,000 and 3,000 tokens in one cell, 2,000 and 4,000 in the other."""
    return Observations(
        allocation=Allocation(rollouts_per_problem=4, problems_per_batch=5),
        cells=("bp5-n4-s0", "bp5-n4-s1"),
        seeds=(0, 1),
        cell_index=np.array([0, 0, 1, 1]),
        compute=np.array([1000.0, 3000.0, 2000.0, 4000.0]),
        rollouts=np.array([100.0, 200.0, 100.0, 200.0]),
        reward=np.full(4, 0.5),
        scores=None,
    )


@pytest.mark.parametrize(
    ("tokens", "rollouts"),
    [
        (500.0, (50 + 25) / 2),  # before the first evaluation: from nothing
        (2000.0, (150 + 100) / 2),
        (5000.0, (300 + 250) / 2),  # beyond the last: 100 rollouts for each 2,000 tokens, as at the end
    ],
)
def test_tokens_pay_for_the_mean_of_the_cells_rollouts(
    two_cells: Observations, tokens: float, rollouts: float
) -> None:
    assert rollouts_within(two_cells, tokens) == pytest.approx(rollouts)


def test_rollouts_cost_the_mean_of_the_cells_tokens(two_cells: Observations) -> None:
    assert compute_for(two_cells, 150) == pytest.approx((2000 + 3000) / 2)
    assert compute_for(two_cells, 300) == pytest.approx((5000 + 6000) / 2)


def test_the_dearest_cell_says_what_surely_pays(two_cells: Observations) -> None:
    assert surely_pays_for(two_cells, 100) == pytest.approx(2000)
    assert surely_pays_for(two_cells, 200) == pytest.approx(4000)
