"""A grid with a poisoned problem, on two engines; then the same grid with a larger budget, on two learner ranks."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks.comparison import base_row, without_measured
from benchmarks.site import QUICKSTART, GridOptions, Site
from orchestrator.store.phase_log import PhaseKind, read_epochs
from workers.grading import evenly_spaced
from workers.problems import batch_indices

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

POISON = "\N{SKULL AND CROSSBONES}"
VOCABULARY = 258
"""Rows of the shipped model's embedding."""
UNKNOWN_TOKEN = 330
"""Beyond what vLLM rounds the embedding up to."""
SICK, HEALTHY = "bp8-n2-s0", "bp8-n8-s0"
"""The cell that reaches the problem, and one that has its like in the undisturbed grid."""


class Ended(NamedTuple):
    """A grid that has run."""

    grid: Path
    options: GridOptions
    row: int
    """Of the poisoned problem."""
    exit_code: int
    output: str


@pytest.fixture(scope="module")
def poisoned(site: Site) -> Ended:
    """A grid of 128 rollouts a cell in which one problem breaks the engine."""
    model = site.folder / "model"
    shutil.copytree(QUICKSTART / "model", model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    known = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokenizer["added_tokens"] += [
        {"id": number, "content": POISON if number == UNKNOWN_TOKEN else f"<unused {number}>"} | known
        for number in range(VOCABULARY, UNKNOWN_TOKEN + 1)
    ]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))

    problems = (QUICKSTART / "easy_train.jsonl").read_text().splitlines()
    order = [int(index) for step in range(1, 9) for index in batch_indices(0, step, 8, len(problems))]
    # n = 2 makes 8 steps, which see all of these; n = 8 makes 2, and 4 with twice the budget, which see half of them.
    (*_, poison) = [index for index in order[48:] if index not in evenly_spaced(10, len(problems))]
    problem = json.loads(problems[poison])
    problems[poison] = json.dumps(problem | {"prompt": problem["prompt"].replace("+", f"+{POISON}")})
    train = site.folder / "poisoned.jsonl"
    train.write_text("\n".join(problems) + "\n")
    options = GridOptions(
        model=model,
        train=train,
        rollouts_per_problem=[2, 8],
        compute_rollouts=128,
        samplers=2,
        max_sequences=16,
        phase_repeats=0,
        stall_seconds=60,
    )
    grid = site.write_grid("poisoned", options)
    return Ended(grid, options, poison + 1, *site.finish(grid))


@pytest.fixture(scope="module")
def grown(site: Site, poisoned: Ended) -> Ended:
    """The same run with twice the budget, one engine, and two learner ranks."""
    options = replace(poisoned.options, compute_rollouts=256, samplers=1, max_sequences=256, ranks=2)
    grid = site.write_grid("poisoned", options)
    return Ended(grid, options, poisoned.row, *site.run(grid).wait())


def test_a_poisoned_problem_fails_its_cell_alone(site: Site, poisoned: Ended, grown: Ended) -> None:
    for ended in (poisoned, grown):
        assert ended.exit_code == 1, ended.output
        assert f"{SICK} failed" in ended.output
    assert site.state(poisoned.grid, SICK)["state"] == "failed"
    # The larger budget left it alone.
    assert site.state(poisoned.grid, SICK)["attempt"] == 1


def test_explain_names_the_row_of_a_poisoned_problem(site: Site, poisoned: Ended) -> None:
    code, output = site.command("explain", str(site.run_dir(poisoned.grid)), SICK).wait()
    assert code == 0, output
    assert f"poisoned.jsonl, row {poisoned.row}" in " ".join(output.split())


def test_batches_spread_over_two_engines_give_the_bits_of_one(
    site: Site, undisturbed: Path, grown: Ended
) -> None:
    run_dir = site.run_dir(grown.grid)
    first = next(read_epochs(run_dir))
    # Before any cell, both engines are free for certain; which of them a step meets free, another cell decides.
    of_base = [record for record in first if (record.kind, record.cell) == (PhaseKind.EVALUATION, "base")]
    assert {record.member for record in of_base} == {"sampler 0", "sampler 1"}
    assert base_row(run_dir) == base_row(site.run_dir(undisturbed)) is not None
    # The marks are those of every budget, so the rows are the first ones of the larger run.
    rows, whole = site.history(grown.grid, HEALTHY), site.history(undisturbed, HEALTHY)
    assert [row["compute_rollouts"] for row in rows] == [64, 128, 256]
    assert [without_measured(row) for row in rows[:2]] == [without_measured(row) for row in whole[:2]]


def test_a_finished_cell_goes_on_to_a_larger_budget_also_on_other_ranks(
    site: Site, undisturbed: Path, grown: Ended
) -> None:
    state = site.state(grown.grid, HEALTHY)
    assert (state["state"], state["attempt"], state["commit"]["step"]) == ("finished", 2, 4)
    # Two FSDP ranks compute what one does up to rounding, which is said.
    (deviation,) = state["deviations"]
    assert "rank" in deviation
    two, one = site.history(grown.grid, HEALTHY)[2], site.history(undisturbed, HEALTHY)[2]
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-4)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
    assert two["kl"] == pytest.approx(one["kl"], rel=1e-2)
    assert np.max([row["logprob_difference"] for row in site.history(grown.grid, HEALTHY)]) < 1e-3
