"""One computation of a prompt for all samples of its group, in a vLLM engine on a CPU.

vLLM 0.32 shares whole blocks of prompts, and on a CPU a block has 32 tokens or more. What is left over, which of a short prompt is
all of it, is computed anew for each of the n samples: for short rollouts of a small model a fifth of an engine's time. Here the
first sample of a group computes it and the others copy keys and values from its blocks, by the interface that vLLM has for keys
and values from elsewhere. The last token of a prompt is computed by each sample: its logits give the first token of the response.
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
from vllm.v1.kv_cache_interface import FullAttentionSpec

BLOCK_TOKENS = 32
"""The smallest block of vLLM's attention on a CPU, since blocks are copied whole."""


@dataclass(frozen=True)
class BlockCopies(KVConnectorMetadata):
    """What one step of the engine copies, in every layer."""

    sources: torch.Tensor
    """[copies] numbers of blocks"""
    targets: torch.Tensor
    """[copies] numbers of blocks, none of them twice and none of them a source"""


class SharedPrompts(KVConnectorBase_V1, SupportsHMA):
    """Lets a request take its prompt from a running one that has the same.

    vLLM makes one in its scheduler, which says who takes what from whom, and one in its worker, which copies. A request's prompt
    must be computed whole in the step that admits it (no chunked prefill). Models that keep more than keys and values of the
    whole context (windows, states) share nothing.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Called by vLLM."""
        super().__init__(vllm_config, role, kv_cache_config)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._shares = [type(spec) for spec in specs] == [FullAttentionSpec]
        self._block_tokens: int = specs[0].block_size if self._shares else 0
        self._leaders: dict[tuple[int, ...], str] = {}
        """Of each prompt the running request that computes or has computed it."""
        self._sources: list[int] = []
        self._targets: list[int] = []
        self._caches: dict[str, torch.Tensor] = {}

    @property
    def requires_kv_delivery(self) -> bool:
        """No other engine waits for anything."""
        return False

    # In the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens can be taken after the first ``num_computed_tokens``, which are whole blocks that vLLM shares itself."""
        if not self._leader_blocks(request):
            return 0, False
        return max(0, request.num_prompt_tokens - 1 - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request is admitted: it takes so many tokens, or others can take from it."""
        if not num_external_tokens:
            self._leaders[_prompt(request)] = request.request_id
            return
        end = request.num_prompt_tokens - 1
        places = slice((end - num_external_tokens) // self._block_tokens, -(-end // self._block_tokens))
        (own,) = blocks.get_block_ids()
        self._sources += self._leader_blocks(request)[places]
        self._targets += own[places]

    def build_connector_meta(self, scheduler_output: Any) -> BlockCopies:
        """The copies of this step."""
        copies = BlockCopies(torch.tensor(self._sources), torch.tensor(self._targets))
        self._sources, self._targets = [], []
        return copies

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Its blocks are about to be freed: nobody can take from it any more."""
        prompt = _prompt(request)
        if self._leaders.get(prompt) == request.request_id:
            del self._leaders[prompt]
        return False, None

    def _leader_blocks(self, request: Any) -> Sequence[int]:
        """Blocks of the request that this one can take from; none of one that has been preempted."""
        leader = self._leaders.get(_prompt(request)) if self._shares else None
        if leader is None or self._kv_cache_manager is None:
            return ()
        (blocks,) = self._kv_cache_manager.get_block_ids(leader)
        return blocks

    # In the worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keys and values of each layer, [blocks, ...]."""
        self._caches = kv_caches

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Copy in one layer; vLLM has put this step's keys and values into its cache just before."""
        copies = self._get_connector_metadata()
        assert isinstance(copies, BlockCopies)
        if len(copies.sources):
            cache = self._caches[layer_name]
            cache.index_copy_(0, copies.targets, cache.index_select(0, copies.sources))

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Nothing: layers copy one after the other."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **_: Any) -> None:
        """Nothing: what is taken stays in the cache."""

    def wait_for_save(self) -> None:
        """Nothing: as above."""


SHARING = {
    "kv_connector": SharedPrompts.__name__,
    "kv_connector_module_path": SharedPrompts.__module__,
    "kv_role": "kv_both",
}
"""An engine's ``kv_transfer_config`` with which it does so."""


def _prompt(request: Any) -> tuple[int, ...]:
    return tuple(request.prompt_token_ids)
