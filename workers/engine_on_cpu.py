"""What a vLLM engine on a CPU has of its own.

Its results are the same bits whatever else it works on, and what vLLM spends most of the time on around short rollouts of a small
model is left out.
"""

from dataclasses import replace
from typing import Any

from vllm import LLM
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.core.sched.scheduler import Scheduler

from workers.engine_prompts import BLOCK_TOKENS, SHARING
from workers.engine_seeds import draw_seeds_ahead
from workers.engine_slots import spare_allocations

OPTIONS: dict[str, Any] = {
    "block_size": BLOCK_TOKENS,
    "kv_transfer_config": SHARING,
    # A prompt of which a part is found in the cache may be summed up in another order than the same prompt without.
    "enable_prefix_caching": False,
}
"""Of ``LLM``."""


def adapt(llm: LLM) -> None:
    """Make a new engine, in this process, one of these."""
    scheduler = scheduler_of(llm)
    admit_what_fits(scheduler)
    spare_allocations(scheduler.kv_cache_manager)
    llm.collective_rpc(draw_seeds_ahead)


def scheduler_of(llm: LLM) -> Any:
    """The scheduler of an engine in this process."""
    core: Any = llm.llm_engine.engine_core
    return core.engine_core.scheduler


def admit_what_fits(scheduler: Scheduler) -> None:
    """Run no more requests at once than the cache has room for at their full length.

    None is then preempted in the middle of its response, whose tokens would be computed anew together, and summed in another order.
    """
    config = scheduler.kv_cache_config
    usable = replace(config, num_blocks=config.num_blocks - 1)  # vLLM keeps one block empty
    fitting = int(get_max_concurrency_for_kv_cache_config(scheduler.vllm_config, usable))
    scheduler.max_num_active_reqs = max(1, min(scheduler.max_num_active_reqs, fitting))
