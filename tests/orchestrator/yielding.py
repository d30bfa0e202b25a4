"""An actor that yields pairs, apart from the tests: its process would import all that they do."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grids.errors import UserError
from orchestrator.pools.members import Member, this_member


class NotForTheController:
    """What stays where it was made."""

    def __init__(self, owner: int) -> None:
        self.owner = owner

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return unpacked, (self.owner,)


BROUGHT: list[NotForTheController] = []
"""What came to this process. An error would not tell: Ray hides those of looking at a reference."""


def unpacked(controller: int) -> NotForTheController:
    thing = NotForTheController(controller)
    if os.getpid() == controller:
        BROUGHT.append(thing)
    return thing


class Yielding:
    """An actor that yields pairs."""

    def start(self) -> None:
        """Nothing to start."""

    def identify(self, role: str) -> Member:
        return this_member(role)

    def signs_of_life(self) -> int:
        return 0

    def pairs(self, controller: int, folder: Path, end: str) -> Iterator[object]:
        yield "first"
        time.sleep(0.1)
        yield NotForTheController(controller)
        while not (folder / "seen").exists():
            time.sleep(0.01)
        yield "second"
        if end == "error":
            raise UserError("the call is at fault")
        if end == "death":
            os._exit(1)
        yield NotForTheController(controller)

    def owner(self, thing: NotForTheController) -> int:
        return thing.owner
