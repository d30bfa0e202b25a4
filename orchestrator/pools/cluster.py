"""Connecting to the Ray cluster."""

import os
import socket

import ray

from grids.errors import UserError
from orchestrator.failures.ray_errors import first_line

CONNECT_SECONDS = 5.0


def connect() -> None:
    """Connect to the cluster of RAY_ADDRESS, or to the head on this machine.

    Raises:
        UserError: none answers, or it refuses.
    """
    mend = "start one with 'ray start --head', or set RAY_ADDRESS to the HOST:PORT of a running head"
    try:
        # Ray's own rule (RAY_ADDRESS, else a head on this machine), which has no public name.
        address = ray._private.services.get_ray_address_from_environment("auto", None)
    except ConnectionError:
        raise UserError(f"no Ray cluster is known here; {mend}") from None
    host, _, port = address.rpartition(":")
    if "/" in address or not port.isdecimal():
        raise UserError(
            f"RAY_ADDRESS: {address} is no HOST:PORT of a Ray head; a job address goes with 'submit'"
        )
    # Ray itself would try a dead address for many minutes.
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError(f"no Ray cluster answers at {address} ({error}), it may be stale; {mend}") from error
    if host in ("127.0.0.1", "localhost"):
        # A head on loopback: Ray would look for it at the machine's outer address, for many minutes. Its constant is read
        # from RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER when it is imported, which is too late here.
        ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
    # An error of an actor is reported by whoever awaits it; Ray would print it once more.
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise UserError(
            f"the Ray cluster at {address} refuses ({first_line(error)}); if it needs a token, set RAY_AUTH_MODE=token "
            f"and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        ) from error


def free_resources() -> dict[str, float]:
    """What nobody has taken of the connected cluster at this moment."""
    return ray.available_resources()


def connected_nodes() -> list[dict[str, float]]:
    """Resources of the living nodes of the connected cluster."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
