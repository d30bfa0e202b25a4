"""What ``prescribe`` prints and the grids that it writes."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pydantic import ValidationError
from ruamel.yaml import YAML
from typer.testing import CliRunner

from analysis.findings import analyse
from analysis.options import FitOptions
from analysis.prescribing.prescription import Prescription, prescribe
from analysis.reading.sources import tables_from_frame
from analysis.tables import GridTables
from grids.errors import UserError
from grids.expansion import evaluated_steps, expand
from grids.loading import dump_grid, load_grid
from grids.spec import GridSpec
from orchestrator.cli import app
from orchestrator.results.prescribing import prescribe_settings, prescription_yaml
from orchestrator.tables import Format

PAPER_EASY = Path(__file__).parents[2] / "grids" / "paper_easy_qwen2.5_7b.yaml"
OPTIONS = FitOptions(replicates=0)


def tables(spec: dict[str, Any] | None = None, name: str = "easy") -> GridTables:
    """bp32-n8 levels early at 0.6, bp32-n64 late at 0.8; evaluated at 2^12 to 2^20 rollouts."""
    rows = [
        {
            "problems_per_batch": 32,
            "rollouts_per_problem": n,
            "step": compute // (32 * n),
            "compute_rollouts": compute,
            "avg_at_4": 0.3 + gain / (1 + middle / compute),
        }
        for n, gain, middle in ((8, 0.3, 1e4), (64, 0.5, 1e5))
        for compute in (2**power for power in range(12, 21))
    ]
    return replace(tables_from_frame(pd.DataFrame(rows), name, {"avg_at_4": 0.3}), spec=spec)


@pytest.fixture
def paper_easy() -> dict[str, Any]:
    return dump_grid(load_grid(PAPER_EASY))


def prescribed(budget: float, spec: dict[str, Any] | None = None) -> Prescription:
    return prescribe(analyse(tables(spec), OPTIONS), budget)


@pytest.mark.parametrize("budget", [5_000, 65_536, 1_000_000, 4_000_000])
def test_the_grid_has_exactly_the_prescribed_cell(
    budget: int, paper_easy: dict[str, Any], tmp_path: Path
) -> None:
    prescription = prescribed(budget, paper_easy)
    path = tmp_path / "next.yaml"
    path.write_text(prescription_yaml(prescription, paper_easy))
    spec = load_grid(path)
    (cell,) = expand(spec)
    best = prescription.best
    assert (cell.rollouts_per_problem, cell.problems_per_batch) == (best.allocation.rollouts_per_problem, 32)
    assert (cell.update_steps, cell.learning_rate) == (best.update_steps, best.learning_rate)
    assert evaluated_steps(cell, spec.evaluation)[-1] == cell.update_steps  # its final score is measured
    assert spec.name == "paper-easy-qwen2.5-7b-prescribed" and spec.grid.seeds == [0]


def test_everything_else_is_the_grids_own(paper_easy: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "next.yaml"
    path.write_text(prescription_yaml(prescribed(1_000_000, paper_easy), paper_easy))
    written = dump_grid(load_grid(path))
    changed = {key for key in paper_easy if written[key] != paper_easy[key]}
    assert changed == {"name", "grid", "evaluation"}
    kept = {key: value for key, value in paper_easy["evaluation"].items() if key != "first_mark"}
    assert {key: value for key, value in written["evaluation"].items() if key != "first_mark"} == kept


def test_the_file_says_what_it_rests_on(paper_easy: dict[str, Any]) -> None:
    text = prescription_yaml(prescribed(2**22, paper_easy), paper_easy)
    comment = " ".join(line[1:].strip() for line in text.splitlines() if line.startswith("#"))
    assert comment.startswith("Prescribed by isocompute from easy. warning: extrapolates: ")
    assert "Budget: 4.194M rollouts." in comment
    assert "n = 64, B_p = 32, M = 2,048" in comment and "Expected avg@4: 0.78" in comment
    assert "no intervals" in comment


def test_the_file_and_the_terminal_lead_with_the_warning(
    paper_easy: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "next.yaml"
    prescribe_settings([tables(paper_easy)], "4M-rollouts", OPTIONS, yaml_path=path)
    name, first, *_ = capsys.readouterr().out.split("\n")[1:]
    assert name == "easy" and first.startswith("warning: extrapolates: no allocation was observed")
    assert "held-out check" in first and "their choice loses" in first
    assert path.read_text().splitlines()[1].startswith("# warning: extrapolates")


def test_the_warning_leads_the_remarks_of_a_piped_table(capsys: pytest.CaptureFixture[str]) -> None:
    prescribe_settings([tables()], "4M-rollouts", OPTIONS, format_=Format.JSON)
    captured = capsys.readouterr()
    assert captured.err.startswith("easy: warning: extrapolates")
    assert json.loads(captured.out)[0]["warning"].startswith("extrapolates")


def test_without_a_grid_only_its_section_is_written() -> None:
    text = prescription_yaml(prescribed(1_000_000), None)
    assert YAML(typ="safe", pure=True).load(text) == {
        "grid": {
            "problems_per_batch": [32],
            "rollouts_per_problem": [64],
            "max_batch_rollouts": 2048,
            "compute_rollouts": 488 * 2048,
        }
    }
    assert "# This is the grid section only" in text


def test_the_terminal_says_that_a_file_is_the_grid_section_only_and_what_is_missing(
    paper_easy: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "next.yaml"
    prescribe_settings([tables()], "1M-rollouts", OPTIONS, yaml_path=path)
    (wrote,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("wrote")]
    assert "the grid section only" in wrote
    document = YAML(typ="safe", pure=True).load(path.read_text())
    missing = wrote.partition("; add ")[2].partition(" before")[0].split(", ")
    with pytest.raises(ValidationError):
        GridSpec.model_validate(document)
    GridSpec.model_validate(document | {name: paper_easy[name] for name in missing})
    prescribe_settings([tables(paper_easy)], "1M-rollouts", OPTIONS, yaml_path=path)
    assert "section only" not in capsys.readouterr().out


def test_a_cell_beyond_the_bounds_of_a_grid_is_refused(paper_easy: dict[str, Any]) -> None:
    found = prescribed(1_000_000, paper_easy)
    endless = replace(found, best=replace(found.best, update_steps=10**9))
    with pytest.raises(UserError, match=r"--yaml: .*compute_rollouts"):
        prescription_yaml(endless, paper_easy)


def test_people_get_the_prescription_its_rivals_and_remarks(
    paper_easy: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "next.yaml"
    prescribe_settings([tables(paper_easy)], "1M-rollouts", OPTIONS, yaml_path=path)
    printed = capsys.readouterr().out
    assert "n = 64, B_p = 32, M = 488, learning rate 1.414e-06: C = 999,424 rollouts." in printed
    assert "Expected avg@4: 0.75" in printed
    assert "remark: bp32-n64 lies on the grid's edge: beside it no larger n was tried" in printed
    assert f"wrote {path}" in printed and load_grid(path).grid.max_batch_rollouts == 2048


def test_json_is_one_object_for_each_setting(capsys: pytest.CaptureFixture[str]) -> None:
    prescribe_settings([tables(), tables(name="hard")], "1M-rollouts", OPTIONS, format_=Format.JSON)
    captured = capsys.readouterr()
    first, second = json.loads(captured.out)
    assert (first["setting"], second["setting"]) == ("easy", "hard")
    assert first["best"]["rollouts_per_problem"] == 64 and first["best"]["compute_rollouts"] == 999_424
    assert first["runners_up"][0]["rollouts_per_problem"] == 8 and first["extrapolates"] is False
    assert "easy: no intervals" in captured.err


def test_csv_is_one_line_for_each_allocation(capsys: pytest.CaptureFixture[str]) -> None:
    prescribe_settings([tables()], "65_536 rollouts", OPTIONS, format_=Format.CSV)
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["rank"], row["rollouts_per_problem"], row["update_steps"]) for row in rows] == [
        ("1", "8", "256"),
        ("2", "64", "32"),
    ]
    assert rows[0]["unit"] == "rollouts" and rows[0]["reward_interval_low"] == ""
    assert rows[0]["observed_compute_low"] == "4096.0"


def test_a_file_of_the_users_is_never_overwritten(paper_easy: dict[str, Any], tmp_path: Path) -> None:
    own = tmp_path / "grid.yaml"
    own.write_text("name: mine\n")
    with pytest.raises(UserError, match=r"--yaml: .*grid\.yaml exists"):
        prescribe_settings([tables(paper_easy)], "1M-rollouts", OPTIONS, yaml_path=own)
    assert own.read_text() == "name: mine\n"


def test_a_prescribed_file_is_written_anew(paper_easy: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "next.yaml"
    for budget in ("1M-rollouts", "65k-rollouts"):
        prescribe_settings([tables(paper_easy)], budget, OPTIONS, yaml_path=path)
    assert load_grid(path).grid.max_batch_rollouts == 256


def test_a_grid_is_written_for_one_setting_only(tmp_path: Path) -> None:
    both = [tables(), tables(name="hard")]
    with pytest.raises(UserError, match=r"hold 2 \(easy; hard\); give the sources of one setting"):
        prescribe_settings(both, "1M-rollouts", OPTIONS, yaml_path=tmp_path / "next.yaml")
    many = [tables(name=f"s{i}") for i in range(9)]
    with pytest.raises(UserError, match=r"hold 9 \(s0; s1; s2; and 6 more\)"):
        prescribe_settings(many, "1M-rollouts", OPTIONS, yaml_path=tmp_path / "next.yaml")
    with pytest.raises(UserError, match="is no folder"):
        prescribe_settings([tables()], "1M-rollouts", OPTIONS, yaml_path=tmp_path / "no" / "next.yaml")


@pytest.fixture
def table_with_seeds(tmp_path: Path) -> Path:
    """Three seeds that differ, as a CSV table."""
    history = tables().history
    seeds = [
        history.assign(seed=seed, avg_at_4=history["avg_at_4"] + shift)
        for seed, shift in ((0, -0.02), (1, 0.0), (2, 0.02))
    ]
    path = tmp_path / "three.csv"
    pd.concat(seeds).drop(columns="cell").to_csv(path, index=False)
    return path


def test_confidence_and_seed_are_those_of_the_command_line(table_with_seeds: Path) -> None:
    def told(*options: str) -> dict[str, Any]:
        arguments = ["prescribe", str(table_with_seeds), "--budget", "1M-rollouts", "--format", "json"]
        result = CliRunner().invoke(app, [*arguments, "--replicates", "50", *options])
        assert result.exit_code == 0, result.output
        record: dict[str, Any] = json.loads(result.stdout)[0]
        return record

    usual, narrow, drawn_anew = told(), told("--confidence", "0.5"), told("--seed", "7")
    assert (usual["confidence"], narrow["confidence"]) == (0.9, 0.5)
    low, high = usual["best"]["reward_interval"]
    assert low < narrow["best"]["reward_interval"][0] < narrow["best"]["reward_interval"][1] < high
    assert drawn_anew["best"]["reward_interval"] != usual["best"]["reward_interval"]
    assert told("--seed", "7") == drawn_anew


def test_the_share_of_an_n_and_the_share_of_an_allocation_are_told_apart(table_with_seeds: Path) -> None:
    arguments = ["prescribe", str(table_with_seeds), "--budget", "1M-rollouts", "--replicates", "20"]
    printed = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}).stdout
    assert "this n is best in 100% of replicates" in printed and "allocation best in" in printed
