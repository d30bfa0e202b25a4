"""A sampler's engine on a CPU as vLLM ships it, blocks of 32 tokens apart: what ours is measured against, in speed and in bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm import LLM
from vllm.distributed.kv_transfer import get_kv_transfer_group, kv_transfer_state
from vllm.v1.engine.output_processor import OutputProcessor

from workers.engine_seeds import draw_seeds_ahead


@contextmanager
def as_shipped(llm: LLM) -> Iterator[None]:
    """Within it the engine, in this process, computes prompts, draws seeds and gathers samples in vLLM's way, for ``generate``."""
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    outputs, sharing, copying = engine.output_processor, scheduler.connector, get_kv_transfer_group()
    try:
        engine.output_processor = OutputProcessor(engine.tokenizer, log_stats=False)
        scheduler.connector = kv_transfer_state._KV_CONNECTOR_AGENT = None
        llm.collective_rpc(_draw_one_by_one)
        yield
    finally:
        engine.output_processor = outputs
        scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = sharing, copying
        # No request is under way, so no seed that was drawn ahead is lost.
        llm.collective_rpc(draw_seeds_ahead)


def _draw_one_by_one(worker: Any) -> None:
    sampler = worker.model_runner.sampler.topk_topp_sampler
    sampler.forward = sampler.forward_cpu
