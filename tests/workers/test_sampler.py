"""A real vLLM engine: repeatable, independent of its company, and sampling from the weights it was given."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grids.spec import ModelSpec, SamplerPool, SamplingSpec
from tests.tiny_models import make_model
from workers.packing import pack_weights, unpack_weights
from workers.rollouts import Rollouts, rollout_seed
from workers.sampler import Sampler, SamplingRequest
from workers.weights import Weights, mismatched_tensors

TEMPERATURE = 0.8
LONG_PROMPT = 800
"""Tokens: more than vLLM's attention takes at once on a CPU, of a prompt with all its tokens or of the next token alone."""
PROMPTS = ["12+34=", "5+678=", "90+12=", "3+4=", "777+1="]


def request_of(prompts: list[list[int]], n: int, first: int = 0) -> SamplingRequest:
    seeds = [rollout_seed("cell", 3, first + position) for position in range(len(prompts))]
    return SamplingRequest(prompts, seeds, n)


def test_seeds_differ_leave_room_for_samples_and_never_change() -> None:
    seeds = {rollout_seed("bp16-n4-s0", step, position) for step in range(50) for position in range(50)}
    assert len(seeds) == 2500
    assert max(seeds) < 2**62
    # Frozen: another value would silently change every replay.
    assert rollout_seed("bp16-n4-s0", 1, 0) == 1377781860687966509


def test_neighbouring_positions_do_not_share_seeds_of_samples() -> None:
    """vLLM gives sample i the seed + i, so positions must lie further apart than any group is large."""
    seeds = sorted(rollout_seed("cell", 1, position) for position in range(1024))
    assert min(np.diff(seeds)) > 2048


def test_bfloat16_weights_travel_as_integers_without_loss() -> None:
    tensor = torch.randn(3, 5)
    weights = pack_weights("v", "bfloat16", [("w", tensor)])
    assert weights.tensors["w"].dtype == np.int16
    ((name, back),) = unpack_weights(weights)
    assert name == "w"
    assert torch.equal(back, tensor.to(torch.bfloat16))


def test_every_tensor_that_does_not_fit_is_named() -> None:
    faults = mismatched_tensors(
        {"a": (2, 3), "b": (4,), "extra": (1,)}, {"a": (3, 2), "b": (4,), "missing": (1,)}
    )
    assert faults == [
        "missing was not sent",
        "extra is unknown to the engine",
        "a has shape (2, 3), the engine has (3, 2)",
    ]


class CountedSampler(Sampler):
    def count(self) -> int:
        return self.beats

    def bare(self, request: SamplingRequest) -> list[tuple[list[int], list[float], bool]]:
        """Tokens, log-probabilities and truncation of each response by ``LLM.generate`` of vLLM as it is shipped."""
        from benchmarks.bare_engine import as_shipped

        prompts: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in request.prompts]
        with as_shipped(self._llm):
            outputs = self._llm.generate(prompts, self.parameters(request), use_tqdm=False)
        return [
            (list(response.token_ids), list(response.logprobs.logprobs), response.finish_reason == "length")
            for output in outputs
            for response in output.outputs
        ]

    def computed_tokens(self, request: SamplingRequest) -> tuple[int, np.ndarray]:
        """(tokens that the model was given for these rollouts, lengths of their responses)."""
        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        schedule, computed = scheduler.schedule, []

        def counted(*arguments: Any) -> Any:
            output = schedule(*arguments)
            computed.append(output.total_num_scheduled_tokens)
            return output

        scheduler.schedule = counted
        try:
            lengths = self.generate(request).lengths
        finally:
            scheduler.schedule = schedule
        return sum(computed), lengths

    def slices(self, request: SamplingRequest, groups: list[int]) -> list[tuple[Rollouts, int]]:
        """Each slice, and after how many of the engine's steps it was there."""
        first = self.beats
        return [(rollouts, self.beats - first) for rollouts in self.stream(request, None, groups)]


class CrampedSampler(CountedSampler):
    """Its cache holds three of the long prompts, and their responses not quite."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        from workers import engine_on_cpu

        engine_on_cpu.OPTIONS["num_gpu_blocks_override"] = 3 * 25 + 2
        super().__init__(*arguments, **options)


class Engine:
    """A sampler actor, called synchronously, and its model folder."""

    def __init__(self, folder: Any, kind: type[CountedSampler] = CountedSampler) -> None:
        self.folder = folder
        environment = {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        actor = ray.remote(kind).options(num_cpus=0, runtime_env={"env_vars": environment})
        self.actor = actor.remote(
            ModelSpec(path=str(folder)),
            SamplingSpec(temperature=TEMPERATURE, max_tokens=6),
            SamplerPool(max_sequences=64),
            longest_prompt=LONG_PROMPT,
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
        digits = [token for prompt in self.prompts for token in prompt[:-1]]
        self.long_prompt = (digits * LONG_PROMPT)[:LONG_PROMPT]

    def generate(self, request: SamplingRequest, weights: Weights | None = None) -> Rollouts:
        return ray.get(self.actor.generate.remote(request, weights))


@pytest.fixture(scope="module")
def engine(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Of a model that ties its embeddings, which an engine can miss when weights arrive; that of the whole-grid tests does not."""
    engine = Engine(make_model(tmp_path_factory.mktemp("model"), tied=True, context=1024))
    yield engine
    ray.kill(engine.actor)


def named_weights(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def reference_logprobs(model: torch.nn.Module, rollouts: Rollouts) -> np.ndarray:
    """Log-probabilities by a plain transformers forward pass of each sequence alone."""
    found = []
    offsets = rollouts.offsets
    for i in range(len(rollouts.lengths)):
        prompt = rollouts.prompts[i // rollouts.rollouts_per_problem]
        tokens = torch.tensor([*prompt, *rollouts.tokens[offsets[i] : offsets[i + 1]]])[None]
        with torch.no_grad():
            logprobs = torch.log_softmax(model(tokens).logits[0] / TEMPERATURE, dim=-1)
        positions = range(len(prompt), tokens.shape[1])
        found += [float(logprobs[p - 1, tokens[0, p]]) for p in positions]
    return np.array(found)


@pytest.mark.engine
def test_logprobs_are_those_of_the_weights_last_sent(engine: Engine) -> None:
    model = AutoModelForCausalLM.from_pretrained(engine.folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for version in ("first", "second"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        weights = pack_weights(version, "float32", named_weights(model))
        rollouts = engine.generate(request_of(engine.prompts, 4), weights)
        assert rollouts.weights_version == version
        np.testing.assert_allclose(rollouts.logprobs, reference_logprobs(model, rollouts), atol=1e-4)


@pytest.mark.engine
def test_results_repeat_and_do_not_depend_on_the_other_requests(engine: Engine) -> None:
    whole = engine.generate(request_of(engine.prompts, 4))
    again = engine.generate(request_of(engine.prompts, 4))
    np.testing.assert_array_equal(again.tokens, whole.tokens)
    np.testing.assert_array_equal(again.logprobs, whole.logprobs)
    part = engine.generate(request_of(engine.prompts[3:], 4, first=3))
    split = int(whole.lengths[: 3 * 4].sum())
    np.testing.assert_array_equal(part.tokens, whole.tokens[split:])
    np.testing.assert_array_equal(part.logprobs, whole.logprobs[split:])
    other = engine.generate(request_of(engine.prompts, 4, first=50))
    assert not np.array_equal(other.tokens, whole.tokens)


@pytest.mark.engine
def test_a_long_prompt_gives_the_same_bits_with_and_without_one_that_begins_alike(engine: Engine) -> None:
    """As where an evaluation meets problems of a training batch, or all prompts begin with the same instructions."""
    model = AutoModelForCausalLM.from_pretrained(engine.folder, dtype=torch.float32)
    request = request_of([engine.long_prompt], 4)
    cold = engine.generate(request, pack_weights("fresh", "float32", named_weights(model)))
    seeds = [rollout_seed("cell", 9, 0), *request.seeds, rollout_seed("cell", 9, 1)]
    others = engine.long_prompt[:-40], engine.long_prompt
    among = engine.generate(SamplingRequest([others[0], engine.long_prompt, others[1]], seeds, 4))
    tokens = slice(*among.offsets[[4, 8]])
    np.testing.assert_array_equal(among.tokens[tokens], cold.tokens)
    np.testing.assert_array_equal(among.logprobs[tokens], cold.logprobs)
    np.testing.assert_allclose(cold.logprobs, reference_logprobs(model, cold), atol=1e-4)


@pytest.mark.engine
def test_a_long_prompt_gives_the_same_bits_where_the_cache_has_no_room_for_all(engine: Engine) -> None:
    """No sample is taken out in the middle of its response, to be computed anew."""
    request = request_of([engine.long_prompt], 12)
    roomy = engine.generate(request)
    cramped = Engine(engine.folder, CrampedSampler)
    found = cramped.generate(request)
    ray.kill(cramped.actor)
    np.testing.assert_array_equal(found.tokens, roomy.tokens)
    np.testing.assert_array_equal(found.logprobs, roomy.logprobs)


@pytest.mark.engine
@pytest.mark.parametrize("length", [1, 2, 32, 33])
def test_the_samples_of_a_group_share_a_prompt_of_one_block(engine: Engine, length: int) -> None:
    """All but its last token, which each computes; then each token but the last of its response."""
    request = request_of([engine.long_prompt[:length]], 7)
    computed, lengths = ray.get(engine.actor.computed_tokens.remote(request))
    prompts = length + 6 if length <= 32 else 7 * length
    assert computed == prompts + (lengths - 1).sum()


@pytest.mark.engine
def test_rollouts_are_those_of_vllm_as_it_is_shipped(engine: Engine) -> None:
    around_a_block = [engine.long_prompt[:length] for length in (1, 28, 31, 32, 33, 64)]
    # Some end early, and 64 of 480 fit the engine at once.
    request = request_of([*engine.prompts, *around_a_block, engine.prompts[0]], 40)
    rollouts = engine.generate(request)
    bare = ray.get(engine.actor.bare.remote(request))
    ends = rollouts.offsets[1:-1]
    assert [part.tolist() for part in np.split(rollouts.tokens, ends)] == [tokens for tokens, _, _ in bare]
    logprobs = [np.asarray(values, dtype=np.float32) for _, values, _ in bare]
    assert np.array_equal(rollouts.logprobs, np.concatenate(logprobs))
    assert rollouts.truncated.tolist() == [truncated for _, _, truncated in bare]
    assert len({len(tokens) for tokens, _, _ in bare}) > 1


def test_a_batch_comes_in_slices_each_as_soon_as_it_is_whole(engine: Engine) -> None:
    """64 of 80 responses fit the engine at once, so the last slice waits for room that others have left."""
    request = request_of(engine.prompts, 16)
    whole = engine.generate(request)
    slices = ray.get(engine.actor.slices.remote(request, [2, 2, 1]))
    parts, steps = zip(*slices, strict=True)
    assert [len(part.prompts) for part in parts] == [2, 2, 1]
    joined = Rollouts.join(parts)
    np.testing.assert_array_equal(joined.tokens, whole.tokens)
    np.testing.assert_array_equal(joined.logprobs, whole.logprobs)
    np.testing.assert_array_equal(joined.lengths, whole.lengths)
    assert joined.texts == whole.texts
    # A response takes a step for each of its tokens; the engine is at work for longer than for those of the first slice.
    assert whole.lengths[: 2 * 16].max() <= steps[0] < steps[2]


@pytest.mark.engine
def test_every_engine_step_counts_as_a_sign_of_life(engine: Engine) -> None:
    before = ray.get(engine.actor.count.remote())
    rollouts = engine.generate(request_of(engine.prompts, 4))
    assert ray.get(engine.actor.count.remote()) - before >= rollouts.lengths.max()


@pytest.mark.engine
def test_rollouts_are_grouped_by_prompt_and_mark_truncation(engine: Engine) -> None:
    rollouts = engine.generate(request_of(engine.prompts, 3))
    assert len(rollouts.texts) == len(rollouts.lengths) == len(rollouts.truncated) == 3 * len(PROMPTS)
    assert rollouts.lengths.sum() == len(rollouts.tokens) == len(rollouts.logprobs)
    tokenizer = AutoTokenizer.from_pretrained(engine.folder)
    ends = rollouts.tokens[rollouts.offsets[1:] - 1] == tokenizer.eos_token_id
    np.testing.assert_array_equal(rollouts.truncated, ~ends)
    assert (rollouts.lengths[rollouts.truncated] == 6).all()


@pytest.mark.engine
def test_weights_that_do_not_fit_are_refused_by_name(engine: Engine) -> None:
    model = AutoModelForCausalLM.from_pretrained(engine.folder, dtype=torch.float32)
    named = dict(model.named_parameters())
    norm = named.pop("model.norm.weight")
    named["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    named["model.unheard_of"] = norm
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        engine.generate(request_of(engine.prompts, 2), pack_weights("bad", "float32", named.items()))
    message = str(caught.value)
    assert "model.norm.weight was not sent" in message
    assert "model.unheard_of is unknown" in message
    assert "model.layers.0.mlp.up_proj.weight has shape (3, 3)" in message
    # A refused load leaves the engine as it was.
    assert engine.generate(request_of(engine.prompts, 2)).weights_version != "bad"
