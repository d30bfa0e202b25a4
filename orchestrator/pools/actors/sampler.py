"""The actor of a sampler engine."""

import time
from typing import Any

from orchestrator.pools.actors.watchable import Watchable
from workers.rollouts import Rollouts
from workers.sampler import Sampler, SamplingRequest
from workers.weights import Weights


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
