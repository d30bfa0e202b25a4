"""Small run folders made with the real store, for tests of what operators see and do."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grids.loading import dump_grid, load_grid
from grids.spec import GridSpec
from orchestrator.store.cell_state import CellState, State
from orchestrator.store.lease import Lease
from orchestrator.store.run_store import RunStore

ROOT = Path(__file__).parents[2]


def small_grid(seeds: int = 3, compute_rollouts: int = 64) -> GridSpec:
    """Cells bp2-n4-s0, bp2-n4-s1 ...: batches of 8 rollouts, 8 steps each by default."""
    spec = load_grid(ROOT / "grids" / "quickstart.yaml")
    axes = {"problems_per_batch": [2], "rollouts_per_problem": [4], "seeds": list(range(seeds))}
    grid = dump_grid(spec) | {"grid": axes | {"compute_rollouts": compute_rollouts}}
    return GridSpec.model_validate(grid)


def make_run(run_dir: Path, spec: GridSpec | None = None) -> RunStore:
    """A run folder in which nothing was tried yet, for reading."""
    resolved = {"run_id": "r", "spec": dump_grid(spec or small_grid())}
    return RunStore.open(run_dir, {"grid": "small"}, resolved)


@contextmanager
def held(run_dir: Path, holder: str = "controller:1") -> Iterator[RunStore]:
    """The run folder under a lease of its own."""
    store = RunStore.existing(run_dir)
    with Lease.acquire(store.lease_dir, holder, time_to_live=5.0) as lease:
        store.hold(lease.epoch, lease.check)
        yield store


def attempt(
    store: RunStore,
    cell: str,
    rows: int,
    outcome: State = State.RUNNING,
    reason: str | None = None,
    checkpoint: bool = False,
    **record: Any,
) -> CellState:
    """An attempt that makes ``rows`` steps, each with a history row, commits the last one and ends as told."""
    writer = store.cell(cell)
    commit = writer.start_attempt().commit
    first = commit.step + 1 if commit else 1
    last = first + rows - 1
    for step in range(first, last + 1):
        writer.append_row({"cell": cell, "step": step, "compute_rollouts": 8 * step, "avg_at_4": step / 10})
    path = None
    if checkpoint:
        path = writer.begin_checkpoint(last)
        (path / "weights").write_text(str(last))
        writer.complete_checkpoint(path)
    state = writer.commit(last, path, {}, outcome, reason)
    if outcome is not State.RUNNING:
        writer.end_attempt(str(outcome), reason, **record)
    writer.close()
    return state
