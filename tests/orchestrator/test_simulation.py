"""Grids in virtual time: makespans that can be worked out by hand, losses in the middle, and the bound that none can beat."""

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from grids.expansion import expand
from grids.loading import dump_grid
from grids.spec import GridSpec
from orchestrator.scheduling.costs import CostModel
from orchestrator.simulation.bound import Bound, makespan_bound
from orchestrator.simulation.conditions import Conditions, RandomLosses
from orchestrator.simulation.simulator import Outcome, simulate
from orchestrator.simulation.virtual_time import NothingHappens, run_in_virtual_time
from orchestrator.store.phase_log import PhaseKind, PhaseRecord
from tests.orchestrator.stand_in_pools import trial_grid

SAMPLING, LEARNING, GRADING = PhaseKind.SAMPLING, PhaseKind.LEARNING, PhaseKind.GRADING
EVALUATION, COMMIT, TAKING_UP = PhaseKind.EVALUATION, PhaseKind.COMMIT, PhaseKind.TAKING_UP


@dataclass
class Fixed:
    """Each call of a kind takes the same time; each rollout of it as much more."""

    calls: Mapping[PhaseKind, float]
    sequences: Mapping[PhaseKind, float] = field(default_factory=dict)

    def seconds(self, kind: PhaseKind, sequences: int) -> float:
        return self.calls.get(kind, 0.0) + self.sequences.get(kind, 0.0) * sequences


class Scripted:
    """Members that live as long as a test says, one after the other in a place, and the next one for ever."""

    def __init__(self, **lifetimes: Sequence[float]) -> None:
        self._left = {name.replace("_", " "): list(seconds) for name, seconds in lifetimes.items()}

    def draw(self, member: str, processes: int) -> float:
        left = self._left.get(member)
        return left.pop(0) if left else math.inf


class Recorded(CostModel):
    """Keeps what it sees."""

    def __init__(self) -> None:
        self.seen: list[PhaseRecord] = []
        super().__init__()

    def observe(self, record: PhaseRecord) -> None:
        self.seen.append(record)
        super().observe(record)


TWO_AND_ONE = Fixed({SAMPLING: 2.0, LEARNING: 1.0})


def grid(
    *,
    cells: int = 1,
    steps: int = 3,
    slots: int = 1,
    engines: int = 1,
    groups: int = 1,
    marks: bool = False,
    commits: int = 1000,
    full_engine: int = 1000,
    batch: tuple[int, int] = (2, 4),
    **failures: Any,
) -> GridSpec:
    """Cells of batches of (problems, rollouts of each); those of 2 * 4 are evaluated after steps 2, 4, 8 ... where ``marks``."""
    spec = dump_grid(trial_grid(cells, steps, groups, slots, commits, **failures))
    problems, rollouts = batch
    spec["grid"] |= {"problems_per_batch": [problems], "rollouts_per_problem": [rollouts]}
    spec["grid"]["compute_rollouts"] = steps * problems * rollouts
    spec["pools"]["samplers"] |= {"count": engines, "cpus": 4, "max_sequences": full_engine}
    spec["pools"]["learners"] |= {"ranks": 3, "cpus": 1}
    if not marks:
        spec["evaluation"]["first_mark"] = 10**9
    return GridSpec.model_validate(spec)


def outcome(spec: GridSpec, times: Fixed = TWO_AND_ONE, **conditions: Any) -> Outcome:
    return simulate(spec, expand(spec), Conditions(times, **conditions), CostModel())


def test_a_cell_alone_takes_one_phase_after_the_other() -> None:
    times = Fixed({TAKING_UP: 5.0, SAMPLING: 2.0, GRADING: 0.5, LEARNING: 1.0, COMMIT: 3.0})
    # 5 + 3 * 3.5 + 3, and a commit after the second step.
    assert outcome(grid(), times).wall_seconds == pytest.approx(18.5)
    assert outcome(grid(commits=2), times).wall_seconds == pytest.approx(21.5)


@pytest.mark.parametrize(
    ("sampling", "learning", "one_slot", "two_slots"),
    [
        (2.0, 1.0, 18.0, 13.0),  # six times 2 on the engine, and the last learning
        (1.0, 2.0, 18.0, 13.0),  # the first sampling, and six times 2 in the group
        (2.0, 2.0, 24.0, 14.0),
    ],
)
def test_a_second_slot_fills_the_gaps_of_two_cells(
    sampling: float, learning: float, one_slot: float, two_slots: float
) -> None:
    times = Fixed({SAMPLING: sampling, LEARNING: learning})
    makespans = [outcome(grid(cells=2, slots=slots), times).wall_seconds for slots in (1, 2)]
    assert makespans == pytest.approx([one_slot, two_slots])


def test_a_cell_that_waits_does_not_end_alone() -> None:
    """The engine is at work for 4 * 40 * 2 s. Were the three cells in flight served alike, they would end after 3 * 40 * 2 s, and
    the fourth, alone, 40 * 3 s later."""
    assert outcome(grid(cells=4, steps=40, slots=3)).wall_seconds == pytest.approx(321, abs=2)


def test_busy_shares_and_accelerators_are_accounted_to_what_they_did() -> None:
    seen = outcome(grid(cells=2, slots=2))
    assert seen.busy_shares == pytest.approx({"sampler": 12 / 13, "learner": 6 / 13, "grader": 0})
    # An engine of 4 cores, a group of 3 ranks of one core.
    assert seen.held_accelerator_seconds == pytest.approx(13 * 7)
    assert seen.accelerator_seconds[SAMPLING] == pytest.approx(12 * 4)
    assert seen.accelerator_seconds[LEARNING] == pytest.approx(6 * 3)
    assert seen.idle_share == pytest.approx(1 - (48 + 18) / 91)
    assert (seen.finished, seen.failed, seen.attempts, seen.lost_accelerator_seconds) == (2, 0, 2, 0)


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        # Steps end at 3, 6; the evaluation of step 2 is begun at 6. One engine samples step 3 first: 6 to 8, then evaluates
        # to 12; step 4 waits for it: 12 to 14 and learnt at 15; its evaluation to 19.
        (1, 19.0),
        # Two: step 4 is learnt at 12; its evaluation to 16.
        (2, 16.0),
    ],
)
def test_evaluations_run_beside_later_steps_and_the_last_one_is_waited_for(
    engines: int, expected: float
) -> None:
    times = Fixed({SAMPLING: 2.0, LEARNING: 1.0, EVALUATION: 4.0})
    spec = grid(steps=4, engines=engines, marks=True)
    assert outcome(spec, times, evaluation=((10, 1),)).wall_seconds == pytest.approx(expected)


def test_evaluations_wait_for_all_training() -> None:
    # Two cells, four steps each, keep the only engine busy for 16 s. Both wait for the evaluations of step 2 when they begin.
    times = Fixed({SAMPLING: 2.0, LEARNING: 1.0, EVALUATION: 4.0})
    spec, costs = grid(cells=2, slots=2, steps=4, marks=True), Recorded()
    simulate(spec, expand(spec), Conditions(times, ((10, 1),)), costs)
    begun = [record.started_at for record in costs.seen if record.kind is EVALUATION]
    assert begun == pytest.approx([16, 20, 24, 28])


def test_an_evaluation_that_the_longest_cell_waits_for_comes_before_the_training_of_others() -> None:
    # Two cells of 6 steps would keep the only engine busy without a gap. One of 10 samples at 0 s and, once all have and costs
    # are known, every other time: steps 2, 3 and 4 at 6, 10 and 14 s, the last of which it has learnt from at 17 s. Then it waits
    # for the evaluation of step 2, which comes as soon as the engine has sampled for another cell, at 18 s.
    times = Fixed({SAMPLING: 2.0, LEARNING: 1.0, EVALUATION: 4.0})
    spec, costs = grid(cells=3, slots=3, steps=10, marks=True), Recorded()
    longest, *others = expand(spec)
    cells = [longest, *(replace(cell, update_steps=6) for cell in others)]
    simulate(spec, cells, Conditions(times, ((10, 1),)), costs)
    begun = [record.started_at for record in costs.seen if record.kind is EVALUATION]
    assert begun[0] == pytest.approx(18)


def test_a_batch_spreads_over_free_engines() -> None:
    # 8 rollouts of 0.5 s each, in two parts of 4, or whole where an engine wants 8 at once.
    times = Fixed({LEARNING: 1.0}, {SAMPLING: 0.5})
    assert outcome(grid(engines=2, full_engine=4), times).wall_seconds == pytest.approx(9)
    assert outcome(grid(engines=2, full_engine=8), times).wall_seconds == pytest.approx(15)


@pytest.mark.parametrize(
    ("grading", "handover", "step"),
    [
        (1.0, 0.0, 8.0),  # graded from 2 to 3, from 4 to 5 and from 6 to 7
        (1.0, 0.5, 8.5),  # the last one from 6.5
        (3.0, 0.0, 12.0),  # the grader is behind: from 2 to 5, to 8, to 11
    ],
)
def test_slices_of_a_part_are_graded_while_it_is_sampled(
    grading: float, handover: float, step: float
) -> None:
    # Three slices of 512 rollouts come after 2, 4 and 6 s; then 1 s of learning.
    times = Fixed({SAMPLING: 6.0, LEARNING: 1.0}, {GRADING: grading / 512})
    seen = outcome(grid(steps=2, batch=(3, 512)), times, handovers={GRADING: handover})
    assert seen.wall_seconds == pytest.approx(2 * step)
    assert seen.busy_shares["grader"] == pytest.approx(3 * grading / step)


def test_slices_of_parts_side_by_side_share_the_grader() -> None:
    # Two parts of two slices: two come after 2 s and two after 4 s, and are graded from 2 to 4 and from 4 to 6.
    times = Fixed({SAMPLING: 4.0, GRADING: 1.0, LEARNING: 1.0})
    spec = grid(steps=1, batch=(4, 512), engines=2, full_engine=1024)
    assert outcome(spec, times).wall_seconds == pytest.approx(7)


def test_of_a_part_whose_engine_is_lost_no_grading_is_kept() -> None:
    times, costs = Fixed({SAMPLING: 6.0, GRADING: 3.0, LEARNING: 1.0}), Recorded()
    spec = grid(steps=1, batch=(3, 512), backoff_seconds=2)
    world = Conditions(times, lifetimes=Scripted(sampler_0=[5.0]), restart_seconds=1)
    wall = simulate(spec, expand(spec), world, costs).wall_seconds
    # Slices came at 2 and 4; the engine is lost at 5 and tried again from 7 to 13. The second slice is then being graded.
    graded = [(one.started_at, one.ended_at, one.failed) for one in costs.seen if one.kind is GRADING]
    assert graded == [(2, 5, False), (5, 7, True), (9, 12, False), (12, 15, False), (15, 18, False)]
    assert wall == pytest.approx(19)


def test_handovers_lengthen_the_chain_and_keep_nobody_busy() -> None:
    seen = outcome(grid(), handovers={SAMPLING: 0.25, GRADING: 0.125, LEARNING: 0.5})
    assert seen.wall_seconds == pytest.approx(3 * 3.875)
    assert seen.busy_shares["sampler"] == pytest.approx(6 / 11.625)


def test_a_lost_engine_costs_a_repeat_of_the_phase() -> None:
    spec = grid(steps=2, backoff_seconds=2)
    seen = outcome(spec, lifetimes=Scripted(sampler_0=[1.0]), restart_seconds=10)
    # Lost at 1, asked for again at 3, back at 11: 11 to 13, learnt at 14; the second step to 17.
    assert seen.wall_seconds == pytest.approx(17)
    assert (seen.finished, seen.attempts, dict(seen.losses)) == (1, 1, {"sampler": 1})
    assert seen.lost_accelerator_seconds == pytest.approx(1 * 4)


def test_repeats_of_a_phase_that_are_spent_cost_an_attempt() -> None:
    spec = grid(steps=2, backoff_seconds=2, phase_repeats=0)
    seen = outcome(spec, lifetimes=Scripted(sampler_0=[4.0]), restart_seconds=10)
    # The first step at 3, lost at 4, back at 14: both steps again.
    assert seen.wall_seconds == pytest.approx(20)
    assert seen.attempts == 2
    # One second of sampling broken off; sampling and learning of the first step.
    assert seen.lost_accelerator_seconds == pytest.approx(1 * 4 + 2 * 4 + 1 * 3)


def test_the_repeats_of_a_phase_are_counted() -> None:
    spec = grid(steps=2, backoff_seconds=2, phase_repeats=1)
    seen = outcome(spec, lifetimes=Scripted(sampler_0=[1.0, 0.5]), restart_seconds=10)
    # Lost at 1 and, back at 11, again at 11.5; back at 21.5 for a new attempt.
    assert (seen.wall_seconds, seen.attempts) == (pytest.approx(27.5), 2)


def test_a_cell_whose_retries_are_spent_has_failed() -> None:
    spec = grid(steps=1, backoff_seconds=2, own_failures=1)
    seen = outcome(spec, lifetimes=Scripted(learner_0=[2.5, 2.25]), restart_seconds=10)
    # Lost at 2.5, back at 12.5; sampled at 14.5, lost at 14.75.
    assert (seen.finished, seen.failed, seen.attempts) == (0, 1, 2)
    assert seen.wall_seconds == pytest.approx(14.75)


@pytest.mark.parametrize(("commits", "wall", "lost"), [(1, 18.5, 2 * 4), (1000, 21.5, 4 * 4 + 1 * 3)])
def test_a_lost_group_costs_what_no_commit_had_kept(commits: int, wall: float, lost: float) -> None:
    spec = grid(steps=2, commits=commits, backoff_seconds=2)
    seen = outcome(spec, lifetimes=Scripted(learner_0=[5.5]), restart_seconds=10)
    # The first step at 3, the second is sampled at 5 and breaks off at 5.5; the group is back at 15.5.
    assert seen.wall_seconds == pytest.approx(wall)
    assert (seen.finished, seen.attempts) == (1, 2)
    assert seen.lost_accelerator_seconds == pytest.approx(lost + 0.5 * 3)


def test_work_that_was_done_side_by_side_is_lost_as_a_whole() -> None:
    # Steps end at 3, 6, ... The evaluations of steps 2 and 4 run on the second engine from 6 to 10 and from 12 to 16, beside
    # sampling and learning. Step 8 is sampled at 23, and its learning finds the group dead: eight times 2 s of sampling and
    # two evaluations of 4 s on 4 cores, seven times 1 s of learning on 3.
    times = Fixed({SAMPLING: 2.0, LEARNING: 1.0, EVALUATION: 4.0})
    spec = grid(steps=8, engines=2, marks=True, backoff_seconds=2)
    lost: dict[str, Any] = {"lifetimes": Scripted(learner_0=[22.5]), "restart_seconds": 10}
    seen = outcome(spec, times, evaluation=((10, 1),), **lost)
    assert seen.lost_accelerator_seconds == pytest.approx((8 * 2 + 2 * 4) * 4 + 7 * 3)
    # What was done beyond that is the grid once: eight steps and the evaluations of steps 2, 4 and 8.
    done = sum(seen.accelerator_seconds.values())
    assert done - seen.lost_accelerator_seconds == pytest.approx((8 * 2 + 3 * 4) * 4 + 8 * 3)


def test_all_parts_of_a_batch_are_lost() -> None:
    # Two parts of 4 rollouts, 2 s each: the first step at 3, the second is sampled at 5 and finds the group dead.
    times = Fixed({LEARNING: 1.0}, {SAMPLING: 0.5})
    spec = grid(steps=2, engines=2, full_engine=4, backoff_seconds=2)
    seen = outcome(spec, times, lifetimes=Scripted(learner_0=[4.5]), restart_seconds=10)
    assert seen.lost_accelerator_seconds == pytest.approx(2 * 2 * 2 * 4 + 1 * 3)


@pytest.mark.parametrize(
    ("policy", "finished", "wall"),
    [({}, 2, 17.5), ({"own_failures": 0}, 1, 15.5), ({"preemptions": 0}, 1, 15.5)],
)
def test_a_group_takes_all_its_cells_along_and_bystanders_pay_from_preemptions(
    policy: dict[str, Any], finished: int, wall: float
) -> None:
    # One cell is learning from 2 to 3 when the group is lost at 2.5; the other samples until 4. It is back at 12.5.
    spec = grid(cells=2, slots=2, steps=1, backoff_seconds=2, **policy)
    seen = outcome(spec, lifetimes=Scripted(learner_0=[2.5]), restart_seconds=10)
    assert (seen.finished, seen.failed) == (finished, 2 - finished)
    assert seen.attempts == 2 + finished
    assert seen.wall_seconds == pytest.approx(wall)


def test_a_cell_that_was_held_by_an_earlier_start_of_its_group_is_lost() -> None:
    spec = grid(cells=2, slots=2, steps=1, backoff_seconds=2)
    seen = outcome(spec, lifetimes=Scripted(learner_0=[2.5]), restart_seconds=0.5)
    # The group is back at 3, before the other cell is sampled at 4; that one comes back at 6, when the first, back at 4.5,
    # is still being sampled: 6.5 to 8.5, learnt at 9.5.
    assert (seen.wall_seconds, seen.attempts) == (pytest.approx(9.5), 4)


def test_the_same_seed_gives_the_same_world() -> None:
    spec = grid(cells=6, slots=2, groups=2, engines=3, steps=20, backoff_seconds=1)
    walls = [
        outcome(spec, lifetimes=RandomLosses(100.0, seed), restart_seconds=5).wall_seconds
        for seed in (0, 0, 1)
    ]
    assert walls[0] == walls[1] != walls[2]


def test_the_bound_is_the_busiest_pool_or_the_longest_cell() -> None:
    times = Fixed(
        {TAKING_UP: 1.0, SAMPLING: 1.0, GRADING: 0.25, LEARNING: 2.0, COMMIT: 3.0, EVALUATION: 6.0},
        {SAMPLING: 0.5},
    )
    spec = grid(cells=10, steps=4, engines=4, groups=2, full_engine=4, marks=True)
    bound = makespan_bound(spec, expand(spec), Conditions(times, ((4, 1),), {LEARNING: 0.5}))
    # A step samples 1 + 8 * 0.5 = 5, or two parts of 1 + 4 * 0.5 = 3 each; two evaluations, after steps 2 and 4.
    assert bound == pytest.approx(
        Bound(
            sampling=10 * (4 * 5 + 2 * 6) / 4,
            learning=10 * (1 + 4 * 2 + 3) / 2,
            grading=10 * 4 * 0.25,
            chain=1 + 4 * (3 + 0.25 + 2 + 0.5) + 6 + 3,
        )
    )
    assert bound.seconds == pytest.approx(80)


def test_the_longest_cell_waits_for_the_grading_of_its_last_slice_only() -> None:
    # Three slices of 512 rollouts, 1 s of grading each; an evaluation of 3 * 512 rollouts is graded whole, and by 2 s each.
    times = Fixed(
        {SAMPLING: 6.0, LEARNING: 1.0, EVALUATION: 6.0},
        {GRADING: 1 / 512, PhaseKind.EVALUATION_GRADING: 2 / 512},
    )
    spec = grid(steps=2, batch=(3, 512), marks=True)  # both steps are evaluated
    conditions = Conditions(times, ((3, 512),))
    bound = makespan_bound(spec, expand(spec), conditions)
    assert bound.grading == pytest.approx(2 * (3 + 6))
    assert bound.chain == pytest.approx(2 * (6 + 1 + 1) + 6 + 6)


@pytest.mark.parametrize("seed", range(20))
def test_no_grid_is_faster_than_its_bound(seed: int) -> None:
    draws = random.Random(seed)
    small = (2, 4), draws.choice([2, 4, 8])
    sliced = (draws.randint(2, 6), 512), draws.choice([256, 700, 2000])
    batch, full_engine = draws.choice([small, sliced])
    spec = grid(
        cells=draws.randint(1, 8),
        steps=draws.randint(1, 9),
        slots=draws.randint(1, 3),
        engines=draws.randint(1, 4),
        groups=draws.randint(1, 2),
        marks=True,
        batch=batch,
        full_engine=full_engine,
    )
    times = Fixed(
        {kind: draws.uniform(0, 3) for kind in PhaseKind}, {kind: draws.uniform(0, 0.2) for kind in PhaseKind}
    )
    conditions: dict[str, Any] = {"evaluation": ((4, 2), (2, 1)), "handovers": {SAMPLING: 0.1}}
    bound = makespan_bound(spec, expand(spec), Conditions(times, **conditions)).seconds
    assert outcome(spec, times, **conditions).wall_seconds >= bound * (1 - 1e-9)


def slept(seconds: Sequence[float]) -> list[tuple[float, float]]:
    """(virtual time, seconds) of sleepers side by side, in the order in which they wake."""
    woken: list[tuple[float, float]] = []

    async def sleeper(one: float) -> None:
        await asyncio.sleep(one)
        woken.append((asyncio.get_running_loop().time(), one))

    async def all_of_them() -> None:
        await asyncio.gather(*(sleeper(one) for one in seconds))

    run_in_virtual_time(all_of_them())
    return woken


def test_virtual_time_jumps_to_the_next_timer() -> None:
    assert slept([3e6, 0.5, 86_400 * 3.0]) == [(0.5, 0.5), (259_200.0, 259_200.0), (3e6, 3e6)]


def test_waiting_for_nothing_is_told() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(NothingHappens):
        run_in_virtual_time(wait())
