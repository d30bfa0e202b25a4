"""What a cell samples: batches, the validation and the train probe, as pure functions."""

import pytest

from grids.expansion import expand
from grids.loading import parse_grid
from grids.spec import GridSpec
from orchestrator.control.batches import probe_batch, training_batch, validation_batch
from orchestrator.control.data import GridData, PromptSet
from tests.grids.test_spec import GRID, PATH


def prompt_set(first: int, size: int) -> PromptSet:
    """Problems whose prompt is their number and whose answer is its negative."""
    numbers = range(first, first + size)
    return PromptSet("problems.jsonl", list(numbers), [[i] for i in numbers], [str(-i) for i in numbers])


DATA = GridData(train=prompt_set(0, 100), validation=prompt_set(1000, 20), identity={})


def spec_with(probe: str) -> GridSpec:
    return parse_grid(GRID.replace("first_mark: 1024", f"first_mark: 1024, train_probe: {probe}"), PATH)


def test_the_probe_is_evenly_spaced_over_the_training_problems_with_their_answers() -> None:
    probe = probe_batch(spec_with("{problems: 4, samples_per_problem: 16}"), DATA)
    assert probe.request.prompts == [[0], [33], [66], [99]]
    assert probe.golds == ["0", "-33", "-66", "-99"]
    assert probe.request.rollouts_per_problem == 16


@pytest.mark.parametrize("problems", [100, 5000])
def test_the_probe_is_the_whole_of_a_small_set(problems: int) -> None:
    probe = probe_batch(spec_with(f"{{problems: {problems}}}"), DATA)
    assert probe.request.prompts == [[i] for i in range(100)]


def test_probe_validation_and_training_share_no_seed() -> None:
    spec = spec_with("{problems: 20}")
    cell = expand(spec)[0]
    seeds = [
        *probe_batch(spec, DATA).request.seeds,
        *validation_batch(spec, DATA).request.seeds,
        *training_batch(cell, 1, DATA).request.seeds,
    ]
    assert len(set(seeds)) == len(seeds) == 20 + 20 + cell.problems_per_batch


def test_a_part_of_a_batch_asks_for_the_same_rollouts_as_the_whole() -> None:
    batch = training_batch(expand(spec_with("{problems: 20}"))[0], 3, DATA)
    part = batch.part([5, 2])
    assert part.request.prompts == [batch.request.prompts[5], batch.request.prompts[2]]
    assert part.request.seeds == [batch.request.seeds[5], batch.request.seeds[2]]
    assert part.request.rollouts_per_problem == batch.request.rollouts_per_problem
    assert (part.golds, part.sources) == (
        [batch.golds[5], batch.golds[2]],
        [batch.sources[5], batch.sources[2]],
    )


@pytest.mark.parametrize(
    ("engines", "full_engine", "sizes"),
    [
        # 20 groups of 2 rollouts.
        (1, 1, [20]),
        (3, 10, [6, 7, 7]),
        (8, 16, [10, 10]),  # a third part would leave engines half empty
        (8, 64, [20]),
        (0, 1, [20]),  # none is free: it waits whole
        (50, 1, [1] * 20),
    ],
)
def test_a_batch_spreads_over_free_engines_as_long_as_it_fills_them(
    engines: int, full_engine: int, sizes: list[int]
) -> None:
    batch = probe_batch(spec_with("{problems: 20, samples_per_problem: 2}"), DATA)
    parts = batch.spread(engines, full_engine)
    assert [len(part.golds) for part in parts] == sizes
    assert [seed for part in parts for seed in part.request.seeds] == batch.request.seeds
    assert [prompt for part in parts for prompt in part.request.prompts] == batch.request.prompts
    assert [gold for part in parts for gold in part.golds] == batch.golds


@pytest.mark.parametrize(
    ("samples", "sizes"),
    [
        (16, [20]),  # 320 rollouts: fewer than are graded at once
        (51, [20]),  # 1020: two slices of ten groups would have 510 each
        (52, [10, 10]),
        (300, [2] * 10),  # a group alone has fewer than 512
        (600, [1] * 20),
    ],
)
def test_slices_of_a_batch_have_as_many_rollouts_as_are_graded_at_once(
    samples: int, sizes: list[int]
) -> None:
    batch = probe_batch(spec_with(f"{{problems: 20, samples_per_problem: {samples}}}"), DATA)
    slices = batch.slices()
    assert [len(one.golds) for one in slices] == sizes
    assert [seed for one in slices for seed in one.request.seeds] == batch.request.seeds
    assert [gold for one in slices for gold in one.golds] == batch.golds


def test_each_problem_of_a_batch_knows_its_row() -> None:
    batch = training_batch(expand(spec_with("{problems: 20}"))[0], 3, DATA)
    assert batch.sources == [f"problems.jsonl, row {prompt[0]}" for prompt in batch.request.prompts]
