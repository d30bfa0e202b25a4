"""What operators ask: filed as files, answered by the holder of the lease, refused in words."""

import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from grids.errors import UserError
from orchestrator.operating.asking import ask, require_cells
from orchestrator.store.cell_state import CellState, Spent, State
from orchestrator.store.lease import Lease, LeaseLost
from orchestrator.store.requests import Request, answer, apply, file_request, pending
from orchestrator.store.run_store import RunStore
from tests.orchestrator.small_run import attempt, held, make_run

CELL = "bp2-n4-s0"
SPENT = Spent(own_failures=3, preemptions=2, at_step=5)


def request(
    action: Literal["cancel", "retry"], cell: str = CELL, *, reset_budget: bool = False, at: float = 1.0
) -> Request:
    return Request(action, cell, reset_budget, by="ada@login", at=at)


def set_aside(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / "requests" / "set_aside").iterdir()}


@pytest.mark.parametrize(
    ("action", "state", "becomes"),
    [
        ("cancel", "pending", "cancelled"),
        ("cancel", "running", "cancelled"),
        ("cancel", "paused", "cancelled"),
        ("cancel", "failed", "cancelled"),
        ("cancel", "finished", None),
        ("cancel", "diverged", None),
        ("cancel", "cancelled", None),
        ("retry", "failed", "pending"),
        ("retry", "cancelled", "pending"),
        ("retry", "paused", "pending"),
        ("retry", "pending", None),
        ("retry", "running", None),
        ("retry", "finished", None),
        ("retry", "diverged", None),
    ],
)
def test_what_becomes_of_a_cell(action: Literal["cancel", "retry"], state: str, becomes: str | None) -> None:
    before = CellState(CELL, State(state), attempt=2, spent=SPENT)
    after = answer(before, request(action))
    if becomes is None:
        assert (
            isinstance(after, str)
            and after.startswith(f"{CELL} ")
            and state[:4] in after.replace("waits", "pend")
        )
    else:
        assert isinstance(after, CellState)
        assert (after.state, after.attempt, after.spent) == (becomes, 2, SPENT)
        assert "ada@login" in (after.reason or "")


def test_only_a_reset_gives_the_retries_back() -> None:
    after = answer(CellState(CELL, State.FAILED, spent=SPENT), request("retry", reset_budget=True))
    assert isinstance(after, CellState) and after.spent == Spent()


def test_requests_come_oldest_first_whatever_the_order_of_filing(tmp_path: Path) -> None:
    times = [20.0, 3.5, 1e9 + 0.25, 100.0, *(1000.0 + 7 * index % 20 for index in range(20))]
    for at in times:
        file_request(tmp_path, request("cancel", at=at))
    assert [found.at for _, found in pending(tmp_path)] == sorted(times)


def test_no_requests_where_nobody_ever_asked(tmp_path: Path) -> None:
    assert pending(tmp_path) == []


def test_what_is_no_request_is_set_aside_with_one_line_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = file_request(tmp_path, request("cancel"))
    folder = good.parent
    foreign = {
        "half.json": b'{"action": "canc',
        "bytes.json": b"\xff\xfe",
        "list.json": b"[]",
        "action.json": b'{"action": "stop", "cell": "a", "reset_budget": false, "by": "x", "at": 1}',
        "path.json": b'{"action": "cancel", "cell": "../../x", "reset_budget": false, "by": "x", "at": 1}',
        "missing.json": b'{"action": "cancel"}',
    }
    for name, data in foreign.items():
        (folder / name).write_bytes(data)
    (folder / "folder.json").mkdir()
    (folder / ".a.json.e000000.0123456789ab.tmp").write_bytes(b"{")
    (folder / "notes.txt").write_text("by hand")
    with caplog.at_level(logging.WARNING):
        assert [path for path, _ in pending(tmp_path)] == [good]
    assert set_aside(tmp_path) == {*foreign, "folder.json"}
    assert len(caplog.messages) == 7 and not any("\n" in line for line in caplog.messages)
    assert [path for path, _ in pending(tmp_path)] == [good]


def test_an_answered_request_changes_the_state_and_is_gone(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    make_run(run_dir)
    with held(run_dir) as store:
        attempt(store, CELL, 3, State.FAILED, "broken")
        path = file_request(run_dir, request("cancel"))
        assert apply(store, path, request("cancel")) == f"{CELL} cancelled as ada@login asked"
        state = RunStore.existing(run_dir).cell(CELL).read()
        assert (state.state, state.epoch) == (State.CANCELLED, 1)
        assert state.commit is not None and state.commit.step == 3
        assert not path.exists()


def test_a_refused_request_changes_nothing_and_is_gone(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    make_run(run_dir)
    with held(run_dir) as store:
        before = attempt(store, CELL, 8, State.FINISHED)
        path = file_request(run_dir, request("cancel"))
        assert apply(store, path, request("cancel")) == f"{CELL} is finished: not cancelled"
        assert store.cell(CELL).read() == before
        assert not path.exists()


def test_a_crash_before_the_request_is_removed_has_it_refused_at_the_next_start(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    make_run(run_dir)
    path = file_request(run_dir, request("retry", reset_budget=True))
    with held(run_dir) as store:
        attempt(store, CELL, 2, State.FAILED, "broken")
        shutil.copy(path, tmp_path / "kept")
        apply(store, path, request("retry", reset_budget=True))
    shutil.copy(tmp_path / "kept", path)
    with held(run_dir) as store:
        ((again, asked),) = pending(run_dir)
        assert "waits for its turn already" in apply(store, again, asked)
        assert pending(run_dir) == []


def test_a_request_for_a_cell_that_the_grid_does_not_have_is_set_aside(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    make_run(run_dir)
    with held(run_dir) as store:
        path = file_request(run_dir, request("cancel", "bp9-n9-s9"))
        assert "bp9-n9-s9" in apply(store, path, request("cancel", "bp9-n9-s9"))
    assert set_aside(run_dir) == {path.name}
    assert not (run_dir / "cells" / "bp9-n9-s9").exists()


def test_a_controller_that_lost_the_run_leaves_the_request_to_the_other(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    make_run(run_dir)
    path = file_request(run_dir, request("cancel"))
    with held(run_dir) as store:
        newer = Lease.acquire(store.lease_dir, "other:2", 0.05, clock=_fast_clock(), sleep=lambda _: None)
        assert newer.epoch == 2
        with pytest.raises(LeaseLost):
            apply(store, path, request("cancel"))
    assert path.exists()


def _fast_clock() -> Callable[[], float]:
    """Each look at it is an hour later, so that a holder seems to stand still."""
    hours = iter(range(0, 3600 * 1000, 3600))
    return lambda: next(hours)


def test_without_a_controller_requests_are_answered_at_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    store = make_run(run_dir)
    said: list[str] = []
    refusals = ask(store, [request("cancel"), request("retry", "bp2-n4-s1")], said.append)
    assert said == [f"{CELL} cancelled as ada@login asked"]
    assert refusals == ["bp2-n4-s1 waits for its turn already: not put back for another try"]
    assert store.cell(CELL).read().state is State.CANCELLED
    assert pending(run_dir) == []
    with held(run_dir):  # the lease was given back: no wait
        pass


def test_a_running_controller_takes_the_requests(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    reader = make_run(run_dir)
    said: list[str] = []
    with held(run_dir) as store:
        asking = threading.Thread(target=ask, args=(reader, [request("cancel")], said.append))
        asking.start()
        while not (found := pending(run_dir)):
            assert asking.is_alive()
        apply(store, *found[0])
        asking.join(timeout=20)
    assert said == [f"{CELL}: cancel asked; the controller that holds the run has taken it"]
    assert reader.cell(CELL).read().state is State.CANCELLED


def test_a_busy_controller_finds_the_request_later(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    reader = make_run(run_dir)
    said: list[str] = []
    with held(run_dir):
        ask(reader, [request("cancel")], said.append, patience=0.3)
    assert said == [f"{CELL}: cancel asked; the controller that holds the run will take it"]
    assert [found.cell for _, found in pending(run_dir)] == [CELL]
    assert reader.cell(CELL).read().state is State.PENDING


def test_unknown_cells_are_refused_with_close_names(tmp_path: Path) -> None:
    store = make_run(tmp_path / "run")
    with pytest.raises(UserError, match=r"no cell 'bp2-n4-s7'; did you mean bp2-n4-s\d"):
        require_cells(store, [CELL, "bp2-n4-s7"])
    assert [cell.id for cell in require_cells(store, ["bp2-n4-s2", CELL, CELL])] == ["bp2-n4-s2", CELL]
