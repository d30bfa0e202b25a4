"""What the benchmarks' commands refuse, and how they end."""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import command

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (command.count, "1", 1),
        (command.natural, "0", 0),
        (command.share, "0", 0.0),
        (command.share, "1", 1.0),
        (command.amount, "0", 0.0),
        (command.amount, "2.5", 2.5),
        (command.seconds, "0.1", 0.1),
    ],
)
def test_what_can_be_measured_is_taken(kind: Callable[[str], float], text: str, value: float) -> None:
    assert kind(text) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (command.count, "0"),
        (command.count, "2.5"),
        (command.natural, "-1"),
        (command.share, "1.01"),
        (command.share, "-0.1"),
        (command.amount, "inf"),
        (command.amount, "-1"),
        (command.seconds, "0"),
        (command.seconds, "nan"),
        (command.seconds, "soon"),
    ],
)
def test_what_cannot_be_measured_is_refused_and_named(kind: Callable[[str], float], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        kind(text)


def test_only_a_folder_without_content_is_taken(tmp_path: Path) -> None:
    assert command.new_folder(str(tmp_path)) == tmp_path
    assert command.new_folder(str(tmp_path / "none")) == tmp_path / "none"
    (tmp_path / "earlier").write_text("a run")
    with pytest.raises(argparse.ArgumentTypeError, match="not empty"):
        command.new_folder(str(tmp_path))
    with pytest.raises(argparse.ArgumentTypeError, match="no folder"):
        command.new_folder(str(tmp_path / "earlier"))


def test_wrong_input_ends_with_one_line_and_code_2(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.predict", str(tmp_path / "none")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ") and "none" in line


def test_a_benchmark_told_to_end_ends_what_it_started(tmp_path: Path) -> None:
    started, ended = tmp_path / "started", tmp_path / "ended"
    program = f"""
import time
from pathlib import Path
from benchmarks import command

def main():
    try:
        Path({str(started)!r}).touch()
        time.sleep(60)
    finally:
        Path({str(ended)!r}).touch()

command.run(main)
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    deadline = time.monotonic() + 30
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert ended.exists()
