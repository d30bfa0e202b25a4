"""The random seeds of a vLLM engine's samples on a CPU, drawn ahead.

For each token vLLM 0.32 takes one seed from the generator of its request, by two calls of torch a row: for short rollouts of a
small model a thirtieth of an engine's time. Here a generator is asked for many at once. Its numbers, and so the tokens, stay the
same.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch

DRAWN = 64
"""Seeds that a generator is asked for at once."""


def draw_seeds_ahead(worker: Any) -> None:
    """Let an engine's worker in this process do so; by ``LLM.collective_rpc``, before the first request."""
    sampler = worker.model_runner.sampler.topk_topp_sampler
    # Elsewhere (another processor, 64-bit noise) vLLM draws in other ways, which stay as they are.
    if sampler.forward == sampler.forward_cpu and not sampler.use_fp64_gumbel:
        sampler.forward = SeedsAhead(sampler)


class SeedsAhead:
    """What ``TopKTopPSampler.forward_cpu`` does for rows that all have a generator and are neither cut at top-k nor at top-p."""

    def __init__(self, sampler: Any) -> None:
        """Stand in for the method of ``sampler``."""
        self._sampler = sampler
        self._ahead: WeakKeyDictionary[torch.Generator, list[int]] = WeakKeyDictionary()
        """Seeds that each generator has given and no token has used, last one first."""

    def __call__(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """([rows] tokens, [rows, vocabulary] their log-probabilities) of [rows, vocabulary] logits.

        Raises:
            RuntimeError: some rows have a generator and others have none.
        """
        if not generators:  # the engine tries itself out
            found: tuple[torch.Tensor, torch.Tensor | None] = self._sampler.forward_cpu(logits, {}, k, p)
            return found
        if len(generators) < len(logits) or k is not None or p is not None:
            raise RuntimeError("every request needs a seed, no top-k and no top-p")
        seeds = torch.tensor([self._seed(generators[row]) for row in range(len(logits))])
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        tokens: torch.Tensor = torch.ops._C.fused_gumbel_argmax(logits.float(), seeds)
        return tokens, logprobs

    def _seed(self, generator: torch.Generator) -> int:
        ahead = self._ahead.get(generator)
        if not ahead:
            ahead = torch.randint(0, 2**31, (DRAWN,), generator=generator).tolist()
            ahead.reverse()
            self._ahead[generator] = ahead
        return ahead.pop()
