"""What a cell has accumulated: counters, and the sums that become the next history row."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from grids.spec import PoolsSpec
from orchestrator.pools.resources import engine_accelerators, group_accelerators

MAXIMA = ("logprob_difference", "staleness")
"""Training metrics of which a row tells the largest value since the previous row, not the mean."""
LATEST = ("learning_rate",)
"""Training metrics of which a row tells the latest value."""
TOTALS = ("verifier_failures",)
"""Training metrics of which a row tells the sum since the previous row."""


def accelerator_seconds(pools: PoolsSpec, seconds_sampling: float, seconds_learning: float) -> float:
    """Accelerator time of one update step: seconds of each phase times the accelerators that it holds.

    A phase of sampling holds one engine, one of learning all ranks of a group. An accelerator is a GPU, or a core in a pool
    without GPUs.
    """
    return seconds_sampling * engine_accelerators(pools) + seconds_learning * group_accelerators(pools)


RATIO_BOUNDS = (0.5, 2.0)
"""Mean importance ratios p_learner / p_sampler outside of these mean that rollouts are no longer from the learner's policy."""


def divergence(metrics: dict[str, float], progress: "Progress", collapsed_steps: int) -> str | None:
    """Why a cell has diverged, None when it has not.

    Args:
        metrics: of the latest step.
        progress: after that step.
        collapsed_steps: so many steps on end without any reward, after better ones, are a collapse.
    """
    ratio = metrics["importance_ratio"]
    low, high = RATIO_BOUNDS
    if not low <= ratio <= high:
        return f"the mean importance ratio is {ratio:.4g}, outside of {low:g} to {high:g}"
    if progress.best_reward > 0 and progress.steps_without_reward >= collapsed_steps:
        return (
            f"the reward has collapsed: none in {progress.steps_without_reward} steps on end, after a mean of up to "
            f"{progress.best_reward:.3g} (failures.collapsed_steps)"
        )
    return None


@dataclass
class Progress:
    """Kept in every commit, so that a resumed cell writes the rows that an undisturbed one would have written."""

    step: int = 0
    """Update steps done."""
    compute_tokens: int = 0
    """Generated training tokens so far."""
    accelerator_seconds: float = 0.0
    """Accelerator time of sampling and learning so far, as measured."""
    steps_since_row: int = 0
    """Steps whose metrics ``interval`` holds."""
    interval: dict[str, float] = field(default_factory=dict)
    """Per metric the sum (or maximum, or latest value) over those steps."""
    best_reward: float = 0.0
    """The largest mean training reward of any step so far."""
    steps_without_reward: int = 0
    """The latest steps on end in which no rollout earned anything."""

    def add_step(self, metrics: dict[str, float], tokens: int, accelerator_seconds: float) -> None:
        """Count one update step."""
        self.step += 1
        self.compute_tokens += tokens
        self.accelerator_seconds += accelerator_seconds
        self.steps_since_row += 1
        reward = metrics["train_reward"]
        self.best_reward = max(self.best_reward, reward)
        self.steps_without_reward = 0 if reward > 0 else self.steps_without_reward + 1
        for name, value in metrics.items():
            if name in MAXIMA:
                self.interval[name] = max(value, self.interval.get(name, -math.inf))
            elif name in LATEST:
                self.interval[name] = value
            else:
                self.interval[name] = self.interval.get(name, 0.0) + value

    def close_interval(self) -> dict[str, float]:
        """The training columns of a history row: means per step, except for maxima, latest values and totals; starts anew."""
        as_they_are = (*MAXIMA, *LATEST, *TOTALS)
        columns = {
            name: value if name in as_they_are else value / self.steps_since_row
            for name, value in self.interval.items()
        }
        self.steps_since_row, self.interval = 0, {}
        return columns

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for a commit."""
        return asdict(self)
