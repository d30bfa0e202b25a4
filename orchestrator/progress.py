"""What a cell has accumulated: counters, and the sums that become the next history row."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from grids.spec import PoolsSpec

MAXIMA = ("logprob_difference",)
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
    engine = pools.samplers.gpus or pools.samplers.cpus
    group = pools.learners.ranks * (pools.learners.gpus or pools.learners.cpus)
    return seconds_sampling * engine + seconds_learning * group


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

    def add_step(self, metrics: dict[str, float], tokens: int, accelerator_seconds: float) -> None:
        """Count one update step."""
        self.step += 1
        self.compute_tokens += tokens
        self.accelerator_seconds += accelerator_seconds
        self.steps_since_row += 1
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
