"""What is kept of each attempt at a cell, and what a full disk does to it all."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.store.cell_state import AttemptRecord
from orchestrator.store.run_store import CellStore, RunStore, State, StoreDamaged
from tests.orchestrator.test_store import CELL, ROOT, open_for_writing


@pytest.fixture
def cell(tmp_path: Path) -> CellStore:
    return open_for_writing(tmp_path / "run").cell(CELL)


def told(record: AttemptRecord) -> tuple[int, int, int, int | None, str | None]:
    return (record.attempt, record.epoch, record.first_step, record.last_step, record.outcome)


def test_each_attempt_has_a_record_of_its_steps_and_end(cell: CellStore, tmp_path: Path) -> None:
    cell.start_attempt()
    cell.commit(3, None, {})
    cell.end_attempt(
        "lost", "learner died", fault="process lost", phase="learning", problems=("train.jsonl, row 17",)
    )
    later = open_for_writing(tmp_path / "run", epoch=2).cell(CELL)
    later.start_attempt()
    first, second = RunStore.existing(tmp_path / "run").cell(CELL).attempts()
    assert told(first) == (1, 1, 1, 3, "lost")
    assert (first.reason, first.fault, first.phase) == ("learner died", "process lost", "learning")
    assert first.problems == ("train.jsonl, row 17",)
    assert first.ended_at is not None and first.started_at <= first.ended_at <= second.started_at
    assert told(second) == (2, 2, 4, None, None)
    later.commit(5, None, {}, state=State.FINISHED)
    later.end_attempt("finished")
    assert told(later.attempts()[1]) == (2, 2, 4, 5, "finished")


def test_an_attempt_that_committed_nothing_ends_at_step_0(cell: CellStore) -> None:
    cell.start_attempt()
    cell.end_attempt("failed")
    assert told(cell.attempts()[0]) == (1, 1, 1, 0, "failed")


def test_without_an_attempt_there_is_nothing_to_end(cell: CellStore) -> None:
    cell.end_attempt("cancelled")
    assert cell.attempts() == [] and not cell.folder.exists()


def test_attempts_are_ordered_by_number_and_those_without_a_record_left_out(cell: CellStore) -> None:
    for _ in range(11):
        cell.start_attempt()
    (cell.attempt_dir(4) / "attempt.json").unlink()
    assert [record.attempt for record in cell.attempts()] == [1, 2, 3, 5, 6, 7, 8, 9, 10, 11]


def test_an_unreadable_record_is_named(cell: CellStore) -> None:
    cell.start_attempt()
    for content in ("{", "[]", '{"version": 3}'):
        (cell.attempt_dir(1) / "attempt.json").write_text(content)
        with pytest.raises(StoreDamaged, match=r"attempts/1/attempt\.json"):
            cell.attempts()


def test_log_lines_go_to_the_attempt_that_this_store_started(cell: CellStore, tmp_path: Path) -> None:
    cell.start_attempt()
    cell.log("sampler 0 was lost")
    other = open_for_writing(tmp_path / "run").cell(CELL)
    other.log("said by one that started none")
    other.start_attempt()
    other.log("second")
    cell.log("said late\udcff\n")
    lines = [(cell.attempt_dir(attempt) / "log.txt").read_text().splitlines() for attempt in (1, 2)]
    assert [[line.split(" ", 1)[1] for line in part] for part in lines] == [
        ["sampler 0 was lost", "said by one that started none", "said late\\udcff"],
        ["second"],
    ]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", lines[0][0].split(" ")[0])


def test_stacks_of_one_attempt_are_gathered_in_one_file(cell: CellStore) -> None:
    cell.start_attempt()
    cell.write_stacks(1, "sampler: in generate")
    path = cell.write_stacks(1, "learner: in backward\n")
    assert path == cell.folder / "attempts" / "1" / "stacks.txt"
    assert path.read_text() == "sampler: in generate\nlearner: in backward\n"


# A full disk

# Writes until the disk (here: the largest file that the system allows this process) is full, in the middle
# of what it writes; prints what was raised.
FULL_DISK = """
import errno, resource, signal, sys
from pathlib import Path
from orchestrator.store.run_store import State
from tests.orchestrator.test_store import CELL, open_for_writing
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = open_for_writing(Path(sys.argv[1]), epoch=2)
cell = store.cell(CELL)
cell.start_attempt()
cell.append_row({"step": 2, "text": "short"})
cell.log("started")
checkpoint = cell.begin_checkpoint(2)
(checkpoint / "weights").write_text("x" * 600)
resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))
long = "x" * 2000
for write in (
    lambda: cell.append_row({"step": 3, "text": long}),
    lambda: cell.log(long),
    lambda: cell.set_state(State.PAUSED, long),
    lambda: cell.commit(2, None, {"text": long}),
    lambda: cell.end_attempt("paused", long),
    lambda: store.write_base({"text": long}),
    lambda: store.update_resolved({"spec": long}),
    lambda: (checkpoint / "optimiser").write_text(long),
):
    try:
        write()
        print("written")
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


def everything(run_dir: Path) -> dict[str, bytes]:
    return {
        path.relative_to(run_dir).as_posix(): path.read_bytes()
        for path in run_dir.rglob("*")
        if path.is_file() and "checkpoints" not in path.parts
    }


def test_a_full_disk_leaves_every_file_as_it_was(cell: CellStore, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    cell.start_attempt()
    cell.append_row({"step": 1})
    cell.commit(1, None, {"tokens": 5})
    open_for_writing(run_dir).write_base({"avg_at_4": 0.4})
    told = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(run_dir)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == ["EFBIG"] * 8
    store = open_for_writing(run_dir, epoch=3)
    assert store.read_base() == {"avg_at_4": 0.4} and store.resolved["spec"] != "x" * 2000
    after = store.cell(CELL)
    assert [row["step"] for row in after.rows()] == [1, 2]
    assert (after.attempt_dir(2) / "log.txt").read_text().count("\n") == 1
    assert [record.outcome for record in after.attempts()] == [None, None]
    commit = after.start_attempt().commit
    assert commit is not None and (commit.step, commit.progress) == (1, {"tokens": 5})
    assert [row["step"] for row in after.rows()] == [1]
    assert not list((after.folder / "checkpoints").iterdir())
    assert not list(run_dir.rglob(".*.tmp"))


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_file_system_without_space_leaves_every_file_as_it_was(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k,nr_inodes=200", "tmpfs", str(mount)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted: {mounted.stderr.decode().strip()}")
    try:
        run_dir = mount / "run"
        store = open_for_writing(run_dir)
        cell = store.cell(CELL)
        cell.start_attempt()
        cell.append_row({"step": 1})
        cell.commit(1, None, {})
        with pytest.raises(OSError, match="No space left"):
            fill(mount / "filler")
        before = everything(run_dir)
        for write in (
            lambda: cell.append_row({"text": "x" * 5000}),
            lambda: cell.set_state(State.PAUSED, "storage full"),
            lambda: cell.commit(2, None, {}),
            lambda: cell.write_samples(1, [{"answer": "5"}]),
            lambda: store.update_resolved({"spec": "other"}),
        ):
            with pytest.raises(OSError, match="No space left"):
                write()
            assert everything(run_dir) == before
        (mount / "filler").unlink()
        assert cell.commit(1, None, {}, state=State.PAUSED).state is State.PAUSED
        assert cell.rows() == [{"step": 1}]
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)
