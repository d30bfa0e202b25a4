"""A sampler's engine as vLLM ships it: what ours is measured against, in speed and in bits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm import LLM
from vllm.v1.engine.output_processor import OutputProcessor


@contextmanager
def as_shipped(llm: LLM) -> Iterator[None]:
    """Within it the engine gathers what it samples, and draws seeds, in vLLM's own way, so that ``llm.generate`` can be called."""
    engine = llm.llm_engine
    ours = engine.output_processor
    engine.output_processor = OutputProcessor(engine.tokenizer, log_stats=False)
    (drawn_ahead,) = llm.collective_rpc(_swap_seeding, args=(None,))
    try:
        yield
    finally:
        engine.output_processor = ours
        llm.collective_rpc(_swap_seeding, args=(drawn_ahead,))


def _swap_seeding(worker: Any, forward: Callable[..., Any] | None) -> Callable[..., Any]:
    """The worker's way to sample rows of logits before; from now on ``forward``, or vLLM's own for CPUs."""
    sampler = worker.model_runner.sampler.topk_topp_sampler
    before: Callable[..., Any] = sampler.forward
    sampler.forward = forward or sampler.forward_cpu
    return before
