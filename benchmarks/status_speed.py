"""How long ``isocompute status`` takes over a large run.

``python -m benchmarks.status_speed`` makes a run of 10,000 cells with the real store (finished, running, failed and pending ones,
with a few history rows each, and a full segment of phases), then times the whole command, start of the process included, in
every format.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import command
from grids.expansion import expand
from grids.loading import dump_grid, load_grid
from grids.spec import GridSpec
from orchestrator.store.lease import Lease
from orchestrator.store.phase_log import RECORDS_PER_SEGMENT, PhaseKind, PhaseLog, PhaseRecord
from orchestrator.store.run_store import RunStore, State

ROWS = 5
POOLS = (
    ("sampler", PhaseKind.SAMPLING),
    ("learner", PhaseKind.LEARNING),
    ("sampler", PhaseKind.EVALUATION),
)
STATES = (State.FINISHED, State.RUNNING, State.FAILED, State.PENDING, State.PAUSED)


def large_grid(cells: int) -> GridSpec:
    """The quickstart's grid with 100 allocations and as many seeds as it takes."""
    spec = load_grid(Path(__file__).parents[1] / "grids" / "quickstart.yaml")
    axes = dump_grid(spec)["grid"] | {
        "problems_per_batch": [2**power for power in range(10)],
        "rollouts_per_problem": [2**power for power in range(1, 11)],
        "seeds": list(range(max(1, cells // 100))),
        "max_batch_rollouts": 2**20,
        "compute_rollouts": 2**24,
    }
    return GridSpec.model_validate(dump_grid(spec) | {"grid": axes})


def make_run(run_dir: Path, spec: GridSpec) -> int:
    """A run folder in which the states take turns; the number of cells."""
    store = RunStore.open(
        run_dir, {"grid": "status_speed"}, {"run_id": "status_speed", "spec": dump_grid(spec)}
    )
    score = f"avg_at_{spec.evaluation.samples_per_problem}"
    cells = expand(spec)
    with Lease.acquire(store.lease_dir, "status_speed", time_to_live=60) as lease:
        store.hold(lease.epoch, lease.check)
        for index, cell in enumerate(cells):
            state = STATES[index % len(STATES)]
            writer = store.cell(cell.id)
            if state is State.PENDING:
                writer.set_state(state)
                continue
            writer.start_attempt()
            for step in range(1, ROWS + 1):
                writer.append_row(
                    {
                        "cell": cell.id,
                        "step": step,
                        "compute_rollouts": step * cell.batch_rollouts,
                        score: step / 10,
                    }
                )
            done = cell.update_steps if state is State.FINISHED else ROWS
            reason = None if state in (State.FINISHED, State.RUNNING) else "OSError: [Errno 28] No space left"
            writer.commit(done, None, {}, state, reason)
            writer.close()
        with PhaseLog(run_dir, lease.epoch, lease.check, print) as log:
            for index in range(RECORDS_PER_SEGMENT):
                cell = cells[index % len(cells)]
                pool, kind = POOLS[index % len(POOLS)]
                sequences, member = cell.batch_rollouts, f"{pool} 0"
                log.add(
                    PhaseRecord(
                        member, kind, cell.id, ROWS, 1e9 + index, 0.9, 0.5, sequences, 40 * sequences, 1
                    )
                )
    return len(cells)


def measure(run_dir: Path, arguments: list[str], runs: int) -> tuple[float, float]:
    """Median wall-clock and processor seconds of ``isocompute status``."""
    command = [sys.executable, "-m", "orchestrator", "status", str(run_dir), *arguments]
    wall, processor = [], []
    for _ in range(runs):
        started, before = time.perf_counter(), os.times()
        subprocess.run(command, check=True, capture_output=True)
        after = os.times()
        wall.append(time.perf_counter() - started)
        processor.append(
            after.children_user + after.children_system - before.children_user - before.children_system
        )
    return statistics.median(wall), statistics.median(processor)


def main() -> None:
    """Print cells, formats and seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=command.count, default=10_000)
    parser.add_argument("--runs", type=command.count, default=5)
    parser.add_argument(
        "--folder", type=Path, help="Where to make the run. Default: a RAM disk where there is one."
    )
    options = parser.parse_args()
    # Making the run is not measured, and what was just written is read from memory on any disk.
    ram = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=options.folder or ram) as folder:
        run_dir = Path(folder) / "run"
        cells = make_run(run_dir, large_grid(options.cells))
        for name, arguments in {
            "table": [],
            "json": ["--format", "json"],
            "csv": ["--format", "csv"],
            "failed only, sorted": ["--state", "failed", "--sort", "age", "--descending"],
        }.items():
            wall, processor = measure(run_dir, arguments, options.runs)
            # The two differ where other programs hold the cores.
            print(f"status over {cells:,} cells, {name}: {wall:.2f} s ({processor:.2f} s of processor time)")


if __name__ == "__main__":
    command.run(main)
