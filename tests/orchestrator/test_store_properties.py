"""Any interleaving of controllers, faults and failures of power on the real store, lease and decision function."""

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from grids.spec import FailuresSpec
from orchestrator.failures.decisions import Action, decide
from orchestrator.failures.faults import Fault, FaultKind
from orchestrator.store import checkpoint_folders
from orchestrator.store.cell_state import Spent
from orchestrator.store.cell_store import last_row
from orchestrator.store.files import write_all
from orchestrator.store.lease import Lease, LeaseLost
from orchestrator.store.run_store import CellStore, RunStore, State
from tests.orchestrator.mortal import Killed, Mortal, Storage, Strike, guarded_os

CELLS = ("bp2-n2-s0", "bp4-n2-s0")
TIME_TO_LIVE = 30.0
POLICY = FailuresSpec(own_failures=1, preemptions=2)
BEGINNABLE = (State.PENDING, State.PAUSED, State.RUNNING)
UNFINISHED = tuple(state for state in State if state is not State.FINISHED)
KINDS = (FaultKind.LOST, FaultKind.PREEMPTED, FaultKind.DIVERGED, FaultKind.STORAGE_FULL)
AFTER = {
    Action.NEW_ATTEMPT: State.PENDING,
    Action.FAIL: State.FAILED,
    Action.DIVERGE: State.DIVERGED,
    Action.PAUSE: State.PAUSED,
}

T = TypeVar("T")


def is_evaluated(step: int) -> bool:
    return step % 3 != 1


def value(cell: str, step: int) -> int:
    """What training gives: a function of cell and step alone."""
    return CELLS.index(cell) * 1000 + step * step


@dataclass(frozen=True)
class Seen:
    """A cell as readers see it. ``rows``: the epochs that wrote the committed rows."""

    state: State = State.PENDING
    attempt: int = 0
    step: int = 0
    rows: tuple[int, ...] = ()
    spent: Spent = field(default_factory=Spent)
    checkpoint_epoch: int | None = None


@dataclass
class Attempt:
    """What a controller has in memory of a cell that it trains."""

    store: CellStore
    step: int
    rows: tuple[int, ...]


@dataclass
class Controller:
    """One controller: a process, and what it has in memory."""

    process: Mortal
    clock_stands: bool
    epoch: int = 0
    lease: Lease | None = None
    store: RunStore | None = None
    holds: bool = False
    opened: list[CellStore] = field(default_factory=list)
    attempts: dict[str, Attempt] = field(default_factory=dict)
    target: tuple[str, Seen] | None = None
    """What the work under way makes readers see."""
    finish: Callable[[], None] = lambda: None
    """What it does to this memory when it ends well."""


def look(run_store: RunStore, cell: str) -> Seen:
    """Read a cell as anybody may at any time, and check what must hold whatever has happened."""
    store = run_store.cell(cell)
    state, rows = store.read(), store.rows()
    steps = [row["step"] for row in rows]
    expected = [step for step in range(1, steps[-1] + 1 if steps else 1) if is_evaluated(step)]
    assert steps == expected, f"{cell}: steps {steps}"
    assert [row["value"] for row in rows] == [value(cell, step) for step in steps]
    assert last_row(f"{store.folder}/history.jsonl") == (rows[-1] if rows else None)
    numbers = [record.attempt for record in store.attempts()]
    assert numbers == sorted(set(numbers)) and (not numbers or numbers[-1] <= state.attempt)
    if state.commit is None:
        return Seen(state.state, state.attempt, spent=state.spent)
    commit = state.commit
    epochs = [row["epoch"] for row in rows[: commit.history_rows]]
    assert steps[: commit.history_rows] == [s for s in range(1, commit.step + 1) if is_evaluated(s)]
    assert epochs == sorted(epochs), f"{cell}: epochs {epochs}"
    assert commit.progress == {"step": commit.step}
    checkpoint_epoch = None
    if commit.checkpoint is not None:
        folder = store.folder / commit.checkpoint
        checkpoint_folders.verify(folder)
        name, step, epoch = (folder / "weights").read_text().split()
        assert (name, int(step)) == (cell, commit.step)
        checkpoint_epoch = int(epoch)
    return Seen(state.state, state.attempt, commit.step, tuple(epochs), state.spent, checkpoint_epoch)


def write_weights(store: CellStore, step: int, epoch: int) -> Path:
    folder = store.begin_checkpoint(step)
    descriptor = os.open(folder / "weights", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        write_all(descriptor, f"{store.cell} {step} {epoch}".encode())
    finally:
        os.close(descriptor)
    store.complete_checkpoint(folder)
    return folder


def train(attempt: Attempt, epoch: int, steps: int) -> None:
    """Some update steps, with a row where a step is evaluated."""
    for _ in range(steps):
        step = attempt.step + 1
        if is_evaluated(step):
            attempt.store.append_row({"step": step, "value": value(attempt.store.cell, step), "epoch": epoch})
            attempt.rows += (epoch,)
        attempt.step = step
        attempt.store.log(f"step {step}")


def chosen(options: list[T], pick: int) -> T:
    return options[pick % len(options)]


def spent_after(seen: Seen, kind: FaultKind) -> tuple[State, Spent]:
    """What a fault must lead to: the policy in this file's own words."""
    spent = seen.spent if seen.step <= seen.spent.at_step else Spent(at_step=seen.step)
    if kind is FaultKind.DIVERGED:
        return State.DIVERGED, spent
    if kind is FaultKind.STORAGE_FULL:
        return State.PAUSED, spent
    if kind is FaultKind.PREEMPTED and spent.preemptions < 2:
        return State.PENDING, replace(spent, preemptions=spent.preemptions + 1)
    if kind is FaultKind.LOST and spent.own_failures < 1:
        return State.PENDING, replace(spent, own_failures=spent.own_failures + 1)
    return State.FAILED, spent


HOW = st.sampled_from(["die", "tear", "sleep"])
STRIKES = st.one_of(
    st.none(),
    st.none(),
    st.builds(Strike, HOW, st.integers(0, 30)),
    st.builds(Strike, HOW, st.integers(0, 4), st.sampled_from(["replace", "write"])),
)
PICK = st.sampled_from([0, 0, 0, 0, 1, 1, 2, 3])
"""Which of what can be done; what the newest controller can do comes first."""


def where(found: Callable[["AnyInterleaving"], list[Any]]) -> Callable[..., Any]:
    """A rule is tried only where it finds something to do."""
    return precondition(lambda machine: bool(found(machine)))


class AnyInterleaving(RuleBasedStateMachine):
    """``visible`` is what readers saw last; work may change it only as announced, and never once it is fenced off."""

    @initialize()
    def make_run(self) -> None:
        self.on_exit = ExitStack()
        place = "/dev/shm" if os.path.isdir("/dev/shm") else None  # thousands of fsyncs
        self.run_dir = Path(tempfile.mkdtemp(dir=place)) / "run"
        self.on_exit.callback(shutil.rmtree, self.run_dir.parent)
        self.reader = RunStore.open(self.run_dir, {"model": "tiny"}, {"spec": {}})
        self.storage = Storage()
        self.now = 0.0
        self.works = 0
        self.last: dict[str, int] = {}
        self.epochs: set[int] = set()
        self.newest_holder = 0
        self.controllers: list[Controller] = []
        self.visible = {cell: Seen() for cell in CELLS}
        self.just_looked_at: str | None = None
        self.before_power: dict[str, list[Seen]] = {cell: [] for cell in CELLS}
        self.finished: dict[str, dict[str, bytes]] = {}
        self.on_exit.enter_context(guarded_os())

    def teardown(self) -> None:
        for controller in self.controllers:
            self.bury(controller)
        self.on_exit.close()

    # What controllers do

    @precondition(
        lambda self: len(self.controllers) < 3 and (not self.awake() or self.is_time_for("start", 4))
    )
    @rule(strike=STRIKES, clock_stands=st.booleans())
    def start(self, strike: Strike | None, clock_stands: bool) -> None:
        """A new controller takes the run over: old ones' counters stand still on its clock."""
        self.last["start"] = self.works
        controller = Controller(Mortal(self.storage), clock_stands)
        frozen = self.now

        def sleep(seconds: float) -> None:
            self.now += seconds

        def clock() -> float:
            return frozen if controller.clock_stands and controller.holds else self.now

        def take_over() -> None:
            store = RunStore(self.run_dir, self.reader.resolved)
            controller.lease = Lease.acquire(store.lease_dir, "controller", TIME_TO_LIVE, clock, sleep)
            controller.epoch = controller.lease.epoch
            store.hold(controller.epoch, controller.lease.check)
            controller.store, controller.holds = store, True

        def took_over() -> None:
            assert controller.epoch not in self.epochs
            self.epochs.add(controller.epoch)
            self.newest_holder = max(self.newest_holder, controller.epoch)

        self.controllers.append(controller)
        self.do(controller, take_over, strike, finish=took_over)

    @where(lambda self: self.cells_to_begin())
    @rule(pick=PICK, commits=st.integers(0, 2), strike=STRIKES, later=STRIKES)
    def begin(self, pick: int, commits: int, strike: Strike | None, later: Strike | None) -> None:
        """Start an attempt at a cell, from the last commit, whoever made it, and go on for some commits."""
        controller, cell = chosen(self.cells_to_begin(), pick)
        self.begin_cell(controller, cell, strike)
        for number in range(1, commits + 1):
            if (controller, cell) in self.cells_in_training():
                self.advance(controller, cell, 2, State.RUNNING, later if number == commits else None)

    def begin_cell(self, controller: Controller, cell: str, strike: Strike | None = None) -> None:
        store, seen = self.open_cell(controller, cell), self.visible[cell]
        controller.attempts.pop(cell, None)

        def begun() -> None:
            controller.attempts[cell] = Attempt(store, seen.step, seen.rows)

        target = replace(seen, state=State.RUNNING, attempt=seen.attempt + 1)
        self.do(controller, store.start_attempt, strike, (cell, target), begun)

    @where(lambda self: self.cells_in_training())
    @rule(pick=PICK, steps=st.integers(1, 4), strike=STRIKES)
    def train(self, pick: int, steps: int, strike: Strike | None) -> None:
        """Some update steps, with a row where a step is evaluated."""
        controller, cell = chosen(self.cells_in_training(), pick)
        attempt = controller.attempts[cell]

        self.do(controller, lambda: train(attempt, controller.epoch, steps), strike)

    @where(lambda self: self.cells_in_training())
    @rule(pick=PICK, steps=st.integers(1, 4), finishing=st.sampled_from([False, False, True]), strike=STRIKES)
    def train_and_commit(self, pick: int, steps: int, finishing: bool, strike: Strike | None) -> None:
        """Some update steps, then a checkpoint and a commit; the last one finishes the cell."""
        controller, cell = chosen(self.cells_in_training(), pick)
        self.advance(controller, cell, steps, State.FINISHED if finishing else State.RUNNING, strike)

    def advance(
        self, controller: Controller, cell: str, steps: int, state: State, strike: Strike | None = None
    ) -> None:
        attempt = controller.attempts[cell]
        rows = sum(map(is_evaluated, range(attempt.step + 1, attempt.step + steps + 1)))

        def commit() -> None:
            train(attempt, controller.epoch, steps)
            folder = write_weights(attempt.store, attempt.step, controller.epoch)
            attempt.store.commit(attempt.step, folder, {"step": attempt.step}, state)

        def committed() -> None:
            if state is State.FINISHED:
                controller.attempts.pop(cell)

        target = replace(
            self.visible[cell],
            state=state,
            step=attempt.step + steps,
            rows=attempt.rows + (controller.epoch,) * rows,
            checkpoint_epoch=controller.epoch,
        )
        self.do(controller, commit, strike, (cell, target), committed)

    @where(lambda self: self.cells_in_training())
    @rule(pick=PICK, kind=st.sampled_from(KINDS), strike=STRIKES)
    def fail(self, pick: int, kind: FaultKind, strike: Strike | None) -> None:
        """An attempt fails, and the decision function says what becomes of the cell."""
        controller, cell = chosen(self.cells_in_training(), pick)
        attempt = controller.attempts.pop(cell)

        def decide_and_write() -> None:
            decision = decide(Fault(kind, "a reason"), attempt.store.read(), POLICY)
            state = AFTER[decision.action]
            attempt.store.set_state(state, decision.reason, spent=decision.spent)
            attempt.store.end_attempt(state, decision.reason)

        state, spent = spent_after(self.visible[cell], kind)
        target = replace(self.visible[cell], state=state, spent=spent)
        self.do(controller, decide_and_write, strike, (cell, target))

    @where(lambda self: self.cells_in(*UNFINISHED) if self.is_time_for("be_asked", 6) else [])
    @rule(pick=PICK, state=st.sampled_from([State.PENDING, State.PAUSED, State.CANCELLED]), strike=STRIKES)
    def be_asked(self, pick: int, state: State, strike: Strike | None) -> None:
        """An operator cancels, pauses or retries a cell, whatever it is doing."""
        self.last["be_asked"] = self.works
        controller, cell = chosen(self.cells_in(*UNFINISHED), pick)
        store = self.open_cell(controller, cell)
        controller.attempts.pop(cell, None)
        target = replace(self.visible[cell], state=state, spent=Spent())
        self.do(controller, lambda: store.set_state(state, spent=Spent()), strike, (cell, target))

    @where(lambda self: self.cells_in(State.FINISHED))
    @rule(pick=PICK, strike=STRIKES)
    def reopen(self, pick: int, strike: Strike | None) -> None:
        """The budget has grown."""
        controller, cell = chosen(self.cells_in(State.FINISHED), pick)
        store, seen = self.open_cell(controller, cell), self.visible[cell]
        target = (cell, replace(seen, state=State.PENDING))
        self.do(controller, lambda: store.reopen(seen.step + 1), strike, target)

    @where(lambda self: self.cells_in(State.FINISHED))
    @rule(pick=PICK)
    def run_a_finished_cell(self, pick: int) -> None:
        """Nothing but ``reopen`` touches a finished cell."""
        controller, cell = chosen(self.cells_in(State.FINISHED), pick)
        store = self.open_cell(controller, cell)
        for work in (store.start_attempt, store.restore, lambda: store.set_state(State.PENDING)):
            assert isinstance(controller.process.run(work), RuntimeError)

    @where(lambda self: self.awake() if self.is_time_for("beat", 8) or self.has_nothing_to_do() else [])
    @rule(pick=PICK, strike=STRIKES)
    def beat(self, pick: int, strike: Strike | None) -> None:
        """Show that it lives, or learn that it was superseded."""
        self.last["beat"] = self.works
        controller = chosen(self.awake(), pick)
        assert controller.lease is not None
        self.do(controller, controller.lease.beat, strike)

    # What befalls them

    @where(lambda self: self.sleepers())
    @rule(pick=PICK)
    def wake(self, pick: int) -> None:
        """One that was suspended goes on with what it was about to write."""
        controller = chosen(self.sleepers(), pick)
        fenced = self.is_fenced(controller)
        self.account(controller, controller.process.wake(), fenced)

    @precondition(lambda self: len(self.controllers) > 1 and self.is_time_for("kill", 8))
    @rule(pick=PICK)
    def kill(self, pick: int) -> None:
        """SIGKILL, also of one that is suspended or was superseded; the oldest first."""
        self.last["kill"] = self.works
        controller = chosen(self.controllers, pick)
        self.controllers.remove(controller)
        self.bury(controller)

    @precondition(lambda self: self.controllers and self.is_time_for("lose_power", 8))
    @rule()
    def lose_power(self) -> None:
        """Every controller dies, and what was not forced to disk is lost."""
        self.last["lose_power"] = self.works
        while self.controllers:
            self.bury(self.controllers.pop())
        self.storage.lose_power(self.run_dir)
        for cell in CELLS:
            seen = look(self.reader, cell)
            assert seen == self.visible[cell] or seen in self.before_power[cell], f"{cell}: {seen}"
            if seen != self.visible[cell]:
                self.visible[cell] = seen
                self.finished.pop(cell, None)
            self.before_power[cell] = []

    @invariant()
    def readers_see_what_was_announced(self) -> None:
        for cell, seen in self.visible.items():
            if cell != self.just_looked_at:
                assert look(self.reader, cell) == seen
            if seen.state is State.FINISHED:
                files = self.finished.setdefault(cell, self.lasting_files(cell))
                assert self.lasting_files(cell) == files
        self.just_looked_at = None

    # How it is done

    def awake(self) -> list[Controller]:
        """Controllers that can do something, the newest first; superseded ones do not know that they are."""
        able = [one for one in self.controllers if one.holds and not one.process.asleep]
        return sorted(able, key=lambda controller: -controller.epoch)

    def is_time_for(self, what: str, pause: int) -> bool:
        """Whether so many works were done since this was last; keeps rare what undoes the others' work."""
        return self.works - self.last.get(what, -pause) >= pause

    def sleepers(self) -> list[Controller]:
        return [controller for controller in self.controllers if controller.process.asleep]

    def cells_in(self, *states: State) -> list[tuple[Controller, str]]:
        """Cells in one of these states, for each controller that can do something with them."""
        return [(one, cell) for one in self.awake() for cell in CELLS if self.visible[cell].state in states]

    def cells_to_begin(self) -> list[tuple[Controller, str]]:
        return [(one, cell) for one, cell in self.cells_in(*BEGINNABLE) if cell not in one.attempts]

    def has_nothing_to_do(self) -> bool:
        return not self.cells_to_begin() and not self.cells_in_training()

    def cells_in_training(self) -> list[tuple[Controller, str]]:
        """Cells of which a controller has an attempt in memory."""
        return [(one, cell) for one in self.awake() for cell in one.attempts]

    def is_fenced(self, controller: Controller) -> bool:
        """Whether another has taken the run over and may have read it by now."""
        return self.newest_holder > controller.epoch

    def open_cell(self, controller: Controller, cell: str) -> CellStore:
        assert controller.store is not None
        store = controller.store.cell(cell)
        controller.opened.append(store)
        return store

    def do(
        self,
        controller: Controller,
        work: Callable[[], object],
        strike: Strike | None,
        target: tuple[str, Seen] | None = None,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self.works += 1
        controller.target, controller.finish = target, finish
        fenced = self.is_fenced(controller)
        error = controller.process.run(work, strike)
        if controller.process.asleep:
            self.adopt(controller, done=False, fenced=fenced)
        else:
            self.account(controller, error, fenced)

    def account(self, controller: Controller, error: BaseException | None, fenced: bool) -> None:
        """Work has ended: well, by death, or because the lease is lost."""
        if isinstance(error, Killed):
            self.controllers.remove(controller)
            self.bury(controller)
        elif isinstance(error, LeaseLost):
            assert fenced or self.newest_epoch() > controller.epoch
            if not controller.holds:
                self.controllers.remove(controller)
                self.bury(controller)
        elif error is not None and not (fenced and isinstance(error, FileNotFoundError)):
            raise error  # a superseded one may also find the folder gone that it was writing into
        done = error is None
        self.adopt(controller, done, fenced)
        if done:
            controller.finish()

    def adopt(self, controller: Controller, done: bool, fenced: bool) -> None:
        """Take what readers see now for granted, if the work may have brought it about."""
        if controller.target is None:
            return
        cell, target = controller.target
        seen, before = look(self.reader, cell), self.visible[cell]
        if fenced:
            assert seen == before, f"{cell}: {before} became {seen} by a superseded controller"
        elif done:
            assert seen == target, f"{cell}: {seen} instead of {target}"
            self.before_power[cell] = []
        elif seen != before:
            assert seen == target, f"{cell}: {before} became {seen}, announced was {target}"
            self.before_power[cell].append(before)
        if seen.state is not State.FINISHED:
            self.finished.pop(cell, None)
        self.visible[cell] = seen
        self.just_looked_at = cell

    def bury(self, controller: Controller) -> None:
        controller.process.kill()
        for store in controller.opened:
            store.close()

    def newest_epoch(self) -> int:
        return max(int(name[:6]) for name in os.listdir(self.reader.lease_dir) if name.endswith(".json"))

    def lasting_files(self, cell: str) -> dict[str, bytes]:
        folder = self.run_dir / "cells" / cell
        return {name: (folder / name).read_bytes() for name in ("state.json", "history.jsonl")}


TestAnyInterleaving = AnyInterleaving.TestCase
TestAnyInterleaving.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("then", [(), ("begin",), ("begin", "advance")], ids=["left", "begun", "advanced"])
@pytest.mark.parametrize("work", ["begin", "advance"])
def test_suspended_at_any_call_of_its_work_an_overtaken_controller_does_no_harm_when_it_wakes(
    work: str, then: tuple[str, ...]
) -> None:
    calls = 0
    while suspend_and_overtake(work, calls, then):
        calls += 1
    assert calls > 15


def suspend_and_overtake(work: str, call: int, then: tuple[str, ...]) -> bool:
    """Suspend a controller before a system call, let another take over and go on, and wake the first; whether there was
    such a call.
    """
    run, cell, strike = AnyInterleaving(), CELLS[0], Strike("sleep", call)
    run.make_run()
    try:
        run.start(strike=None, clock_stands=True)
        first = run.controllers[0]
        run.begin_cell(first, cell)
        run.advance(first, cell, 2, State.RUNNING)
        if work == "begin":
            run.begin_cell(first, cell, strike)
        else:
            run.advance(first, cell, 3, State.RUNNING, strike)
        if not first.process.asleep:
            return False
        run.start(strike=None, clock_stands=True)
        second = run.controllers[1]
        for what in then:
            if what == "begin":
                run.begin_cell(second, cell)
            else:
                run.advance(second, cell, 3, State.RUNNING)
        run.account(first, first.process.wake(), fenced=True)
        run.readers_see_what_was_announced()
        if then:
            run.advance(second, cell, 4, State.FINISHED)
            run.readers_see_what_was_announced()
        return True
    finally:
        run.teardown()
