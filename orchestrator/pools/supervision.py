"""One process of a pool: recorded before it is used, watched while it works, ended for certain when it is given up."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle

from grids.spec import FailuresSpec
from orchestrator.clock import Clock
from orchestrator.failures.decisions import Action, decide
from orchestrator.failures.faults import MemberLost, classify
from orchestrator.failures.ray_errors import first_line
from orchestrator.pools.members import Member, kill, node_is_alive, record
from orchestrator.pools.watch import watched
from orchestrator.store.cell_state import CellState
from orchestrator.store.phase_log import PhaseRecord

T = TypeVar("T")

FULL_STORAGE_SECONDS = 10.0
"""How often a member that could not be recorded on a full disk is started again."""
PLACE_SECONDS = 30.0
"""How long a member may wait for its place before people are told; told again each time the wait has doubled."""


@dataclass(frozen=True)
class Supervision:
    """What the members of all pools of a run share."""

    run_dir: Path
    epoch: int
    fence: Callable[[], None]
    """Raises ``LeaseLost`` when another controller has taken over."""
    policy: FailuresSpec
    clock: Clock
    say: Callable[[str], None]
    on_phase: Callable[[PhaseRecord], None]
    """Told of each phase that was served. Returns at once and never raises."""


class PoolMember:
    """A place in a pool, and the actor that fills it."""

    def __init__(self, role: str, create: Callable[[], ActorHandle], supervision: Supervision) -> None:
        """``create`` makes a new actor; ``open`` calls it."""
        self.role = role
        self._create = create
        self._supervision = supervision
        self._handle: ActorHandle | None = None
        self._process: Member | None = None

    @property
    def handle(self) -> ActorHandle:
        """The present actor."""
        if self._handle is None:
            raise RuntimeError(f"{self.role} has not been started")
        return self._handle

    @property
    def process(self) -> Member:
        """The present actor's process."""
        if self._process is None:
            raise RuntimeError(f"{self.role} has not been started")
        return self._process

    async def open(self) -> None:
        """A new actor in place of the present one, as soon as the cluster has room for it.

        Raises:
            MemberLost: it died before it could be used.
        """
        await self.end()
        self._handle = self._create()
        try:
            self._process = await self._identity()
        except ray.exceptions.RayActorError as error:
            raise await self.lost(error) from error
        supervision = self._supervision
        await asyncio.to_thread(
            record, supervision.run_dir, supervision.epoch, self._process, supervision.fence
        )

    async def _identity(self) -> Member:
        """The new actor's process. Waits without limit for its place in the cluster, but not in silence."""
        asked = asyncio.ensure_future(self.handle.identify.remote(self.role))
        waited, patience = 0.0, PLACE_SECONDS
        try:
            while not (await asyncio.wait({asked}, timeout=patience))[0]:
                waited += patience
                patience = waited
                self._supervision.say(
                    f"{self.role} has not come up for {waited:.0f} s: the cluster has no place for it, or starts it slowly"
                )
            return asked.result()
        finally:
            asked.cancel()

    async def end(self) -> None:
        """End the actor and its process, also one that no longer listens."""
        self.let_go()
        process, self._process = self._process, None
        if process is not None:
            await kill(process)

    def let_go(self) -> None:
        """Tell Ray to end the actor, without waiting for it."""
        if self._handle is not None:
            ray.kill(self._handle)
            self._handle = None

    async def lost(self, error: ray.exceptions.RayActorError) -> MemberLost:
        """How this member was lost."""
        text = str(error)
        process = self._process
        on_dead_node = process is not None and not await asyncio.to_thread(node_is_alive, process.node_id)
        preempted = on_dead_node or error.preempted or "node has died" in text
        out_of_memory = "running low on memory" in text  # words of Ray's memory monitor
        how = "its node died" if preempted else _cause_of_death(text)
        return MemberLost(self.role, how, preempted=preempted, out_of_memory=out_of_memory)


def _cause_of_death(text: str) -> str:
    """What Ray knows, without its general advice."""
    known = re.search(
        r"Worker exit type: (\w+) Worker exit detail: (.*?)(?: Some common causes|$)", text, re.M
    )
    return f"its process died ({known[1]}: {known[2]})" if known else first_line(RuntimeError(text))


async def watch(
    members: Sequence[PoolMember],
    result: Awaitable[T],
    supervision: Supervision,
    seconds: float | None = None,
) -> T:
    """The result of a call to these members.

    Args:
        members: who work on it, together.
        result: of the call.
        supervision: of their pool.
        seconds: how long nothing may move; the policy's ``stall_seconds`` when None.

    Raises:
        MemberLost: one of them died.
        Stalled: nothing moved for that long; carries their stacks.
    """
    actors = [(member.process, member.handle.signs_of_life.remote) for member in members]
    limit = supervision.policy.stall_seconds if seconds is None else seconds
    try:
        return await watched(result, actors, limit, supervision.clock.monotonic)
    except ray.exceptions.RayActorError as error:
        dead = [member for member in members if member.handle._actor_id.hex() == error.actor_id]
        raise await (dead or members)[0].lost(error) from error


async def all_of(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Results of all, in order; the first error cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
        return [task.result() for task in tasks]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
    raise first  # out here, where it keeps its own cause


async def persistently(
    act: Callable[[], Awaitable[None]], name: str, policy: FailuresSpec, say: Callable[[str], None]
) -> None:
    """Do what may lose processes on the way as often as the policy lets a cell try, then raise its last error."""
    state = CellState(cell=name)
    while True:
        try:
            return await act()
        except Exception as error:
            decision = decide(classify(error), state, policy)
            if decision.action not in (Action.NEW_ATTEMPT, Action.PAUSE):
                raise
            state = replace(state, spent=decision.spent)
            # Full storage is waited out: cells pause meanwhile, each when it meets it.
            delay = FULL_STORAGE_SECONDS if decision.action is Action.PAUSE else decision.delay_seconds
            say(f"{name}: {decision.reason}; tried again in {delay:.3g} s")
            await asyncio.sleep(delay)
