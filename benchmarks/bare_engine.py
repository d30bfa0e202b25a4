"""A sampler's engine on a CPU as vLLM ships it: what ours is measured against, in speed and in bits.

Three settings of ours stay: blocks of 32 tokens, no prefix cache, which has nothing for prompts shorter than a block, and no more
requests at once than the cache has room for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm import LLM
from vllm.distributed.kv_transfer import get_kv_transfer_group, kv_transfer_state
from vllm.v1.engine.output_processor import OutputProcessor

from workers.engine_on_cpu import adapt, scheduler_of


@contextmanager
def as_shipped(llm: LLM) -> Iterator[None]:
    """Within it the engine, in this process, computes prompts, draws seeds and so on in vLLM's own way, for ``llm.generate``."""
    engine = llm.llm_engine
    scheduler = scheduler_of(llm)
    outputs, sharing, copying = engine.output_processor, scheduler.connector, get_kv_transfer_group()
    try:
        engine.output_processor = OutputProcessor(engine.tokenizer, log_stats=False)
        scheduler.connector = kv_transfer_state._KV_CONNECTOR_AGENT = None
        # Ours, where there is one, hides the method.
        vars(scheduler.kv_cache_manager).pop("allocate_slots", None)
        llm.collective_rpc(_draw_one_by_one)
        yield
    finally:
        engine.output_processor = outputs
        scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = sharing, copying
        adapt(llm)  # no request is under way, so no seed that was drawn ahead is lost


def _draw_one_by_one(worker: Any) -> None:
    sampler = worker.model_runner.sampler.topk_topp_sampler
    sampler.forward = sampler.forward_cpu
