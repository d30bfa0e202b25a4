"""A whole grid in virtual time: slots of learner groups take cells that wait, as in ``control.controller``."""

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from grids.expansion import Cell
from grids.spec import GridSpec
from orchestrator.failures.decisions import Action, decide
from orchestrator.failures.faults import MemberLost, classify
from orchestrator.pools.resources import engine_accelerators, group_accelerators
from orchestrator.scheduling.costs import CostModel
from orchestrator.scheduling.remaining import RemainingWork
from orchestrator.scheduling.urgency import Urgencies
from orchestrator.scheduling.usage import pool_sizes
from orchestrator.scheduling.waiting import WaitingCells
from orchestrator.simulation.cell_life import CellLife
from orchestrator.simulation.conditions import Conditions
from orchestrator.simulation.members import Decision, Member, Observer, SimulatedGroup, SimulatedPool
from orchestrator.simulation.virtual_time import run_in_virtual_time
from orchestrator.store.phase_log import PhaseKind


@dataclass(frozen=True)
class Outcome:
    """How a simulated grid went. Times in seconds of the simulated world, but for ``decisions``."""

    wall_seconds: float
    """From the first cell to the end of the last one, on pools that serve at the start."""
    finished: int
    """Cells."""
    failed: int
    """Cells whose retries were spent."""
    attempts: int
    """Of all cells."""
    losses: Mapping[str, int]
    """Members of each pool that were lost."""
    busy_shares: Mapping[str, float]
    """Of each pool: ``sampler``, ``learner``, ``grader``."""
    held_accelerator_seconds: float
    """All accelerators of the pools, for the whole time."""
    accelerator_seconds: Mapping[PhaseKind, float]
    """Of phases that came to their ends, replayed ones too."""
    lost_accelerator_seconds: float
    """Of phases that were broken off, and of work that was done again because no commit had kept it."""
    idle_share: float
    """Of the accelerators that are held; who is started anew is idle."""
    phases: int
    decisions: "Mapping[Decision, array[float]]" = field(repr=False)
    """Seconds of a real clock, for each decision of a kind."""


def simulate(spec: GridSpec, cells: Sequence[Cell], conditions: Conditions, costs: CostModel) -> Outcome:
    """Run cells of a grid from nothing to their ends on its pools.

    Args:
        spec: the grid, whose pools, marks, commits and failure policy hold.
        cells: the cells.
        conditions: the world.
        costs: what decisions rest on at the start; learns meanwhile, as in a real run.
    """
    return run_in_virtual_time(_Simulation(spec, cells, conditions, costs).run())


class _Simulation:
    def __init__(
        self, spec: GridSpec, cells: Sequence[Cell], conditions: Conditions, costs: CostModel
    ) -> None:
        self._spec, self._cells, self._conditions = spec, cells, conditions
        self._observer = Observer(costs)
        remaining = RemainingWork(spec, costs)
        self._waiting = WaitingCells(cells, remaining)
        self._urgencies = Urgencies(remaining, self._waiting)
        self._delayed = self._running = 0
        self._lives: dict[str, CellLife] = {}
        self._finished = self._failed = 0
        self._lost = 0.0
        """Accelerator-seconds of work that no commit had kept."""

    async def run(self) -> Outcome:
        pools = self._spec.pools

        def members(pool: str, count: int, accelerators: int, processes: int = 1) -> list[Member]:
            return [
                Member(f"{pool} {number}", accelerators, processes, self._conditions, self._observer)
                for number in range(count)
            ]

        samplers = SimulatedPool(members("sampler", pools.samplers.count, engine_accelerators(pools)))
        grader = SimulatedPool(members("grader", 1, 0))
        ranks = members("learner", pools.learners.count, group_accelerators(pools), pools.learners.ranks)
        groups = [SimulatedGroup(one) for one in ranks]
        self._news = asyncio.Event()
        for cell in self._cells:
            self._lives[cell.id] = CellLife(
                cell, self._spec, self._conditions, self._urgencies, samplers, grader, self._observer
            )
            started = perf_counter()
            self._waiting.add(cell, 0)
            self._observer.decided(Decision.WAITING, started)
        # Every group gets a first cell before any gets a second one.
        await asyncio.gather(*(self._serve(group) for _ in range(pools.learners.slots) for group in groups))
        return self._outcome(asyncio.get_running_loop().time())

    async def _serve(self, group: SimulatedGroup) -> None:
        while self._waiting or self._delayed or self._running:
            if group.broken:
                await group.open()
            elif not self._waiting:
                await self._news.wait()
            else:
                started = perf_counter()
                cell = self._waiting.pop()
                self._observer.decided(Decision.NEXT_CELL, started)
                self._running += 1
                await self._attempt(self._lives[cell.id], group)
                self._urgencies.ended(cell)
                self._running -= 1
                if not (self._waiting or self._delayed or self._running):
                    self._tell()

    async def _attempt(self, life: CellLife, group: SimulatedGroup) -> None:
        try:
            await life.attempt(group)
            self._finished += 1
        except MemberLost as error:
            decision = decide(classify(error), life.state, self._spec.failures)
            self._lost += life.uncommitted
            if decision.action is not Action.NEW_ATTEMPT:
                self._failed += 1
                return
            life.state = replace(life.state, spent=decision.spent)
            self._delayed += 1
            asyncio.get_running_loop().call_later(decision.delay_seconds, self._come_back, life)

    def _come_back(self, life: CellLife) -> None:
        started = perf_counter()
        self._waiting.add(life.cell, life.state.committed_step)
        self._observer.decided(Decision.WAITING, started)
        self._delayed -= 1
        self._tell()

    def _tell(self) -> None:
        """Wake the slots that have no cell."""
        self._news.set()
        self._news = asyncio.Event()

    def _outcome(self, wall: float) -> Outcome:
        pools, observer = self._spec.pools, self._observer
        counts = pool_sizes(self._spec)
        accelerators = pools.samplers.count * engine_accelerators(pools)
        accelerators += pools.learners.count * group_accelerators(pools)
        held = accelerators * wall
        busy = sum(observer.accelerator_seconds.values()) + observer.broken_off
        return Outcome(
            wall_seconds=wall,
            finished=self._finished,
            failed=self._failed,
            attempts=sum(life.state.attempt for life in self._lives.values()),
            losses=dict(observer.losses),
            busy_shares={
                pool: observer.busy[pool] / (count * wall) if wall > 0 else 0.0
                for pool, count in counts.items()
            },
            held_accelerator_seconds=held,
            accelerator_seconds=dict(observer.accelerator_seconds),
            lost_accelerator_seconds=observer.broken_off + self._lost,
            idle_share=1 - busy / held if held > 0 else 0.0,
            phases=observer.phases,
            decisions=observer.decisions,
        )
