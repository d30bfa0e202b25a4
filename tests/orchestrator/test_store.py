"""The run store: real files, real kills, real forks; nothing of it is replaced."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from grids.errors import UserError
from orchestrator.store.cell_state import CellState, Spent
from orchestrator.store.cell_store import last_row
from orchestrator.store.checkpoint_folders import sweep
from orchestrator.store.lease import Lease, LeaseLost
from orchestrator.store.run_store import (
    CellStore,
    Commit,
    RunStore,
    SpecDiffers,
    State,
    StoreDamaged,
    fingerprint,
)

ROOT = Path(__file__).parents[2]
CELL = "bp16-n64-s0"
IDENTITY = {"model": "tiny", "recipe": {"name": "easy", "kl_coefficient": 0.001}, "seeds": [0, 1]}


def open_for_writing(run_dir: Path, epoch: int = 1) -> RunStore:
    store = RunStore.open(run_dir, IDENTITY, {"spec": IDENTITY, "versions": {"torch": "2.13.0"}})
    store.hold(epoch, lambda: None)
    return store


def write_checkpoint(cell: CellStore, step: int) -> Path:
    path = cell.begin_checkpoint(step)
    (path / "rank_0").mkdir()
    (path / "rank_0" / "weights").write_text(str(step))
    (path / "optimiser").write_text(f"moments {step}")
    cell.complete_checkpoint(path)
    return path


def train(cell: CellStore, last_step: int, commit_every: int) -> None:
    """A miniature of the controller's loop: a row per step, a checkpoint and a commit every so many."""
    commit = cell.start_attempt().commit
    for step in range(commit.step + 1 if commit else 1, last_step + 1):
        cell.append_row({"cell": cell.cell, "step": step, "train_reward": step / 7})
        cell.write_samples(step, [{"step": step, "reward": 1.0}])
        if step % commit_every == 0 or step == last_step:
            state = State.FINISHED if step == last_step else State.RUNNING
            cell.commit(step, write_checkpoint(cell, step), {"compute_tokens": 10 * step}, state=state)


def committed(state: CellState) -> Commit:
    assert state.commit is not None
    return state.commit


def weights(cell: CellStore, commit: Commit) -> str:
    assert commit.checkpoint is not None
    return (cell.folder / commit.checkpoint / "rank_0" / "weights").read_text()


def committed_step(cell: CellStore) -> int:
    """0 without a commit."""
    commit = cell.read().commit
    return commit.step if commit else 0


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "first"


@pytest.fixture
def cell(run_dir: Path) -> CellStore:
    return open_for_writing(run_dir).cell(CELL)


# The run folder


def test_a_new_run_folder_holds_the_resolved_spec_and_its_fingerprint(run_dir: Path) -> None:
    open_for_writing(run_dir)
    content = yaml.safe_load((run_dir / "grid.yaml").read_text())
    assert content["resolved"] == {"spec": IDENTITY, "versions": {"torch": "2.13.0"}}
    assert content["version"] == 2
    # what sha256sum prints for {"a":1,"b":[2]}
    assert fingerprint({"b": [2], "a": 1}).startswith("0855bfc20eb6cfaa4be7d6b510c63dd2")
    assert content["fingerprint"] == fingerprint(IDENTITY)


def test_the_same_grid_continues_whatever_the_order_of_its_keys(run_dir: Path) -> None:
    open_for_writing(run_dir).write_base({"avg_at_4": 0.4})
    again = RunStore.open(
        run_dir, dict(reversed(IDENTITY.items())), {"spec": "ignored, the folder keeps its own"}
    )
    assert again.read_base() == {"avg_at_4": 0.4}
    assert again.resolved["spec"] == IDENTITY


def test_a_differing_grid_is_refused_with_old_and_new_values(run_dir: Path) -> None:
    open_for_writing(run_dir)
    other = {"model": "tiny", "recipe": {"name": "easy", "kl_coefficient": 0.01}, "seeds": [0], "top": True}
    with pytest.raises(SpecDiffers) as caught:
        RunStore.open(run_dir, other, {})
    message = str(caught.value)
    assert "recipe.kl_coefficient: 0.001 -> 0.01, seeds: [0, 1] -> [0], top: absent -> true;" in message
    assert "name" not in message.split("grid.yaml")[1]
    assert "--run-dir" in message and "\n" not in message


def test_of_many_differences_five_are_shown_and_the_rest_counted(run_dir: Path) -> None:
    RunStore.open(run_dir, {f"field_{number}": 1 for number in range(9)}, {})
    with pytest.raises(SpecDiffers, match=r"field_4: 1 -> 2 and 4 more; "):
        RunStore.open(run_dir, {f"field_{number}": 2 for number in range(9)}, {})


def test_a_relative_run_folder_is_refused() -> None:
    with pytest.raises(UserError, match="absolute"):
        RunStore.open(Path("runs/first"), IDENTITY, {})


def test_a_folder_that_holds_something_else_is_refused_and_untouched(run_dir: Path) -> None:
    run_dir.mkdir(parents=True)
    (run_dir / "thesis.tex").write_text("all my work")
    with pytest.raises(UserError, match="not a run folder"):
        RunStore.open(run_dir, IDENTITY, {})
    assert [file.name for file in run_dir.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_place_of_the_run_folder_is_refused(run_dir: Path) -> None:
    run_dir.parent.mkdir()
    run_dir.write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        RunStore.open(run_dir, IDENTITY, {})


def test_a_start_killed_before_grid_yaml_was_there_is_repeated(run_dir: Path) -> None:
    run_dir.mkdir(parents=True)
    (run_dir / ".grid.yaml.e000000.0123456789ab.tmp").write_text("version: 1\nfinge")
    assert RunStore.open(run_dir, IDENTITY, {}).states() == {}


def test_a_grid_yaml_changed_by_hand_is_noticed(run_dir: Path) -> None:
    open_for_writing(run_dir)
    path = run_dir / "grid.yaml"
    path.write_text(path.read_text().replace("name: easy", "name: hard"))
    with pytest.raises(StoreDamaged, match="changed by hand"):
        RunStore.existing(run_dir)


def test_a_run_folder_of_another_format_is_refused(run_dir: Path) -> None:
    open_for_writing(run_dir)
    path = run_dir / "grid.yaml"
    path.write_text(path.read_text().replace("version: 2", "version: 3", 1))
    with pytest.raises(StoreDamaged, match=r"format 3, .* use the release that wrote the run"):
        RunStore.existing(run_dir)


def test_nothing_can_be_written_before_the_lease_is_held(run_dir: Path) -> None:
    store = RunStore.open(run_dir, IDENTITY, {})
    with pytest.raises(RuntimeError, match="lease"):
        store.cell(CELL).set_state(State.RUNNING)
    with pytest.raises(RuntimeError, match="lease"):
        store.write_base({})
    assert [file.name for file in run_dir.iterdir()] == ["grid.yaml"]


def test_a_cell_id_cannot_leave_the_run_folder(run_dir: Path) -> None:
    for bad in ("../other", "a/b", "", ".hidden"):
        with pytest.raises(ValueError, match="not a cell id"):
            open_for_writing(run_dir).cell(bad)


# State


def test_a_cell_without_a_state_file_is_pending(cell: CellStore) -> None:
    assert cell.read() == CellState(cell=CELL, state=State.PENDING, attempt=0)


def test_a_state_comes_back_as_it_was_written(run_dir: Path, cell: CellStore) -> None:
    layout = {"ranks": 2, "gpus": False, "versions": {"torch": "2.13.0"}}
    commit = Commit(8, 120, 3, "checkpoints/step_00000008-e0001-a2", {"tokens": 5, "kl": 0.1}, layout)
    state = CellState(
        cell=CELL,
        state=State.PAUSED,
        attempt=2,
        reason="storage full",
        commit=commit,
        spent=Spent(own_failures=1, preemptions=2, at_step=4),
        deviations=("from step 5: 2 ranks instead of 1",),
    )
    written = cell.write(state)
    assert (written.epoch, written.commit, written.spent) == (1, commit, Spent(1, 2, 4))
    assert written.deviations == ("from step 5: 2 ranks instead of 1",)
    assert RunStore.existing(run_dir).states() == {CELL: written}
    assert json.loads((run_dir / "cells" / CELL / "state.json").read_text())["state"] == "paused"


def test_a_new_state_keeps_attempt_and_commit(cell: CellStore) -> None:
    cell.start_attempt()
    cell.commit(0, None, {"tokens": 1})
    cell.set_state(State.FAILED, reason="out of memory")
    state = cell.read()
    assert (state.state, state.reason, state.attempt, committed(state).progress) == (
        "failed",
        "out of memory",
        1,
        {"tokens": 1},
    )


def test_a_new_state_keeps_budgets_and_deviations_unless_it_brings_its_own(cell: CellStore) -> None:
    cell.set_state(State.FAILED, "learner died", spent=Spent(1, 0, 0), deviations=("other ranks",))
    cell.start_attempt()
    cell.commit(3, None, {})
    kept = cell.set_state(State.PAUSED)
    assert (kept.spent, kept.deviations) == (Spent(1, 0, 0), ("other ranks",))
    changed = cell.set_state(State.PENDING, spent=Spent(), deviations=())
    assert (changed.spent, changed.deviations, committed(changed).step) == (Spent(), (), 3)


def test_a_finished_cell_is_opened_again_for_more_steps_and_goes_on_from_its_end(cell: CellStore) -> None:
    train(cell, last_step=2, commit_every=1)
    finished = cell.read()
    for update_steps in (1, 2):
        with pytest.raises(RuntimeError, match=f"finished at step 2 of {update_steps}; "):
            cell.reopen(update_steps)
    reopened = cell.reopen(4)
    assert (reopened.state, reopened.commit, reopened.attempt) == (State.PENDING, finished.commit, 1)
    train(cell, last_step=4, commit_every=1)
    assert_whole(cell, last_step=4)


def test_only_a_finished_cell_is_opened_again(cell: CellStore) -> None:
    cell.start_attempt()
    cell.commit(2, None, {})
    for state in set(State) - {State.FINISHED}:
        cell.set_state(state)
        with pytest.raises(RuntimeError, match=f"is {state} at step 2 of 4"):
            cell.reopen(4)


def test_each_start_counts_an_attempt(cell: CellStore) -> None:
    assert [cell.start_attempt().attempt for _ in range(3)] == [1, 2, 3]


def test_a_finished_cell_is_never_written_again(cell: CellStore) -> None:
    train(cell, last_step=2, commit_every=1)
    before = {path: path.read_bytes() for path in cell.folder.rglob("*") if path.is_file()}
    for attempt in (cell.start_attempt, cell.restore, lambda: cell.set_state(State.PENDING)):
        with pytest.raises(RuntimeError, match="finished"):
            attempt()
    assert {path: path.read_bytes() for path in cell.folder.rglob("*") if path.is_file()} == before


def test_an_unreadable_state_is_named(cell: CellStore) -> None:
    cell.set_state(State.PENDING)
    for content in (b'{"version": 2, "cell"', b"[]", b'{"version": 2}', b'{"version": 7}', b"\xff"):
        (cell.folder / "state.json").write_bytes(content)
        with pytest.raises(StoreDamaged, match=f"{CELL}/state.json"):
            cell.read()


# History


def test_rows_come_back_in_order_and_a_torn_last_line_is_left_out(cell: CellStore) -> None:
    cell.restore()
    cell.append_row({"step": 1})
    cell.append_row({"step": 2})
    with (cell.folder / "history.jsonl").open("a") as file:
        file.write('{"step": 3, "tra')
    assert [row["step"] for row in cell.rows()] == [1, 2]


@pytest.mark.parametrize("length", [1, 4070, 4096, 9000])
def test_the_last_row_is_read_from_the_end_of_the_file(cell: CellStore, length: int) -> None:
    assert last_row(f"{cell.folder}/history.jsonl") is None
    cell.restore()
    assert last_row(f"{cell.folder}/history.jsonl") is None
    for step in (1, 2, 3):
        cell.append_row({"step": step, "text": "x" * length})
        assert last_row(f"{cell.folder}/history.jsonl") == {"step": step, "text": "x" * length}
    with (cell.folder / "history.jsonl").open("a") as file:
        file.write('{"step": 4, "text": "' + "y" * length)
    assert last_row(f"{cell.folder}/history.jsonl") == {"step": 3, "text": "x" * length}
    (cell.folder / "history.jsonl").write_text("no row\n")
    with pytest.raises(StoreDamaged, match=r"history\.jsonl: its last row"):
        last_row(f"{cell.folder}/history.jsonl")


def test_a_row_with_nan_or_infinity_is_refused_and_leaves_no_trace(cell: CellStore) -> None:
    cell.restore()
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON compliant"):
            cell.append_row({"step": 1, "loss": bad})
    assert (cell.folder / "history.jsonl").read_bytes() == b""


def test_restore_cuts_the_history_to_the_commit(cell: CellStore) -> None:
    cell.restore()
    cell.append_row({"step": 1})
    cell.commit(1, None, {})
    cell.append_row({"step": 2})
    cell._history = None  # the process dies here, in the middle of the next line
    with (cell.folder / "history.jsonl").open("a") as file:
        file.write('{"step": 3, "tra')
    cell.restore()
    assert committed_step(cell) == 1
    assert (cell.folder / "history.jsonl").read_text() == '{"step": 1}\n'
    cell.append_row({"step": 2})
    assert [row["step"] for row in cell.rows()] == [1, 2]


def test_without_a_commit_restore_starts_the_history_anew(cell: CellStore) -> None:
    cell.restore()
    cell.append_row({"step": 1})
    assert cell.restore() is None
    assert cell.rows() == []


def test_a_history_shorter_than_its_commit_is_damage(cell: CellStore) -> None:
    cell.restore()
    cell.append_row({"step": 1})
    cell.append_row({"step": 2})
    cell.commit(2, None, {})
    (cell.folder / "history.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(StoreDamaged, match="holds 1 of the 2 rows"):
        cell.restore()


# Checkpoints


def checkpoints(cell: CellStore) -> list[str]:
    return sorted(path.name for path in (cell.folder / "checkpoints").iterdir())


def test_the_last_two_checkpoints_are_kept(cell: CellStore) -> None:
    cell.start_attempt()
    for step in (4, 8, 12, 16):
        cell.commit(step, write_checkpoint(cell, step), {})
    assert checkpoints(cell) == ["step_00000012-e0001-a1", "step_00000016-e0001-a1"]
    assert committed(cell.read()).checkpoint == "checkpoints/step_00000016-e0001-a1"


def test_a_checkpoint_without_its_marker_cannot_be_committed(cell: CellStore) -> None:
    cell.start_attempt()
    path = cell.begin_checkpoint(4)
    (path / "weights").write_text("half")
    with pytest.raises(StoreDamaged, match="COMPLETE"):
        cell.commit(4, path, {})
    assert cell.read().commit is None


def test_an_empty_checkpoint_cannot_be_completed(cell: CellStore) -> None:
    cell.start_attempt()
    with pytest.raises(RuntimeError, match="empty"):
        cell.complete_checkpoint(cell.begin_checkpoint(4))


def test_restore_removes_incomplete_and_later_checkpoints(cell: CellStore) -> None:
    cell.start_attempt()
    cell.commit(4, write_checkpoint(cell, 4), {})
    write_checkpoint(cell, 8)
    (cell.begin_checkpoint(6) / "weights").write_text("half")
    cell.restore()
    assert committed_step(cell) == 4
    assert checkpoints(cell) == ["step_00000004-e0001-a1"]


def test_a_committed_checkpoint_with_a_short_or_missing_file_is_named(cell: CellStore) -> None:
    cell.start_attempt()
    path = write_checkpoint(cell, 4)
    cell.commit(4, path, {})
    (path / "optimiser").write_text("mom")
    with pytest.raises(StoreDamaged, match="step_00000004-e0001-a1: optimiser has 3 bytes, 9 were committed"):
        cell.restore()
    (path / "optimiser").unlink()
    with pytest.raises(StoreDamaged, match="optimiser has no bytes"):
        cell.restore()
    assert path.exists()


def test_the_committed_checkpoint_is_not_overwritten_by_a_second_one_of_its_step(cell: CellStore) -> None:
    cell.start_attempt()
    path = write_checkpoint(cell, 4)
    cell.commit(4, path, {})
    with pytest.raises(RuntimeError, match="committed"):
        cell.begin_checkpoint(4)
    cell.commit(4, path, {}, state=State.PAUSED, reason="drained")
    cell.restore()
    assert committed_step(cell) == 4


def test_a_later_writer_sweeps_an_older_epochs_checkpoints_but_not_the_reverse(run_dir: Path) -> None:
    older = open_for_writing(run_dir, epoch=1).cell(CELL)
    older.start_attempt()
    older.commit(4, write_checkpoint(older, 4), {})
    newer = open_for_writing(run_dir, epoch=2).cell(CELL)
    newer.start_attempt()
    under_way = newer.begin_checkpoint(8)
    sweep(older.folder, older.read().commit, epoch=1, keep=2)  # as when it was suspended just before
    assert under_way.exists()
    write_checkpoint(newer, 8)
    newer.commit(8, newer.folder / "checkpoints" / "step_00000008-e0002-a2", {})
    newer.commit(12, write_checkpoint(newer, 12), {})
    assert checkpoints(newer) == ["step_00000008-e0002-a2", "step_00000012-e0002-a2"]


# For people


def test_samples_and_failures_lie_where_people_look(cell: CellStore) -> None:
    cell.write_samples(12, [{"answer": "π", "reward": 1.0}, {"answer": "\udcff", "reward": 0.0}])
    cell.write_failure(3, "Traceback: \udcff")
    lines = (cell.folder / "samples" / "step_00000012.jsonl").read_text().splitlines()
    assert [json.loads(line)["answer"] for line in lines] == ["π", "\udcff"]
    assert (cell.attempt_dir(3) / "traceback.txt").read_text() == "Traceback: \\udcff"


# Crashes

# Forks one child per system call that the store makes; child number k dies at the k-th (before it, or in a
# write after half of the bytes). Ends when a child gets through, and prints its number.
CRASH_EVERYWHERE = """
import os, shutil, sys
from pathlib import Path
from tests.orchestrator.test_store import CELL, open_for_writing, train

def die_at(number):
    count = 0
    def guard(name):
        real = getattr(os, name)
        def call(*arguments, **named):
            nonlocal count
            count += 1
            if count == number:
                if name == "write":
                    real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                os._exit(9)
            return real(*arguments, **named)
        setattr(os, name, call)
    for name in ("write", "fsync", "replace", "link", "unlink", "mkdir", "rmdir", "ftruncate"):
        guard(name)

root = Path(sys.argv[1])
number = 0
while True:
    number += 1
    child = os.fork()
    if child == 0:
        die_at(number)
        try:
            train(open_for_writing(root / str(number)).cell(CELL), last_step=3, commit_every=1)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != 9:
        sys.exit(code) if code else print(number)
        break
"""

# Trains with a commit every step until it is killed.
TRAIN_FOR_EVER = """
import sys
from pathlib import Path
from tests.orchestrator.test_store import CELL, open_for_writing, train
cell = open_for_writing(Path(sys.argv[1]), epoch=int(sys.argv[2])).cell(CELL)
print("ready", flush=True)
train(cell, last_step=10**9, commit_every=3)
"""

# Suspends itself when it is about to rename a new state into place: after its last check of the lease.
SUSPENDED_WRITER = """
import os, signal, sys
from pathlib import Path
from orchestrator.store.lease import Lease, LeaseLost
from orchestrator.store.run_store import RunStore, State
from tests.orchestrator.test_store import CELL, IDENTITY
store = RunStore.open(Path(sys.argv[1]), IDENTITY, {})
lease = Lease.acquire(store.lease_dir, "sleeper", 0.3)
store.hold(lease.epoch, lease.check)
cell = store.cell(CELL)
cell.start_attempt()
cell.append_row({"step": 1, "writer": "sleeper"})
cell.commit(1, None, {})
real = os.replace
def suspend(source, target):
    if str(target).endswith("state.json"):
        os.kill(os.getpid(), signal.SIGSTOP)
    real(source, target)
os.replace = suspend
row = {"step": 2, "writer": "sleeper"}
for write in (lambda: cell.set_state(State.FAILED, "stale"), lambda: cell.append_row(row)):
    try:
        write()
        print("wrote", flush=True)
    except LeaseLost:
        print("lost", flush=True)
"""


def script(code: str, *arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def assert_whole(cell: CellStore, last_step: int) -> None:
    state = cell.read()
    assert (state.state, committed(state).step) == (State.FINISHED, last_step)
    assert [row["step"] for row in cell.rows()] == list(range(1, last_step + 1))
    assert committed(state).progress == {"compute_tokens": 10 * last_step}
    assert weights(cell, committed(state)) == str(last_step)
    assert not list(cell.folder.rglob(".*.tmp"))


def test_a_crash_at_any_system_call_loses_at_most_the_work_since_the_commit(tmp_path: Path) -> None:
    crashed = script(CRASH_EVERYWHERE, tmp_path)
    deaths = int(crashed.communicate(timeout=120)[0]) - 1
    assert deaths > 60
    finished_before = 0
    for number in range(1, deaths + 1):
        cell = open_for_writing(tmp_path / str(number), epoch=2).cell(CELL)
        for marker in cell.folder.rglob(
            "COMPLETE"
        ):  # what is marked is whole, also amid writing and removing
            assert (marker.parent / "rank_0" / "weights").exists() and (marker.parent / "optimiser").exists()
        if cell.read().state is State.FINISHED:
            finished_before += 1
        else:
            train(cell, last_step=3, commit_every=1)
        assert_whole(cell, last_step=3)
    assert 0 < finished_before < deaths / 4  # only the sweep after the last commit was cut short


def test_a_run_killed_again_and_again_has_each_step_once(run_dir: Path) -> None:
    steps = []
    for epoch in range(1, 5):
        process = script(TRAIN_FOR_EVER, run_dir, epoch)
        assert process.stdout and process.stdout.readline() == "ready\n"
        time.sleep(0.15 + 0.037 * epoch)
        process.kill()
        process.wait()
        steps.append(committed_step(RunStore.existing(run_dir).cell(CELL)))
    assert steps == sorted(steps) and steps[-1] > 0
    last_step = steps[-1] + 4
    cell = open_for_writing(run_dir, epoch=9).cell(CELL)
    train(cell, last_step, commit_every=3)
    assert_whole(cell, last_step)


def test_a_writer_suspended_in_the_middle_of_a_write_does_no_harm_after_a_takeover(run_dir: Path) -> None:
    sleeper = script(SUSPENDED_WRITER, run_dir)
    _, status = os.waitpid(sleeper.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    store = RunStore.open(run_dir, IDENTITY, {})
    lease = Lease.acquire(store.lease_dir, "next", 0.3)
    store.hold(lease.epoch, lease.check)
    cell = store.cell(CELL)
    assert committed(cell.start_attempt()).step == 1
    cell.append_row({"step": 2, "writer": "next"})
    written = cell.commit(2, None, {}, state=State.FINISHED)
    os.kill(sleeper.pid, signal.SIGCONT)
    assert sleeper.communicate(timeout=20)[0].split() == ["lost", "lost"]
    assert cell.read() == written
    assert [row["writer"] for row in cell.rows()] == ["sleeper", "next"]


def test_a_lost_lease_stops_every_kind_of_write(run_dir: Path) -> None:
    store = RunStore.open(run_dir, IDENTITY, {})
    lease = Lease.acquire(store.lease_dir, "first", 0.1)
    store.hold(lease.epoch, lease.check)
    cell = store.cell(CELL)
    cell.start_attempt()
    checkpoint = write_checkpoint(cell, 1)
    Lease.acquire(store.lease_dir, "second", 0.1)
    before = {path: path.read_bytes() for path in (run_dir / "cells").rglob("*") if path.is_file()}
    grid = (run_dir / "grid.yaml").read_bytes()
    for write in (
        lambda: cell.append_row({"step": 1}),
        lambda: cell.commit(1, checkpoint, {}),
        lambda: cell.begin_checkpoint(2),
        lambda: cell.complete_checkpoint(checkpoint),
        lambda: cell.set_state(State.FAILED),
        lambda: cell.write_samples(1, []),
        lambda: cell.write_failure(1, "trace"),
        lambda: cell.write_stacks(1, "stacks"),
        lambda: cell.log("text"),
        lambda: cell.end_attempt("failed"),
        lambda: cell.restore(),
        lambda: cell.start_attempt(),
        lambda: store.write_base({}),
        lambda: store.update_resolved({"spec": "other"}),
    ):
        with pytest.raises(LeaseLost):
            write()
    assert {path: path.read_bytes() for path in (run_dir / "cells").rglob("*") if path.is_file()} == before
    assert not (run_dir / "base.json").exists()
    assert (run_dir / "grid.yaml").read_bytes() == grid


def test_a_checkpoint_that_could_not_be_completed_gives_its_space_back(cell: CellStore) -> None:
    cell.start_attempt()
    path = cell.begin_checkpoint(3)
    (path / "weights").write_text("half")
    cell.discard_checkpoint(path)
    assert not path.exists()
