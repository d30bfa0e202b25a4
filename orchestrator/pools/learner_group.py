"""Groups of FSDP ranks, called together, and the slots in which they hold cells."""

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ray.actor import ActorHandle
from ray.exceptions import ObjectLostError, RayActorError

from grids.errors import UserError
from orchestrator.failures.faults import MemberLost, is_storage_full
from orchestrator.failures.ray_errors import root_cause
from orchestrator.pools.placement import Placement
from orchestrator.pools.shared_pool import Ref
from orchestrator.pools.supervision import PoolMember, Supervision, all_of, persistently, watch
from orchestrator.pools.turns import Turns
from orchestrator.pools.work import Server, Work, serve
from orchestrator.store.phase_log import PhaseKind
from workers.learning import Diverged

RANKS_AGREE_SECONDS = 10.0
"""How long after one rank's error the others may take to raise theirs; their collectives would hang for minutes."""


class GroupBroken(RuntimeError):
    """Some ranks of a learner group failed and others did not: its collectives cannot be used any more."""


class LearnerGroup:
    """The ranks of one FSDP group, called together; it holds a cell in each of its slots and serves one call at a time."""

    def __init__(
        self,
        members: list[PoolMember],
        placement: Placement,
        slots: int,
        supervision: Supervision,
        accelerators: int,
    ) -> None:
        """Ranks in order and their place, with so many accelerators in all; ``open`` starts them."""
        self.members = members
        self._placement = placement
        self._server = Server(members[0].role.removesuffix(" rank 0"), accelerators)
        self.slots = [LearnerSlot(self, number) for number in range(slots)]
        self.broken = True
        """Whether the group must be opened (again) before it can take up a cell."""
        self.openings = 0
        """How often its ranks have been started: what an earlier start held is lost."""
        self._supervision = supervision
        self._turns: Turns[LearnerGroup] = Turns()
        self._turns.give(self)
        self._opening = asyncio.Lock()
        self._lost: Exception | None = None
        """Why it cannot be started, once that is known."""

    async def open(self) -> None:
        """Start all ranks anew and connect them, unless the group serves; raises what keeps them from starting.

        Those who come while it is being opened wait for the same start.
        """
        async with self._opening:
            if not self.broken:
                return
            if self._lost is not None:
                raise self._lost
            name = self._server.name
            try:
                await persistently(self._open, name, self._supervision.policy, self._supervision.say)
            except Exception as error:
                self._lost = error
                raise
            self.broken = False
            self.openings += 1

    async def _open(self) -> None:
        limit = self._supervision.policy.start_seconds
        await self.end()
        await self._placement.open()
        await all_of(*(member.open() for member in self.members))
        first = self.members[0]
        host, port = await watch([first], first.handle.open_store.remote(), self._supervision, limit)
        await self._together(lambda rank: rank.join.remote(host, port), lambda call: call, limit)

    async def end(self) -> None:
        """End all ranks and their processes; what they held of the cluster is for others."""
        for member in self.members:
            await member.end()
        self._placement.let_go()

    def let_go(self) -> None:
        """Tell Ray to end all ranks, without waiting for them."""
        for member in self.members:
            member.let_go()
        self._placement.let_go()

    async def call(
        self,
        opening: int,
        remote: Callable[[ActorHandle], Any],
        awaited: Callable[[Any], Ref],
        work: Work,
        seconds: float | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """(the calls, the results that are waited for) of all ranks, in this caller's turn.

        Args:
            opening: the start of the group that holds what the call is for.
            remote: makes the call to one rank.
            awaited: of a call, the result that is waited for.
            work: what the call is about; of several that wait the most urgent is served first.
            seconds: how long nothing may move; the policy's ``stall_seconds`` when None.

        Raises:
            MemberLost, Stalled, GroupBroken: and the group is broken, as after any error that the ranks do not recover from.
        """
        loop = asyncio.get_running_loop()
        asked = loop.time()
        await self._turns.take(work.urgency)
        try:
            if self.broken or self.openings != opening:
                # Not this cell's doing, as the loss of a node is not.
                raise MemberLost(self._server.name, "while it served another cell", preempted=True)
            call = self._together(remote, awaited, seconds)
            return await serve(work, self._server, loop.time() - asked, call, self._supervision)
        finally:
            self._turns.give(self)

    async def _together(
        self,
        remote: Callable[[ActorHandle], Any],
        awaited: Callable[[Any], Ref],
        seconds: float | None = None,
    ) -> tuple[list[Any], list[Any]]:
        calls = [remote(member.handle) for member in self.members]
        try:
            results = await watch(
                self.members, all_ranks([awaited(call) for call in calls]), self._supervision, seconds
            )
        except Exception as error:
            cause = root_cause(error)
            # These are raised by all ranks at the same point, before or after a step as a whole.
            self.broken = not (
                isinstance(cause, Diverged | UserError | ObjectLostError) or is_storage_full(cause)
            )
            raise
        return calls, results

    @property
    def start_seconds(self) -> float:
        """How long ranks may stand still while they read or write whole models."""
        return self._supervision.policy.start_seconds


class LearnerSlot:
    """A place for one cell in a learner group. Errors of all its calls are those of ``LearnerGroup.call``."""

    def __init__(self, group: LearnerGroup, number: int) -> None:
        """A slot of an open group is taken up by ``begin_cell``."""
        self.group = group
        self._number = number
        self._opening = 0
        self._cell, self._step = "", 0

    async def begin_cell(self, cell: str, step: int, version: str, checkpoint: Path | None) -> Ref:
        """Take up a cell after so many steps; a reference to its weights."""
        self._opening = self.group.openings
        self._cell, self._step = cell, step
        return await self._weights(PhaseKind.TAKING_UP, "begin_cell", version, checkpoint)

    async def perturb(self, version: str) -> Ref:
        """Change every weight a little; a reference to the weights."""
        return await self._weights(PhaseKind.START_UP, "perturb", version)

    async def update(
        self,
        version: str,
        learning_rate: float,
        rollouts: Sequence[Ref],
        rewards: Sequence[Ref],
        work: Work,
    ) -> tuple[dict[str, float], Ref]:
        """One update, of ``work.step``, on a batch in parts; (metrics, reference to the new weights)."""
        calls, metrics = await self.group.call(
            self._opening,
            lambda rank: rank.update_on.options(num_returns=2).remote(
                self._number, version, learning_rate, *rollouts, *rewards
            ),
            lambda call: call[0],
            work,
        )
        self._step = work.step
        return metrics[0], calls[0][1]

    async def logprobs(self, rollouts: Ref) -> np.ndarray:
        """[T] the learner's log-probabilities of all response tokens."""
        _, values = await self.group.call(
            self._opening,
            lambda rank: rank.logprobs.remote(self._number, rollouts),
            lambda call: call,
            self._at_once(PhaseKind.START_UP),
        )
        return values[0]

    async def save(self, folder: Path) -> None:
        """Write a checkpoint to an empty folder. Before all updates that wait: there may be little time left for it."""
        await self.group.call(
            self._opening,
            lambda rank: rank.save.remote(self._number, folder),
            lambda call: call,
            self._at_once(PhaseKind.COMMIT),
            self.group.start_seconds,
        )

    def _at_once(self, kind: PhaseKind) -> Work:
        return Work(kind, self._cell, self._step, urgency=math.inf)

    async def _weights(self, kind: PhaseKind, method: str, *arguments: object) -> Ref:
        # Two results each: the small one is waited for, and brings an error of any rank; the weights stay where they are.
        calls, _ = await self.group.call(
            self._opening,
            lambda rank: getattr(rank, method).options(num_returns=2).remote(self._number, *arguments),
            lambda call: call[0],
            self._at_once(kind),
            self.group.start_seconds,
        )
        return calls[0][1]


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
