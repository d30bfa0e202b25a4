"""What ``benchmarks.against_trl`` found: medians, ratios, and how they are shown."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.grid_rate import GridRate
from benchmarks.trl_runs import TrlRate

CORES = 2


@dataclass(frozen=True)
class Repetition:
    """One turn of each side."""

    trl: TrlRate
    ours: GridRate
    alone: GridRate
    """One cell in flight."""

    @property
    def ceiling(self) -> float:
        """Rollouts per second of ``CORES`` that are never idle."""
        return CORES / self.alone.core_seconds_per_rollout


@dataclass(frozen=True)
class Result:
    """Everything that was measured."""

    options: dict[str, Any]
    tries: dict[str, float | str]
    """By variant of TRL: rollouts per second, or why it does not run."""
    chosen: str
    repetitions: list[Repetition]

    def middle(self, value: Callable[[Repetition], float]) -> float:
        """Median over the repetitions."""
        return median(map(value, self.repetitions))

    @property
    def trl(self) -> float:
        """TRL's rollouts per second."""
        return self.middle(lambda one: one.trl.rollouts_per_second)

    @property
    def ours(self) -> float:
        """Ours."""
        return self.middle(lambda one: one.ours.rollouts_per_second)

    @property
    def ceiling(self) -> float:
        """See ``Repetition``."""
        return self.middle(lambda one: one.ceiling)


def to_text(result: Result) -> str:
    """A table for people."""
    shown, runs = result.options, result.repetitions
    lines = [
        "{set} set, n = {n}, B_p = {problems}: {cells} cells of {steps} steps, KL {kl:g}, ".format(**shown)
        + "{samplers} engines and {slots} cells in flight, ".format(**shown)
        + f"{runs[0].ours.rollouts:,} rollouts on each side, {CORES} cores",
        "",
        f"TRL {runs[0].trl.version}, variants tried     rollouts/s",
        *(
            f"  {name:<36}{rate:8.0f}" if isinstance(rate, float) else f"  {name:<36}    none ({rate[:80]})"
            for name, rate in result.tries.items()
        ),
        f"  measured: {result.chosen}",
        "",
        "rollouts/s       TRL    ours  ceiling  ours / TRL  of the ceiling",
        *(
            _row(str(number), one.trl.rollouts_per_second, one.ours.rollouts_per_second, one.ceiling)
            for number, one in enumerate(runs, start=1)
        ),
        _row("median", result.trl, result.ours, result.ceiling),
        "",
        "medians                               TRL    ours   alone",
    ]
    columns: list[tuple[str, str, Callable[[Any], float], Sequence[str]]] = [
        ("start-up, s", ".1f", lambda side: side.start_up_seconds, ("trl", "ours", "alone")),
        ("zero-variance groups, %", ".1f", lambda side: 100 * side.zero_variance, ("trl", "ours", "alone")),
        ("mean reward", ".3f", lambda side: side.train_reward, ("trl", "ours", "alone")),
        ("tokens a response", ".2f", lambda side: side.response_tokens, ("trl", "ours", "alone")),
        ("sampling, ms a step", ".0f", lambda side: 1000 * side.sampling_seconds, ("ours", "alone")),
        ("learning, ms a step", ".0f", lambda side: 1000 * side.learning_seconds, ("ours", "alone")),
    ]
    for title, form, value, sides in columns:
        cells = {side: format(median(value(getattr(one, side)) for one in runs), form) for side in sides}
        lines.append(
            f"  {title:<31}" + "".join(f"{cells.get(side, '-'):>8}" for side in ("trl", "ours", "alone"))
        )
    return "\n".join(
        [
            *lines,
            "",
            f"ratio: {result.ours / result.trl:.2f} times TRL's rollouts per second, "
            f"{result.ours / result.ceiling:.0%} of the ceiling",
        ]
    )


def _row(name: str, trl: float, ours: float, ceiling: float) -> str:
    return f"  {name:<10}{trl:8.0f}{ours:8.0f}{ceiling:9.0f}{ours / trl:12.2f}{ours / ceiling:15.0%}"


def to_json(result: Result) -> str:
    """All figures."""
    return json.dumps(
        asdict(result)
        | {
            "median_rollouts_per_second": {"trl": result.trl, "ours": result.ours, "ceiling": result.ceiling},
            "ratio": result.ours / result.trl,
            "share_of_ceiling": result.ours / result.ceiling,
        },
        indent=1,
    )
