"""What is left of cells, in which order they are taken, and what no schedule can do without."""

from dataclasses import replace

import pytest

from grids.expansion import Cell, expand
from grids.loading import dump_grid
from grids.spec import GridSpec
from orchestrator.scheduling.costs import CostModel
from orchestrator.scheduling.remaining import Remaining, RemainingWork, bound_of_what_is_left
from orchestrator.scheduling.urgency import Urgencies
from orchestrator.scheduling.waiting import WaitingCells
from orchestrator.store.phase_log import PhaseKind, PhaseRecord
from tests.orchestrator.stand_in_pools import trial_grid

SECONDS = {
    PhaseKind.SAMPLING: 2.0,
    PhaseKind.GRADING: 0.5,
    PhaseKind.LEARNING: 1.0,
    PhaseKind.EVALUATION: 4.0,
    PhaseKind.EVALUATION_GRADING: 3.0,
}


def of_kind(kind: PhaseKind, seconds: float, sequences: int, member: str = "m") -> PhaseRecord:
    return PhaseRecord(member, kind, "c", 1, 0.0, seconds, 0.0, sequences, 0, 1)


def costs() -> CostModel:
    """Phases of 8 sequences, the batch of ``trial_grid``, as SECONDS has them."""
    return CostModel(of_kind(kind, seconds, 8) for kind, seconds in SECONDS.items())


def test_the_steps_and_evaluations_that_are_left_are_counted() -> None:
    spec = trial_grid(steps=6)  # evaluated after steps 2 and 4
    cell = expand(spec)[0]
    remaining = RemainingWork(spec, costs())
    assert remaining.of(cell, 0) == pytest.approx(Remaining(12, 3, 6, 2, 4, 3, 28), rel=0.02)
    # 3.5 a step, 7 an evaluation; an evaluation of the step itself is not left.
    assert [remaining.seconds(cell, step) for step in (0, 1, 2, 4, 6)] == pytest.approx(
        [35, 31.5, 21, 7, 0], rel=0.02
    )


def test_what_is_left_follows_the_model_as_it_learns() -> None:
    spec = trial_grid(steps=6)
    cell, model = expand(spec)[0], costs()
    remaining = RemainingWork(spec, model)
    before = remaining.of(cell, 0).learning
    model.observe(of_kind(PhaseKind.LEARNING, 5.0, 8))
    assert (before, remaining.of(cell, 0).learning) == pytest.approx((6, 30), rel=0.02)


def test_a_batch_that_fills_several_engines_goes_through_sampling_and_grading_in_parts() -> None:
    grid = dump_grid(trial_grid(steps=6))
    # Batches of 8 = 2 problems x 4 fill engines of 3 sequences twice; of 1 sequence eight times, but have 2 problems.
    for engines, sequences, chain in ((1, 3, 28), (4, 3, 17.5), (4, 1, 17.5), (4, 8, 25)):
        grid["pools"]["samplers"] |= {"count": engines, "max_sequences": sequences}
        spec = GridSpec.model_validate(grid)
        # 6 * ((2 + 0.5) / parts + 1), and the last evaluation, 4 / engines + 3.
        left = RemainingWork(spec, costs()).of(expand(spec)[0], 0)
        assert left.chain == pytest.approx(chain, rel=0.02), (engines, sequences)
        assert left.seconds == pytest.approx(35, rel=0.02)


def test_only_the_last_slice_of_a_large_part_is_graded_after_it() -> None:
    grid = dump_grid(trial_grid())
    grid["grid"] |= {"problems_per_batch": [3], "rollouts_per_problem": [512], "compute_rollouts": 6 * 1536}
    # Each kind takes 1 s for 512 rollouts, whatever else.
    model = CostModel(
        of_kind(kind, rollouts / 512, rollouts)
        for kind in (PhaseKind.SAMPLING, PhaseKind.GRADING, PhaseKind.LEARNING)
        for rollouts in (512, 512, 1536)
    )
    # One engine takes the whole batch, in slices of one problem; two take one and two problems.
    for engines, chain in ((1, 6 * (3 + 1 + 3)), (2, 6 * (2 + 1 + 3))):
        grid["pools"]["samplers"] |= {"count": engines, "max_sequences": 512}
        spec = GridSpec.model_validate(grid)
        left = RemainingWork(spec, model).of(expand(spec)[0], 0)
        assert left.chain == pytest.approx(chain, rel=0.02)
        assert left.grading == pytest.approx(18, rel=0.02)


def test_the_bound_is_the_busiest_pools_work_or_the_longest_chain() -> None:
    one = Remaining(12, 3, 6, 2, 4, 3, chain=28)
    # Sampling 12 + 2 * 4, grading 3 + 2 * 3, learning 6.
    assert bound_of_what_is_left([one], engines=1, groups=1) == 28
    assert bound_of_what_is_left([one] * 3, engines=2, groups=1) == 30  # 60 / 2
    assert bound_of_what_is_left([one] * 10, engines=100, groups=1) == 90  # one grader
    ungraded = one._replace(grading=0.0, evaluation_grading=0.0)
    assert bound_of_what_is_left([ungraded] * 10, engines=100, groups=1) == 60
    assert bound_of_what_is_left([ungraded] * 10, engines=100, groups=100) == 28
    assert bound_of_what_is_left([], engines=1, groups=1) == 0


def order(waiting: WaitingCells) -> list[str]:
    return [waiting.pop().id[-2:] for _ in range(len(waiting))]


def make_waiting(spec: GridSpec, model: CostModel) -> tuple[WaitingCells, list[Cell]]:
    cells = expand(spec)
    return WaitingCells(cells, RemainingWork(spec, model)), cells


@pytest.mark.parametrize("model", [CostModel(), costs()], ids=["unknown costs", "known costs"])
def test_the_most_remaining_work_comes_first_and_equals_in_the_grids_order(model: CostModel) -> None:
    waiting, cells = make_waiting(trial_grid(seeds=5), model)
    for index, step in ((3, 0), (0, 4), (2, 2), (4, 0), (1, 2)):
        waiting.add(cells[index], step)
    assert order(waiting) == ["s3", "s4", "s1", "s2", "s0"]


def test_the_order_changes_when_the_model_learns() -> None:
    """Two cells of equal compute: many small steps, or few large ones."""
    spec = trial_grid(steps=8)
    small = expand(spec)[0]
    large = replace(small, rollouts_per_problem=16, update_steps=small.update_steps // 4)
    for seconds, first in (((1.0, 1.0), small), ((1.0, 10.0), large)):
        model = CostModel()
        waiting = WaitingCells([large, small], RemainingWork(spec, model))
        waiting.add(large, 0)
        waiting.add(small, 0)
        for sequences, busy in zip((8, 32), seconds, strict=True):
            for kind in (PhaseKind.SAMPLING, PhaseKind.LEARNING, PhaseKind.GRADING):
                for _ in range(3):
                    model.observe(of_kind(kind, busy, sequences))
        assert waiting.pop() is first


def test_before_anything_is_known_the_cell_of_most_steps_comes_first() -> None:
    spec = trial_grid(steps=8)
    small = expand(spec)[0]
    large = replace(small, rollouts_per_problem=16, update_steps=small.update_steps // 4)
    waiting = WaitingCells([large, small], RemainingWork(spec, CostModel()))
    waiting.add(large, 0)
    waiting.add(small, 0)
    assert waiting.pop() is small


class Counted(RemainingWork):
    """Counts how often it is asked."""

    asked = 0

    def seconds(self, cell: Cell, step: int) -> float:
        self.asked += 1
        return super().seconds(cell, step)


def test_what_is_left_is_worked_out_once_for_cells_that_are_alike() -> None:
    spec, model = trial_grid(seeds=40, steps=8), costs()
    small = expand(spec)
    large = [replace(cell, rollouts_per_problem=16, update_steps=2) for cell in small]
    remaining = Counted(spec, model)
    waiting = WaitingCells([*small, *large], remaining)
    for cell in reversed([*small, *large]):
        waiting.add(cell, 0)
    for cell in small[:20]:  # these come back after a step
        waiting.discard(cell.id)
        waiting.add(cell, 1)
    model.observe(of_kind(PhaseKind.LEARNING, 1.0, 8))
    remaining.asked = 0
    assert waiting.pop() is small[20]
    assert remaining.asked == 3
    # A step takes 3.5 s for 8 rollouts, 14 s for 32; an evaluation 7 s, after 2, 4 and 8 small steps or after each large one:
    # 8 * 3.5 + 3 * 7 = 49 s, 45.5 s where a step is made, and 2 * 14 + 2 * 7 = 42 s.
    popped = [waiting.pop() for _ in range(len(waiting))]
    assert popped == [*small[21:], *small[:20], *large]


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 40])
def test_every_so_manieth_cell_in_line_is_counted(slots: int) -> None:
    waiting, cells = make_waiting(trial_grid(seeds=20, steps=8), costs())
    remaining = RemainingWork(trial_grid(seeds=20, steps=8), costs())
    steps = [0, 3, 3, 0, 0, 1, 7, 7, 7, 0, 0, 0, 5, 2, 2, 2, 2, 2, 2, 0]
    for cell, step in zip(cells, steps, strict=True):
        waiting.add(cell, step)
    line = sorted((remaining.seconds(cells[0], step) for step in steps), reverse=True)
    for first in range(25):
        expected = sum(line[first::slots])
        assert waiting.seconds_of_every(slots, first) == pytest.approx(expected)


def test_the_cell_with_least_left_is_followed_by_the_first_in_line() -> None:
    """35 s are left of a cell at its start, 31.5, 21 and 7 s after 1, 2 and 4 steps."""
    spec = trial_grid(seeds=6, steps=6)
    remaining, cells = RemainingWork(spec, costs()), expand(spec)
    waiting = WaitingCells(cells, remaining)
    waiting.add(cells[0], 1)
    waiting.add(cells[1], 0)
    urgencies = Urgencies(remaining, waiting)
    assert urgencies.of(cells[2], 0) == pytest.approx(35 + 35 + 31.5, rel=0.02)  # the only slot
    urgencies.of(cells[3], 2)
    assert urgencies.of(cells[4], 4) == pytest.approx(7 + 35, rel=0.02)
    assert urgencies.of(cells[3], 2) == pytest.approx(21 + 31.5, rel=0.02)
    assert urgencies.of(cells[2], 0) == pytest.approx(35, rel=0.02)
    urgencies.ended(cells[4])
    assert waiting.pop() is cells[1]
    assert urgencies.of(cells[1], 0) == pytest.approx(35, rel=0.02)
    assert urgencies.of(cells[3], 2) == pytest.approx(21 + 31.5, rel=0.02)


def test_a_cell_that_is_taken_out_or_added_anew_waits_once() -> None:
    waiting, cells = make_waiting(trial_grid(seeds=3), CostModel())
    for cell in cells:
        waiting.add(cell, 0)
    waiting.add(cells[0], 5)
    waiting.discard(cells[1].id)
    waiting.discard("unknown")
    assert order(waiting) == ["s2", "s0"]
    assert not waiting
    with pytest.raises(IndexError):
        waiting.pop()
