"""What a grid will take, by the simulator with costs learnt from phases on record."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from grids.errors import UserError
from grids.expansion import expand
from grids.spec import GridSpec
from orchestrator.scheduling.costs import CostModel
from orchestrator.simulation.learnt import learnt_conditions
from orchestrator.simulation.simulator import simulate
from orchestrator.store.phase_log import PhaseRecord, read_epochs
from orchestrator.store.run_store import RunStore
from orchestrator.tables import duration


@dataclass(frozen=True)
class Prediction:
    """What all cells of a grid take together, from the first cell's start to the last one's end; nothing fails."""

    wall_seconds: float
    accelerator_hours: float
    """That the pools hold, idle ones too: GPUs, or cores in pools without GPUs."""
    idle_share: float
    """Of them."""


def predict(spec: GridSpec, records: Sequence[PhaseRecord]) -> Prediction:
    """Of a grid on its own pools.

    Args:
        spec: the grid.
        records: what phases took, in an earlier run or in a few steps of this grid; not empty.
    """
    conditions = learnt_conditions(spec, records)
    outcome = simulate(spec, expand(spec), conditions, CostModel(records))
    return Prediction(outcome.wall_seconds, outcome.held_accelerator_seconds / 3600, outcome.idle_share)


def records_of(run_dir: Path) -> list[PhaseRecord]:
    """All phases that a run has on record.

    Raises:
        UserError: it is no run folder, or has none.
    """
    RunStore.existing(run_dir)
    records = list(chain.from_iterable(read_epochs(run_dir)))
    if not records:
        raise UserError(
            f"{run_dir / 'phases'}: no phases are on record; name the folder of a run that has trained some steps"
        )
    return records


def prediction_line(spec: GridSpec, like: Path, records: Sequence[PhaseRecord]) -> str:
    """For people: what the grid will take if phases take what they took in the earlier run ``like``, of which ``records`` are."""
    found = predict(spec, records)
    return (
        f"predicted from the phases of {like}: {duration(found.wall_seconds)}, {found.accelerator_hours:,.4g} "
        f"accelerator-hours, {found.idle_share:.0%} of them idle; the start of the pools and failures are not counted"
    )
