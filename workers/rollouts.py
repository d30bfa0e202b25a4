"""Rollouts as flat arrays, and the seeds that make them."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np


@dataclass(frozen=True)
class Rollouts:
    """G groups of n rollouts: R = G * n responses with T tokens in all.

    A group is a position in the batch, not a problem: with a batch larger than the problem set a problem can occur twice.
    """

    rollouts_per_problem: int
    """n"""
    prompts: list[np.ndarray]
    """G arrays of prompt tokens, int32."""
    tokens: np.ndarray
    """[T] response tokens, end token included, int32; responses follow each other, group by group."""
    logprobs: np.ndarray
    """[T] log-probabilities under the sampler at the sampling temperature, float32."""
    lengths: np.ndarray
    """[R] response lengths, int64."""
    truncated: np.ndarray
    """[R] whether the response reached the token limit without an end token, bool."""
    texts: list[str]
    """R responses as text, without special tokens."""
    weights_version: str
    """Version of the weights that made them."""

    @classmethod
    def join(cls, parts: Sequence["Rollouts"]) -> "Rollouts":
        """Rollouts of one batch that several engines have made, in the batch's order.

        Raises:
            ValueError: they have another n or come from other weights.
        """
        first, *others = parts
        if not others:
            return first
        if len({(part.rollouts_per_problem, part.weights_version) for part in parts}) > 1:
            raise ValueError("parts of a batch differ in n or in the version of their weights")
        return cls(
            rollouts_per_problem=first.rollouts_per_problem,
            prompts=[prompt for part in parts for prompt in part.prompts],
            tokens=np.concatenate([part.tokens for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            lengths=np.concatenate([part.lengths for part in parts]),
            truncated=np.concatenate([part.truncated for part in parts]),
            texts=[text for part in parts for text in part.texts],
            weights_version=first.weights_version,
        )

    @property
    def offsets(self) -> np.ndarray:
        """[R + 1] where each response starts in ``tokens``."""
        return np.concatenate([[0], np.cumsum(self.lengths)])


SEED_BITS = 62
"""Seeds stay below 2^62: vLLM adds the index of the sample to the seed of a request, and the sum must fit in 63 bits."""


def rollout_seed(*key: str | int) -> int:
    """Seed of a request, hashed from its key, for example (cell, step, position in the batch).

    Hashed and not counted: the engine gives sample i of a request the seed + i, so counted seeds of neighbouring
    problems would collide.
    """
    digest = blake2b("/".join(str(part) for part in key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)
