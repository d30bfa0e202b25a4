"""Staging, and submission to a real Ray head that needs a token (marker ``engine``)."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import orchestrator.services.submission as submission
from grids.errors import UserError
from orchestrator.services.local import LocalServices, free_port
from orchestrator.services.submission import stage, submit_staged


def test_the_stage_holds_the_four_packages_and_the_grid_and_nothing_else(tmp_path: Path) -> None:
    size = stage(tmp_path, {"my grid.yaml": "name: x\n"})
    assert {path.name for path in tmp_path.iterdir()} == {
        "grids",
        "workers",
        "analysis",
        "orchestrator",
        "my grid.yaml",
    }
    assert (tmp_path / "my grid.yaml").read_text() == "name: x\n"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {str(path.relative_to(tmp_path)) for path in files}
    assert {"grids/errors.py", "orchestrator/services/submission.py", "workers/__init__.py"} <= names
    assert not [
        name for name in names if "__pycache__" in name or "/." in name or "grids/quickstart/" in name
    ]
    assert size == sum(path.stat().st_size for path in files) < 5_000_000


def test_the_stage_runs_without_the_checkout(tmp_path: Path) -> None:
    stage(tmp_path, {})
    program = "import grids.errors, orchestrator.services.submission; print(orchestrator.services.submission.__file__)"
    shown = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={}, capture_output=True, text=True, check=True
    )
    assert shown.stdout.startswith(str(tmp_path))


def test_a_stage_over_the_upload_limit_names_its_largest_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "UPLOAD_LIMIT_BYTES", 1_000_000)
    with pytest.raises(UserError, match=r"largest file: huge\.yaml"):
        stage(tmp_path, {"huge.yaml": "#" * 1_100_000})


def test_no_cluster_at_the_address_is_a_user_error(tmp_path: Path) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UserError) as error:
        submit_staged(tmp_path, "true", {}, address=address)
    assert address in str(error.value) and "\n" not in str(error.value)


def test_a_missing_token_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no-token"):
        submit_staged(tmp_path, "true", {}, address="http://127.0.0.1:1", token_path=tmp_path / "no-token")


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServices]:
    local = LocalServices(
        tmp_path_factory.mktemp("services"), dashboard_port=free_port(), mlflow_port=free_port(), cpus=1
    )
    local.start(["ray"])
    yield local
    local.stop()


@pytest.mark.engine
def test_a_job_runs_in_its_stage_and_its_log_and_status_come_back(
    services: LocalServices, tmp_path: Path
) -> None:
    stage(tmp_path, {"g.yaml": "name: staged\n"})
    program = (
        "import os, sys, ray, grids.errors; ray.init(log_to_driver=False); "
        "print('cpus', ray.cluster_resources()['CPU'], open('g.yaml').read(), os.environ['MARK']); "
        "print(sys.executable); "
        "print('staged', grids.errors.__file__.startswith(os.getcwd())); sys.exit(3)"
    )
    job = submit_staged(
        tmp_path,
        f'python -c "{program}"',
        {"MARK": "from-the-submitter"},
        address=services.ray_address,
        token_path=services.token_path,
    )
    pieces: list[str] = []
    assert job.follow(pieces.append) == "FAILED"
    log = "".join(pieces)
    assert "cpus 1.0 name: staged\n from-the-submitter" in log
    assert str(Path(sys.executable).parent) in log
    assert "staged True" in log

    finished = submit_staged(
        tmp_path, "echo good", {}, address=services.ray_address, token_path=services.token_path
    )
    assert finished.follow(pieces.append) == "SUCCEEDED"


@pytest.mark.engine
def test_another_command_than_run_goes_through_a_job_with_its_exit_code(services: LocalServices) -> None:
    # Refused by the command line of the job itself, which runs in a stage without a grid file.
    program = f"""
import sys
from orchestrator.services.submission import submit_and_follow
sys.exit(submit_and_follow(["resume", "runs/relative", "--failed"], {{}}, {services.ray_address!r}))
"""
    # In a process of its own: Ray keeps the first token that a process has read.
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | services.environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "isocompute: run folder runs/relative: inside a Ray job it must be absolute" in done.stdout


@pytest.mark.engine
def test_a_client_with_no_or_a_wrong_token_is_told_so_in_one_line(
    services: LocalServices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("0" * 64)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for token_path in (None, wrong):
        with pytest.raises(UserError, match="RAY_AUTH_TOKEN_PATH") as error:
            submit_staged(tmp_path, "true", {}, address=services.ray_address, token_path=token_path)
        assert "\n" not in str(error.value)


@pytest.mark.engine
def test_an_interrupted_follower_leaves_the_job_running_and_says_how_to_go_on(
    services: LocalServices, tmp_path: Path
) -> None:
    (tmp_path / "empty.py").touch()
    job = submit_staged(
        tmp_path, "echo begun; sleep 300", {}, address=services.ray_address, token_path=services.token_path
    )
    pieces: list[str] = []
    over = threading.Event()

    def interrupt_once_begun() -> None:
        deadline = time.monotonic() + 120
        while "begun" not in "".join(pieces).splitlines() and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
        if not over.wait(30):  # as a person would, when the first one shows no effect
            os.kill(os.getpid(), signal.SIGINT)

    # Libraries that other tests have loaded into this process may have put a handler of their own in its place.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt_once_begun, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            job.follow(pieces.append)
    finally:
        over.set()
        signal.signal(signal.SIGINT, handler)
    assert job.follow_command in pieces[-1] and job.stop_command in pieces[-1]
    assert job.client.get_job_status(job.job_id).value == "RUNNING"
    job.client.stop_job(job.job_id)
