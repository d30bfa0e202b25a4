"""Operators' requests from the command line: filed, then answered here or by the controller that holds the run."""

import difflib
import getpass
import os
import socket
import time
from collections.abc import Callable, Sequence

from grids.errors import UserError
from grids.expansion import Cell, expand
from grids.spec import GridSpec
from orchestrator.store.cell_state import State
from orchestrator.store.holding import LEASE_SECONDS, holder
from orchestrator.store.lease import Lease, LeaseHeld
from orchestrator.store.requests import Request, answer, apply, file_request, pending
from orchestrator.store.run_store import RunStore

PATIENCE_SECONDS = 10.0
"""How long a command waits for the controller to take its requests."""
POLL_SECONDS = 0.2


def grid_cells(run_store: RunStore) -> dict[str, Cell]:
    """The cells of a run's grid by id, in the grid's order."""
    return {cell.id: cell for cell in expand(GridSpec.model_validate(run_store.resolved["spec"]))}


def require_cells(run_store: RunStore, cells: Sequence[str]) -> list[Cell]:
    """The named cells.

    Raises:
        UserError: the grid has no such cell; the message names those with a similar id.
    """
    known = grid_cells(run_store)
    for cell in cells:
        if cell not in known:
            close = difflib.get_close_matches(cell, known, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "'status' lists the cells"
            raise UserError(f"{run_store.run_dir}: the grid has no cell {cell!r}; {hint}")
    return [known[cell] for cell in dict.fromkeys(cells)]


def failed_cells(run_store: RunStore) -> list[str]:
    """The ids of the cells that have failed."""
    return [cell for cell, state in run_store.states().items() if state.state is State.FAILED]


def asker() -> str:
    """Who asks, for people."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def ask(
    run_store: RunStore,
    requests: Sequence[Request],
    say: Callable[[str], None],
    patience: float = PATIENCE_SECONDS,
) -> list[str]:
    """Files the requests that the cells' states allow and sees to it that they are answered; the refusals, in words.

    When nobody holds the run they are answered here; otherwise this waits up to ``patience`` seconds for the controller.
    What becomes of each goes to ``say``.
    """
    refusals, filed = [], []
    for request in requests:
        outcome = answer(run_store.cell(request.cell).read(), request)
        if isinstance(outcome, str):
            refusals.append(outcome)
        else:
            filed.append((file_request(run_store.run_dir, request), request))
    if filed:
        try:
            lease = Lease.acquire(run_store.lease_dir, holder(), LEASE_SECONDS)
        except LeaseHeld:
            deadline = time.monotonic() + patience
            while any(path.exists() for path, _ in filed) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            for path, request in filed:
                taken = "has taken it" if not path.exists() else "will take it"
                say(f"{request.cell}: {request.action} asked; the controller that holds the run {taken}")
        else:
            with lease:
                run_store.hold(lease.epoch, lease.check)
                for path, request in pending(run_store.run_dir):
                    say(apply(run_store, path, request))
    return refusals
