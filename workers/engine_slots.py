"""Places for the tokens of running requests in a vLLM engine's blocks.

Each step vLLM 0.32 works out for each request how many blocks it needs, although for most tokens that is none: for short rollouts
of a small model it takes longer than the attention. Here it is asked only where a block begins.
"""

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

NEXT_TOKEN: dict[str, Any] = {"num_lookahead_tokens": 0}
"""What vLLM asks of a running request's next token besides the slot."""


def spare_allocations(manager: KVCacheManager) -> None:
    """Let the manager of an engine without prefix caching, which would have to hear of each full block, do so."""
    specs = [group.kv_cache_spec for group in manager.kv_cache_config.kv_cache_groups]
    # Other models give blocks back as their window moves on, or keep states.
    if manager.enable_caching or [type(spec) for spec in specs] != [FullAttentionSpec]:
        return
    allocate, block_tokens, none = manager.allocate_slots, specs[0].block_size, manager.empty_kv_cache_blocks

    def allocate_slots(request: Request, num_new_tokens: int, **options: Any) -> KVCacheBlocks | None:
        """``KVCacheManager.allocate_slots``."""
        if num_new_tokens == 1 and request.num_computed_tokens % block_tokens and options == NEXT_TOKEN:
            return none
        return allocate(request, num_new_tokens, **options)

    manager.allocate_slots = allocate_slots
