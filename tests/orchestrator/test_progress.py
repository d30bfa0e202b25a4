"""What a cell accumulates between history rows."""

import json
from typing import Any

import pytest

from grids.spec import LearnerPool, PoolsSpec, SamplerPool
from orchestrator.progress import Progress, accelerator_seconds


def test_a_row_has_means_maxima_totals_and_latest_values_since_the_previous_row() -> None:
    progress = Progress()
    steps = [
        {"loss": 1.0, "logprob_difference": 0.5, "learning_rate": 0.1, "verifier_failures": 1.0},
        {"loss": 2.0, "logprob_difference": 0.7, "learning_rate": 0.2, "verifier_failures": 0.0},
        {"loss": 6.0, "logprob_difference": 0.1, "learning_rate": 0.3, "verifier_failures": 2.0},
    ]
    for metrics in steps:
        progress.add_step(metrics, tokens=10, accelerator_seconds=1.5)
    assert progress.close_interval() == {
        "loss": 3.0,
        "logprob_difference": 0.7,
        "learning_rate": 0.3,
        "verifier_failures": 3.0,
    }
    assert (progress.step, progress.compute_tokens, progress.accelerator_seconds) == (3, 30, 4.5)
    progress.add_step({"loss": 9.0, "logprob_difference": 0.2}, tokens=5, accelerator_seconds=0.25)
    assert progress.close_interval() == {"loss": 9.0, "logprob_difference": 0.2}
    assert (progress.step, progress.compute_tokens, progress.accelerator_seconds) == (4, 35, 4.75)


def test_progress_kept_in_a_commit_continues_to_the_same_row() -> None:
    values = [0.1, 0.2, 0.7, 1e-9]
    whole, cut = Progress(), Progress()
    for value in values:
        whole.add_step({"loss": value}, tokens=1, accelerator_seconds=value)
    for value in values[:2]:
        cut.add_step({"loss": value}, tokens=1, accelerator_seconds=value)
    resumed = Progress(**json.loads(json.dumps(cut.to_dict())))
    for value in values[2:]:
        resumed.add_step({"loss": value}, tokens=1, accelerator_seconds=value)
    assert resumed == whole
    assert resumed.close_interval() == whole.close_interval()


def test_a_commit_without_accelerator_seconds_counts_them_from_zero() -> None:
    kept: dict[str, Any] = {"step": 7, "compute_tokens": 70, "steps_since_row": 0, "interval": {}}
    progress = Progress(**kept)
    progress.add_step({}, tokens=10, accelerator_seconds=2.0)
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
