"""Bootstrap weights: their mean, their variance, and what they share."""

import numpy as np
import pandas as pd
import pytest

from analysis.fitting.observations import BasePoint, Observations, observe
from analysis.fitting.resampling import Resampling, common_scores, plan_resampling
from tests.analysis.conftest import cell_rows

SHAPE = (0.3, 0.7, 8e3, 1.0)


def groups_of(*cells: pd.DataFrame) -> list[Observations]:
    return observe(pd.concat(cells, ignore_index=True), "avg_at_4", "compute_rollouts", with_scores=True)[0]


def planned(
    *cells: pd.DataFrame, base: BasePoint | None = None, replicates: int = 4000, seed: int = 0
) -> Resampling:
    return plan_resampling(groups_of(*cells), replicates, seed)


def scored(n: int, seed: int = 0, problems: int = 50) -> pd.DataFrame:
    draw = np.random.default_rng([n, seed])
    return cell_rows(n, SHAPE, seed=seed, draw=draw, validation_problems=problems)


def test_problem_weights_sum_to_one_and_give_the_standard_error_of_a_mean() -> None:
    plan = planned(scored(4))
    weights = plan.problem_weights
    assert weights is not None
    assert weights.shape == (50, 4000)
    assert weights.sum(axis=0) == pytest.approx(np.ones(4000))
    scores = np.random.default_rng(1).random(50)
    # Monte Carlo error of a standard deviation over 4,000 replicates: 1.1 %.
    assert (scores @ weights).std() == pytest.approx(scores.std() / np.sqrt(50), rel=0.04)


def test_all_allocations_and_the_base_model_are_scored_on_the_same_drawn_problems() -> None:
    first, second = scored(4), scored(16)
    second["eval_right"], second["avg_at_4"] = first["eval_right"], first["avg_at_4"]
    right = first["eval_right"][0]
    plan = planned(first, second, base=BasePoint(right.mean() / 4, right / 4))
    four, sixteen = (plan.drawn_rewards(group) for group in groups_of(first, second))
    assert np.array_equal(four, sixteen)
    base = plan.drawn_base(BasePoint(right.mean() / 4, right / 4))
    assert base == pytest.approx(four[:1])


def test_the_same_seed_gives_the_same_draws_and_another_seed_others() -> None:
    first, again, other = (planned(scored(4), seed=seed).problem_weights for seed in (0, 0, 1))
    assert np.array_equal(first, again)  # type: ignore[arg-type]
    assert not np.array_equal(first, other)  # type: ignore[arg-type]


def test_what_is_drawn_is_told_and_so_is_what_cannot_be() -> None:
    alone = planned(scored(4))
    assert alone.over == ("problems",)
    assert [words.split(":")[0] for words in alone.missing] == ["seeds"]
    assert "one seed only" in alone.missing[0]
    assert planned(scored(4), scored(4, seed=1)).over == ("seeds", "problems")
    seeds_only = planned(cell_rows(4, SHAPE), cell_rows(4, SHAPE, seed=1))
    assert seeds_only.over == ("seeds",)
    assert seeds_only.missing[0].startswith("validation problems: evaluations have no per-problem scores")
    neither = planned(cell_rows(4, SHAPE))
    assert neither.over == ()
    assert len(neither.missing) == 2


def test_one_seed_beside_several_is_named() -> None:
    some = planned(scored(4), scored(16), scored(16, seed=1))
    assert some.over == ("seeds", "problems")
    assert any("1 allocation" in words and "one seed only" in words for words in some.missing)


def test_few_seeds_are_said_to_give_intervals_that_are_too_narrow() -> None:
    # Two seeds: with a normal multiplier the interval is |x1 - x2| / 2 * 1.645 around the mean, and Student's t with one degree
    # of freedom lies within 1.645 with probability 2 / pi * arctan(1.645).
    two = planned(scored(4), scored(4, seed=1))
    assert f"{2 / np.pi * np.arctan(1.645):.0%}" in " ".join(two.missing)
    many = planned(*(scored(4, seed=seed) for seed in range(6)))
    assert many.missing == ()


def test_an_allocation_without_scores_keeps_its_rewards_while_the_others_are_drawn() -> None:
    plan = planned(scored(4), scored(8), cell_rows(16, SHAPE))
    assert plan.over == ("problems",)
    assert any("bp16-n16" in words and "eval_right" in words for words in plan.missing)
    first, _, last = groups_of(scored(4), scored(8), cell_rows(16, SHAPE))
    assert plan.drawn_rewards(first).std(axis=1).min() > 0.01
    assert np.array_equal(plan.drawn_rewards(last)[:, 0], last.reward)


def test_without_replicates_nothing_is_drawn_and_that_is_said() -> None:
    plan = planned(scored(4), scored(4, seed=1), replicates=0)
    assert plan.over == ()
    assert plan.problem_weights is None
    assert "no replicates" in plan.missing[0]


def test_common_scores_keep_what_evaluations_share_and_drop_the_luck_of_answers() -> None:
    rng = np.random.default_rng(9)
    difficulty = rng.uniform(0.1, 0.9, 80)
    truth = np.tile(difficulty, (60, 1))
    scores = rng.binomial(4, truth) / 4
    common = common_scores(scores)
    assert common.mean(axis=1) == pytest.approx(scores.mean(axis=1))
    # The luck of four answers has variance p (1 - p) / 4, 0.04 on average here; its mean over 60 rows 0.0007.
    noise = ((scores - scores.mean(axis=1, keepdims=True)) - (truth - truth.mean())) ** 2
    left = ((common - common.mean(axis=1, keepdims=True)) - (truth - truth.mean())) ** 2
    assert noise.mean() > 0.03
    assert left.mean() < 0.1 * noise.mean()


def test_common_scores_of_pure_luck_hold_next_to_nothing() -> None:
    scores = np.random.default_rng(10).binomial(4, 0.5, (60, 80)) / 4
    common = common_scores(scores)
    assert (common - common.mean(axis=1, keepdims=True)).var() < 0.1 * scores.var()
