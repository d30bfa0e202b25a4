"""Faults of every kind strike a real grid, which ends with the bits of one that was never disturbed."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.comparison import folder_differences, leftovers, tracking_differences
from benchmarks.site import QUICKSTART, GridOptions, Site
from benchmarks.strikes import Kind
from benchmarks.under_fire import UnderFire, small_disk
from workers.grading import evenly_spaced
from workers.problems import batch_indices

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

AS_A_JOB = (
    [Kind.ENGINE],
    [Kind.MLFLOW],
    [Kind.LEARNER],
    [Kind.VERIFIER],
    [Kind.STOPPED_ENGINE],
    [Kind.RAYLET],
    [Kind.CONTROLLER, Kind.CUT_HISTORY, Kind.CUT_TEMPORARY],
)
"""Strikes that are made together need one new start of the controller, not one each."""
STARTED_DIRECTLY = ([Kind.SIGTERM], [Kind.CLOCK], [Kind.DISK_FULL])
"""Here a clock can be handed in, and the time to drain is not cut short by Ray."""
POISON = "\N{SKULL AND CROSSBONES}"
VOCABULARY = 258
"""Rows of the shipped model's embedding."""
UNKNOWN_TOKEN = 330
"""Beyond what vLLM rounds the embedding up to."""


@pytest.fixture(scope="module")
def struck(site: Site, undisturbed: Path) -> Iterator[tuple[UnderFire, dict[Kind, float | None]]]:
    """The undisturbed run's grid under one fault of each kind, run to its end; the seconds until it went on from each."""
    grid = site.write_grid("struck", GridOptions(slots=1, commit_steps=1, grace_seconds=30))
    source = random.Random(0)
    with small_disk(site.run_dir(grid)) as mounted:
        fire = UnderFire(site, grid, "job", disk=mounted, seed=0, in_flight=1, say=print)
        seconds: dict[Kind, float | None] = {}
        try:
            for kinds in (*AS_A_JOB, *STARTED_DIRECTLY):
                if kinds is AS_A_JOB[-1]:
                    fire.how = "direct"  # from the start that follows
                assert fire.wait_for_progress(fire.committed()), "the grid was over before all had struck"
                seconds |= dict.fromkeys(kinds, fire.suffer(kinds, source))
            fire.wait_for_end()
        finally:
            fire.stop()
        yield fire, seconds


def test_every_kind_of_fault_strikes(struck: tuple[UnderFire, dict[Kind, float | None]]) -> None:
    _, seconds = struck
    assert set(seconds) == set(Kind)
    assert [kind for kind, spent in seconds.items() if spent is None] == []


def test_a_struck_grid_ends_with_the_bits_of_an_undisturbed_one(
    site: Site, undisturbed: Path, struck: tuple[UnderFire, dict[Kind, float | None]]
) -> None:
    fire, _ = struck
    assert fire.faults == []
    assert folder_differences(fire.run_dir, site.run_dir(undisturbed)) == []


def test_a_controller_that_is_told_to_stop_commits_what_it_has(
    struck: tuple[UnderFire, dict[Kind, float | None]],
) -> None:
    fire, _ = struck
    (end,) = [end for end in fire.ends if end.exit_code == 130]
    running = [cell for cell, state in end.states.items() if state not in ("finished", "pending")]
    assert running
    for cell in running:
        assert (end.states[cell], end.committed[cell]) == ("paused", end.made[cell])


def test_mlflow_has_each_point_of_a_struck_grid_once(
    site: Site, struck: tuple[UnderFire, dict[Kind, float | None]]
) -> None:
    fire, _ = struck
    assert tracking_differences(site.mlflow_uri, "struck", fire.run_dir) == []


def test_a_struck_grid_leaves_nothing_behind(
    site: Site, struck: tuple[UnderFire, dict[Kind, float | None]]
) -> None:
    fire, _ = struck
    assert leftovers(site, fire.run_dir) == []


def test_a_stuck_engine_leaves_its_stacks_or_a_word_about_it(
    struck: tuple[UnderFire, dict[Kind, float | None]],
) -> None:
    fire, _ = struck
    logs = "".join(path.read_text() for path in fire.run_dir.glob("cells/*/attempts/*/log.txt"))
    assert "stalled" in logs
    assert any("sampler 0" in path.read_text() for path in fire.run_dir.glob("cells/*/attempts/*/stacks.txt"))


@pytest.fixture(scope="module")
def poisoned(site: Site) -> tuple[Path, str, int]:
    """A grid of two ranks in which one problem breaks the engine; (grid, the cell that reaches it, the problem's row)."""
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
    # With 256 rollouts of 8 problems a step, n = 8 makes 4 steps and n = 4 makes 8: the second half is seen by n = 4 alone.
    (*_, poison) = [index for index in order[32:40] if index not in evenly_spaced(10, len(problems))]
    problem = json.loads(problems[poison])
    problems[poison] = json.dumps(problem | {"prompt": problem["prompt"].replace("+", f"+{POISON}")})
    train = site.folder / "poisoned.jsonl"
    train.write_text("\n".join(problems) + "\n")
    options = GridOptions(
        model=model, train=train, compute_rollouts=256, ranks=2, phase_repeats=0, stall_seconds=60
    )
    return site.write_grid("poisoned", options), "bp8-n4-s0", poison + 1


@pytest.fixture(scope="module")
def poisoned_end(site: Site, poisoned: tuple[Path, str, int]) -> tuple[int, str]:
    """Exit code and output of the poisoned grid."""
    return site.finish(poisoned[0])


def test_a_poisoned_problem_fails_its_cell_alone(
    site: Site, poisoned: tuple[Path, str, int], poisoned_end: tuple[int, str]
) -> None:
    grid, cell, _ = poisoned
    code, output = poisoned_end
    assert code == 1, output
    assert site.state(grid, cell)["state"] == "failed"
    assert site.state(grid, "bp8-n8-s0")["state"] == "finished"


def test_explain_names_the_row_of_a_poisoned_problem(
    site: Site, poisoned: tuple[Path, str, int], poisoned_end: tuple[int, str]
) -> None:
    grid, cell, row = poisoned
    code, output = site.command("explain", str(site.run_dir(grid)), cell).wait()
    assert code == 0, output
    assert f"poisoned.jsonl, row {row}" in " ".join(output.split())


def test_two_ranks_give_the_scores_of_one_at_first(
    site: Site, undisturbed: Path, poisoned: tuple[Path, str, int], poisoned_end: tuple[int, str]
) -> None:
    """Two FSDP ranks compute what one does, up to rounding, which sampling amplifies only later."""
    one, two = site.history(undisturbed, "bp8-n8-s0"), site.history(poisoned[0], "bp8-n8-s0")
    assert [row["compute_rollouts"] for row in two] == [64, 128, 256]
    assert two[0]["loss"] == pytest.approx(one[0]["loss"], abs=1e-4)
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-3)
    assert np.max([row["logprob_difference"] for row in two]) < 1e-3
