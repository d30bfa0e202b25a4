"""Stack dumps of real processes, also of those that nobody may or can look at."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.pools.members import Member
from orchestrator.pools.stacks import dump, dump_member

SLEEPER = "import time\ndef stuck_in_a_collective():\n    print('up', flush=True)\n    time.sleep(600)\nstuck_in_a_collective()"


def wait_for_status(pid: int, status: str) -> None:
    """A process comes to its state when it next gets a core."""
    deadline = time.monotonic() + 30
    while psutil.Process(pid).status() != status and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.fixture
def sleeper() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    wait_for_status(process.pid, psutil.STATUS_SLEEPING)
    yield process.pid
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_function_is_named_also_of_a_stopped_process(sleeper: int) -> None:
    assert "stuck_in_a_collective" in dump(sleeper)
    os.kill(sleeper, signal.SIGSTOP)
    wait_for_status(sleeper, psutil.STATUS_STOPPED)
    text = dump(sleeper)
    assert "stuck_in_a_collective" in text
    assert "T (stopped)" in text


def test_without_py_spy_the_kernel_still_says_something(
    sleeper: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    text = dump(sleeper)
    assert "py-spy is not installed" in text
    assert f"thread {sleeper} " in text and "S (sleeping)" in text


def test_a_process_that_is_gone_or_out_of_reach_is_said_in_words() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert f"process {process.pid} does not run here" in dump(process.pid)
    own = psutil.Process()
    elsewhere = Member("learner 0 rank 1", "", "a-host-that-is-gone", own.pid, own.create_time())
    text = asyncio.run(dump_member(elsewhere))
    assert "learner 0 rank 1" in text and "no node of a-host-that-is-gone" in text
