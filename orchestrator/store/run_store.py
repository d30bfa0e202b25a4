"""The run folder: the only source of truth about a run, outside Ray, readable at any time without a lock."""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grids.errors import UserError
from orchestrator.store.cell_state import (
    FORMAT_VERSION,
    CellState,
    Commit,
    State,
    StoreDamaged,
    refuse_unknown_version,
)
from orchestrator.store.cell_store import CHECKPOINTS_KEPT, CellStore, read_state
from orchestrator.store.files import (
    FencedFiles,
    create_exclusively,
    is_temporary,
    make_folder,
    read_bytes,
    remove_temporaries,
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

DIFFERENCES_SHOWN = 5
_BUDGET = "spec.grid.compute_rollouts"
_CELL_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


class SpecDiffers(UserError):
    """The run folder was made for another grid."""

    def __init__(self, difference: str, mend: str) -> None:
        """``difference``: which file, and what differs."""
        super().__init__(f"{difference}; {mend}")
        self.difference = difference


class RunStore:
    """A run folder. ``open`` or ``existing`` give one for reading; ``hold`` makes it writable."""

    def __init__(self, run_dir: Path, resolved: dict[str, Any]) -> None:
        self.run_dir = run_dir
        self.resolved = resolved
        self._files = FencedFiles(run_dir)
        self._keep = CHECKPOINTS_KEPT

    @classmethod
    def open(cls, run_dir: Path, identity: dict[str, Any], resolved: dict[str, Any]) -> "RunStore":
        """Make the run folder, or continue the one that is there.

        ``identity`` is what decides the results: a folder of another identity raises SpecDiffers, as does a
        budget below the folder's. ``resolved`` (run_id, the whole spec, versions) is written where the folder
        is new; ``update_resolved`` brings it up to date. Both hold plain JSON values. Raises UserError for a
        relative path and for a folder that holds something else.
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
                content = _GridFile(_plain(resolved), _plain(identity), [_submission(resolved, [])])
                create_exclusively(path, content.to_bytes())
        except OSError as error:
            raise UserError(
                f"run folder {run_dir}: cannot be written ({error.strerror}); "
                "choose another --run-dir, or mend its permissions"
            ) from error
        stored = _GridFile.read(run_dir)
        differences = _differences(stored.identity, _as_recorded(_plain(identity), stored.identity))
        if differences:
            raise SpecDiffers(
                f"{path}: this run was made for another grid: {_shorten(differences)}",
                "choose another --run-dir, or put the field back",
            )
        _refuse_smaller_budget(path, stored.resolved, resolved)
        return cls(run_dir, stored.resolved)

    @classmethod
    def existing(cls, run_dir: Path) -> "RunStore":
        """A run folder to read. Raises UserError when it is none."""
        return cls(run_dir, _GridFile.read(run_dir).resolved)

    def hold(self, epoch: int, check: Callable[[], None], keep: int = CHECKPOINTS_KEPT) -> None:
        """Make the store writable under a lease just taken; to be called before any cell is read.

        ``keep`` is the number of checkpoints that each cell keeps.

        Removes the states and histories that writers of earlier epochs were about to rename into place, which
        fences them off (see files.py). What lies deeper in a cell's folder is named by its attempt and its
        epoch, or is the same whoever writes it; ``CellStore.restore`` cleans that.
        """
        self._files, self._keep = FencedFiles(self.run_dir, epoch, check), keep
        check()
        remove_temporaries(self.run_dir, epoch)
        remove_temporaries(make_folder(self.run_dir / "cells"), epoch, levels=1)

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
        folder = Path(f"{self.run_dir}/cells/{cell_id}")
        return CellStore(folder, cell_id, self._files.epoch, self._files.check, self._keep)

    def history_path(self, cell_id: str) -> str:
        """Where the history of a cell lies, whether there is one or not."""
        return f"{self.run_dir}/cells/{cell_id}/history.jsonl"

    def states(self) -> dict[str, CellState]:
        """The state of every cell that has a folder, by id. Raises StoreDamaged."""
        root = f"{self.run_dir}/cells"
        try:
            with os.scandir(root) as entries:
                names = sorted(
                    entry.name for entry in entries if _CELL_ID.match(entry.name) and entry.is_dir()
                )
        except FileNotFoundError:
            return {}
        return {name: read_state(f"{root}/{name}/state.json", name) for name in names}

    def update_resolved(self, resolved: dict[str, Any]) -> None:
        """Bring ``resolved`` in grid.yaml up to the present spec and versions; its ``run_id`` is kept.

        What differs is added to grid.yaml's ``submissions``, so that people see what changed when. Raises
        SpecDiffers for a budget below the stored one, RuntimeError before ``hold``.
        """
        self._files.fence()
        path = self.run_dir / "grid.yaml"
        stored = _GridFile.read(self.run_dir)
        _refuse_smaller_budget(path, stored.resolved, resolved)
        updated = _plain(resolved)
        if "run_id" in stored.resolved:
            updated["run_id"] = stored.resolved["run_id"]
        changed = _differences(stored.resolved, updated)
        if changed or stored.version != FORMAT_VERSION:
            submissions = [*stored.submissions, _submission(updated, changed)]
            self._files.replace(path, _GridFile(updated, stored.identity, submissions).to_bytes())
        self.resolved = updated

    def write_base(self, row: dict[str, Any]) -> None:
        """Keep the base model's evaluation (C = 0). Raises ValueError for NaN."""
        data = (json.dumps(row, indent=1, allow_nan=False) + "\n").encode()
        self._files.replace(self.run_dir / "base.json", data)

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


@dataclass(frozen=True)
class _GridFile:
    """The content of ``grid.yaml``. ``identity`` is that of the present format, whatever the file's."""

    resolved: dict[str, Any]
    identity: dict[str, Any]
    submissions: list[dict[str, Any]]
    version: int = FORMAT_VERSION

    def to_bytes(self) -> bytes:
        content = {
            "version": FORMAT_VERSION,
            "fingerprint": fingerprint(self.identity),
            "resolved": self.resolved,
            "identity": self.identity,
            "submissions": self.submissions,
        }
        return yaml.safe_dump(content, sort_keys=False, allow_unicode=True).encode()

    @classmethod
    def read(cls, run_dir: Path) -> "_GridFile":
        """Raises UserError where there is none, StoreDamaged for a file of another kind or format."""
        path = run_dir / "grid.yaml"
        try:
            content = yaml.safe_load(read_bytes(path))
            version, identity = content["version"], content["identity"]
            refuse_unknown_version(version, path)
            if content["fingerprint"] != fingerprint(identity):
                raise StoreDamaged(
                    f"{path}: field identity was changed by hand; put it back, or choose another --run-dir"
                )
            if version == 1:
                identity = _without_budget(identity)
            return cls(content["resolved"], identity, content.get("submissions", []), version)
        except (FileNotFoundError, NotADirectoryError):
            what = "not a run folder (it has no grid.yaml)" if run_dir.is_dir() else "no such folder"
            raise UserError(f"{run_dir}: {what}; give the folder of a run, such as runs/quickstart") from None
        except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
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


def _without_budget(identity: dict[str, Any]) -> dict[str, Any]:
    """An identity of format 1 as format 2 has it: a budget may grow, so it is no part of it."""
    grid = identity.get("grid")
    if not isinstance(grid, dict):
        return identity
    return identity | {"grid": {key: value for key, value in grid.items() if key != "compute_rollouts"}}


def _as_recorded(identity: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
    """``identity`` as far as a stored one goes: format 1 had no fingerprint of large weights."""
    model, stored_model = identity.get("model"), stored.get("model")
    if isinstance(model, dict) and isinstance(stored_model, dict) and "weights" not in stored_model:
        model = {key: value for key, value in model.items() if key != "weights"}
        return identity | {"model": model}
    return identity


def _refuse_smaller_budget(path: Path, stored: dict[str, Any], new: dict[str, Any]) -> None:
    before, after = (dict(_leaves(resolved)).get(_BUDGET) for resolved in (stored, new))
    if before is not None and after is not None and int(after) < int(before):
        raise SpecDiffers(
            f"{path}: grid.compute_rollouts: {before} -> {after}: the budget of a run can only grow",
            f"set it to {before} or more, or choose another --run-dir",
        )


def _submission(resolved: dict[str, Any], changed: list[str]) -> dict[str, Any]:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"at": now, "versions": _plain(resolved.get("versions", {})), "changed": changed}


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Every field that differs, "dotted.path: old -> new"."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    fields = [field for field in before | after if before.get(field) != after.get(field)]
    return [f"{field}: {before.get(field, 'absent')} -> {after.get(field, 'absent')}" for field in fields]


def _shorten(differences: list[str]) -> str:
    more = len(differences) - DIFFERENCES_SHOWN
    return ", ".join(differences[:DIFFERENCES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _leaves(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted path and JSON text of every value that is not itself a mapping."""
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield from _leaves(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(item, ensure_ascii=False, sort_keys=True)
