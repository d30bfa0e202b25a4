"""The run folder: the only source of truth about a run, outside Ray, readable at any time without a lock."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from grids.errors import UserError
from orchestrator.cell_state import CellState, Commit, State, StoreDamaged
from orchestrator.cell_store import CHECKPOINTS_KEPT, CellStore
from orchestrator.files import (
    create_exclusively,
    is_temporary,
    make_folder,
    read_bytes,
    remove_temporaries,
    write_atomically,
)

__all__ = [
    "CellState",
    "CellStore",
    "Commit",
    "RunStore",
    "SpecDiffers",
    "State",
    "StoreDamaged",
    "fingerprint",
]

FORMAT_VERSION = 1
DIFFERENCES_SHOWN = 5
_CELL_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


class SpecDiffers(UserError):
    """The run folder was made for another grid."""


class RunStore:
    """A run folder. ``open`` or ``existing`` give one for reading; ``hold`` makes it writable."""

    def __init__(self, run_dir: Path, resolved: dict[str, Any]) -> None:
        self.run_dir = run_dir
        self.resolved = resolved
        self._epoch = 0
        self._check: Callable[[], None] | None = None
        self._keep = CHECKPOINTS_KEPT

    @classmethod
    def open(cls, run_dir: Path, identity: dict[str, Any], resolved: dict[str, Any]) -> "RunStore":
        """Make the run folder, or continue the one that is there.

        ``identity`` is what decides the results: a folder of another identity raises SpecDiffers.
        ``resolved`` (the whole spec, versions) is kept as it was when the folder was made. Both hold plain
        JSON values. Raises UserError for a relative path and for a folder that holds something else.
        """
        if not run_dir.is_absolute():
            raise UserError(
                f"run folder {run_dir}: a relative path would lie in a job's throw-away working directory; "
                "give an absolute one on storage that all nodes share"
            )
        path = run_dir / "grid.yaml"
        try:
            make_folder(run_dir)
            if not path.exists() and all(is_temporary(name) for name in os.listdir(run_dir)):
                content = {
                    "version": FORMAT_VERSION,
                    "fingerprint": fingerprint(identity),
                    "resolved": _plain(resolved),
                    "identity": _plain(identity),
                }
                create_exclusively(
                    path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True).encode()
                )
        except OSError as error:
            raise UserError(
                f"run folder {run_dir}: cannot be written ({error.strerror}); "
                "choose another --run-dir, or mend its permissions"
            ) from error
        store, stored_identity = cls._load(run_dir)
        if fingerprint(stored_identity) != fingerprint(identity):
            differences = _describe_differences(stored_identity, _plain(identity))
            raise SpecDiffers(
                f"{path}: this run was made for another grid: {differences}; "
                "choose another --run-dir, or put the field back"
            )
        return store

    @classmethod
    def existing(cls, run_dir: Path) -> "RunStore":
        """A run folder to read. Raises UserError when it is none."""
        return cls._load(run_dir)[0]

    def hold(self, epoch: int, check: Callable[[], None], keep: int = CHECKPOINTS_KEPT) -> None:
        """Make the store writable under a lease just taken; to be called before any cell is read.

        ``keep`` is the number of checkpoints that each cell keeps.

        Removes what writers of earlier epochs were about to rename into place, which fences them off (see
        files.py).
        """
        self._epoch, self._check, self._keep = epoch, check, keep
        check()
        remove_temporaries(self.run_dir, epoch, recursive=False)
        remove_temporaries(make_folder(self.run_dir / "cells"), epoch, recursive=True)

    @property
    def lease_dir(self) -> Path:
        return self.run_dir / "controller.lease"

    @property
    def report_dir(self) -> Path:
        return self.run_dir / "report"

    def cell(self, cell_id: str) -> CellStore:
        """The store of one cell, which need not exist yet; writable after ``hold``."""
        if not _CELL_ID.match(cell_id):
            raise ValueError(f"not a cell id: {cell_id!r}")
        return CellStore(self.run_dir / "cells" / cell_id, cell_id, self._epoch, self._check, self._keep)

    def states(self) -> dict[str, CellState]:
        """The state of every cell that has a folder, by id. Raises StoreDamaged."""
        root = self.run_dir / "cells"
        names = sorted(os.listdir(root)) if root.is_dir() else []
        return {
            name: self.cell(name).read() for name in names if _CELL_ID.match(name) and (root / name).is_dir()
        }

    def write_base(self, row: dict[str, Any]) -> None:
        """Keep the base model's evaluation (C = 0). Raises ValueError for NaN."""
        if self._check is None:
            raise RuntimeError(f"{self.run_dir}: opened for reading; hold the run's lease to write")
        data = (json.dumps(row, indent=1, allow_nan=False) + "\n").encode()
        write_atomically(self.run_dir / "base.json", data, epoch=self._epoch, fence=self._check)

    def read_base(self) -> dict[str, Any] | None:
        """The base model's evaluation, None before there is one."""
        path = self.run_dir / "base.json"
        try:
            return json.loads(read_bytes(path))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise StoreDamaged(
                f"{path}: not JSON; remove the file to evaluate the base model again"
            ) from error

    @classmethod
    def _load(cls, run_dir: Path) -> tuple["RunStore", dict[str, Any]]:
        """The store and the identity it was made for."""
        path = run_dir / "grid.yaml"
        try:
            content = yaml.safe_load(read_bytes(path))
            version, identity = content["version"], content["identity"]
            if version != FORMAT_VERSION:
                raise StoreDamaged(
                    f"{path}: field version: format {version}, this release reads {FORMAT_VERSION}; "
                    "use the release that wrote the run"
                )
            if content["fingerprint"] != fingerprint(identity):
                raise StoreDamaged(
                    f"{path}: field identity was changed by hand; put it back, or choose another --run-dir"
                )
            return cls(run_dir, content["resolved"]), identity
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(
                f"{run_dir}: not a run folder (it has no grid.yaml); give the folder of a run, or an empty one for a new run"
            ) from None
        except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
            raise StoreDamaged(
                f"{path}: not a run's grid.yaml; put it back, or choose another --run-dir"
            ) from error


def fingerprint(identity: dict[str, Any]) -> str:
    """SHA-256 of the canonical JSON (sorted keys, no spaces): equal for equal content, whatever the order of
    keys.
    """
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _plain(value: Any) -> Any:
    """The value as JSON gives it back: tuples are lists, keys are strings."""
    return json.loads(json.dumps(value, allow_nan=False))


def _describe_differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    before, after = dict(_leaves(old)), dict(_leaves(new))
    fields = [field for field in before | after if before.get(field) != after.get(field)]
    shown = [f"{field}: {before.get(field, 'absent')} -> {after.get(field, 'absent')}" for field in fields]
    more = len(shown) - DIFFERENCES_SHOWN
    return ", ".join(shown[:DIFFERENCES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _leaves(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted path and JSON text of every value that is not itself a mapping."""
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield from _leaves(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(item, ensure_ascii=False)
