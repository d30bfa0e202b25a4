"""Sampling, grading and evaluation for one cell: phases that keep no state, repeated with the same seeds when one is lost."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from grids.errors import UserError
from grids.spec import GridSpec
from orchestrator.control.batches import Batch, probe_batch, validation_batch
from orchestrator.control.data import GridData
from orchestrator.failures.decisions import Action, Decision, decide
from orchestrator.failures.faults import Fault, FaultKind, Phase, PoisonedProblems, classify
from orchestrator.failures.isolation import isolate
from orchestrator.pools.pools import Pools
from orchestrator.pools.shared_pool import PoolLost, Ref
from orchestrator.pools.supervision import all_of
from orchestrator.pools.watch import abandon
from orchestrator.pools.work import Work
from orchestrator.store.cell_state import CellState
from orchestrator.store.phase_log import PhaseKind
from workers.sampler import Sampled

T = TypeVar("T")

EVALUATION_URGENCY = -1.0
"""Below that of any training step: evaluations fill gaps, as long as their cell does not wait for them."""


class Stopped(Exception):
    """The attempt was told to stop; nothing of the phase is kept."""


@dataclass(frozen=True)
class GradedBatch:
    """A batch in the slices that were graded together."""

    rollouts: list[Ref]
    """To ``Rollouts``, in the batch's order."""
    rewards: list[Ref]
    """To rewards of each slice."""
    tokens: int
    failures: int
    """Answers whose grading crashed or hung."""
    seconds_sampling: float
    """Of all engines together."""
    seconds_grading: float


@dataclass(frozen=True)
class GradedSlice:
    """Some groups that were graded together."""

    sampled: Sampled
    rollouts: Ref
    rewards: Ref
    failures: int
    """As in ``GradedBatch``."""
    seconds: float
    """Grading."""


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
        """Rollouts of a batch, sampled from ``weights``, with their rewards; groups are graded while others are sampled.

        ``work``: what the sampling is for. Raises as ``sample``.
        """
        parts = await all_of(*(self._graded_part(part, weights, work) for part in self._spread(batch)))
        slices = [one for part in parts for one in part]
        return GradedBatch(
            [one.rollouts for one in slices],
            [one.rewards for one in slices],
            sum(one.sampled.tokens for one in slices),
            sum(one.failures for one in slices),
            sum(one.sampled.seconds for one in slices),
            sum(one.seconds for one in slices),
        )

    async def _graded_part(self, part: Batch, weights: Ref, work: Work) -> list[GradedSlice]:
        slices = part.slices()
        gradings: list[asyncio.Task[GradedSlice]] = []
        wanted = True

        def grade(sampled: Sampled, rollouts: Ref) -> None:
            if not wanted:
                return  # it came in the moment in which the part was given up
            graded = self._graded_slice(slices[len(gradings)], sampled, rollouts, work)
            gradings.append(asyncio.create_task(graded))

        def sample() -> Awaitable[list[tuple[Sampled, Ref]]]:
            # Of a try that failed nothing is kept: on a GPU the next one need not give the same bits.
            _give_up(gradings)
            return self._sampled(part, [len(one.golds) for one in slices], weights, work, grade)

        try:
            await self._sampled_persistently(part, weights, work, sample)
            return [await grading for grading in gradings]
        finally:
            wanted = False
            _give_up(gradings)

    async def _graded_slice(self, batch: Batch, sampled: Sampled, rollouts: Ref, work: Work) -> GradedSlice:
        sequences, tokens = batch.request.sequences, sampled.tokens
        grading = replace(work, kind=PhaseKind.GRADING, sequences=sequences, tokens=tokens)
        rewards, (failures, seconds) = await self._repeating(
            Phase.GRADING,
            lambda: self.pools.grader.reference_and_value("grade_batch", rollouts, batch.golds, work=grading),
        )
        return GradedSlice(sampled, rollouts, rewards, failures, seconds)

    async def sample(self, batch: Batch, weights: Ref, work: Work) -> tuple[list[Ref], int, float]:
        """(references to the ``Rollouts`` of each part, tokens, seconds of all engines) of a batch, sampled from ``weights``.

        Raises:
            PoisonedProblems: it fails, and it is these problems that make it fail.
            Stopped: told to.
            ray.exceptions.RayError, MemberLost, Stalled: as often as the policy repeats a phase.
        """

        async def sample(part: Batch) -> list[tuple[Sampled, Ref]]:
            return await self._sampled_persistently(
                part, weights, work, lambda: self._sampled(part, [len(part.golds)], weights, work)
            )

        parts = await all_of(*(sample(part) for part in self._spread(batch)))
        sampled, rollouts = zip(*(one for part in parts for one in part), strict=True)
        return list(rollouts), sum(one.tokens for one in sampled), sum(one.seconds for one in sampled)

    def _spread(self, batch: Batch) -> list[Batch]:
        return batch.spread(self.pools.samplers.free, self.spec.pools.samplers.max_sequences)

    async def _sampled_persistently(
        self, part: Batch, weights: Ref, work: Work, sample: Callable[[], Awaitable[T]]
    ) -> T:
        """What ``sample`` gives of a part, however often that takes."""
        try:
            return await self._repeating(Phase.SAMPLING, sample)
        except (Stopped, PoolLost, UserError):
            raise
        except Exception as error:
            fault = classify(error, Phase.SAMPLING)
            if fault.kind not in (FaultKind.LOST, FaultKind.REFUSED, FaultKind.UNKNOWN):
                raise
            positions = await isolate(
                lambda some: self._fails(part.part(some), weights, work), len(part.golds)
            )
            if not positions:
                raise
            raise PoisonedProblems([part.sources[i] for i in positions], fault.reason) from error

    async def evaluate(
        self, weights: Ref, cell: str, step: int, hurry: asyncio.Future[float] | None = None
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """(validation and train-probe columns of a history row, validation rollouts to keep) of a cell's weights.

        ``hurry`` brings the urgency of what comes to wait for it.
        """
        kept = self.spec.evaluation.kept_rollouts
        validation = validation_batch(self.spec, self.data)
        (columns, samples), seconds = await self._evaluated(
            "evaluate_all", validation, weights, cell, step, hurry, kept
        )
        if self.spec.evaluation.train_probe.problems:
            probe = probe_batch(self.spec, self.data)
            (probe_columns, failures), probe_seconds = await self._evaluated(
                "probe_all", probe, weights, cell, step, hurry
            )
            seconds += probe_seconds
            columns |= probe_columns
            columns["eval_verifier_failures"] += failures
        return columns | {"seconds_evaluating": seconds}, samples

    async def _evaluated(
        self,
        method: str,
        batch: Batch,
        weights: Ref,
        cell: str,
        step: int,
        hurry: asyncio.Future[float] | None,
        *arguments: object,
    ) -> tuple[Any, float]:
        """(what a method of the grader says of a sampled batch, seconds of the engines)."""
        work = Work(
            PhaseKind.EVALUATION,
            cell,
            step,
            batch.request.sequences,
            urgency=EVALUATION_URGENCY,
            hurry=hurry,
        )
        rollouts, tokens, seconds = await self.sample(batch, weights, work)
        graded = replace(work, kind=PhaseKind.EVALUATION_GRADING, tokens=tokens)
        result = await self._repeating(
            Phase.GRADING,
            lambda: self.pools.grader.value(method, batch.golds, *arguments, *rollouts, work=graded),
        )
        return result, seconds

    def _sampled(
        self,
        part: Batch,
        groups: Sequence[int],
        weights: Ref,
        work: Work,
        each: Callable[[Sampled, Ref], None] = lambda sampled, rollouts: None,
    ) -> Awaitable[list[tuple[Sampled, Ref]]]:
        """A part in slices of so many groups, as one engine gives them."""
        sampling = replace(
            work,
            sequences=part.request.sequences,
            count_tokens=lambda pairs: sum(sampled.tokens for sampled, _ in pairs),
        )
        return self.pools.samplers.values_and_references(
            "sample", part.request, weights, groups, work=sampling, each=each
        )

    async def _fails(self, part: Batch, weights: Ref, work: Work) -> bool:
        try:
            await self.unless_stopped(lambda: self._sampled(part, [len(part.golds)], weights, work))
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


def _give_up(gradings: list[asyncio.Task[GradedSlice]]) -> None:
    for grading in gradings:
        abandon(grading)
    gradings.clear()
