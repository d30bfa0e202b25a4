"""The controller, the life of a cell and its phases, over stand-ins for what runs on the cluster: whatever comes between, each
step is made once, and every cell ends in a state that tells the truth.
"""

import asyncio
import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.control import controller as controller_module
from orchestrator.failures.faults import MemberLost
from orchestrator.pools.shared_pool import PoolLost
from orchestrator.store import requests
from orchestrator.store.cell_state import Spent, State
from orchestrator.store.cell_store import CellStore
from orchestrator.store.requests import Request
from tests.orchestrator.stand_in_pools import Act, Call, StandInCluster, Trial, trial_grid
from workers.sampler import Sampled

S0, S1, S2 = "bp2-n4-s0", "bp2-n4-s1", "bp2-n4-s2"
FOREVER = 3600.0
MakeTrial = Callable[..., Trial]


@pytest.fixture
def make_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeTrial:
    """``trial_grid`` in a run folder of its own."""
    monkeypatch.setattr(controller_module, "REQUESTS_POLL_SECONDS", 0.002)
    monkeypatch.setattr(controller_module, "IDLE_POLL_SECONDS", 0.001)
    monkeypatch.setattr("os.fsync", lambda _: None)  # power failures have tests of their own
    made: list[Trial] = []

    def make(**grid: Any) -> Trial:
        made.append(Trial(tmp_path / f"run{len(made)}", trial_grid(**grid), monkeypatch))
        return made[-1]

    return make


def undisturbed(
    make_trial: MakeTrial, ratios: dict[tuple[str, int], float] | None = None, **grid: Any
) -> Trial:
    """A trial in which nothing happens."""
    trial = make_trial(**grid)
    trial.start(StandInCluster(ratios=ratios))
    return trial


def once(method: str, cell: str, step: int, act: Act) -> Act:
    """``act`` when this call comes for the first time."""
    met = False

    async def acting(call: Call) -> None:
        nonlocal met
        if not met and (call.method, call.cell, call.step) == (method, cell, step):
            met = True
            await act(call)

    return acting


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        await asyncio.sleep(0.001)


def ask(trial: Trial, action: Any, cell: str) -> None:
    requests.file_request(trial.run_dir, Request(action, cell, False, "the test", time.time()))


def waiting(trial: Trial) -> list[Any]:
    return requests.pending(trial.run_dir)


def finished(*cells: str) -> dict[str, State]:
    return dict.fromkeys(cells, State.FINISHED)


# Requests of operators


def test_a_queued_cell_is_cancelled_and_never_started(make_trial: MakeTrial) -> None:
    trial = make_trial(seeds=3)

    async def cancel(call: Call) -> None:
        ask(trial, "cancel", S2)
        await until(lambda: not waiting(trial))

    trial.start(StandInCluster(once("sample", S0, 0, cancel)))
    assert trial.states() == {"s0": State.FINISHED, "s1": State.FINISHED, "s2": State.CANCELLED}
    assert trial.attempts(S2) == []
    assert "the test" in (trial.state(S2).reason or "")


@pytest.mark.parametrize("cell", [S0, S2])
@pytest.mark.parametrize("times", [1, 2])
def test_a_running_cell_is_cancelled_with_its_work_committed_also_the_last_one(
    make_trial: MakeTrial, cell: str, times: int
) -> None:
    trial = make_trial(seeds=3)

    async def cancel(call: Call) -> None:
        for _ in range(times):
            ask(trial, "cancel", cell)
        await asyncio.sleep(FOREVER)

    trial.start(StandInCluster(once("sample", cell, 3, cancel)))
    others = finished(*{"s0", "s1", "s2"} - {cell[-2:]})
    assert trial.states() == others | {cell[-2:]: State.CANCELLED}
    assert trial.committed_step(cell) == 3
    record = trial.attempts(cell)[-1]
    assert (record.outcome, record.last_step) == ("cancelled", 3)
    assert waiting(trial) == []
    assert trial.tracker.ends[cell][-1] == "cancelled"


def test_a_cell_in_backoff_is_cancelled_and_does_not_come_back(make_trial: MakeTrial) -> None:
    trial = make_trial(seeds=2, backoff_seconds=FOREVER)

    async def act(call: Call) -> None:
        if (call.method, call.cell, call.step) == ("update", S0, 3):
            raise MemberLost("learner 0", "the test")
        if (call.method, call.cell, call.step) == ("sample", S1, 0):
            ask(trial, "cancel", S0)
            await until(lambda: not waiting(trial))

    trial.start(StandInCluster(act))
    assert trial.states() == {"s0": State.CANCELLED, "s1": State.FINISHED}
    assert [record.outcome for record in trial.attempts(S0)] == ["lost"]
    assert trial.committed_step(S0) == 2
    assert trial.tracker.ends[S0][-1] == "cancelled"


def test_a_failed_cell_that_is_retried_while_others_run_is_trained(make_trial: MakeTrial) -> None:
    trial, plain = make_trial(seeds=2), undisturbed(make_trial, seeds=2)
    failed = False

    async def act(call: Call) -> None:
        nonlocal failed
        if (call.method, call.cell, call.step) == ("update", S0, 3) and not failed:
            failed = True
            raise ValueError("wrong input")
        if (call.method, call.cell, call.step) == ("sample", S1, 0):
            assert trial.state(S0).state is State.FAILED
            ask(trial, "retry", S0)
            await until(lambda: not waiting(trial))

    trial.start(StandInCluster(act))
    assert trial.results() == plain.results()
    assert [record.outcome for record in trial.attempts(S0)] == ["failed", "finished"]


def test_a_cell_that_is_cancelled_and_at_once_retried_is_trained_to_its_end(make_trial: MakeTrial) -> None:
    trial, plain = make_trial(seeds=2), undisturbed(make_trial, seeds=2)

    async def cancel_and_retry(call: Call) -> None:
        ask(trial, "cancel", S0)
        ask(trial, "retry", S0)
        await asyncio.sleep(FOREVER)

    trial.start(StandInCluster(once("sample", S0, 3, cancel_and_retry)))
    assert trial.results() == plain.results()
    assert [record.outcome for record in trial.attempts(S0)] == ["cancelled", "finished"]
    assert waiting(trial) == []


def test_a_cancel_that_comes_in_the_last_commit_is_refused_and_the_cell_is_finished(
    make_trial: MakeTrial,
) -> None:
    trial = make_trial(seeds=2)

    async def cancel(call: Call) -> None:
        ask(trial, "cancel", S0)
        await asyncio.sleep(0.05)

    trial.start(StandInCluster(once("save", S0, 6, cancel)))
    assert trial.states() == finished("s0", "s1")
    assert [record.outcome for record in trial.attempts(S0)] == ["finished"]
    assert waiting(trial) == []


def test_a_request_for_an_unknown_cell_or_a_finished_one_disturbs_nothing(make_trial: MakeTrial) -> None:
    trial = make_trial(seeds=2)

    async def cancel(call: Call) -> None:
        ask(trial, "cancel", "bp9-n9-s9")
        ask(trial, "cancel", S0)
        ask(trial, "retry", S1)
        await until(lambda: not waiting(trial))

    trial.start(StandInCluster(once("sample", S1, 3, cancel)))
    assert trial.states() == finished("s0", "s1")
    assert trial.results() == undisturbed(make_trial, seeds=2).results()


# Drained


@pytest.mark.parametrize(
    ("method", "step", "committed"),
    [
        ("begin_cell", 0, 0),
        ("sample", 3, 3),
        ("grade_batch", 3, 3),
        ("sample validation", 4, 4),
        ("evaluate_all", 4, 4),
        ("update", 3, 3),
        ("save", 4, 4),
    ],
)
def test_a_drained_cell_pauses_at_a_commit_of_its_last_step_and_continues_to_the_same_rows(
    make_trial: MakeTrial, method: str, step: int, committed: int
) -> None:
    trial = make_trial(seeds=2)

    async def drain(call: Call) -> None:
        trial.now.drain()
        # Phases that keep no state are given up, and may take for ever; the others are waited for.
        await asyncio.sleep(0.005 if method in ("begin_cell", "update", "save") else FOREVER)

    trial.start(StandInCluster(once(method, S0, step, drain)))
    assert trial.states() == {"s0": State.PAUSED, "s1": State.PENDING}
    assert trial.committed_step(S0) == committed
    assert [(record.outcome, record.last_step) for record in trial.attempts(S0)] == [("paused", committed)]
    trial.start()
    assert trial.results() == undisturbed(make_trial, seeds=2).results()
    assert trial.attempts(S0)[-1].first_step == committed + 1


def test_a_drain_ends_the_wait_of_a_cell_in_backoff(make_trial: MakeTrial) -> None:
    trial = make_trial(seeds=2, backoff_seconds=FOREVER)

    async def act(call: Call) -> None:
        if (call.method, call.cell, call.step) == ("update", S0, 3):
            raise MemberLost("learner 0", "the test")
        if (call.method, call.cell, call.step) == ("sample", S1, 3):
            trial.now.drain()

    trial.start(StandInCluster(act))
    assert trial.state(S0).state in (State.PENDING, State.PAUSED)
    assert trial.committed_step(S0) == 2
    assert (trial.state(S1).state, trial.committed_step(S1)) in [(State.PAUSED, 3), (State.PAUSED, 4)]
    trial.start()
    assert trial.results() == undisturbed(make_trial, seeds=2).results()


def test_a_drain_while_the_pools_start_trains_nothing(make_trial: MakeTrial) -> None:
    trial = make_trial(seeds=2)

    async def drain(call: Call) -> None:
        trial.now.drain()

    trial.start(StandInCluster(once("unsound_golds", "", 0, drain)))
    assert set(trial.states().values()) <= {State.PENDING, State.PAUSED}
    assert not any(call.method == "update" for call in trial.cluster.calls)
    trial.start()
    assert trial.results() == undisturbed(make_trial, seeds=2).results()


DIVERGES_AT_A_MARK = {(S0, 4): 3.0}


@pytest.mark.parametrize("ratios", [{}, DIVERGES_AT_A_MARK], ids=["healthy", "diverging at a mark"])
@pytest.mark.parametrize("pause", [0.0, 0.002], ids=["served", "given up"])
def test_a_drain_at_any_call_changes_nothing_of_what_comes_out(
    make_trial: MakeTrial, ratios: dict[tuple[str, int], float], pause: float
) -> None:
    grid: dict[str, Any] = {"steps": 5, "commits": 3}
    plain = undisturbed(make_trial, ratios, **grid)
    assert plain.states() == {"s0": State.DIVERGED if ratios else State.FINISHED}
    for number in range(plain.cluster.first[S0], plain.cluster.reached):
        trial = make_trial(**grid)

        async def drain(call: Call, trial: Trial = trial, number: int = number) -> None:
            if trial.cluster.reached == number + 1:
                trial.now.drain()
                await asyncio.sleep(pause)

        trial.start(StandInCluster(drain, ratios))
        made = max((call.step for call in trial.cluster.calls if call.method == "update"), default=0)
        if trial.state(S0).state is State.PAUSED:
            assert trial.committed_step(S0) == made, number
        else:
            assert trial.results() == plain.results(), number
        trial.start(StandInCluster(ratios=ratios))
        assert trial.results() == plain.results(), number


IN_FLIGHT = pytest.mark.parametrize("places", [{"groups": 2}, {"slots": 2}], ids=["groups", "slots"])


@IN_FLIGHT
def test_several_cells_in_flight_end_as_one_after_the_other(
    make_trial: MakeTrial, places: dict[str, Any]
) -> None:
    trial = undisturbed(make_trial, seeds=5, **places)
    assert trial.results() == undisturbed(make_trial, seeds=5).results()
    updates = [call.cell for call in trial.cluster.calls if call.method == "update"]
    assert updates != sorted(updates), "no two cells were in flight"


@IN_FLIGHT
def test_several_cells_in_flight_pause_together(make_trial: MakeTrial, places: dict[str, Any]) -> None:
    trial = make_trial(seeds=3, **places)
    told: list[str] = []

    async def drain(call: Call) -> None:
        if (call.method, call.step) == ("grade_batch", 3):
            if call.cell == S1:
                told.append("drain")
                trial.now.drain()
            # The other cell may be the faster one, and would be finished by then.
            await until(lambda: bool(told))

    trial.start(StandInCluster(drain))
    assert trial.states() == {"s0": State.PAUSED, "s1": State.PAUSED, "s2": State.PENDING}
    for cell in (S0, S1):
        made = [call.step for call in trial.cluster.calls if (call.method, call.cell) == ("update", cell)]
        assert trial.committed_step(cell) == max(made)
    trial.start()
    assert trial.results() == undisturbed(make_trial, seeds=3).results()


def test_steps_go_on_beside_an_evaluation_whose_row_comes_later(make_trial: MakeTrial) -> None:
    trial = make_trial(steps=6, commits=100)
    rows_at: dict[int, int] = {}

    async def act(call: Call) -> None:
        if (call.method, call.step) == ("sample validation", 2):
            # Longer than the way to the next mark, which waits for it.
            await until(
                lambda: any(made.method == "update" and made.step == 4 for made in trial.cluster.calls)
            )
        if call.method == "update":
            rows_at[call.step] = len(trial.folder.cell(S0).rows())

    trial.start(StandInCluster(act))
    assert trial.results() == undisturbed(make_trial, steps=6, commits=100).results()
    assert (rows_at[3], rows_at[4], rows_at[5]) == (0, 0, 1)


def test_a_commit_waits_for_the_rows_up_to_its_step(make_trial: MakeTrial) -> None:
    trial = make_trial(steps=6, commits=3)
    evaluated = asyncio.Event()
    commits: list[tuple[int, bool, int]] = []

    async def act(call: Call) -> None:
        if (call.method, call.step) == ("sample validation", 2):
            await asyncio.sleep(0.05)
            evaluated.set()
        if call.method == "save":
            commits.append((call.step, evaluated.is_set(), len(trial.folder.cell(S0).rows())))

    trial.start(StandInCluster(act))
    assert commits[0] == (3, True, 1)
    assert trial.results() == undisturbed(make_trial, steps=6, commits=3).results()


@pytest.mark.parametrize("step", [3, 5])
def test_a_drain_beside_an_evaluation_commits_once_its_row_is_there(make_trial: MakeTrial, step: int) -> None:
    trial = make_trial(steps=6, commits=100)
    release = asyncio.Event()

    async def act(call: Call) -> None:
        if call.method == "sample validation" and call.step == step - 1:
            await release.wait()
        if (call.method, call.step) == ("update", step):
            trial.now.drain()
            asyncio.get_running_loop().call_later(0.02, release.set)

    trial.start(StandInCluster(act))
    assert (trial.state(S0).state, trial.committed_step(S0)) == (State.PAUSED, step)
    assert [row["step"] for row in trial.folder.cell(S0).rows()] == [2, 4][: step // 2]
    trial.start()
    assert trial.results() == undisturbed(make_trial, steps=6, commits=100).results()


def test_a_cell_that_diverges_beside_an_evaluation_keeps_that_row(make_trial: MakeTrial) -> None:
    ratios, trial = {(S0, 3): 3.0}, make_trial(steps=6, commits=100)

    async def act(call: Call) -> None:
        if (call.method, call.step) == ("sample validation", 2):
            await until(
                lambda: any(made.method == "update" and made.step == 3 for made in trial.cluster.calls)
            )

    trial.start(StandInCluster(act, ratios))
    assert trial.state(S0).state is State.DIVERGED
    assert [row["step"] for row in trial.folder.cell(S0).rows()] == [2]


def test_an_evaluation_that_fails_beside_later_steps_costs_an_attempt_and_no_result(
    make_trial: MakeTrial,
) -> None:
    trial = make_trial(steps=6, commits=100)
    failures = 0

    async def act(call: Call) -> None:
        nonlocal failures
        if (call.method, call.step) == ("sample validation", 2) and failures < 2:
            failures += 1  # once more than a phase is repeated
            await asyncio.sleep(0.005)
            raise MemberLost("sampler 0", "the test")

    trial.start(StandInCluster(act))
    assert [record.outcome for record in trial.attempts(S0)] == ["lost", "finished"]
    assert trial.results() == undisturbed(make_trial, steps=6, commits=100).results()


def test_pools_are_told_what_they_work_on(make_trial: MakeTrial) -> None:
    trial = undisturbed(make_trial, steps=2)
    asked = [
        (work.kind, work.step, work.sequences, work.tokens) for work in trial.cluster.asked if work.cell == S0
    ]
    # Batches of 2 problems x 4 rollouts, 4 tokens each; 4 validation problems x 4 answers after step 2. Tokens of
    # sampling are known only afterwards.
    assert asked == [
        ("sampling", 1, 8, 0),
        ("grading", 1, 8, 32),
        ("learning", 1, 8, 32),
        ("sampling", 2, 8, 0),
        ("grading", 2, 8, 32),
        ("learning", 2, 8, 32),
        ("evaluation", 2, 16, 0),
        ("evaluation grading", 2, 16, 64),
    ]
    sampling = [work for work in trial.cluster.asked if work.kind in ("sampling", "evaluation")]
    pairs = [(Sampled(7, 0.5), None), (Sampled(4, 0.5), None)]
    assert all(work.count_tokens is not None and work.count_tokens(pairs) == 11 for work in sampling)


def test_a_part_of_a_batch_that_is_tried_alone_counts_as_a_part(make_trial: MakeTrial) -> None:
    trial = make_trial(steps=2)

    async def fail(call: Call) -> None:
        if (call.method, call.cell) == ("sample", S0):
            raise ValueError("wrong input")

    trial.start(StandInCluster(fail))
    assert trial.states() == {"s0": State.FAILED}
    # The batch of 2 problems, and each of them, of 4 rollouts, alone.
    assert {work.sequences for work in trial.cluster.asked if work.cell == S0} == {8, 4}


def test_the_cell_with_the_most_work_left_is_started_first_and_is_the_most_urgent(
    make_trial: MakeTrial,
) -> None:
    trial = make_trial(seeds=3)

    async def drain(call: Call) -> None:
        trial.now.drain()

    trial.start(StandInCluster(once("sample", S0, 3, drain)))
    assert trial.committed_step(S0) == 3
    trial.start()
    first = trial.cluster.first
    assert first[S1] < first[S2] < first[S0]
    urgencies = [work.urgency for work in trial.cluster.asked if work.cell == S1 and work.kind == "sampling"]
    assert urgencies == sorted(urgencies, reverse=True) and urgencies[0] > urgencies[-1] > 0


# Cancelled at once


async def in_loop(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """``asyncio.to_thread`` in turns of the event loop that can be counted."""
    await asyncio.sleep(0)
    result = function(*arguments, **named)
    await asyncio.sleep(0)
    return result


def test_a_cancellation_at_any_turn_leaves_a_whole_record_and_the_same_rows_later(
    make_trial: MakeTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "to_thread", in_loop)
    grid: dict[str, Any] = {"steps": 3, "commits": 2}
    plain = undisturbed(make_trial, **grid)
    turns, seen = 0, set()
    while True:
        trial = make_trial(**grid)
        done = cancelled_after(trial, turns)
        state, records = trial.state(S0), trial.attempts(S0)
        seen.add(state.state)
        if records:
            assert state.state in (State.PAUSED, State.FINISHED), turns
            outcome = "paused" if state.state is State.PAUSED else "finished"
            assert (records[-1].outcome, records[-1].ended_at is not None) == (outcome, True), turns
            assert records[-1].last_step == trial.committed_step(S0), turns
            assert trial.tracker.ends[S0] == [state.state], turns
        else:
            assert state.state is State.PENDING, turns
        if done:
            break
        trial.start()
        assert trial.results() == plain.results(), turns
        turns += 1
    assert seen == {State.PENDING, State.PAUSED, State.FINISHED}


def cancelled_after(trial: Trial, turns: int) -> bool:
    """A run that is cancelled after so many turns of the event loop; whether it had come to its end by then."""

    async def run() -> bool:
        task = asyncio.ensure_future(controller.run(cells, trial.folder.states()))
        for _ in range(turns):
            await asyncio.sleep(0)
        done = task.done()
        task.cancel()
        if done:
            await task
        else:
            with pytest.raises(asyncio.CancelledError):
                await task
        return done

    with trial.controller() as (controller, cells):
        return asyncio.run(run())


# Pools and learners that fail


@pytest.mark.parametrize("method", ["sample", "grade_batch", "sample validation", "evaluate_all"])
def test_the_loss_of_a_shared_pool_pauses_the_cells_and_costs_them_nothing(
    make_trial: MakeTrial, method: str
) -> None:
    trial = make_trial(seeds=3, groups=2, steps=5, commits=3)

    async def lose(call: Call) -> None:
        if (call.method, call.cell) == (method, S0) and call.step == 4:
            raise PoolLost("no sampler can be started: the test")

    with pytest.raises(PoolLost, match="the test"):
        trial.start(StandInCluster(lose))
    state = trial.state(S0)
    assert (state.state, state.spent.own_failures, state.spent.preemptions) == (State.PAUSED, 0, 0)
    assert trial.attempts(S0)[-1].outcome == "paused"
    assert set(trial.states().values()) <= {State.PAUSED, State.PENDING, State.FINISHED}
    if trial.attempts(S1):
        assert trial.attempts(S1)[-1].outcome in ("paused", "finished")
    trial.start()
    plain = undisturbed(make_trial, seeds=3, groups=2, steps=5, commits=3)
    assert trial.results() == plain.results()


def test_a_cell_whose_learner_fails_is_tried_again_after_a_backoff_and_ends_the_same(
    make_trial: MakeTrial,
) -> None:
    trial = make_trial(seeds=2, backoff_seconds=0.05)

    async def fail(call: Call) -> None:
        raise MemberLost("learner 0 rank 0", "the test")

    trial.start(StandInCluster(once("update", S0, 5, fail)))
    first, second = trial.attempts(S0)
    assert (first.outcome, first.last_step, first.fault) == ("lost", 4, "process lost")
    assert (second.outcome, second.first_step) == ("finished", 5)
    assert first.ended_at is not None and second.started_at - first.ended_at >= 0.04
    # The group served the other cell meanwhile.
    assert trial.attempts(S1)[0].started_at < second.started_at
    assert trial.results() == undisturbed(make_trial, seeds=2).results()


def test_a_broken_group_costs_the_other_cell_that_it_held_a_preemption(make_trial: MakeTrial) -> None:
    trial = make_trial(seeds=2, slots=2)
    held, failed = asyncio.Event(), asyncio.Event()

    async def act(call: Call) -> None:
        if (call.method, call.cell, call.step) == ("update", S0, 2) and not failed.is_set():
            await held.wait()
            failed.set()
            raise MemberLost("learner 0 rank 0", "the test")
        if (call.method, call.cell, call.step) == ("sample", S1, 1):
            held.set()
            await failed.wait()

    trial.start(StandInCluster(act))
    assert trial.results() == undisturbed(make_trial, seeds=2).results()
    assert [(record.outcome, record.fault) for record in trial.attempts(S0)] == [
        ("lost", "process lost"),
        ("finished", None),
    ]
    assert [(record.outcome, record.fault) for record in trial.attempts(S1)] == [
        ("lost", "node lost"),
        ("finished", None),
    ]
    assert sum(call.method == "open" for call in trial.cluster.calls.elements()) == 2


def test_a_spent_budget_fails_a_cell_and_stops_no_other(make_trial: MakeTrial) -> None:
    trial = make_trial(seeds=3, own_failures=2)

    async def fail(call: Call) -> None:
        if (call.method, call.cell, call.step) == ("update", S0, 3):
            raise MemberLost("learner 0 rank 0", "the test")

    trial.start(StandInCluster(fail))
    assert trial.states() == finished("s1", "s2") | {"s0": State.FAILED}
    assert [record.outcome for record in trial.attempts(S0)] == ["lost", "lost", "failed"]
    assert trial.state(S0).spent_now == Spent(own_failures=2, at_step=2)
    assert "all 2 retries since step 2 are spent" in (trial.state(S0).reason or "")
    plain = undisturbed(make_trial, seeds=3).results()
    assert {cell: trial.results()[cell] for cell in (S1, S2)} == {cell: plain[cell] for cell in (S1, S2)}
    assert trial.tracker.ends[S0] == ["failed"]


def test_a_group_that_cannot_be_opened_again_is_given_up_and_another_takes_its_cell(
    make_trial: MakeTrial,
) -> None:
    trial = make_trial(seeds=3, groups=2)
    broken = ""

    async def fail(call: Call) -> None:
        nonlocal broken
        if not broken and (call.method, call.cell, call.step) == ("update", S0, 3):
            broken = call.role
            raise MemberLost(f"{broken} rank 0", "the test")
        if broken and (call.method, call.role) == ("open", broken):
            raise MemberLost(f"{broken} rank 0", "no place")

    trial.start(StandInCluster(fail))
    assert trial.results() == undisturbed(make_trial, seeds=3, groups=2).results()
    roles = {call.role for call in trial.cluster.calls if (call.method, call.cell) == ("update", S0)}
    assert len(roles) == 2
    assert any("given up, 1 are left" in line for line in trial.console.said)


def test_the_members_of_a_group_that_is_given_up_are_ended_while_the_others_still_train(
    make_trial: MakeTrial,
) -> None:
    trial = make_trial(seeds=2, groups=2)
    lost: list[str] = []
    ended_meanwhile: list[bool] = []

    async def act(call: Call) -> None:
        if call.method == "update" and not lost:
            lost.append(call.role)
            raise MemberLost(f"{call.role} rank 0", "the test")
        if lost and (call.method, call.role) == ("open", lost[0]):
            raise MemberLost(f"{call.role} rank 0", "no place")
        if (call.method, call.step) == ("save", 6):
            group = trial.cluster.groups[int(lost[0].rpartition(" ")[2])]
            ended_meanwhile.append(all(member.ended for member in group.members))

    trial.start(StandInCluster(act))
    assert ended_meanwhile == [True, True]


def test_the_loss_of_the_last_group_is_the_loss_of_the_pool(make_trial: MakeTrial) -> None:
    trial = make_trial(seeds=2)
    broken = False

    async def fail(call: Call) -> None:
        nonlocal broken
        if (call.method, call.cell, call.step) == ("update", S0, 3):
            broken = True
            raise MemberLost("learner 0 rank 0", "the test")
        if broken and call.method == "open":
            raise MemberLost("learner 0 rank 0", "no place")

    with pytest.raises(PoolLost, match="no place"):
        trial.start(StandInCluster(fail))
    assert set(trial.states().values()) <= {State.PENDING, State.PAUSED}
    trial.start()
    assert trial.results() == undisturbed(make_trial, seeds=2).results()


# Full storage


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def test_full_storage_pauses_the_cell_that_meets_it_and_no_other(make_trial: MakeTrial) -> None:
    trial = make_trial(seeds=2)

    async def fill(call: Call) -> None:
        raise full()

    trial.start(StandInCluster(once("save", S0, 4, fill)))
    assert trial.states() == {"s0": State.PAUSED, "s1": State.FINISHED}
    record = trial.attempts(S0)[-1]
    assert (record.outcome, record.fault, record.last_step) == ("paused", "storage full", 2)
    trial.start()
    assert trial.results() == undisturbed(make_trial, seeds=2).results()


@pytest.mark.parametrize("write", ["set_state", "end_attempt", "write_failure"])
def test_storage_too_full_for_the_end_of_an_attempt_is_said_and_stops_no_other_cell(
    make_trial: MakeTrial, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    trial = make_trial(seeds=2)
    real = getattr(CellStore, write)
    on = False

    def writes(store: CellStore, *arguments: Any, **named: Any) -> Any:
        if on and store.cell == S0:
            raise full()
        return real(store, *arguments, **named)

    async def fail(call: Call) -> None:
        nonlocal on
        on = True
        raise ValueError("wrong input")

    monkeypatch.setattr(CellStore, write, writes)
    trial.start(StandInCluster(once("update", S0, 3, fail)))
    assert trial.state(S1).state is State.FINISHED
    assert any(line.startswith(f"{S0}: the storage is full") for line in trial.console.said)
    assert trial.committed_step(S0) == 2
