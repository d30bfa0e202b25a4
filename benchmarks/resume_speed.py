"""Resuming one failed cell of a large grid: seconds until it is dispatched, the start of Ray and of engines apart.

    python -m benchmarks.resume_speed --cells 1000

The run folder is written by the real store (every cell but one finished, its rows and a commit), MLflow is a real server that has
been told of all cells, and the command is the real ``resume --failed``. Only what the figure leaves out is cut short: connecting to
Ray and starting the pools return at once, and the clock stops where the cell's attempt would begin.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

from benchmarks import command
from grids.expansion import Cell, expand
from grids.loading import dump_grid, parse_grid
from grids.spec import GridSpec
from orchestrator.control import running
from orchestrator.control.cell_run import CellRun
from orchestrator.control.data import load_data
from orchestrator.control.layout import versions
from orchestrator.control.preparation import Preparation
from orchestrator.services.local import LocalServices, free_port
from orchestrator.store.holding import LEASE_SECONDS, holder
from orchestrator.store.lease import Lease
from orchestrator.store.run_store import RunStore, State
from orchestrator.tracking.ledger import Ledger
from orchestrator.tracking.tracked_rows import restore_tracking
from orchestrator.tracking.tracker import Tracker

QUICKSTART = Path(__file__).parents[1] / "grids" / "quickstart"
ROWS = 5
PROBLEMS = 64


def main() -> None:
    """Print the figures of one run of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=command.count, default=1000)
    parser.add_argument("--repetitions", type=command.count, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        services = LocalServices(folder / "services", dashboard_port=free_port(), mlflow_port=free_port())
        services.start(["mlflow"])
        try:
            spec = make_grid(folder, arguments.cells, services.mlflow_uri)
            run_dir = folder / "run"
            print(f"writing {arguments.cells} cells of {ROWS} rows with the real store", flush=True)
            failed = write_run(spec, run_dir)
            seconds = [time_to_dispatch(run_dir, failed) for _ in range(arguments.repetitions)]
        finally:
            services.stop()
    print(
        f"one failed cell of {arguments.cells} dispatched after: {', '.join(f'{s:.2f} s' for s in seconds)}"
    )
    print(f"median {statistics.median(seconds):.2f} s (limit 3 s; Ray and engine start apart)")


def make_grid(folder: Path, cells: int, mlflow_uri: str) -> GridSpec:
    """A grid of so many cells on the quickstart's model and problems."""
    validation = (QUICKSTART / "easy_validation.jsonl").read_text().splitlines()[:PROBLEMS]
    (folder / "validation.jsonl").write_text("\n".join(validation) + "\n")
    text = f"""
name: many
model: {{path: {QUICKSTART}/model}}
problems: {{train: {QUICKSTART}/easy_train.jsonl, validation: validation.jsonl}}
grid: {{problems_per_batch: [8], rollouts_per_problem: [4, 8], seeds: {list(range(cells // 2))}, compute_rollouts: 1024}}
recipe: {{type: easy}}
optimiser: {{learning_rate: 2e-4}}
sampling: {{temperature: 1.0, max_tokens: 8, prompt_template: "{{prompt}}="}}
evaluation: {{first_mark: 64}}
tracking: {{mlflow_uri: "{mlflow_uri}"}}
"""
    return parse_grid(text, folder / "many.yaml")


def write_run(spec: GridSpec, run_dir: Path) -> Cell:
    """All cells but one finished and known to MLflow; the failed one."""
    cells = expand(spec)
    failed = cells[len(cells) // 2]
    resolved = {"run_id": "many", "spec": dump_grid(spec), "versions": versions()}
    store = RunStore.open(run_dir, load_data(spec).identity, resolved)
    with Lease.acquire(store.lease_dir, holder(), LEASE_SECONDS) as lease:
        store.hold(lease.epoch, lease.check)
        store.write_base(row_of(cells[0], 0))
        for cell in cells:
            write_cell(store, cell, finished=cell is not failed)
        ledger = Ledger.open(run_dir, lease.epoch, lease.check)
        tracker = Tracker.connect(spec.tracking.mlflow_uri, spec.name, "many", run_dir.name, ledger)
        restore_tracking(tracker, store, cells, store.states())
        unsent = tracker.close("FAILED", timeout=3600)
    if unsent:
        raise RuntimeError(f"MLflow has missed {unsent} rows")
    return failed


def write_cell(store: RunStore, cell: Cell, finished: bool) -> None:
    """One cell's folder: rows, a checkpoint of one small file, a commit."""
    cell_store = store.cell(cell.id)
    cell_store.start_attempt()
    for number in range(1, ROWS + 1):
        cell_store.append_row(row_of(cell, number))
    checkpoint = cell_store.begin_checkpoint(cell.update_steps)
    (checkpoint / "weights").write_bytes(b"weights")
    cell_store.complete_checkpoint(checkpoint)
    state = State.FINISHED if finished else State.RUNNING
    cell_store.commit(cell.update_steps if finished else 1, checkpoint, {"step": 1}, state)
    if not finished:
        cell_store.end_attempt("failed", "a fault")
        cell_store.set_state(State.FAILED, "a fault")
    cell_store.close()


def row_of(cell: Cell, number: int) -> dict[str, object]:
    """A history row with the columns that make real ones large."""
    return {
        "cell": cell.id,
        "step": number,
        "compute_rollouts": number * cell.batch_rollouts,
        "avg_at_4": 0.5,
        "best_at_4": 0.75,
        "worst_at_4": 0.25,
        "loss": -0.01,
        "kl": 1e-3,
        "entropy": 0.3,
        "train_reward": 0.5,
        "eval_right": [number % 5] * PROBLEMS,
        "train_probe_right": [number % 9] * PROBLEMS,
        "logged_at_ms": 1_700_000_000_000 + number,
    }


def time_to_dispatch(run_dir: Path, failed: Cell) -> float:
    """Seconds from the call of ``resume_run`` to the start of the failed cell's attempt."""
    dispatched: list[tuple[str, float]] = []

    async def dispatch(run: CellRun) -> None:
        dispatched.append((run._cell.id, time.monotonic()))
        raise OSError(28, "the benchmark ends here")  # pauses the cell, as full storage does

    async def start_nothing(preparation: Preparation) -> None:
        for group in preparation.pools.learners:
            group.broken = False  # or the controller would start it

    with (
        mock.patch.object(running, "_connect", return_value=None),
        mock.patch.object(Preparation, "run", start_nothing),
        mock.patch.object(CellRun, "run", dispatch),
    ):
        began = time.monotonic()
        running.resume_run(run_dir, failed=True)
    ((cell, at),) = dispatched
    if cell != failed.id:
        raise RuntimeError(f"{cell} was dispatched, {failed.id} was meant")
    state = run_dir / "cells" / cell / "state.json"
    fields = json.loads(state.read_text())
    state.write_text(json.dumps(fields | {"state": "failed"}))
    return at - began


if __name__ == "__main__":
    command.run(main)
