"""What a pool is asked to do, and the record of how it was served."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from orchestrator.pools.supervision import Supervision
from orchestrator.store.phase_log import PhaseKind, PhaseRecord

T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """A phase that waits for a member of a pool."""

    kind: PhaseKind
    cell: str
    step: int = 0
    """As in ``PhaseRecord``."""
    sequences: int = 0
    """Rollouts that it is about."""
    tokens: int = 0
    """Of their responses, where they are there already."""
    urgency: float = 0.0
    """Of several that wait the most urgent is served first."""
    hurry: asyncio.Future[float] | None = None
    """Brings a higher urgency when somebody comes to wait for the work."""
    count_tokens: Callable[[Any], int] | None = None
    """Tells the tokens from the call's result, where the call makes them."""


@dataclass(frozen=True)
class Server:
    """A member of a pool, or a group of them that work together, as records name it."""

    name: str
    accelerators: int


async def serve(
    work: Work, server: Server, waited_seconds: float, call: Awaitable[T], supervision: Supervision
) -> T:
    """The call's result; that it was served is put on record, also when it ends with an error or is given up."""
    loop = asyncio.get_running_loop()  # whose clock no jump of another one moves
    started, started_at = loop.time(), supervision.clock.wall()
    tokens, failed = work.tokens, True
    try:
        result = await call
        if work.count_tokens is not None:
            tokens = work.count_tokens(result)
        failed = False
        return result
    finally:
        supervision.on_phase(
            PhaseRecord(
                server.name,
                work.kind,
                work.cell,
                work.step,
                started_at,
                loop.time() - started,
                waited_seconds,
                work.sequences,
                tokens,
                server.accelerators,
                failed,
            )
        )
