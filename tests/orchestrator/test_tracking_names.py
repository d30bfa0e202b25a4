"""Names that MLflow takes, whatever a column is called (MLflow's own validator; verl#119, NeMo-RL#1093)."""

import hypothesis.strategies as st
from hypothesis import given, settings
from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, _validate_metric_name, _validate_param_name

from analysis.tables import HISTORY_COLUMNS
from orchestrator.tracking.mlflow_format import dotted_name, flat_params, metrics_of, valid_name

NAMES = st.one_of(
    st.text(max_size=12),
    st.text(alphabet="aA/.-@_:2d40", max_size=8),
    # Around the limit of 250, and beyond it with a difference at the very end only.
    st.builds(lambda n, end: "a" * n + end, st.integers(240, 260), st.text(alphabet="b-", max_size=3)),
)


def test_columns_of_a_history_keep_their_names() -> None:
    real = [name.replace("_at_K", "_at_16").replace("*", "sampling") for name in HISTORY_COLUMNS]
    assert [valid_name(name) for name in real] == real


def test_what_mlflow_refuses_is_written_as_code_points() -> None:
    assert valid_name("pass@1") == "pass-40-1"
    assert valid_name("eval/acc (greedy)") == "eval-2f-acc-20--28-greedy-29-"
    assert valid_name("..") == "-2e--2e-"
    assert valid_name("Loss") == "-4c-oss"
    assert metrics_of({"f1@k=4": 0.5, "compute_rollouts": 8}) == [
        ("f1-40-k-3d-4", 0.5),
        ("compute_rollouts", 8.0),
    ]


@given(st.lists(NAMES, min_size=2, max_size=6, unique=True))
@settings(max_examples=300, deadline=None)
def test_any_names_are_valid_and_stay_apart(names: list[str]) -> None:
    made = [valid_name(name) for name in names]
    for name in made:
        _validate_metric_name(name)
        assert 0 < len(name) <= MAX_ENTITY_KEY_LENGTH
        assert "/" not in name  # so no name is a folder of another
    # Also in a database that takes capitals for small letters.
    assert len({name.lower() for name in made}) == len(names)


@given(st.lists(st.lists(NAMES, min_size=1, max_size=3), min_size=2, max_size=4, unique_by=tuple))
@settings(max_examples=200, deadline=None)
def test_any_parts_make_valid_parameters_that_stay_apart(paths: list[list[str]]) -> None:
    made = [dotted_name(path) for path in paths]
    for name in made:
        _validate_param_name(name)
        assert len(name) <= MAX_ENTITY_KEY_LENGTH
    assert len(set(made)) == len(paths)


def test_a_dot_in_a_key_is_no_nesting() -> None:
    assert flat_params({"a": {"b": 1}, "a.b": 2}) == {"a.b": "1", "a-2e-b": "2"}
