"""Places for the tokens of running requests in a vLLM engine's blocks.

Each step vLLM 0.32 works out for each request how many blocks it needs, although for most tokens that is none: for short rollouts
of a small model it takes longer than the attention. Here it is asked only where a block begins.
"""

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.request import Request

NEXT_TOKEN: dict[str, Any] = {"num_lookahead_tokens": 0}
"""What vLLM asks of a running request's next token besides the slot."""


def keeps_whole_context(config: KVCacheConfig) -> bool:
    """Whether a model keeps keys and values of the whole context, and nothing else.

    Others give blocks back as their window moves on, or keep states.
    """
    return [type(group.kv_cache_spec) for group in config.kv_cache_groups] == [FullAttentionSpec]


def spare_allocations(manager: KVCacheManager) -> None:
    """Let the manager of an engine without prefix caching, which would have to hear of each full block, do so."""
    config = manager.kv_cache_config
    if manager.enable_caching or not keeps_whole_context(config):
        return
    allocate, none = manager.allocate_slots, manager.empty_kv_cache_blocks
    block_tokens = config.kv_cache_groups[0].kv_cache_spec.block_size

    def allocate_slots(request: Request, num_new_tokens: int, **options: Any) -> KVCacheBlocks | None:
        """``KVCacheManager.allocate_slots``."""
        if num_new_tokens == 1 and request.num_computed_tokens % block_tokens and options == NEXT_TOKEN:
            return none
        return allocate(request, num_new_tokens, **options)

    manager.allocate_slots = allocate_slots
