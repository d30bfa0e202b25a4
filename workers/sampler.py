"""Sampling with vLLM: one engine in one process, strictly from the weights it was given."""

import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from grids.errors import UserError
from grids.spec import ModelSpec, SamplerPool, SamplingSpec
from workers.lean_imports import without_unused
from workers.rollouts import Rollouts
from workers.weights import Weights, mismatched_tensors

if TYPE_CHECKING:
    from workers.engine_outputs import Sample


@dataclass(frozen=True)
class SamplingRequest:
    """What to sample: ``rollouts_per_problem`` responses to each prompt."""

    prompts: Sequence[Sequence[int]]
    """G prompts as tokens."""
    seeds: Sequence[int]
    """G seeds (``rollouts.rollout_seed``); sample i of a prompt uses seed + i."""
    rollouts_per_problem: int
    """n"""

    @property
    def sequences(self) -> int:
        """G * n rollouts."""
        return len(self.prompts) * self.rollouts_per_problem


@dataclass(frozen=True)
class Sampled:
    """What is told of rollouts apart from themselves."""

    tokens: int
    """Of their responses."""
    seconds: float
    """The engine took for them."""


class WeightsRefused(RuntimeError):
    """The engine did not take the weights as they were sent; the message names the tensors."""


class Sampler:
    """A vLLM engine in this process. On CPU it runs one thread, which makes its results repeatable bit for bit.

    Results depend on the weights, the prompts and the seeds alone: not on the engine, on other requests or on earlier calls.
    """

    beats = 0
    """Signs of progress so far: engine steps and loaded weights. Another thread may read it at any time."""

    def __init__(
        self, model: ModelSpec, sampling: SamplingSpec, pool: SamplerPool, longest_prompt: int
    ) -> None:
        """Start the engine with the base model's weights.

        Args:
            model: the base model.
            sampling: temperature, token limit and end tokens.
            pool: resources of this engine.
            longest_prompt: tokens of the longest prompt that will come.
        """
        self._sampling, self._on_gpu = sampling, pool.gpus > 0
        # Read when vLLM is imported, so they must be set first.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        if not self._on_gpu:
            _set_cpu_environment(pool)
        # These imports make millions of objects that all stay: looking for garbage among them takes seconds.
        gc.disable()
        with without_unused():
            import torch
            from vllm import LLM

            from workers import engine_on_cpu
            from workers.engine_outputs import GatheredOutputs
        gc.enable()
        if not self._on_gpu:
            torch.set_num_threads(1)
        longest = longest_prompt + sampling.max_tokens
        self._llm = LLM(
            model=model.path,
            dtype=model.dtype,
            worker_extension_cls="workers.engine_weights.WeightLoading",
            distributed_executor_backend="uni" if pool.gpus <= 1 else "mp",
            tensor_parallel_size=max(1, pool.gpus),
            enforce_eager=not self._on_gpu,
            # A seeded request must not be split over two prefills (vLLM's CPU sampler would lose its place).
            enable_chunked_prefill=False,
            max_model_len=longest,
            max_num_seqs=pool.max_sequences,
            max_num_batched_tokens=max(longest, 8192),
            # After temperature: what the learner's log-probabilities are compared with.
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            seed=0,
            **({} if self._on_gpu else engine_on_cpu.OPTIONS),
        )
        self._outputs = GatheredOutputs()
        self._llm.llm_engine.output_processor = self._outputs
        if not self._on_gpu:
            engine_on_cpu.adapt(self._llm)
        self._tokenizer = self._llm.get_tokenizer()
        self._stop_token_ids = stop_token_ids(self._tokenizer, sampling.stop_tokens)
        self._expected_shapes = checkpoint_shapes(model.path)
        self._version = "base"

    def generate(self, request: SamplingRequest, weights: Weights | None = None) -> Rollouts:
        """The whole of ``stream``."""
        (rollouts,) = self.stream(request, weights, [len(request.prompts)])
        return rollouts

    def stream(
        self, request: SamplingRequest, weights: Weights | None, groups: Sequence[int]
    ) -> Iterator[Rollouts]:
        """Sample from ``weights``, which are loaded unless the engine already holds that version.

        All prompts are worked on together, and given in slices of so many ``groups`` in the batch's order, each slice as soon as
        it is whole.

        Raises:
            WeightsRefused: a tensor is missing, unknown or of another shape.
            RuntimeError: log-probabilities are no numbers, or the engine has lost or given up a request, or has some of an earlier
                batch; it is to be started anew.
        """
        if self._llm.llm_engine.has_unfinished_requests():
            raise RuntimeError("the engine has requests of an earlier batch")
        if weights is not None and weights.version != self._version:
            self._load(weights)
        prompts: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in request.prompts]
        names = self._llm.enqueue(prompts, self.parameters(request), use_tqdm=False)
        places = {name: place for place, name in enumerate(names)}
        slices = [*pairwise(np.cumsum([0, *groups]).tolist())]
        finished: set[int] = set()
        whole = 0
        for name in self._finished():
            finished.add(places[name])
            while whole in finished:
                whole += 1
            while slices and slices[0][1] <= whole:
                first, end = slices.pop(0)
                samples = chain.from_iterable(self._outputs.take(name) for name in names[first:end])
                yield self._rollouts(request.prompts[first:end], [*samples], request.rollouts_per_problem)
        if slices:
            raise RuntimeError(f"the engine has finished {len(finished)} of {len(prompts)} prompts")

    def _finished(self) -> Iterator[str]:
        """Names of the requests that the engine has, as it finishes them."""
        engine = self._llm.llm_engine
        while engine.has_unfinished_requests():
            names: list[Any] = engine.step()
            self.beats += 1
            yield from names

    def _rollouts(self, prompts: Sequence[Sequence[int]], samples: Sequence["Sample"], n: int) -> Rollouts:
        """Rollouts of the samples of these prompts."""
        rollouts = Rollouts(
            rollouts_per_problem=n,
            prompts=[np.asarray(prompt, dtype=np.int32) for prompt in prompts],
            tokens=np.fromiter(chain.from_iterable(sample.tokens for sample in samples), dtype=np.int32),
            logprobs=np.concatenate([piece for sample in samples for piece in sample.logprobs])[:, 0],
            lengths=np.fromiter((len(sample.tokens) for sample in samples), dtype=np.int64),
            truncated=np.fromiter((sample.truncated for sample in samples), dtype=bool),
            texts=self._tokenizer.batch_decode(
                [sample.tokens for sample in samples], skip_special_tokens=True
            ),
            weights_version=self._version,
        )
        if not np.isfinite(rollouts.logprobs).all():
            raise RuntimeError(
                f"the engine returned log-probabilities of {self._version} that are no numbers"
            )
        return rollouts

    def parameters(self, request: SamplingRequest) -> list[Any]:
        """vLLM's ``SamplingParams`` of each problem."""
        from vllm import SamplingParams

        return [
            SamplingParams(
                n=request.rollouts_per_problem,
                seed=seed,
                temperature=self._sampling.temperature,
                top_p=1.0,
                top_k=0,
                max_tokens=self._sampling.max_tokens,
                stop_token_ids=self._stop_token_ids,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                skip_clone=True,
            )
            for seed in request.seeds
        ]

    def _load(self, weights: Weights) -> None:
        faults = mismatched_tensors(
            {name: array.shape for name, array in weights.tensors.items()}, self._expected_shapes
        )
        if not faults:
            # Until the new weights are in, the engine holds neither version.
            self._version = "none"
            for untouched in self._llm.collective_rpc("load_weights_in_place", args=(weights,)):
                faults += [f"{name} of the engine received nothing" for name in untouched]
        if faults:
            raise WeightsRefused(f"weights {weights.version}: " + "; ".join(faults))
        # Cached prefixes belong to the old weights; on a CPU there are none.
        if self._on_gpu:
            self._llm.reset_prefix_cache()
        self._version = weights.version
        self.beats += 1


def _set_cpu_environment(pool: SamplerPool) -> None:
    """What vLLM and torch read before an engine on a CPU starts."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(pool.kv_cache_gib)))
    os.environ["OMP_NUM_THREADS"] = "1"
    # A setting for learners on GPUs, with which vLLM refuses to share prompts.
    os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    # vLLM would compile a few small functions at the first call, in seconds that they never make up for here.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"


def checkpoint_shapes(model_path: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's parameters, tied ones once, from its configuration alone (no weights are read)."""
    import torch

    with without_unused():
        from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def stop_token_ids(tokenizer: Any, tokens: Sequence[str]) -> list[int]:
    """Ids of a grid's ``stop_tokens``.

    Raises:
        UserError: one is no token of the model.
    """
    ids = []
    for token in tokens:
        token_id = tokenizer.convert_tokens_to_ids(token)
        if token_id is None or token_id == tokenizer.unk_token_id:
            raise UserError(
                f"sampling.stop_tokens: {token!r} is no token of the model; name one from its tokenizer"
            )
        ids.append(token_id)
    return ids
