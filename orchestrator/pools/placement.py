"""Room in the cluster for processes that are of no use one by one."""

import asyncio
from collections.abc import Callable

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orchestrator.pools.resources import Resources
from orchestrator.pools.supervision import PLACE_SECONDS

LOOK_SECONDS = 1
"""How long one look at a placement group may take."""


class Placement:
    """Room for all ranks of a learner group at once, or for none.

    Ranks that each took what is free could leave two groups with half of their ranks each, waiting for each other for ever.
    """

    def __init__(self, role: str, bundles: list[Resources], say: Callable[[str], None]) -> None:
        """Nothing is taken before ``open``; ``bundles``: what each rank needs."""
        self._role, self._bundles, self._say = role, bundles, say
        self._group: PlacementGroup | None = None

    async def open(self) -> None:
        """Take room anew, as close together as there is any; waits for it without limit, but not in silence."""
        self.let_go()
        self._group = placement_group(self._bundles, strategy="PACK")
        waited, patience = 0.0, PLACE_SECONDS
        while not await asyncio.to_thread(self._group.wait, LOOK_SECONDS):
            waited += LOOK_SECONDS
            if waited >= patience:
                patience *= 2
                self._say(f"{self._role} waits for {waited:.0f} s: the cluster has no room for all its ranks")

    def strategy(self, rank: int) -> PlacementGroupSchedulingStrategy:
        """Where a rank goes."""
        if self._group is None:
            raise RuntimeError(f"{self._role} has no place yet")
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)

    def let_go(self) -> None:
        """Give the room back, without waiting; what runs in it ends."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
