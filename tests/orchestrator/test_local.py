"""The local services, with a real Ray head and a real MLflow server (marker ``engine``)."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import requests

from grids.errors import UserError
from orchestrator.processes import identity, stop_processes
from orchestrator.services.local import LocalServices, free_port, require_free_port


def services_in(state_dir: Path) -> LocalServices:
    return LocalServices(state_dir, dashboard_port=free_port(), mlflow_port=free_port(), cpus=1)


def processes_naming(text: str) -> list[str]:
    """Command lines of this machine's processes that contain a text (a folder only one test knows)."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if text in line and process.pid != os.getpid() and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(line)
    return found


def recorded(state_dir: Path) -> dict:
    return json.loads((state_dir / "services.json").read_text())


def test_a_port_in_use_is_named_with_its_owner_and_the_option_that_mends_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError) as error:
            require_free_port(port, "MLflow", "--mlflow-port")
    message = str(error.value)
    assert f"port {port}" in message and "--mlflow-port" in message
    assert f"process {os.getpid()}" in message
    assert "\n" not in message


def test_a_port_taken_on_all_interfaces_counts_as_taken() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken, pytest.raises(UserError):
        require_free_port(taken.getsockname()[1], "MLflow", "--mlflow-port")


def test_a_taken_port_stops_the_start_before_any_process_exists(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        services = LocalServices(tmp_path, dashboard_port=free_port(), mlflow_port=taken.getsockname()[1])
        with pytest.raises(UserError):
            services.start()
    assert not (tmp_path / "services.json").exists()
    assert not processes_naming(str(tmp_path))


def test_a_recycled_pid_is_left_alone() -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        earlier = identity(bystander.pid)
        earlier["create_time"] -= 5.0
        stop_processes([earlier])
        assert bystander.poll() is None
        stop_processes([identity(bystander.pid)])
        assert bystander.poll() is not None
    finally:
        bystander.kill()


def test_descendants_are_stopped_even_when_the_first_process_is_dead() -> None:
    leader = subprocess.Popen(
        ["bash", "-c", "sleep 61 & echo $!; wait"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout is not None
    orphan = psutil.Process(int(leader.stdout.readline()))
    given = identity(leader.pid)
    leader.kill()
    leader.wait()
    assert orphan.is_running()
    stop_processes([given])
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE


def test_a_folder_whose_launcher_still_runs_is_refused(tmp_path: Path) -> None:
    launcher = subprocess.Popen(["sleep", "62"])
    try:
        record = {"launcher": identity(launcher.pid), "services": {}, "ray_temp_dir": str(tmp_path / "none")}
        (tmp_path / "services.json").write_text(json.dumps(record))
        with pytest.raises(UserError, match=f"process {launcher.pid}"):
            services_in(tmp_path).start()
    finally:
        launcher.kill()
        launcher.wait()


@pytest.mark.engine
def test_of_two_launchers_at_once_one_gets_the_folder(tmp_path: Path) -> None:
    """Both would initialise MLflow's empty database, which fails for one of them."""
    first, second = (LocalServices(tmp_path, mlflow_port=free_port()) for _ in range(2))
    first._ray_temp_dir = second._ray_temp_dir = tmp_path / "ray"
    first._claim()
    with pytest.raises(UserError, match=r"services\.json: another launcher"):
        second._claim()


LAUNCHER = """
    import sys, time
    from pathlib import Path
    from orchestrator.services.local import LocalServices
    dashboard_port, mlflow_port = map(int, sys.argv[2:])
    services = LocalServices(Path(sys.argv[1]), dashboard_port=dashboard_port, mlflow_port=mlflow_port)
    services.start(["ray"])
    print("ready", flush=True)
    time.sleep(600)
"""


def leave_orphans(services: LocalServices) -> tuple[list[psutil.Process], Path]:
    """A Ray head whose launcher was killed: its processes, and its temporary folder."""
    ports = [str(services.dashboard_port), str(services.mlflow_port)]
    launcher = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LAUNCHER), str(services.state_dir), *ports],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "ready\n"
    left = recorded(services.state_dir)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    time.sleep(0.5)
    orphans = [psutil.Process(one["pid"]) for one in left["services"].values()]
    orphans += [child for orphan in orphans for child in orphan.children(recursive=True)]
    assert all(orphan.is_running() for orphan in orphans)
    return orphans, Path(left["ray_temp_dir"])


@pytest.mark.engine
def test_services_end_what_a_killed_launcher_left_answer_on_loopback_with_the_token_and_leave_nothing(
    tmp_path: Path,
) -> None:
    services = services_in(tmp_path)
    orphans, left_dir = leave_orphans(services)
    with services:
        assert [orphan for orphan in orphans if orphan.is_running()] == []
        assert not processes_naming(str(left_dir)) and not left_dir.exists()

        record = recorded(tmp_path)
        temp_dir = Path(record["ray_temp_dir"])
        roots = [psutil.Process(one["pid"]) for one in record["services"].values()]
        family = [process for root in roots for process in [root, *root.children(recursive=True)]]

        token = services.token_path.read_text()
        assert stat.S_IMODE(services.token_path.stat().st_mode) == 0o600
        url = f"{services.ray_address}/api/jobs/"
        assert requests.get(url, timeout=10).status_code == 401
        assert (
            requests.get(url, headers={"Authorization": "Bearer " + "0" * 64}, timeout=10).status_code == 403
        )
        assert requests.get(url, headers={"Authorization": f"Bearer {token}"}, timeout=10).status_code == 200

        assert requests.get(services.mlflow_uri, timeout=10).status_code == 200
        forged = requests.get(f"{services.mlflow_uri}/", headers={"Host": "elsewhere.example"}, timeout=10)
        assert forged.status_code == 403

        pids = {process.pid for process in family}
        listening = [
            (connection.laddr.ip, connection.laddr.port)
            for connection in psutil.net_connections("tcp")
            if connection.pid in pids and connection.status == psutil.CONN_LISTEN and connection.laddr
        ]
        assert {services.dashboard_port, services.mlflow_port} <= {port for _, port in listening}
        assert {address for address, _ in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}

        assert services.environment() == {
            "RAY_ADDRESS": f"http://127.0.0.1:{services.dashboard_port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(services.token_path),
            "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{services.mlflow_port}",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }
    assert len(family) > 4
    assert [process for process in family if process.is_running()] == []
    assert not processes_naming(str(tmp_path)) and not processes_naming(str(temp_dir))
    assert not temp_dir.exists()
    assert (tmp_path / "ray-logs").is_dir()
    assert not (tmp_path / "services.json").exists()
