"""What a grid file may say, and what a user reads when it says something else."""

from pathlib import Path

import pytest

from grids.errors import UserError
from grids.loading import dump_grid, load_grid, parse_grid

GRID = """
name: tiny
model: {path: org/model}
problems: {train: train.jsonl, validation: /data/validation.jsonl}
grid: {problems_per_batch: [16], rollouts_per_problem: [4, 16], compute_rollouts: 4096}
recipe: {type: easy}
optimiser: {learning_rate: 2e-4}
sampling: {max_tokens: 8}
evaluation: {first_mark: 1024}
tracking: {mlflow_uri: "http://127.0.0.1:5000"}
"""
PATH = Path("/grids/tiny.yaml")


def error_of(old: str, new: str) -> str:
    assert old in GRID
    with pytest.raises(UserError) as caught:
        parse_grid(GRID.replace(old, new), PATH)
    return str(caught.value)


def test_relative_paths_start_at_the_grid_file_and_hub_names_stay() -> None:
    spec = parse_grid(GRID, PATH)
    assert spec.problems.train == "/grids/train.jsonl"
    assert spec.problems.validation == "/data/validation.jsonl"
    assert spec.model.path == "org/model"


def test_a_model_folder_beside_the_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert parse_grid(GRID, tmp_path / "tiny.yaml").model.path == str(tmp_path / "org" / "model")


def test_a_dumped_grid_reads_back_equal() -> None:
    from grids.spec import GridSpec

    spec = parse_grid(GRID.replace("[4, 16]", "{from: 4, to: 64}"), PATH)
    assert GridSpec.model_validate(dump_grid(spec)) == spec


def test_the_train_probe_has_a_size_and_can_be_turned_off() -> None:
    probe = parse_grid(GRID, PATH).evaluation.train_probe
    assert (probe.problems, probe.samples_per_problem) == (64, 8)
    off = parse_grid(GRID.replace("first_mark: 1024", "first_mark: 1024, train_probe: {problems: 0}"), PATH)
    assert off.evaluation.train_probe.problems == 0


@pytest.mark.parametrize(("written", "value"), [("2e-4", 2e-4), ("1e-6", 1e-6), ("0.5", 0.5)])
def test_floats_are_read_as_yaml_1_2_has_them(written: str, value: float) -> None:
    assert parse_grid(GRID.replace("2e-4", written), PATH).optimiser.learning_rate == value


def test_a_leading_zero_is_no_octal_number() -> None:
    assert parse_grid(GRID.replace("[16]", "[010]"), PATH).grid.problems_per_batch == [10]


def test_easy_has_kl_and_entropy_and_hard_has_neither_and_each_can_be_overridden() -> None:
    easy = parse_grid(GRID, PATH).recipe
    hard = parse_grid(GRID.replace("type: easy", "type: hard"), PATH).recipe
    mixed = parse_grid(GRID.replace("type: easy", "type: hard, kl_coefficient: 0.5"), PATH).recipe
    assert easy.kl_coefficient > 0 and easy.entropy_coefficient > 0
    assert (hard.kl_coefficient, hard.entropy_coefficient) == (0, 0)
    assert (mixed.kl_coefficient, mixed.entropy_coefficient) == (0.5, 0)


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        (
            "rollouts_per_problem",
            "rollout_per_problem",
            ["grid.rollout_per_problem", "did you mean rollouts_per_problem?"],
        ),
        ("name: tiny", "nmae: tiny", ["nmae", "did you mean name?"]),
        ("name: tiny", "name: tiny\nname: other", ["line 3", 'the key "name" stands twice']),
        (
            "type: easy",
            "type: easy, kl_coeficient: 1",
            ["recipe.kl_coeficient", "did you mean kl_coefficient?"],
        ),
        ("type: easy", "type: medium", ["recipe", "'medium'", "'easy', 'hard'"]),
        ("[4, 16]", "[1, 4]", ["grid.rollouts_per_problem", "smallest group is 2"]),
        ("[4, 16]", "[4, 4]", ["grid.rollouts_per_problem", "twice"]),
        ("[4, 16]", "[]", ["grid.rollouts_per_problem", "is empty"]),
        ("[4, 16]", "{from: 3, to: 8}", ["grid.rollouts_per_problem.from", "no power of two"]),
        ("[4, 16]", "{from: 16, to: 8}", ["grid.rollouts_per_problem", "larger than"]),
        ("[16]", "[true]", ["grid.problems_per_batch.0", "valid integer"]),
        ("4096", "-1", ["grid.compute_rollouts", "greater than or equal to 1", "-1"]),
        ("2e-4", "2", ["optimiser.learning_rate", "less than or equal to 1"]),
        ("2e-4", ".nan", ["optimiser.learning_rate", "finite number"]),
        ("max_tokens: 8", "max_tokens: 8, top_p: 0.9", ["sampling.top_p", "must be 1", "importance ratio"]),
        ("max_tokens: 8", "max_tokens: 8, prompt_template: x", ["sampling.prompt_template", "{prompt}"]),
        (
            "first_mark: 1024",
            "first_mark: 1024, train_probe: {problem: 3}",
            ["evaluation.train_probe.problem", "did you mean problems?"],
        ),
        (
            "first_mark: 1024",
            "first_mark: 1024, train_probe: {samples_per_problem: 0}",
            ["evaluation.train_probe.samples_per_problem", "greater than or equal to 1"],
        ),
        ("recipe: {type: easy}", "", ["recipe", "missing"]),
        ("recipe: {type: easy}", "recipe: {}", ["recipe.type", "missing"]),
        ("[4, 16]", "", ["grid.rollouts_per_problem", "such as [4, 16]"]),
        ("compute_rollouts: 4096", "compute_rollouts: 100", ["grid.compute_rollouts", "less than one batch"]),
        ("http://127.0.0.1:5000", "sqlite:///x.db", ["tracking.mlflow_uri"]),
        ("name: tiny", "name: [", ["not valid YAML", "line"]),
        ("name: tiny", "name: !!python/object:os.system x", ["not valid YAML"]),
    ],
)
def test_a_faulty_field_is_one_line_with_file_field_and_mend(old: str, new: str, parts: list[str]) -> None:
    message = error_of(old, new)
    assert message.startswith(str(PATH))
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.yaml: no such file"):
        load_grid(tmp_path / "absent.yaml")


def test_every_field_of_every_model_is_described() -> None:
    from pydantic import BaseModel

    from grids import spec

    models = [
        m
        for m in vars(spec).values()
        if isinstance(m, type) and issubclass(m, BaseModel) and m.__module__ == spec.__name__
    ]
    undescribed = [
        f"{m.__name__}.{name}"
        for m in models
        for name, info in m.model_fields.items()
        if not info.description
    ]
    # top_p tells its reason in the error; each other field says what it is.
    assert models and undescribed == []
