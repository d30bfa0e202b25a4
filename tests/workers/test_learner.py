"""Real FSDP2 learners on gloo: gradients do not depend on ranks or micro-batches, checkpoints on neither."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from grids.spec import EasyRecipe, ModelSpec, OptimiserSpec
from tests.tiny_models import make_model
from workers.learner import LearnerRank, LearnerSettings
from workers.rollouts import Rollouts

pytestmark = pytest.mark.engine


class OpenLearner(LearnerRank):
    """A rank that shows its gradients and its parameters."""

    def gradients(self, rollouts: Rollouts, rewards: np.ndarray) -> dict[str, np.ndarray]:
        self.backward(rollouts, rewards)
        return {name: p.grad.full_tensor().numpy() for name, p in self._model.named_parameters()}

    def parameters(self) -> dict[str, np.ndarray]:
        return {name: p.full_tensor().detach().numpy() for name, p in self._model.named_parameters()}


class Group:
    """Ranks called together, synchronously."""

    def __init__(self, model: Path, ranks: int, micro_batch_tokens: int = 16_384, **recipe: Any) -> None:
        settings = LearnerSettings(
            model=ModelSpec(path=str(model)),
            recipe=EasyRecipe(type="easy", kl_coefficient=0.1, entropy_coefficient=0.05, **recipe),
            optimiser=OptimiserSpec(learning_rate=1e-3),
            temperature=0.8,
            micro_batch_tokens=micro_batch_tokens,
            threads=1,
            on_gpu=False,
        )
        actor = ray.remote(OpenLearner).options(num_cpus=0)
        self.ranks = [actor.remote(settings, rank, ranks) for rank in range(ranks)]
        host, port = ray.get(self.ranks[0].open_store.remote())
        ray.get([rank.join.remote(host, port) for rank in self.ranks])

    def call(self, method: str, *arguments: Any) -> Any:
        """The method's result on rank 0."""
        return ray.get([getattr(rank, method).remote(*arguments) for rank in self.ranks])[0]

    def close(self) -> None:
        for rank in self.ranks:
            ray.kill(rank)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=True)


def random_rollouts(version: str, groups: int = 5, n: int = 4) -> tuple[Rollouts, np.ndarray]:
    """Made-up responses of 1 to 7 tokens with made-up sampler log-probabilities, and rewards with one flat group."""
    rng = np.random.default_rng(3)
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


def test_gradients_of_two_ranks_and_of_small_micro_batches_equal_one_ranks(
    ray_cluster: None, model: Path
) -> None:
    rollouts, rewards = random_rollouts("start")
    found = []
    for ranks, micro_batch_tokens in ((1, 16_384), (1, 30), (2, 16_384), (2, 30), (2, 1)):
        group = Group(model, ranks, micro_batch_tokens)
        group.call("begin_cell", "start", None)
        found.append(group.call("gradients", rollouts, rewards))
        group.close()
    norm = np.sqrt(sum(float((gradient**2).sum()) for gradient in found[0].values()))
    assert norm > 0.01
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, gradient in found[0].items():
            np.testing.assert_allclose(other[name], gradient, atol=1e-6 * max(1.0, norm), err_msg=name)


def test_metrics_do_not_depend_on_ranks(ray_cluster: None, model: Path) -> None:
    rollouts, rewards = random_rollouts("start")
    metrics = []
    for ranks in (1, 2):
        group = Group(model, ranks, 30)
        group.call("begin_cell", "start", None)
        metrics.append(group.call("update", "next", 1e-3, rollouts, rewards)[0])
        group.close()
    one, two = metrics
    one.pop("seconds_learning"), two.pop("seconds_learning")
    assert one == pytest.approx(two, rel=1e-4)
    assert one["zero_variance_right"] == pytest.approx(1 / 5) and one["train_reward"] == pytest.approx(
        rewards.mean()
    )


def test_rollouts_of_other_weights_are_refused(ray_cluster: None, model: Path) -> None:
    rollouts, rewards = random_rollouts("start")
    group = Group(model, 1)
    group.call("begin_cell", "another cell", None)
    with pytest.raises(ray.exceptions.RayTaskError, match="rollouts of start for a learner at another cell"):
        group.call("update", "next", 1e-3, rollouts, rewards)
    group.close()


def test_a_batch_without_signal_still_makes_a_step(ray_cluster: None, model: Path) -> None:
    rollouts, rewards = random_rollouts("start")
    group = Group(model, 1, zero_variance_filter="all")
    group.call("begin_cell", "start", None)
    before = group.call("parameters")
    metrics, _ = group.call("update", "next", 1e-3, rollouts, np.ones_like(rewards))
    assert metrics["grad_norm"] == 0
    after = group.call("parameters")
    assert all((before[name] == after[name]).all() for name in before)
    # The step counts: Adam's bias correction of the second step differs from that of a first one.
    again, _ = random_rollouts("next")
    group.call("update", "second", 1e-3, again, rewards)
    second = group.call("parameters")
    group.call("begin_cell", "start", None)
    group.call("update", "first", 1e-3, rollouts, rewards)
    first = group.call("parameters")
    group.close()
    assert max(float(np.abs(first[name] - second[name]).max()) for name in first) > 1e-5


@pytest.mark.parametrize(("written_by", "read_by"), [(1, 2), (2, 1)])
def test_a_checkpoint_is_read_by_another_number_of_ranks(
    ray_cluster: None, model: Path, tmp_path: Path, written_by: int, read_by: int
) -> None:
    rollouts, rewards = random_rollouts("start")
    writer = Group(model, written_by)
    writer.call("begin_cell", "start", None)
    writer.call("update", "next", 1e-3, rollouts, rewards)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    writer.call("save", folder)
    saved = writer.call("parameters")
    again, _ = random_rollouts("next")
    writer.call("update", "last", 1e-3, again, rewards)
    expected = writer.call("parameters")
    writer.close()

    reader = Group(model, read_by)
    reader.call("begin_cell", "next", folder)
    for name, value in reader.call("parameters").items():
        np.testing.assert_array_equal(value, saved[name], err_msg=name)
    reader.call("update", "last", 1e-3, again, rewards)
    resumed = reader.call("parameters")
    reader.close()
    # Adam amplifies rounding where gradients are near zero, so a few weights may differ; a lost optimiser moves nearly all of them.
    moved = np.concatenate([np.abs(expected[name] - resumed[name]).ravel() for name in expected])
    assert np.quantile(moved, 0.99) < 1e-6


def test_a_resumed_learner_continues_bit_for_bit(ray_cluster: None, model: Path, tmp_path: Path) -> None:
    rollouts, rewards = random_rollouts("start")
    again, _ = random_rollouts("next")
    group = Group(model, 1)
    group.call("begin_cell", "start", None)
    group.call("update", "next", 1e-3, rollouts, rewards)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    group.call("save", folder)
    group.call("update", "last", 1e-3, again, rewards)
    expected = group.call("parameters")
    group.call("begin_cell", "next", folder)
    group.call("update", "last", 1e-3, again, rewards)
    resumed = group.call("parameters")
    group.close()
    for name, value in expected.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)
    assert not any(
        path.suffix in (".pt", ".pkl", ".distcp") or path.name == ".metadata" for path in folder.rglob("*")
    )
