"""What a cell accumulates between history rows."""

import json

from orchestrator.progress import Progress


def test_a_row_has_means_maxima_totals_and_latest_values_since_the_previous_row() -> None:
    progress = Progress()
    steps = [
        {"loss": 1.0, "logprob_difference": 0.5, "learning_rate": 0.1, "verifier_failures": 1.0},
        {"loss": 2.0, "logprob_difference": 0.7, "learning_rate": 0.2, "verifier_failures": 0.0},
        {"loss": 6.0, "logprob_difference": 0.1, "learning_rate": 0.3, "verifier_failures": 2.0},
    ]
    for metrics in steps:
        progress.add_step(metrics, tokens=10)
    assert progress.close_interval() == {
        "loss": 3.0,
        "logprob_difference": 0.7,
        "learning_rate": 0.3,
        "verifier_failures": 3.0,
    }
    assert (progress.step, progress.compute_tokens) == (3, 30)
    progress.add_step({"loss": 9.0, "logprob_difference": 0.2}, tokens=5)
    assert progress.close_interval() == {"loss": 9.0, "logprob_difference": 0.2}
    assert (progress.step, progress.compute_tokens) == (4, 35)


def test_progress_kept_in_a_commit_continues_to_the_same_row() -> None:
    values = [0.1, 0.2, 0.7, 1e-9]
    whole, cut = Progress(), Progress()
    for value in values:
        whole.add_step({"loss": value}, tokens=1)
    for value in values[:2]:
        cut.add_step({"loss": value}, tokens=1)
    resumed = Progress(**json.loads(json.dumps(cut.to_dict())))
    for value in values[2:]:
        resumed.add_step({"loss": value}, tokens=1)
    assert resumed == whole
    assert resumed.close_interval() == whole.close_interval()
