"""The world of a simulation as an earlier run, or the beginning of this one, has shown it."""

import statistics
from collections import defaultdict
from collections.abc import Sequence

from grids.spec import GridSpec
from orchestrator.scheduling.costs import TRAINING, CostModel
from orchestrator.simulation.conditions import Conditions
from orchestrator.store.phase_log import PhaseKind, PhaseRecord


class LearntTimes:
    """What a cost model expects; phases beside training that it has never seen take no time."""

    def __init__(self, costs: CostModel) -> None:
        """A model that learns no more."""
        self._costs = costs

    def seconds(self, kind: PhaseKind, sequences: int) -> float:
        """Of one call."""
        known = kind in TRAINING or self._costs.knows(kind)
        return self._costs.seconds(kind, sequences) if known else 0.0


def learnt_conditions(spec: GridSpec, records: Sequence[PhaseRecord]) -> Conditions:
    """Phases take as long as on record, evaluations sample as much; nobody is lost.

    Args:
        spec: the grid that is to be simulated.
        records: of pools of the same kind, in any number of members.
    """
    return Conditions(
        LearntTimes(CostModel(records)), evaluation_batches(spec, records), handovers=handovers(records)
    )


def evaluation_batches(spec: GridSpec, records: Sequence[PhaseRecord]) -> tuple[tuple[int, int], ...]:
    """(problems, samples of each) of validation and train probe, as the grid has them and as many as were sampled at a time."""
    sampled: defaultdict[tuple[str, int], int] = defaultdict(int)
    for record in records:
        if record.kind is PhaseKind.EVALUATION and not record.failed:
            sampled[record.cell, record.step] += record.sequences
    if not sampled:
        return ()
    evaluation = spec.evaluation
    probe, samples = evaluation.train_probe, evaluation.samples_per_problem
    # One that was still going on when the records end has fewer.
    validation = max(sampled.values()) - probe.problems * probe.samples_per_problem
    batches = [(max(validation, 0) // samples, samples), (probe.problems, probe.samples_per_problem)]
    return tuple(batch for batch in batches if batch[0] > 0)


def handovers(records: Sequence[PhaseRecord]) -> dict[PhaseKind, float]:
    """Median seconds, by kind, from the end of a cell's phase to the next one's asking: what controller and network take.

    A grading that is asked for while its step is still being sampled, on whichever engine, counts as 0: its slice came just
    before, which no record tells, and the phase that ended last has nothing to do with it.
    """
    by_cell: defaultdict[str, list[PhaseRecord]] = defaultdict(list)
    samplings: defaultdict[tuple[str, int], list[PhaseRecord]] = defaultdict(list)
    for record in records:
        by_cell[record.cell].append(record)
        if record.kind is PhaseKind.SAMPLING:
            samplings[record.cell, record.step].append(record)
    seconds: defaultdict[PhaseKind, list[float]] = defaultdict(list)
    for of_cell in by_cell.values():
        ends = sorted(record.ended_at for record in of_cell)
        done = 0
        for record in sorted(of_cell, key=_asked_at):
            asked = _asked_at(record)
            while done < len(ends) and ends[done] <= asked:
                done += 1
            sampled_meanwhile = record.kind is PhaseKind.GRADING and any(
                one.started_at <= asked < one.ended_at for one in samplings[record.cell, record.step]
            )
            if sampled_meanwhile:
                seconds[record.kind].append(0.0)
            elif done:
                seconds[record.kind].append(asked - ends[done - 1])
    return {kind: statistics.median(values) for kind, values in seconds.items()}


def _asked_at(record: PhaseRecord) -> float:
    return record.started_at - record.waited_seconds
