"""A place where real grids can be struck: a Ray head, a second Ray node and an MLflow server of this machine, on loopback.

The fault campaign and the tests of faults share it.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import psutil

from benchmarks.second_node import SecondNode
from orchestrator.services.local import LocalServices, free_port

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "grids" / "quickstart"
VALIDATION_PROBLEMS = 64
POLL_SECONDS = 0.02
How = Literal["job", "direct"]
"""A Ray job, or a process of this machine."""
GRID = """
name: {name}
model: {{path: {model}}}
problems: {{train: {train}, validation: {validation}}}
grid: {{problems_per_batch: {problems_per_batch}, rollouts_per_problem: {rollouts_per_problem}, seeds: {seeds},
  compute_rollouts: {compute_rollouts}}}
recipe: {{type: {recipe}}}
optimiser: {{learning_rate: 2e-4}}
sampling: {{temperature: 1.0, max_tokens: 8, prompt_template: "{{prompt}}="}}
evaluation:
  {{first_mark: {first_mark}, marks_per_doubling: 1, kept_rollouts: 3, train_probe: {{problems: 10, samples_per_problem: 2}}}}
pools:
  samplers: {{count: {samplers}, max_sequences: {max_sequences}}}
  learners: {{count: {learners}, ranks: {ranks}, slots: {slots}}}
tracking: {{mlflow_uri: "{mlflow_uri}"}}
commits: {{every_steps: {commit_steps}}}
failures: {{phase_repeats: {phase_repeats}, own_failures: {own_failures}, preemptions: 100, backoff_seconds: 0.2,
  longest_backoff_seconds: 2, stall_seconds: {stall_seconds}, start_seconds: 120,
  grace_seconds: {grace_seconds}}}
"""
"""Small cells of the shipped model, with short limits so that a fault is answered in seconds."""


@dataclass(frozen=True)
class GridOptions:
    """What differs between the grids of a site."""

    model: Path = QUICKSTART / "model"
    train: Path = QUICKSTART / "easy_train.jsonl"
    problems_per_batch: list[int] = field(default_factory=lambda: [8])
    rollouts_per_problem: list[int] = field(default_factory=lambda: [4, 8])
    recipe: str = "easy"
    compute_rollouts: int = 1024
    first_mark: int = 64
    seeds: list[int] = field(default_factory=lambda: [0])
    samplers: int = 1
    max_sequences: int = 256
    learners: int = 1
    ranks: int = 1
    slots: int = 2
    commit_steps: int = 3
    phase_repeats: int = 10
    own_failures: int = 20
    stall_seconds: float = 10.0
    grace_seconds: float = 1.5


class Site:
    """A folder with grids, and the services that they run on.

    Args:
        folder: for grids, runs, logs and databases; made when missing.
        cpus: logical CPUs of the Ray head.
        second_node_cpus: logical CPUs of the second node; there is none at 0.
    """

    def __init__(self, folder: Path, *, cpus: int = 4, second_node_cpus: int = 0) -> None:
        self.folder = folder.absolute()
        self.services = LocalServices(
            self.folder / "services", dashboard_port=free_port(), mlflow_port=free_port(), cpus=cpus
        )
        self.mlflow = LocalServices(self.folder / "mlflow", mlflow_port=free_port())
        """Apart from Ray, so that it can be ended and started again alone."""
        self.second_node = SecondNode(self, second_node_cpus) if second_node_cpus else None
        self.validation = self.folder / "validation.jsonl"

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        problems = (QUICKSTART / "easy_validation.jsonl").read_text().splitlines()[:VALIDATION_PROBLEMS]
        self.validation.write_text("\n".join(problems) + "\n")
        try:
            self.services.start(("ray",))
            self.mlflow.start(("mlflow",))
            if self.second_node:
                self.second_node.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End all services."""
        if self.second_node:
            self.second_node.stop()
        self.mlflow.stop()
        self.services.stop()

    @property
    def mlflow_uri(self) -> str:
        """Where MLflow answers."""
        return self.mlflow.mlflow_uri

    @property
    def head_address(self) -> str:
        """HOST:PORT of the Ray head, for a controller that is no job."""
        record = json.loads((self.services.state_dir / "services.json").read_text())
        for process in psutil.Process(record["services"]["ray"]["pid"]).children(recursive=True):
            for argument in process.cmdline():
                if argument.startswith("--gcs-address="):
                    return argument.partition("=")[2]
        raise RuntimeError("the Ray head has no raylet")

    def environment(self, how: How = "job") -> dict[str, str]:
        """The environment of a command: Ray's job address, or for a controller started directly the head's."""
        address = {} if how == "job" else {"RAY_ADDRESS": self.head_address}
        return os.environ | self.services.environment() | {"MLFLOW_TRACKING_URI": self.mlflow_uri} | address

    def write_grid(self, name: str, options: GridOptions | None = None) -> Path:
        """The YAML file of a grid."""
        options = options or GridOptions()
        path = self.folder / f"{name}.yaml"
        path.write_text(
            GRID.format(name=name, validation=self.validation, mlflow_uri=self.mlflow_uri, **vars(options))
        )
        return path

    def run_dir(self, grid: Path) -> Path:
        """Where a grid's run lies."""
        return self.folder / "runs" / grid.stem

    def command(self, *arguments: str, how: How = "job") -> "Running":
        """Start an ``isocompute`` command; its output goes to a file."""
        return self.launch(["-m", "orchestrator", *arguments], how)

    def launch(self, arguments: list[str], how: How) -> "Running":
        """Start a Python program in the site's environment."""
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        log = logs / f"{len(list(logs.iterdir())):03d}.txt"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env=self.environment(how),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return Running(process, log, how)

    def submit(self, grid: Path) -> "Running":
        """Start a grid as a Ray job."""
        return self.command("submit", str(grid), "--run-dir", str(self.run_dir(grid)))

    def run(self, grid: Path) -> "Running":
        """Start a grid's controller directly."""
        return self.command("run", str(grid), "--run-dir", str(self.run_dir(grid)), how="direct")

    def run_with_jumping_clock(self, grid: Path, offset_file: Path, *, resume: bool = False) -> "Running":
        """Start a grid's controller directly, with a clock that ``offset_file`` moves."""
        arguments = ["-m", "benchmarks.jumping_clock", str(grid), str(self.run_dir(grid)), str(offset_file)]
        running = self.launch(arguments + ["--resume"] * resume, "direct")
        running.jumping = True
        return running

    def mlflow_processes(self) -> list[psutil.Process]:
        """All processes of the MLflow server; none while it is away."""
        try:
            record = json.loads((self.mlflow.state_dir / "services.json").read_text())
            server = psutil.Process(record["services"]["mlflow"]["pid"])
            return [*server.children(recursive=True), server]
        except (FileNotFoundError, psutil.NoSuchProcess):
            return []

    def finish(self, grid: Path, timeout: float = 600) -> tuple[int, str]:
        """Submit a grid and wait; exit code and output."""
        return self.submit(grid).wait(timeout)

    def history(self, grid: Path, cell: str) -> list[dict[str, Any]]:
        """A cell's rows."""
        return history(self.run_dir(grid), cell)

    def state(self, grid: Path, cell: str) -> dict[str, Any]:
        """A cell's state; empty before there is one."""
        return state(self.run_dir(grid), cell)

    def committed_step(self, grid: Path, cell: str) -> int:
        """The step that a cell would resume from."""
        return committed_step(self.run_dir(grid), cell)


class Running:
    """A started command."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path, how: How) -> None:
        self.process, self.log, self.how = process, log, how
        self.jumping = False
        """Whether its clock can be made to jump."""

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace")

    @property
    def job_id(self) -> str | None:
        """The Ray job that it follows, once it is submitted."""
        for line in self.output.splitlines():
            if line.startswith("submitted "):
                return line.split()[1]
        return None

    def ended(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def wait(self, timeout: float = 600) -> tuple[int, str]:
        """(exit code, output) once it has ended."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        return code, self.output

    def wait_until(self, condition: Callable[[], bool], timeout: float = 300) -> None:
        """Wait for a condition, which must come true before the command ends."""
        deadline = time.monotonic() + timeout
        while not condition():
            if self.ended():
                if condition():
                    return
                raise AssertionError(f"ended with {self.process.returncode}:\n{self.output}")
            if time.monotonic() > deadline:
                raise AssertionError(f"waited for {timeout} s:\n{self.output}")
            time.sleep(POLL_SECONDS)


def history(run_dir: Path, cell: str) -> list[dict[str, Any]]:
    """The rows of a cell."""
    path = run_dir / "cells" / cell / "history.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def state(run_dir: Path, cell: str) -> dict[str, Any]:
    """The state of a cell; empty before there is one."""
    try:
        content: dict[str, Any] = json.loads((run_dir / "cells" / cell / "state.json").read_text())
    except FileNotFoundError:
        return {}
    return content


def committed_step(run_dir: Path, cell: str) -> int:
    """The step that a cell would resume from."""
    commit = state(run_dir, cell).get("commit")
    return commit["step"] if commit else 0


def cells_of(run_dir: Path) -> list[str]:
    """The cells that have a folder."""
    root = run_dir / "cells"
    return sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def controllers_of(run_dir: Path) -> list[psutil.Process]:
    """The controllers of a run (a job's with the shell that started it): they have its folder in their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        words = " ".join(line).split()
        if str(run_dir) in words and not {"submit", "--address"} & set(words):
            found.append(process)
    return found


def members_of(run_dir: Path) -> Iterator[tuple[str, psutil.Process]]:
    """(role, process) of the living engines, learners and grader that the run has recorded, oldest first."""
    for path in sorted((run_dir / "members").glob("e*.jsonl")):
        for line in path.read_text().splitlines():
            member = json.loads(line)
            try:
                process = psutil.Process(member["pid"])
                if (
                    process.create_time() == member["create_time"]
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    yield member["role"], process
            except psutil.NoSuchProcess:
                continue
