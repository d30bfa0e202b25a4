"""Sampler engines and learner groups as Ray actors, started once and shared by all cells of a grid."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle

from grids.errors import UserError
from grids.spec import GridSpec
from orchestrator.ray_errors import root_cause
from workers.grading import Grader
from workers.learner import LearnerRank, LearnerSettings
from workers.rollouts import Rollouts, rollout_seed
from workers.sampler import Sampler, SamplingRequest
from workers.weights import Weights

Ref = Any
"""A reference to an object in Ray's store; data passes the controller only as such."""

LOGPROB_BOUNDS = {"float32": 1e-3, "bfloat16": 0.1}
"""How far sampler and learner may lie apart in the log-probability of a token: the largest difference in float32, where both
compute the same function up to rounding; the mean difference in bfloat16, whose 8 bits make single tokens differ by several
tenths between kernels."""


class Disagreement(UserError):
    """Sampler and learner do not compute the same policy."""


class GroupBroken(RuntimeError):
    """Some ranks of a learner group failed and others did not: its collectives cannot be used any more."""


class SamplerActor(Sampler):
    """A sampler that starts by a method and tells how long it took."""

    def __init__(self, *arguments: Any) -> None:
        """Hold the arguments of ``Sampler``. An error in an actor's constructor would arrive as the loss of the actor."""
        self._arguments = arguments

    def start(self) -> None:
        """Start the engine."""
        super().__init__(*self._arguments)

    def sample(self, request: SamplingRequest, weights: Weights | None) -> tuple[Rollouts, float]:
        """``generate``, and its seconds."""
        started = time.monotonic()
        rollouts = self.generate(request, weights)
        return rollouts, time.monotonic() - started


class GraderActor(Grader):
    """A grader whose rewards stay in the object store."""

    def grade_batch(self, rollouts: Rollouts, golds: list[str]) -> tuple[np.ndarray, tuple[int, float]]:
        """Rewards [R], and (failures, seconds)."""
        started = time.monotonic()
        grading = self.grade(rollouts, golds)
        return grading.rewards, (grading.failures, time.monotonic() - started)


class SamplerPool:
    """Engines that serve any cell; each call takes a free one."""

    def __init__(self, engines: list[ActorHandle]) -> None:
        """Hold started engines."""
        self.engines = engines
        self._free: asyncio.Queue[ActorHandle] = asyncio.Queue()
        for engine in engines:
            self._free.put_nowait(engine)

    async def sample(self, request: SamplingRequest, weights: Ref) -> tuple[Ref, float]:
        """(reference to ``Rollouts``, seconds), sampled from ``weights`` by the next free engine."""
        engine = await self._free.get()
        try:
            rollouts, seconds = engine.sample.options(num_returns=2).remote(request, weights)
            return rollouts, await seconds
        finally:
            self._free.put_nowait(engine)


class LearnerGroup:
    """The ranks of one FSDP group, called together."""

    def __init__(self, ranks: list[ActorHandle]) -> None:
        """Hold joined ranks."""
        self._ranks = ranks

    async def begin_cell(self, version: str, checkpoint: Path | None) -> Ref:
        """Take up a cell; a reference to its weights."""
        return await self._weights("begin_cell", version, checkpoint)

    async def perturb(self, version: str) -> Ref:
        """Change every weight a little; a reference to the weights."""
        return await self._weights("perturb", version)

    async def update(
        self, version: str, learning_rate: float, rollouts: Ref, rewards: Ref
    ) -> tuple[dict[str, float], Ref]:
        """One update; (metrics, reference to the new weights)."""
        calls = [
            rank.update.options(num_returns=2).remote(version, learning_rate, rollouts, rewards)
            for rank in self._ranks
        ]
        metrics = await _all_ranks([metrics for metrics, _ in calls])
        return metrics[0], calls[0][1]

    async def logprobs(self, rollouts: Ref) -> np.ndarray:
        """[T] the learner's log-probabilities of all response tokens."""
        return (await _all_ranks([rank.logprobs.remote(rollouts) for rank in self._ranks]))[0]

    async def save(self, folder: Path) -> None:
        """Write a checkpoint to an empty folder."""
        await _all_ranks([rank.save.remote(folder) for rank in self._ranks])

    async def _weights(self, method: str, *arguments: object) -> Ref:
        # Two results each: the small one is waited for, and brings an error of any rank; the weights stay where they are.
        calls = [getattr(rank, method).options(num_returns=2).remote(*arguments) for rank in self._ranks]
        await _all_ranks([done for done, _ in calls])
        return calls[0][1]


async def _all_ranks(results: list[Ref]) -> list[Any]:
    """Results of all ranks of a group, waited for together: the others of a failed rank end at their next collective.

    Raises:
        GroupBroken: some ranks failed and others did not, or not with the same kind of error.
    """
    outcomes = await asyncio.gather(*results, return_exceptions=True)
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if not errors:
        return outcomes
    if len(errors) == len(outcomes) and len({type(root_cause(error)) for error in errors}) == 1:
        raise errors[0]
    raise GroupBroken(f"{len(errors)} of {len(outcomes)} ranks failed") from errors[0]


@dataclass(frozen=True)
class Pools:
    """Everything that runs on the cluster for one grid."""

    samplers: SamplerPool
    learners: list[LearnerGroup]
    grader: ActorHandle


async def start_pools(spec: GridSpec, longest_prompt: int) -> Pools:
    """Start engines, learner groups and the grader side by side, and wait until all serve."""
    sampler_spec, learner_spec = spec.pools.samplers, spec.pools.learners
    sampler_class = ray.remote(SamplerActor).options(
        num_cpus=sampler_spec.cpus, num_gpus=sampler_spec.gpus, runtime_env=_environment(1)
    )
    engines = [
        sampler_class.remote(spec.model, spec.sampling, sampler_spec, longest_prompt)
        for _ in range(sampler_spec.count)
    ]
    starting = [engine.start.remote() for engine in engines]
    grader = (
        ray.remote(GraderActor).options(num_cpus=spec.verifier.workers).remote(spec.verifier, spec.sampling)
    )
    settings = LearnerSettings(
        model=spec.model,
        recipe=spec.recipe,
        optimiser=spec.optimiser,
        temperature=spec.sampling.temperature,
        micro_batch_tokens=learner_spec.micro_batch_tokens,
        threads=learner_spec.cpus,
        on_gpu=learner_spec.gpus > 0,
    )
    groups = await asyncio.gather(*(_start_group(spec, settings) for _ in range(learner_spec.count)))
    await asyncio.gather(*starting, grader.__ray_ready__.remote())
    return Pools(SamplerPool(engines), list(groups), grader)


async def _start_group(spec: GridSpec, settings: LearnerSettings) -> LearnerGroup:
    pool = spec.pools.learners
    rank_class = ray.remote(LearnerRank).options(
        num_cpus=pool.cpus, num_gpus=pool.gpus, runtime_env=_environment(pool.cpus)
    )
    ranks = [rank_class.remote(settings, rank, pool.ranks) for rank in range(pool.ranks)]
    host, port = await ranks[0].open_store.remote()
    await asyncio.gather(*(rank.join.remote(host, port) for rank in ranks))
    return LearnerGroup(ranks)


def _environment(threads: int) -> dict[str, Any]:
    """Set before the actor imports torch, whose thread pools read it once."""
    return {"env_vars": {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}}


async def prove_agreement(pools: Pools, prompts: list[list[int]], spec: GridSpec) -> float:
    """Show that weights get from every learner group to the engines, and that both compute the same policy.

    Each group changes all its weights a little, so that a tensor which does not arrive is seen, and engines sample from them. Every
    engine is tried with the first group, every group with the first engine.

    Returns:
        The largest difference found, in the sense of ``LOGPROB_BOUNDS``.

    Raises:
        Disagreement: it exceeds the bound.
    """
    probe = prompts[:8]
    pairs = [(0, engine) for engine in range(len(pools.samplers.engines))]
    pairs += [(group, 0) for group in range(1, len(pools.learners))]
    largest = 0.0
    for group, engine in pairs:
        learner = pools.learners[group]
        await learner.begin_cell(f"probe-{group}-{engine}/base", None)
        weights = await learner.perturb(f"probe-{group}-{engine}/perturbed")
        seeds = [rollout_seed("probe", position) for position in range(len(probe))]
        reference, seconds = (
            pools.samplers.engines[engine]
            .sample.options(num_returns=2)
            .remote(SamplingRequest(probe, seeds, rollouts_per_problem=4), weights)
        )
        await seconds
        rollouts: Rollouts = await reference
        differences = np.abs(await learner.logprobs(reference) - rollouts.logprobs)
        difference = float(differences.max() if spec.model.dtype == "float32" else differences.mean())
        require_agreement(
            difference, spec.model.dtype, f"on the start-up probe of engine {engine}, group {group}"
        )
        largest = max(largest, difference)
    return largest


def require_agreement(difference: float, dtype: str, where: str) -> None:
    """Raise ``Disagreement`` when sampler and learner lie further apart than the bound of their type."""
    bound = LOGPROB_BOUNDS[dtype]
    if not difference <= bound:
        raise Disagreement(
            f"model: sampler and learner differ by {difference:.3g} in the log-probability of a token {where}, the bound in "
            f"{dtype} is {bound:g}; the engine does not hold the learner's weights, so nothing it samples would be on-policy"
        )
