"""Reading a run folder."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.tables import headline_metric, read_base, read_history, read_reasons, read_states
from grids.errors import UserError

ROW = {
    "cell": "bp16-n4-s0",
    "problems_per_batch": 16,
    "rollouts_per_problem": 4,
    "seed": 0,
    "step": 1,
    "compute_rollouts": 64,
    "avg_at_4": 0.5,
}


def write_history(run: Path, text: str) -> Path:
    folder = run / "cells" / "bp16-n4-s0"
    folder.mkdir(parents=True)
    (folder / "history.jsonl").write_text(text)
    return folder


def test_a_history_line_without_newline_is_left_out(tmp_path: Path) -> None:
    later = json.dumps(ROW | {"step": 2, "compute_rollouts": 128})
    write_history(tmp_path, json.dumps(ROW) + "\n" + later[:-9])
    assert read_history(tmp_path)["step"].tolist() == [1]


def test_a_cell_without_rows_contributes_none(tmp_path: Path) -> None:
    write_history(tmp_path, "")
    (tmp_path / "cells" / "bp16-n8-s0").mkdir()
    history = read_history(tmp_path)
    assert len(history) == 0
    assert "compute_rollouts" in history.columns


def test_rows_are_ordered_by_cell_and_step(make_run: Callable[..., Path]) -> None:
    run = make_run([(16, 8, (0.3, 0.6, 3e3, 1.0)), (16, 4, (0.3, 0.6, 3e3, 1.0))], budget=4000)
    history = read_history(run)
    assert history["cell"].tolist() == 3 * ["bp16-n4-s0"] + 3 * ["bp16-n8-s0"]
    assert history["compute_rollouts"].tolist() == [1024, 2048, 3968, 1024, 2048, 3968]


@pytest.mark.parametrize("field", ["rollouts_per_problem", "compute_rollouts"])
def test_a_row_that_lacks_a_required_column_is_named(tmp_path: Path, field: str) -> None:
    broken = {name: value for name, value in ROW.items() if name != field} | {"step": 2}
    write_history(tmp_path, json.dumps(ROW) + "\n" + json.dumps(broken) + "\n")
    with pytest.raises(UserError, match=f"history.jsonl, row 2: lacks '{field}'"):
        read_history(tmp_path)


def test_a_row_without_a_validation_score_is_named(tmp_path: Path) -> None:
    broken = {name: value for name, value in ROW.items() if name != "avg_at_4"}
    write_history(tmp_path, json.dumps(broken) + "\n")
    with pytest.raises(UserError, match="row 1: lacks 'avg_at_K'"):
        read_history(tmp_path)


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    write_history(tmp_path, '{"cell": \n' + json.dumps(ROW) + "\n")
    with pytest.raises(UserError, match="row 1: not valid JSON"):
        read_history(tmp_path)


def test_a_step_that_occurs_twice_is_an_error(tmp_path: Path) -> None:
    write_history(tmp_path, 2 * (json.dumps(ROW) + "\n"))
    with pytest.raises(UserError, match="row 2: step 1 occurs twice"):
        read_history(tmp_path)


def test_a_missing_run_folder_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run folder") as caught:
        read_history(tmp_path / "nowhere")
    assert "\n" not in str(caught.value)


def test_the_base_row_is_optional(tmp_path: Path) -> None:
    assert read_base(tmp_path) is None
    (tmp_path / "base.json").write_text('{"avg_at_4": 0.25}')
    assert read_base(tmp_path) == {"avg_at_4": 0.25}


def test_states_and_reasons_are_read_and_a_cell_without_a_state_is_pending(tmp_path: Path) -> None:
    for cell, content in {
        "a": '{"state": "finished"}',
        "b": '{"state": "failed", "reason": "no memory"}',
    }.items():
        (tmp_path / "cells" / cell).mkdir(parents=True)
        (tmp_path / "cells" / cell / "state.json").write_text(content)
    (tmp_path / "cells" / "c").mkdir()
    assert read_states(tmp_path) == {"a": "finished", "b": "failed", "c": "pending"}
    assert read_reasons(tmp_path) == {"b": "no memory"}


def test_the_headline_is_the_first_average_with_a_real_k() -> None:
    assert headline_metric(["step", "best_at_4", "avg_at_16", "avg_at_4"]) == "avg_at_16"
    assert headline_metric(["avg_at_K", "avg_at_0"]) is None
