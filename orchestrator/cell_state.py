"""What is known of one cell at any time: the content of its ``state.json``."""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from grids.errors import UserError

FORMAT_VERSION = 1


class StoreDamaged(UserError):
    """The run folder does not hold what it says it holds."""


class State(StrEnum):
    """Where a cell stands; ``diverged`` is a result, not a failure."""

    PENDING = "pending"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"
    DIVERGED = "diverged"


@dataclass(frozen=True)
class Commit:
    """What a cell resumes from: ``step`` update steps done, and how much of the history was written by then.

    ``checkpoint`` is relative to the cell's folder (None: nothing to load). ``progress`` are the caller's
    accumulators.
    """

    step: int
    history_bytes: int
    history_rows: int
    checkpoint: str | None
    progress: dict[str, Any]


@dataclass(frozen=True)
class CellState:
    """The content of ``state.json``. ``epoch`` is its writer's lease epoch, ``updated_at`` unix seconds."""

    cell: str
    state: State = State.PENDING
    attempt: int = 0
    epoch: int = 0
    reason: str | None = None
    commit: Commit | None = None
    updated_at: float = 0.0
    version: int = FORMAT_VERSION

    def to_bytes(self) -> bytes:
        return (json.dumps(asdict(self), indent=1, allow_nan=False) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, path: Path) -> "CellState":
        """Raises StoreDamaged, naming ``path``, for anything that ``to_bytes`` did not write."""
        try:
            fields = json.loads(data)
            if fields["version"] != FORMAT_VERSION:
                raise StoreDamaged(
                    f"{path}: field version: format {fields['version']}, this release reads "
                    f"{FORMAT_VERSION}; use the release that wrote the run"
                )
            commit = fields["commit"]
            return cls(
                **fields | {"state": State(fields["state"]), "commit": Commit(**commit) if commit else None}
            )
        except (ValueError, TypeError, KeyError) as error:
            raise StoreDamaged(
                f"{path}: not a cell state ({error}); "
                "put the file back, or remove the cell's folder to train it again"
            ) from error
