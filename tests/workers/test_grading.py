"""From graded answers to the columns of a history row, on a real verifier."""

from fractions import Fraction

import numpy as np
import pytest

from grids.spec import SamplingSpec, VerifierSpec
from workers.grading import Grader, evenly_spaced, right_answers
from workers.rollouts import Rollouts

GOLDS = ["1", "22", "7"]
ANSWERS = [["1", "1", "2"], ["22", "22", "22"], ["8", "9", "7"]]
CUT = (2, 2)
"""Problem 2's last answer is right, but was cut at the token limit, so it scores 0."""


@pytest.fixture(scope="module")
def grader() -> Grader:
    return Grader(VerifierSpec(type="exact"), SamplingSpec(max_tokens=8))


@pytest.fixture
def rollouts() -> Rollouts:
    truncated = np.zeros((3, 3), dtype=bool)
    truncated[CUT] = True
    return Rollouts(
        rollouts_per_problem=3,
        prompts=[np.zeros(1, dtype=np.int32)] * 3,
        tokens=np.zeros(18, dtype=np.int32),
        logprobs=np.zeros(18, dtype=np.float32),
        lengths=np.full(9, 2),
        truncated=truncated.ravel(),
        texts=[text for answers in ANSWERS for text in answers],
        weights_version="base",
    )


def test_a_validation_counts_right_answers_and_agrees_with_its_means(
    grader: Grader, rollouts: Rollouts
) -> None:
    columns, samples = grader.evaluate(rollouts, GOLDS, kept=2)
    assert columns == {
        "avg_at_3": float(Fraction(5, 9)),
        "best_at_3": float(Fraction(2, 3)),
        "worst_at_3": float(Fraction(1, 3)),
        "eval_right": [2, 3, 0],
        "eval_response_tokens": 2.0,
        "eval_truncated": float(Fraction(1, 9)),
        "eval_verifier_failures": 0.0,
    }
    assert all(type(count) is int for count in columns["eval_right"])
    assert [(sample["problem"], sample["reward"]) for sample in samples] == [(0, 1.0), (2, 0.0)]


def test_a_probe_counts_right_answers_under_its_own_names(grader: Grader, rollouts: Rollouts) -> None:
    columns, failures = grader.probe(rollouts, GOLDS)
    assert columns == {"train_probe_avg_at_3": float(Fraction(5, 9)), "train_probe_right": [2, 3, 0]}
    assert failures == 0


def test_counts_are_those_from_which_avg_best_and_worst_follow() -> None:
    rewards = np.random.default_rng(0).integers(0, 2, size=(300, 4)).astype(np.float32)
    counts = right_answers(rewards)
    assert counts == [sum(1 for reward in problem if reward) for problem in rewards.tolist()]


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [(4, 10, [0, 3, 6, 9]), (3, 3, [0, 1, 2]), (64, 3, [0, 1, 2]), (1, 5, [0]), (0, 5, [])],
)
def test_a_choice_is_spread_evenly_over_the_set(count: int, size: int, expected: list[int]) -> None:
    assert evenly_spaced(count, size) == expected


def test_no_position_is_chosen_twice() -> None:
    for size in range(1, 60):
        for count in range(1, 70):
            chosen = evenly_spaced(count, size)
            assert len(set(chosen)) == len(chosen) == min(count, size)
