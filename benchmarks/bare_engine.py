"""A sampler's engine on a CPU as vLLM ships it: what ours is measured against, in speed and in bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm import LLM
from vllm.v1.engine.output_processor import OutputProcessor

from workers.engine_seeds import draw_seeds_ahead


@contextmanager
def as_shipped(llm: LLM) -> Iterator[None]:
    """Within it the engine, in this process, gathers what it samples and draws seeds in vLLM's own way, for ``llm.generate``."""
    engine = llm.llm_engine
    ours = engine.output_processor
    try:
        engine.output_processor = OutputProcessor(engine.tokenizer, log_stats=False)
        llm.collective_rpc(_draw_one_by_one)
        yield
    finally:
        engine.output_processor = ours
        # No request is under way, so no seed that was drawn ahead is lost.
        llm.collective_rpc(draw_seeds_ahead)


def _draw_one_by_one(worker: Any) -> None:
    sampler = worker.model_runner.sampler.topk_topp_sampler
    sampler.forward = sampler.forward_cpu
