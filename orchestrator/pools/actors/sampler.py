"""The actor of a sampler engine."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from orchestrator.pools.actors.watchable import Watchable
from workers.rollouts import Rollouts
from workers.sampler import Sampled, Sampler, SamplingRequest
from workers.weights import Weights


class SamplerActor(Watchable, Sampler):
    """A sampler that starts by a method and tells how long it took."""

    def __init__(self, *arguments: Any) -> None:
        """Hold the arguments of ``Sampler``. An error in an actor's constructor would arrive as the loss of the actor."""
        self._arguments = arguments

    def start(self) -> None:
        """Start the engine."""
        super().__init__(*self._arguments)

    def sample(
        self, request: SamplingRequest, weights: Weights | None, groups: Sequence[int]
    ) -> Iterator[Sampled | Rollouts]:
        """``stream``; what is told of each slice, then the slice."""
        started = time.monotonic()
        for rollouts in self.stream(request, weights, groups):
            now = time.monotonic()
            yield Sampled(len(rollouts.tokens), now - started)
            yield rollouts
            started = now
