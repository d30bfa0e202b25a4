"""Processes that die or fall asleep at any system call, on a storage that can lose its power; in one process.

What a thread does inside ``Mortal.run`` counts as the work of that process. Python's ``os`` is guarded meanwhile,
so the code under test is the real one. After its death every further write of a process raises ``Killed``, so that no
clean-up runs, as after a SIGKILL.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

GUARDED = ("open", "write", "fsync", "replace", "link", "unlink", "mkdir", "rmdir", "ftruncate")
_REAL: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in GUARDED}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_local = threading.local()


class Killed(BaseException):
    """The process is dead. No ``Exception``: nothing that it runs may catch this."""


@dataclass(frozen=True)
class Strike:
    """What happens at a process's system call number ``at`` from now: it dies before the call, it dies in the middle of a
    write, or it falls asleep before the call. ``among``: only calls of this name count.
    """

    how: Literal["die", "tear", "sleep"]
    at: int
    among: str | None = None


@dataclass
class Storage:
    """What a power failure would take: bytes without an fsync, renames in folders without one."""

    sizes: dict[int, int] = field(default_factory=dict)
    """By inode, the bytes that are safe."""
    renames: list[tuple[Path, bytes | None]] = field(default_factory=list)
    """Files renamed into place, with what was there before."""

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """The real system call, noted."""
        if name == "write":
            status = os.fstat(arguments[0])
            self.sizes.setdefault(status.st_ino, status.st_size)
        elif name == "replace":
            target = Path(arguments[1])
            self.renames.append((target, target.read_bytes() if target.exists() else None))
        result = _REAL[name](*arguments, **named)
        if name == "open" and arguments[1] & os.O_EXCL:
            self.sizes.pop(os.fstat(result).st_ino, None)  # a number used again
        elif name == "fsync":
            status = os.fstat(arguments[0])
            self.sizes.pop(status.st_ino, None)
            self.renames = [
                (path, old)
                for path, old in self.renames
                if path.parent.exists() and path.parent.stat().st_ino != status.st_ino
            ]
        return result

    def lose_power(self, root: Path) -> None:
        """Take away all that was not yet safe."""
        for path in root.rglob("*"):
            if path.is_file() and (safe := self.sizes.get(path.stat().st_ino)) is not None:
                os.truncate(path, safe)
        for path, old in reversed(self.renames):
            if path.parent.exists():
                path.unlink(missing_ok=True)
                if old is not None:
                    path.write_bytes(old)
        self.sizes, self.renames = {}, []


class Mortal:
    """One process. Its work is done call by call with ``run``, one at a time."""

    def __init__(self, storage: Storage) -> None:
        self.dead = False
        self.asleep = False
        self._storage = storage
        self._strike: Strike | None = None
        self._left = 0
        self._woken = threading.Event()
        self._paused = threading.Event()
        self._thread: threading.Thread | None = None
        self._outcome: BaseException | None = None

    def run(self, work: Callable[[], object], strike: Strike | None = None) -> BaseException | None:
        """Do some work; what it raised (``Killed`` when the process died of it). It may be ``asleep`` afterwards."""
        self._strike, self._left = strike, strike.at if strike else 0
        self._woken.clear()
        self._paused.clear()
        if strike is None or strike.how != "sleep":
            self._work(work)
            return self._outcome
        self._thread = threading.Thread(target=self._work, args=(work,), daemon=True)
        self._thread.start()
        self._paused.wait()
        return None if self.asleep else self._joined()

    def wake(self) -> BaseException | None:
        """Go on from the call where it fell asleep, to the end of that work."""
        self.asleep = False
        self._woken.set()
        return self._joined()

    def kill(self) -> None:
        """Die now, awake or asleep."""
        self.dead = True
        if self.asleep:
            self.wake()

    def _joined(self) -> BaseException | None:
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        return self._outcome

    def _work(self, work: Callable[[], object]) -> None:
        _local.process = self
        try:
            self._outcome = None
            work()
        except BaseException as error:  # handed to who waits for it
            self._outcome = error
        finally:
            _local.process = None
            self._strike = None
            self._paused.set()

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """A system call of this process."""
        if self.dead:
            raise Killed
        if self._strike is not None and self._strike.among in (None, name):
            if self._left == 0:
                self._be_struck(name, *arguments)
            self._left -= 1
        return self._storage.call(name, *arguments, **named)

    def _be_struck(self, name: str, *arguments: Any) -> None:
        assert self._strike is not None
        how, self._strike = self._strike.how, None
        if how == "sleep":
            self.asleep = True
            self._paused.set()
            self._woken.wait()
        else:
            if how == "tear" and name == "write":
                data = bytes(arguments[1])
                self._storage.call("write", arguments[0], data[: len(data) // 2])
            self.dead = True
        if self.dead:
            raise Killed


@contextmanager
def guarded_os() -> Iterator[None]:
    """Python's ``os`` with every writing call going through the process whose work it is."""

    def guard(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            process: Mortal | None = getattr(_local, "process", None)
            if process is None or (name == "open" and not arguments[1] & _WRITING):
                return _REAL[name](*arguments, **named)
            return process.call(name, *arguments, **named)

        return call

    for name in GUARDED:
        setattr(os, name, guard(name))
    try:
        yield
    finally:
        for name, real in _REAL.items():
            setattr(os, name, real)
