"""What MLflow has confirmed, in the run folder: read back, never wrong, never in the way."""

import os
from pathlib import Path

import pytest

from orchestrator.store.lease import Lease
from orchestrator.tracking.ledger import Delivered, Home, Ledger

HOME = Home("http://127.0.0.1:5000", "grid", "7", "parent-1")


def ledger(run_dir: Path, epoch: int) -> Ledger:
    return Ledger.open(run_dir, epoch, lambda: None)


def test_a_later_start_knows_what_earlier_ones_were_told(tmp_path: Path) -> None:
    first = ledger(tmp_path, 1)
    assert first.home is None
    first.settle(HOME)
    for cell in ("a", "b", "c"):
        first.opened(cell)
    first.ended("a", Delivered(5, "finished"))
    first.ended("b", Delivered(3, "failed", "ValueError: no luck"))
    first.ended("c", Delivered(2, "paused"))
    first.opened("c")

    ledger(tmp_path, 2).settle(HOME)
    third = ledger(tmp_path, 3)
    assert third.home == HOME
    assert third.has("a", 5, "finished", None)
    assert not third.has("a", 6, "finished", None)
    assert not third.has("a", 5, "paused", None)
    assert third.has("b", 3, "failed", "ValueError: no luck")
    assert not third.has("b", 3, "failed", "ValueError: another")
    assert not third.has("c", 2, "paused", None), "its run was opened again"


@pytest.mark.parametrize(
    "other",
    [
        Home("http://elsewhere:5000", "grid", "7", "parent-1"),
        Home(HOME.uri, "grid", "7", "parent-2"),
        Home(HOME.uri, "grid", "8", "parent-1"),
    ],
)
def test_deliveries_to_another_place_count_for_nothing(tmp_path: Path, other: Home) -> None:
    first = ledger(tmp_path, 1)
    first.settle(HOME)
    first.ended("a", Delivered(5, "finished"))
    second = ledger(tmp_path, 2)
    second.settle(other)
    assert not second.has("a", 5, "finished", None)
    third = ledger(tmp_path, 3)
    assert third.home == other and not third.has("a", 5, "finished", None)


def test_an_overtaken_controller_writes_where_nobody_reads(tmp_path: Path) -> None:
    lease = Lease.acquire(tmp_path / "lease", "old", 10.0)
    lease.release()
    old = Ledger.open(tmp_path, lease.epoch, lease.check)
    old.settle(HOME)
    old.ended("a", Delivered(5, "finished"))

    successor = Lease.acquire(tmp_path / "lease", "new", 10.0)
    new = Ledger.open(tmp_path, successor.epoch, successor.check)
    new.settle(HOME)
    new.opened("a")
    old.ended("a", Delivered(9, "finished"))
    old.settle(Home("http://elsewhere:5000", "grid", "1", "p"))
    successor.release()

    last = ledger(tmp_path, 3)
    assert last.home == HOME
    assert not last.has("a", 1, "finished", None)


def test_every_cut_of_the_file_is_read_up_to_the_cut(tmp_path: Path) -> None:
    first = ledger(tmp_path, 1)
    first.settle(HOME)
    first.ended("a", Delivered(5, "finished"))
    first.ended("b", Delivered(6, "finished"))
    (path,) = (tmp_path / "tracking").iterdir()
    whole = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        cut = ledger(tmp_path, 2)
        assert cut.home == (HOME if length >= ends[0] - 1 else None)
        assert cut.has("a", 5, "finished", None) == (length >= ends[1] - 1)
        assert cut.has("b", 6, "finished", None) == (length >= ends[2] - 1)


def test_a_full_disk_ends_the_ledger_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ledger(tmp_path, 1)
    kept.settle(HOME)

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    kept.ended("a", Delivered(5, "finished"))
    assert kept.has("a", 5, "finished", None)
    monkeypatch.undo()
    assert not ledger(tmp_path, 2).has("a", 5, "finished", None)
