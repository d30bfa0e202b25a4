"""How a run is told to stop: signals, the grace time, a lost lease, a full disk."""

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from grids.expansion import Cell
from orchestrator.control.controller import Controller
from orchestrator.exit_codes import ExitCode
from orchestrator.failures.faults import is_storage_full
from orchestrator.store.cell_state import CellState
from orchestrator.store.lease import Lease

LOST_LEASE_POLL_SECONDS = 1.0
STUCK_SECONDS = 5.0
"""How long a cancelled run may take to end, beyond the grace time, before the process is ended."""


def interruptible(command: Callable[[], ExitCode]) -> ExitCode:
    """A command that SIGTERM interrupts as Ctrl-C does, and that full storage ends in words."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        return command()
    except KeyboardInterrupt:
        print("interrupted; the same command continues", flush=True)
        return ExitCode.INTERRUPTED
    except OSError as error:
        if not is_storage_full(error):
            raise
        print(f"broken off: the storage is full ({error}); the same command continues", flush=True)
        return ExitCode.UNFINISHED


def train_until_stopped(
    controller: Controller,
    to_do: Sequence[Cell],
    states: Mapping[str, CellState],
    lease: Lease,
) -> None:
    """Run the controller's coroutine. The first SIGINT or SIGTERM drains it, and cancels it after the grace time.

    A second signal, or a cancellation that a stuck write holds up, ends the process at once: the run folder is whole at any
    instant, and the next start cleans up.

    Raises:
        asyncio.CancelledError: it was told to stop.
        LeaseLost: another controller has taken over.
    """

    def end_at_once() -> None:
        try:
            lease.release()
        finally:
            os._exit(ExitCode.INTERRUPTED)

    async def cancel_when_lost(task: asyncio.Task[None]) -> None:
        while not lease.lost.is_set():
            await asyncio.sleep(LOST_LEASE_POLL_SECONDS)
        task.cancel()

    async def stoppable() -> None:
        loop = asyncio.get_running_loop()
        task = cast("asyncio.Task[None]", asyncio.current_task())
        told = False

        def drain() -> None:
            controller.drain()
            grace = controller.spec.failures.grace_seconds
            loop.call_later(grace, task.cancel)
            loop.call_later(grace + STUCK_SECONDS, end_at_once)

        def stop(*_: object) -> None:
            nonlocal told
            if told:
                end_at_once()  # at once also where a write holds up the event loop
            told = True
            loop.call_soon_threadsafe(drain)

        # Python's own handlers, which no end of the event loop takes away: a signal in between would kill the process.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        watch = asyncio.create_task(cancel_when_lost(task))
        try:
            await controller.run(to_do, states)
        except asyncio.CancelledError:
            lease.check()
            raise
        finally:
            watch.cancel()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, (lambda *_: end_at_once()) if told else signal.default_int_handler)
        if told:
            raise asyncio.CancelledError

    asyncio.run(stoppable())
