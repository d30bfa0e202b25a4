"""How busy the pools are, and how fast they train."""

from collections.abc import Collection
from dataclasses import dataclass

from grids.spec import GridSpec
from orchestrator.store.phase_log import PhaseKind, PhaseRecord

WINDOW_SECONDS = 600.0
"""What "at the moment" means."""


@dataclass(frozen=True)
class PoolUsage:
    """A pool over a window of time."""

    busy_share: float
    """Of the time of all its members."""
    mean_wait: float
    """Seconds in the queue, of a call that ended in the window."""


@dataclass(frozen=True)
class Usage:
    """All pools over a window of time."""

    seconds: float
    """Length of the window."""
    pools: dict[str, PoolUsage]
    """By the first word of members' names: sampler, learner, grader."""
    rollouts_per_second: float
    """That steps were made of."""
    tokens_per_second: float
    """Of their responses."""


def pool_sizes(spec: GridSpec) -> dict[str, int]:
    """Members of each pool; a learner group counts as one."""
    return {"sampler": spec.pools.samplers.count, "learner": spec.pools.learners.count, "grader": 1}


def pool_of(record: PhaseRecord) -> str:
    """The pool whose member served."""
    return record.member.partition(" ")[0]


def usage(
    records: Collection[PhaseRecord], sizes: dict[str, int], seconds: float = WINDOW_SECONDS
) -> Usage | None:
    """The pools over the last ``seconds`` up to the end of the latest phase, or since the first one where that is less.

    A phase that is under way counts once it has ended. None without any phase that took time.
    """
    if not records:
        return None
    until = max(record.ended_at for record in records)
    since = max(until - seconds, min(record.started_at for record in records))
    if until <= since:
        return None
    busy, waited, calls = (dict.fromkeys(sizes, 0.0) for _ in range(3))
    rollouts = tokens = 0
    for record in records:
        if record.ended_at <= since:
            continue
        pool = pool_of(record)
        busy[pool] += record.ended_at - max(record.started_at, since)
        waited[pool] += record.waited_seconds
        calls[pool] += 1
        if record.kind is PhaseKind.LEARNING and not record.failed:
            rollouts += record.sequences
            tokens += record.tokens
    length = until - since
    pools = {
        pool: PoolUsage(busy[pool] / (size * length), waited[pool] / calls[pool] if calls[pool] else 0.0)
        for pool, size in sizes.items()
    }
    return Usage(length, pools, rollouts / length, tokens / length)
