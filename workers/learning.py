"""What a learner is told and what it refuses; a controller knows these without loading torch."""

from dataclasses import dataclass

from grids.spec import ModelSpec, OptimiserSpec, Recipe


class Diverged(RuntimeError):
    """The loss or the gradient is not finite: a result of the cell's settings, which no retry would change."""


class StaleRollouts(RuntimeError):
    """Rollouts come from other weights than the learner's: the batch would not be on-policy."""


@dataclass(frozen=True)
class LearnerSettings:
    """What stays the same for all cells that a group serves."""

    model: ModelSpec
    recipe: Recipe
    optimiser: OptimiserSpec
    temperature: float
    micro_batch_tokens: int
    threads: int
    on_gpu: bool
