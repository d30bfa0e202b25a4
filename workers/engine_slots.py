"""Places for the tokens of running requests in a vLLM engine's blocks.

Each step vLLM 0.32 works out for each request which blocks it needs and which of them are full now, although for most tokens the
answers are none: for short rollouts of a small model a twelfth of an engine's time. Here it is asked only where there is one.
"""

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request


def spare_allocations(manager: KVCacheManager) -> None:
    """Let the manager of an engine without speculative tokens do so."""
    specs = [group.kv_cache_spec for group in manager.kv_cache_config.kv_cache_groups]
    # Other models give blocks back as their window moves on, or keep states.
    if [type(spec) for spec in specs] != [FullAttentionSpec]:
        return
    allocate, block_tokens, none = manager.allocate_slots, specs[0].block_size, manager.empty_kv_cache_blocks

    def allocate_slots(request: Request, num_new_tokens: int, **options: Any) -> KVCacheBlocks | None:
        """``KVCacheManager.allocate_slots``."""
        # A request's first token in a block needs the block, and its last one fills it.
        if num_new_tokens == 1 and 0 < request.num_computed_tokens % block_tokens < block_tokens - 1:
            return none
        return allocate(request, num_new_tokens, **options)

    manager.allocate_slots = allocate_slots
