"""Pools on real engines: the start-up probe sees an engine that does not take its weights."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import ray
from transformers import AutoTokenizer

from grids.errors import UserError
from grids.loading import parse_grid
from grids.spec import FailuresSpec, GridSpec
from orchestrator.clock import SYSTEM_CLOCK
from orchestrator.failures.faults import MemberLost
from orchestrator.pools import placement as placement_module
from orchestrator.pools.actors.sampler import SamplerActor
from orchestrator.pools.actors.watchable import WATCH_GROUP
from orchestrator.pools.agreement import Disagreement, prove_agreement, require_agreement
from orchestrator.pools.placement import Placement
from orchestrator.pools.pools import Pools, make_pools
from orchestrator.pools.shared_pool import Ref, SharedPool
from orchestrator.pools.supervision import PoolMember, Supervision
from orchestrator.pools.work import Work
from orchestrator.store.phase_log import PhaseKind
from tests.grids.test_spec import GRID, PATH
from tests.orchestrator.yielding import BROUGHT, Yielding
from tests.tiny_models import make_model
from workers.rollouts import Rollouts
from workers.sampler import SamplingRequest
from workers.weights import Weights

WORK = Work(PhaseKind.SAMPLING, "cell")


class DeafenedSampler(SamplerActor):
    """An engine that can be told to take every weight but one: the fault that tied embeddings had."""

    deaf = False

    def deafen(self) -> None:
        self.deaf = True
        self._version = "none"  # so that it is sent the next weights, whatever they are called

    def stream(
        self, request: SamplingRequest, weights: Weights | None, groups: Sequence[int]
    ) -> Iterator[Rollouts]:
        if self.deaf and weights is not None:
            stale = "model.embed_tokens.weight"
            if not hasattr(self, "_first"):
                self._first = weights.tensors[stale].copy()
                # What the engine would still hold: the values from before the perturbation.
                self._first *= 0.9
            weights = Weights(weights.version, weights.dtype, weights.tensors | {stale: self._first})
        yield from super().stream(request, weights, groups)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> GridSpec:
    folder = make_model(tmp_path_factory.mktemp("model"), tied=True)
    text = GRID.replace("org/model", str(folder)).replace("max_tokens: 8", "max_tokens: 6, temperature: 0.8")
    return parse_grid(text + "verifier: {type: exact}\n", PATH)


def supervision(run_dir: Path, said: list[str]) -> Supervision:
    policy = FailuresSpec(backoff_seconds=0.1, stall_seconds=60)
    return Supervision(run_dir, 1, lambda: None, policy, SYSTEM_CLOCK, said.append, lambda _: None)


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_real_pools_agree_and_refuse_a_stale_tensor(
    ray_cluster: None, spec: GridSpec, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(spec.model.path)
    prompts = [tokenizer.encode(f"{i}+{7 * i}=") for i in range(1, 10)]
    said: list[str] = []
    shared = supervision(tmp_path, said)

    def new_sampler() -> ray.actor.ActorHandle:
        sampler = ray.remote(concurrency_groups={WATCH_GROUP: 1})(DeafenedSampler).options(num_cpus=0)
        return sampler.remote(spec.model, spec.sampling, spec.pools.samplers, 12)

    async def refused(pools: Pools) -> str:
        await pools.samplers.members[0].handle.deafen.remote()
        with pytest.raises(Disagreement) as caught:
            await prove_agreement(pools, prompts, spec)
        return str(caught.value)

    async def try_all() -> tuple[float, str]:
        made = make_pools(spec, 12, shared)
        samplers = SharedPool([PoolMember("sampler 0", new_sampler, shared)], shared, 1)
        pools = Pools(samplers, made.learners, made.grader)
        await pools.start()
        difference = await prove_agreement(pools, prompts, spec)
        message = await refused(pools)
        pools.let_go()
        return difference, message

    difference, message = asyncio.run(try_all())
    assert 0 < difference < 1e-3
    assert "sampler and learner differ by" in message and "0.001" in message
    # Sampler, learner, grader: each was recorded before it served.
    assert len((tmp_path / "members" / "e000001.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("difference", [0.002, float("nan")])
def test_a_difference_over_the_bound_or_no_number_is_refused(difference: float) -> None:
    with pytest.raises(Disagreement, match="differ by"):
        require_agreement(difference, "float32", "here")


def test_a_difference_within_the_bound_of_its_type_passes() -> None:
    require_agreement(0.0009, "float32", "here")
    require_agreement(0.05, "bfloat16", "here")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("end", ["well", "error", "death"])
def test_pairs_come_one_by_one_and_leave_what_they_refer_to_where_it_is(
    ray_cluster: None, tmp_path: Path, end: str
) -> None:
    shared = supervision(tmp_path, [])
    member = PoolMember("sampler 0", ray.remote(Yielding).options(num_cpus=0).remote, shared)
    seen: list[str] = []

    def each(value: str, reference: Ref) -> None:
        seen.append(value)
        (tmp_path / "seen").touch()

    async def ask() -> list[int]:
        pool = SharedPool([member], shared, 1)
        await pool.start()
        try:
            pairs = await pool.values_and_references(
                "pairs", os.getpid(), tmp_path, end, work=WORK, each=each
            )
            return [await member.handle.owner.remote(reference) for _, reference in pairs]
        finally:
            member.let_go()

    if end == "well":
        assert asyncio.run(ask()) == [os.getpid()] * 2
        assert seen == ["first", "second"]
    else:
        with pytest.raises((UserError, MemberLost), match="at fault" if end == "error" else "process died"):
            asyncio.run(ask())
        assert seen[0] == "first"
    assert not BROUGHT


@pytest.mark.timeout(120)
def test_a_group_that_finds_no_room_for_all_its_ranks_takes_none(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster has 8 cores: two groups of two ranks of 3 cores would each take a half, and wait for the other's."""
    monkeypatch.setattr(placement_module, "PLACE_SECONDS", 1.0)
    said: list[str] = []

    async def both() -> None:
        first, second = (Placement(f"learner {i}", [{"CPU": 3.0}] * 2, said.append) for i in range(2))
        opening = [asyncio.ensure_future(place.open()) for place in (first, second)]
        done, waiting = await asyncio.wait(opening, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        one, other = (first, second) if done == {opening[0]} else (second, first)
        await asyncio.sleep(2.5)
        assert not waiting.pop().done()
        assert any("has no room for all its ranks" in line for line in said)
        one.let_go()
        await asyncio.gather(*opening)
        other.let_go()

    asyncio.run(both())
