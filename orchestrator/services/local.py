"""A Ray head and an MLflow server on this machine, on loopback only, for the quickstart.

Both run as children in sessions of their own, and are recorded with their creation times, so that exactly
these processes are stopped: by ``stop``, or by the next ``start`` when the launcher was killed. (``ray stop``
would end every cluster of the user.)
"""

import json
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import requests

from grids.errors import UserError
from orchestrator.processes import find, identity, stop_processes
from orchestrator.store.files import create_exclusively, write_atomically

LOOPBACK = "127.0.0.1"
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray replaces 127.0.0.1 by the machine's outer address, to listen there or to connect, unless it believes that clusters of
several machines are not supported."""


@dataclass(frozen=True)
class _Service:
    title: str
    port: int
    port_option: str
    ready_url: str


class LocalServices:
    """The two services of one state folder (token, database, artifacts, logs, record of processes).

    Args:
        state_dir: made when missing; an MLflow database that is there is used again.
        dashboard_port: where Ray's job API listens.
        mlflow_port: where MLflow listens.
        cpus: logical CPUs of the Ray head; all of the machine's when None.
        dashboard_option, mlflow_option: what a user changes when a port is taken; named in the error.
        ready_seconds: how long both may take to answer.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        dashboard_port: int = 8265,
        mlflow_port: int = 5000,
        cpus: int | None = None,
        dashboard_option: str = "--dashboard-port",
        mlflow_option: str = "--mlflow-port",
        ready_seconds: float = 180.0,
    ) -> None:
        self.state_dir = state_dir.absolute()
        self.dashboard_port = dashboard_port
        self.mlflow_port = mlflow_port
        self.cpus = cpus or os.cpu_count() or 1
        self.ready_seconds = ready_seconds
        self.token_path = self.state_dir / "ray-token"
        self.ray_address = f"http://{LOOPBACK}:{dashboard_port}"
        self.mlflow_uri = f"http://{LOOPBACK}:{mlflow_port}"
        self._services = {
            "ray": _Service(
                "the Ray head", dashboard_port, dashboard_option, f"{self.ray_address}/api/jobs/"
            ),
            "mlflow": _Service("the MLflow server", mlflow_port, mlflow_option, f"{self.mlflow_uri}/health"),
        }
        self._record_path = self.state_dir / "services.json"
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._ray_temp_dir: Path | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, names: Collection[str] = ("ray", "mlflow")) -> None:
        """Starts the named services side by side and returns when all answer.

        What this object started before, and what an earlier, killed launcher left, is stopped first.

        Raises:
            UserError: a port is in use, another launcher holds this folder, or a service does not come up.
        """
        self.stop()
        self.state_dir.mkdir(parents=True, exist_ok=True)
        self._stop_recorded()
        for name in names:
            service = self._services[name]
            require_free_port(service.port, service.title, service.port_option)
        token = secrets.token_hex(32)
        # Socket paths are limited to 107 characters, so Ray's folder cannot lie below the state folder.
        self._ray_temp_dir = Path(tempfile.mkdtemp(prefix="iso-", dir="/tmp"))
        self._claim()
        _write_private(self.token_path, token)
        try:
            for name in names:
                self._spawn(name)
            deadline = time.monotonic() + self.ready_seconds
            for name in names:
                self._wait_until_ready(name, {"Authorization": f"Bearer {token}"}, deadline)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stops exactly what ``start`` started. Ray's own logs are kept in ``ray-logs``."""
        if not self._children:
            return
        self._stop_recorded()
        for child in self._children.values():
            child.wait()  # already ended: this reaps it
        self._children.clear()

    def environment(self) -> dict[str, str]:
        """The environment in which clients (``ray job``, MLflow, isocompute) find and may use them."""
        return {
            "RAY_ADDRESS": self.ray_address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_path),
            "MLFLOW_TRACKING_URI": self.mlflow_uri,
        } | LOOPBACK_ONLY

    def mlflow_command(self) -> list[str]:
        """The command that serves this folder's MLflow database; also for browsing later, without Ray."""
        command = [sys.executable, "-m", "mlflow", "server"]
        command += ["--host", LOOPBACK, "--port", str(self.mlflow_port)]
        command += ["--backend-store-uri", f"sqlite:///{self.state_dir / 'mlflow.db'}"]
        command += ["--artifacts-destination", str(self.state_dir / "artifacts"), "--workers", "1"]
        hosts = f"{LOOPBACK}:{self.mlflow_port},localhost:{self.mlflow_port}"
        return [*command, "--allowed-hosts", hosts]

    def log_path(self, service: str) -> Path:
        """The log file of ``ray`` or ``mlflow``."""
        return self.state_dir / f"{service}.log"

    def _ray_command(self) -> list[str]:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", "0"]
        command += ["--node-ip-address", LOOPBACK, "--dashboard-host", LOOPBACK]
        command += ["--dashboard-port", str(self.dashboard_port), "--num-cpus", str(self.cpus)]
        # Fixed default ports (10001, 52365) would collide with another Ray on this machine.
        command += ["--ray-client-server-port", str(free_port()), "--dashboard-agent-listen-port", "0"]
        return [*command, "--disable-usage-stats", "--temp-dir", str(self._ray_temp_dir)]

    def _ray_environment(self) -> dict[str, str]:
        return (
            _clean_environment()
            | {
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": str(self.token_path),
                "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            }
            | LOOPBACK_ONLY
        )

    def _mlflow_environment(self) -> dict[str, str]:
        return _clean_environment() | {
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }

    def _spawn(self, name: str) -> None:
        command = self._ray_command() if name == "ray" else self.mlflow_command()
        environment = self._ray_environment() if name == "ray" else self._mlflow_environment()
        with open(self.log_path(name), "wb") as log:
            log.write(f"$ {shlex.join(command)}\n".encode())
            log.flush()
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.state_dir,
                start_new_session=True,
            )
        self._children[name] = child
        record = self._read_record() or self._new_record()
        record["services"][name] = identity(child.pid)
        write_atomically(self._record_path, json.dumps(record, indent=1).encode())

    def _wait_until_ready(self, name: str, headers: dict[str, str], deadline: float) -> None:
        title, log = self._services[name].title, self.log_path(name)
        while not _answers(self._services[name].ready_url, headers):
            code = self._children[name].poll()
            if code is not None:
                raise UserError(f"{title} ended with exit code {code}: {_last_line(log)} (log: {log})")
            if time.monotonic() > deadline:
                waited = f"{self.ready_seconds:.0f} s"
                raise UserError(f"{title} did not answer within {waited}: {_last_line(log)} (log: {log})")
            time.sleep(0.1)

    def _new_record(self) -> dict[str, Any]:
        return {
            "launcher": identity(os.getpid()),
            "ray_temp_dir": str(self._ray_temp_dir),
            "services": {},
        }

    def _claim(self) -> None:
        """Make the record of this folder's services: of two launchers at once, which would both initialise MLflow's empty
        database, one gets it.
        """
        if not create_exclusively(self._record_path, json.dumps(self._new_record(), indent=1).encode()):
            shutil.rmtree(str(self._ray_temp_dir), ignore_errors=True)
            raise UserError(
                f"{self._record_path}: another launcher starts the services of this folder at this moment; wait for it or stop it"
            )

    def _read_record(self) -> dict[str, Any] | None:
        if not self._record_path.exists():
            return None
        record: dict[str, Any] = json.loads(self._record_path.read_text())
        return record

    def _stop_recorded(self) -> None:
        """Ends what services.json records, unless the launcher that wrote it is another process and alive."""
        record = self._read_record()
        if record is None:
            return
        launcher = record["launcher"]
        if launcher["pid"] != os.getpid() and find(launcher) is not None:
            raise UserError(
                f"{self._record_path}: the services of this folder belong to process {launcher['pid']}, "
                "which still runs; wait for it or stop it"
            )
        stop_processes(list(record["services"].values()))
        self._keep_ray_logs(Path(record["ray_temp_dir"]))
        self._record_path.unlink()

    def _keep_ray_logs(self, temp_dir: Path) -> None:
        logs = temp_dir / "session_latest" / "logs"
        if logs.is_dir():
            kept = self.state_dir / "ray-logs"
            shutil.rmtree(kept, ignore_errors=True)
            # Sockets among the logs cannot be copied and are no logs.
            shutil.copytree(logs, kept, ignore=_special_files)
        shutil.rmtree(temp_dir, ignore_errors=True)


def require_free_port(port: int, service: str, option: str) -> None:
    """Raises UserError when something listens on a loopback port, naming it if the system tells who it is."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Without this option a port counts as used for a minute after its last connection closed.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise UserError(
                f"port {port}, meant for {service}, cannot be used ({_owner(port) or error.strerror}); "
                f"stop that program or choose another port with {option}"
            ) from error


def free_port() -> int:
    """A loopback port that nobody listens on at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def _owner(port: int) -> str | None:
    """Who listens on a port, in words; None when the system does not tell."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return None
    owners = {
        connection.pid
        for connection in connections
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
    }
    for pid in owners - {None}:
        try:
            return f"in use by process {pid}, {psutil.Process(pid).name()}"
        except psutil.NoSuchProcess:
            continue
    return None


def _answers(url: str, headers: dict[str, str]) -> bool:
    try:
        with requests.Session() as session:
            session.trust_env = False  # a proxy of the environment must not be asked for loopback
            return session.get(url, headers=headers, timeout=5).ok
    except requests.RequestException:
        return False


def _clean_environment() -> dict[str, str]:
    """This process's environment, its Python first, without settings that point the services elsewhere."""
    foreign = {"RAY_ADDRESS", "RAY_AUTH_TOKEN", "MLFLOW_TRACKING_URI", "MLFLOW_BACKEND_STORE_URI"}
    environment = {name: value for name, value in os.environ.items() if name not in foreign}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    return environment


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "its log is empty"


def _special_files(folder: str, names: list[str]) -> list[str]:
    paths = [Path(folder) / name for name in names]
    return [path.name for path in paths if not (path.is_dir() or path.is_file())]
