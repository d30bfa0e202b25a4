"""Which problems of a batch make its sampling fail."""

from collections.abc import Awaitable, Callable, Sequence

NAMED_PROBLEMS = 3
"""At most so many problems are looked for in one batch."""


async def isolate(fails: Callable[[Sequence[int]], Awaitable[bool]], count: int) -> list[int]:
    """Positions (of ``count``) that fail on their own, found by halving.

    Empty where no few problems are to blame: everything fails, or several only together. Costs up to ``log2(count) + 3``
    trials for each problem found.

    Args:
        fails: whether a batch of just these positions fails; never called with none.
        count: size of the batch, which is known to fail.
    """
    found: list[int] = []
    rest = list(range(count))
    while len(found) < NAMED_PROBLEMS:
        position = await _halve(fails, rest)
        if position is None:
            # What else fails does so only together, or by chance; what was found fails on its own.
            return sorted(found)
        found.append(position)
        rest.remove(position)
        if not rest or not await fails(rest):
            # A batch of one problem has nothing to be told apart from.
            return sorted(found) if rest else []
    return []


async def _halve(fails: Callable[[Sequence[int]], Awaitable[bool]], failing: Sequence[int]) -> int | None:
    """One position that fails on its own, None where the search ends at one that does not.

    A half whose other half succeeds is taken to fail without a trial, since a trial that fails costs a new engine.
    """
    proven = False
    while len(failing) > 1:
        first, second = failing[: len(failing) // 2], failing[len(failing) // 2 :]
        proven = await fails(first)
        failing = first if proven else second
    return failing[0] if proven or await fails(failing) else None
