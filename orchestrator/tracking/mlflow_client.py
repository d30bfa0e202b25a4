"""The connection to an MLflow server: settings of its client, and experiments by name."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from requests import RequestException

from grids.errors import UserError
from orchestrator.tracking.mlflow_format import is_transient
from orchestrator.tracking.outbox import one_line

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment

# Whoever writes repeats what fails, in order and for as long as it takes; a client that repeats by itself would
# hang for minutes inside one request. Telemetry, progress bars and links on stdout are not wanted here.
CLIENT_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
CONNECT_SECONDS = 5
"""Time limit of the first requests, by which a wrong address is told soon."""


class ServerAway(UserError):
    """The server does not answer, or is overloaded: the same request may succeed later."""


@contextmanager
def asking(uri: str, field: str, seconds: int) -> "Iterator[MlflowClient]":
    """A client for requests inside the ``with``, each limited to so many seconds; a failure is the user's error.

    ``field`` is where the user wrote ``uri``.

    Raises:
        ServerAway: the server does not answer.
        UserError: it refuses.
    """
    os.environ.update(CLIENT_ENVIRONMENT | {"MLFLOW_HTTP_REQUEST_TIMEOUT": str(seconds)})
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        yield MlflowClient(tracking_uri=uri)
    except (MlflowException, RequestException) as error:
        kind = ServerAway if is_transient(error) else UserError
        raise kind(
            f"{field}: no usable MLflow server at {uri} ({one_line(error)}); start it or correct {field}"
        ) from error
    finally:
        os.environ.update(CLIENT_ENVIRONMENT)


def find_experiment(client: "MlflowClient", uri: str, name: str) -> "Experiment | None":
    """The experiment of a name, None when there is none.

    Raises:
        UserError: it was deleted.
    """
    found = client.get_experiment_by_name(name)
    if found is not None and found.lifecycle_stage == "deleted":
        raise UserError(
            f"experiment {name!r} was deleted on {uri}: restore it (mlflow experiments restore "
            f"--experiment-id {found.experiment_id}) or use another name"
        )
    return found


def find_or_create_experiment(client: "MlflowClient", uri: str, name: str) -> "Experiment":
    """The experiment of a name, made when there is none."""
    from mlflow.exceptions import MlflowException

    found = find_experiment(client, uri, name)
    if found is None:
        try:
            client.create_experiment(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another starter was faster
                raise
        found = find_experiment(client, uri, name)
    if found is None:
        raise UserError(f"experiment {name!r} was made on the MLflow server but cannot be found there")
    return found
