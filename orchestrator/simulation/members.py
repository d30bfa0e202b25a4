"""Members of pools in virtual time: they serve in the turns of real pools, are busy for modelled times, and die."""

import asyncio
from array import array
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from time import perf_counter

from orchestrator.failures.faults import MemberLost
from orchestrator.pools.turns import Turns
from orchestrator.scheduling.costs import CostModel
from orchestrator.simulation.conditions import Conditions
from orchestrator.store.phase_log import PhaseKind, PhaseRecord


class Decision(StrEnum):
    """What scheduler and controller decide, or work out for it."""

    MEMBER = "who a free member serves"
    LEFT = "what is left of a cell"
    NEXT_CELL = "which cell a slot takes"
    WAITING = "where a cell stands in line"
    COSTS = "what a phase tells of costs"


class Observer:
    """What a simulation sees: phases, from which the costs are learnt as in a real run, and how long decisions take."""

    def __init__(self, costs: CostModel) -> None:
        """``costs`` are what decisions rest on."""
        self.costs = costs
        self.busy: defaultdict[str, float] = defaultdict(float)
        """Seconds of all members of a pool (``sampler``, ``learner``, ``grader``)."""
        self.accelerator_seconds: defaultdict[PhaseKind, float] = defaultdict(float)
        """Of phases that came to their ends."""
        self.broken_off = 0.0
        """Accelerator-seconds of those that did not."""
        self.losses: defaultdict[str, int] = defaultdict(int)
        """Members lost, by pool."""
        self.phases = 0
        self.decisions: dict[Decision, array[float]] = {kind: array("d") for kind in Decision}
        """Seconds of a real clock, for each decision of a kind."""

    def record(self, record: PhaseRecord) -> None:
        """A phase has ended."""
        self.phases += 1
        self.busy[record.member.partition(" ")[0]] += record.busy_seconds
        work = record.busy_seconds * record.accelerators
        if record.failed:
            self.broken_off += work
        else:
            self.accelerator_seconds[record.kind] += work
        started = perf_counter()
        self.costs.observe(record)
        self.decided(Decision.COSTS, started)

    def decided(self, kind: Decision, started: float) -> None:
        """A decision has been made that began at this time of ``perf_counter``."""
        self.decisions[kind].append(perf_counter() - started)


@dataclass(frozen=True)
class Call:
    """A phase that is to be served."""

    kind: PhaseKind
    cell: str
    step: int
    sequences: int
    urgency: float
    hurry: asyncio.Future[float] | None = None
    """As in ``Work``."""
    slices: int = 1
    """In which its rollouts come, each after an equal share of the time."""
    each: Callable[[], None] = lambda: None
    """Told of every slice but the last one, which comes with the end."""


@dataclass(eq=False)
class Member:
    """An engine, a grader, or the ranks of a learner group, which live and die together."""

    name: str
    accelerators: int
    processes: int
    conditions: Conditions
    observer: Observer
    dies_at: float = field(init=False)
    """Time of the loop."""

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """It is new: draw how long it will live."""
        lifetime = self.conditions.lifetimes.draw(self.name, self.processes)
        self.dies_at = asyncio.get_running_loop().time() + lifetime

    async def serve(self, call: Call, waited: float) -> float:
        """Accelerator-seconds of a call that has waited so long.

        Raises:
            MemberLost: it died before, or meanwhile.
        """
        loop = asyncio.get_running_loop()
        started, failed = loop.time(), True
        seconds = self.conditions.times.seconds(call.kind, call.sequences)
        ends = min(started + seconds, self.dies_at)
        try:
            for number in range(1, call.slices):
                comes = started + seconds * number / call.slices
                if comes > ends:
                    break
                await asyncio.sleep(comes - loop.time())
                call.each()
            await asyncio.sleep(ends - loop.time())
            if ends < started + seconds:
                self.observer.losses[self.name.partition(" ")[0]] += 1
                raise MemberLost(self.name, "it died")
            failed = False
        finally:
            busy = loop.time() - started
            self.observer.record(
                PhaseRecord(
                    self.name,
                    call.kind,
                    call.cell,
                    call.step,
                    started,
                    busy,
                    waited,
                    call.sequences,
                    0,
                    self.accelerators,
                    failed,
                )
            )
        return busy * self.accelerators


class SimulatedPool:
    """Members that serve any cell, as in ``SharedPool``."""

    def __init__(self, members: list[Member]) -> None:
        """All of them serve at once."""
        self._turns: Turns[Member] = Turns()
        for member in members:
            self._turns.give(member)

    @property
    def free(self) -> int:
        """Members that would serve a call at once."""
        return self._turns.free

    async def call(self, call: Call) -> float:
        """Accelerator-seconds of a call to a free member. Raises MemberLost; that member is replaced."""
        loop = asyncio.get_running_loop()
        asked = loop.time()
        member = await self._turns.take(call.urgency, hurry=call.hurry)
        try:
            done = await member.serve(call, loop.time() - asked)
        except MemberLost:
            loop.call_later(member.conditions.restart_seconds, self._replaced, member)
            raise
        except BaseException:
            self._turns.give(member)
            raise
        give(self._turns, member)
        return done

    def _replaced(self, member: Member) -> None:
        member.start()
        self._turns.give(member)


class SimulatedGroup:
    """The ranks of a learner group, as in ``LearnerGroup``: one call at a time, and all cells lose it together."""

    def __init__(self, ranks: Member) -> None:
        """It serves at once."""
        self._ranks = ranks
        self.broken = False
        self.openings = 1
        self._turns: Turns[Member] = Turns()
        self._turns.give(ranks)
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        """Start all ranks anew, unless the group serves."""
        async with self._opening:
            if not self.broken:
                return
            await asyncio.sleep(self._ranks.conditions.restart_seconds)
            self._ranks.start()
            self.broken = False
            self.openings += 1

    async def call(self, opening: int, call: Call) -> float:
        """Accelerator-seconds of a call by a cell that took its slot at this opening. Raises MemberLost; it is then broken."""
        loop = asyncio.get_running_loop()
        asked = loop.time()
        await self._turns.take(call.urgency)
        try:
            if self.broken or self.openings != opening:
                raise MemberLost(self._ranks.name, "while it served another cell", preempted=True)
            return await self._ranks.serve(call, loop.time() - asked)
        except MemberLost as error:
            self.broken = self.broken or not error.preempted
            raise
        finally:
            give(self._turns, self._ranks)


def give(turns: Turns[Member], member: Member) -> None:
    """Give a member back: here it is decided who is served next."""
    started = perf_counter()
    turns.give(member)
    member.observer.decided(Decision.MEMBER, started)
