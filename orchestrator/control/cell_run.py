"""The life of one cell: sample, grade, update, evaluate at the common marks, commit."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from grids.expansion import Cell, evaluated_steps, warmed_up_learning_rate
from grids.spec import CommitsSpec
from orchestrator.clock import Clock
from orchestrator.control.batches import training_batch
from orchestrator.control.layout import layout_changes
from orchestrator.control.phases import Phases, Stopped
from orchestrator.control.progress import Progress, accelerator_seconds, divergence
from orchestrator.failures.faults import Phase
from orchestrator.pools.agreement import require_agreement
from orchestrator.pools.learner_group import LearnerSlot
from orchestrator.pools.shared_pool import Ref
from orchestrator.pools.work import Work
from orchestrator.scheduling.urgency import Urgencies
from orchestrator.store.phase_log import PhaseKind
from orchestrator.store.run_store import CellState, CellStore, State
from workers.learning import Diverged
from workers.weights import weights_version

T = TypeVar("T")


@dataclass(frozen=True)
class _OwedRow:
    """A history row that waits for its evaluation."""

    before: Progress
    """As it stood at the row's step, before the next interval began."""
    columns: dict[str, Any]
    """All but the evaluation's."""
    evaluation: "asyncio.Task[tuple[dict[str, Any], list[dict[str, Any]]]]"
    hurry: asyncio.Future[float]
    """Tells the evaluation how urgent it has become."""


class Listener(Protocol):
    """Who is told of a cell's progress while it runs."""

    def step(self, cell: Cell, step: int) -> None:
        """An update step is done."""

    def row(self, cell: Cell, row: dict[str, Any]) -> None:
        """A history row has been written."""


async def whole(writing: Coroutine[Any, Any, T]) -> T:
    """Let a write to the store end before a cancellation goes on: the store is for one thread at a time."""
    task = asyncio.ensure_future(writing)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        # What the write itself ended with matters no more, but is not lost.
        raise cancelled from task.exception()
    return task.result()


def commit_is_due(commits: CommitsSpec, seconds: float, steps: int) -> bool:
    """Whether a cell commits that made its last commit so long ago."""
    # A clock that went back would put the commit off.
    due = seconds >= commits.every_minutes * 60 or seconds < 0
    return due or steps >= commits.every_steps


class CellRun:
    """One attempt at one cell, in one slot of a learner group."""

    def __init__(
        self,
        cell: Cell,
        phases: Phases,
        learner: LearnerSlot,
        store: CellStore,
        layout: dict[str, Any],
        clock: Clock,
        urgencies: Urgencies,
        listener: Listener,
    ) -> None:
        """Hold what the attempt needs; ``run`` does the work."""
        self._cell, self._phases, self._learner = cell, phases, learner
        self._spec, self._data = phases.spec, phases.data
        self._store, self._layout, self._clock, self._listener = store, layout, clock, listener
        self._urgencies = urgencies
        self._marks = frozenset(evaluated_steps(cell, self._spec.evaluation))
        self._progress = Progress()
        self._committed_step = 0
        self._committed_at = 0.0
        self._owed: _OwedRow | None = None
        """A row whose evaluation is under way."""
        self.phase = ""
        """What it is doing, for the record of an attempt that ends here."""

    async def run(self) -> None:
        """Train from the last commit to the end; the cell is then committed as finished.

        Raises:
            Stopped: told to stop between two updates; what was done is committed.
            Diverged: the cell's settings lead nowhere.
            Disagreement: at the first step the sampler's log-probabilities are not the learner's.
            Exception: whatever a phase ended with.
        """
        state = await whole(asyncio.to_thread(self._store.start_attempt))
        weights = await self._take_up(state)
        try:
            await self._train(state.attempt, weights)
        except Diverged:
            await self._land_row()  # a result too, and no later attempt would write it
            raise
        except Stopped:
            if self._owed is not None and self._owed.before.step == self._progress.step:
                # No later step rests on it: the next attempt evaluates these weights.
                self._progress = self._owed.before
                await self._give_up_row()
            # Phases that can be stopped leave the learner as it is after the last step that was counted.
            if self._progress.step > self._committed_step:
                await self._commit(State.RUNNING)
            raise
        finally:
            await self._give_up_row()

    async def _take_up(self, state: CellState) -> Ref:
        """Load the last commit; a reference to its weights."""
        commit, store = state.commit, self._store
        checkpoint = store.folder / commit.checkpoint if commit and commit.checkpoint else None
        if commit:
            self._progress = Progress(**commit.progress)
            self._committed_step = commit.step
            changes = layout_changes(commit.layout, self._layout)
            if changes:
                note = f"from step {commit.step} on computed with another layout: {', '.join(changes)}"
                deviations = tuple(dict.fromkeys((*state.deviations, note)))
                await whole(asyncio.to_thread(store.set_state, State.RUNNING, deviations=deviations))
                store.log(f"no longer bit for bit: {note}")
        self._committed_at = self._clock.monotonic()
        self.phase = str(Phase.TAKING_UP)
        cell, step = self._cell.id, self._progress.step
        version = weights_version(cell, state.attempt, step)
        return await self._learner.begin_cell(cell, step, version, checkpoint)

    async def _train(self, attempt: int, weights: Ref) -> None:
        cell, progress = self._cell, self._progress
        first_step = progress.step + 1
        if self._reached_mark():
            await self._begin_row(weights)
        for step in range(first_step, cell.update_steps + 1):
            metrics, tokens, weights = await self._update(
                step, weights_version(cell.id, attempt, step), weights
            )
            if step == first_step:
                self._require_agreement(metrics, step)
            seconds = accelerator_seconds(
                self._spec.pools, metrics["seconds_sampling"], metrics["seconds_learning"]
            )
            progress.add_step(metrics, tokens, seconds)
            diverged = divergence(metrics, progress, self._spec.failures.collapsed_steps)
            if diverged:
                # Before anything that can be stopped: a commit of this step would forget it.
                raise Diverged(f"step {step}: {diverged}")
            self._listener.step(cell, step)
            await whole(asyncio.to_thread(self._store.log, f"step {step}"))
            if self._owed is not None and self._owed.evaluation.done():
                await self._land_row()
            if self._reached_mark():
                await self._begin_row(weights)
            if step < cell.update_steps and self._commit_is_due():
                await self._commit(State.RUNNING)
        await self._commit(State.FINISHED)

    def _reached_mark(self) -> bool:
        """Whether the last step reached a mark whose row is not begun: also after a stop in the middle of its evaluation."""
        return self._progress.step in self._marks and self._progress.steps_since_row > 0

    def _commit_is_due(self) -> bool:
        waited = self._clock.monotonic() - self._committed_at
        return commit_is_due(self._spec.commits, waited, self._progress.step - self._committed_step)

    async def _update(self, step: int, version: str, weights: Ref) -> tuple[dict[str, float], int, Ref]:
        """One step; (metrics, tokens generated, new weights)."""
        batch = training_batch(self._cell, step, self._data)
        urgency = self._urgencies.of(self._cell, step - 1)
        work = Work(PhaseKind.SAMPLING, self._cell.id, step, batch.request.sequences, urgency=urgency)
        self.phase = f"{Phase.SAMPLING} and {Phase.GRADING} of step {step}"
        graded = await self._phases.sample_and_grade(batch, weights, work)
        learning_rate = warmed_up_learning_rate(
            self._cell.learning_rate, self._spec.optimiser.warmup_steps, step
        )
        self.phase = f"{Phase.LEARNING} of step {step}"
        metrics, new_weights = await self._learner.update(
            version,
            learning_rate,
            graded.rollouts,
            graded.rewards,
            replace(work, kind=PhaseKind.LEARNING, tokens=graded.tokens),
        )
        metrics |= {
            "verifier_failures": float(graded.failures),
            "seconds_sampling": graded.seconds_sampling,
            "seconds_grading": graded.seconds_grading,
        }
        return metrics, graded.tokens, new_weights

    def _require_agreement(self, metrics: dict[str, float], step: int) -> None:
        dtype = self._spec.model.dtype
        column = "logprob_difference" if dtype == "float32" else "logprob_mean_difference"
        require_agreement(metrics[column], dtype, f"at step {step} of {self._cell.id}")

    async def _begin_row(self, weights: Ref) -> None:
        """Begin the evaluation of these weights, beside the steps that follow."""
        await self._land_row()
        cell, progress = self._cell, self._progress
        before = replace(progress, interval=dict(progress.interval))
        columns = {
            "cell": cell.id,
            "problems_per_batch": cell.problems_per_batch,
            "rollouts_per_problem": cell.rollouts_per_problem,
            "seed": cell.seed,
            "step": progress.step,
            "compute_rollouts": progress.step * cell.batch_rollouts,
            "compute_tokens": progress.compute_tokens,
            "accelerator_seconds": progress.accelerator_seconds,
            "epochs": progress.step * cell.problems_per_batch / len(self._data.train),
        }
        columns |= progress.close_interval()
        # Later steps must not be held up; a stop gives it up only where no later step has been made.
        hurry: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        evaluation = asyncio.create_task(
            self._phases.unstoppable().evaluate(weights, cell.id, progress.step, hurry)
        )
        self._owed = _OwedRow(before, columns, evaluation, hurry)

    async def _land_row(self) -> None:
        """Wait for the evaluation that is under way, if any, and write its row."""
        owed = self._owed
        if owed is None:
            return
        self.phase = f"evaluation at step {owed.before.step}"
        if not owed.hurry.done():
            owed.hurry.set_result(self._urgencies.of(self._cell, self._progress.step))
        if owed.before.step == self._progress.step:
            evaluation, samples = await self._phases.unless_stopped(lambda: owed.evaluation)
        else:
            evaluation, samples = await owed.evaluation
        self._owed = None
        row = owed.columns | evaluation | {"logged_at_ms": int(self._clock.wall() * 1000)}
        await whole(asyncio.to_thread(self._store.append_row, row))
        await whole(asyncio.to_thread(self._store.write_samples, owed.before.step, samples))
        self._listener.row(self._cell, row)

    async def _give_up_row(self) -> None:
        owed, self._owed = self._owed, None
        if owed is not None:
            owed.evaluation.cancel()
            # Whatever it ends with belongs to an attempt that is over.
            await asyncio.gather(owed.evaluation, return_exceptions=True)

    async def _commit(self, state: State) -> None:
        """Keep everything up to the last step, rows included."""
        await self._land_row()
        await whole(self._save(state))

    async def _save(self, state: State) -> None:
        progress, store = self._progress, self._store
        self.phase = f"{Phase.COMMITTING} of step {progress.step}"
        folder: Path = await asyncio.to_thread(store.begin_checkpoint, progress.step)
        try:
            await self._learner.save(folder)
            await asyncio.to_thread(store.complete_checkpoint, folder)
        except Exception:
            await asyncio.to_thread(store.discard_checkpoint, folder)
            raise
        await asyncio.to_thread(
            store.commit, progress.step, folder, progress.to_dict(), state, layout=self._layout
        )
        self._committed_step, self._committed_at = progress.step, self._clock.monotonic()
