"""A command as a Ray job: stages exactly what the job needs, submits it, and follows its log."""

import asyncio
import importlib.util
import json
import os
import shlex
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grids.errors import UserError
from grids.loading import dump_grid
from grids.spec import GridSpec
from orchestrator.exit_codes import ExitCode
from orchestrator.tracking.outbox import one_line

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

PACKAGES = ("grids", "workers", "analysis", "orchestrator")
STAGED_SUFFIXES = {".py", ".typed", ".yaml", ".html", ".j2", ".css", ".js", ".svg"}
# Products of a command, reached by absolute path or made again; never a part of the program.
LEFT_OUT_FOLDERS = {"__pycache__", "quickstart"}
UPLOAD_LIMIT_BYTES = 100 * 1024**2
SUBMIT_PATIENCE_SECONDS = 90.0
RECONNECT_PATIENCE_SECONDS = 60.0
STOP_PATIENCE_SECONDS = 10.0
"""Ray kills a job 3 seconds after it was told to stop."""
KILLED_EXIT_CODE = 131
"""From here on (128 + signal; 130 is the program's own answer to an interruption) a shell says that a signal ended a program."""


@dataclass(frozen=True)
class SubmittedJob:
    """A job on a cluster. It runs whether or not anybody follows it."""

    client: "JobSubmissionClient"
    address: str
    job_id: str

    @property
    def follow_command(self) -> str:
        """The shell command that shows the job's log."""
        return f"ray job logs --follow --address {self.address} {self.job_id}"

    @property
    def stop_command(self) -> str:
        """The shell command that stops the job."""
        return f"ray job stop --address {self.address} {self.job_id}"

    def stop(self) -> None:
        """Stops the job, as ``ray job stop`` does, and waits until it has ended."""
        self.client.stop_job(self.job_id)
        deadline = time.monotonic() + STOP_PATIENCE_SECONDS
        while not self.client.get_job_status(self.job_id).is_terminal() and time.monotonic() < deadline:
            time.sleep(0.1)

    def follow(self, write: Callable[[str], None], *, goes_on: bool = True) -> str:
        """Passes the job's log to ``write``, in pieces, until it ends; the status it ended with.

        Returns:
            ``SUCCEEDED``, ``FAILED`` or ``STOPPED``.

        Raises:
            KeyboardInterrupt: Ctrl-C; where the job ``goes_on``, ``write`` was told how to follow and stop it.
            UserError: contact with the cluster was lost for a minute.
        """
        try:
            return asyncio.run(self._follow(write))
        except KeyboardInterrupt:
            if goes_on:
                write(
                    f"\nThe job goes on. Follow it: {self.follow_command}\nStop it:   {self.stop_command}\n"
                )
            raise

    async def _follow(self, write: Callable[[str], None]) -> str:
        import aiohttp
        import requests

        shown = 0
        lost_at: float | None = None
        while True:
            try:
                position = 0  # a new connection repeats the log from its beginning
                async for piece in self.client.tail_job_logs(self.job_id):
                    fresh = piece[max(0, shown - position) :]
                    position += len(piece)
                    if fresh:
                        write(fresh)
                    shown = max(shown, position)
                    lost_at = None
                status = self.client.get_job_status(self.job_id)
                if status.is_terminal():
                    return str(status.value)
            except (aiohttp.ClientError, requests.RequestException, RuntimeError, OSError) as error:
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > RECONNECT_PATIENCE_SECONDS:
                    raise UserError(
                        f"lost contact with the cluster at {self.address} ({one_line(error)}); "
                        f"the job may go on: {self.follow_command}"
                    ) from error
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # Ctrl-C came while a connection was opened or closed, and was taken for a fault of it.
                raise asyncio.CancelledError
            await asyncio.sleep(1.0)


def submit_grid(
    spec: GridSpec, run_dir: Path, address: str | None, *, stop_with_follower: bool = False
) -> int:
    """Submits a grid, shows its log until it ends, and returns the exit code of its ``run``.

    Args:
        spec: with absolute paths, which the cluster's nodes must see.
        run_dir: absolute, likewise.
        address: the cluster's job API; RAY_ADDRESS when None.
        stop_with_follower: as in ``submit_and_follow``.

    Raises:
        UserError: as in ``submit``, or no address is known.
    """
    name = f"{spec.name}.yaml"
    # JSON is YAML, and has one way to write each number.
    files = {name: json.dumps(dump_grid(spec), indent=1)}
    arguments = ["run", name, "--run-dir", str(run_dir)]
    return submit_and_follow(arguments, files, address, stop_with_follower=stop_with_follower)


def submit_and_follow(
    arguments: Sequence[str],
    files: Mapping[str, str],
    address: str | None,
    *,
    stop_with_follower: bool = False,
) -> int:
    """Submits a command of isocompute, shows its log until it ends, and returns its exit code.

    Args:
        arguments: of ``python -m orchestrator``, such as ``resume`` and a run's absolute folder.
        files: further files of the job's working directory, name to text.
        address: the cluster's job API; RAY_ADDRESS when None.
        stop_with_follower: Ctrl-C stops the job too, whose cells commit and pause; otherwise it goes on.

    Raises:
        UserError: as in ``submit``, or no address is known.
        KeyboardInterrupt: Ctrl-C.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    if address is None:
        raise UserError(
            "--address: no cluster is named; give its job address, such as http://HOST:8265, or set RAY_ADDRESS"
        )
    if not address.startswith(("http://", "https://")):
        raise UserError(
            f"--address: {address} is no job address; it starts with http:// and has the dashboard's port, such as "
            f"http://HOST:8265 (HOST:PORT of a head goes with 'run', 'resume' and RAY_ADDRESS)"
        )
    job = submit(arguments, files, address=address)
    fate = "stops with" if stop_with_follower else "runs on when"
    print(
        f"submitted {job.job_id} to {address}; it {fate} this command{'' if stop_with_follower else ' is stopped'}",
        flush=True,
    )
    try:
        status = job.follow(lambda piece: print(piece, end="", flush=True), goes_on=not stop_with_follower)
    except KeyboardInterrupt:
        if stop_with_follower:
            print("\nstopping the job; its cells commit what they have and pause", flush=True)
            job.stop()
        raise
    exit_code = job.client.get_job_info(job.job_id).driver_exit_code
    if exit_code is None or not 0 <= exit_code < KILLED_EXIT_CODE:
        print(f"{job.job_id} was killed ({status.lower()}); the same command continues it", flush=True)
        return ExitCode.UNFINISHED
    return exit_code


def stage(folder: Path, files: Mapping[str, str]) -> int:
    """Fills an empty folder with the four packages' sources and package data and ``files`` (name to text).

    Only listed kinds of files of these packages are taken, so nothing else (version control, runs, caches)
    can get in, wherever the packages lie. Returns the number of bytes.

    Raises:
        UserError: more than Ray's upload limit of 100 MB.
    """
    sizes: dict[str, int] = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise UserError(f"package {package!r} is not importable; install isocompute again")
        root = Path(spec.submodule_search_locations[0])
        for source in sorted(root.rglob("*")):
            relative = source.relative_to(root)
            hidden = any(part.startswith(".") or part in LEFT_OUT_FOLDERS for part in relative.parts[:-1])
            if hidden or source.suffix not in STAGED_SUFFIXES or not source.is_file():
                continue
            target = folder / package / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            sizes[f"{package}/{relative}"] = target.stat().st_size
    for name, text in files.items():
        (folder / name).write_text(text)
        sizes[name] = len(text.encode())
    total = sum(sizes.values())
    if total > UPLOAD_LIMIT_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise UserError(
            f"the job's working directory has {total / 1e6:.0f} MB, over Ray's limit of 100 MB; "
            f"largest file: {largest} ({sizes[largest] / 1e6:.0f} MB)"
        )
    return total


def submit(
    arguments: Sequence[str],
    files: Mapping[str, str],
    *,
    address: str,
    environment: Mapping[str, str] | None = None,
    token_path: Path | None = None,
) -> SubmittedJob:
    """Submits ``python -m orchestrator <arguments>`` with a freshly staged working directory.

    Args:
        arguments: of the command line, such as ``run easy.yaml``.
        files: what is staged beside the packages, name to text; model and problem paths in a grid are absolute already.
        address: the cluster's job API, ``http://host:8265``.
        environment: added to the job's environment.
        token_path: the file with the cluster's token; when None Ray's own rules hold (RAY_AUTH_MODE=token
            with RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH).

    Raises:
        UserError: no answer, no or a wrong token, too large an upload, or a cluster that refuses the job.
    """
    entrypoint = shlex.join(["python", "-m", "orchestrator", *arguments])
    # A log that is followed must not wait in a buffer of the job's Python.
    variables = {"PYTHONUNBUFFERED": "1"} | dict(environment or {})
    with tempfile.TemporaryDirectory(prefix="isocompute-") as folder:
        stage(Path(folder), files)
        return submit_staged(Path(folder), entrypoint, variables, address=address, token_path=token_path)


def submit_staged(
    folder: Path,
    entrypoint: str,
    environment: Mapping[str, str],
    *,
    address: str,
    token_path: Path | None = None,
) -> SubmittedJob:
    """Submits a shell command that runs in a copy of ``folder``. Errors as in ``submit``."""
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    headers = {"Authorization": f"Bearer {_token(token_path)}"} if token_path is not None else None
    # Chosen here, so that repeating a request whose answer got lost starts no second job.
    job_id = f"isocompute-{uuid.uuid4().hex[:12]}"
    runtime_env: dict[str, Any] = {"working_dir": str(folder), "env_vars": dict(environment)}
    try:
        client = JobSubmissionClient(address, headers=headers)
        _submit_patiently(client, entrypoint, job_id, runtime_env)
    except AuthenticationError as error:
        raise UserError(
            f"the Ray cluster at {address} refuses this client's token ({one_line(error, 60)}); set "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to the file with the cluster's token"
        ) from error
    except (ConnectionError, OSError) as error:
        raise UserError(
            f"no Ray cluster answers at {address} ({one_line(error, 100)}); start it or correct the address "
            "(--address, RAY_ADDRESS)"
        ) from error
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the Ray cluster at {address} did not take the job: {one_line(error)}") from error
    return SubmittedJob(client, address, job_id)


def _submit_patiently(
    client: "JobSubmissionClient", entrypoint: str, job_id: str, runtime_env: dict[str, Any]
) -> None:
    """A head that has just started answers before the agent that starts jobs is up."""
    deadline = time.monotonic() + SUBMIT_PATIENCE_SECONDS
    while True:
        try:
            client.submit_job(entrypoint=entrypoint, submission_id=job_id, runtime_env=runtime_env)
            return
        except RuntimeError as error:
            if "already exists" in str(error):
                return
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise


def _token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise UserError(
            f"{path}: the cluster's token cannot be read ({error.strerror}); start the services or set "
            "RAY_AUTH_TOKEN_PATH to the right file"
        ) from error
