"""Ranks of a learner group, called together: which error stands for all of them, and when the group is no longer fit for use."""

import asyncio
import errno
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, cast

import pytest
import ray.exceptions

from grids.errors import UserError
from grids.spec import FailuresSpec
from orchestrator.clock import SYSTEM_CLOCK
from orchestrator.pools import learner_group
from orchestrator.pools.learner_group import GroupBroken, LearnerGroup, all_ranks
from orchestrator.pools.members import Member
from orchestrator.pools.placement import Placement
from orchestrator.pools.supervision import PoolMember, Supervision
from orchestrator.pools.work import Work
from orchestrator.store.phase_log import PhaseKind, PhaseRecord
from workers.learning import Diverged


async def result(value: Any, seconds: float = 0.0) -> Any:
    await asyncio.sleep(seconds)
    if isinstance(value, Exception):
        raise value
    return value


def ends(*results: Coroutine[Any, Any, Any]) -> tuple[Any, float]:
    """What ``all_ranks`` gives or raises, and the seconds that it took."""

    async def run() -> Any:
        try:
            return await asyncio.wait_for(all_ranks(list(results)), 10)
        except Exception as error:
            return error

    started = time.monotonic()
    return asyncio.run(run()), time.monotonic() - started


def test_results_come_in_the_order_of_ranks() -> None:
    values, _ = ends(result("a", 0.02), result("b"), result("c", 0.01))
    assert values == ["a", "b", "c"]


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_dead_rank_is_raised_at_once(dead: int) -> None:
    death = ray.exceptions.RayActorError()
    results = [result(death if rank == dead else "fine", 0.0 if rank == dead else 60.0) for rank in range(3)]
    error, seconds = ends(*results)
    assert error is death
    assert seconds < 5


def test_a_dead_rank_is_raised_also_when_another_failed_of_it() -> None:
    death = ray.exceptions.RayActorError()
    error, _ = ends(result(RuntimeError("connection closed by peer")), result(death), result(0, 60.0))
    assert error is death


def test_an_error_that_all_ranks_agree_on_is_theirs() -> None:
    error, _ = ends(result(Diverged("the loss is nan")), result(Diverged("the loss is nan"), 0.02))
    assert isinstance(error, Diverged)


def test_ranks_that_fail_in_different_ways_have_broken_the_group() -> None:
    error, _ = ends(result(ValueError("one")), result(RuntimeError("other"), 0.01))
    assert isinstance(error, GroupBroken) and "2 of 2 ranks failed: one" in str(error)


@pytest.mark.parametrize("others", ["hang", "succeed"])
def test_ranks_that_fail_while_others_hang_or_succeed_have_broken_the_group(
    monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    monkeypatch.setattr(learner_group, "RANKS_AGREE_SECONDS", 0.05)
    rest = [result("fine", 60.0 if others == "hang" else 0.01) for _ in range(2)]
    error, seconds = ends(result(ValueError("one")), *rest)
    assert isinstance(error, GroupBroken) and "1 of 3 ranks failed: one" in str(error)
    assert isinstance(error.__cause__, ValueError)
    assert seconds < 5 and (others == "succeed" or seconds >= 0.05)


def test_no_rank_is_waited_for_any_more_once_the_call_is_cancelled() -> None:
    ended = []

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def run() -> None:
        call = asyncio.ensure_future(all_ranks([hang(), hang()]))
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.sleep(0)

    asyncio.run(run())
    assert ended == [True, True]


class TwoResults:
    """A method of an actor with two results."""

    def remote(self, *arguments: Any) -> list[Any]:
        return [result({}), "weights"]


class Rank:
    """A member and its actor, whose ``save`` ends as told."""

    def __init__(self, number: int, end: Any) -> None:
        self.role = f"learner 0 rank {number}"
        self.process = Member(self.role, "node", "nowhere", 1, 0.0)
        self.handle = self.save = self.signs_of_life = self
        self.begin_cell = self.update_on = self
        self._actor_id = f"{number:02d}".encode()
        self._end = end

    def remote(self, *arguments: Any) -> Coroutine[Any, Any, Any]:
        return result(self._end if arguments else 0)

    def options(self, num_returns: int) -> "TwoResults":
        return TwoResults()

    async def lost(self, error: Exception) -> RuntimeError:
        return RuntimeError(f"{self.role} was lost")


PLACE = Placement("learner 0", [], print)
"""Of a group that nobody opens."""


@pytest.mark.parametrize(
    ("end", "raised", "broken"),
    [
        (Diverged("nan"), Diverged, False),
        (UserError("unfit"), UserError, False),
        (OSError(errno.ENOSPC, "full"), OSError, False),
        (ray.exceptions.ObjectLostError("ab", None, ""), ray.exceptions.ObjectLostError, False),
        (OSError(errno.EIO, "torn"), OSError, True),
        (RuntimeError("unknown"), RuntimeError, True),
        (ray.exceptions.RayActorError(), RuntimeError, True),
    ],
)
def test_only_an_error_that_all_ranks_recover_from_leaves_the_group_fit(
    tmp_path: Path, end: Exception, raised: type[Exception], broken: bool
) -> None:
    shared = Supervision(tmp_path, 1, lambda: None, FailuresSpec(), SYSTEM_CLOCK, print, lambda _: None)
    group = LearnerGroup(cast(list[PoolMember], [Rank(0, end), Rank(1, end)]), PLACE, 1, shared, 2)
    group.broken = False
    with pytest.raises(raised):
        asyncio.run(group.slots[0].save(tmp_path))
    assert group.broken is broken


def test_full_storage_of_one_rank_alone_breaks_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_group, "RANKS_AGREE_SECONDS", 0.01)
    shared = Supervision(tmp_path, 1, lambda: None, FailuresSpec(), SYSTEM_CLOCK, print, lambda _: None)
    ranks = [Rank(0, OSError(errno.ENOSPC, "full")), Rank(1, None)]
    group = LearnerGroup(cast(list[PoolMember], ranks), PLACE, 1, shared, 2)
    group.broken = False
    with pytest.raises(GroupBroken):
        asyncio.run(group.slots[0].save(tmp_path))
    assert group.broken


def test_calls_of_a_slot_are_recorded_as_the_groups_with_cell_and_step(tmp_path: Path) -> None:
    records: list[PhaseRecord] = []
    shared = Supervision(tmp_path, 1, lambda: None, FailuresSpec(), SYSTEM_CLOCK, print, records.append)
    ranks = [Rank(0, None), Rank(1, None)]
    group = LearnerGroup(cast(list[PoolMember], ranks), PLACE, 1, shared, 6)
    group.broken = False

    async def train() -> None:
        slot = group.slots[0]
        await slot.begin_cell("a cell", 4, "a cell/step-4", None)
        await slot.update("a cell/step-5", 0.1, [], [], Work(PhaseKind.LEARNING, "a cell", 5, 8, 40))
        await slot.save(tmp_path)

    asyncio.run(train())
    shown = [(record.kind, record.step, record.sequences, record.tokens) for record in records]
    assert shown == [
        (PhaseKind.TAKING_UP, 4, 0, 0),
        (PhaseKind.LEARNING, 5, 8, 40),
        (PhaseKind.COMMIT, 5, 0, 0),
    ]
    assert {(record.member, record.cell, record.accelerators) for record in records} == {
        ("learner 0", "a cell", 6)
    }
