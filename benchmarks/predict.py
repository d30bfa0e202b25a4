"""The simulator's prediction of a finished run against what happened: costs are learnt from the first third of its phases.

    python -m benchmarks.predict RUN_DIR

The run must have gone in one go, without failures. Wall-clock runs from the first cell's taking up to the end of the last cell's
last phase. Ends with exit code 1 when the prediction is off by more than 15 %.
"""

import argparse
import json
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import command
from grids.errors import UserError
from grids.expansion import expand
from grids.spec import GridSpec
from orchestrator.operating.predicting import predict
from orchestrator.store.cell_state import State
from orchestrator.store.phase_log import PhaseRecord, read_epochs
from orchestrator.store.run_store import RunStore

LARGEST_ERROR = 0.15
LEARNT_SHARE = 3
"""The first of so many equal parts of the records is learnt from."""


def actual_seconds(spec: GridSpec, records: list[PhaseRecord]) -> float:
    """From the first cell's asking for its first phase to the end of the last phase of any cell."""
    cells = {cell.id for cell in expand(spec)}
    of_cells = [record for record in records if record.cell in cells]
    asked = min(record.started_at - record.waited_seconds for record in of_cells)
    return max(record.ended_at for record in of_cells) - asked


def compare(spec: GridSpec, records: list[PhaseRecord]) -> dict[str, Any]:
    """Prediction and truth of a grid whose phases these are, in the order in which they ended."""
    started = perf_counter()
    learnt = records[: len(records) // LEARNT_SHARE]
    predicted = predict(spec, learnt).wall_seconds
    actual = actual_seconds(spec, records)
    return {
        "phases": len(records),
        "learnt_from": len(learnt),
        "predicted_seconds": predicted,
        "actual_seconds": actual,
        "ratio": predicted / actual,
        "real_seconds": perf_counter() - started,
    }


def compare_run(run_dir: Path) -> dict[str, Any]:
    """Prediction and truth of a finished run. Raises UserError for one that was interrupted, or lost members."""
    store = RunStore.existing(run_dir)
    spec = GridSpec.model_validate(store.resolved["spec"])
    finished = {cell for cell, state in store.states().items() if state.state is State.FINISHED}
    if missing := {cell.id for cell in expand(spec)} - finished:
        raise UserError(
            f"{run_dir}: {min(missing)} is not finished; only a run whose cells all are can be compared"
        )
    epochs = list(read_epochs(run_dir))
    if len(epochs) != 1 or any(record.failed for record in epochs[0]):
        raise UserError(f"{run_dir}: only a run in one go and without failures can be compared")
    return compare(spec, epochs[0])


def main() -> int:
    """Print prediction and truth; 1 when they are too far apart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    figures = compare_run(arguments.run)
    if arguments.format == "json":
        print(json.dumps(figures, indent=1))
    else:
        print(
            f"predicted {figures['predicted_seconds']:.1f} s from the first {figures['learnt_from']:,} of {figures['phases']:,} "
            f"phases, actual {figures['actual_seconds']:.1f} s: predicted / actual = {figures['ratio']:.3f}"
        )
    return 0 if abs(figures["ratio"] - 1) <= LARGEST_ERROR else 1


if __name__ == "__main__":
    command.run(main)
