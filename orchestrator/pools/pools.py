"""Samplers, learner groups and the grader as Ray actors, started once and shared by all cells of a grid."""

from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorHandle

from grids.spec import GridSpec
from orchestrator.pools.actors.grader import GraderActor
from orchestrator.pools.actors.sampler import SamplerActor
from orchestrator.pools.actors.watchable import WATCH_GROUP
from orchestrator.pools.learner_group import LearnerGroup
from orchestrator.pools.members import RUN_VARIABLE
from orchestrator.pools.placement import Placement
from orchestrator.pools.resources import engine_accelerators, group_accelerators, rank_resources
from orchestrator.pools.shared_pool import SharedPool
from orchestrator.pools.supervision import PoolMember, Supervision, all_of
from workers.learning import LearnerSettings

KEPT_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
}
"""Lets glibc keep pieces below 32 MiB (its limit) that a step has freed for the next one, in one arena that all threads share. By
default they go back to the system, and what computes on a CPU meets thousands of page faults a step, a twentieth of its time."""


class Pools:
    """Everything that runs on the cluster for one grid."""

    def __init__(self, samplers: SharedPool, learners: list[LearnerGroup], grader: SharedPool) -> None:
        """Pools made by ``make_pools``; ``start`` brings them up."""
        self.samplers, self.learners, self.grader = samplers, learners, grader

    async def start(self) -> None:
        """Start engines, learner groups and the grader side by side, and wait until all serve."""
        groups = [group.open() for group in self.learners]
        await all_of(self.samplers.start(), self.grader.start(), *groups)

    def let_go(self) -> None:
        """Tell Ray to end all actors, without waiting for them."""
        for member in [*self.samplers.members, *self.grader.members]:
            member.let_go()
        for group in self.learners:
            group.let_go()


def make_pools(spec: GridSpec, longest_prompt: int, supervision: Supervision) -> Pools:
    """The pools of a grid, nothing of them started yet."""
    # Loads torch, which whoever is told of a wrong grid need not wait for.
    from orchestrator.pools.actors.learner import LearnerActor

    sampler_spec, learner_spec = spec.pools.samplers, spec.pools.learners
    variables = {RUN_VARIABLE: str(supervision.run_dir)}
    sampler_class, learner_class, grader_class = map(_remote, (SamplerActor, LearnerActor, GraderActor))
    sampler_options = _options(
        sampler_spec.cpus, sampler_spec.gpus, variables | _threads(1) | _memory(sampler_spec.gpus)
    )
    learner_options = _options(
        learner_spec.cpus,
        learner_spec.gpus,
        variables | _threads(learner_spec.cpus) | _memory(learner_spec.gpus),
    )
    grader_options = _options(spec.verifier.workers, 0, variables)
    settings = LearnerSettings(
        model=spec.model,
        recipe=spec.recipe,
        optimiser=spec.optimiser,
        temperature=spec.sampling.temperature,
        micro_batch_tokens=learner_spec.micro_batch_tokens,
        threads=learner_spec.cpus,
        on_gpu=learner_spec.gpus > 0,
    )

    def new_sampler() -> ActorHandle:
        return sampler_class.options(**sampler_options).remote(
            spec.model, spec.sampling, sampler_spec, longest_prompt
        )

    def new_rank(rank: int, placement: Placement) -> Callable[[], ActorHandle]:
        return lambda: learner_class.options(
            **learner_options, scheduling_strategy=placement.strategy(rank)
        ).remote(settings, rank, learner_spec.ranks)

    def new_group(number: int) -> LearnerGroup:
        role, ranks = f"learner {number}", range(learner_spec.ranks)
        placement = Placement(role, [rank_resources(spec.pools) for _ in ranks], supervision.say)
        members = [
            PoolMember(f"{role} rank {rank}", new_rank(rank, placement), supervision) for rank in ranks
        ]
        accelerators = group_accelerators(spec.pools)
        return LearnerGroup(members, placement, learner_spec.slots, supervision, accelerators)

    def new_grader() -> ActorHandle:
        return grader_class.options(**grader_options).remote(spec.verifier, spec.sampling)

    samplers = [PoolMember(f"sampler {i}", new_sampler, supervision) for i in range(sampler_spec.count)]
    grader = PoolMember("grader", new_grader, supervision)
    return Pools(
        SharedPool(samplers, supervision, engine_accelerators(spec.pools)),
        [new_group(number) for number in range(learner_spec.count)],
        SharedPool([grader], supervision, accelerators=0),
    )


def _remote(actor: type) -> Any:
    return ray.remote(concurrency_groups={WATCH_GROUP: 1})(actor)


def _options(cpus: int, gpus: int, variables: dict[str, str]) -> dict[str, Any]:
    return {"num_cpus": cpus, "num_gpus": gpus, "runtime_env": {"env_vars": variables}}


def _threads(threads: int) -> dict[str, str]:
    """Set before the actor imports torch, whose thread pools read it once."""
    return {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}


def _memory(gpus: int) -> dict[str, str]:
    """Read by glibc when the actor's process starts."""
    return {} if gpus else KEPT_MEMORY
