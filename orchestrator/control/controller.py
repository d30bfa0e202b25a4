"""The controller: slots of learner groups take cells that wait, attempt after attempt; what fails is decided cell by cell."""

import asyncio
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grids.expansion import Cell, expand
from grids.spec import GridSpec
from orchestrator.console import Console
from orchestrator.control.cell_run import CellRun
from orchestrator.control.data import GridData
from orchestrator.control.layout import layout_of, versions
from orchestrator.control.phases import Phases, Stopped
from orchestrator.control.preparation import Preparation
from orchestrator.failures.attempt_end import AttemptEnd, after_fault
from orchestrator.failures.decisions import Action, Decision, decide
from orchestrator.failures.faults import Fault, classify, is_storage_full
from orchestrator.pools.learner_group import LearnerGroup, LearnerSlot
from orchestrator.pools.pools import Pools, make_pools
from orchestrator.pools.shared_pool import PoolLost
from orchestrator.pools.supervision import Supervision
from orchestrator.scheduling.costs import CostModel
from orchestrator.scheduling.remaining import RemainingWork
from orchestrator.scheduling.urgency import Urgencies
from orchestrator.scheduling.waiting import WaitingCells
from orchestrator.store import requests
from orchestrator.store.lease import LeaseLost
from orchestrator.store.run_store import CellState, CellStore, RunStore, State, StoreDamaged
from orchestrator.tracking.tracked_rows import cell_parameters, restore_tracking, tracked_rows
from orchestrator.tracking.tracker import Tracker

FINISHED = AttemptEnd(State.FINISHED, "finished")
REQUESTS_POLL_SECONDS = 1.0
IDLE_POLL_SECONDS = 0.1
"""How often a slot without a cell looks whether one has come back."""


class Controller:
    """Runs cells of a grid over pools that all of them share."""

    def __init__(
        self,
        spec: GridSpec,
        data: GridData,
        run_store: RunStore,
        tracker: Tracker,
        console: Console,
        supervision: Supervision,
        costs: CostModel,
    ) -> None:
        """Hold what a run needs; ``run`` does the work. ``costs`` learns from the phases of the run meanwhile."""
        self.spec, self.data, self.run_store = spec, data, run_store
        self.tracker, self.console = tracker, console
        self._supervision = supervision
        self._layout = layout_of(spec.pools, versions())
        remaining = RemainingWork(spec, costs)
        self._grid = expand(spec)
        self._waiting = WaitingCells(self._grid, remaining)
        self._urgencies = Urgencies(remaining, self._waiting)
        self._delayed: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, asyncio.Event] = {}
        """Cells in flight, with what tells each to stop."""
        self._cancelling: set[str] = set()
        """Cells in flight that an operator has asked to cancel."""
        self._draining = False

    async def run(self, cells: Sequence[Cell], states: Mapping[str, CellState]) -> None:
        """Train ``cells``, which stand as ``states`` say, and others of the grid that an operator asks for meanwhile.

        Failures of single cells are in their states.

        Raises:
            PoolLost: a pool cannot be kept up.
            Disagreement: the start-up probe failed, so no cell was started.
            UserError: a gold answer is unfit.
            LeaseLost: another controller has taken over.
            asyncio.CancelledError: told to stop at once; running cells are paused at their last commits.
        """
        samplers, learners = self.spec.pools.samplers, self.spec.pools.learners
        self.console.say(
            f"starting samplers: {samplers.count}, learner groups: {learners.count}, for "
            f"{learners.cells_in_flight} cells in flight (engines take a while to load)"
        )
        by_id = {cell.id: cell for cell in self._grid}
        pools = make_pools(self.spec, self.data.longest_prompt, self._supervision)
        try:
            await Preparation(self.spec, self.data, pools, self.run_store, self._supervision).run()
            for cell in cells:
                self._waiting.add(cell, states[cell.id].committed_step if cell.id in states else 0)
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(self._answer_requests(by_id))
                # Every group gets a first cell before any gets a second one.
                slots = [one.slots[number] for number in range(learners.slots) for one in pools.learners]
                serving = [group.create_task(self._serve(slot, pools)) for slot in slots]
                await asyncio.wait(serving)
                asking.cancel()
            # A cell whose stop ended the last attempt is still to be marked as cancelled.
            await self._answer_pending(by_id)
        except BaseExceptionGroup as errors:
            # The first one stopped the others.
            raise errors.exceptions[0] from None
        finally:
            for task in self._delayed.values():
                task.cancel()
            pools.let_go()

    def drain(self) -> None:
        """Let every cell commit what it has and end; no cell is started any more."""
        self._draining = True
        for stop in self._running.values():
            stop.set()

    # Cells

    async def _serve(self, slot: LearnerSlot, pools: Pools) -> None:
        """Train waiting cells in one slot, one after the other."""
        while self._work_is_left():
            if slot.group.broken:
                try:
                    await slot.group.open()
                except LeaseLost:
                    raise
                except Exception as error:
                    await self._give_up(slot.group, pools, error)
            if slot.group not in pools.learners:
                return
            if not self._waiting:
                await asyncio.sleep(IDLE_POLL_SECONDS)
                continue
            cell = self._waiting.pop()
            stop = self._running[cell.id] = asyncio.Event()
            if self._draining:
                stop.set()
            try:
                await self._attempt(cell, slot, pools, stop)
            finally:
                del self._running[cell.id]
                self._urgencies.ended(cell)

    async def _give_up(self, learners: LearnerGroup, pools: Pools, error: Exception) -> None:
        if learners not in pools.learners:
            return  # another of its slots has
        pools.learners.remove(learners)
        await learners.end()
        reason = classify(error).reason
        self.console.say(f"a learner group is given up, {len(pools.learners)} are left: {reason}")
        if not pools.learners:
            raise PoolLost(f"no learner group can be started: {reason}") from error

    def _work_is_left(self) -> bool:
        """Whether a cell waits, or may come back."""
        return not self._draining and bool(self._waiting or self._delayed or self._running)

    async def _attempt(self, cell: Cell, slot: LearnerSlot, pools: Pools, stop: asyncio.Event) -> None:
        """One attempt at a cell; its end is in its state. Only what concerns other cells too is raised."""
        store = self.run_store.cell(cell.id)
        self.tracker.cell_started(cell.id, cell_parameters(cell))
        self.console.started(cell, store.read())

        def repeated(fault: Fault, decision: Decision) -> None:
            store.log(
                f"{fault.phase} repeated in {decision.delay_seconds:.3g} s ({fault.kind}): {fault.reason}"
            )
            if fault.stacks:
                store.write_stacks(store.read().attempt, fault.stacks)
            self.console.say(f"{cell.id}: {fault.reason}; {fault.phase} is repeated")

        phases = Phases(self.spec, self.data, pools, store.read, repeated, stop)
        run = CellRun(cell, phases, slot, store, self._layout, self._supervision.clock, self._urgencies, self)
        try:
            for row in tracked_rows(self.run_store, cell):
                self.tracker.row(cell.id, row)
            await run.run()
        except Stopped:
            self._end(cell, store, self._stopped(cell))
        except (asyncio.CancelledError, PoolLost):
            finished = store.read().state is State.FINISHED
            self._end(cell, store, FINISHED if finished else self._stopped(cell))
            raise
        except LeaseLost:
            raise
        except Exception as error:
            self._failed(cell, store, error, run.phase)
        else:
            self._end(cell, store, FINISHED)

    def _stopped(self, cell: Cell) -> AttemptEnd:
        if cell.id in self._cancelling:
            # The request itself, which says who asked, is answered once the attempt has ended.
            return AttemptEnd(State.PAUSED, "cancelled", "to be cancelled")
        return AttemptEnd(State.PAUSED, "paused", "interrupted; continues at the next run")

    def _failed(self, cell: Cell, store: CellStore, error: Exception, phase: str) -> None:
        fault = classify(error)
        state = store.read()
        decision = decide(fault, state, self.spec.failures)

        def write_evidence() -> None:
            if fault.stacks:
                store.write_stacks(state.attempt, fault.stacks)
            store.write_failure(state.attempt, "".join(traceback.format_exception(error)))

        # The state first: on a full disk there may be room for that alone.
        self._end(cell, store, after_fault(fault, decision, phase))
        self._keep(write_evidence, cell)
        if decision.action is Action.NEW_ATTEMPT:
            coming = self._come_back(cell, state.committed_step, decision.delay_seconds)
            self._delayed[cell.id] = asyncio.create_task(coming)

    def _end(self, cell: Cell, store: CellStore, end: AttemptEnd) -> None:
        """Put the end of an attempt on record, in the store, in MLflow and on the console."""

        def write() -> None:
            if end.state is not State.FINISHED:  # which its last commit has written
                store.set_state(end.state, end.reason, spent=end.spent)
            store.end_attempt(
                end.outcome, end.reason, fault=end.fault, phase=end.phase, problems=end.problems
            )

        self._keep(write, cell)
        self._keep(store.close, cell)
        if end.outcome != "lost":
            self.tracker.cell_ended(cell.id, end.state, end.reason)
        self.console.ended(cell, end.state, end.reason)

    def _keep(self, write: Callable[[], object], cell: Cell) -> None:
        """Write to the store; where it is full the cell's earlier state stands, from which the next run continues."""
        try:
            write()
        except OSError as error:
            if not is_storage_full(error):
                raise
            self.console.say(f"{cell.id}: the storage is full, how its attempt ended could not be written")

    async def _come_back(self, cell: Cell, step: int, delay_seconds: float) -> None:
        # Sleeping goes by the event loop's clock, which no jump of another one moves.
        await asyncio.sleep(delay_seconds)
        self._waiting.add(cell, step)
        del self._delayed[cell.id]

    # Operators

    async def _answer_requests(self, cells: dict[str, Cell]) -> None:
        """Answer what operators ask for as long as the grid runs."""
        while True:
            await asyncio.sleep(REQUESTS_POLL_SECONDS)
            await self._answer_pending(cells)

    async def _answer_pending(self, cells: dict[str, Cell]) -> None:
        for path, request in await asyncio.to_thread(requests.pending, self.run_store.run_dir):
            stop = self._running.get(request.cell)
            if stop is not None and request.action == "cancel":
                self._cancelling.add(request.cell)
                stop.set()
                while request.cell in self._running:
                    await asyncio.sleep(IDLE_POLL_SECONDS)
            try:
                before = self.run_store.cell(request.cell).read()
                self.console.say(requests.apply(self.run_store, path, request))
                after = self.run_store.cell(request.cell).read()
            except StoreDamaged as error:
                self.console.say(requests.set_aside(path, str(error)))
            except OSError as error:
                if not is_storage_full(error):
                    raise
                self.console.say(f"the storage is full, {request.action} {request.cell} waits")
            else:
                if after != before:
                    self._follow(after, cells)

    def _follow(self, state: CellState, cells: dict[str, Cell]) -> None:
        """Bring the cells that wait, and MLflow, in line with a state that an operator has changed."""
        if state.cell not in cells:
            return
        if state.state is State.CANCELLED:
            self._cancelling.discard(state.cell)
            self._waiting.discard(state.cell)
            if state.cell in self._delayed:
                self._delayed.pop(state.cell).cancel()
            restore_tracking(self.tracker, self.run_store, [cells[state.cell]], {state.cell: state})
        else:
            self._waiting.add(cells[state.cell], state.committed_step)

    # cell_run.Listener

    def step(self, cell: Cell, step: int) -> None:
        """A cell has made a step."""
        self.console.step(cell, step)

    def row(self, cell: Cell, row: dict[str, Any]) -> None:
        """A cell has written a history row."""
        self.tracker.row(cell.id, row)
        self.console.row(cell, row)
