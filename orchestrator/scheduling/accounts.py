"""Where the time of the pools went."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from orchestrator.scheduling.costs import TRAINING
from orchestrator.store.phase_log import PhaseKind, PhaseRecord

EVALUATING = (PhaseKind.EVALUATION, PhaseKind.EVALUATION_GRADING)


@dataclass
class Accounts:
    """Accelerator-seconds, which together are the whole time of all members that have served.

    Of each controller's time from its first phase to the end of its last one. Graders hold no accelerators.
    """

    training: float = 0.0
    """Sampling and learning of steps that count."""
    evaluation: float = 0.0
    """Of these as of the base model."""
    upkeep: float = 0.0
    """Loading cells, committing them, and showing at the start that the pools serve."""
    replayed: float = 0.0
    """Phases that failed or were given up, and steps and evaluations beyond the commit that their cell went back to."""
    idle: float = 0.0
    """Waiting, starting and starting again."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))

    def line(self) -> str:
        """Shares, for people."""
        total = self.total
        shares = ", ".join(
            f"{getattr(self, field.name) / total if total else 0.0:.1%} {field.name}"
            for field in fields(self)
        )
        return f"{total / 3600:,.4g} accelerator-hours: {shares}"


def accounts(epochs: Iterable[Sequence[PhaseRecord]]) -> Accounts:
    """The accounts of a run.

    Args:
        epochs: the records of each controller that the run has had, oldest first, in the order in which phases ended.
    """
    found = Accounts()
    kept: defaultdict[str, list[PhaseRecord]] = defaultdict(list)
    """Of each cell what counts, as long as it does not go back."""
    for records in epochs:
        for record in records:
            spent = record.busy_seconds * record.accelerators
            if record.failed:
                found.replayed += spent
            elif record.kind is PhaseKind.TAKING_UP:
                found.upkeep += spent
                found.replayed += _forget(kept, record)
            elif record.kind in TRAINING or record.kind in EVALUATING:
                kept[record.cell].append(record)
            else:
                found.upkeep += spent
        found.idle += _held(records) - sum(record.busy_seconds * record.accelerators for record in records)
    for record in (record for of_cell in kept.values() for record in of_cell):
        spent = record.busy_seconds * record.accelerators
        if record.kind in EVALUATING:
            found.evaluation += spent
        else:
            found.training += spent
    return found


def _forget(kept: dict[str, list[PhaseRecord]], taken_up: PhaseRecord) -> float:
    """Drop what a cell has done beyond the step that it goes back to; its accelerator-seconds."""
    before = kept.pop(taken_up.cell, [])
    kept[taken_up.cell] = [record for record in before if record.step <= taken_up.step]
    return sum(record.busy_seconds * record.accelerators for record in before if record.step > taken_up.step)


def _held(records: Sequence[PhaseRecord]) -> float:
    """Accelerator-seconds of all members from the first phase to the end of the last one."""
    if not records:
        return 0.0
    seconds = max(record.ended_at for record in records) - min(record.started_at for record in records)
    return seconds * sum({record.member: record.accelerators for record in records}.values())
