"""Writes that survive a kill at any instant, on storage where rename and link are atomic and locks are not
(NFS, Lustre).

A file is written to a hidden temporary beside it, forced to disk and renamed over its name. The temporary's
name carries the writer's lease epoch. That makes rename a fence: a writer checks its lease between writing
the temporary and renaming it, and whoever takes the lease over removes every temporary of a lower epoch
before reading anything. A writer that was suspended after its check therefore finds its temporary gone, and
one suspended before it fails the check.
"""

import errno
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path

_TEMPORARY = re.compile(r"^\..+\.e(\d+)\.[0-9a-f]+\.tmp$")


def write_atomically(
    path: Path,
    data: bytes,
    *,
    epoch: int = 0,
    fence: Callable[[], None] | None = None,
    durable: bool = True,
) -> None:
    """Replace ``path`` by ``data``, wholly or not at all.

    ``fence`` is called after the data is on disk and before the rename; what it raises leaves ``path`` as it
    was. ``epoch`` is the writer's lease epoch (0: the file is not under a lease). ``durable=False`` skips the
    fsyncs.
    """
    temporary = _write_temporary(path, data, epoch, durable)
    try:
        if fence is not None:
            fence()
        try:
            os.replace(temporary, path)
        except FileNotFoundError:
            if fence is not None:
                fence()  # someone took the lease over and removed the temporary: say that, not "no such file"
            raise
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)


def create_exclusively(path: Path, data: bytes) -> bool:
    """Make ``path`` with ``data`` unless it exists; whether this call made it. Of several racing calls one
    gets True.
    """
    temporary = _write_temporary(path, data, epoch=0, durable=True)
    try:
        os.link(temporary, path)
    except FileExistsError:
        # NFS may lose the reply to a link that succeeded and report the repeated request as "exists".
        if not os.path.samefile(temporary, path):
            return False
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def read_bytes(path: Path) -> bytes:
    """The file's content; a file that another node replaces during the read (NFS: stale handle) is read
    again.
    """
    for _ in range(4):
        try:
            return path.read_bytes()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return path.read_bytes()


def write_all(descriptor: int, data: bytes) -> None:
    """``os.write`` until everything is written (a nearly full disk takes a part, then fails)."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def is_temporary(name: str) -> bool:
    """Whether a file name is one of this module's temporaries."""
    return _TEMPORARY.match(name) is not None


def remove_temporaries(folder: Path, below_epoch: int, *, recursive: bool) -> None:
    """Remove the temporaries of epochs 1 .. ``below_epoch`` - 1 (epoch 0 is not under the lease and is left
    alone).
    """
    for parent, _, names in os.walk(folder):  # tolerates folders that vanish meanwhile
        for name in names:
            match = _TEMPORARY.match(name)
            if match and 1 <= int(match[1]) < below_epoch:
                Path(parent, name).unlink(missing_ok=True)
        if not recursive:
            break


def make_folder(path: Path) -> Path:
    """Make a folder and its missing parents, each durably; the path itself."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)
    return path


def sync_file(path: Path) -> None:
    """Force a file's content to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Force a folder's entries to disk: without it a rename may be undone by a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_temporary(path: Path, data: bytes, epoch: int, durable: bool) -> Path:
    temporary = path.parent / f".{path.name}.e{epoch:06d}.{uuid.uuid4().hex[:12]}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        write_all(descriptor, data)
        if durable:
            os.fsync(descriptor)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return temporary
