"""The actor of the grader."""

import time
from typing import Any

import numpy as np

from orchestrator.pools.actors.watchable import Watchable
from workers.grading import Grader
from workers.rollouts import Rollouts


class GraderActor(Watchable, Grader):
    """A grader whose rewards stay in the object store."""

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
