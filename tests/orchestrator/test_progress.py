"""What a cell accumulates between history rows."""

import json
from typing import Any

import pytest

from grids.spec import LearnerPool, PoolsSpec, SamplerPool
from orchestrator.control.progress import Progress, accelerator_seconds, divergence


def test_a_row_has_means_maxima_totals_and_latest_values_since_the_previous_row() -> None:
    progress = Progress()
    steps = [
        {"loss": 1.0, "logprob_difference": 0.5, "learning_rate": 0.1, "verifier_failures": 1.0},
        {"loss": 2.0, "logprob_difference": 0.7, "learning_rate": 0.2, "verifier_failures": 0.0},
        {"loss": 6.0, "logprob_difference": 0.1, "learning_rate": 0.3, "verifier_failures": 2.0},
    ]
    for metrics in steps:
        progress.add_step(metrics | {"train_reward": 0.5}, tokens=10, accelerator_seconds=1.5)
    assert progress.close_interval() == {
        "loss": 3.0,
        "logprob_difference": 0.7,
        "learning_rate": 0.3,
        "verifier_failures": 3.0,
        "train_reward": 0.5,
    }
    assert (progress.step, progress.compute_tokens, progress.accelerator_seconds) == (3, 30, 4.5)
    progress.add_step({"loss": 9.0, "train_reward": 0.25}, tokens=5, accelerator_seconds=0.25)
    assert progress.close_interval() == {"loss": 9.0, "train_reward": 0.25}
    assert (progress.step, progress.compute_tokens, progress.accelerator_seconds) == (4, 35, 4.75)


def test_progress_kept_in_a_commit_continues_to_the_same_row() -> None:
    values = [0.1, 0.2, 0.7, 1e-9]
    whole, cut = Progress(), Progress()
    for value in values:
        whole.add_step({"loss": value, "train_reward": value}, tokens=1, accelerator_seconds=value)
    for value in values[:2]:
        cut.add_step({"loss": value, "train_reward": value}, tokens=1, accelerator_seconds=value)
    resumed = Progress(**json.loads(json.dumps(cut.to_dict())))
    for value in values[2:]:
        resumed.add_step({"loss": value, "train_reward": value}, tokens=1, accelerator_seconds=value)
    assert resumed == whole
    assert resumed.close_interval() == whole.close_interval()


def test_a_commit_without_accelerator_seconds_counts_them_from_zero() -> None:
    kept: dict[str, Any] = {"step": 7, "compute_tokens": 70, "steps_since_row": 0, "interval": {}}
    progress = Progress(**kept)
    progress.add_step({"train_reward": 0.0}, tokens=10, accelerator_seconds=2.0)
    assert (progress.step, progress.accelerator_seconds) == (8, 2.0)


@pytest.mark.parametrize(
    ("samplers", "learners", "expected"),
    [
        # One core each: 3 s + 5 s.
        (SamplerPool(), LearnerPool(), 8.0),
        # A phase of sampling holds one engine, however many there are.
        (SamplerPool(count=12, cpus=4, gpus=2), LearnerPool(ranks=4, cpus=8, gpus=1), 3 * 2 + 5 * 4),
        (SamplerPool(cpus=4), LearnerPool(count=3, ranks=2, cpus=8), 3 * 4 + 5 * 2 * 8),
    ],
)
def test_accelerator_time_is_seconds_times_what_a_phase_holds(
    samplers: SamplerPool, learners: LearnerPool, expected: float
) -> None:
    pools = PoolsSpec(samplers=samplers, learners=learners)
    assert accelerator_seconds(pools, seconds_sampling=3.0, seconds_learning=5.0) == expected


def rewarded(*rewards: float) -> Progress:
    progress = Progress()
    for reward in rewards:
        progress.add_step({"train_reward": reward}, tokens=1, accelerator_seconds=0.0)
    return progress


def test_rewards_that_vanish_for_long_after_better_ones_are_a_collapse() -> None:
    steady = {"importance_ratio": 1.0}
    assert divergence(steady, rewarded(0.4, 0.0, 0.0), collapsed_steps=3) is None
    assert divergence(steady, rewarded(0.4, 0.0, 0.0, 0.25, 0.0), collapsed_steps=3) is None
    reason = divergence(steady, rewarded(0.25, 0.4, 0.0, 0.0, 0.0), collapsed_steps=3)
    assert reason is not None and "none in 3 steps on end" in reason and "up to 0.4" in reason


def test_a_cell_that_never_earned_anything_has_not_collapsed() -> None:
    assert divergence({"importance_ratio": 1.0}, rewarded(*[0.0] * 50), collapsed_steps=3) is None


@pytest.mark.parametrize(("ratio", "diverged"), [(0.51, False), (1.99, False), (0.49, True), (2.01, True)])
def test_a_mean_importance_ratio_far_from_one_is_a_divergence(ratio: float, diverged: bool) -> None:
    assert (divergence({"importance_ratio": ratio}, rewarded(0.5), 3) is not None) == diverged


def test_an_importance_ratio_that_is_no_number_is_a_divergence() -> None:
    assert divergence({"importance_ratio": float("nan")}, rewarded(0.5), 3) is not None


def test_progress_of_a_commit_from_before_collapses_were_counted_still_loads() -> None:
    kept: dict[str, Any] = {"step": 7, "compute_tokens": 70, "steps_since_row": 0, "interval": {}}
    assert divergence({"importance_ratio": 1.0}, Progress(**kept), collapsed_steps=1) is None
