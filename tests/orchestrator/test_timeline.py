"""The timeline: every phase is a slice in the row of its member, in Chrome's trace format."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grids.errors import UserError
from orchestrator.cli import app
from orchestrator.operating.timeline import trace, write_timeline
from orchestrator.store.phase_log import PhaseKind, PhaseLog, PhaseRecord
from tests.orchestrator.small_run import make_run, small_grid

SAMPLING = PhaseRecord("sampler 10", PhaseKind.SAMPLING, "bp2-n4-s0", 3, 1000.5, 2.25, 0.125, 8, 40, 1)
LEARNING = PhaseRecord("learner 0", PhaseKind.LEARNING, "bp2-n4-s0", 3, 1003.0, 1.0, 0.0, 8, 40, 1, True)
GRADING = PhaseRecord("grader", PhaseKind.GRADING, "bp2-n4-s1", 1, 1000.0, 0.000001, 0.0, 8, 40, 0)


def test_a_phase_is_a_slice_in_microseconds_from_the_first_one() -> None:
    made = trace([SAMPLING, LEARNING, GRADING])
    slices = [event for event in made["traceEvents"] if event["ph"] == "X"]
    assert slices[0] == {
        "name": "bp2-n4-s0 sampling",
        "cat": "sampling",
        "ph": "X",
        "ts": 500_000,
        "dur": 2_250_000,
        "pid": 1,
        "tid": 11,
        "args": {
            "cell": "bp2-n4-s0",
            "step": 3,
            "waited_seconds": 0.125,
            "sequences": 8,
            "tokens": 40,
        },
    }
    assert [(event["name"], event["ts"], event["dur"]) for event in slices[1:]] == [
        ("bp2-n4-s0 learning (failed)", 3_000_000, 1_000_000),
        ("bp2-n4-s1 grading", 0, 1),
    ]
    assert made["otherData"] == {"started_at": 1000.0}


def test_each_member_has_a_named_row_in_its_pool() -> None:
    others = [SAMPLING._replace(member=f"sampler {number}") for number in (2, 0)]
    made = trace([SAMPLING, LEARNING, GRADING, *others])
    named = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in made["traceEvents"]
        if event["ph"] == "M"
    }
    assert named == {
        ("process_name", 1, 0): "samplers",
        ("process_name", 2, 0): "learners",
        ("process_name", 3, 0): "graders",
        ("thread_name", 1, 1): "sampler 0",
        ("thread_name", 1, 3): "sampler 2",
        ("thread_name", 1, 11): "sampler 10",
        ("thread_name", 2, 1): "learner 0",
        ("thread_name", 3, 1): "grader",
    }
    rows = {(event["pid"], event["tid"]) for event in made["traceEvents"] if event["ph"] == "X"}
    assert rows == {(pid, tid) for name, pid, tid in named if name == "thread_name"}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    make_run(tmp_path / "run", small_grid())
    return tmp_path / "run"


def test_the_command_writes_all_controllers_phases(run_dir: Path) -> None:
    for epoch in (1, 2):
        with PhaseLog(run_dir, epoch, lambda: None, print) as log:
            log.add(SAMPLING)
            log.add(LEARNING)
    ended = CliRunner().invoke(app, ["timeline", str(run_dir)])
    assert ended.exit_code == 0 and "4 phases" in ended.output
    made = json.loads((run_dir / "timeline.json").read_text())
    assert sum(event["ph"] == "X" for event in made["traceEvents"]) == 4
    chosen = run_dir.parent / "elsewhere.json"
    assert CliRunner().invoke(app, ["timeline", str(run_dir), "--output", str(chosen)]).exit_code == 0
    assert json.loads(chosen.read_text()) == made


def test_a_run_without_phases_and_a_file_that_cannot_be_written_are_refused_in_one_line(
    run_dir: Path,
) -> None:
    with pytest.raises(UserError, match=r"run/phases: no phases are on record") as caught:
        write_timeline(run_dir, run_dir / "timeline.json")
    assert "\n" not in str(caught.value)
    assert not (run_dir / "timeline.json").exists()
    with PhaseLog(run_dir, 1, lambda: None, print) as log:
        log.add(SAMPLING)
    with pytest.raises(UserError, match=r"--output .*missing/t.json: cannot be written"):
        write_timeline(run_dir, run_dir / "missing" / "t.json")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["timeline", str(tmp_path)])
    assert isinstance(ended.exception, UserError) and "not a run folder" in str(ended.exception)
