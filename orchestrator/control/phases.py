"""Sampling, grading and evaluation for one cell: phases that keep no state, repeated with the same seeds when one is lost."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

from grids.errors import UserError
from grids.expansion import Cell
from grids.spec import GridSpec
from orchestrator.control.data import GridData, PromptSet
from orchestrator.failures.decisions import Action, Decision, decide
from orchestrator.failures.faults import Fault, FaultKind, Phase, PoisonedProblems, classify
from orchestrator.failures.isolation import isolate
from orchestrator.pools.pools import Pools
from orchestrator.pools.shared_pool import PoolLost, Ref
from orchestrator.pools.supervision import all_of
from orchestrator.pools.work import Work
from orchestrator.store.cell_state import CellState
from orchestrator.store.phase_log import PhaseKind
from workers.grading import evenly_spaced
from workers.problems import batch_indices
from workers.rollouts import rollout_seed
from workers.sampler import SamplingRequest

T = TypeVar("T")

EVALUATION_URGENCY = -1.0
"""Below that of any training step: evaluations fill gaps."""


class Stopped(Exception):
    """The attempt was told to stop; nothing of the phase is kept."""


def parts_of_batch(groups: int, rollouts_per_problem: int, engines: int, full_engine: int) -> int:
    """In how many parts a batch is sampled; the arguments are those of ``Batch.spread``."""
    filled = groups * rollouts_per_problem // full_engine
    return max(1, min(engines, filled, groups))


@dataclass(frozen=True)
class Batch:
    """Problems to sample, with their gold answers and where they stand (``<path>, row <row>``)."""

    request: SamplingRequest
    golds: list[str]
    sources: list[str]

    def part(self, positions: Sequence[int]) -> "Batch":
        """Some positions, with the same seeds."""
        request = self.request
        return Batch(
            SamplingRequest(
                [request.prompts[i] for i in positions],
                [request.seeds[i] for i in positions],
                request.rollouts_per_problem,
            ),
            [self.golds[i] for i in positions],
            [self.sources[i] for i in positions],
        )

    def spread(self, engines: int, full_engine: int) -> list["Batch"]:
        """The batch in parts of nearly equal size: one for each of so many engines, as long as every part fills its engine.

        Args:
            engines: that are free.
            full_engine: sequences that an engine works on at once.
        """
        groups = len(self.golds)
        parts = parts_of_batch(groups, self.request.rollouts_per_problem, engines, full_engine)
        bounds = [groups * number // parts for number in range(parts + 1)]
        return [self.part(range(start, end)) for start, end in pairwise(bounds)]


@dataclass(frozen=True)
class GradedBatch:
    """A batch in the parts that engines made of it."""

    rollouts: list[Ref]
    """To ``Rollouts``, in the batch's order."""
    rewards: list[Ref]
    """To rewards of each part."""
    tokens: int
    failures: int
    """Answers whose grading crashed or hung."""
    seconds_sampling: float
    """Of all engines together."""
    seconds_grading: float


def training_batch(cell: Cell, step: int, data: GridData) -> Batch:
    """What update ``step`` (from 1) of a cell trains on: a pure function of (cell, step)."""
    indices = batch_indices(cell.seed, step, cell.problems_per_batch, len(data.train)).tolist()
    seeds = [rollout_seed(cell.id, step, position) for position in range(len(indices))]
    return _batch(data.train, indices, seeds, cell.rollouts_per_problem)


def validation_batch(spec: GridSpec, data: GridData) -> Batch:
    """All validation problems, the same for all cells and steps, so that cells are compared on common random numbers."""
    indices = range(len(data.validation))
    seeds = [rollout_seed("evaluation", position) for position in indices]
    return _batch(data.validation, indices, seeds, spec.evaluation.samples_per_problem)


def probe_batch(spec: GridSpec, data: GridData) -> Batch:
    """The train probe: evenly spaced training problems, the same for all cells and steps."""
    probe = spec.evaluation.train_probe
    indices = evenly_spaced(probe.problems, len(data.train))
    seeds = [rollout_seed("train-probe", position) for position in range(len(indices))]
    return _batch(data.train, indices, seeds, probe.samples_per_problem)


def _batch(problems: PromptSet, indices: Sequence[int], seeds: list[int], samples: int) -> Batch:
    return Batch(
        SamplingRequest([problems.prompts[i] for i in indices], seeds, samples),
        [problems.golds[i] for i in indices],
        [f"{problems.path}, row {problems.rows[i]}" for i in indices],
    )


@dataclass(frozen=True)
class Phases:
    """The phases of one cell's attempt, or of the base model's evaluation."""

    spec: GridSpec
    data: GridData
    pools: Pools
    state: Callable[[], CellState]
    """The cell's state as it is stored."""
    repeated: Callable[[Fault, Decision], None]
    """Told of each repeat."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to make the present phase raise ``Stopped``."""

    def unstoppable(self) -> "Phases":
        """The same phases, which no stop ends."""
        return replace(self, stop=asyncio.Event())

    async def sample_and_grade(self, batch: Batch, weights: Ref, work: Work) -> GradedBatch:
        """Rollouts of a batch, sampled from ``weights``, with their rewards; each part is graded while others are sampled.

        ``work``: what the sampling is for. Raises as ``sample``.
        """

        async def sample_and_grade(part: Batch) -> tuple[Ref, int, float, Ref, int, float]:
            rollouts, tokens, seconds = await self._sample_part(part, weights, work)
            grading = replace(work, kind=PhaseKind.GRADING, sequences=part.request.sequences, tokens=tokens)
            rewards, (failures, seconds_grading) = await self._repeating(
                Phase.GRADING,
                lambda: self.pools.grader.reference_and_value(
                    "grade_batch", rollouts, part.golds, work=grading
                ),
            )
            return rollouts, tokens, seconds, rewards, failures, seconds_grading

        done = await all_of(*(sample_and_grade(part) for part in self._spread(batch)))
        rollouts, tokens, sampling, rewards, failures, grading = map(list, zip(*done, strict=True))
        return GradedBatch(rollouts, rewards, sum(tokens), sum(failures), sum(sampling), sum(grading))

    async def sample(self, batch: Batch, weights: Ref, work: Work) -> tuple[list[Ref], int, float]:
        """(references to the ``Rollouts`` of each part, tokens, seconds of all engines) of a batch, sampled from ``weights``.

        Raises:
            PoisonedProblems: it fails, and it is these problems that make it fail.
            Stopped: told to.
            ray.exceptions.RayError, MemberLost, Stalled: as often as the policy repeats a phase.
        """
        done = await all_of(*(self._sample_part(part, weights, work) for part in self._spread(batch)))
        rollouts, tokens, seconds = map(list, zip(*done, strict=True))
        return rollouts, sum(tokens), sum(seconds)

    def _spread(self, batch: Batch) -> list[Batch]:
        return batch.spread(self.pools.samplers.free, self.spec.pools.samplers.max_sequences)

    async def _sample_part(self, part: Batch, weights: Ref, work: Work) -> tuple[Ref, int, float]:
        work = replace(work, sequences=part.request.sequences)
        try:
            rollouts, (tokens, seconds) = await self._repeating(
                Phase.SAMPLING, lambda: self._sampled(part.request, weights, work)
            )
            return rollouts, tokens, seconds
        except (Stopped, PoolLost, UserError):
            raise
        except Exception as error:
            fault = classify(error, Phase.SAMPLING)
            if fault.kind not in (FaultKind.LOST, FaultKind.REFUSED, FaultKind.UNKNOWN):
                raise
            positions = await isolate(
                lambda some: self._fails(part.part(some).request, weights, work), len(part.golds)
            )
            if not positions:
                raise
            raise PoisonedProblems([part.sources[i] for i in positions], fault.reason) from error

    async def evaluate(
        self, weights: Ref, cell: str, step: int
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """(validation and train-probe columns of a history row, validation rollouts to keep) of a cell's weights."""
        kept = self.spec.evaluation.kept_rollouts
        validation = validation_batch(self.spec, self.data)
        (columns, samples), seconds = await self._evaluated(
            "evaluate_all", validation, weights, cell, step, kept
        )
        if self.spec.evaluation.train_probe.problems:
            probe = probe_batch(self.spec, self.data)
            (probe_columns, failures), probe_seconds = await self._evaluated(
                "probe_all", probe, weights, cell, step
            )
            seconds += probe_seconds
            columns |= probe_columns
            columns["eval_verifier_failures"] += failures
        return columns | {"seconds_evaluating": seconds}, samples

    async def _evaluated(
        self, method: str, batch: Batch, weights: Ref, cell: str, step: int, *arguments: object
    ) -> tuple[Any, float]:
        """(what a method of the grader says of a sampled batch, seconds of the engines)."""
        work = Work(PhaseKind.EVALUATION, cell, step, batch.request.sequences, urgency=EVALUATION_URGENCY)
        rollouts, tokens, seconds = await self.sample(batch, weights, work)
        graded = replace(work, kind=PhaseKind.EVALUATION_GRADING, tokens=tokens)
        result = await self._repeating(
            Phase.GRADING,
            lambda: self.pools.grader.value(method, batch.golds, *arguments, *rollouts, work=graded),
        )
        return result, seconds

    def _sampled(
        self, request: SamplingRequest, weights: Ref, work: Work
    ) -> Coroutine[Any, Any, tuple[Ref, tuple[int, float]]]:
        counted = replace(work, sequences=request.sequences, count_tokens=lambda sampled: sampled[0])
        return self.pools.samplers.reference_and_value("sample", request, weights, work=counted)

    async def _fails(self, request: SamplingRequest, weights: Ref, work: Work) -> bool:
        try:
            await self.unless_stopped(lambda: self._sampled(request, weights, work))
        except (Stopped, PoolLost):
            raise
        except Exception as error:
            if classify(error).kind is FaultKind.PREEMPTED:
                raise
            return True
        return False

    async def _repeating(self, phase: Phase, call: Callable[[], Awaitable[T]]) -> T:
        repeats = 0
        while True:
            try:
                return await self.unless_stopped(call)
            except (Stopped, PoolLost):
                raise
            except Exception as error:
                fault = classify(error, phase)
                decision = decide(fault, self.state(), self.spec.failures, repeats)
                if decision.action is not Action.REPEAT_PHASE:
                    raise
            self.repeated(fault, decision)
            await self.unless_stopped(partial(asyncio.sleep, decision.delay_seconds))
            repeats += 1

    async def unless_stopped(self, phase: Callable[[], Awaitable[T]]) -> T:
        """The phase's result; when told to stop it is given up, or not begun, since nothing of it would be kept."""
        if self.stop.is_set():
            raise Stopped
        work = asyncio.ensure_future(phase())
        stop = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise Stopped
        finally:
            stop.cancel()
            work.cancel()
