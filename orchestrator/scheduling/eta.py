"""When cells will be done."""

import heapq
from collections.abc import Mapping


def expected_ends(
    running: Mapping[str, float], waiting: Mapping[str, float], places: int
) -> dict[str, float]:
    """Seconds until each cell is done, when those that wait take places as these become free, longest first.

    Args:
        running: seconds that cells in flight will still take.
        waiting: seconds that the other ones will take once they are started.
        places: cells in flight at most.
    """
    ends = dict(running)
    free = [0.0] * max(places - len(running), 0) + sorted(running.values())
    heapq.heapify(free)
    # sorted() keeps the order of equal ones.
    for cell, seconds in sorted(waiting.items(), key=lambda item: -item[1]):
        ends[cell] = heapq.heappop(free) + seconds
        heapq.heappush(free, ends[cell])
    return ends
