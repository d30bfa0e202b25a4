"""Short prompts that the samples of a group share, in a vLLM engine on a CPU.

vLLM 0.32 shares prompts in whole blocks, which on a CPU have 32 tokens or more: a shorter prompt is computed anew for each of the n
samples, and is most of the work where responses are as short. Here one sample computes it, and those that are admitted while that
one runs copy keys and values from its block, by the interface that vLLM has for keys and values from elsewhere. The last token of
a prompt is computed by each sample: its logits give the first token of the response.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from workers.engine_slots import keeps_whole_context

BLOCK_TOKENS = 32
"""The smallest block of vLLM's attention on a CPU, since blocks are copied whole."""

COPIED_BLOCKS = 16
"""At once, so that what is between reading and writing them stays in a core's cache."""


@dataclass(frozen=True)
class BlockCopies(KVConnectorMetadata):
    """What one step of the engine copies, in every layer."""

    sources: torch.Tensor
    """[copies] numbers of blocks"""
    targets: torch.Tensor
    """[copies] numbers of blocks, none of them twice and none of them a source"""


class SharedPrompts(KVConnectorBase_V1, SupportsHMA):
    """Lets a request take its prompt from a running one that has the same, where it fits in one block.

    Longer ones are not shared, so that results stay the same bits: of a long context vLLM's attention takes as many tokens at once
    as the rows of a request leave room for, and a sample that computes one token would sum in another order than one that
    computes all. Nor are those of models that keep more than keys and values of the whole context (windows, states).

    vLLM makes one of these in its scheduler, which says who takes from whom, and one in its worker, which copies.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Called by vLLM.

        Raises:
            ValueError: prompts would be computed in chunks, and taken before they are there.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        if vllm_config.scheduler_config.enable_chunked_prefill:
            raise ValueError("prompts can be shared only without chunked prefill")
        self._shares = keeps_whole_context(kv_cache_config)
        self._leaders: dict[tuple[int, ...], str] = {}
        """Of each prompt the running request that computes or has computed it."""
        self._sources: list[int] = []
        self._targets: list[int] = []
        self._caches: dict[str, torch.Tensor] = {}

    # In the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens can be taken: all of the prompt but the last one, or none."""
        # One that goes on after vLLM has taken its blocks computes its response anew too, and a copy would undo that.
        goes_on = request.num_tokens > request.num_prompt_tokens
        takes = not goes_on and len(self._leader_blocks(request)) > 0
        return (request.num_prompt_tokens - 1 if takes else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request is admitted: it takes its prompt, or others can take it from there."""
        if num_external_tokens:
            (own,) = blocks.get_block_ids()
            self._sources.append(self._leader_blocks(request)[0])
            self._targets.append(own[0])
        elif (prompt := self._sharable(request)) is not None:
            self._leaders[prompt] = request.request_id

    def build_connector_meta(self, scheduler_output: Any) -> BlockCopies:
        """The copies of this step."""
        copies = BlockCopies(
            torch.tensor(self._sources, dtype=torch.int64), torch.tensor(self._targets, dtype=torch.int64)
        )
        self._sources, self._targets = [], []
        return copies

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request that others could take from; its blocks are about to be freed."""
        prompt = self._sharable(request)
        if prompt is not None and self._leaders.get(prompt) == request.request_id:
            del self._leaders[prompt]
        return False, None

    def _sharable(self, request: Any) -> tuple[int, ...] | None:
        """A request's prompt, unless it cannot be shared."""
        if self._shares and request.num_prompt_tokens <= BLOCK_TOKENS:
            return tuple(request.prompt_token_ids)
        return None

    def _leader_blocks(self, request: Any) -> Sequence[int]:
        """Blocks of the request that this one can take from; none of one that has been preempted."""
        prompt = self._sharable(request)
        leader = None if prompt is None else self._leaders.get(prompt)
        if leader is None:
            return ()
        assert self._kv_cache_manager is not None  # bound before the first request
        (blocks,) = self._kv_cache_manager.get_block_ids(leader)
        return blocks

    # In the worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keys and values of each layer, [blocks, ...]."""
        self._caches = kv_caches

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Copy in one layer.

        vLLM has just put this step's keys and values into the layer's cache and looks at them next. What a request has put there
        for its prompt's last token gives way to the same from the other's block; what else that block holds, of a response, is
        written over before anything looks at it.
        """
        copies = self._get_connector_metadata()
        assert isinstance(copies, BlockCopies)
        if not len(copies.sources):
            return  # As in most steps, and split would give one empty part.
        cache = self._caches[layer_name]
        for sources, targets in zip(
            copies.sources.split(COPIED_BLOCKS), copies.targets.split(COPIED_BLOCKS), strict=True
        ):
            cache.index_copy_(0, targets, cache.index_select(0, sources))

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Nothing: layers copy one after the other."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **_: Any) -> None:
        """Nothing: what is taken stays in the cache."""

    def wait_for_save(self) -> None:
        """Nothing: as above."""


SHARING = {
    "kv_connector": SharedPrompts.__name__,
    "kv_connector_module_path": SharedPrompts.__module__,
    "kv_role": "kv_consumer",
}
"""The ``kv_transfer_config`` of an engine that does so."""
