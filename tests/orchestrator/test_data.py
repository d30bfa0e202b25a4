"""A grid's inputs: what is refused before anything starts, and what a run is bound to."""

import json
from pathlib import Path

import pytest

from grids.errors import UserError
from grids.loading import parse_grid
from grids.spec import GridSpec
from orchestrator.control.data import load_data, model_fingerprint, weights_fingerprint
from tests.tiny_models import make_model

GRID = """
name: tiny
model: {path: model}
problems: {train: train.jsonl, validation: validation.jsonl}
grid: {problems_per_batch: [2], rollouts_per_problem: [2], compute_rollouts: 64}
recipe: {type: easy}
optimiser: {learning_rate: 2e-4}
sampling: {max_tokens: 8, prompt_template: "{prompt}="}
evaluation: {first_mark: 16}
tracking: {mlflow_uri: "http://127.0.0.1:5000"}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(tmp_path / "model")
    write(tmp_path / "train.jsonl", [("1+2", "3"), ("10+20", "30")])
    write(tmp_path / "validation.jsonl", [("4+5", "9")])
    return tmp_path


def write(path: Path, problems: list[tuple[str, str]]) -> None:
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in problems))


def grid_in(folder: Path, old: str = "", new: str = "") -> GridSpec:
    assert old in GRID
    return parse_grid(GRID.replace(old, new), folder / "grid.yaml")


def test_prompts_are_rendered_with_the_template(folder: Path) -> None:
    data = load_data(grid_in(folder))
    # One token a character, and the template's sign of equality.
    assert [len(prompt) for prompt in data.train.prompts] == [4, 6]
    assert data.longest_prompt == 6
    assert data.train.golds == ["3", "30"]
    assert data.validation.rows == [1]


def test_prompt_and_response_beyond_the_context_are_refused(folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"sampling\.max_tokens: the longest prompt \(6 tokens\) and 59 more .* of 64"
    ):
        load_data(grid_in(folder, "max_tokens: 8", "max_tokens: 59"))


def test_a_stop_token_that_is_none_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"sampling\.stop_tokens: '</answer>' is no token"):
        load_data(grid_in(folder, "max_tokens: 8", 'max_tokens: 8, stop_tokens: ["</answer>"]'))


def test_a_problem_shared_by_both_sets_is_refused(folder: Path) -> None:
    write(folder / "validation.jsonl", [("4+5", "9"), ("10+20", "30")])
    with pytest.raises(UserError, match=r"row 2"):
        load_data(grid_in(folder))


def test_the_identity_follows_contents_and_not_paths(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    identity = load_data(grid_in(folder)).identity
    moved = tmp_path_factory.mktemp("elsewhere")
    for path in folder.iterdir():
        path.rename(moved / path.name)
    assert load_data(grid_in(moved)).identity == identity
    write(moved / "train.jsonl", [("1+2", "3"), ("10+20", "31")])
    assert load_data(grid_in(moved)).identity != identity


def test_what_may_change_between_submissions_is_no_part_of_the_identity(folder: Path) -> None:
    identity = load_data(grid_in(folder)).identity
    assert load_data(grid_in(folder, ":5000", ":6000")).identity == identity
    sections = "pools: {learners: {count: 3}}\ncommits: {every_steps: 2}\nfailures: {own_failures: 9}\n"
    more = grid_in(folder, "recipe:", f"{sections}assumptions: [a]\nrecipe:")
    assert load_data(more).identity == identity
    larger = grid_in(folder, "compute_rollouts: 64", "compute_rollouts: 128")
    assert load_data(larger).identity == identity
    assert load_data(grid_in(folder, "2e-4", "3e-4")).identity != identity


def test_another_model_has_another_fingerprint(folder: Path) -> None:
    before = model_fingerprint(str(folder / "model"))
    make_model(folder / "model", seed=1)
    assert model_fingerprint(str(folder / "model")) != before


def test_a_byte_of_large_weights_that_differs_at_either_end_is_seen(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    weights = model / "model.safetensors"
    size = 200 * 2**20 + 3
    with weights.open("wb") as file:
        file.truncate(size)  # zeros that take no space
    (model / "config.json").write_text("{}")
    seen = {weights_fingerprint(str(model))}
    for place in (0, 2**20 - 1, size - 2**20, size - 1):
        with weights.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        seen.add(weights_fingerprint(str(model)))
    assert len(seen) == 5
    with weights.open(
        "r+b"
    ) as file:  # between the second block and the third: (size - 1 MiB) * 2 / 63 is later
        file.seek((size - 2**20) // 63 + 2**20)
        file.write(b"x")
    assert weights_fingerprint(str(model)) in seen


def test_small_models_and_hub_models_have_no_fingerprint_of_large_weights(folder: Path) -> None:
    assert weights_fingerprint(str(folder / "model")) is None
    assert weights_fingerprint("Qwen/Qwen3-0.6B") is None
    assert load_data(grid_in(folder)).identity["model"].keys() == {"content", "dtype"}
