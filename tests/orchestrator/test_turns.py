"""Turns: the most urgent caller is served first, and nobody who gives up takes a member along."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from orchestrator.pools.turns import Turns


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


async def asked(turns: Turns[str], urgency: float, wanted: str | None = None) -> "asyncio.Task[str]":
    """A caller that waits (or is served) by now."""
    task = asyncio.create_task(turns.take(urgency, wanted))
    await asyncio.sleep(0)
    return task


async def order_of_service(turns: Turns[str], callers: dict[str, "asyncio.Task[str]"], member: str) -> str:
    """Give one member as often as it is taken; names of the callers in the order in which they got it."""
    served = ""
    while waiting := {name: task for name, task in callers.items() if name not in served}:
        turns.give(member)
        await asyncio.wait(waiting.values(), return_when=asyncio.FIRST_COMPLETED)
        served += "".join(name for name, task in waiting.items() if task.done())
    return served


def test_the_most_urgent_caller_is_served_first_and_equals_in_the_order_of_their_coming() -> None:
    async def test() -> None:
        turns: Turns[str] = Turns()
        urgencies = {"a": 1.0, "b": 3.0, "c": -1.0, "d": 3.0, "e": 2.0}
        callers = {name: await asked(turns, urgency) for name, urgency in urgencies.items()}
        assert await order_of_service(turns, callers, "engine") == "bdeac"

    run(test())


@pytest.mark.parametrize("wanted", [None, "engine"])
def test_a_caller_in_a_hurry_is_served_before_those_that_were_more_urgent(wanted: str | None) -> None:
    async def test() -> None:
        turns: Turns[str] = Turns()
        loop = asyncio.get_running_loop()
        hurries: dict[str, asyncio.Future[float]] = {name: loop.create_future() for name in "cd"}
        urgencies = {"a": 1.0, "b": 3.0, "c": -1.0, "d": -1.0, "e": 2.0}
        callers = {}
        for name, urgency in urgencies.items():
            callers[name] = asyncio.create_task(turns.take(urgency, wanted, hurries.get(name)))
            await asyncio.sleep(0)
        hurries["d"].set_result(2.5)
        await asyncio.sleep(0)
        assert await order_of_service(turns, callers, "engine") == "bdeac"
        # What waits no more is not served once more.
        turns.give("engine")
        assert turns.free == 1
        late = asyncio.create_task(turns.take(-1.0, wanted, hurries["d"]))
        assert await late == "engine"
        hurries["c"].set_result(9.0)
        await asyncio.sleep(0)
        turns.give("engine")
        assert turns.free == 1

    run(test())


def test_a_caller_that_comes_in_a_hurry_need_not_wait_for_the_less_urgent() -> None:
    async def test() -> None:
        turns: Turns[str] = Turns()
        hurry: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        hurry.set_result(5.0)
        callers = {"a": await asked(turns, 1.0), "b": asyncio.create_task(turns.take(-1.0, hurry=hurry))}
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert await order_of_service(turns, callers, "engine") == "ba"

    run(test())


def test_a_caller_that_wants_one_member_waits_for_it_and_holds_up_nobody() -> None:
    async def test() -> None:
        turns: Turns[str] = Turns()
        turns.give("x")
        wanting = await asked(turns, 9.0, "y")
        assert await turns.take(0.0) == "x"
        other = await asked(turns, 0.0)
        turns.give("x")
        assert await other == "x" and not wanting.done()
        turns.give("y")
        assert await wanting == "y"

    run(test())


def test_a_caller_that_wants_just_this_member_takes_its_turn_among_all() -> None:
    async def test() -> None:
        turns: Turns[str] = Turns()
        callers = {
            name: await asked(turns, urgency, wanted)
            for name, urgency, wanted in (
                ("a", 1.0, None),
                ("b", 2.0, "x"),
                ("c", 2.0, None),
                ("d", 1.0, "x"),
                ("e", 3.0, None),
            )
        }
        assert await order_of_service(turns, callers, "x") == "ebcad"

    run(test())


@pytest.mark.parametrize("moment", ["before", "just after"])
def test_a_caller_that_gives_up_leaves_its_turn_to_the_next(moment: str) -> None:
    async def test() -> None:
        turns: Turns[str] = Turns()
        first, second = await asked(turns, 2.0), await asked(turns, 1.0)
        if moment == "before":
            first.cancel()
            turns.give("engine")
        else:
            turns.give("engine")
            first.cancel()
        assert await asyncio.wait_for(second, 5) == "engine"
        assert (await asyncio.gather(first, return_exceptions=True))[0].__class__ is asyncio.CancelledError
        assert turns.free == 0

    run(test())


def test_closed_turns_tell_everyone_who_waits_and_everyone_who_comes() -> None:
    async def test() -> None:
        turns: Turns[str] = Turns()
        waiting, wanting = await asked(turns, 0.0), await asked(turns, 0.0, "x")
        turns.refuse("x", RuntimeError("x is gone"))
        assert [str(end) for end in await asyncio.gather(wanting, return_exceptions=True)] == ["x is gone"]
        assert not waiting.done()
        turns.close(RuntimeError("all are gone"))
        for caller in (waiting, await asked(turns, 0.0)):
            assert [str(end) for end in await asyncio.gather(caller, return_exceptions=True)] == [
                "all are gone"
            ]

    run(test())
