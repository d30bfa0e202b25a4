"""Parts and slices of batches, and what holds however many engines are free."""

import pytest

from orchestrator.scheduling.spreading import graded_last, largest_part, parts_of_batch, slices_of_part, split


@pytest.mark.parametrize(
    ("groups", "rollouts", "engines", "full_engine", "parts"),
    [
        (32, 16, 4, 128, 4),
        (32, 16, 4, 200, 2),  # 512 rollouts fill two engines of 200
        (32, 16, 1, 1, 1),
        (32, 16, 0, 128, 1),  # none is free: it waits whole
        (3, 1000, 50, 128, 3),  # a group is not cut
        (1, 4, 4, 128, 1),
    ],
)
def test_a_batch_has_as_many_parts_as_fill_their_engines(
    groups: int, rollouts: int, engines: int, full_engine: int, parts: int
) -> None:
    assert parts_of_batch(groups, rollouts, engines, full_engine) == parts


@pytest.mark.parametrize(
    ("groups", "rollouts", "slices"),
    [
        (63, 16, 1),  # 1,008 rollouts: two slices would have fewer than 512
        (64, 16, 2),
        (100, 16, 3),
        (3, 511, 1),  # two groups are graded at once
        (3, 512, 3),
        (3, 5000, 3),
        (1, 1, 1),
    ],
)
def test_a_part_has_as_many_slices_as_have_512_rollouts(groups: int, rollouts: int, slices: int) -> None:
    assert slices_of_part(groups, rollouts) == slices


def test_pieces_are_in_order_and_the_last_one_is_a_largest() -> None:
    assert split(7, 3) == [range(0, 2), range(2, 4), range(4, 7)]
    assert split(6, 3) == [range(0, 2), range(2, 4), range(4, 6)]
    assert split(2, 1) == [range(2)]


def test_fewer_engines_make_larger_parts_and_can_make_smaller_slices() -> None:
    # Two parts of 1,023 rollouts, each one slice; or one part of 2,046 in three slices of 682.
    assert [slices_of_part(groups, 1) for groups in (1023, 2046)] == [1, 3]
    assert (largest_part(2046, 1, 2, 1023), graded_last(1023, 1)) == (1023, 512)


@pytest.mark.parametrize("rollouts", [1, 7, 100, 512, 600])
def test_no_number_of_free_engines_samples_or_grades_less_at_the_end(rollouts: int) -> None:
    for groups in range(1, 60):
        least = largest_part(groups, rollouts, 5, 128)
        for free in range(6):
            parts = split(groups, parts_of_batch(groups, rollouts, free, 128))
            assert max(len(part) for part in parts) >= least
            slices = split(len(parts[-1]), slices_of_part(len(parts[-1]), rollouts))
            assert len(slices[-1]) >= graded_last(least, rollouts)
