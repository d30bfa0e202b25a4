"""The state of a run as rows, read from its folder alone."""

from typing import Any

from grids.expansion import expand
from grids.spec import GridSpec
from orchestrator.store import CellState, RunStore


def status_rows(run_store: RunStore) -> list[dict[str, Any]]:
    """One row for each cell of the run's grid, in the grid's order."""
    spec = GridSpec.model_validate(run_store.resolved["spec"])
    states = run_store.states()
    rows = []
    for cell in expand(spec):
        state = states.get(cell.id, CellState(cell=cell.id))
        history = run_store.cell(cell.id).rows()
        last = history[-1] if history else {}
        step = max(state.commit.step if state.commit else 0, last.get("step", 0))
        rows.append(
            {
                "cell": cell.id,
                "state": str(state.state),
                "step": step,
                "M": cell.update_steps,
                "C": step * cell.batch_rollouts,
                f"avg@{spec.evaluation.samples_per_problem}": last.get(
                    f"avg_at_{spec.evaluation.samples_per_problem}"
                ),
                "attempt": state.attempt,
                "committed": state.commit.step if state.commit else 0,
                "reason": state.reason or "",
            }
        )
    return rows
