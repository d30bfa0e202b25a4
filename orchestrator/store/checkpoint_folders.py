"""Folders of checkpoints, ``step_<step>-e<epoch>-a<attempt>``: when one is whole, and which are kept."""

import json
import logging
import re
import shutil
from pathlib import Path

from orchestrator.store.cell_state import Commit, StoreDamaged
from orchestrator.store.files import is_temporary, read_bytes, sync_file, sync_folder

log = logging.getLogger(__name__)

MARKER = "COMPLETE"
MEND = "put it back, or remove the cell's folder to train the cell again"
_NAME = re.compile(r"^step_(\d+)-e(\d+)-a(\d+)$")


def folder_name(step: int, epoch: int, attempt: int) -> str:
    """The writer's epoch and attempt are part of the name, so no two writers share a folder."""
    return f"step_{step:08d}-e{epoch:04d}-a{attempt}"


def step_of(name: str) -> int | None:
    """The step that a folder's name tells, None for a name of another kind."""
    match = _NAME.match(name)
    return int(match[1]) if match else None


def file_sizes(path: Path) -> dict[str, int]:
    """Bytes of every file under a checkpoint, by relative name."""
    return {
        found.relative_to(path).as_posix(): found.stat().st_size
        for found in sorted(path.rglob("*"))
        if found.is_file() and found != path / MARKER and not is_temporary(found.name)
    }


def sync(path: Path) -> dict[str, int]:
    """Force everything under ``path`` to disk; the sizes of its files. Raises RuntimeError when it has none."""
    sizes = file_sizes(path)
    if not sizes:
        raise RuntimeError(f"{path}: an empty checkpoint cannot be complete")
    for name in sizes:
        sync_file(path / name)
    for folder in sorted({(path / name).parent for name in sizes} | {path, path.parent}):
        sync_folder(folder)
    return sizes


def verify(path: Path) -> None:
    """Raises StoreDamaged unless ``path`` has its marker and every file that the marker lists, in full."""
    try:
        expected = json.loads(read_bytes(path / MARKER))["files"]
    except (FileNotFoundError, NotADirectoryError):
        raise StoreDamaged(f"{path}: checkpoint without its {MARKER} marker; {MEND}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise StoreDamaged(f"{path}: checkpoint with an unreadable {MARKER} marker; {MEND}") from error
    found = file_sizes(path)
    for name, size in expected.items():
        if found.get(name) != size:
            raise StoreDamaged(
                f"{path}: {name} has {found.get(name, 'no')} bytes, {size} were committed; {MEND}"
            )


def sweep(cell_folder: Path, commit: Commit | None, epoch: int, keep: int) -> None:
    """Keep the committed checkpoint and the newest complete ones before it, ``keep`` in all; remove the
    others.

    Folders of an epoch above ``epoch`` belong to whoever has taken the run over and are left alone.
    """
    root = cell_folder / "checkpoints"
    found = {}
    for path in root.iterdir() if root.is_dir() else ():
        match = _NAME.match(path.name)
        if match and int(match[2]) <= epoch:
            found[path] = (int(match[1]), int(match[2]), int(match[3]))  # step, epoch, attempt
    committed = cell_folder / commit.checkpoint if commit and commit.checkpoint else None
    earlier = [
        path
        for path in sorted(found, key=lambda path: found[path], reverse=True)
        if commit and path != committed and found[path][0] <= commit.step and (path / MARKER).exists()
    ]
    kept = {committed, *earlier[: keep - (committed is not None)]}
    for path in found.keys() - kept:
        try:
            remove(path)
        except OSError as error:
            # Harmless to resuming: a reader elsewhere (NFS) or an orphaned writer still uses the folder.
            log.warning("old checkpoint %s not removed, tried again at the next commit: %s", path, error)


def remove(path: Path) -> None:
    """Remove a checkpoint, its marker first: a half-removed one must not pass for a whole one."""
    (path / MARKER).unlink(missing_ok=True)
    shutil.rmtree(path)
