"""The command line as a user meets it: real processes, their exit codes, and what they print where."""

import csv
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.store.cell_state import State
from orchestrator.store.run_store import RunStore
from tests.orchestrator.small_run import attempt, held, make_run

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "grids" / "quickstart.yaml"


def isocompute(*arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(
        [sys.executable, "-m", "orchestrator", *map(str, arguments)],
        cwd=ROOT,
        env=variables | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def grid_with(tmp_path: Path, old: str, new: str) -> Path:
    """The quickstart's grid with absolute paths and one change."""
    text = QUICKSTART.read_text().replace(": quickstart/", f": {ROOT}/grids/quickstart/")
    assert old in text
    path = tmp_path / "grid.yaml"
    path.write_text(text.replace(old, new))
    return path


def refusal(result: "subprocess.CompletedProcess[str]") -> str:
    """The one line on stderr of a command that was refused."""
    assert result.returncode == 2, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("isocompute: ")
    return lines[0]


def test_plan_prints_the_papers_39_cells_as_csv_and_its_warnings_beside_it() -> None:
    result = isocompute("plan", ROOT / "grids" / "paper_easy_qwen2.5_7b.yaml", "--format", "csv")
    assert result.returncode == 0
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert len(rows) == 39
    assert rows[0]["cell"] == "bp32-n8-s0"
    assert "assumption: compute_rollouts (C_max) is unpublished" in result.stderr


def test_a_canary_needs_to_be_told_its_cluster() -> None:
    assert "set RAY_ADDRESS to the HOST:PORT" in refusal(isocompute("plan", QUICKSTART, "--canary"))


def test_plan_as_json_is_json() -> None:
    result = isocompute("plan", QUICKSTART, "--format", "json")
    assert [row["cell"] for row in json.loads(result.stdout)] == ["bp16-n4-s0", "bp16-n16-s0", "bp16-n64-s0"]


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        (
            "temperature: 1.0",
            "temprature: 1.0",
            ["grid.yaml: sampling.temprature", "did you mean temperature?"],
        ),
        ("seeds: [0]", "seeds: [0]\n  canary: true", ["grid.canary", "leave it out"]),
        ("seeds: [0]", "seeds: [0]\n  canary: maybe", ["grid.canary", "true or false, not 'maybe'"]),
        ("temperature: 1.0", "temperature: -1", ["sampling.temperature", "greater than 0"]),
        (
            "compute_rollouts: 32768",
            "compute_rollouts: 32768\n  max_batch_rollouts: 8",
            ["grid.max_batch_rollouts", "64"],
        ),
    ],
)
def test_a_faulty_grid_is_refused_in_one_line(tmp_path: Path, old: str, new: str, parts: list[str]) -> None:
    line = refusal(isocompute("plan", grid_with(tmp_path, old, new)))
    for part in parts:
        assert part in line


def test_a_missing_problem_file_is_named_by_run(tmp_path: Path) -> None:
    path = grid_with(tmp_path, "easy_train.jsonl", "absent.jsonl")
    line = refusal(isocompute("run", path, "--run-dir", tmp_path / "run"))
    assert "problems.train" in line and "absent.jsonl" in line
    assert not (tmp_path / "run").exists()


def test_a_missing_model_is_named_by_run(tmp_path: Path) -> None:
    path = grid_with(tmp_path, "quickstart/model", "quickstart/absent")
    line = refusal(isocompute("run", path, "--run-dir", tmp_path / "run"))
    assert "model.path" in line and "absent" in line


def test_a_relative_run_folder_is_refused_inside_a_job(tmp_path: Path) -> None:
    grid = grid_with(tmp_path, "seeds: [0]", "seeds: [1]")
    line = refusal(isocompute("run", grid, "--run-dir", "runs/x", RAY_JOB_CONFIG_JSON_ENV_VAR="{}"))
    assert "absolute" in line


def test_a_head_address_is_refused_by_submit(tmp_path: Path) -> None:
    line = refusal(isocompute("submit", QUICKSTART, "--address", "127.0.0.1:6379"))
    assert "--address" in line and "http://" in line


def test_fit_of_no_run_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    assert "no run folder (neither grid.yaml nor cells/ in it)" in refusal(isocompute("fit", tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_stale_cluster_is_a_warning_to_plan() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    result = isocompute("plan", QUICKSTART, RAY_ADDRESS=f"127.0.0.1:{port}")
    assert result.returncode == 0
    assert f"warning: no Ray cluster answers at 127.0.0.1:{port}" in result.stdout


def test_run_inside_a_job_needs_a_run_folder(tmp_path: Path) -> None:
    line = refusal(isocompute("run", QUICKSTART, RAY_JOB_CONFIG_JSON_ENV_VAR="{}"))
    assert "--run-dir" in line


def test_a_stale_ray_address_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    path = grid_with(tmp_path, "seeds: [0]", "seeds: [1]")
    result = isocompute("run", path, "--run-dir", tmp_path / "run", RAY_ADDRESS=f"127.0.0.1:{port}")
    assert f"no Ray cluster answers at 127.0.0.1:{port}" in refusal(result)


def test_status_of_no_run_is_refused(tmp_path: Path) -> None:
    assert "not a run folder" in refusal(isocompute("status", tmp_path))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which bp2-n4-s0 is finished and bp2-n4-s1 has failed."""
    run_dir = tmp_path_factory.mktemp("cli") / "run"
    make_run(run_dir)
    with held(run_dir) as store:
        attempt(store, "bp2-n4-s0", 8, State.FINISHED)
        attempt(store, "bp2-n4-s1", 3, State.FAILED, "broken")
        store.cell("bp2-n4-s1").write_failure(1, "Traceback: broken\n")
    return run_dir


def test_status_as_json_with_its_summary_beside_it(small: Path) -> None:
    result = isocompute("status", small, "--state", "failed,finished", "--sort", "step", "--format", "json")
    assert [row["cell"] for row in json.loads(result.stdout)] == ["bp2-n4-s1", "bp2-n4-s0"]
    assert result.stderr == "3 cells: 1 pending, 1 finished, 1 failed; nobody holds the run\n"


def test_explain_and_logs_of_a_failed_cell(small: Path) -> None:
    text = isocompute("explain", small, "bp2-n4-s1").stdout
    assert "bp2-n4-s1 has failed at step 3 of 8" in text and "Reason: broken" in text
    assert text.endswith(f"To go on: isocompute resume {small} --cell bp2-n4-s1\n")
    assert isocompute("logs", small, "bp2-n4-s1").stdout.endswith("Traceback: broken\n")
    facts = json.loads(isocompute("explain", small, "bp2-n4-s1", "--format", "json").stdout)
    assert facts["attempts"][0]["outcome"] == "failed"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["explain", "bp2-n4-s9"], ["bp2-n4-s9", "did you mean bp2-n4-s"]),
        (["logs", "bp2-n4-s1", "--attempt", "2"], ["--attempt", "1 to 1"]),
        (["cancel", "--cell", "bp2-n4-s0"], ["bp2-n4-s0 is finished"]),
        (["retry"], ["either --cell CELL or --failed"]),
        (["retry", "--failed", "--cell", "bp2-n4-s1"], ["either --cell CELL or --failed"]),
        (["resume", "--failed", "--cell", "bp2-n4-s1"], ["either --cell CELL or --failed"]),
        (["resume", "--cell", "bp2-n4-s9"], ["bp2-n4-s9", "did you mean bp2-n4-s"]),
        (["resume", "--address", "127.0.0.1:6379"], ["--address", "http://"]),
    ],
)
def test_operators_slips_are_refused_in_one_line(small: Path, arguments: list[str], parts: list[str]) -> None:
    line = refusal(isocompute(arguments[0], small, *arguments[1:]))
    for part in parts:
        assert part in line


def test_a_relative_run_folder_is_refused_by_resume_inside_a_job() -> None:
    line = refusal(isocompute("resume", "runs/x", RAY_JOB_CONFIG_JSON_ENV_VAR="{}"))
    assert "absolute" in line


def test_cancel_and_retry_without_a_controller(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    cancelled = isocompute("cancel", tmp_path / "run", "--cell", "bp2-n4-s0", "--cell", "bp2-n4-s2")
    assert cancelled.returncode == 0
    assert [line.split(" as ")[0] for line in cancelled.stdout.splitlines()] == [
        "bp2-n4-s0 cancelled",
        "bp2-n4-s2 cancelled",
    ]
    again = isocompute(
        "retry", tmp_path / "run", "--cell", "bp2-n4-s0", "--cell", "bp2-n4-s1", "--reset-budget"
    )
    # One of two was refused; the other one is carried out.
    assert again.returncode == 2 and again.stderr.startswith(
        "isocompute: bp2-n4-s1 waits for its turn already"
    )
    states = {cell: state.state for cell, state in RunStore.existing(tmp_path / "run").states().items()}
    assert states == {"bp2-n4-s0": State.PENDING, "bp2-n4-s2": State.CANCELLED}


def test_gc_is_refused_while_a_controller_lives(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with held(tmp_path / "run", "node7:123"):
        assert "node7:123" in refusal(isocompute("gc", tmp_path / "run", "--yes"))
    result = isocompute("gc", tmp_path / "run", "--yes")
    assert (result.returncode, result.stdout.strip()) == (0, "nothing to remove")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = isocompute("--debug", "status", tmp_path)
    assert result.returncode == 2
    assert "Traceback" in result.stderr
