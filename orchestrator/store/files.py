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
from dataclasses import dataclass
from pathlib import Path

_TAIL_BYTES = 4096
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
        os.replace(temporary, path)
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


@dataclass(frozen=True)
class FencedFiles:
    """Files under ``folder`` that are written under a lease, whose ``check`` raises once it is lost.

    Without a check they can only be read: every write raises RuntimeError.
    """

    folder: Path
    epoch: int = 0
    check: Callable[[], None] | None = None

    def fence(self) -> None:
        """Raises RuntimeError without a lease, LeaseLost when it is lost."""
        if self.check is None:
            raise RuntimeError(f"{self.folder}: opened for reading; hold the run's lease to write")
        self.check()

    def make_folder(self, path: Path) -> Path:
        """``path`` itself, made when missing."""
        self.fence()
        return make_folder(path)

    def replace(self, path: Path, data: bytes) -> None:
        """Replace a file, wholly or not at all; its folder is made when missing."""
        self.make_folder(path.parent)
        try:
            write_atomically(path, data, epoch=self.epoch, fence=self.fence)
        except FileNotFoundError:
            self.fence()  # whoever has taken the lease over removed the temporary: say that, not "no such file"
            raise

    def append(self, path: Path, data: bytes) -> None:
        """Append to a file, made when missing. Not forced to disk."""
        self.make_folder(path.parent)
        self.fence()
        append_to(path, data)


def read_bytes(path: str | Path) -> bytes:
    """The file's content; a file that another node replaces during the read (NFS: stale handle) is read
    again.
    """
    for _ in range(4):
        try:
            return _read(path)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return _read(path)


def _read(path: str | Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        chunks: list[bytes] = []
        while chunk := os.read(descriptor, max(os.fstat(descriptor).st_size, 4096) if not chunks else 65536):
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """``os.write`` until everything is written (a nearly full disk takes a part, then fails)."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def append_all(descriptor: int, data: bytes) -> None:
    """Append ``data`` to an open file, or nothing of it where that fails (half a line would have the next one
    glued to it).
    """
    end = os.fstat(descriptor).st_size
    try:
        write_all(descriptor, data)
    except OSError:
        os.ftruncate(descriptor, end)
        raise


def append_to(path: Path, data: bytes) -> None:
    """Append to a file, made when missing. Not forced to disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        append_all(descriptor, data)
    finally:
        os.close(descriptor)


def read_last_line(path: str | Path) -> bytes | None:
    """The last complete line (one that ends in a newline) without its end, None where there is none.

    Reads the end of the file alone.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        start = os.fstat(descriptor).st_size
        tail = b""
        while start > 0:
            length = min(start, max(_TAIL_BYTES, len(tail)))
            start -= length
            tail = os.pread(descriptor, length, start) + tail
            end = tail.rfind(b"\n")
            begin = tail.rfind(b"\n", 0, max(end, 0))
            if end >= 0 and (begin >= 0 or start == 0):
                return tail[begin + 1 : end]
        return None
    finally:
        os.close(descriptor)


def is_temporary(name: str) -> bool:
    """Whether a file name is one of this module's temporaries."""
    return _TEMPORARY.match(name) is not None


def remove_temporaries(folder: str | Path, below_epoch: int, *, levels: int | None = 0) -> None:
    """Remove the temporaries of epochs 1 .. ``below_epoch`` - 1 (epoch 0 is not under the lease and is left
    alone), ``levels`` deep under ``folder`` (None: all of it).
    """
    try:
        with os.scandir(folder) as entries:
            found = [(entry.name, entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return  # removed meanwhile
    for name, path, is_folder in found:
        if is_folder and levels != 0:
            remove_temporaries(path, below_epoch, levels=None if levels is None else levels - 1)
        elif name.startswith("."):
            match = _TEMPORARY.match(name)
            if match and 1 <= int(match[1]) < below_epoch:
                Path(path).unlink(missing_ok=True)


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
