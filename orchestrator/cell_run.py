"""The life of one cell: sample, grade, update, evaluate at the common marks, commit."""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from grids.expansion import Cell, evaluated_steps, warmed_up_learning_rate
from grids.spec import GridSpec
from orchestrator.data import GridData
from orchestrator.pools import LearnerGroup, Pools, Ref, require_agreement
from orchestrator.progress import Progress, accelerator_seconds
from orchestrator.store import CellStore, State
from workers.grading import evenly_spaced
from workers.problems import batch_indices
from workers.rollouts import rollout_seed
from workers.sampler import SamplingRequest

T = TypeVar("T")


class Listener(Protocol):
    """Who is told of a cell's progress while it runs."""

    def step(self, cell: Cell, step: int) -> None:
        """An update step is done."""

    def row(self, cell: Cell, row: dict[str, Any]) -> None:
        """A history row has been written."""


@dataclass(frozen=True)
class Batch:
    """Problems to sample, with their gold answers."""

    request: SamplingRequest
    golds: list[str]


def training_batch(cell: Cell, step: int, data: GridData) -> Batch:
    """What update ``step`` (from 1) of a cell trains on: a pure function of (cell, step)."""
    indices = batch_indices(cell.seed, step, cell.problems_per_batch, len(data.train))
    seeds = [rollout_seed(cell.id, step, position) for position in range(len(indices))]
    prompts = [data.train.prompts[i] for i in indices]
    return Batch(
        SamplingRequest(prompts, seeds, cell.rollouts_per_problem), [data.train.golds[i] for i in indices]
    )


def evaluation_request(spec: GridSpec, data: GridData) -> SamplingRequest:
    """The validation request, the same for all cells and steps, so that cells are compared on common random numbers."""
    seeds = [rollout_seed("evaluation", position) for position in range(len(data.validation))]
    return SamplingRequest(data.validation.prompts, seeds, spec.evaluation.samples_per_problem)


def probe_batch(spec: GridSpec, data: GridData) -> Batch:
    """The train probe: evenly spaced training problems, the same for all cells and steps."""
    probe = spec.evaluation.train_probe
    indices = evenly_spaced(probe.problems, len(data.train))
    seeds = [rollout_seed("train-probe", position) for position in range(len(indices))]
    prompts = [data.train.prompts[i] for i in indices]
    return Batch(
        SamplingRequest(prompts, seeds, probe.samples_per_problem), [data.train.golds[i] for i in indices]
    )


async def evaluate(
    pools: Pools, spec: GridSpec, data: GridData, weights: Ref
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(validation and train-probe columns of a history row, validation rollouts to keep) of some weights."""
    started = time.monotonic()
    rollouts, _ = await pools.samplers.sample(evaluation_request(spec, data), weights)
    columns, samples = await pools.grader.evaluate.remote(
        rollouts, data.validation.golds, spec.evaluation.kept_rollouts
    )
    if spec.evaluation.train_probe.problems:
        probe = probe_batch(spec, data)
        rollouts, _ = await pools.samplers.sample(probe.request, weights)
        probe_columns, failures = await pools.grader.probe.remote(rollouts, probe.golds)
        columns |= probe_columns
        columns["eval_verifier_failures"] += failures
    return columns | {"seconds_evaluating": time.monotonic() - started}, samples


async def _whole(writing: Coroutine[Any, Any, T]) -> T:
    """Let a write to the store end before a cancellation goes on: the store is for one thread at a time."""
    task = asyncio.ensure_future(writing)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


class CellRun:
    """One attempt at one cell, on one learner group."""

    def __init__(
        self,
        cell: Cell,
        spec: GridSpec,
        data: GridData,
        pools: Pools,
        learner: LearnerGroup,
        store: CellStore,
        listener: Listener,
    ) -> None:
        """Hold what the attempt needs; ``run`` does the work."""
        self._cell, self._spec, self._data = cell, spec, data
        self._pools, self._learner, self._store = pools, learner, store
        self._listener = listener
        self._marks = frozenset(evaluated_steps(cell, spec.evaluation))

    async def run(self) -> None:
        """Train from the last commit to the end; the cell is then committed as finished.

        Raises:
            Disagreement: at the first step the sampler's log-probabilities are not the learner's.
            ray.exceptions.RayTaskError: whatever a worker raised.
        """
        cell, store = self._cell, self._store
        state = await _whole(asyncio.to_thread(store.start_attempt))
        commit = state.commit
        progress = Progress(**commit.progress) if commit else Progress()
        checkpoint = store.folder / commit.checkpoint if commit and commit.checkpoint else None
        first_step = progress.step + 1
        version = f"{cell.id}/attempt-{state.attempt}/step-"
        weights = await self._learner.begin_cell(f"{version}{progress.step}", checkpoint)
        committed_at = time.monotonic()
        committed_step = progress.step
        for step in range(first_step, cell.update_steps + 1):
            metrics, tokens, weights = await self._update(step, f"{version}{step}", weights)
            if step == first_step:
                self._require_agreement(metrics, step)
            seconds = accelerator_seconds(
                self._spec.pools, metrics["seconds_sampling"], metrics["seconds_learning"]
            )
            progress.add_step(metrics, tokens, seconds)
            self._listener.step(cell, step)
            if step in self._marks:
                await self._record(progress, weights)
            due = time.monotonic() - committed_at >= self._spec.commits.every_minutes * 60
            if step < cell.update_steps and (due or step - committed_step >= self._spec.commits.every_steps):
                await _whole(self._commit(progress, State.RUNNING))
                committed_at, committed_step = time.monotonic(), step
        await _whole(self._commit(progress, State.FINISHED))

    async def _update(self, step: int, version: str, weights: Ref) -> tuple[dict[str, float], int, Ref]:
        """One step; (metrics, tokens generated, new weights)."""
        batch = training_batch(self._cell, step, self._data)
        rollouts, seconds_sampling = await self._pools.samplers.sample(batch.request, weights)
        rewards, summary = self._pools.grader.grade_batch.options(num_returns=2).remote(rollouts, batch.golds)
        failures, seconds_grading = await summary
        learning_rate = warmed_up_learning_rate(
            self._cell.learning_rate, self._spec.optimiser.warmup_steps, step
        )
        metrics, new_weights = await self._learner.update(version, learning_rate, rollouts, rewards)
        metrics |= {
            "verifier_failures": float(failures),
            "seconds_sampling": seconds_sampling,
            "seconds_grading": seconds_grading,
        }
        tokens = round(metrics["response_tokens"] * self._cell.batch_rollouts)
        return metrics, tokens, new_weights

    def _require_agreement(self, metrics: dict[str, float], step: int) -> None:
        dtype = self._spec.model.dtype
        column = "logprob_difference" if dtype == "float32" else "logprob_mean_difference"
        require_agreement(metrics[column], dtype, f"at step {step} of {self._cell.id}")

    async def _record(self, progress: Progress, weights: Ref) -> None:
        """Evaluate and write a history row."""
        cell = self._cell
        evaluation, samples = await evaluate(self._pools, self._spec, self._data, weights)
        row = {
            "cell": cell.id,
            "problems_per_batch": cell.problems_per_batch,
            "rollouts_per_problem": cell.rollouts_per_problem,
            "seed": cell.seed,
            "step": progress.step,
            "compute_rollouts": progress.step * cell.batch_rollouts,
            "compute_tokens": progress.compute_tokens,
            "accelerator_seconds": progress.accelerator_seconds,
            "epochs": progress.step * cell.problems_per_batch / len(self._data.train),
            **evaluation,
            **progress.close_interval(),
            "logged_at_ms": time.time_ns() // 1_000_000,
        }
        await _whole(asyncio.to_thread(self._store.append_row, row))
        await _whole(asyncio.to_thread(self._store.write_samples, progress.step, samples))
        self._listener.row(cell, row)

    async def _commit(self, progress: Progress, state: State) -> None:
        folder: Path = await asyncio.to_thread(self._store.begin_checkpoint, progress.step)
        await self._learner.save(folder)
        await asyncio.to_thread(self._store.complete_checkpoint, folder)
        await asyncio.to_thread(self._store.commit, progress.step, folder, progress.to_dict(), state)
        if state is State.FINISHED:
            self._store.close()
