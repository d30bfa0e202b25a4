"""Run folders and tidy tables, whole and damaged, become the same tables."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from analysis.reading.sources import (
    build_tables,
    merge,
    read_run,
    read_sources,
    read_table,
    tables_from_frame,
)
from grids.errors import UserError
from grids.loading import dump_grid, load_grid

GRID = Path(__file__).parents[2] / "grids" / "quickstart.yaml"


def rows_of(cell: str, steps: int = 4, score: float = 0.25) -> list[dict[str, Any]]:
    """Rows of a cell that is named after its allocation, two problems and four answers each."""
    problems, n, seed = (int(part.lstrip("bpns")) for part in cell.split("-"))
    return [
        {
            "cell": cell,
            "problems_per_batch": problems,
            "rollouts_per_problem": n,
            "seed": seed,
            "step": step,
            "compute_rollouts": step * problems * n,
            "avg_at_4": score,
            "eval_right": [round(8 * score), 0],
            "seconds_sampling": 0.5 * step,
        }
        for step in range(1, steps + 1)
    ]


def write_cell(
    run: Path, cell: str, rows: list[dict[str, Any]], state: str = "finished", **others: Any
) -> Path:
    folder = run / "cells" / cell
    folder.mkdir(parents=True)
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = {"cell": cell, "state": state, "reason": None, "commit": {"history_rows": len(rows)}} | others
    (folder / "state.json").write_text(json.dumps(record))
    return folder


def write_grid(run: Path, **identity: Any) -> None:
    """The quickstart's grid: cells bp16-n4-s0, bp16-n16-s0 and bp16-n64-s0."""
    spec = dump_grid(load_grid(GRID))
    content = {"version": 1, "resolved": {"spec": spec}, "identity": {"name": "q", "model": "m"} | identity}
    run.mkdir(parents=True, exist_ok=True)
    (run / "grid.yaml").write_text(yaml.safe_dump(content))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A whole run folder of the quickstart's three cells."""
    run = tmp_path / "quickstart"
    write_grid(run)
    for cell in ("bp16-n4-s0", "bp16-n16-s0", "bp16-n64-s0"):
        write_cell(run, cell, rows_of(cell))
    (run / "base.json").write_text(json.dumps({"compute_rollouts": 0, "avg_at_4": 0.125, "samples": [{}]}))
    return run


def test_a_whole_run_folder_is_read_without_complaint(run):
    tables = read_run(run)
    assert tables.name == "quickstart"
    assert tables.history["cell"].unique().tolist() == ["bp16-n16-s0", "bp16-n4-s0", "bp16-n64-s0"]
    assert tables.history["compute_rollouts"].tolist()[:4] == [256, 512, 768, 1024]
    assert tables.history["eval_right"].iloc[0].tolist() == [2, 0]
    assert tables.base == {"compute_rollouts": 0, "avg_at_4": 0.125}
    assert tables.states == dict.fromkeys(["bp16-n16-s0", "bp16-n4-s0", "bp16-n64-s0"], "finished")
    assert tables.spec is not None and tables.spec["name"] == "quickstart"
    assert tables.complaints == {}


def test_rows_in_memory_give_the_same_tables_as_the_run_folder_that_holds_them(run):
    read = read_run(run)
    rows = {cell: list(reversed(rows_of(cell))) for cell in read.states}
    built = build_tables("quickstart", rows, {"avg_at_4": 0.125}, read.states, {}, read.spec)
    pd.testing.assert_frame_equal(built.history, read.history, check_exact=True)
    assert (built.base, built.complaints, built.spec) == (read.base, read.complaints, read.spec)


def test_a_history_cut_anywhere_keeps_its_whole_rows_and_says_how_many_are_missing(run):
    path = run / "cells" / "bp16-n64-s0" / "history.jsonl"
    whole = path.read_bytes()
    length = len(whole) // 4
    assert {len(line) for line in whole.splitlines(keepends=True)} == {length}
    for size in (0, 1, length // 2, length - 1, length, length + 1, 2 * length + 7, len(whole) - 2):
        path.write_bytes(whole[:size])
        tables = read_run(run)
        rows = size // length + (size % length == length - 1)  # only the newline is missing
        assert (tables.history["cell"] == "bp16-n64-s0").sum() == rows
        assert f"history holds {rows} of 4 committed rows" in tables.complaints["bp16-n64-s0"]
        inside = [words for words in tables.complaints["bp16-n64-s0"] if "ends inside row" in words]
        assert len(inside) == (size % length not in (0, length - 1))
        assert set(tables.complaints) == {"bp16-n64-s0"}


def test_a_broken_line_is_named_and_the_rest_is_the_same_as_without_it(run):
    whole = read_run(run)
    path = run / "cells" / "bp16-n4-s0" / "history.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], '{"step": 2, "avg', "7", *lines[2:]]) + "\n")
    tables = read_run(run)
    words = "history.jsonl row {} is no JSON object; it is left out"
    assert tables.complaints == {
        "bp16-n4-s0": [words.format(2), words.format(3), "history holds 3 of 4 committed rows"]
    }
    lost = (whole.history["cell"] == "bp16-n4-s0") & (whole.history["step"] == 2)
    expected = whole.history[~lost].reset_index(drop=True)
    pd.testing.assert_frame_equal(tables.history, expected, check_exact=True)


@pytest.mark.parametrize(
    "counts", ["[2,  0]", "[2, 0,]", "[2 0]", "[2, -1]", "[]", "null", "[99999999999, 0]", '"2, 0"']
)
def test_counts_are_read_as_json_reads_them(run, counts):
    path = run / "cells" / "bp16-n4-s0" / "history.jsonl"
    path.write_text(path.read_text().replace("[2, 0]", counts, 1))
    tables = read_run(run)
    first = tables.history[tables.history["cell"] == "bp16-n4-s0"]["eval_right"].iloc[0]
    if counts in ("[2, 0,]", "[2 0]"):  # no JSON: the row is gone
        assert first.tolist() == [2, 0] and len(tables.history) == 11
    else:
        assert len(tables.history) == 12
        assert (None if first is None else first.tolist()) == ([2, 0] if counts == "[2,  0]" else None)
    assert (tables.complaints == {}) == (counts in ("[2,  0]", "null"))


def test_nan_in_a_history_is_a_missing_score(run):
    path = run / "cells" / "bp16-n4-s0" / "history.jsonl"
    path.write_text(path.read_text().replace('"avg_at_4": 0.25', '"avg_at_4": NaN', 1))
    tables = read_run(run)
    assert tables.history["avg_at_4"].isna().sum() == 1 and len(tables.history) == 12
    assert tables.complaints == {"bp16-n4-s0": ["1 row without avg_at_4; not used for its curve"]}


def test_a_cell_that_the_grid_has_and_the_run_has_not_is_missing(run):
    for path in (run / "cells" / "bp16-n16-s0").iterdir():
        path.unlink()
    (run / "cells" / "bp16-n16-s0").rmdir()
    tables = read_run(run)
    assert tables.complaints == {"bp16-n16-s0": ["missing: the grid has this cell, the run has not"]}
    assert "bp16-n16-s0" not in tables.states


def test_unreadable_states_are_named_and_their_rows_used(run):
    for cell, content in (("bp16-n4-s0", "{"), ("bp16-n16-s0", "[]"), ("bp16-n64-s0", '{"state": 3}')):
        (run / "cells" / cell / "state.json").write_text(content)
    tables = read_run(run)
    assert tables.states == {}
    assert len(tables.history) == 12
    words = "every cell of quickstart, such as bp16-n16-s0: state.json cannot be read; it is ignored"
    assert tables.complaints == {"grid": [words]}


def test_a_run_of_format_version_2_is_read_and_its_cancelled_cells_rows_are_used(run, tmp_path):
    content = yaml.safe_load((run / "grid.yaml").read_text())
    content |= {"version": 2, "submissions": [{"at": 0.0, "versions": {}, "changed": []}]}
    later = tmp_path / "later"
    later.mkdir()
    (later / "grid.yaml").write_text(yaml.safe_dump(content))
    spent = {"own_failures": 1, "preemptions": 0, "at_step": 2}
    others = {"version": 2, "spent": spent, "deviations": ["from step 2 on: ranks 1 -> 2"]}
    cell = write_cell(later, "bp16-n4-s0", rows_of("bp16-n4-s0"), "cancelled", reason="by hand", **others)
    (cell / "attempts" / "1").mkdir(parents=True)
    (cell / "attempts" / "1" / "attempt.json").write_text('{"attempt": 1, "outcome": "cancelled"}')
    tables = read_run(later)
    assert tables.history["step"].tolist() == [1, 2, 3, 4]
    assert tables.states == {"bp16-n4-s0": "cancelled"} and tables.reasons == {"bp16-n4-s0": "by hand"}
    assert tables.deviations == {"bp16-n4-s0": ("from step 2 on: ranks 1 -> 2",)}
    assert "bp16-n4-s0" not in tables.complaints
    assert read_run(run).deviations == {}
    assert len(read_sources([run, later])) == 1, "one setting, whatever the version"


def test_cells_without_rows_keep_state_and_reason(run):
    (run / "cells" / "bp16-n4-s0" / "history.jsonl").unlink()
    state = {"state": "failed", "reason": "no memory", "commit": None}
    (run / "cells" / "bp16-n4-s0" / "state.json").write_text(json.dumps(state))
    for path in (run / "cells" / "bp16-n16-s0").iterdir():
        path.unlink()
    tables = read_run(run)
    assert tables.states["bp16-n4-s0"] == "failed" and tables.reasons == {"bp16-n4-s0": "no memory"}
    assert tables.states["bp16-n16-s0"] == "pending"
    assert tables.complaints == {cell: ["no evaluated step yet"] for cell in ("bp16-n16-s0", "bp16-n4-s0")}


def test_rows_of_a_cell_without_a_state_are_used_and_its_state_is_not_known(run):
    (run / "cells" / "bp16-n4-s0" / "state.json").unlink()
    tables = read_run(run)
    assert len(tables.history) == 12 and "bp16-n4-s0" not in tables.states
    assert tables.complaints == {"bp16-n4-s0": ["state.json is missing; its rows are used"]}


def test_a_run_folder_without_its_grid_or_base_is_read_and_what_that_costs_is_said(run):
    (run / "grid.yaml").unlink()
    (run / "base.json").unlink()
    tables = read_run(run)
    assert len(tables.history) == 12
    assert tables.base is None and tables.spec is None
    assert tables.complaints == {
        "base": ["base.json is missing; curves are fitted without the score at C = 0"],
        "grid": ["grid.yaml is missing; missing cells are not known"],
    }


def test_a_source_given_twice_is_used_once_and_that_is_said_once(run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    (tables,) = read_sources([run, tmp_path / "link", run])
    assert tables.name == "quickstart" and len(tables.history) == 12
    assert tables.complaints == {"grid": [f"{run} is given 3 times; used once"]}
    frame_of("bp16-n4-s0").to_parquet(tmp_path / "sweep.parquet")
    (tables,) = read_sources([tmp_path / "sweep.parquet"] * 2)
    assert tables.complaints == {"grid": [f"{tmp_path / 'sweep.parquet'} is given twice; used once"]}


@pytest.mark.parametrize("content", ["{", "7", "identity: {}", "resolved: {spec: {name: q}}"])
def test_a_grid_that_cannot_be_read_is_named(run, content):
    (run / "grid.yaml").write_text(content)
    tables = read_run(run)
    assert len(tables.history) == 12
    assert "missing cells are not known" in tables.complaints["grid"][0]


def test_what_is_no_source_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "table.parquet").write_text("x")
    (tmp_path / "empty.csv").write_text("")
    for path, words in (
        (tmp_path / "nowhere", "no such file or run folder"),
        (tmp_path, "no run folder (neither grid.yaml nor cells/ in it)"),
        (tmp_path / "notes.txt", "neither a run folder nor a .csv or .parquet file"),
        (tmp_path / "table.parquet", "cannot be read as parquet"),
        (tmp_path / "empty.csv", "holds no header"),
    ):
        with pytest.raises(UserError) as error:
            read_sources([path])
        assert str(path) in str(error.value) and words in str(error.value)
        assert "\n" not in str(error.value)


def frame_of(*cells: str, **columns: Any) -> pd.DataFrame:
    return pd.DataFrame([row for cell in cells for row in rows_of(cell)]).assign(**columns)


def test_csv_parquet_and_frames_give_the_same_tables(tmp_path):
    frame = frame_of("bp16-n4-s0", "bp16-n16-s0")
    frame.loc[3, "seconds_sampling"] = None
    frame.to_parquet(tmp_path / "sweep.parquet")
    frame.assign(eval_right=frame["eval_right"].map(json.dumps)).to_csv(tmp_path / "sweep.csv", index=False)
    expected = tables_from_frame(frame, "sweep")
    assert len(expected.history) == 8 and expected.complaints == {}
    for path in (tmp_path / "sweep.csv", tmp_path / "sweep.parquet"):
        (tables,) = read_table(path)
        assert tables.name == "sweep"
        pd.testing.assert_frame_equal(tables.history, expected.history, check_exact=True)


def test_cell_seed_and_one_of_step_and_compute_may_be_left_out(tmp_path):
    frame = frame_of("bp16-n4-s0", "bp16-n16-s0").drop(columns=["cell", "seed", "step", "eval_right"])
    frame.to_csv(tmp_path / "sweep.csv", index=False)
    (tables,) = read_table(tmp_path / "sweep.csv")
    assert tables.history["cell"].unique().tolist() == ["bp16-n16-s0", "bp16-n4-s0"]
    assert tables.history["step"].tolist() == [1, 2, 3, 4] * 2
    without_compute = tables_from_frame(frame.assign(step=[1, 2, 3, 4] * 2).drop(columns="compute_rollouts"))
    pd.testing.assert_frame_equal(without_compute.history, tables.history, check_exact=True)


def test_states_of_a_table_are_read():
    assert tables_from_frame(frame_of("bp16-n4-s0", state="failed")).states == {"bp16-n4-s0": "failed"}
    assert tables_from_frame(frame_of("bp16-n4-s0")).states == {}


def test_broken_counts_of_a_csv_are_named_and_the_others_read(tmp_path):
    frame = frame_of("bp16-n4-s0", eval_right=["[2, 0]", "[2, 0", "", "[0,2]"])
    frame.to_csv(tmp_path / "sweep.csv", index=False)
    (tables,) = read_table(tmp_path / "sweep.csv")
    assert [None if v is None else v.tolist() for v in tables.history["eval_right"]] == [
        [2, 0],
        None,
        None,
        [0, 2],
    ]
    assert tables.complaints == {"bp16-n4-s0": ["eval_right is no list of counts in 1 row; taken as missing"]}


def test_missing_columns_are_named_with_what_was_probably_meant():
    frame = frame_of("bp16-n4-s0").rename(columns={"rollouts_per_problem": "rollout_per_problem"})
    with pytest.raises(
        UserError, match="lacks column 'rollouts_per_problem', is 'rollout_per_problem' meant"
    ):
        tables_from_frame(frame)
    frame = frame_of("bp16-n4-s0").drop(columns=["step", "compute_rollouts", "avg_at_4"])
    with pytest.raises(
        UserError, match=r"lacks column 'compute_rollouts' \(or 'step'\); add or .*; needs a score"
    ):
        tables_from_frame(frame)


def test_a_table_without_rows_is_refused():
    with pytest.raises(UserError, match="holds no row"):
        tables_from_frame(frame_of("bp16-n4-s0").head(0))


def test_a_table_of_several_models_is_several_settings(tmp_path):
    both = [
        frame_of("bp16-n4-s0", model="big", problems="easy"),
        frame_of("bp16-n4-s0", model="small", problems="easy"),
    ]
    pd.concat(both).to_csv(tmp_path / "sweep.csv", index=False)
    assert [(t.name, len(t.history)) for t in read_table(tmp_path / "sweep.csv")] == [
        ("big, easy", 4),
        ("small, easy", 4),
    ]
    with pytest.raises(UserError, match="holds 2 settings"):
        tables_from_frame(pd.concat(both))


def test_runs_of_one_setting_are_one_and_of_another_stay_apart(tmp_path):
    sources = []
    for name, cell, identity in (
        (
            "first",
            "bp16-n4-s0",
            {"grid": {"seeds": [0]}, "evaluation": {"samples_per_problem": 4, "first_mark": 8}},
        ),
        (
            "more",
            "bp16-n4-s1",
            {"grid": {"seeds": [1]}, "evaluation": {"samples_per_problem": 4, "first_mark": 9}},
        ),
        ("other", "bp16-n4-s0", {"model": "another", "evaluation": {"samples_per_problem": 4}}),
    ):
        sources.append(tmp_path / name)
        write_grid(sources[-1], **identity)
        write_cell(sources[-1], cell, rows_of(cell))
    one, another = read_sources(sources)
    assert (one.name, another.name) == ("first + more", "other")
    assert one.history["cell"].unique().tolist() == ["bp16-n4-s0", "bp16-n4-s1"]
    assert one.history["seed"].tolist() == [0] * 4 + [1] * 4


def test_folders_of_one_name_are_told_apart_by_their_parents(tmp_path):
    for parent in ("a", "b"):
        write_grid(tmp_path / parent / "run", model=parent)
    names = [tables.name for tables in read_sources([tmp_path / "a" / "run", tmp_path / "b" / "run"])]
    assert names == ["a/run", "b/run"]


def test_of_a_cell_in_two_sources_the_one_with_more_compute_is_kept():
    cell = "bp16-n4-s0"
    short = build_tables("short", {cell: rows_of(cell, 2, 0.5)}, None, {cell: "failed"}, {cell: "lost"}, None)
    long = build_tables("long", {cell: rows_of(cell, 3)}, {"avg_at_4": 0.1}, {cell: "finished"}, {}, None)
    short = replace(short, deviations={cell: ("ranks 2 -> 1",)})
    long = replace(long, deviations={cell: ("ranks 1 -> 2",)})
    for tables in (merge([short, long]), merge([long, short])):
        assert tables.deviations == {cell: ("ranks 1 -> 2",)}
        assert tables.history["avg_at_4"].tolist() == [0.25] * 3
        assert tables.states == {cell: "finished"} and tables.reasons == {}
        assert tables.base == {"compute_rollouts": 0, "avg_at_4": 0.1}
        assert tables.complaints == {
            cell: ["in several sources: long (to C = 192) is used, not short (to C = 128)"]
        }


def test_a_cell_that_one_source_lacks_and_another_has_is_not_missing(run, tmp_path):
    (run / "cells" / "bp16-n4-s0").rename(tmp_path / "kept")
    later = tmp_path / "later"
    write_grid(later)
    (later / "cells").mkdir()
    (tmp_path / "kept").rename(later / "cells" / "bp16-n4-s0")
    (tables,) = read_sources([run, later])
    assert len(tables.history) == 12
    assert tables.complaints == {}


def test_columns_that_one_source_lacks_are_missing_there():
    first = build_tables("a", {"bp16-n4-s0": rows_of("bp16-n4-s0", 1)}, None, {}, {}, None)
    bare = [{k: v for k, v in row.items() if k != "eval_right"} for row in rows_of("bp16-n4-s1", 1)]
    second = build_tables("b", {"bp16-n4-s1": bare}, None, {}, {}, None)
    counts = merge([first, second]).history["eval_right"]
    assert counts.iloc[0].tolist() == [2, 0] and counts.iloc[1] is None


@pytest.mark.parametrize("spec", ["x", 7, ["x"]])
def test_a_spec_that_is_no_mapping_is_complained_about_and_the_rows_are_read(run, spec):
    (run / "grid.yaml").write_text(yaml.safe_dump({"version": 1, "resolved": {"spec": spec}}))
    tables = read_run(run)
    assert tables.spec is None
    assert len(tables.history) == 12
    assert set(tables.complaints) == {"grid"}
    assert "grid cannot be read" in tables.complaints["grid"][0]
