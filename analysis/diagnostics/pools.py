"""How busy the pools of a run were, and a stretch of their record that shows them at work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import pandas as pd

POOLS = ("sampler", "learner", "grader")
"""First words of members' names, in the order in which pools are shown."""
MOST_ROWS = 12
"""Members that a stretch shows at most."""
STRETCH_PHASES = 40
"""Of its busiest member, in a stretch."""


@dataclass(frozen=True)
class PoolUse:
    """A pool over the whole record."""

    pool: str
    """The first word of its members' names."""
    busy_share: float
    """Of the time of all its members; each start of the run counts from its first phase to the end of its last one."""
    mean_wait: float
    """Seconds that a call waited in its queue."""


@dataclass(frozen=True)
class Stretch:
    """Some members over some time of the start that kept the pools busiest; times are seconds since its first phase."""

    window: tuple[float, float]
    members: tuple[str, ...]
    """By pool, busiest first."""
    served: dict[str, int]
    """How many members of each pool there were, whether shown or not."""
    bars: pd.DataFrame
    """The shown members' phases that reach into the window, by time: member, kind, cell, failed, begin, end."""


@dataclass(frozen=True)
class PoolsAtWork:
    """The record of the pools in figures."""

    uses: tuple[PoolUse, ...]
    seconds: float
    """Length of the record, without the time between starts."""
    starts: int
    """Of the run, as far as the record reaches."""
    mean_wait: float
    """Seconds that a call waited, whatever its pool."""
    stretch: Stretch


def pools_at_work(phases: pd.DataFrame | None) -> PoolsAtWork | None:
    """From the phases on record, as ``GridTables.phases`` has them. None without any that took time."""
    if phases is None or not (phases["busy_seconds"] > 0).any():
        return None
    phases = phases.assign(
        pool=phases["member"].str.partition(" ")[0], end=phases["started_at"] + phases["busy_seconds"]
    )
    starts = phases.groupby("start")
    spans = starts["end"].max() - starts["started_at"].min()
    return PoolsAtWork(
        uses=_uses(phases, spans),
        seconds=float(spans.sum()),
        starts=len(spans),
        mean_wait=float(phases["waited_seconds"].mean()),
        stretch=_stretch(phases[phases["start"] == starts["busy_seconds"].sum().idxmax()]),
    )


def _uses(phases: pd.DataFrame, spans: pd.Series) -> tuple[PoolUse, ...]:
    """spans: the length of each start."""
    held = (phases.groupby(["pool", "start"])["member"].nunique() * spans).groupby("pool").sum()
    pools = phases.groupby("pool")
    share = (pools["busy_seconds"].sum() / held).fillna(0.0)  # a start may have had no length
    wait = pools["waited_seconds"].mean()
    return tuple(
        PoolUse(pool, float(share[pool]), float(wait[pool])) for pool in sorted(share.index, key=_order)
    )


def _stretch(phases: pd.DataFrame) -> Stretch:
    """The time of ``STRETCH_PHASES`` phases of the busiest member, in the middle of one start of the run."""
    begin = phases["started_at"].min()
    bars = phases.assign(begin=phases["started_at"] - begin, end=phases["end"] - begin)
    bars = bars.sort_values("begin", kind="stable")
    busy = bars.groupby("member")["busy_seconds"].sum().sort_values(ascending=False, kind="stable")
    own = bars[bars["member"] == busy.index[0]]
    first = max(0, (len(own) - STRETCH_PHASES) // 2)
    middle = own.iloc[first : first + STRETCH_PHASES]
    low, high = float(middle["begin"].min()), float(middle["end"].max())
    pools: dict[str, list[str]] = {pool: [] for pool in sorted(bars["pool"].unique(), key=_order)}
    for member in busy.index:
        pools[member.partition(" ")[0]].append(member)
    members = _in_turns(pools, MOST_ROWS)
    seen = bars["member"].isin(members) & (bars["begin"] < high) & (bars["end"] > low)
    columns = ["member", "kind", "cell", "failed", "begin", "end"]
    return Stretch(
        (low, high),
        tuple(member for names in pools.values() for member in names if member in members),
        {pool: len(names) for pool, names in pools.items()},
        bars.loc[seen, columns].reset_index(drop=True),
    )


def _in_turns(ranked: Mapping[str, Sequence[str]], most: int) -> set[str]:
    """So many members: the first of each pool, then the second of each, and so on."""
    turns = [member for member in chain.from_iterable(zip_longest(*ranked.values())) if member is not None]
    return set(turns[:most])


def _order(pool: str) -> tuple[int, str]:
    return (POOLS.index(pool) if pool in POOLS else len(POOLS), pool)
