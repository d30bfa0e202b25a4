"""The tracker against a real MLflow server on SQLite (marker ``engine``), and its pure parts."""

import importlib
import json
import os
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from grids.errors import UserError
from orchestrator.services.local import LocalServices, free_port
from orchestrator.store.lease import LeaseLost
from orchestrator.tracking.ledger import Ledger
from orchestrator.tracking.mlflow_format import flat_params, metrics_of, mlflow_status, per_problem_text
from orchestrator.tracking.mlflow_source import read_experiment
from orchestrator.tracking.outbox import Outbox
from orchestrator.tracking.tracker import Tracker

T0 = 1_700_000_000_000


def row(step: int, **columns: float) -> dict[str, object]:
    """A history row of a cell with 1,024 rollouts per step, logged one second after the previous step's."""
    fixed: dict[str, object] = {
        "cell": "bp16-n64-s0",
        "step": step,
        "compute_rollouts": 1024 * step,
        "logged_at_ms": T0 + 1000 * step,
    }
    return fixed | {"avg_at_4": 0.5 + step / 100} | columns


def test_metrics_are_the_finite_numbers_with_the_step_column_last() -> None:
    full = row(3, loss=float("nan"), kl=float("inf"), entropy=0.25, problems_per_batch=16)
    assert metrics_of(full) == [
        ("step", 3.0),
        ("avg_at_4", 0.53),
        ("entropy", 0.25),
        ("problems_per_batch", 16.0),
        ("compute_rollouts", 3072.0),
    ]


def test_lists_are_no_metrics_but_lines_of_their_own_file() -> None:
    scored = [{"compute_rollouts": 0, "eval_right": [4, 0], "avg_at_4": 0.5}]
    scored += [row(1) | {"eval_right": [3, 1], "train_probe_right": [8]}]
    assert metrics_of(scored[0]) == [("avg_at_4", 0.5), ("compute_rollouts", 0.0)]
    assert per_problem_text(scored) == (
        '{"compute_rollouts": 0, "eval_right": [4, 0]}\n'
        '{"compute_rollouts": 1024, "eval_right": [3, 1], "train_probe_right": [8]}\n'
    )


def test_every_cell_state_has_a_status_that_mlflow_knows() -> None:
    states = ["finished", "diverged", "failed", "cancelled", "paused", "interrupted"]
    assert [mlflow_status(state) for state in states] == [
        "FINISHED",
        "FINISHED",
        "FAILED",
        "KILLED",
        "KILLED",
        "KILLED",
    ]


def test_nested_params_are_flattened_and_long_ones_cut_visibly() -> None:
    flat = flat_params({"recipe": {"kl": 0.1, "deep": {"x": [1, 2]}}, "prompt": "y" * 7000})
    assert flat["recipe.kl"] == "0.1"
    assert flat["recipe.deep.x"] == "[1, 2]"
    assert len(flat["prompt"]) == 6000
    assert flat["prompt"].endswith("... [cut: 7000 characters]")


def test_an_outbox_keeps_the_order_while_the_server_is_away_and_passes_over_what_is_refused() -> None:
    done: list[str] = []
    refused: list[str] = []
    failures = {"a": 2}

    def operation(name: str) -> Callable[[], None]:
        def call() -> None:
            if failures.get(name, 0) > 0:
                failures[name] -= 1
                raise ConnectionError("away")
            if name == "b":
                raise ValueError("no such thing")
            done.append(name)

        return call

    outbox = Outbox("test", lambda error: isinstance(error, ConnectionError))
    for name in "abc":
        outbox.put(name, operation(name), lambda name=name: refused.append(name))  # type: ignore[misc]
    assert outbox.close(10.0)
    assert done == ["a", "c"]
    assert refused == ["b"]


def test_closing_an_outbox_gives_up_after_the_timeout() -> None:
    def away() -> None:
        raise ConnectionError("away")

    outbox = Outbox("test", lambda error: True)
    outbox.put("never", away)
    began = time.monotonic()
    assert not outbox.close(0.5)
    assert time.monotonic() - began < 2.0


def test_an_outbox_that_may_not_go_on_does_nothing_more() -> None:
    done: list[str] = []
    allowed = [True, False]
    outbox = Outbox("test", lambda error: False, lambda: allowed.pop(0))
    for name in "ab":
        outbox.put(name, lambda name=name: done.append(name))  # type: ignore[misc]
    assert outbox.close(10.0)
    assert done == ["a"]


def test_an_unreachable_server_is_a_user_error_within_15_seconds() -> None:
    importlib.import_module("mlflow")  # takes seconds on a busy machine and is not the wait that is meant
    began = time.monotonic()
    with pytest.raises(UserError) as error:
        Tracker.connect(f"http://127.0.0.1:{free_port()}", "grid", "key", "name")
    assert time.monotonic() - began < 15.0
    assert "tracking.mlflow_uri" in str(error.value) and "\n" not in str(error.value)


def test_a_server_that_accepts_but_never_answers_is_a_user_error_within_15_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(UserError, match=r"tracking\.mlflow_uri"):
            Tracker.connect(f"http://127.0.0.1:{silent.getsockname()[1]}", "grid", "key", "name")
        assert time.monotonic() - began < 15.0


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServices]:
    local = LocalServices(
        tmp_path_factory.mktemp("services"), dashboard_port=free_port(), mlflow_port=free_port()
    )
    local.start(["mlflow"])
    yield local
    local.stop()


class Reader:
    """What MLflow itself says about a run folder's runs."""

    def __init__(self, uri: str, run_key: str) -> None:
        from mlflow import MlflowClient

        self.client = MlflowClient(tracking_uri=uri)
        self.run_key = run_key

    def runs(self) -> dict:
        """By cell id; the parent under ``None``. Two runs of one cell would be an error."""
        experiments = [experiment.experiment_id for experiment in self.client.search_experiments()]
        found = self.client.search_runs(experiments, f"tags.`isocompute.run` = '{self.run_key}'")
        by_cell = {run.data.tags.get("isocompute.cell"): run for run in found}
        assert len(by_cell) == len(found)
        return by_cell

    def scores(self, cell_id: str) -> list[dict]:
        """The lines of a cell's per-problem file."""
        run_id = self.runs()[cell_id].info.run_id
        with tempfile.TemporaryDirectory() as folder:
            path = self.client.download_artifacts(run_id, "per_problem.jsonl", folder)
            return [json.loads(line) for line in Path(path).read_text().splitlines()]

    def points(self, cell_id: str | None, metric: str) -> list[tuple[int, float, int]]:
        history = self.client.get_metric_history(self.runs()[cell_id].info.run_id, metric)
        return sorted((point.step, point.value, point.timestamp) for point in history)


@pytest.mark.engine
def test_a_grid_is_one_parent_and_a_child_per_cell_with_rollouts_as_step(
    services: LocalServices, tmp_path: Path
) -> None:
    report = tmp_path / "report"
    report.mkdir()
    (report / "frontier.json").write_text("{}")
    tracker = Tracker.connect(services.mlflow_uri, "shape", "run-1", "my grid")
    tracker.start({"grid": {"seeds": [0]}}, {"version": "1"})
    states = {"c-fin": "finished", "c-fail": "failed", "c-div": "diverged", "c-cancel": "cancelled"}
    for cell_id, state in states.items():
        tracker.cell_started(cell_id, {"rollouts_per_problem": 64})
        for step in (1, 2):
            tracker.row(cell_id, row(step, kl=float("inf")))
        tracker.cell_ended(cell_id, state)
    tracker.artifacts(report)
    tracker.grid_metrics({"busy_share_sampler": 0.5, "rollouts_per_second": 12.0}, 4096, T0)
    assert tracker.close("FINISHED", 60.0) == 0

    reader = Reader(services.mlflow_uri, "run-1")
    assert reader.points(None, "busy_share_sampler") == [(4096, 0.5, T0)]
    assert reader.points(None, "rollouts_per_second") == [(4096, 12.0, T0)]
    runs = reader.runs()
    parent = runs.pop(None)
    assert parent.info.status == "FINISHED" and parent.info.run_name == "my grid"
    assert parent.data.params == {"grid.seeds": "[0]"} and parent.data.tags["version"] == "1"
    assert [file.path for file in reader.client.list_artifacts(parent.info.run_id, "report")] == [
        "report/frontier.json"
    ]
    assert {cell_id: run.info.status for cell_id, run in runs.items()} == {
        "c-fin": "FINISHED",
        "c-fail": "FAILED",
        "c-div": "FINISHED",
        "c-cancel": "KILLED",
    }
    assert {cell_id: run.data.tags["isocompute.state"] for cell_id, run in runs.items()} == states
    for run in runs.values():
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.params == {"rollouts_per_problem": "64"}
        assert "kl" not in run.data.metrics
    assert reader.points("c-fin", "avg_at_4") == [(1024, 0.51, T0 + 1000), (2048, 0.52, T0 + 2000)]


@pytest.mark.engine
def test_reopening_doubles_nothing_and_sends_what_was_never_sent(services: LocalServices) -> None:
    reader = Reader(services.mlflow_uri, "run-2")
    for last in (2, 3):
        tracker = Tracker.connect(services.mlflow_uri, "reopen", "run-2", "grid")
        tracker.start({"a": 1}, {})
        tracker.cell_started("cell", {"learning_rate": 1e-6, "attempt": last})
        for step in range(1, last + 1):
            # A replayed row differs in its measured columns and in its time; the first one stays.
            tracker.row(
                "cell", row(step, seconds_total=float(last)) | {"logged_at_ms": T0 + 1000 * step + last}
            )
        assert tracker.close("KILLED", 60.0) == 0
        run = reader.runs()["cell"]
        assert run.info.status == "RUNNING"
    assert reader.points("cell", "seconds_total") == [
        (1024, 2.0, T0 + 1002),
        (2048, 2.0, T0 + 2002),
        (3072, 3.0, T0 + 3003),
    ]
    assert reader.runs()["cell"].data.params == {"learning_rate": "1e-06", "attempt": "2"}

    began = int(time.time() * 1000)
    tracker = Tracker.connect(services.mlflow_uri, "reopen", "run-2", "grid")
    tracker.start({"a": 1}, {})
    tracker.cell_started("cell", {})
    tracker.cell_ended("cell", "finished")
    assert tracker.close("FINISHED", 60.0) == 0
    runs = reader.runs()
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert all(run.info.end_time >= began for run in runs.values())


@pytest.mark.engine
def test_runs_left_running_by_a_killed_controller_get_their_cells_status(services: LocalServices) -> None:
    tracker = Tracker.connect(services.mlflow_uri, "reconcile", "run-3", "grid")
    for cell_id in ("done", "open", "wild"):
        tracker.cell_started(cell_id, {})
        tracker.row(cell_id, row(1))
        tracker.row(cell_id, row(2))
    assert tracker.close("KILLED", 60.0) == 0

    second = Tracker.connect(services.mlflow_uri, "reconcile", "run-3", "grid")
    second.start({}, {})
    second.reconcile({"done": "finished", "open": "running", "wild": "diverged"})
    assert second.close("FINISHED", 60.0) == 0
    runs = Reader(services.mlflow_uri, "run-3").runs()
    seen = {cell: (run.info.status, run.data.tags["isocompute.state"]) for cell, run in runs.items() if cell}
    assert seen == {
        "done": ("FINISHED", "finished"),
        "open": ("KILLED", "interrupted"),
        "wild": ("FINISHED", "diverged"),
    }
    assert runs["done"].info.end_time == T0 + 2000


@pytest.mark.engine
def test_a_finished_cell_is_completed_once_and_then_left_untouched(services: LocalServices) -> None:
    reader = Reader(services.mlflow_uri, "run-4")
    ends = []
    for count in (1, 2, 2):
        tracker = Tracker.connect(services.mlflow_uri, "restore", "run-4", "grid")
        rows = [row(1), row(2)][:count]
        tracker.restore("cell", {"a": 1}, count, rows.copy, "finished")
        assert tracker.close("FINISHED", 60.0) == 0
        run = reader.runs()["cell"]
        assert run.info.status == "FINISHED"
        ends.append(run.info.end_time)
    assert ends[1] == ends[2]
    assert [step for step, _, _ in reader.points("cell", "compute_rollouts")] == [1024, 2048]


@pytest.mark.engine
def test_scores_for_each_problem_are_whole_however_a_cell_came_to_its_end(services: LocalServices) -> None:
    """Sent when a cell pauses, again when it finishes, and by ``restore`` where they never arrived."""
    reader = Reader(services.mlflow_uri, "run-7")
    rows = [row(step) | {"eval_right": [step, 0]} for step in (1, 2, 3)]
    lines = [{"compute_rollouts": 1024 * step, "eval_right": [step, 0]} for step in (1, 2, 3)]

    first = Tracker.connect(services.mlflow_uri, "scores", "run-7", "grid")
    for cell in ("paused", "killed"):
        first.cell_started(cell, {})
        for written in rows[:2]:
            first.row(cell, written)
    first.cell_ended("paused", "paused", "interrupted; continues at the next run")
    assert first.close("KILLED", 60.0) == 0
    paused = reader.runs()["paused"]
    assert paused.data.tags["isocompute.reason"] == "interrupted; continues at the next run"
    assert reader.scores("paused") == lines[:2]
    assert reader.client.list_artifacts(reader.runs()["killed"].info.run_id) == []

    for _ in range(2):
        second = Tracker.connect(services.mlflow_uri, "scores", "run-7", "grid")
        # One row was committed; the second one is trained again.
        second.cell_started("paused", {})
        for written in rows:
            second.row("paused", written)
        second.cell_ended("paused", "finished")
        second.restore("killed", {}, 3, lambda: rows, "failed", "ValueError: no luck")
        assert second.close("FINISHED", 60.0) == 0
        runs = reader.runs()
        assert "isocompute.reason" not in runs["paused"].data.tags
        assert runs["killed"].data.tags["isocompute.reason"] == "ValueError: no luck"
        assert reader.scores("paused") == reader.scores("killed") == lines


@pytest.mark.engine
def test_a_cell_that_is_tried_again_keeps_its_run_and_ends_it_at_its_own_end(services: LocalServices) -> None:
    reader = Reader(services.mlflow_uri, "run-8")

    def seen(cell_id: str) -> tuple[str, str, str | None]:
        run = reader.runs()[cell_id]
        return (
            run.info.status,
            run.data.tags["isocompute.state"],
            run.data.tags.get("isocompute.reason"),
        )

    first = Tracker.connect(services.mlflow_uri, "again", "run-8", "grid")
    for cell in ("lost", "paused", "cancelled"):
        first.cell_started(cell, {})
        first.row(cell, row(1))
    first.cell_ended("lost", "pending", "learner rank 1 was lost")
    first.cell_ended("paused", "paused", "interrupted")
    first.cell_ended("cancelled", "cancelled", "told to by ada")
    assert first.close(None, 60.0) == 0
    assert seen("lost") == ("RUNNING", "pending", "learner rank 1 was lost")
    assert seen("paused") == ("KILLED", "paused", "interrupted")
    assert seen("cancelled") == ("KILLED", "cancelled", "told to by ada")
    earlier = {cell: run.info.run_id for cell, run in reader.runs().items()}

    second = Tracker.connect(services.mlflow_uri, "again", "run-8", "grid")
    for cell in ("lost", "paused"):
        second.cell_started(cell, {})
        second.row(cell, row(2))
    began = int(time.time() * 1000)
    for cell in ("lost", "paused"):
        second.cell_ended(cell, "finished")
    assert second.close("FINISHED", 60.0) == 0
    runs = reader.runs()
    assert {cell: run.info.run_id for cell, run in runs.items()} == earlier
    for cell in ("lost", "paused"):
        assert seen(cell) == ("FINISHED", "finished", None)
        assert runs[cell].info.end_time >= began


@pytest.mark.engine
def test_names_that_mlflow_refuses_arrive_changed_and_those_of_a_history_as_they_are(
    services: LocalServices,
) -> None:
    written = row(1) | {
        "problems_per_batch": 16,
        "rollouts_per_problem": 64,
        "seed": 0,
        "seconds_sampling": 2.5,
    }
    tracker = Tracker.connect(services.mlflow_uri, "names", "run-9", "grid")
    tracker.start({"a/b": {"c@d": 1}, "a": 2}, {"x=y": "z"})
    tracker.cell_started("bp16-n64-s0", {})
    tracker.row(
        "bp16-n64-s0", written | {"train": 1.0, "train/loss": 2.0, "pass@1 (greedy)": 0.5, "Loss": 3.0}
    )
    tracker.cell_ended("bp16-n64-s0", "finished")
    assert tracker.close("FINISHED", 60.0) == 0
    runs = Reader(services.mlflow_uri, "run-9").runs()
    metrics = runs["bp16-n64-s0"].data.metrics
    assert (metrics["train"], metrics["train-2f-loss"], metrics["-4c-oss"]) == (1.0, 2.0, 3.0)
    assert metrics["pass-40-1-20--28-greedy-29-"] == 0.5
    assert runs[None].data.params == {"a-2f-b.c-40-d": "1", "a": "2"}
    assert runs[None].data.tags["x-3d-y"] == "z"
    (tables,) = read_experiment(services.mlflow_uri, "names")
    assert tables.history.to_dict("records") == [written]


@pytest.mark.engine
def test_runs_that_start_together_share_one_experiment_and_have_a_parent_each(
    services: LocalServices,
) -> None:
    count = 6
    together = Barrier(count)

    def connect(experiment: str, key: str) -> Tracker:
        together.wait()
        return Tracker.connect(services.mlflow_uri, experiment, key, "grid")

    for experiment in ("together-0", "together-1", "together-2"):
        keys = [f"{experiment}/{number}" for number in range(count)]
        with ThreadPoolExecutor(count) as threads:
            trackers = list(threads.map(connect, [experiment] * count, keys))
        assert len({tracker.experiment_id for tracker in trackers}) == 1
        assert len({tracker.parent_run_id for tracker in trackers}) == count
        for tracker in trackers:
            tracker.close("FINISHED", 60.0)


@pytest.mark.engine
@pytest.mark.parametrize("overtaken_makes_its_run", ["last", "first"])
def test_a_controller_overtaken_while_it_makes_the_parent_leaves_none(
    services: LocalServices, overtaken_makes_its_run: str
) -> None:
    """Each stands still between its last look at the lease and its request, in which the other one does all."""
    last = overtaken_makes_its_run == "last"
    key = f"run-10-{overtaken_makes_its_run}"
    other: list[Tracker] = []

    def check() -> None:
        """The lease of the controller that stands still at the first look."""
        if not other:
            other.append(Tracker.connect(services.mlflow_uri, "overtaken", key, "grid"))
        elif last:
            raise LeaseLost("another controller has taken this run over")

    ledger = Ledger(check=check)
    if last:
        with pytest.raises(LeaseLost):
            Tracker.connect(services.mlflow_uri, "overtaken", key, "grid", ledger)
        holder = other[0]
    else:
        holder = Tracker.connect(services.mlflow_uri, "overtaken", key, "grid", ledger)
    (parent,) = Reader(services.mlflow_uri, key).runs().values()
    assert parent.info.run_id == holder.parent_run_id
    for tracker in {holder, *other}:
        tracker.close(None, 60.0)


@pytest.mark.engine
def test_a_server_killed_in_the_middle_holds_nothing_up_and_loses_and_doubles_no_row(
    services: LocalServices, tmp_path: Path
) -> None:
    rows = [row(step, **{f"column_{i}": float(i) for i in range(40)}) for step in range(1, 121)]
    uri = services.mlflow_uri
    first = Tracker.connect(uri, "away", "run-5", "grid", Ledger.open(tmp_path, 1, lambda: None))
    first.start({}, {})
    first.cell_started("cell", {})
    first.row("cell", rows[0])
    given_up = Tracker.connect(uri, "away", "run-6", "grid")
    began = time.monotonic()
    for sent in rows[1:80]:
        first.row("cell", sent)
    assert time.monotonic() - began < 0.5
    # In the middle of sending; the server's processes are one group.
    record = json.loads((services.state_dir / "services.json").read_text())
    os.killpg(record["services"]["mlflow"]["pid"], signal.SIGKILL)

    given_up.cell_started("cell", {})
    given_up.row("cell", row(1))
    given_up.row("cell", row(2))
    began = time.monotonic()
    assert given_up.close("FINISHED", 1.0) == 2
    first.close(None, 0.0)
    assert time.monotonic() - began < 2.0

    # The next start finds the server away still. Rows after the last commit are made again, at another time.
    ledger = Ledger.open(tmp_path, 2, lambda: None)
    began = time.monotonic()
    second = Tracker.connect(uri, "away", "run-5", "grid", ledger)
    assert time.monotonic() - began < 10.0
    assert second.away is not None and "\n" not in second.away
    second.start({}, {})
    second.reconcile({"cell": "running"})
    second.cell_started("cell", {})
    for sent in rows[:70] + [made | {"logged_at_ms": T0 + 10**6} for made in rows[70:]]:
        second.row("cell", sent)
    second.cell_ended("cell", "finished")
    services.start(["mlflow"])
    assert second.close("FINISHED", 90.0) == 0

    reader = Reader(uri, "run-5")
    for metric in ("compute_rollouts", "column_0", "column_39"):
        steps = Counter(step for step, _, _ in reader.points("cell", metric))
        assert steps == {1024 * step: 1 for step in range(1, 121)}
    assert {run.info.status for run in reader.runs().values()} == {"FINISHED"}
    assert reader.runs()[None].info.run_id == first.parent_run_id
    assert Ledger.open(tmp_path, 3, lambda: None).has("cell", 120, "finished", None)
