"""The mathematics of GRPO, strictly on-policy, as pure functions of tensors.

Per response token t with advantage A, learner log-probability l, sampler log-probability s and base-model log-probability b, all
at the sampling temperature, the loss is

    mean_t[ -w A exp(l - sg(l)) ] + kl_coefficient mean_t[ k3(b - l) ] - entropy_coefficient mean_t[ H ]

with sg the stop-gradient, w = min(exp(sg(l) - s), cap) the truncated importance weight (TIS) and k3(x) = exp(x) - x - 1. There is
one update per batch, so the policy ratio exp(l - sg(l)) is 1 and clipping it would do nothing; correcting with the sampler's
log-probabilities as "old" ones besides w would correct twice. Means run over the tokens of the whole batch, whatever the
micro-batches and ranks are.
"""

import bisect
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

ZeroVarianceFilter = Literal["off", "all", "regularisers"]


def group_advantages(rewards: np.ndarray) -> np.ndarray:
    """Advantages normalised within groups by the population standard deviation.

    Args:
        rewards: [G, n] rewards of G groups of n >= 2 responses.

    Returns:
        [G, n] float64: (r - mean) / std of the group; exactly 0 in a group whose rewards are all equal.

    Raises:
        ValueError: n = 1, where no advantage exists.
    """
    if rewards.shape[1] < 2:
        raise ValueError("a group of one response has no advantage")
    rewards = rewards.astype(np.float64)
    flat = zero_variance(rewards)[:, None]
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return np.where(flat, 0.0, centred / np.where(flat, 1.0, rewards.std(axis=1, keepdims=True)))


def zero_variance(rewards: np.ndarray) -> np.ndarray:
    """[G] whether all rewards of a group are equal; ``rewards`` is [G, n]."""
    return rewards.max(axis=1) == rewards.min(axis=1)


@dataclass(frozen=True)
class TokenWeights:
    """Per-response weights that make sums over tokens into means over the batch's tokens (R responses)."""

    policy: np.ndarray
    """[R] weight of each token in the policy term: 1 / tokens of the term, or 0."""
    regulariser: np.ndarray
    """[R] weight of each token in the KL and entropy terms."""


def token_weights(rewards: np.ndarray, lengths: np.ndarray, filter_: ZeroVarianceFilter) -> TokenWeights:
    """Weights of the tokens of every response in the terms of the loss.

    A response that a term leaves out leaves its denominator too, so each term is a mean over the tokens it applies to. With
    ``all``, zero-variance groups leave every term; with ``regularisers`` they leave the KL and entropy terms only.

    Args:
        rewards: [G, n].
        lengths: [R] response lengths, R = G * n, group by group.
        filter_: the zero-variance filter.
    """
    varied = np.repeat(~zero_variance(rewards), rewards.shape[1])
    everything = np.ones_like(varied)
    policy = varied if filter_ == "all" else everything
    regulariser = everything if filter_ == "off" else varied

    def weights(kept: np.ndarray) -> np.ndarray:
        return kept / max(1, int(lengths[kept].sum()))

    return TokenWeights(policy=weights(policy), regulariser=weights(regulariser))


def contributing(
    advantages: np.ndarray, weights: TokenWeights, *, kl_coefficient: float, entropy_coefficient: float
) -> np.ndarray:
    """[R] whether a response has any part in the gradient; of the others forward and backward passes would add exact zeros.

    Args:
        advantages: [R].
        weights: of the batch, whose denominators count all responses, whether they are computed or not.
        kl_coefficient: of the loss.
        entropy_coefficient: of the loss.
    """
    regularised = bool(kl_coefficient or entropy_coefficient)
    return ((weights.policy != 0) & (advantages != 0)) | (regularised & (weights.regulariser != 0))


def token_statistics(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float, entropy_gradient: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each token and entropy of each distribution at a temperature, in float32 at least.

    Args:
        logits: [T, V].
        tokens: [T] chosen tokens.
        temperature: > 0.
        entropy_gradient: whether entropies are differentiated; nothing of size [T, V] is kept for them when not.

    Returns:
        ([T] log-probabilities, [T] entropies in nats).
    """
    scaled = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    distribution = torch.log_softmax(scaled, dim=-1)
    chosen = distribution.gather(-1, tokens[:, None]).squeeze(-1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
        entropies = -(distribution.exp() * distribution).sum(-1)
    return chosen, entropies


@dataclass(frozen=True)
class TokenTerms:
    """What the loss needs of T response tokens."""

    logprobs: torch.Tensor
    """[T] learner, with gradient."""
    entropies: torch.Tensor
    """[T] learner, with gradient."""
    sampler_logprobs: torch.Tensor
    """[T]"""
    base_logprobs: torch.Tensor | None
    """[T] base model; None where the loss has no KL term."""
    advantages: torch.Tensor
    """[T]"""
    policy_weights: torch.Tensor
    """[T]"""
    regulariser_weights: torch.Tensor
    """[T]"""


def importance_ratios(terms: TokenTerms) -> torch.Tensor:
    """[T] p_learner / p_sampler without gradient; 1 up to rounding when both hold the same weights."""
    return torch.exp(terms.logprobs.detach() - terms.sampler_logprobs)


def k3(base_logprobs: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """[T] Schulman's low-variance estimate of KL(policy || base): exp(b - l) - (b - l) - 1, never negative."""
    difference = base_logprobs - logprobs
    return torch.exp(difference) - difference - 1


def grpo_loss(
    terms: TokenTerms, *, kl_coefficient: float, entropy_coefficient: float, tis_cap: float
) -> torch.Tensor:
    """The loss of the module's docstring, summed over these tokens with their weights (a scalar).

    Sums of micro-batches add up to the loss of the batch.
    """
    weight = importance_ratios(terms).clamp(max=tis_cap)
    policy_ratio = torch.exp(terms.logprobs - terms.logprobs.detach())
    loss = -(terms.policy_weights * weight * terms.advantages * policy_ratio).sum()
    if terms.base_logprobs is not None:
        loss = (
            loss
            + kl_coefficient * (terms.regulariser_weights * k3(terms.base_logprobs, terms.logprobs)).sum()
        )
    if entropy_coefficient:
        loss = loss - entropy_coefficient * (terms.regulariser_weights * terms.entropies).sum()
    return loss


def plan_update(
    responses: np.ndarray,
    prompt_lengths: np.ndarray,
    lengths: np.ndarray,
    rollouts_per_problem: int,
    *,
    longest: int,
    ranks: int,
    token_budget: int,
) -> list[list[list[np.ndarray]]]:
    """How an update computes responses: each rank's micro-batches, as rows of responses that stand one after the other.

    Args:
        responses: numbers of the responses, ascending.
        prompt_lengths: [G].
        lengths: [R] of all responses.
        rollouts_per_problem: n; response i answers problem i // n.
        longest: tokens of a row of several responses; 0 gives each response a row of its own.
        token_budget: tokens of a micro-batch of several rows, padding included.
    """
    tokens = lengths[responses].sum() + prompt_lengths[np.unique(responses // rollouts_per_problem)].sum()
    # No row longer than a rank's share: the others would wait for it.
    longest = min(longest, token_budget, -(-int(tokens) // ranks))
    pieces = share_prompts(responses, prompt_lengths, lengths, rollouts_per_problem, longest)
    piece_tokens = np.asarray(
        [prompt_lengths[piece[0] // rollouts_per_problem] + lengths[piece].sum() for piece in pieces]
    )
    rows = fill_rows(piece_tokens, longest)
    row_tokens = np.asarray([piece_tokens[row].sum() for row in rows])
    return [
        [
            [np.concatenate([pieces[piece] for piece in rows[row]]) for row in micro_batch]
            for micro_batch in plan
        ]
        for plan in plan_micro_batches(row_tokens, ranks, token_budget)
    ]


def share_prompts(
    responses: np.ndarray,
    prompt_lengths: np.ndarray,
    lengths: np.ndarray,
    rollouts_per_problem: int,
    longest: int,
) -> list[np.ndarray]:
    """Pieces of responses to one prompt each: its next ones as long as prompt and responses have at most ``longest`` tokens.

    Args:
        responses: numbers of the responses, ascending.
        prompt_lengths: [G].
        lengths: [R] of all responses.
        rollouts_per_problem: n; response i answers problem i // n.
        longest: tokens; a response that does not fit beside another one is a piece of its own, however long.
    """
    pieces: list[list[int]] = []
    problem, room = -1, 0
    for response in responses.tolist():
        if response // rollouts_per_problem != problem or lengths[response] > room:
            problem = response // rollouts_per_problem
            room = longest - int(prompt_lengths[problem])
            pieces.append([])
        pieces[-1].append(response)
        room -= int(lengths[response])
    return [np.asarray(piece, dtype=np.int64) for piece in pieces]


def fill_rows(tokens: np.ndarray, longest: int) -> list[list[int]]:
    """Which pieces stand in a row together, so that few rows are padded: the longest piece left, then the longest that still fit.

    Args:
        tokens: [P] of each piece.
        longest: tokens of a row; a longer piece has a row of its own.

    Returns:
        Numbers of the pieces of each row; every number stands exactly once.
    """
    left = sorted((count, piece) for piece, count in enumerate(tokens.tolist()))
    rows = []
    while left:
        count, piece = left.pop()
        row, room = [piece], longest - count
        while fitting := bisect.bisect_right(left, (room, len(tokens))):
            count, piece = left.pop(fitting - 1)
            row.append(piece)
            room -= count
        rows.append(row)
    return rows


def plan_micro_batches(lengths: np.ndarray, ranks: int, token_budget: int) -> list[list[np.ndarray]]:
    """Which rows each rank takes in each micro-batch.

    Rows are sorted by length, dealt to the ranks in turn, and packed so that a micro-batch padded to its longest
    row holds at most ``token_budget`` tokens. Every rank gets the same number of micro-batches,
    since all take part in each collective; missing ones are empty.

    Args:
        lengths: of each row, prompt and responses together.

    Returns:
        ``ranks`` lists of equal length of index arrays; every index stands exactly once.
    """
    order = np.argsort(lengths, kind="stable")
    plans = [_pack(order[rank::ranks], lengths, token_budget) for rank in range(ranks)]
    count = max(len(plan) for plan in plans)
    empty = np.zeros(0, dtype=np.int64)
    return [plan + [empty] * (count - len(plan)) for plan in plans]


def _pack(ascending: np.ndarray, lengths: np.ndarray, token_budget: int) -> list[np.ndarray]:
    batches: list[list[int]] = []
    for index in ascending:
        # Ascending order: this row is the longest so far, so it sets the padded length.
        if batches and (len(batches[-1]) + 1) * lengths[index] <= token_budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return [np.asarray(batch, dtype=np.int64) for batch in batches]
