"""The lease between controllers: real processes, real signals, short times-to-live."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.store.lease import Lease, LeaseHeld, LeaseLost

ROOT = Path(__file__).parents[2]
TIME_TO_LIVE = 0.5

# Takes the lease, says so, and beats until told to go on by a line on stdin; then writes once more.
HOLDER = """
import sys
from pathlib import Path
from orchestrator.store.lease import Lease, LeaseHeld, LeaseLost
folder, holder, time_to_live = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
try:
    lease = Lease.acquire(folder, holder, time_to_live).start()
except LeaseHeld as error:
    print("refused", error, flush=True)
    sys.exit()
print("holds", lease.epoch, flush=True)
sys.stdin.readline()
try:
    lease.check()
    print("alive", flush=True)
except LeaseLost as error:
    print("lost", error, flush=True)
"""


class FakeTime:
    """A clock that moves only by sleeping; ``during_sleep`` happens once, in the first sleep."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.during_sleep: Callable[[], object] = lambda: None

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        happen, self.during_sleep = self.during_sleep, lambda: None
        happen()

    def acquire(self, folder: Path, holder: str, time_to_live: float = 30.0) -> Lease:
        return Lease.acquire(folder, holder, time_to_live, self.clock, self.sleep)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "controller.lease"


@pytest.fixture
def fake() -> FakeTime:
    return FakeTime()


@pytest.fixture
def start_holder(folder: Path) -> Iterator:
    started: list[subprocess.Popen] = []

    def start(name: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(folder), name, str(TIME_TO_LIVE)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout and process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def tell(process: subprocess.Popen) -> None:
    assert process.stdin
    process.stdin.write("go\n")
    process.stdin.flush()


def test_a_free_lease_is_taken_at_once_with_epoch_one(folder: Path, fake: FakeTime) -> None:
    lease = fake.acquire(folder, "first")
    assert lease.epoch == 1
    assert fake.now == 1000.0
    record = json.loads((folder / "000001.json").read_text())
    assert (record["epoch"], record["holder"], record["counter"], record["released"]) == (
        1,
        "first",
        0,
        False,
    )


def test_a_released_lease_is_taken_at_once_with_the_next_epoch(folder: Path, fake: FakeTime) -> None:
    fake.acquire(folder, "first").release()
    assert fake.acquire(folder, "second").epoch == 2
    assert fake.now == 1000.0


def test_a_holder_that_stands_still_is_taken_over_after_one_time_to_live(
    folder: Path, fake: FakeTime
) -> None:
    first = fake.acquire(folder, "first", time_to_live=30.0)
    first.beat()
    second = fake.acquire(folder, "second", time_to_live=30.0)
    assert second.epoch == 2
    assert 30.0 <= fake.now - 1000.0 < 31.0


def test_the_longer_time_to_live_of_the_holder_counts(folder: Path, fake: FakeTime) -> None:
    fake.acquire(folder, "first", time_to_live=90.0)
    fake.acquire(folder, "second", time_to_live=30.0)
    assert fake.now - 1000.0 >= 90.0


def test_a_holder_whose_counter_moves_is_left_alone_and_named(folder: Path, fake: FakeTime) -> None:
    first = fake.acquire(folder, "node7:4711 job raysubmit_x")
    fake.during_sleep = first.beat
    with pytest.raises(LeaseHeld, match=r"node7:4711 job raysubmit_x \(since \d{4}-") as caught:
        fake.acquire(folder, "second")
    assert "\n" not in str(caught.value)
    assert [file.name for file in folder.iterdir()] == ["000001.json"]
    first.check()


def test_a_holder_that_releases_while_watched_gives_way_at_once(folder: Path, fake: FakeTime) -> None:
    first = fake.acquire(folder, "first")
    fake.during_sleep = first.release
    assert fake.acquire(folder, "second").epoch == 2
    assert fake.now - 1000.0 < 30.0


def test_a_starter_that_is_overtaken_while_it_watches_is_refused(folder: Path, fake: FakeTime) -> None:
    fake.acquire(folder, "first")
    fake.during_sleep = lambda: fake.acquire(folder, "another")
    with pytest.raises(LeaseHeld, match="another"):
        fake.acquire(folder, "second")
    assert sorted(file.name for file in folder.iterdir()) == ["000001.json", "000002.json"]


def test_beat_and_check_tell_an_older_holder_that_it_has_lost(folder: Path, fake: FakeTime) -> None:
    first = fake.acquire(folder, "first")
    fake.acquire(folder, "second")
    with pytest.raises(LeaseLost, match="second"):
        first.beat()
    with pytest.raises(LeaseLost, match="second"):
        first.check()
    assert first.lost.is_set()


def test_a_beat_of_an_older_holder_does_not_disturb_the_present_one(folder: Path, fake: FakeTime) -> None:
    first = fake.acquire(folder, "first")
    second = fake.acquire(folder, "second")
    before = (folder / "000002.json").read_bytes()
    with pytest.raises(LeaseLost):
        first.beat()
    first.release()
    second.check()
    assert (folder / "000002.json").read_bytes() == before


def test_an_epoch_file_emptied_by_a_power_failure_is_taken_over_after_the_wait(
    folder: Path, fake: FakeTime
) -> None:
    fake.acquire(folder, "first")
    (folder / "000001.json").write_bytes(b"")
    assert fake.acquire(folder, "second").epoch == 2
    assert fake.now - 1000.0 >= 30.0


def test_the_background_heartbeat_keeps_a_lease_and_tells_of_its_loss(folder: Path) -> None:
    told: list[LeaseLost] = []
    lease = Lease.acquire(folder, "first", TIME_TO_LIVE).start(told.append)
    with pytest.raises(LeaseHeld):
        Lease.acquire(folder, "second", TIME_TO_LIVE)
    (folder / "000002.json").write_bytes(
        (folder / "000001.json").read_bytes()
    )  # someone takes a higher epoch
    assert lease.lost.wait(5 * TIME_TO_LIVE)
    lease.release()
    assert len(told) == 1


def test_leaving_the_context_releases_the_lease(folder: Path) -> None:
    with Lease.acquire(folder, "first", TIME_TO_LIVE):
        pass
    started = time.monotonic()
    assert Lease.acquire(folder, "second", TIME_TO_LIVE).epoch == 2
    assert time.monotonic() - started < TIME_TO_LIVE / 2


def test_of_four_processes_that_race_for_a_stale_lease_exactly_one_wins(folder: Path, start_holder) -> None:
    Lease.acquire(folder, "dead", TIME_TO_LIVE)
    racers = [start_holder(f"racer-{number}") for number in range(4)]
    for racer in racers:
        tell(racer)
    answers = [racer.stdout.readline().split() for racer in racers]
    assert sorted(answer[0] for answer in answers) == ["holds", "refused", "refused", "refused"]
    assert [answer[1] for answer in answers if answer[0] == "holds"] == ["2"]
    assert sorted(file.name for file in folder.glob("*.json")) == ["000001.json", "000002.json"]


def test_a_killed_holder_is_taken_over(folder: Path, start_holder) -> None:
    holder = start_holder("killed")
    tell(holder)
    assert holder.stdout.readline() == "holds 1\n"
    holder.kill()
    assert Lease.acquire(folder, "next", TIME_TO_LIVE).epoch == 2


def test_a_stopped_holder_that_wakes_after_a_takeover_has_lost_its_lease(folder: Path, start_holder) -> None:
    holder = start_holder("sleeper")
    tell(holder)
    assert holder.stdout.readline() == "holds 1\n"
    os.kill(holder.pid, signal.SIGSTOP)
    lease = Lease.acquire(folder, "next", TIME_TO_LIVE)
    os.kill(holder.pid, signal.SIGCONT)
    tell(holder)
    assert holder.stdout.readline().startswith("lost ")
    lease.check()
