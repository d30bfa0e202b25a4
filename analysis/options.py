"""What a user may choose about a fit."""

from dataclasses import dataclass
from typing import Literal

ComputeUnit = Literal["rollouts", "tokens", "accelerator_seconds"]


@dataclass(frozen=True)
class FitOptions:
    """Options of a fit; the defaults are those of the command line."""

    metric: str | None = None
    """Column that is maximised; None: the table's first avg_at_K. Any column with values in [0, 1] will do."""
    compute: ComputeUnit = "rollouts"
    """What a budget is counted in."""
    replicates: int = 1000
    """Bootstrap replicates; 0: no intervals."""
    confidence: float = 0.9
    """Level of every interval."""
    seed: int = 0
    """Of the bootstrap; the same seed and table give the same numbers."""
    record_bin: float = 0.01
    """Width of a reward bin for record-breaking points. The paper's (draft) value."""
    record_smoothing: float = 0.0
    """Weight of the past in the exponential moving average that precedes the bins. The paper's (draft) value,
    0.8, is meant for evaluations far denser than a grid's marks."""
    held_out: float = 0.25
    """The held-out-budget check fits on C <= held_out * C_max and predicts the rest."""
