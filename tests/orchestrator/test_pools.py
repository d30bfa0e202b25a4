"""Pools on real engines: the start-up probe sees an engine that does not take its weights."""

import asyncio

import pytest
import ray
from transformers import AutoTokenizer

from grids.loading import parse_grid
from grids.spec import GridSpec
from orchestrator.pools import (
    Disagreement,
    Pools,
    SamplerActor,
    SamplerPool,
    prove_agreement,
    require_agreement,
)
from orchestrator.pools import start_pools as start_real_pools
from tests.grids.test_spec import GRID, PATH
from tests.tiny_models import make_model
from workers.rollouts import Rollouts
from workers.sampler import SamplingRequest
from workers.weights import Weights


class DeafSampler(SamplerActor):
    """An engine that takes every weight but one: the fault that tied embeddings had."""

    def sample(self, request: SamplingRequest, weights: Weights | None) -> tuple[Rollouts, float]:
        if weights is not None:
            stale = "model.embed_tokens.weight"
            if not hasattr(self, "_first"):
                self._first = weights.tensors[stale].copy()
                # What the engine would still hold: the values from before the perturbation.
                self._first *= 0.9
            weights = Weights(weights.version, weights.dtype, weights.tensors | {stale: self._first})
        return super().sample(request, weights)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> GridSpec:
    folder = make_model(tmp_path_factory.mktemp("model"), tied=True)
    text = GRID.replace("org/model", str(folder)).replace("max_tokens: 8", "max_tokens: 6, temperature: 0.8")
    return parse_grid(text + "verifier: {type: exact}\n", PATH)


@pytest.mark.engine
def test_the_probe_passes_real_engines_and_refuses_one_with_a_stale_tensor(
    ray_cluster: None, spec: GridSpec
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(spec.model.path)
    prompts = [tokenizer.encode(f"{i}+{7 * i}=") for i in range(1, 10)]

    async def probe() -> tuple[float, str]:
        pools = await start_real_pools(spec, longest_prompt=12)
        difference = await prove_agreement(pools, prompts, spec)
        deaf = (
            ray.remote(DeafSampler)
            .options(num_cpus=0)
            .remote(spec.model, spec.sampling, spec.pools.samplers, 12)
        )
        await deaf.start.remote()
        with pytest.raises(Disagreement) as caught:
            await prove_agreement(Pools(SamplerPool([deaf]), pools.learners, pools.grader), prompts, spec)
        for actor in [deaf, pools.grader, *pools.samplers.engines]:
            ray.kill(actor)
        return difference, str(caught.value)

    difference, message = asyncio.run(probe())
    assert 0 < difference < 1e-3
    assert "sampler and learner differ by" in message and "0.001" in message


@pytest.mark.parametrize("difference", [0.002, float("nan")])
def test_a_difference_over_the_bound_or_no_number_is_refused(difference: float) -> None:
    with pytest.raises(Disagreement, match="differ by"):
        require_agreement(difference, "float32", "here")


def test_a_difference_within_the_bound_of_its_type_passes() -> None:
    require_agreement(0.0009, "float32", "here")
    require_agreement(0.05, "bfloat16", "here")
