"""Samplers, learner groups and the grader as Ray actors, started once, shared by all cells of a grid, replaced when lost."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import ObjectLostError, RayActorError

from grids.errors import UserError
from grids.spec import GridSpec
from orchestrator.failures.faults import is_storage_full
from orchestrator.failures.ray_errors import root_cause
from orchestrator.pools.actors import WATCH_GROUP, GraderActor, LearnerActor, SamplerActor
from orchestrator.pools.supervision import PoolMember, Supervision, all_of, persistently, watch
from workers.learner import Diverged, LearnerSettings

Ref = Any
"""A reference to an object in Ray's store; data passes the controller only as such."""

RANKS_AGREE_SECONDS = 10.0
"""How long after one rank's error the others may take to raise theirs; their collectives would hang for minutes."""
WANTED_MEMBER_POLL_SECONDS = 0.01


class GroupBroken(RuntimeError):
    """Some ranks of a learner group failed and others did not: its collectives cannot be used any more."""


class PoolLost(RuntimeError):
    """No member of a pool can be started any more."""


class SharedPool:
    """Members that serve any cell: each call takes a free one, and a lost one is replaced while the others serve."""

    def __init__(self, members: list[PoolMember], supervision: Supervision) -> None:
        """Members whose actors have a method ``start``."""
        self.members = members
        self._supervision = supervision
        self._free: asyncio.Queue[PoolMember] = asyncio.Queue()
        self._replacements: set[asyncio.Task[None]] = set()
        self._given_up = 0
        self._lost = asyncio.Event()
        self._fault: Exception | None = None

    async def start(self) -> None:
        """Start all members; raises what keeps one from starting."""
        await all_of(*(self._open(member) for member in self.members))

    async def value(self, method: str, *arguments: object) -> Any:
        """The result of a call to a free member.

        Raises:
            MemberLost, Stalled: that member is replaced; the call can be repeated.
            PoolLost: there is no member any more.
        """
        return await self._call(lambda handle: getattr(handle, method).remote(*arguments), lambda call: call)

    async def reference_and_value(
        self, method: str, *arguments: object, member: PoolMember | None = None
    ) -> tuple[Ref, Any]:
        """Of a call with two results: (reference to the first, which stays where it is, the second). Raises as ``value``.

        ``member`` is the one to ask, the next free one when None.
        """
        calls: list[list[Ref]] = []

        def remote(handle: ActorHandle) -> list[Ref]:
            calls.append(getattr(handle, method).options(num_returns=2).remote(*arguments))
            return calls[-1]

        value = await self._call(remote, lambda call: call[1], member)
        return calls[0][0], value

    async def _call(
        self,
        remote: Callable[[ActorHandle], Any],
        awaited: Callable[[Any], Awaitable[Any]],
        wanted: PoolMember | None = None,
    ) -> Any:
        member = await self._take()
        while wanted is not None and member is not wanted:
            self._free.put_nowait(member)
            await asyncio.sleep(WANTED_MEMBER_POLL_SECONDS)
            member = await self._take()
        try:
            result = await watch([member], awaited(remote(member.handle)), self._supervision)
        except (asyncio.CancelledError, UserError, ObjectLostError):
            # The call was given up, or it was at fault itself: the member is as it was.
            self._free.put_nowait(member)
            raise
        except Exception:
            # Also after an error that its process survived: what it left half done must not reach the next call.
            self._replace(member)
            raise
        self._free.put_nowait(member)
        return result

    async def _take(self) -> PoolMember:
        waiting = asyncio.ensure_future(self._free.get())
        lost = asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait({waiting, lost}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            raise PoolLost(
                f"no {self.members[0].role.split()[0]} can be started: {self._fault}"
            ) from self._fault
        finally:
            lost.cancel()
            if not waiting.done():
                waiting.cancel()

    def _replace(self, member: PoolMember) -> None:
        task = asyncio.create_task(self._open_or_give_up(member))
        self._replacements.add(task)
        task.add_done_callback(self._replacements.discard)

    async def _open_or_give_up(self, member: PoolMember) -> None:
        try:
            await self._open(member)
        except Exception as error:
            self._supervision.say(f"{member.role} is given up: {error}")
            self._fault = error
            self._given_up += 1
            if self._given_up == len(self.members):
                self._lost.set()

    async def _open(self, member: PoolMember) -> None:
        async def start() -> None:
            await member.open()
            supervision = self._supervision
            await watch([member], member.handle.start.remote(), supervision, supervision.policy.start_seconds)

        await persistently(start, member.role, self._supervision.policy, self._supervision.say)
        self._free.put_nowait(member)


class LearnerGroup:
    """The ranks of one FSDP group, called together."""

    def __init__(self, members: list[PoolMember], supervision: Supervision) -> None:
        """Ranks in order; ``open`` starts them."""
        self.members = members
        self.broken = True
        """Whether the group must be opened (again) before it can take up a cell."""
        self._supervision = supervision

    async def open(self) -> None:
        """Start all ranks anew and connect them; raises what keeps them from starting."""
        name = self.members[0].role.removesuffix(" rank 0")
        await persistently(self._open, name, self._supervision.policy, self._supervision.say)
        self.broken = False

    async def _open(self) -> None:
        limit = self._supervision.policy.start_seconds
        await all_of(*(member.open() for member in self.members))
        first = self.members[0]
        host, port = await watch([first], first.handle.open_store.remote(), self._supervision, limit)
        await self._together(lambda rank: rank.join.remote(host, port), lambda call: call, limit)

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
        calls, metrics = await self._together(
            lambda rank: rank.update.options(num_returns=2).remote(version, learning_rate, rollouts, rewards),
            lambda call: call[0],
        )
        return metrics[0], calls[0][1]

    async def logprobs(self, rollouts: Ref) -> np.ndarray:
        """[T] the learner's log-probabilities of all response tokens."""
        _, values = await self._together(lambda rank: rank.logprobs.remote(rollouts), lambda call: call)
        return values[0]

    async def save(self, folder: Path) -> None:
        """Write a checkpoint to an empty folder."""
        limit = self._supervision.policy.start_seconds
        await self._together(lambda rank: rank.save.remote(folder), lambda call: call, limit)

    async def _weights(self, method: str, *arguments: object) -> Ref:
        # Two results each: the small one is waited for, and brings an error of any rank; the weights stay where they are.
        calls, _ = await self._together(
            lambda rank: getattr(rank, method).options(num_returns=2).remote(*arguments),
            lambda call: call[0],
            self._supervision.policy.start_seconds,
        )
        return calls[0][1]

    async def _together(
        self,
        remote: Callable[[ActorHandle], Any],
        awaited: Callable[[Any], Ref],
        seconds: float | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """(the calls, the results that are waited for) of all ranks.

        Raises:
            MemberLost, Stalled, GroupBroken: and the group is broken, as after any error that the ranks do not recover from.
        """
        calls = [remote(member.handle) for member in self.members]
        try:
            results = await watch(
                self.members, all_ranks([awaited(call) for call in calls]), self._supervision, seconds
            )
        except Exception as error:
            cause = root_cause(error)
            # These are raised by all ranks at the same point, before or after a step as a whole.
            self.broken = not (isinstance(cause, Diverged | UserError) or is_storage_full(cause))
            raise
        return calls, results


async def all_ranks(results: list[Ref]) -> list[Any]:
    """Results of all ranks of a group, waited for together.

    Raises:
        RayActorError: a rank died; the others are not waited for.
        GroupBroken: some ranks failed and others did not, or not with the same kind of error.
    """
    futures = [asyncio.ensure_future(result) for result in results]
    try:
        done, waiting = await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
        errors = [error for future in done if (error := future.exception()) is not None]
        if not errors:
            return [future.result() for future in futures]
        for error in errors:
            if isinstance(error, RayActorError):
                raise error
        if waiting:
            late, _ = await asyncio.wait(waiting, timeout=RANKS_AGREE_SECONDS)
            errors += [error for future in late if (error := future.exception()) is not None]
        if len(errors) == len(futures) and len({type(root_cause(error)) for error in errors}) == 1:
            raise errors[0]
        raise GroupBroken(
            f"{len(errors)} of {len(futures)} ranks failed: {root_cause(errors[0])}"
        ) from errors[0]
    finally:
        for future in futures:
            future.cancel()


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
        groups = [member for group in self.learners for member in group.members]
        for member in [*self.samplers.members, *self.grader.members, *groups]:
            member.let_go()


def make_pools(spec: GridSpec, longest_prompt: int, supervision: Supervision) -> Pools:
    """The pools of a grid, nothing of them started yet."""
    sampler_spec, learner_spec = spec.pools.samplers, spec.pools.learners
    variables = {"ISOCOMPUTE_RUN_DIR": str(supervision.run_dir)}
    sampler_class = _remote(SamplerActor, sampler_spec.cpus, sampler_spec.gpus, variables | _threads(1))
    learner_class = _remote(
        LearnerActor, learner_spec.cpus, learner_spec.gpus, variables | _threads(learner_spec.cpus)
    )
    grader_class = _remote(GraderActor, spec.verifier.workers, 0, variables)
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
        return sampler_class.remote(spec.model, spec.sampling, sampler_spec, longest_prompt)

    def new_rank(rank: int) -> Callable[[], ActorHandle]:
        return lambda: learner_class.remote(settings, rank, learner_spec.ranks)

    def new_grader() -> ActorHandle:
        return grader_class.remote(spec.verifier, spec.sampling)

    samplers = [PoolMember(f"sampler {i}", new_sampler, supervision) for i in range(sampler_spec.count)]
    groups = [
        LearnerGroup(
            [
                PoolMember(f"learner {group} rank {rank}", new_rank(rank), supervision)
                for rank in range(learner_spec.ranks)
            ],
            supervision,
        )
        for group in range(learner_spec.count)
    ]
    grader = PoolMember("grader", new_grader, supervision)
    return Pools(SharedPool(samplers, supervision), groups, SharedPool([grader], supervision))


def _remote(actor: type, cpus: int, gpus: int, variables: dict[str, str]) -> Any:
    return ray.remote(concurrency_groups={WATCH_GROUP: 1})(actor).options(
        num_cpus=cpus, num_gpus=gpus, runtime_env={"env_vars": variables}
    )


def _threads(threads: int) -> dict[str, str]:
    """Set before the actor imports torch, whose thread pools read it once."""
    return {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
