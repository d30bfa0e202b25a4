"""A shared pool over stand-ins for its processes: no member is lost to it by a caller that gives up, none is waited for in vain."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import ray.exceptions

from grids.errors import UserError
from grids.spec import FailuresSpec
from orchestrator.clock import SYSTEM_CLOCK
from orchestrator.failures.faults import MemberLost
from orchestrator.pools.members import Member
from orchestrator.pools.shared_pool import PoolLost, SharedPool
from orchestrator.pools.supervision import PoolMember, Supervision
from orchestrator.pools.work import Work
from orchestrator.store.phase_log import PhaseKind, PhaseRecord

Act = Callable[["Place", Any], Awaitable[Any]]
WORK = Work(PhaseKind.SAMPLING, "a cell")


class Remote:
    """A method of an actor."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call

    def remote(self, *arguments: Any) -> Any:
        return self._call(*arguments)


class Pairs:
    """A method of an actor that yields pairs, here a single one."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call

    def options(self, num_returns: str) -> "Remote":
        assert num_returns == "streaming"
        return Remote(lambda *arguments: cast(Any, PairStream(self._call(*arguments))))


class PairStream:
    """What Ray hands out for a call that yields."""

    def __init__(self, value: Awaitable[Any]) -> None:
        self._items = [value, "reference"]

    def __aiter__(self) -> "PairStream":
        return self

    async def __anext__(self) -> Any:
        if not self._items:
            raise StopAsyncIteration
        return self._items.pop(0)

    def next_ready(self) -> bool:
        return True

    async def completed(self) -> None:
        """All is well."""


class Place:
    """A member whose actor does ``act``, and which can be kept from starting."""

    def __init__(self, number: int, act: Act) -> None:
        self.role = f"sampler {number}"
        self.process = Member(self.role, "node", "nowhere", 1, 0.0)
        self.opened = 0
        self.serving = 0
        self.can_start = True
        self._act = act

    @property
    def handle(self) -> "Place":
        return self

    async def open(self) -> None:
        await asyncio.sleep(0)
        self.opened += 1
        if not self.can_start:
            raise MemberLost(self.role, "it cannot start")

    async def lost(self, error: Exception) -> MemberLost:
        return MemberLost(self.role, "its process died")

    # The actor

    _actor_id = b""

    @property
    def start(self) -> Remote:
        return Remote(self._nothing)

    @property
    def signs_of_life(self) -> Remote:
        return Remote(self._nothing)

    @property
    def answer(self) -> Remote:
        return Remote(self._answer)

    @property
    def sample(self) -> Pairs:
        return Pairs(self._answer)

    async def _nothing(self) -> int:
        return 0

    async def _answer(self, question: Any) -> Any:
        assert self.serving == 0, "two calls at once"
        self.serving += 1
        try:
            return await self._act(self, question)
        finally:
            self.serving -= 1


async def answer_soon(place: Place, question: Any) -> Any:
    await asyncio.sleep(0.001)
    return question


def make_pool(
    tmp_path: Path,
    members: int,
    act: Act = answer_soon,
    on_phase: Callable[[PhaseRecord], None] = lambda _: None,
) -> tuple[SharedPool, list[Place], list[str]]:
    """A pool, its places, and what it says."""
    policy = FailuresSpec(backoff_seconds=0.0, own_failures=2)
    said: list[str] = []
    shared = Supervision(tmp_path, 1, lambda: None, policy, SYSTEM_CLOCK, said.append, on_phase)
    places = [Place(number, act) for number in range(members)]
    return SharedPool(cast(list[PoolMember], places), shared, 2), places, said


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


async def within(seconds: float, work: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(work, seconds)


def test_a_caller_that_gives_up_at_any_turn_of_its_wait_takes_no_member_with_it(tmp_path: Path) -> None:
    async def test() -> None:
        for turns in range(40):
            release = asyncio.Event()

            async def held(place: Place, question: Any, release: asyncio.Event = release) -> Any:
                if question == "first":
                    await release.wait()
                return question

            pool, _, _ = make_pool(tmp_path, 1, held)
            await pool.start()
            first = asyncio.ensure_future(pool.value("answer", "first", work=WORK))
            await asyncio.sleep(0.001)
            waiting = asyncio.ensure_future(pool.value("answer", "second", work=WORK))
            await asyncio.sleep(0.001)
            # From here on the member becomes free, goes to the waiting caller, serves it: in one of these turns it gives up.
            release.set()
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert await first == "first"
            assert await within(5, pool.value("answer", "third", work=WORK)) == "third", turns

    run(test())


@pytest.mark.parametrize("wanted", [False, True])
def test_callers_that_give_up_before_they_are_served_take_no_member_with_them(
    tmp_path: Path, wanted: bool
) -> None:
    async def test() -> None:
        pool, places, _ = make_pool(tmp_path, 2)
        await pool.start()
        for turns in range(40):
            member = cast(PoolMember, places[1]) if wanted else None
            call = asyncio.ensure_future(pool.values_and_references("sample", "x", member=member, work=WORK))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            both = asyncio.gather(pool.value("answer", 1, work=WORK), pool.value("answer", 2, work=WORK))
            assert await within(5, both) == [1, 2], turns
            assert [place.opened for place in places] == [1, 1]

    run(test())


def test_a_lost_member_is_replaced_while_the_others_serve(tmp_path: Path) -> None:
    async def work(place: Place, question: Any) -> Any:
        await asyncio.sleep(0)
        if question == "die":
            raise ray.exceptions.RayActorError
        return place.role

    async def test() -> None:
        pool, places, _ = make_pool(tmp_path, 2, work)
        await pool.start()
        first = cast(PoolMember, places[0])
        with pytest.raises(MemberLost, match="sampler 0 was lost: its process died"):
            await pool.values_and_references("sample", "die", member=first, work=WORK)
        assert await pool.value("answer", "?", work=WORK) == "sampler 1"
        pairs = await within(5, pool.values_and_references("sample", "?", member=first, work=WORK))
        assert pairs == [("sampler 0", "reference")]
        assert [place.opened for place in places] == [2, 1]

    run(test())


@pytest.mark.parametrize(
    "error", [UserError("the question is at fault"), ray.exceptions.ObjectLostError("ab", None, "")]
)
def test_a_call_at_fault_itself_costs_no_member(tmp_path: Path, error: Exception) -> None:
    async def work(place: Place, question: Any) -> Any:
        if question == "faulty":
            raise error
        return question

    async def test() -> None:
        pool, places, _ = make_pool(tmp_path, 1, work)
        await pool.start()
        with pytest.raises(type(error)):
            await pool.value("answer", "faulty", work=WORK)
        assert await within(5, pool.value("answer", "sound", work=WORK)) == "sound"
        assert places[0].opened == 1

    run(test())


def test_a_member_that_fails_to_start_is_tried_as_often_as_the_policy_says(tmp_path: Path) -> None:
    async def work(place: Place, question: Any) -> Any:
        raise RuntimeError("half done")

    async def test() -> None:
        pool, (place,), said = make_pool(tmp_path, 1, work)
        await pool.start()
        place.can_start = False
        with pytest.raises(RuntimeError, match="half done"):
            await pool.value("answer", "?", work=WORK)
        with pytest.raises(PoolLost, match=r"no sampler can be started: .*it cannot start"):
            await within(5, pool.value("answer", "?", work=WORK))
        # Once for the first start; once and two retries for the replacement.
        assert place.opened == 1 + 3
        assert any("sampler 0 is given up" in line for line in said)

    run(test())


def test_the_loss_of_all_members_is_told_to_callers_that_wait_and_to_later_ones(tmp_path: Path) -> None:
    async def work(place: Place, question: Any) -> Any:
        await asyncio.sleep(0.001)
        place.can_start = False
        raise ray.exceptions.RayActorError

    async def test() -> None:
        pool, _, _ = make_pool(tmp_path, 2, work)
        await pool.start()
        calls = [asyncio.ensure_future(pool.value("answer", number, work=WORK)) for number in range(5)]
        ends = await within(5, asyncio.gather(*calls, return_exceptions=True))
        assert sorted(type(end).__name__ for end in ends) == ["MemberLost"] * 2 + ["PoolLost"] * 3
        with pytest.raises(PoolLost):
            await within(5, pool.value("answer", "later", work=WORK))

    run(test())


def test_one_member_that_is_left_serves_all(tmp_path: Path) -> None:
    async def work(place: Place, question: Any) -> Any:
        await asyncio.sleep(0)
        if place.role == "sampler 0":
            place.can_start = False
            raise ray.exceptions.RayActorError
        return question

    async def test() -> None:
        pool, _, _ = make_pool(tmp_path, 2, work)
        await pool.start()
        with pytest.raises(MemberLost):
            await pool.value("answer", "first", work=WORK)
        assert await within(
            5, asyncio.gather(*(pool.value("answer", i, work=WORK) for i in range(6)))
        ) == list(range(6))

    run(test())


@pytest.mark.parametrize("others", [0, 1])
def test_a_wanted_member_that_was_given_up_is_not_waited_for(tmp_path: Path, others: int) -> None:
    async def work(place: Place, question: Any) -> Any:
        await asyncio.sleep(0)
        if place.role == "sampler 0":
            place.can_start = False
            raise ray.exceptions.RayActorError
        return question

    async def test() -> None:
        pool, places, _ = make_pool(tmp_path, 1 + others, work)
        await pool.start()
        wanted = cast(PoolMember, places[0])
        with pytest.raises(MemberLost):
            await pool.values_and_references("sample", "?", member=wanted, work=WORK)
        with pytest.raises(PoolLost, match="be started"):
            await within(5, pool.values_and_references("sample", "?", member=wanted, work=WORK))
        if others:
            assert await within(5, pool.value("answer", "?", work=WORK)) == "?"

    run(test())


def test_each_call_is_recorded_with_its_wait_its_time_and_how_it_ended(tmp_path: Path) -> None:
    async def act(place: Place, question: Any) -> Any:
        await asyncio.sleep(0.05)
        if question == "faulty":
            raise UserError("the question is at fault")
        return question

    async def test() -> None:
        records: list[PhaseRecord] = []
        pool, _, _ = make_pool(tmp_path, 1, act, records.append)
        await pool.start()
        before = time.time()
        first = replace(WORK, step=3, sequences=8, count_tokens=len)
        faulty = replace(WORK, kind=PhaseKind.EVALUATION, tokens=5, urgency=-1.0)
        await asyncio.gather(
            pool.value("answer", "four", work=first),
            pool.value("answer", "faulty", work=faulty),
            return_exceptions=True,
        )
        done, failed = records
        named = (done.member, done.kind, done.cell, done.step, done.sequences, done.tokens, done.accelerators)
        assert named == ("sampler 0", PhaseKind.SAMPLING, "a cell", 3, 8, 4, 2)
        assert (failed.kind, failed.tokens, failed.failed, done.failed) == (
            PhaseKind.EVALUATION,
            5,
            True,
            False,
        )
        assert done.waited_seconds < 0.04 <= done.busy_seconds < 2
        assert failed.waited_seconds >= 0.04 and failed.busy_seconds >= 0.04
        assert before <= done.started_at and done.ended_at <= failed.started_at + 0.01

    run(test())


def test_a_call_that_is_given_up_is_recorded_only_once_it_was_served(tmp_path: Path) -> None:
    async def act(place: Place, question: Any) -> Any:
        await asyncio.sleep(60)

    async def test() -> None:
        records: list[PhaseRecord] = []
        pool, _, _ = make_pool(tmp_path, 1, act, records.append)
        await pool.start()
        calls = [asyncio.ensure_future(pool.value("answer", i, work=replace(WORK, step=i))) for i in (1, 2)]
        await asyncio.sleep(0.02)
        for call in reversed(calls):
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert [(record.step, record.failed) for record in records] == [(1, True)]

    run(test())
