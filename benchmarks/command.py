"""What the programs of this folder share as commands: options that refuse what cannot be measured, and how one ends."""

import argparse
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from grids.errors import UserError
from orchestrator.exit_codes import ExitCode


def count(text: str) -> int:
    """An option's value: a whole number of at least 1."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """An option's value: a whole number of at least 0."""
    return _whole(text, 0)


def share(text: str) -> float:
    """An option's value: a number from 0 to 1."""
    value = amount(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text} is more than 1")
    return value


def amount(text: str) -> float:
    """An option's value: a finite number of at least 0."""
    value = _number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return value


def seconds(text: str) -> float:
    """An option's value: a finite time of more than 0 s."""
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is no time of more than 0 s")
    return value


def new_folder(text: str) -> Path:
    """An option's value: a folder that is empty or does not exist, so that nothing of an earlier run is counted."""
    folder = Path(text)
    if folder.exists() and not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder")
    if folder.exists() and any(folder.iterdir()):
        raise argparse.ArgumentTypeError(f"{text} is not empty; give a new folder")
    return folder


def add_folder(parser: argparse.ArgumentParser) -> None:
    """``--folder``, of a benchmark that leaves runs and logs behind."""
    parser.add_argument(
        "--folder", type=new_folder, help="for everything; a temporary one that is removed when not given"
    )


def run(main: Callable[[], int | None]) -> None:
    """End the process with what ``main`` returns.

    Wrong input ends with one line and the command line's code for it. A SIGTERM ends ``main`` as an error would, and with it the
    services that it started.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(ExitCode.REFUSED)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is less than {least}")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is no finite number")
    return value
