"""What stands in for parts of vLLM: seeds drawn ahead, samples gathered, prompts shared."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from workers.engine_on_cpu import admit_what_fits
from workers.engine_outputs import GatheredOutputs
from workers.engine_prompts import COPIED_BLOCKS, BlockCopies, SharedPrompts
from workers.engine_seeds import DRAWN, SeedsAhead


def test_seeds_drawn_ahead_are_those_drawn_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[list[int]] = []

    def argmax(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        used.append(seeds.tolist())
        return logits.argmax(-1)

    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace(fused_gumbel_argmax=argmax))
    ahead = SeedsAhead(None)
    generators = {row: torch.Generator().manual_seed(2**40 + row) for row in range(3)}
    logits = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 3.0]])
    steps = DRAWN + 5
    for step in range(steps):
        # Rows change their places, and one ends early.
        rows = [0, 1, 2] if step % 2 else [2, 0, 1]
        rows = rows if step < 40 else [row for row in rows if row != 1]
        at = {place: generators[row] for place, row in enumerate(rows)}
        tokens, logprobs = ahead(logits[rows], at, None, None)
        assert tokens.tolist() == [[1, 0, 1][row] for row in rows]
        assert logprobs is not None and torch.equal(logprobs, logits[rows].log_softmax(-1))
        used[-1] = [used[-1][rows.index(row)] if row in rows else -1 for row in range(3)]
    for row, count in ((0, steps), (1, 40), (2, steps)):
        one_by_one = torch.Generator().manual_seed(2**40 + row)
        expected = [int(torch.randint(0, 2**31, (1,), generator=one_by_one)) for _ in range(count)]
        assert [step[row] for step in used[:count]] == expected


def test_a_request_without_a_seed_beside_others_is_refused() -> None:
    with pytest.raises(RuntimeError, match="needs a seed"):
        SeedsAhead(None)(torch.zeros(2, 4), {0: torch.Generator()}, None, None)


def request(name: str) -> Any:
    return SimpleNamespace(request_id=name)


def output(name: str, tokens: list[int], end: str | None = None) -> Any:
    from vllm.v1.engine import FinishReason

    logprobs = np.asarray([[-float(token)] for token in tokens], dtype=np.float32)
    return SimpleNamespace(
        request_id=name,
        new_token_ids=tokens,
        new_logprobs=SimpleNamespace(logprobs=logprobs),
        finish_reason=FinishReason[end] if end else None,
    )


@pytest.fixture
def outputs() -> GatheredOutputs:
    """Of two requests, one with two samples."""
    gathered = GatheredOutputs()
    for index in range(2):
        gathered.add_request(request(f"{index}_pair"), None, request("pair"), index)
    gathered.add_request(request("single"), None, None, 0)
    return gathered


def test_samples_are_gathered_in_their_order_whichever_ends_first(outputs: GatheredOutputs) -> None:
    assert outputs.get_num_unfinished_requests() == 3
    assert (
        outputs.process_outputs([output("0_pair", [5]), output("1_pair", [6], "STOP")]).request_outputs == []
    )
    done = outputs.process_outputs([output("single", [7, 8], "STOP"), output("0_pair", [9], "LENGTH")])
    assert done.request_outputs == ["single", "pair"]
    assert not outputs.has_unfinished_requests()
    first, second = outputs.take("pair")
    assert (first.tokens, first.truncated) == ([5, 9], True)
    assert np.concatenate(first.logprobs).tolist() == [[-5.0], [-9.0]]
    assert (second.tokens, second.truncated) == ([6], False)
    with pytest.raises(KeyError):
        outputs.take("pair")


def test_a_sample_that_the_engine_gives_up_is_no_result(outputs: GatheredOutputs) -> None:
    with pytest.raises(RuntimeError, match="ended a sample by abort"):
        outputs.process_outputs([output("single", [], "ABORT")])


def test_a_request_that_is_taken_back_leaves_nothing(outputs: GatheredOutputs) -> None:
    assert sorted(outputs.abort_requests(["pair"], internal=True)) == ["0_pair", "1_pair"]
    assert outputs.get_num_unfinished_requests() == 1
    done = outputs.process_outputs([output("single", [1], "STOP")])
    assert done.request_outputs == ["single"]


def shared_prompts(role: KVConnectorRole) -> SharedPrompts:
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=False),
    )
    return SharedPrompts(config, role, SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)]))


@pytest.mark.parametrize("count", [0, 1, COPIED_BLOCKS, 2 * COPIED_BLOCKS + 5])
def test_every_block_is_copied_to_its_target_and_no_other_changes(count: int) -> None:
    sharing = shared_prompts(KVConnectorRole.WORKER)
    before = torch.arange(100.0)[:, None].repeat(1, 3)
    cache = before.clone()
    sharing.register_kv_caches({"layer": cache})
    targets = torch.randperm(50, generator=torch.Generator().manual_seed(1))[:count]
    sources = torch.arange(count) % 3 + 50
    sharing.bind_connector_metadata(BlockCopies(sources, targets))
    sharing.wait_for_layer_load("layer")
    expected = before.clone()
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        expected[target] = before[source]
    assert torch.equal(cache, expected)
    assert (cache != before).any() == (count > 0)


def test_a_prompt_is_taken_only_from_a_request_that_has_its_blocks_and_only_before_the_response_begins() -> (
    None
):
    blocks: dict[str, list[int]] = {}
    manager: Any = SimpleNamespace(block_pool=None, get_block_ids=lambda name: (blocks.get(name, []),))
    sharing = shared_prompts(KVConnectorRole.SCHEDULER)
    sharing.bind_kv_cache_manager(manager)

    def request(name: str, responded: int = 0) -> Any:
        return SimpleNamespace(
            request_id=name,
            prompt_token_ids=[5, 6, 7, 8, 9],
            num_prompt_tokens=5,
            num_tokens=5 + responded,
        )

    def admitted(name: str, block: int, responded: int = 0) -> int:
        """How many tokens it takes."""
        taken, later = sharing.get_num_new_matched_tokens(request(name, responded), 0)
        assert not later
        blocks[name] = [block]
        own: Any = SimpleNamespace(get_block_ids=lambda: (blocks[name],))
        sharing.update_state_after_alloc(request(name, responded), own, taken)
        return taken

    def copies() -> list[tuple[int, int]]:
        found = sharing.build_connector_meta(None)
        return [*zip(found.sources.tolist(), found.targets.tolist(), strict=True)]

    assert (admitted("first", 3), admitted("second", 4), admitted("third", 9)) == (0, 4, 4)
    assert copies() == [(3, 4), (3, 9)]
    assert (admitted("fourth", 5), copies()) == (4, [(3, 5)])
    blocks["third"] = []  # preempted with two tokens of its response
    assert (admitted("third", 6, responded=2), copies()) == (0, [])
    blocks["third"] = []  # it computes its prompt, so others would take it from there
    assert (admitted("fifth", 7), copies()) == (0, [])
    assert (admitted("sixth", 8), copies()) == (4, [(7, 8)])
    sharing.request_finished_all_groups(request("fifth"), ([7],))
    assert (admitted("seventh", 1), copies()) == (0, [])


@pytest.mark.parametrize(("blocks", "asked", "expected"), [(21, 512, 5), (20, 512, 4), (21, 3, 3), (5, 8, 1)])
def test_no_more_requests_run_at_once_than_have_room_at_their_full_length(
    blocks: int, asked: int, expected: int
) -> None:
    """Of 100 tokens, in blocks of 32; one block stays empty."""
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
    scheduler: Any = SimpleNamespace(
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=100),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        ),
        max_num_active_reqs=asked,
    )
    admit_what_fits(scheduler)
    assert scheduler.max_num_active_reqs == expected
