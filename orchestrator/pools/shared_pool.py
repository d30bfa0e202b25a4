"""A pool whose members serve any cell: samplers, graders."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import ObjectLostError

from grids.errors import UserError
from orchestrator.pools.supervision import PoolMember, Supervision, all_of, persistently, watch

Ref = Any
"""A reference to an object in Ray's store; data passes the controller only as such."""

WANTED_MEMBER_POLL_SECONDS = 0.01


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
        self._given_up: list[PoolMember] = []
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
            if wanted in self._given_up:
                raise PoolLost(f"{wanted.role} cannot be started: {self._fault}")
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
        except asyncio.CancelledError:
            if waiting.done():
                # It got one in the very moment that its caller gave up.
                self._free.put_nowait(waiting.result())
            raise
        finally:
            lost.cancel()
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
            self._given_up.append(member)
            if len(self._given_up) == len(self.members):
                self._lost.set()

    async def _open(self, member: PoolMember) -> None:
        async def start() -> None:
            await member.open()
            supervision = self._supervision
            await watch([member], member.handle.start.remote(), supervision, supervision.policy.start_seconds)

        await persistently(start, member.role, self._supervision.policy, self._supervision.say)
        self._free.put_nowait(member)
