"""A pool whose members serve any cell: samplers, graders."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ray import ObjectRefGenerator
from ray.actor import ActorHandle
from ray.exceptions import ObjectLostError

from grids.errors import UserError
from orchestrator.pools.supervision import PoolMember, Supervision, all_of, persistently, watch
from orchestrator.pools.turns import Turns
from orchestrator.pools.work import Server, Work, serve

Ref = Any
"""A reference to an object in Ray's store; data passes the controller only as such."""


class PoolLost(RuntimeError):
    """No member of a pool can be started any more."""


class SharedPool:
    """Members that serve any cell: each call takes a free one, and a lost one is replaced while the others serve."""

    def __init__(self, members: list[PoolMember], supervision: Supervision, accelerators: int) -> None:
        """Members whose actors have a method ``start``, each with so many accelerators."""
        self.members = members
        self._accelerators = accelerators
        self._supervision = supervision
        self._turns: Turns[PoolMember] = Turns()
        self._replacements: set[asyncio.Task[None]] = set()
        self._given_up: dict[PoolMember, PoolLost] = {}

    @property
    def free(self) -> int:
        """Members that would serve a call at once."""
        return self._turns.free

    async def start(self) -> None:
        """Start all members; raises what keeps one from starting."""
        await all_of(*(self._open(member) for member in self.members))

    async def value(self, method: str, *arguments: object, work: Work) -> Any:
        """The result of a call to a free member; of several that wait the most urgent is served first.

        ``work`` is what the call is about.

        Raises:
            MemberLost, Stalled: that member is replaced; the call can be repeated.
            PoolLost: there is no member any more.
        """
        return await self._call(
            lambda handle: getattr(handle, method).remote(*arguments), lambda call: call, work
        )

    async def reference_and_value(self, method: str, *arguments: object, work: Work) -> tuple[Ref, Any]:
        """Of a call with two results: (reference to the first, which stays where it is, the second). Raises as ``value``."""
        calls: list[list[Ref]] = []

        def remote(handle: ActorHandle) -> list[Ref]:
            calls.append(getattr(handle, method).options(num_returns=2).remote(*arguments))
            return calls[-1]

        value = await self._call(remote, lambda call: call[1], work)
        return calls[0][0], value

    async def values_and_references(
        self,
        method: str,
        *arguments: object,
        work: Work,
        each: Callable[[Any, Ref], None] = lambda value, reference: None,
        member: PoolMember | None = None,
    ) -> list[tuple[Any, Ref]]:
        """Pairs that a call yields: a value, and a reference to what stays where it is. Raises as ``value``.

        Args:
            method: a generator, which yields what belongs to a pair one after the other.
            arguments: its arguments.
            work: what the call is about.
            each: told of every pair as it comes.
            member: the one to ask; the next free one when None.
        """
        pairs: list[tuple[Any, Ref]] = await self._call(
            lambda handle: getattr(handle, method).options(num_returns="streaming").remote(*arguments),
            lambda stream: _pairs(stream, each),
            work,
            member,
        )
        return pairs

    async def _call(
        self,
        remote: Callable[[ActorHandle], Any],
        awaited: Callable[[Any], Awaitable[Any]],
        work: Work,
        wanted: PoolMember | None = None,
    ) -> Any:
        if wanted in self._given_up:
            raise self._given_up[wanted]
        loop = asyncio.get_running_loop()
        asked = loop.time()
        member = await self._turns.take(work.urgency, wanted, work.hurry)
        try:
            server = Server(member.role, self._accelerators)
            call = watch([member], awaited(remote(member.handle)), self._supervision)
            result = await serve(work, server, loop.time() - asked, call, self._supervision)
        except (asyncio.CancelledError, UserError, ObjectLostError):
            # The call was given up, or it was at fault itself: the member is as it was.
            self._turns.give(member)
            raise
        except Exception:
            # Also after an error that its process survived: what it left half done must not reach the next call.
            self._replace(member)
            raise
        self._turns.give(member)
        return result

    def _replace(self, member: PoolMember) -> None:
        task = asyncio.create_task(self._open_or_give_up(member))
        self._replacements.add(task)
        task.add_done_callback(self._replacements.discard)

    async def _open_or_give_up(self, member: PoolMember) -> None:
        try:
            await self._open(member)
        except Exception as error:
            self._supervision.say(f"{member.role} is given up: {error}")
            self._given_up[member] = PoolLost(f"{member.role} cannot be started: {error}")
            self._turns.refuse(member, self._given_up[member])
            if len(self._given_up) == len(self.members):
                kind = member.role.split()[0]
                self._turns.close(PoolLost(f"no {kind} can be started: {error}"))

    async def _open(self, member: PoolMember) -> None:
        async def start() -> None:
            await member.open()
            supervision = self._supervision
            await watch([member], member.handle.start.remote(), supervision, supervision.policy.start_seconds)

        await persistently(start, member.role, self._supervision.policy, self._supervision.say)
        self._turns.give(member)


REFERENCE_SECONDS = 0.001
"""How often it is looked whether a reference has come whose value has; they follow each other at once."""


async def _pairs(stream: ObjectRefGenerator, each: Callable[[Any, Ref], None]) -> list[tuple[Any, Ref]]:
    pairs: list[tuple[Any, Ref]] = []
    async for value in stream:
        # Ray's way to wait for the next one (2.60) would bring here what the reference stands for.
        while not stream.next_ready() and not stream.is_finished():
            await asyncio.sleep(REFERENCE_SECONDS)
        pairs.append((await value, await anext(stream)))
        each(*pairs[-1])
    await stream.completed()  # raises what befell it between the two of a pair
    return pairs
