"""Synthetic grids follow the law that they are given, and their noise has the documented mean."""

import math
from dataclasses import replace

import numpy as np
import pytest

from analysis.synthetic import (
    BEYOND_THE_EDGE,
    FLAT,
    ONE_N,
    PAPER_LAW,
    SyntheticGrid,
    SyntheticLaw,
    expected_reward,
    synthetic_grid,
    true_grid,
)

BEST_B_P = 64
COMPUTE = np.geomspace(2**15, 2**23, 3001)
SMALL = SyntheticGrid(problems_per_batch=(64,), rollouts_per_problem=(8, 64), seeds=(0, 1))

LAWS = {
    "fixed B_p, Easy": (6.09, 4.75, 5.84, 2.73),
    "all free, Easy": (5.67, 8.84, 6.08, 3.08),
    "fixed B_p, Hard": (4.47, 7.23, 5.84, 2.79),
    "floor above the smallest n": (3.0, 6.0, 6.0, 4.9),
    "steep": (6.0, 40.0, 6.0, 3.0),
    "plateau above the largest n": (10.0, 4.0, 6.4, 2.73),
}


def nearest_n(law: tuple[float, float, float, float], values: tuple[int, ...]) -> np.ndarray:
    """The values nearest to the law in log2 at each of COMPUTE, written apart from the package's own."""
    rise, k, mid, floor = law
    log2_n = [rise / (1 + math.exp(-k * (math.log10(c) - mid))) + floor for c in COMPUTE]
    return np.array([min(values, key=lambda n: abs(math.log2(n) - y)) for y in log2_n])


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_the_best_n_is_the_one_nearest_to_the_law(law: tuple[float, float, float, float]) -> None:
    design = SyntheticGrid(law=SyntheticLaw(*law))
    values = design.rollouts_per_problem
    rewards = np.stack([expected_reward(design, BEST_B_P, n, COMPUTE) for n in values])
    best = np.array(values)[rewards.argmax(axis=0)]
    assert np.array_equal(best, nearest_n(law, values))
    assert len(set(best)) >= 3
    assert rewards.max() < 1.0
    assert (np.diff(rewards, axis=1) > 0).all(), "curves rise with compute"


def test_the_law_is_the_same_with_every_allocation_free_to_choose() -> None:
    design = SyntheticGrid(law=PAPER_LAW)
    allocations = design.allocations()
    rewards = np.stack([expected_reward(design, problems, n, COMPUTE) for problems, n in allocations])
    best = np.array([allocations[index] for index in rewards.argmax(axis=0)])
    assert set(best[:, 0]) == {BEST_B_P}
    assert np.array_equal(best[:, 1], nearest_n(LAWS["fixed B_p, Easy"], design.rollouts_per_problem))


def test_the_law_is_the_same_at_every_problems_per_batch_that_holds_all_of_n() -> None:
    design = SyntheticGrid()
    for problems in (32, 128):
        values = tuple(n for n in design.rollouts_per_problem if n <= 512)
        rewards = np.stack([expected_reward(design, problems, n, COMPUTE) for n in values])
        best = np.array(values)[rewards.argmax(axis=0)]
        assert np.array_equal(best, nearest_n(LAWS["fixed B_p, Easy"], values))


def test_the_special_truths_are_what_they_say() -> None:
    flat = [expected_reward(FLAT, 32, n, COMPUTE) for n in FLAT.rollouts_per_problem]
    assert all(np.array_equal(curve, flat[0]) for curve in flat)

    rewards = [expected_reward(BEYOND_THE_EDGE, 32, n, COMPUTE) for n in BEYOND_THE_EDGE.rollouts_per_problem]
    leader = np.argmax(rewards, axis=0)
    assert leader[-1] == len(rewards) - 1, "the largest n leads at the end"
    law = BEYOND_THE_EDGE.law
    assert law is not None
    assert law.log2_n(2**23) - law.log2_n(2**22) > 0.5, "and the law still rises there"

    assert {n for _problems, n in ONE_N.allocations()} == {64}


def test_the_default_grid_has_the_papers_easy_size() -> None:
    history = synthetic_grid(SyntheticGrid(), np.random.default_rng(0)).history
    shapes = history.groupby("cell").first()
    assert len(shapes) == 39 * 3
    assert (shapes["problems_per_batch"] * shapes["rollouts_per_problem"]).max() == 65_536
    assert shapes.groupby("seed").size().tolist() == [39, 39, 39]
    assert history.groupby("cell").size()["bp32-n8-s0"] == 41


def test_rows_stand_at_the_first_batch_that_reaches_a_mark() -> None:
    rows = true_grid(SyntheticGrid(), marks_per_doubling=1).history.set_index("cell").loc["bp32-n2048-s0"]
    # B = 65,536; the marks 2^15, 2^16 ... 2^23 are half a batch, 1, 2, 4 ... 128 batches.
    assert rows["step"].tolist() == [1, 2, 4, 8, 16, 32, 64, 128]
    assert rows["compute_rollouts"].tolist() == [65_536 * step for step in rows["step"]]
    assert rows["epochs"].tolist() == pytest.approx([step * 32 / 6000 for step in rows["step"]])


def test_scores_are_those_of_the_counted_answers() -> None:
    tables = synthetic_grid(SMALL, np.random.default_rng(3))
    assert tables.base is not None
    for row in [*tables.history.to_dict(orient="records"), tables.base]:
        counts = list(row["eval_right"])
        assert len(counts) == 300
        assert min(counts) >= 0
        assert max(counts) <= 4
        assert row["avg_at_4"] == pytest.approx(sum(counts) / 1200)
        assert row["best_at_4"] == pytest.approx(sum(count > 0 for count in counts) / 300)
        assert row["worst_at_4"] == pytest.approx(sum(count == 4 for count in counts) / 300)


def test_the_same_generator_state_gives_the_same_grid() -> None:
    first, again, other = (synthetic_grid(SMALL, np.random.default_rng(seed)).history for seed in (1, 1, 2))
    assert np.array_equal(np.stack(first["eval_right"]), np.stack(again["eval_right"]))
    assert not np.array_equal(np.stack(first["eval_right"]), np.stack(other["eval_right"]))


def test_noise_has_the_expected_reward_as_its_mean() -> None:
    design = replace(SMALL, seeds=tuple(range(30)), validation_problems=10_000)
    design = replace(design, evaluation=design.evaluation.model_copy(update={"marks_per_doubling": 1}))
    noisy = synthetic_grid(design, np.random.default_rng(5)).history
    truth = true_grid(design, marks_per_doubling=1).history
    shape = ["rollouts_per_problem", "compute_rollouts"]
    metrics = ["avg_at_4", "best_at_4", "worst_at_4"]
    mean = noisy.groupby(shape)[metrics].mean()
    # Drawing the problems moves a metric by about 0.25 * 0.58 / sqrt(10,000) = 0.0015 (avg), up to twice that (worst).
    assert mean.to_numpy() == pytest.approx(
        truth.set_index(shape)[metrics].loc[mean.index].to_numpy(), abs=0.009
    )
    for (n, compute), row in mean.iterrows():
        assert row["avg_at_4"] == pytest.approx(float(expected_reward(design, 64, n, compute)), abs=0.005)


def test_seeds_differ_by_more_than_their_answers() -> None:
    evaluation = SMALL.evaluation.model_copy(update={"samples_per_problem": 64, "marks_per_doubling": 1})
    design = replace(
        SMALL,
        rollouts_per_problem=(8,),
        seeds=tuple(range(60)),
        validation_problems=2000,
        evaluation=evaluation,
    )
    history = synthetic_grid(design, np.random.default_rng(5)).history
    # The answers' sd is at most 0.5 / sqrt(128,000) = 0.0014; the problems are common. A gain of 0.15 that moves by
    # 1 % and a midpoint that moves by 0.02 decades add about 0.0024 near the midpoint, 10^5.
    spread = history[history["compute_rollouts"] == 2**17]["avg_at_64"].std()
    assert 0.0020 < spread < 0.0036


def test_the_base_models_scores_are_the_populations() -> None:
    base = true_grid(SMALL).base
    assert base is not None
    # Success probabilities at R = 0.45 are uniform on [0.45 - 0.2475, 0.45 + 0.2475].
    low, high = 0.2025, 0.6975
    assert base["avg_at_4"] == pytest.approx(0.45)
    assert base["worst_at_4"] == pytest.approx((high**5 - low**5) / (5 * (high - low)))
    assert base["best_at_4"] == pytest.approx(1 - ((1 - low) ** 5 - (1 - high) ** 5) / (5 * (high - low)))


def test_all_cells_answer_the_same_problems() -> None:
    right = np.stack(synthetic_grid(SMALL, np.random.default_rng(7)).history["eval_right"])
    half = len(right) // 2
    easiness = np.corrcoef(right[:half].mean(axis=0), right[half:].mean(axis=0))[0, 1]
    assert easiness > 0.9  # about 0 if each cell drew its own problems
