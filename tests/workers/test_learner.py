"""Real FSDP2 learners on gloo: gradients do not depend on ranks or micro-batches, checkpoints on neither."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from grids.spec import EasyRecipe, ModelSpec, OptimiserSpec
from tests.tiny_models import make_model
from workers import grpo
from workers.learner import LearnerRank
from workers.learning import LearnerSettings
from workers.rollouts import Rollouts

pytestmark = pytest.mark.engine


RECIPE: dict[str, Any] = {"kl_coefficient": 0.1, "entropy_coefficient": 0.05, "zero_variance_filter": "off"}


class OpenLearner(LearnerRank):
    """A rank that shows its gradients and its parameters, and whose settings can be changed between cells."""

    def change(self, micro_batch_tokens: int, recipe: dict[str, Any]) -> None:
        changed = self._settings.recipe.model_copy(update=recipe)
        self._settings = replace(self._settings, micro_batch_tokens=micro_batch_tokens, recipe=changed)

    def count(self) -> int:
        return self.beats

    def gradients_of(self, rollouts: Rollouts, rewards: np.ndarray) -> dict[str, np.ndarray]:
        self.backward(rollouts, rewards)
        return self.gradients()

    def gradients_of_all(
        self, rollouts: Rollouts, rewards: np.ndarray
    ) -> tuple[dict[str, np.ndarray], float]:
        """The same with no response left out, and the share of responses that were computed."""
        with mock.patch.object(
            grpo, "contributing", lambda advantages, *_, **__: np.ones(len(advantages), bool)
        ):
            metrics = self.backward(rollouts, rewards)
            return self.gradients(), metrics["computed_share"]

    def parameters(self) -> dict[str, np.ndarray]:
        return {name: p.full_tensor().detach().numpy() for name, p in self._model.named_parameters()}


class Group:
    """Ranks called together, synchronously."""

    def __init__(self, model: Path, ranks: int) -> None:
        settings = LearnerSettings(
            model=ModelSpec(path=str(model)),
            recipe=EasyRecipe(type="easy", **RECIPE),
            optimiser=OptimiserSpec(learning_rate=1e-3),
            temperature=0.8,
            micro_batch_tokens=16_384,
            threads=1,
            on_gpu=False,
        )
        self.model = model
        actor = ray.remote(OpenLearner).options(num_cpus=0)
        self.ranks = [actor.remote(settings, rank, ranks) for rank in range(ranks)]
        host, port = ray.get(self.ranks[0].open_store.remote())
        ray.get([rank.join.remote(host, port) for rank in self.ranks])

    def call(self, method: str, *arguments: Any) -> Any:
        """The method's result on rank 0."""
        return ray.get([getattr(rank, method).remote(*arguments) for rank in self.ranks])[0]

    def begin(self, micro_batch_tokens: int = 16_384, **recipe: Any) -> None:
        """A fresh cell whose weights are called ``step-0``, under another recipe than ``RECIPE``."""
        self.call("change", micro_batch_tokens, RECIPE | recipe)
        self.call("begin_cell", 0, "step-0", None)


@pytest.fixture(scope="module")
def groups(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Group]]:
    """By number of ranks, a group that serves all tests: each begins a cell of its own.

    Their model ties its embeddings, which is where sharding and names are hardest; that of the whole-grid tests does not.
    """
    model = make_model(tmp_path_factory.mktemp("model"), tied=True)
    found = {ranks: Group(model, ranks) for ranks in (1, 2)}
    yield found
    for group in found.values():
        for rank in group.ranks:
            ray.kill(rank)


def random_rollouts(version: str, groups: int = 5, n: int = 4, seed: int = 3) -> tuple[Rollouts, np.ndarray]:
    """Made-up responses of 1 to 7 tokens with made-up sampler log-probabilities, and rewards with one flat group."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 8, size=groups * n)
    rewards = rng.integers(0, 2, size=(groups, n)).astype(np.float32)
    rewards[0] = 1
    rewards[1] = [0, 1, 1, 1]
    rollouts = Rollouts(
        rollouts_per_problem=n,
        prompts=[rng.integers(3, 13, size=rng.integers(3, 9)).astype(np.int32) for _ in range(groups)],
        tokens=rng.integers(1, 13, size=lengths.sum()).astype(np.int32),
        logprobs=rng.normal(-2.5, 0.5, size=lengths.sum()).astype(np.float32),
        lengths=lengths,
        truncated=np.zeros(groups * n, dtype=bool),
        texts=[""] * (groups * n),
        weights_version=version,
    )
    return rollouts, rewards.reshape(-1)


def test_gradients_of_two_ranks_and_of_small_micro_batches_equal_one_ranks(groups: dict[int, Group]) -> None:
    rollouts, rewards = random_rollouts("step-0")
    found = []
    for ranks, micro_batch_tokens in ((1, 16_384), (1, 30), (2, 16_384), (2, 30), (2, 1)):
        groups[ranks].begin(micro_batch_tokens)
        found.append(groups[ranks].call("gradients_of", rollouts, rewards))
    norm = np.sqrt(sum(float((gradient**2).sum()) for gradient in found[0].values()))
    assert norm > 0.01
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, gradient in found[0].items():
            np.testing.assert_allclose(other[name], gradient, atol=1e-6 * max(1.0, norm), err_msg=name)


def test_metrics_do_not_depend_on_ranks(groups: dict[int, Group]) -> None:
    rollouts, rewards = random_rollouts("step-0")
    metrics = []
    for ranks in (1, 2):
        groups[ranks].begin(micro_batch_tokens=30)
        metrics.append(groups[ranks].call("update", 0, "step-1", 1e-3, rollouts, rewards)[0])
        metrics[-1].pop("seconds_learning")
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)
    assert metrics[0]["zero_variance_right"] == pytest.approx(1 / 5)
    assert metrics[0]["train_reward"] == pytest.approx(rewards.mean())


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_tensor_learns_also_after_a_forward_pass_alone(groups: dict[int, Group], ranks: int) -> None:
    """The start-up probe computes log-probabilities without a backward pass, and then a cell begins."""
    rollouts, rewards = random_rollouts("step-0")
    group = groups[ranks]
    group.begin()
    group.call("logprobs", 0, rollouts)
    group.begin()
    before = group.call("parameters")
    group.call("update", 0, "step-1", 1e-3, rollouts, rewards)
    after = group.call("parameters")
    assert [name for name in before if np.array_equal(before[name], after[name])] == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_part_of_an_update_counts_as_a_sign_of_life(groups: dict[int, Group], ranks: int) -> None:
    rollouts, rewards = random_rollouts("step-0")
    group = groups[ranks]
    group.begin()
    parameters = len(group.call("parameters"))
    before = group.call("count")
    group.call("update", 0, "step-1", 1e-3, rollouts, rewards)
    # One micro-batch, the optimiser's step, and each tensor that is handed on.
    assert group.call("count") - before == 1 + 1 + parameters
    group.begin(micro_batch_tokens=30)
    before = group.call("count")
    group.call("update", 0, "step-1", 1e-3, rollouts, rewards)
    assert group.call("count") - before > 1 + 1 + parameters


def test_rollouts_of_other_weights_are_refused(groups: dict[int, Group]) -> None:
    rollouts, rewards = random_rollouts("another version")
    groups[1].begin()
    with pytest.raises(
        ray.exceptions.RayTaskError, match="rollouts of another version for a learner at step-0"
    ):
        groups[1].call("update", 0, "step-1", 1e-3, rollouts, rewards)


def test_a_batch_without_signal_still_makes_a_step(groups: dict[int, Group]) -> None:
    rollouts, rewards = random_rollouts("step-0")
    again, _ = random_rollouts("step-1")
    group = groups[1]
    group.begin(zero_variance_filter="all")
    before = group.call("parameters")
    metrics, _ = group.call("update", 0, "step-1", 1e-3, rollouts, np.ones_like(rewards))
    assert metrics["grad_norm"] == 0
    after = group.call("parameters")
    assert all((before[name] == after[name]).all() for name in before)
    # The step counts: Adam's bias correction of a second step differs from that of a first one.
    group.call("update", 0, "step-2", 1e-3, again, rewards)
    second = group.call("parameters")
    group.begin(zero_variance_filter="all")
    group.call("update", 0, "step-1", 1e-3, rollouts, rewards)
    first = group.call("parameters")
    assert max(float(np.abs(first[name] - second[name]).max()) for name in first) > 1e-5


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("recipe", "share"),
    [
        # One of five groups is flat.
        ({"kl_coefficient": 0.0, "entropy_coefficient": 0.0}, 0.8),
        ({"zero_variance_filter": "all"}, 0.8),
        ({"zero_variance_filter": "regularisers"}, 0.8),
        ({}, 1.0),
    ],
)
def test_answers_without_a_part_in_the_gradient_are_left_out_and_change_nothing(
    groups: dict[int, Group], ranks: int, recipe: dict[str, Any], share: float
) -> None:
    rollouts, rewards = random_rollouts("step-0")
    groups[ranks].begin(micro_batch_tokens=30, **recipe)
    expected, everything = groups[ranks].call("gradients_of_all", rollouts, rewards)
    assert everything == 1.0
    metrics = groups[ranks].call("update", 0, "step-1", 1e-3, rollouts, rewards)[0]
    assert metrics["computed_share"] == share
    groups[ranks].begin(micro_batch_tokens=30, **recipe)
    found = groups[ranks].call("gradients_of", rollouts, rewards)
    norm = np.sqrt(sum(float((gradient**2).sum()) for gradient in expected.values()))
    assert norm > 0.01
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, atol=1e-6 * max(1.0, norm), err_msg=name)


@pytest.mark.parametrize("ranks", [1, 2])
def test_entropy_is_exact_where_all_answers_are_computed_and_else_that_of_all_sampled_tokens(
    groups: dict[int, Group], ranks: int
) -> None:
    rollouts, rewards = random_rollouts("step-0")
    groups[ranks].begin()
    metrics = groups[ranks].call("update", 0, "step-1", 1e-3, rollouts, rewards)[0]
    model = AutoModelForCausalLM.from_pretrained(groups[ranks].model, dtype=torch.float32)
    entropies = []
    for i, start in enumerate(rollouts.offsets[:-1]):
        prompt = rollouts.prompts[i // rollouts.rollouts_per_problem]
        tokens = torch.tensor([*prompt, *rollouts.tokens[start : start + rollouts.lengths[i]]])[None]
        with torch.no_grad():
            logits = model(tokens).logits[0, len(prompt) - 1 : -1] / 0.8
        entropies += torch.distributions.Categorical(logits=logits).entropy().tolist()
    assert len(entropies) == rollouts.lengths.sum()
    assert metrics["entropy"] == pytest.approx(np.mean(entropies), rel=1e-5)

    groups[ranks].begin(kl_coefficient=0.0, entropy_coefficient=0.0)
    metrics = groups[ranks].call("update", 0, "step-1", 1e-3, rollouts, rewards)[0]
    assert metrics["computed_share"] == 0.8
    assert metrics["entropy"] == pytest.approx(-np.mean(rollouts.logprobs), rel=1e-5)


def test_rollouts_of_weights_that_an_update_is_not_for_are_told(groups: dict[int, Group]) -> None:
    rollouts, rewards = random_rollouts("step-0")
    for version, staleness in (("step-1", 0), ("step-3", 2)):
        groups[1].begin()
        metrics = groups[1].call("update", 0, version, 1e-3, rollouts, rewards)[0]
        assert metrics["staleness"] == staleness


@pytest.mark.parametrize("ranks", [1, 2])
def test_cells_in_two_slots_learn_as_each_would_alone(
    groups: dict[int, Group], tmp_path: Path, ranks: int
) -> None:
    """Weights, moments and step counts of a slot are its own: one has made two steps when the other makes its first."""
    group = groups[ranks]
    batches = {
        slot: [random_rollouts(f"s{slot}/step-{step}", seed=10 * slot + step) for step in range(3)]
        for slot in (0, 1)
    }

    def learn(slot: int, step: int) -> None:
        group.call("update", slot, f"s{slot}/step-{step + 1}", 1e-3, *batches[slot][step])

    alone = {}
    for slot in (0, 1):
        group.begin()
        group.call("begin_cell", slot, f"s{slot}/step-0", None)
        for step in range(3):
            learn(slot, step)
        alone[slot] = group.call("parameters")
    assert any((alone[0][name] != alone[1][name]).any() for name in alone[0])

    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for slot in (0, 1):
        group.call("begin_cell", slot, f"s{slot}/step-0", None)
    for slot, step in [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1)]:
        learn(slot, step)
    group.call("save", 0, folder)
    learn(1, 2)
    for name, value in group.call("parameters").items():
        np.testing.assert_array_equal(value, alone[1][name], err_msg=name)
    # What was saved of the other slot is that slot's.
    group.call("begin_cell", 1, "s0/step-3", folder)
    for name, value in group.call("parameters").items():
        np.testing.assert_array_equal(value, alone[0][name], err_msg=name)


@pytest.mark.parametrize(("written_by", "read_by"), [(1, 1), (1, 2), (2, 1)])
def test_a_resumed_learner_goes_on_as_if_undisturbed_also_with_other_ranks(
    groups: dict[int, Group], tmp_path: Path, written_by: int, read_by: int
) -> None:
    rollouts, rewards = random_rollouts("step-0")
    again, _ = random_rollouts("step-1")
    writer, reader = groups[written_by], groups[read_by]
    writer.begin()
    writer.call("update", 0, "step-1", 1e-3, rollouts, rewards)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    writer.call("save", 0, folder)
    saved = writer.call("parameters")
    writer.call("update", 0, "step-2", 1e-3, again, rewards)
    expected = writer.call("parameters")

    reader.begin()
    reader.call("begin_cell", 0, "step-1", folder)
    for name, value in reader.call("parameters").items():
        np.testing.assert_array_equal(value, saved[name], err_msg=name)
    reader.call("update", 0, "step-2", 1e-3, again, rewards)
    resumed = reader.call("parameters")
    if written_by == read_by:
        for name, value in expected.items():
            np.testing.assert_array_equal(resumed[name], value, err_msg=name)
    # Adam amplifies rounding where gradients are near zero, so with other ranks a few weights may differ; an optimiser
    # whose moments were lost moves nearly all of them differently.
    moved = np.concatenate([np.abs(expected[name] - resumed[name]).ravel() for name in expected])
    assert np.quantile(moved, 0.99) < 1e-6
    # Nothing that would have to be unpickled.
    assert {path.suffix for path in folder.rglob("*")} == {".safetensors"}
