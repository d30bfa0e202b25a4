"""The pools at work, in the report: a picture and what it stands in."""

from analysis.diagnostics.pools import PoolsAtWork, Stretch
from analysis.report.blocks import Block, Picture, Prose


def pools_blocks(found: PoolsAtWork | None) -> tuple[Block, ...]:
    """The picture with its words; nothing without a record."""
    return (
        () if found is None else (Picture("pools"), Prose((use_words(found), *_hidden_words(found.stretch))))
    )


def use_words(found: PoolsAtWork) -> str:
    """How busy each pool was over the whole record, and how long calls waited."""
    busy = ", ".join(f"{_plural(use.pool)} {use.busy_share:.0%}" for use in found.uses)
    waits = ", ".join(f"{_plural(use.pool)} {_seconds(use.mean_wait)}" for use in found.uses)
    starts = "one start" if found.starts == 1 else f"{found.starts} starts"
    return (
        f"Busy over the whole record ({_duration(found.seconds)} in {starts} of the run): {busy}. A call waited "
        f"{_seconds(found.mean_wait)} in its queue on average ({waits})."
    )


def _hidden_words(stretch: Stretch) -> list[str]:
    """Which members are not drawn."""
    shown = {pool: sum(name.partition(" ")[0] == pool for name in stretch.members) for pool in stretch.served}
    parts = [
        f"{shown[pool]} of {count} {_plural(pool)}"
        for pool, count in stretch.served.items()
        if shown[pool] < count
    ]
    return [f"Drawn are the busiest {' and '.join(parts)}."] if parts else []


def _plural(pool: str) -> str:
    return f"{pool}s"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 10.0 else f"{value:,.0f} s"


def _duration(seconds: float) -> str:
    for unit, size in (("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2.0 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} seconds"
