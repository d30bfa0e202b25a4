"""The names of columns, metrics and compute units."""

from analysis.tables import (
    COMPUTE_COLUMNS,
    HISTORY_COLUMNS,
    column_rank,
    compute_label,
    headline_metric,
    in_order,
    is_measured,
    metric_label,
    score_columns,
)


def test_every_compute_unit_has_a_documented_column_and_words_for_its_axis():
    assert set(COMPUTE_COLUMNS.values()) <= set(HISTORY_COLUMNS)
    assert compute_label("tokens") == "compute C (generated tokens)"
    assert len({compute_label(unit) for unit in COMPUTE_COLUMNS}) == 3


def test_the_headline_metric_is_the_first_average_over_answers():
    assert headline_metric(["best_at_4", "train_probe_avg_at_8", "avg_at_16", "avg_at_4"]) == "avg_at_16"
    assert headline_metric(["best_at_4", "avg_at_0", "avg_at_k"]) is None


def test_scores_are_the_validation_metrics_and_the_training_probe():
    names = ["avg_at_4", "best_at_4", "worst_at_4", "train_probe_avg_at_8", "train_reward", "my_avg_at_4"]
    assert score_columns(names) == names[:4]


def test_a_number_or_a_phase_stands_for_the_documented_name():
    assert column_rank("avg_at_128") == list(HISTORY_COLUMNS).index("avg_at_K")
    assert column_rank("seconds_sampling") == list(HISTORY_COLUMNS).index("seconds_*")
    assert column_rank("avg_at_K") is None and column_rank("pass_rate") is None


def test_columns_are_ordered_as_documented_whatever_order_a_source_has():
    names = ["zebra", "kl", "avg_at_16", "step", "avg_at_4", "cell", "ape"]
    assert in_order(names) == ["cell", "step", "avg_at_4", "avg_at_16", "kl", "ape", "zebra"]


def test_measured_columns_are_those_that_no_replay_reproduces():
    documented = {name for name, meaning in HISTORY_COLUMNS.items() if "no replay reproduces it" in meaning}
    assert {name for name in HISTORY_COLUMNS if is_measured(name)} == documented
    assert not is_measured("compute_tokens")


def test_people_write_metrics_with_an_at_sign():
    assert metric_label("worst_at_16") == "worst@16"
