"""What MLflow has confirmed of a run folder, kept there so that a resumed run asks only for the rest.

A hint that saves requests, never the truth: that is the histories and MLflow. Without it everything is offered
again, which is always right.

``tracking/e<epoch>.jsonl``: first where the runs are, then a line for each cell's run that was opened or ended;
the last line of a cell counts. A controller writes the file of its own epoch only, which begins with a copy of the
one before, and a starter reads the newest. So what a controller writes after it was overtaken is never read.
"""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.store.files import append_to, make_folder, read_bytes, remove_temporaries, write_atomically
from orchestrator.store.lease import LeaseLost

logger = logging.getLogger(__name__)

FOLDER = "tracking"
FORMAT_VERSION = 1
_FILE = re.compile(r"^e(\d{6,})\.jsonl$")


@dataclass(frozen=True)
class Home:
    """Where a run folder's runs are."""

    uri: str
    experiment: str
    experiment_id: str
    parent_run_id: str


@dataclass(frozen=True)
class Delivered:
    """What MLflow has of a cell whose run has ended: history rows (the base model's included), state and reason."""

    rows: int
    state: str
    reason: str | None = None


class Ledger:
    """The confirmations of one run folder. ``Ledger()`` remembers in memory only; ``open`` gives one with a file.

    No method but ``open`` raises for what the storage does: a ledger that cannot be written is given up.
    """

    def __init__(
        self,
        path: Path | None = None,
        epoch: int = 0,
        check: Callable[[], None] = lambda: None,
        home: Home | None = None,
        delivered: dict[str, Delivered] | None = None,
    ) -> None:
        self.check = check
        self.home = home
        self._path = path
        self._epoch = epoch
        self._delivered = delivered or {}

    @classmethod
    def open(cls, run_dir: Path, epoch: int, check: Callable[[], None]) -> "Ledger":
        """The run folder's ledger, to be written under a lease of this epoch, whose ``check`` raises LeaseLost."""
        folder = make_folder(run_dir / FOLDER)
        remove_temporaries(folder, epoch)
        files = _files(folder)
        newest = max((number for number in files if number <= epoch), default=None)
        home, delivered = _read(files[newest]) if newest is not None else (None, {})
        return cls(folder / f"e{epoch:06d}.jsonl", epoch, check, home, delivered)

    def settle(self, home: Home) -> None:
        """Say where the runs are, before the first ``opened``. Deliveries to another place are forgotten."""
        if self.home != home:
            self._delivered = {}
        self.home = home
        if self._path is None:
            return
        lines: list[dict[str, Any]] = [{"version": FORMAT_VERSION, "home": asdict(home)}]
        lines += [_line(cell, delivered) for cell, delivered in self._delivered.items()]
        try:
            data = "".join(json.dumps(line) + "\n" for line in lines).encode()
            write_atomically(self._path, data, epoch=self._epoch, fence=self.check, durable=False)
            for number, path in _files(self._path.parent).items():
                if number < self._epoch:
                    path.unlink(missing_ok=True)
        except (OSError, LeaseLost) as error:
            self._give_up(error)

    def has(self, cell: str, rows: int, state: str, reason: str | None) -> bool:
        """Whether MLflow has at least so many of the cell's rows, and this end."""
        found = self._delivered.get(cell)
        return found is not None and found.rows >= rows and (found.state, found.reason) == (state, reason)

    def opened(self, cell: str) -> None:
        """The cell's run is open: earlier deliveries say nothing about its end."""
        self._delivered.pop(cell, None)
        self._append({"cell": cell})

    def ended(self, cell: str, delivered: Delivered) -> None:
        """The cell's run has ended, with everything in MLflow."""
        self._delivered[cell] = delivered
        self._append(_line(cell, delivered))

    def _append(self, line: dict[str, Any]) -> None:
        if self._path is not None:
            try:
                append_to(self._path, (json.dumps(line) + "\n").encode())
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        logger.warning("%s is not kept any more, the next start asks MLflow instead: %s", self._path, error)
        self._path = None


def _line(cell: str, delivered: Delivered) -> dict[str, Any]:
    return {"cell": cell, **asdict(delivered)}


def _files(folder: Path) -> dict[int, Path]:
    """The ledgers of a folder by epoch."""
    return {int(match[1]): path for path in folder.iterdir() if (match := _FILE.match(path.name))}


def _read(path: Path) -> tuple[Home | None, dict[str, Delivered]]:
    """What a ledger says; nothing where it cannot be read, up to there where its end was cut off."""
    delivered: dict[str, Delivered] = {}
    try:
        first, *lines = read_bytes(path).splitlines()
        head = json.loads(first)
        if head["version"] != FORMAT_VERSION:
            return None, {}
        home = Home(**head["home"])
    except (OSError, ValueError, TypeError, KeyError):
        return None, {}
    for line in lines:
        try:
            fields = json.loads(line)
            cell = fields.pop("cell")
            if fields:
                delivered[cell] = Delivered(**fields)
            else:
                delivered.pop(cell, None)
        except (ValueError, TypeError, KeyError, AttributeError):
            break
    return home, delivered
