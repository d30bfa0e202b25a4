"""The actor of a learner rank."""

from typing import cast

import numpy as np

from orchestrator.pools.actors.watchable import Watchable
from workers.learner import LearnerRank
from workers.rollouts import Rollouts
from workers.weights import Weights


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
