"""Why a cell is in its state, what was tried, and where the evidence lies: read from the run folder alone."""

import shlex
import time
from pathlib import Path
from typing import Any

from grids.expansion import Cell
from grids.spec import FailuresSpec, GridSpec
from orchestrator.operating.status import shown_state
from orchestrator.store.attempts import LOG, STACKS, TRACEBACK
from orchestrator.store.cell_state import AttemptRecord, CellState, State
from orchestrator.store.lease import LeaseRecord
from orchestrator.store.run_store import CellStore, RunStore

Explanation = dict[str, Any]


def explanation(run_store: RunStore, cell: Cell, holder: LeaseRecord | None) -> Explanation:
    """What is known of a cell as plain values (JSON); times are unix seconds.

    Args:
        run_store: opened for reading.
        cell: one of the run's grid.
        holder: who holds the run at present.

    Raises:
        StoreDamaged: the cell's folder does not hold what it says.
    """
    spec = GridSpec.model_validate(run_store.resolved["spec"])
    store = run_store.cell(cell.id)
    state = store.read()
    records = store.attempts()
    shown = shown_state(state, cell)
    return {
        "cell": cell.id,
        "state": str(shown),
        "reason": state.reason,
        "committed_step": state.committed_step,
        "update_steps": cell.update_steps,
        "held_by": holder.holder if holder else None,
        "summary": _summary(state, shown, cell, holder),
        "attempts_made": state.attempt,
        "attempts": [_attempt(record, state, holder) for record in records],
        "budgets": _budgets(state, spec.failures),
        "problems": list(dict.fromkeys(problem for record in records for problem in record.problems)),
        "deviations": list(state.deviations),
        "evidence": _evidence(store, state, spec),
        "next": _next(run_store.run_dir, cell.id, shown, holder),
    }


def sentences(facts: Explanation) -> list[str]:
    """The explanation's text before the table of attempts."""
    lines = [facts["summary"]]
    if facts["reason"]:
        lines.append(f"Reason: {facts['reason']}")
    lines += [f"Problem: {problem}" for problem in facts["problems"]]
    lines += [f"Not bit for bit an undisturbed run: {text}" for text in facts["deviations"]]
    for name, budget in facts["budgets"].items():
        lines.append(
            f"failures.{name}: {budget['spent']} of {budget['allowed']} retries spent since step {budget['since_step']}, "
            f"{budget['left']} left"
        )
    missing = facts["attempts_made"] - len(facts["attempts"])
    if missing > 0:
        lines.append(
            f"{missing} of {facts['attempts_made']} attempts have no record: an earlier release made them"
        )
    return lines


def attempt_rows(facts: Explanation) -> list[dict[str, Any]]:
    """The attempts as rows of a table for people."""
    return [
        {
            "attempt": attempt["attempt"],
            "started": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt["started_at"])),
            "from step": attempt["first_step"],
            "to step": attempt["last_step"],
            "outcome": attempt["outcome"],
            "fault": attempt["fault"] or "",
            "phase": attempt["phase"] or "",
            "reason": attempt["reason"] or "",
        }
        for attempt in facts["attempts"]
    ]


def _summary(state: CellState, shown: State, cell: Cell, holder: LeaseRecord | None) -> str:
    done = f"step {state.committed_step} of {cell.update_steps}"
    tried = f"{state.attempt} {'attempt' if state.attempt == 1 else 'attempts'}"
    if shown is State.PENDING and state.state is State.FINISHED:
        return f"{cell.id} has finished a smaller budget; the grid now asks for more, and it goes on from {done}."
    if shown is State.PENDING and state.attempt == 0:
        return f"{cell.id} is pending: it waits for its turn and was never tried."
    if shown is State.PENDING:
        return f"{cell.id} is pending: after {tried} it waits to go on from {done}."
    if shown is State.RUNNING and holder is None:
        return (
            f"{cell.id} was running (attempt {state.attempt}) when its controller was lost; it goes on from {done} "
            "at the next start."
        )
    meaning = {
        State.RUNNING: f"runs, attempt {state.attempt}; committed is {done}",
        State.PAUSED: f"is paused at {done} after {tried}; the next start goes on from there",
        State.FINISHED: f"is finished: {done}, {tried}",
        State.FAILED: f"has failed at {done} after {tried} and waits until it is told to try again",
        State.DIVERGED: f"has diverged at {done}, which is a result: it is kept for the fit and not tried again",
        State.CANCELLED: f"was cancelled at {done}; it waits until it is told to try again",
    }
    return f"{cell.id} {meaning[shown]}."


def _attempt(record: AttemptRecord, state: CellState, holder: LeaseRecord | None) -> dict[str, Any]:
    runs = holder is not None and state.state is State.RUNNING and record.attempt == state.attempt
    # A controller that was killed could not write how the attempt ended.
    outcome = record.outcome or ("running" if runs else "broken off with its controller")
    fields = (
        "attempt",
        "epoch",
        "started_at",
        "ended_at",
        "first_step",
        "last_step",
        "reason",
        "fault",
        "phase",
    )
    return {name: getattr(record, name) for name in fields} | {
        "outcome": outcome,
        "problems": list(record.problems),
    }


def _budgets(state: CellState, policy: FailuresSpec) -> dict[str, dict[str, int]]:
    spent = state.spent_now
    return {
        name: {"spent": used, "allowed": allowed, "left": max(0, allowed - used), "since_step": spent.at_step}
        for name, used, allowed in (
            ("own_failures", spent.own_failures, policy.own_failures),
            ("preemptions", spent.preemptions, policy.preemptions),
        )
    }


def _evidence(store: CellStore, state: CellState, spec: GridSpec) -> dict[str, str]:
    """Where to look further: for each kind of file of an attempt, that of the last attempt which has one."""
    places = {}
    for name in (TRACEBACK, STACKS, LOG):
        for attempt in range(state.attempt, 0, -1):
            path = store.attempt_dir(attempt) / name
            if path.exists():
                places[name.removesuffix(".txt")] = str(path)
                break
    for name in ("samples", "history.jsonl"):
        if (store.folder / name).exists():
            places[name.removesuffix(".jsonl")] = str(store.folder / name)
    if state.commit and state.commit.checkpoint:
        places["checkpoint"] = str(store.folder / state.commit.checkpoint)
    if state.attempt:
        places["MLflow"] = f"{spec.tracking.mlflow_uri}, experiment {spec.name}, run {state.cell}"
    return places


def _next(run_dir: Path, cell: str, shown: State, holder: LeaseRecord | None) -> str:
    """The command that goes on from here."""
    run = shlex.quote(str(run_dir))
    if shown in (State.FINISHED, State.DIVERGED):
        return f"isocompute fit {run}"
    if shown in (State.FAILED, State.CANCELLED, State.PAUSED):
        retry = f"isocompute retry {run} --cell {cell} --reset-budget"
        return retry if holder else f"isocompute resume {run} --cell {cell}"
    return f"isocompute logs {run} {cell} --follow" if holder else f"isocompute resume {run}"
