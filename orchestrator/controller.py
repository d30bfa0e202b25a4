"""The controller: one coroutine for each cell in flight, over pools that all cells share."""

import asyncio
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayError

from grids.errors import UserError
from grids.expansion import Cell
from grids.spec import GridSpec
from orchestrator.cell_run import CellRun, evaluate
from orchestrator.console import Console
from orchestrator.data import GridData, PromptSet
from orchestrator.failures import decide
from orchestrator.lease import LeaseLost
from orchestrator.pools import GroupBroken, LearnerGroup, Pools, prove_agreement, start_pools
from orchestrator.ray_errors import first_line, root_cause
from orchestrator.store import RunStore, State
from orchestrator.tracking import Tracker

DONE = (State.FINISHED, State.DIVERGED)
"""States of cells that ``run`` leaves alone; failed ones are tried again."""


class PoolLost(RuntimeError):
    """A member of a pool died; the run's cells are paused at their last commits."""


@dataclass
class Controller:
    """Runs the cells of a grid that are not done yet."""

    spec: GridSpec
    data: GridData
    run_store: RunStore
    tracker: Tracker
    console: Console
    _queue: deque[Cell] = field(default_factory=deque)

    async def run(self, cells: list[Cell]) -> None:
        """Train ``cells``. Failures of single cells are in their states.

        Raises:
            PoolLost: an actor died.
            Disagreement: the start-up probe failed, so no cell was started.
            UserError: a gold answer is unfit.
            asyncio.CancelledError: told to stop; running cells are paused at their last commits.
        """
        counts = self.spec.pools.samplers.count, self.spec.pools.learners.count
        self.console.say(
            "starting samplers: {}, learner groups: {} (engines take a while to load)".format(*counts)
        )
        pools = await self._prepared_pools()
        for cell in cells:
            store = self.run_store.cell(cell.id)
            if store.read().attempt == 0:
                # So that every cell of the grid is seen by readers of the folder, also when the run breaks off early.
                store.set_state(State.PENDING)
        self._queue.extend(cells)
        try:
            async with asyncio.TaskGroup() as group:
                for learner in pools.learners:
                    group.create_task(self._serve(learner, pools))
        except BaseExceptionGroup as errors:
            # The first one stopped the others.
            raise errors.exceptions[0] from None

    async def _prepared_pools(self) -> Pools:
        """Pools that have been shown to serve this grid: golds fit, weights arrive, the base model is evaluated."""
        try:
            pools = await start_pools(self.spec, self.data.longest_prompt)
            for prompts in (self.data.train, self.data.validation):
                await self._require_sound_golds(pools, prompts)
            difference = await prove_agreement(pools, self.data.validation.prompts, self.spec)
            self.console.say(
                f"sampler and learner agree to {difference:.1g} in log-probability on perturbed weights"
            )
            await self._evaluate_base(pools)
        except (RayError, GroupBroken) as error:
            cause = root_cause(error)
            if isinstance(cause, UserError):
                raise cause from error
            raise PoolLost(f"start-up failed: {type(cause).__name__}: {first_line(cause)}") from error
        return pools

    async def _require_sound_golds(self, pools: Pools, prompts: PromptSet) -> None:
        unsound = await pools.grader.unsound_golds.remote(prompts.golds)
        if unsound:
            first = unsound[0]
            raise UserError(
                f"{prompts.path}, row {prompts.rows[first]}: the gold answer {prompts.golds[first]!r} is empty or not equal "
                f"to itself under the verifier ({len(unsound)} such rows); mend or remove them"
            )

    async def _evaluate_base(self, pools: Pools) -> None:
        """The base model's validation at C = 0, once for each run folder."""
        if self.run_store.read_base() is not None:
            return
        weights = await pools.learners[0].begin_cell("base", None)
        metrics, samples = await evaluate(pools, self.spec, self.data, weights)
        row = {
            "compute_rollouts": 0,
            **metrics,
            "logged_at_ms": time.time_ns() // 1_000_000,
            "samples": samples,
        }
        await asyncio.to_thread(self.run_store.write_base, row)
        self.console.base(metrics)

    async def _serve(self, learner: LearnerGroup, pools: Pools) -> None:
        """Train cells of the queue on one learner group, one after the other."""
        while self._queue:
            await self._attempt(self._queue.popleft(), learner, pools)

    async def _attempt(self, cell: Cell, learner: LearnerGroup, pools: Pools) -> None:
        """One attempt at a cell; its end is in its state. Only what concerns other cells too is raised."""
        store = self.run_store.cell(cell.id)
        self.tracker.cell_started(cell.id, cell_parameters(cell))
        for row in self._tracked_rows(cell, self.run_store.read_base()):
            self.tracker.row(cell.id, row)
        self.console.started(cell)
        try:
            await CellRun(cell, self.spec, self.data, pools, learner, store, self).run()
        except asyncio.CancelledError:
            if store.read().state is not State.FINISHED:
                store.set_state(State.PAUSED, "interrupted; continues at the next run")
            ended = store.read()
            self.tracker.cell_ended(cell.id, ended.state, ended.reason)
            raise
        except LeaseLost:
            raise
        except Exception as error:
            decision = decide(error)
            store.write_failure(store.read().attempt, "".join(traceback.format_exception(error)))
            store.set_state(decision.state, decision.reason)
            self.tracker.cell_ended(cell.id, decision.state, decision.reason)
            self.console.ended(cell, decision.state, decision.reason)
            if decision.stops_run:
                raise PoolLost(decision.reason) from error
        else:
            self.tracker.cell_ended(cell.id, State.FINISHED)
            self.console.ended(cell, State.FINISHED, None)

    def restore_tracking(self, cells: list[Cell]) -> None:
        """Offer MLflow what it may have missed of cells that are done; it skips what it has."""
        states, base = self.run_store.states(), self.run_store.read_base()
        for cell in cells:
            state = states[cell.id]
            rows = self._tracked_rows(cell, base)
            self.tracker.restore(cell.id, cell_parameters(cell), rows, state.state, state.reason)

    def _tracked_rows(self, cell: Cell, base: dict[str, Any] | None) -> list[dict[str, Any]]:
        """The base model's row, at which every chart starts, and a cell's committed rows."""
        store = self.run_store.cell(cell.id)
        commit = store.read().commit
        return ([base] if base else []) + store.rows()[: commit.history_rows if commit else 0]

    def step(self, cell: Cell, step: int) -> None:
        """A cell has made a step (``cell_run.Listener``)."""
        self.console.step(cell, step)

    def row(self, cell: Cell, row: dict[str, Any]) -> None:
        """A cell has written a history row (``cell_run.Listener``)."""
        self.tracker.row(cell.id, row)
        self.console.row(cell, row)


def cell_parameters(cell: Cell) -> dict[str, Any]:
    """What MLflow shows as the parameters of a cell's run."""
    return {
        "problems_per_batch": cell.problems_per_batch,
        "rollouts_per_problem": cell.rollouts_per_problem,
        "batch_rollouts": cell.batch_rollouts,
        "seed": cell.seed,
        "update_steps": cell.update_steps,
        "learning_rate": cell.learning_rate,
        "compute_rollouts": cell.compute_rollouts,
    }


def unfinished(cells: list[Cell], run_store: RunStore) -> list[Cell]:
    """Cells that a run has still to train, in the grid's order."""
    states = run_store.states()
    return [cell for cell in cells if cell.id not in states or states[cell.id].state not in DONE]
