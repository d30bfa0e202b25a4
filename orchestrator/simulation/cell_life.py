"""The life of a cell in virtual time, phase by phase as in ``control.cell_run``."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from time import perf_counter
from typing import Any

from grids.expansion import Cell, evaluated_steps
from grids.spec import GridSpec
from orchestrator.control.cell_run import commit_is_due
from orchestrator.control.phases import EVALUATION_URGENCY
from orchestrator.failures.decisions import Action, decide
from orchestrator.failures.faults import MemberLost, Phase, classify
from orchestrator.pools.supervision import all_of
from orchestrator.scheduling.spreading import parts_of_batch, slices_of_part, split
from orchestrator.scheduling.urgency import Urgencies
from orchestrator.simulation.conditions import Conditions
from orchestrator.simulation.members import Call, Decision, Observer, SimulatedGroup, SimulatedPool
from orchestrator.store.cell_state import CellState, Commit
from orchestrator.store.phase_log import PhaseKind

AT_ONCE = float("inf")
"""Urgency of taking up and committing."""


class CellLife:
    """A cell of a simulated grid, over all its attempts."""

    def __init__(
        self,
        cell: Cell,
        spec: GridSpec,
        conditions: Conditions,
        urgencies: Urgencies,
        samplers: SimulatedPool,
        grader: SimulatedPool,
        observer: Observer,
    ) -> None:
        """Nothing of it is done yet."""
        self.cell = cell
        self.state = CellState(cell=cell.id)
        self.uncommitted = 0.0
        """Accelerator-seconds since its last commit."""
        self._spec, self._conditions, self._urgencies = spec, conditions, urgencies
        self._samplers, self._grader, self._observer = samplers, grader, observer
        self._marks = frozenset(evaluated_steps(cell, spec.evaluation))
        self._evaluation: asyncio.Task[None] | None = None
        self._hurry: asyncio.Future[float] | None = None
        """Tells the evaluation how urgent it has become."""

    async def attempt(self, group: SimulatedGroup) -> None:
        """Train from the last commit to the end in a slot of an open group. Raises MemberLost; the attempt is then lost."""
        self.state = replace(self.state, attempt=self.state.attempt + 1)
        self.uncommitted = 0.0
        opening = group.openings
        try:
            await self._learner(group, opening, PhaseKind.TAKING_UP, self.state.committed_step, AT_ONCE)
            await self._train(group, opening)
        finally:
            await self._give_up_evaluation()

    async def _train(self, group: SimulatedGroup, opening: int) -> None:
        loop = asyncio.get_running_loop()
        cell, committed_at = self.cell, loop.time()
        for step in range(self.state.committed_step + 1, cell.update_steps + 1):
            started = perf_counter()
            urgency = self._urgencies.of(cell, step - 1)
            self._observer.decided(Decision.LEFT, started)
            await self._step(step, urgency)
            await self._learner(group, opening, PhaseKind.LEARNING, step, urgency, cell.batch_rollouts)
            if self._evaluation is not None and self._evaluation.done():
                await self._land_evaluation(step)
            if step in self._marks:
                await self._land_evaluation(step)
                self._hurry = loop.create_future()
                self._evaluation = asyncio.create_task(self._evaluate(step, self._hurry))
            steps = step - self.state.committed_step
            if step == cell.update_steps or commit_is_due(
                self._spec.commits, loop.time() - committed_at, steps
            ):
                await self._land_evaluation(step)
                await self._learner(group, opening, PhaseKind.COMMIT, step, AT_ONCE)
                self.state = replace(self.state, commit=Commit(step, 0, 0, None, {}))
                self.uncommitted, committed_at = 0.0, loop.time()

    async def _learner(
        self,
        group: SimulatedGroup,
        opening: int,
        kind: PhaseKind,
        step: int,
        urgency: float,
        sequences: int = 0,
    ) -> None:
        await self._hand_over(kind)
        done = await group.call(opening, Call(kind, self.cell.id, step, sequences, urgency))
        self.uncommitted += done  # apart from the call, or what others add meanwhile would be lost

    async def _step(self, step: int, urgency: float) -> None:
        """Sample and grade the batch of a step, in parts."""
        await self._hand_over(PhaseKind.SAMPLING)
        parts = self._parts(self.cell.problems_per_batch, self.cell.rollouts_per_problem)
        await _side_by_side([self._graded_part(groups, step, urgency) for groups in parts])

    async def _graded_part(self, groups: int, step: int, urgency: float) -> None:
        """Sample a part, and grade it in slices, all but the last one while the engine goes on."""
        n = self.cell.rollouts_per_problem
        *earlier, last = (len(one) * n for one in split(groups, slices_of_part(groups, n)))
        sampling = Call(PhaseKind.SAMPLING, self.cell.id, step, groups * n, urgency, slices=len(earlier) + 1)
        gradings: list[asyncio.Task[None]] = []

        def grading(rollouts: int) -> Coroutine[Any, Any, None]:
            return self._grade(replace(sampling, kind=PhaseKind.GRADING, sequences=rollouts, slices=1))

        def grade() -> None:
            gradings.append(asyncio.create_task(grading(earlier[len(gradings)])))

        async def sample() -> float:
            await _give_up(gradings)  # of a try that failed nothing is kept
            return await self._samplers.call(replace(sampling, each=grade))

        try:
            await self._repeating(Phase.SAMPLING, sample)
            await grading(last)
            for one in gradings:
                await one
        finally:
            await _give_up(gradings)

    async def _evaluate(self, step: int, hurry: asyncio.Future[float]) -> None:
        for problems, samples in self._conditions.evaluation:
            whole = Call(
                PhaseKind.EVALUATION, self.cell.id, step, problems * samples, EVALUATION_URGENCY, hurry
            )
            await self._hand_over(PhaseKind.EVALUATION)
            parts = self._parts(problems, samples)
            await _side_by_side(
                [self._sample(replace(whole, sequences=groups * samples)) for groups in parts]
            )
            await self._grade(replace(whole, kind=PhaseKind.EVALUATION_GRADING))

    def _parts(self, groups: int, rollouts_per_problem: int) -> list[int]:
        """Groups of each part of a batch that is sampled now."""
        parts = parts_of_batch(
            groups, rollouts_per_problem, self._samplers.free, self._spec.pools.samplers.max_sequences
        )
        return [len(one) for one in split(groups, parts)]

    async def _sample(self, call: Call) -> None:
        await self._repeating(Phase.SAMPLING, lambda: self._samplers.call(call))

    async def _grade(self, call: Call) -> None:
        await self._hand_over(call.kind)
        await self._repeating(Phase.GRADING, lambda: self._grader.call(call))

    async def _repeating(self, phase: Phase, call: Callable[[], Awaitable[float]]) -> None:
        repeats = 0
        while True:
            try:
                done = await call()
                self.uncommitted += done  # as in ``_learner``
                return
            except MemberLost as error:
                decision = decide(classify(error, phase), self.state, self._spec.failures, repeats)
                if decision.action is not Action.REPEAT_PHASE:
                    raise
            await asyncio.sleep(decision.delay_seconds)
            repeats += 1

    async def _land_evaluation(self, step: int) -> None:
        if self._evaluation is not None and self._hurry is not None:
            self._hurry.set_result(self._urgencies.of(self.cell, step))
            await self._evaluation
            self._evaluation = None

    async def _give_up_evaluation(self) -> None:
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is not None:
            await _give_up([evaluation])

    async def _hand_over(self, kind: PhaseKind) -> None:
        seconds = self._conditions.handovers.get(kind, 0.0)
        if seconds > 0:
            await asyncio.sleep(seconds)


async def _give_up(tasks: list[asyncio.Task[None]]) -> None:
    if not tasks:  # nearly always
        return
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    tasks.clear()


async def _side_by_side(work: list[Coroutine[Any, Any, None]]) -> None:
    if len(work) == 1:  # nearly always: a task of its own would cost time
        await work[0]
    else:
        await all_of(*work)
