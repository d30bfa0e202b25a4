"""What stands in for the cluster in tests of the controller: pools without Ray and engines, whose every call a test can act on.

Weights are a digest of all that has gone into them, so rows are a pure function of (cell, step) as long as each step is made
once, from the commit before it; a cell that is resumed wrongly gets other rows.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from grids.errors import UserError
from grids.expansion import Cell, expand
from grids.loading import dump_grid
from grids.spec import GridSpec
from orchestrator.clock import SYSTEM_CLOCK
from orchestrator.console import Console
from orchestrator.control import controller as controller_module
from orchestrator.control.controller import Controller
from orchestrator.control.data import GridData, PromptSet
from orchestrator.control.selection import Selection, take_up
from orchestrator.failures.faults import MemberLost, is_storage_full
from orchestrator.pools.pools import Pools
from orchestrator.pools.supervision import Supervision
from orchestrator.pools.work import Work
from orchestrator.scheduling.costs import CostModel
from orchestrator.store.cell_state import AttemptRecord, CellState, State
from orchestrator.store.lease import Lease
from orchestrator.store.phase_log import recent_records
from orchestrator.store.run_store import RunStore
from orchestrator.tracking.tracker import Tracker
from tests.orchestrator.small_run import small_grid
from workers.learning import Diverged, StaleRollouts
from workers.sampler import Sampled

FIRST_VALIDATION_PROMPT = 1000
UNSTEADY_COLUMNS = ("seconds_evaluating", "logged_at_ms")
"""Columns of a row that tell when it was made."""


@dataclass(frozen=True)
class Call:
    """A call that has reached the cluster: of ``cell`` (``base`` and ``probe-...`` at the start), on weights after ``step`` steps.

    An update and a save are of the step that they make and keep.
    """

    method: str
    cell: str
    step: int
    role: str
    """Of the member."""


@dataclass(frozen=True)
class Reference:
    """Data that stays in the cluster."""

    value: Any

    def __await__(self) -> Generator[Any, None, Any]:
        yield from asyncio.sleep(0).__await__()
        return self.value


@dataclass(frozen=True)
class StandInWeights:
    version: str
    digest: str


@dataclass(frozen=True)
class StandInRollouts:
    weights: StandInWeights
    digest: str
    logprobs: np.ndarray


class StandInMember:
    """A process of a pool."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.ended = False

    def let_go(self) -> None:
        self.ended = True

    async def end(self) -> None:
        self.ended = True


Act = Callable[[Call], Awaitable[None]]


class StandInCluster:
    """All pools of a run. ``act`` is called before each call is served: it may wait, raise, or tell the controller something."""

    def __init__(self, act: Act | None = None, ratios: Mapping[tuple[str, int], float] | None = None) -> None:
        self.act = act
        self.ratios = dict(ratios or {})
        """Importance ratios other than 1, by cell and step."""
        self.calls: Counter[Call] = Counter()
        self.reached = 0
        """Calls so far."""
        self.first: dict[str, int] = {}
        """Which call, from 0, was the first one of each cell."""
        self.groups: list[StandInGroup] = []
        self.asked: list[Work] = []
        """What shared pools and updates were asked for."""

    def pools(self, spec: GridSpec) -> Pools:
        learners = spec.pools.learners
        self.groups = [StandInGroup(self, number, learners.slots) for number in range(learners.count)]
        sampler, grader = StandInPool(self, "sampler 0"), StandInPool(self, "grader")
        return Pools(cast(Any, sampler), cast(Any, list(self.groups)), cast(Any, grader))

    async def reach(self, method: str, version: str, role: str, step: int | None = None) -> None:
        cell, _, rest = version.partition("/")
        made = rest.rpartition("step-")[2]
        call = Call(method, cell, int(made) if step is None and made.isdecimal() else step or 0, role)
        self.calls[call] += 1
        self.first.setdefault(cell, self.reached)
        self.reached += 1
        await asyncio.sleep(0)
        if self.act is not None:
            await self.act(call)


class StandInPool:
    """Samplers or graders: one member, which serves all callers at once."""

    def __init__(self, cluster: StandInCluster, role: str) -> None:
        self.members = [StandInMember(role)]
        self.free = 1
        self._cluster, self._role = cluster, role

    async def start(self) -> None:
        await self._cluster.reach("start", "", self._role)

    async def value(self, method: str, *arguments: Any, work: Work) -> Any:
        self._cluster.asked.append(work)
        if method == "unsound_golds":
            await self._cluster.reach(method, "", self._role)
            return []
        rollouts: StandInRollouts = arguments[-1].value
        await self._cluster.reach(method, rollouts.weights.version, self._role)
        score = _share(f"score {rollouts.digest}")
        return {"avg_at_4": score, "eval_verifier_failures": 0}, [{"response": rollouts.digest}]

    async def reference_and_value(self, method: str, *arguments: Any, work: Work) -> tuple[Reference, Any]:
        self._cluster.asked.append(work)
        rollouts: StandInRollouts = arguments[0].value
        await self._cluster.reach(method, rollouts.weights.version, self._role)
        return Reference(_digest("rewards", rollouts.digest)), (0, 0.25)

    async def values_and_references(
        self,
        method: str,
        *arguments: Any,
        work: Work,
        each: Callable[[Sampled, Reference], None] = lambda sampled, rollouts: None,
        member: StandInMember | None = None,
    ) -> list[tuple[Sampled, Reference]]:
        self._cluster.asked.append(work)
        request, weights = arguments[0], arguments[1].value
        validates = request.prompts[0][0] >= FIRST_VALIDATION_PROMPT
        await self._cluster.reach("sample validation" if validates else "sample", weights.version, self._role)
        digest = _digest(weights.digest, str(request.prompts), str(request.seeds))
        pair = Sampled(4 * work.sequences, 0.5), Reference(StandInRollouts(weights, digest, np.zeros(4)))
        each(*pair)
        return [pair]


class StandInGroup:
    """A learner group of one rank."""

    def __init__(self, cluster: StandInCluster, number: int, slots: int) -> None:
        self.role = f"learner {number}"
        self.members = [StandInMember(f"{self.role} rank 0")]
        self.broken = True
        self.openings = 0
        self.cluster = cluster
        self.slots = [StandInSlot(self) for _ in range(slots)]
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        async with self._opening:
            if self.broken:
                await self.cluster.reach("open", "", self.role)
                self.broken = False
                self.openings += 1

    async def end(self) -> None:
        for member in self.members:
            await member.end()

    def let_go(self) -> None:
        for member in self.members:
            member.let_go()


class StandInSlot:
    """A slot of such a group. As the real one it goes on with an update whose caller has been cancelled."""

    def __init__(self, group: StandInGroup) -> None:
        self.group = group
        self._opening = 0
        self._weights = StandInWeights("", "")

    async def begin_cell(self, cell: str, step: int, version: str, checkpoint: Path | None) -> Reference:
        self._opening = self.group.openings
        await self._reach("begin_cell", version)
        digest = (checkpoint / "weights").read_text() if checkpoint else "base"
        return self._now(version, digest)

    async def perturb(self, version: str) -> Reference:
        await self._reach("perturb", version)
        return self._now(version, _digest(self._weights.digest, "perturbed"))

    async def logprobs(self, rollouts: Reference) -> np.ndarray:
        await self._reach("logprobs", self._weights.version)
        return np.zeros(4)

    async def update(
        self,
        version: str,
        learning_rate: float,
        rollouts: Sequence[Reference],
        rewards: Sequence[Reference],
        work: Work,
    ) -> tuple[dict[str, float], Reference]:
        self.group.cluster.asked.append(work)
        await self._reach("update", version)
        (batch,), (reward,) = rollouts, rewards
        if batch.value.weights != self._weights:
            raise StaleRollouts(f"{batch.value.weights} are not {self._weights}")
        weights = self._now(version, _digest(batch.value.digest, reward.value, str(learning_rate)))
        await asyncio.sleep(0)
        cell, step = version.split("/")[0], int(version.rpartition("step-")[2])
        metrics = {
            "train_reward": _share(weights.value.digest),
            "importance_ratio": self.group.cluster.ratios.get((cell, step), 1.0),
            "logprob_difference": 0.0,
            "logprob_mean_difference": 0.0,
            "response_tokens": 4.0,
            "learning_rate": learning_rate,
            "seconds_learning": 0.25,
        }
        return metrics, weights

    async def save(self, folder: Path) -> None:
        weights = self._weights
        await self._reach("save", weights.version)
        (folder / "weights").write_text("half")
        await asyncio.sleep(0)
        (folder / "weights").write_text(weights.digest)

    def _now(self, version: str, digest: str) -> Reference:
        self._weights = StandInWeights(version, digest)
        return Reference(self._weights)

    async def _reach(self, method: str, version: str) -> None:
        group = self.group
        if group.broken or group.openings != self._opening:
            raise MemberLost(group.role, "while it served another cell", preempted=True)
        try:
            await group.cluster.reach(method, version, group.role)
        except Exception as error:
            group.broken = not (isinstance(error, Diverged | UserError) or is_storage_full(error))
            raise


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _share(text: str) -> float:
    """A number above 0 and below 1 that the text decides."""
    return (int(_digest(text)[:8], 16) + 1) / (2**32 + 2)


class StandInTracker:
    """Keeps what it is told. As the real one it raises KeyError for a cell that was never started."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.ends: dict[str, list[str]] = {}

    def cell_started(self, cell_id: str, params: Mapping[str, Any]) -> None:
        self.rows[cell_id] = []
        self.ends.setdefault(cell_id, [])

    def row(self, cell_id: str, row: Mapping[str, Any]) -> None:
        self.rows[cell_id].append(dict(row))

    def cell_ended(self, cell_id: str, state: str, reason: str | None = None) -> None:
        self.ends[cell_id].append(str(state))

    def restore(
        self,
        cell_id: str,
        params: Mapping[str, Any],
        count: int,
        read_rows: Callable[[], Sequence[Mapping[str, Any]]],
        state: str,
        reason: str | None = None,
    ) -> None:
        self.rows[cell_id] = [dict(row) for row in read_rows()]
        assert len(self.rows[cell_id]) == count
        self.ends.setdefault(cell_id, []).append(str(state))


class RecordingConsole(Console):
    """A console whose lines can be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@cache
def trial_grid(
    seeds: int = 1, steps: int = 6, groups: int = 1, slots: int = 1, commits: int = 2, **failures: Any
) -> GridSpec:
    """Cells ``bp2-n4-s<seed>`` of batches of 8 rollouts, evaluated after steps 2, 4, 8 ..., committed every ``commits`` steps."""
    grid = dump_grid(small_grid(seeds, compute_rollouts=8 * steps))
    grid["evaluation"] |= {"first_mark": 16, "marks_per_doubling": 1, "train_probe": {"problems": 0}}
    grid["pools"]["learners"] |= {"count": groups, "slots": slots}
    grid["commits"]["every_steps"] = commits
    grid["failures"] |= {"backoff_seconds": 0.001, "phase_repeats": 1} | failures
    return GridSpec.model_validate(grid)


def _prompt_set(first: int, size: int) -> PromptSet:
    numbers = range(first, first + size)
    return PromptSet("problems.jsonl", list(numbers), [[i] for i in numbers], [str(-i) for i in numbers])


DATA = GridData(_prompt_set(0, 20), _prompt_set(FIRST_VALIDATION_PROMPT, 4), identity={})


class Trial:
    """A run folder, and the real controller started on it over stand-in pools, as often as a test likes."""

    def __init__(self, run_dir: Path, spec: GridSpec, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run_dir, self.spec = run_dir, spec
        self.cells = {cell.id: cell for cell in expand(spec)}
        run_dir.mkdir()
        self.folder = self._store()
        """For reading."""
        self.tracker, self.console = StandInTracker(), RecordingConsole()
        self.cluster = StandInCluster()
        self._monkeypatch = monkeypatch

    def start(self, cluster: StandInCluster | None = None) -> None:
        """A run from its start to its end, as the command does it."""
        with self.controller(cluster) as (controller, cells):
            asyncio.run(controller.run(cells, self.folder.states()))

    @contextmanager
    def controller(
        self, cluster: StandInCluster | None = None
    ) -> Generator[tuple[Controller, list[Cell]], None, None]:
        """A controller under a lease of its own, and the cells that it is to train."""
        self.cluster = cluster or StandInCluster()
        self.tracker, self.console = StandInTracker(), RecordingConsole()
        self._monkeypatch.setattr(controller_module, "make_pools", lambda spec, *_: self.cluster.pools(spec))
        self._monkeypatch.setattr(controller_module, "versions", dict)
        store = self._store()
        with Lease.acquire(store.lease_dir, "test", time_to_live=60.0) as lease:
            store.hold(lease.epoch, lease.check, self.spec.commits.keep)
            states = store.states()
            cells = take_up(list(self.cells.values()), states, Selection())
            for cell in cells:
                if cell.id not in states:
                    store.cell(cell.id).set_state(State.PENDING)
            supervision = Supervision(
                self.run_dir,
                lease.epoch,
                lease.check,
                self.spec.failures,
                SYSTEM_CLOCK,
                self.console.say,
                lambda _: None,
            )
            tracker = cast(Tracker, self.tracker)
            costs = CostModel(recent_records(self.run_dir))
            self.now = Controller(self.spec, DATA, store, tracker, self.console, supervision, costs)
            yield self.now, cells

    def _store(self) -> RunStore:
        # Without the file of the grid, which the controller leaves to others, and which takes longer to read than all else.
        return RunStore(self.run_dir, {"run_id": "r", "spec": dump_grid(self.spec)})

    # What the folder holds afterwards

    def state(self, cell: str) -> CellState:
        return self.folder.cell(cell).read()

    def states(self) -> dict[str, State]:
        """Short name of each cell (``s0``) and its state."""
        return {short(cell): self.state(cell).state for cell in self.cells}

    def attempts(self, cell: str) -> list[AttemptRecord]:
        return self.folder.cell(cell).attempts()

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Each cell's rows, without the columns that tell when they were made."""
        return {cell: [steady(row) for row in self.folder.cell(cell).rows()] for cell in self.cells}

    def committed_step(self, cell: str) -> int:
        commit = self.state(cell).commit
        return commit.step if commit else 0

    def results(self) -> dict[str, tuple[State, str | None, list[dict[str, Any]]]]:
        """What every cell has come to, whatever happened on the way: state, weights of a finished cell, rows."""
        rows, found = self.rows(), {}
        for cell in self.cells:
            state = self.state(cell)
            weights = None
            if state.state is State.FINISHED and state.commit and state.commit.checkpoint:
                weights = (self.folder.cell(cell).folder / state.commit.checkpoint / "weights").read_text()
            found[cell] = (state.state, weights, rows[cell])
        return found


def short(cell: str) -> str:
    """``s0`` of ``bp2-n4-s0``."""
    return cell.rpartition("-")[2]


def steady(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in UNSTEADY_COLUMNS}
