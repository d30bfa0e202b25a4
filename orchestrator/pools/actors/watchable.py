"""A counter that shows whether an actor moves."""

import ray

from orchestrator.pools.members import Member, this_member

WATCH_GROUP = "watch"
"""Concurrency group of ``signs_of_life`` alone: it answers while the actor is at work."""


class Watchable:
    """What every pool actor answers besides its work."""

    beats: int

    def identify(self, role: str) -> Member:
        """The process that this actor is."""
        return this_member(role)

    @ray.method(concurrency_group=WATCH_GROUP)
    def signs_of_life(self) -> int:
        """A counter that moves while work goes on."""
        return self.beats
