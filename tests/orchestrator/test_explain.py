"""Why a cell is in its state, and what its attempts left to read."""

import json
from pathlib import Path

import pytest

from grids.errors import UserError
from orchestrator.operating.asking import require_cells
from orchestrator.operating.attempt_logs import attempt_text, follow
from orchestrator.operating.explain import Explanation, attempt_rows, explanation, sentences
from orchestrator.store.cell_state import Spent, State
from orchestrator.store.holding import HolderWatch
from orchestrator.store.run_store import RunStore
from tests.orchestrator.small_run import attempt, held, make_run, small_grid

CELL = "bp2-n4-s0"


def explained(run_dir: Path, cell: str = CELL) -> Explanation:
    store = RunStore.existing(run_dir)
    facts = explanation(store, require_cells(store, [cell])[0], HolderWatch(store.lease_dir).look())
    assert json.loads(json.dumps(facts)) == facts
    return facts


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    """A cell that lost its learner once, then met a poisoned problem, and has failed."""
    run_dir = tmp_path / "run"
    make_run(run_dir)
    with held(run_dir) as store:
        attempt(store, CELL, 2)
        writer = store.cell(CELL)
        writer.write_failure(1, "Traceback: of the first attempt")
        writer.set_state(State.PENDING, spent=Spent(own_failures=1, at_step=2))
        writer.end_attempt("lost", "learner 0 rank 1 was lost", fault="process lost", phase="learning")
        writer.start_attempt()
        writer.log("sampling of step 3 failed")
        writer.write_failure(2, "Traceback: IndexError")
        writer.set_state(State.FAILED, "IndexError in step 3", deviations=("2 learner ranks after 1",))
        writer.end_attempt(
            "failed",
            "IndexError in step 3",
            fault="poisoned",
            phase="sampling",
            problems=("train.jsonl, row 17",),
        )
        writer.close()
    return run_dir


def test_a_failed_cell_names_the_problem_row_and_what_was_tried(poisoned: Path) -> None:
    facts = explained(poisoned)
    assert facts["problems"] == ["train.jsonl, row 17"]
    assert [
        (row["attempt"], row["from step"], row["to step"], row["outcome"], row["fault"], row["phase"])
        for row in attempt_rows(facts)
    ] == [(1, 1, 2, "lost", "process lost", "learning"), (2, 3, 2, "failed", "poisoned", "sampling")]
    text = "\n".join(sentences(facts))
    assert f"{CELL} has failed at step 2 of 8 after 2 attempts" in text
    assert "Reason: IndexError in step 3" in text
    assert "Problem: train.jsonl, row 17" in text
    assert "Not bit for bit an undisturbed run: 2 learner ranks after 1" in text


def test_budgets_are_counted_against_the_grids(poisoned: Path) -> None:
    assert explained(poisoned)["budgets"] == {
        "own_failures": {"spent": 1, "allowed": 3, "left": 2, "since_step": 2},
        "preemptions": {"spent": 0, "allowed": 100, "left": 100, "since_step": 2},
    }


def test_the_evidence_is_where_it_is_said_to_lie(poisoned: Path) -> None:
    evidence = explained(poisoned)["evidence"]
    assert Path(evidence["traceback"]).read_text() == "Traceback: IndexError"
    assert "sampling of step 3 failed" in Path(evidence["log"]).read_text()
    assert Path(evidence["history"]).read_text().count("\n") == 2
    assert evidence["MLflow"].endswith(f"experiment quickstart, run {CELL}")
    assert "stacks" not in evidence


@pytest.mark.parametrize(
    ("state", "said", "alone", "beside_a_controller"),
    [
        (
            State.FAILED,
            "has failed",
            "resume {run} --cell {cell}",
            "retry {run} --cell {cell} --reset-budget",
        ),
        (
            State.CANCELLED,
            "was cancelled",
            "resume {run} --cell {cell}",
            "retry {run} --cell {cell} --reset-budget",
        ),
        (State.PAUSED, "is paused", "resume {run} --cell {cell}", "retry {run} --cell {cell} --reset-budget"),
        (State.DIVERGED, "which is a result", "fit {run}", "fit {run}"),
        (State.FINISHED, "is finished", "fit {run}", "fit {run}"),
        (State.PENDING, "waits to go on from step 8 of 8", "resume {run}", "logs {run} {cell} --follow"),
    ],
)
def test_what_goes_on_from_here(
    tmp_path: Path, state: State, said: str, alone: str, beside_a_controller: str
) -> None:
    run_dir = tmp_path / "run"
    make_run(run_dir)
    with held(run_dir) as store:
        attempt(store, CELL, 8, state, "because")
        assert explained(run_dir)["next"] == "isocompute " + beside_a_controller.format(
            run=run_dir, cell=CELL
        )
    facts = explained(run_dir)
    assert said in facts["summary"]
    assert facts["next"] == "isocompute " + alone.format(run=run_dir, cell=CELL)


def test_a_running_cell_whose_controller_was_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    make_run(run_dir)
    with held(run_dir) as store:
        attempt(store, CELL, 3)
        assert attempt_rows(explained(run_dir))[0]["outcome"] == "running"
    facts = explained(run_dir)
    assert (
        "was running (attempt 1) when its controller was lost; it goes on from step 3 of 8"
        in facts["summary"]
    )
    assert attempt_rows(facts)[0]["outcome"] == "broken off with its controller"


def test_cells_that_wait(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    make_run(run_dir, small_grid(compute_rollouts=128))
    with held(run_dir) as store:
        attempt(store, CELL, 8, State.FINISHED)
    assert "was never tried" in explained(run_dir, "bp2-n4-s1")["summary"]
    assert "finished a smaller budget" in explained(run_dir)["summary"]
    assert explained(run_dir)["state"] == "pending"


def test_the_log_of_an_attempt_with_its_traceback(poisoned: Path) -> None:
    cell = RunStore.existing(poisoned).cell(CELL)
    text = attempt_text(cell)
    folder = poisoned / "cells" / CELL / "attempts" / "2"
    assert text.startswith(f"== {folder / 'log.txt'}\n")
    assert text.endswith(f"sampling of step 3 failed\n== {folder / 'traceback.txt'}\nTraceback: IndexError\n")
    assert (
        attempt_text(cell, 1)
        == f"== {folder.parent / '1' / 'traceback.txt'}\nTraceback: of the first attempt\n"
    )
    with pytest.raises(UserError, match=r"has no attempt 3; it has 1 to 2"):
        attempt_text(cell, 3)
    with held(poisoned) as store:
        attempt(store, "bp2-n4-s2", 1)
    with pytest.raises(UserError, match=r"attempt 1 of bp2-n4-s2 left no log; 'explain' shows"):
        attempt_text(RunStore.existing(poisoned).cell("bp2-n4-s2"))
    with pytest.raises(UserError, match=r"was never tried"):
        attempt_text(RunStore.existing(poisoned).cell("bp2-n4-s1"))


def test_following_shows_each_line_once_and_goes_over_to_the_next_attempt(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    make_run(run_dir)
    with held(run_dir) as store:
        writer = store.cell(CELL)
        writer.start_attempt()
        writer.log("one")

        def second() -> None:
            writer.log("two")
            writer.set_state(State.PENDING)
            writer.start_attempt()
            writer.log("three")

        def third() -> None:
            writer.log("four")
            writer.set_state(State.FAILED, "broken")

        events = iter([lambda: writer.log("and a half"), second, third])
        pieces = list(
            follow(RunStore.existing(run_dir).cell(CELL), None, lambda: True, lambda: next(events)())
        )
        writer.close()
    text = "".join(pieces)
    heads = [line for line in text.splitlines() if line.startswith("==")]
    assert [Path(line).parent.name for line in heads] == ["1", "2"]
    # "two" is the last line of an attempt that ended between two looks.
    assert [line.split(" ", 1)[1] for line in text.splitlines() if not line.startswith("==")] == [
        "one",
        "and a half",
        "two",
        "three",
        "four",
    ]


def test_following_ends_when_nobody_holds_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    make_run(run_dir)
    with held(run_dir) as store:
        writer = store.cell(CELL)
        writer.start_attempt()
        writer.log("one")
        writer.close()
    pieces = list(
        follow(RunStore.existing(run_dir).cell(CELL), None, lambda: False, lambda: pytest.fail("waited"))
    )
    assert len(pieces) == 1 and pieces[0].endswith(" one\n")
