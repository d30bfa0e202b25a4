"""The Ray actors of the pools: workers, each with a counter that shows whether it moves."""

import time
from typing import Any, cast

import numpy as np
import ray

from orchestrator.pools.members import Member, this_member
from workers.grading import Grader
from workers.learner import LearnerRank
from workers.rollouts import Rollouts
from workers.sampler import Sampler, SamplingRequest
from workers.weights import Weights

WATCH_GROUP = "watch"
"""Concurrency group of ``signs_of_life`` alone: it answers while the actor is at work."""


class Watchable:
    """What every pool actor answers besides its work."""

    beats: int

    def identify(self, role: str) -> Member:
        """The process that this actor is."""
        return this_member(role)

    @ray.method(concurrency_group=WATCH_GROUP)
    def signs_of_life(self) -> int:
        """A counter that moves while work goes on."""
        return self.beats


class SamplerActor(Watchable, Sampler):
    """A sampler that starts by a method and tells how long it took."""

    def __init__(self, *arguments: Any) -> None:
        """Hold the arguments of ``Sampler``. An error in an actor's constructor would arrive as the loss of the actor."""
        self._arguments = arguments

    def start(self) -> None:
        """Start the engine."""
        super().__init__(*self._arguments)

    def sample(self, request: SamplingRequest, weights: Weights | None) -> tuple[Rollouts, tuple[int, float]]:
        """``generate``, and (tokens, seconds)."""
        started = time.monotonic()
        rollouts = self.generate(request, weights)
        return rollouts, (len(rollouts.tokens), time.monotonic() - started)


class LearnerActor(Watchable, LearnerRank):
    """A learner rank, whose batches arrive in the parts that engines made of them."""

    def update_on(
        self, slot: int, version: str, learning_rate: float, *parts: Rollouts | np.ndarray
    ) -> tuple[dict[str, float], Weights | None]:
        """``update``; first all parts' rollouts, then all parts' rewards, since Ray fetches only what is an argument itself."""
        rollouts, rewards = parts[: len(parts) // 2], parts[len(parts) // 2 :]
        batch = Rollouts.join(cast("tuple[Rollouts, ...]", rollouts))
        return self.update(
            slot, version, learning_rate, batch, np.concatenate(cast("tuple[np.ndarray, ...]", rewards))
        )


class GraderActor(Watchable, Grader):
    """A grader whose rewards stay in the object store."""

    def start(self) -> None:
        """Nothing to start: the grading processes come with the first answers."""

    def grade_batch(self, rollouts: Rollouts, golds: list[str]) -> tuple[np.ndarray, tuple[int, float]]:
        """Rewards [R], and (failures, seconds)."""
        started = time.monotonic()
        grading = self.grade(rollouts, golds)
        return grading.rewards, (grading.failures, time.monotonic() - started)

    def evaluate_all(
        self, golds: list[str], kept: int, *parts: Rollouts
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """``evaluate`` of rollouts in parts."""
        return self.evaluate(Rollouts.join(parts), golds, kept)

    def probe_all(self, golds: list[str], *parts: Rollouts) -> tuple[dict[str, Any], int]:
        """``probe`` of rollouts in parts."""
        return self.probe(Rollouts.join(parts), golds)
