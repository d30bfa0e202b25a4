"""The mathematics of GRPO against values worked out by hand or by finite differences."""

import itertools

import numpy as np
import pytest
import torch

from workers.grpo import (
    TokenTerms,
    contributing,
    fill_rows,
    group_advantages,
    grpo_loss,
    k3,
    plan_micro_batches,
    plan_update,
    share_prompts,
    token_statistics,
    token_weights,
)


def test_advantages_use_the_population_standard_deviation() -> None:
    # Mean 1/4; deviations 3/4 and -1/4; population variance (9/16 + 3/16) / 4 = 3/16.
    expected = [0.75 / np.sqrt(3 / 16), *[-0.25 / np.sqrt(3 / 16)] * 3]
    np.testing.assert_allclose(group_advantages(np.array([[1.0, 0, 0, 0]])), [expected], rtol=1e-12)


def test_a_group_of_equal_rewards_has_exactly_zero_advantages() -> None:
    # 0.1 is no binary fraction: a mean of three of them may differ from 0.1 in the last bit.
    advantages = group_advantages(np.array([[0.1, 0.1, 0.1], [0, 0, 1]], dtype=np.float32))
    assert advantages[0].tolist() == [0.0, 0.0, 0.0]
    assert advantages[1, 2] > 0


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="no advantage"):
        group_advantages(np.array([[1.0]]))


@pytest.mark.parametrize(
    ("filter_", "policy", "regulariser"),
    [
        # Lengths 1, 2 (all right), 3, 4 (mixed): 10 tokens, 7 of them in the mixed group.
        ("off", [1 / 10] * 4, [1 / 10] * 4),
        ("all", [0, 0, 1 / 7, 1 / 7], [0, 0, 1 / 7, 1 / 7]),
        ("regularisers", [1 / 10] * 4, [0, 0, 1 / 7, 1 / 7]),
    ],
)
def test_filtered_groups_leave_numerator_and_denominator(
    filter_: str, policy: list[float], regulariser: list[float]
) -> None:
    weights = token_weights(np.array([[1, 1], [0, 1]]), np.array([1, 2, 3, 4]), filter_)  # type: ignore[arg-type]
    np.testing.assert_allclose(weights.policy, policy)
    np.testing.assert_allclose(weights.regulariser, regulariser)


def test_a_batch_that_is_filtered_whole_has_no_weight_and_no_division_by_zero() -> None:
    weights = token_weights(np.array([[1, 1], [0, 0]]), np.array([1, 2, 3, 4]), "all")
    assert weights.policy.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("filter_", "kl", "entropy", "expected"),
    [
        ("off", 0.0, 0.0, [False, False, True, True]),
        ("off", 0.1, 0.0, [True, True, True, True]),
        ("off", 0.0, 0.1, [True, True, True, True]),
        ("all", 0.1, 0.1, [False, False, True, True]),
        ("regularisers", 0.1, 0.1, [False, False, True, True]),
    ],
)
def test_only_answers_with_an_advantage_or_a_regulariser_contribute(
    filter_: str, kl: float, entropy: float, expected: list[bool]
) -> None:
    rewards = np.array([[1, 1], [0, 1]])
    weights = token_weights(rewards, np.array([1, 2, 3, 4]), filter_)  # type: ignore[arg-type]
    advantages = group_advantages(rewards).reshape(-1)
    found = contributing(advantages, weights, kl_coefficient=kl, entropy_coefficient=entropy)
    assert found.tolist() == expected


def test_statistics_are_taken_at_the_temperature() -> None:
    # Logits 0 and 2 ln 3 at temperature 2 are odds of 1 to 3: probabilities 1/4 and 3/4.
    logits = torch.tensor([[0.0, 2 * np.log(3)]], dtype=torch.float64)
    logprobs, entropies = token_statistics(logits, torch.tensor([1]), temperature=2.0)
    assert float(logprobs[0]) == pytest.approx(np.log(3 / 4))
    assert float(entropies[0]) == pytest.approx(-(0.25 * np.log(0.25) + 0.75 * np.log(0.75)))


def test_k3_averages_to_the_kl_divergence() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    estimates = k3(torch.tensor(np.log(q)), torch.tensor(np.log(p))).numpy()
    assert (estimates >= 0).all()
    assert float((p * estimates).sum()) == pytest.approx(float((p * np.log(p / q)).sum()))


def one_token(logprob: float, sampler: float, advantage: float, base: float | None = None) -> TokenTerms:
    tensor = lambda value: torch.tensor([value], dtype=torch.float64)  # noqa: E731
    return TokenTerms(
        logprobs=tensor(logprob).requires_grad_(),
        entropies=tensor(0.7),
        sampler_logprobs=tensor(sampler),
        base_logprobs=None if base is None else tensor(base),
        advantages=tensor(advantage),
        policy_weights=tensor(0.5),
        regulariser_weights=tensor(0.25),
    )


@pytest.mark.parametrize(
    ("ratio", "weight"),
    [(1.0, 1.0), (1.5, 1.5), (8.0, 2.0), (0.25, 0.25)],
)
def test_the_truncated_importance_weight_scales_the_policy_gradient(ratio: float, weight: float) -> None:
    terms = one_token(-1.0 + np.log(ratio), -1.0, advantage=3.0)
    grpo_loss(terms, kl_coefficient=0, entropy_coefficient=0, tis_cap=2.0).backward()
    # d/dl of -0.5 w A exp(l - sg(l)) at l is -0.5 w A: the weight itself carries no gradient.
    assert float(terms.logprobs.grad) == pytest.approx(-0.5 * weight * 3.0)


def test_the_loss_is_the_sum_of_its_weighted_terms() -> None:
    terms = one_token(-1.0, -1.0, advantage=3.0, base=-1.5)
    loss = grpo_loss(terms, kl_coefficient=0.1, entropy_coefficient=0.2, tis_cap=2.0)
    expected = -0.5 * 3.0 + 0.1 * 0.25 * (np.exp(-0.5) + 0.5 - 1) - 0.2 * 0.25 * 0.7
    assert float(loss) == pytest.approx(expected)


def test_the_gradient_of_the_loss_agrees_with_finite_differences() -> None:
    """The surrogate whose finite differences are taken holds the importance weights fixed, as the stop-gradient says."""
    rng = np.random.default_rng(0)
    tokens = torch.tensor(rng.integers(0, 5, size=12))
    logits = rng.normal(size=(12, 5))
    sampler = torch.tensor(rng.normal(-1.5, 0.5, size=12))
    base = torch.tensor(rng.normal(-1.5, 0.5, size=12))
    advantages, policy, regulariser = (
        rng.normal(size=12),
        rng.uniform(size=12) / 12,
        rng.uniform(size=12) / 12,
    )
    temperature, kl, entropy_coefficient, cap = 0.7, 0.3, 0.2, 1.3

    def distribution(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scaled = values / temperature
        log_p = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
        return log_p[np.arange(12), tokens.numpy()], -(np.exp(log_p) * log_p).sum(axis=1)

    at_start, _ = distribution(logits)
    fixed = np.minimum(np.exp(at_start - sampler.numpy()), cap)
    assert (fixed == cap).any() and (fixed < cap).any()

    def surrogate(values: np.ndarray) -> float:
        logprobs, entropies = distribution(values)
        difference = base.numpy() - logprobs
        return float(
            -(policy * fixed * advantages * np.exp(logprobs - at_start)).sum()
            + kl * (regulariser * (np.exp(difference) - difference - 1)).sum()
            - entropy_coefficient * (regulariser * entropies).sum()
        )

    variable = torch.tensor(logits, requires_grad=True)
    logprobs, entropies = token_statistics(variable, tokens, temperature)
    terms = TokenTerms(
        logprobs,
        entropies,
        sampler,
        base,
        torch.tensor(advantages),
        torch.tensor(policy),
        torch.tensor(regulariser),
    )
    loss = grpo_loss(terms, kl_coefficient=kl, entropy_coefficient=entropy_coefficient, tis_cap=cap)
    assert float(loss) == pytest.approx(surrogate(logits), rel=1e-12)
    loss.backward()
    step = 1e-6
    numeric = np.zeros_like(logits)
    for index in np.ndindex(*logits.shape):
        shift = np.zeros_like(logits)
        shift[index] = step
        numeric[index] = (surrogate(logits + shift) - surrogate(logits - shift)) / (2 * step)
    np.testing.assert_allclose(variable.grad.numpy(), numeric, atol=1e-9)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 20, 1000])
def test_micro_batches_hold_every_sequence_once_and_keep_the_budget(ranks: int, budget: int) -> None:
    lengths = np.random.default_rng(1).integers(3, 12, size=17)
    plans = plan_micro_batches(lengths, ranks, budget)
    assert len({len(plan) for plan in plans}) == 1
    assert sorted(np.concatenate([batch for plan in plans for batch in plan]).tolist()) == list(range(17))
    for plan in plans:
        for batch in plan:
            assert len(batch) <= 1 or len(batch) * lengths[batch].max() <= budget


def test_a_rank_without_sequences_takes_part_with_empty_micro_batches() -> None:
    plans = plan_micro_batches(np.array([4]), ranks=2, token_budget=100)
    assert [[len(batch) for batch in plan] for plan in plans] == [[1], [0]]


@pytest.mark.parametrize("longest", [0, 9, 20, 10**6])
def test_each_response_stands_in_one_piece_beside_others_of_its_problem_as_far_as_they_fit(
    longest: int,
) -> None:
    rng = np.random.default_rng(longest)
    n, prompt_lengths, lengths = 6, rng.integers(2, 6, size=10), rng.integers(1, 8, size=60)
    responses = np.flatnonzero(rng.random(60) < 0.7)
    pieces = share_prompts(responses, prompt_lengths, lengths, n, longest)
    np.testing.assert_array_equal(np.concatenate(pieces), responses)

    def tokens(piece: np.ndarray) -> int:
        return int(prompt_lengths[piece[0] // n] + lengths[piece].sum())

    for piece in pieces:
        assert len(set(piece // n)) == 1
        assert len(piece) == 1 or tokens(piece) <= longest
    for piece, following in itertools.pairwise(pieces):
        if piece[0] // n == following[0] // n:
            assert tokens(piece) + lengths[following[0]] > longest


def test_rows_take_the_longest_piece_left_and_the_longest_that_still_fit() -> None:
    assert fill_rows(np.array([3, 9, 5, 2, 7, 12, 1]), longest=10) == [[5], [1, 6], [4, 0], [2, 3]]
    assert fill_rows(np.array([4, 4, 4]), longest=8) == [[2, 1], [0]]


@pytest.mark.parametrize("longest", [0, 40, 96, 10**6])
def test_each_piece_stands_in_one_row_and_few_rows_have_room_left(longest: int) -> None:
    tokens = np.random.default_rng(longest).integers(1, 96, size=200)
    rows = fill_rows(tokens, longest)
    assert sorted(itertools.chain.from_iterable(rows)) == list(range(200))
    sums = [tokens[row].sum() for row in rows]
    for row, total in zip(rows, sums, strict=True):
        assert len(row) == 1 or total <= longest
    # No two rows would fit into one.
    assert sum(sorted(sums)[:2]) > longest or len(rows) == 1


@pytest.mark.parametrize("longest", [0, 30, 96])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_update_keeps_its_bounds_and_computes_each_response_once(ranks: int, longest: int) -> None:
    rng = np.random.default_rng(ranks)
    n, budget, prompt_lengths, lengths = 6, 200, rng.integers(2, 6, size=20), rng.integers(1, 30, size=120)
    responses = np.flatnonzero(rng.random(120) < 0.7)
    plans = plan_update(
        responses, prompt_lengths, lengths, n, longest=longest, ranks=ranks, token_budget=budget
    )
    assert len({len(plan) for plan in plans}) == 1
    batches = [batch for plan in plans for batch in plan if batch]
    assert sorted(np.concatenate([row for batch in batches for row in batch]).tolist()) == responses.tolist()

    def tokens(row: np.ndarray) -> int:
        runs = 1 + np.count_nonzero(np.diff(row // n))
        assert runs == len(set(row // n))
        return int(sum(prompt_lengths[problem] for problem in set(row // n)) + lengths[row].sum())

    for batch in batches:
        assert all(len(row) == 1 or tokens(row) <= longest for row in batch)
        assert len(batch) == 1 or len(batch) * max(map(tokens, batch)) <= budget


def test_rows_hold_several_problems_and_are_no_longer_than_a_ranks_share() -> None:
    # Four problems of two responses: prompts of 3 tokens, responses of 5 and 4, so 12 tokens each and 48 together.
    arguments = np.arange(8), np.full(4, 3), np.tile([5, 4], 4), 2
    for ranks, rows_of_a_rank, tokens in [(1, 1, 48), (2, 1, 24), (4, 1, 12)]:
        plans = plan_update(*arguments, longest=100, ranks=ranks, token_budget=1000)
        assert [[len(batch) for batch in plan] for plan in plans] == [[rows_of_a_rank]] * ranks
        for plan in plans:
            (row,) = plan[0]
            assert arguments[2][row].sum() + 3 * len(set(row // 2)) == tokens


def test_an_update_without_responses_has_empty_plans() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    assert plan_update(nothing, np.full(4, 3), np.full(8, 5), 2, longest=96, ranks=2, token_budget=99) == [
        [],
        [],
    ]
