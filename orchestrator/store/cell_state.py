"""What is known of one cell at any time (``state.json``) and of each attempt at it (``attempt.json``)."""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from grids.errors import UserError

FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)
"""Version 1 has neither ``spent`` and ``deviations`` nor a commit's ``layout``; no cell of it is cancelled."""


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
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Spent:
    """Retry budgets used up since the commit of step ``at_step`` (0: since the start)."""

    own_failures: int = 0
    preemptions: int = 0
    at_step: int = 0


@dataclass(frozen=True)
class Commit:
    """What a cell resumes from: ``step`` update steps done, and how much of the history was written by then.

    ``checkpoint`` is relative to the cell's folder (None: nothing to load). ``progress`` are the caller's
    accumulators. ``layout`` is what bit-exactness rests on, by name (None in commits of version 1).
    """

    step: int
    history_bytes: int
    history_rows: int
    checkpoint: str | None
    progress: dict[str, Any]
    layout: dict[str, Any] | None = None


@dataclass(frozen=True)
class CellState:
    """The content of ``state.json``. ``epoch`` is its writer's lease epoch, ``updated_at`` unix seconds.

    ``deviations`` say in words why the cell is not bit for bit what an undisturbed run gives.
    """

    cell: str
    state: State = State.PENDING
    attempt: int = 0
    epoch: int = 0
    reason: str | None = None
    commit: Commit | None = None
    updated_at: float = 0.0
    version: int = FORMAT_VERSION
    spent: Spent = Spent()
    deviations: tuple[str, ...] = ()

    @property
    def spent_now(self) -> Spent:
        """The retries that count: none once a commit lies beyond the step that they were counted from."""
        committed = self.committed_step
        return self.spent if committed <= self.spent.at_step else Spent(at_step=committed)

    @property
    def committed_step(self) -> int:
        """The step that the cell resumes from, 0 when it starts from nothing."""
        return self.commit.step if self.commit else 0

    def to_bytes(self) -> bytes:
        return _to_bytes(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes, path: str | Path) -> "CellState":
        """A state of this or an older format, brought up to this one.

        Raises StoreDamaged, naming ``path``, for anything that ``to_bytes`` did not write.
        """
        try:
            fields = json.loads(data.decode())
            refuse_unknown_version(fields["version"], path)
            commit = fields["commit"]
            fields["commit"] = Commit(**commit) if commit else None
            fields["state"] = State(fields["state"])
            fields["version"] = FORMAT_VERSION
            fields["spent"] = Spent(**fields.get("spent", {}))
            fields["deviations"] = tuple(fields.get("deviations", ()))
            return cls(**fields)
        except (ValueError, TypeError, KeyError) as error:
            raise StoreDamaged(
                f"{path}: not a cell state ({error}); "
                "put the file back, or remove the cell's folder to train it again"
            ) from error


@dataclass(frozen=True)
class AttemptRecord:
    """One try at a cell, from ``first_step`` (the step after its commit); times are unix seconds.

    Once it has ended: ``last_step`` is the committed step, ``outcome`` one of finished, failed, diverged,
    paused, cancelled and lost (the cell is tried again). ``fault`` is its kind, ``phase`` where it struck,
    ``problems`` the rows of problems concerned ("<path>, row 17"). An attempt whose controller was killed has no
    end.
    """

    attempt: int
    epoch: int
    started_at: float
    first_step: int
    ended_at: float | None = None
    last_step: int | None = None
    outcome: str | None = None
    reason: str | None = None
    fault: str | None = None
    phase: str | None = None
    problems: tuple[str, ...] = ()
    version: int = FORMAT_VERSION

    def to_bytes(self) -> bytes:
        return _to_bytes(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes, path: str | Path) -> "AttemptRecord":
        """Raises StoreDamaged, naming ``path``, for anything that ``to_bytes`` did not write."""
        try:
            fields = json.loads(data.decode())
            refuse_unknown_version(fields["version"], path)
            return cls(**fields | {"problems": tuple(fields["problems"]), "version": FORMAT_VERSION})
        except (ValueError, TypeError, KeyError) as error:
            raise StoreDamaged(
                f"{path}: not the record of an attempt ({error}); remove the file, nothing rests on it"
            ) from error


def refuse_unknown_version(version: object, path: str | Path) -> None:
    """Raises StoreDamaged for a format that this release does not read."""
    if version not in READABLE_VERSIONS:
        raise StoreDamaged(
            f"{path}: field version: format {version}, this release reads up to {FORMAT_VERSION}; "
            "use the release that wrote the run"
        )


def _to_bytes(fields: dict[str, Any]) -> bytes:
    return (json.dumps(fields, indent=1, allow_nan=False) + "\n").encode()
