"""What is learnt from phases on record, and what it predicts."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from grids.errors import UserError
from grids.expansion import expand
from grids.loading import dump_grid
from grids.spec import GridSpec
from orchestrator.operating.planning import checkpoint_bytes, disk_line
from orchestrator.operating.predicting import predict, prediction_line, records_of
from orchestrator.scheduling.costs import CostModel
from orchestrator.simulation.conditions import Conditions
from orchestrator.simulation.learnt import LearntTimes, evaluation_batches, handovers
from orchestrator.simulation.simulator import simulate
from orchestrator.store.phase_log import PhaseKind, PhaseRecord
from orchestrator.store.run_store import RunStore
from tests.orchestrator.stand_in_pools import trial_grid
from tests.orchestrator.test_simulation import Recorded

SAMPLING, GRADING, LEARNING = PhaseKind.SAMPLING, PhaseKind.GRADING, PhaseKind.LEARNING
SECONDS = {
    PhaseKind.TAKING_UP: 3.0,
    SAMPLING: 2.0,
    GRADING: 0.25,
    LEARNING: 1.0,
    PhaseKind.EVALUATION: 4.0,
    PhaseKind.EVALUATION_GRADING: 0.5,
    PhaseKind.COMMIT: 1.5,
}


class Law:
    """Each kind takes its own time, whatever it is about."""

    def seconds(self, kind: PhaseKind, sequences: int) -> float:
        return SECONDS[kind]


def record(
    kind: PhaseKind, started: float, busy: float = 1.0, *, waited: float = 0.0, cell: str = "c", step: int = 1
) -> PhaseRecord:
    return PhaseRecord("m 0", kind, cell, step, started, busy, waited, 8, 0, 1)


def test_a_third_of_a_grids_phases_predicts_the_whole() -> None:
    spec = trial_grid(seeds=6, steps=20, slots=2)
    truth = Recorded()
    world = Conditions(Law(), ((4, 4),), handovers={SAMPLING: 0.5, LEARNING: 0.125})
    actual = simulate(spec, expand(spec), world, truth)
    found = predict(spec, truth.seen[: len(truth.seen) // 3])
    assert found.wall_seconds == pytest.approx(actual.wall_seconds, rel=0.05)
    assert found.idle_share == pytest.approx(actual.idle_share, abs=0.05)
    assert found.accelerator_hours == pytest.approx(actual.held_accelerator_seconds / 3600, rel=0.05)


def test_handovers_run_from_the_last_end_to_the_asking_and_waiting_is_none() -> None:
    records = [
        record(SAMPLING, 0.0),  # to 1
        record(GRADING, 3.5, waited=2.0),  # asked at 1.5, to 4.5
        record(LEARNING, 4.75),  # to 5.75
        record(SAMPLING, 100.0, cell="other"),
        record(SAMPLING, 6.75, step=2),
        record(GRADING, 8.0, step=2),  # asked at 8, 0.25 after the end
    ]
    assert handovers(records) == {GRADING: (0.5 + 0.25) / 2, LEARNING: 0.25, SAMPLING: 1.0}


def test_a_slice_that_is_graded_beside_the_sampling_of_its_step_is_handed_over_at_once() -> None:
    records = [
        record(LEARNING, 0.0),  # to 1
        record(SAMPLING, 9.0, 2.0, waited=7.75, step=2),  # asked at 1.25, 9 to 11
        record(SAMPLING, 9.0, 4.0, waited=7.75, step=2),  # another part, to 13
        record(GRADING, 10.0, step=2),  # the first slice of one of them
        record(GRADING, 11.5, step=2),  # the last of the first part, or another one of the second
        record(GRADING, 13.125, 0.5, step=2),  # to 13.625
        record(LEARNING, 13.75, step=2),
    ]
    assert handovers(records) == {SAMPLING: 0.25, GRADING: 0.0, LEARNING: 0.125}
    # Sampling of another step, or of another cell, is no overlap: 0.5 after the end of its own.
    elsewhere = [
        record(SAMPLING, 0.0),  # to 1
        record(SAMPLING, 0.0, 9.0, step=5),
        record(SAMPLING, 0.0, 9.0, cell="other"),
        record(GRADING, 1.5),
    ]
    assert handovers(elsewhere) == {GRADING: 0.5}


def test_an_evaluation_is_as_large_as_the_largest_that_was_seen() -> None:
    spec = GridSpec.model_validate(
        dump_grid(trial_grid())
        | {
            "evaluation": {
                "first_mark": 16,
                "samples_per_problem": 4,
                "train_probe": {"problems": 3, "samples_per_problem": 2},
            }
        }
    )
    # 7 problems of 4, 3 of 2; the second one was still going on.
    sizes = [("base", 28), ("base", 6), ("a", 20)]
    records = [
        PhaseRecord("sampler 0", PhaseKind.EVALUATION, cell, 0, 0.0, 1.0, 0.0, size, 0, 1)
        for cell, size in sizes
    ]
    assert evaluation_batches(spec, records) == ((7, 4), (3, 2))
    assert evaluation_batches(spec, records[:0]) == ()


def test_phases_beside_training_that_were_never_seen_take_no_time() -> None:
    times = LearntTimes(CostModel([record(SAMPLING, 0.0, 4.0)] * 3))
    assert times.seconds(LEARNING, 8) == pytest.approx(4.0)
    assert [times.seconds(kind, 8) for kind in (PhaseKind.COMMIT, PhaseKind.EVALUATION)] == [0, 0]


def test_checkpoints_are_counted_in_weights_and_two_moments(tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray] = {"a": np.zeros((3, 5), np.float16), "b": np.zeros(7, np.float32)}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    spec = dump_grid(trial_grid(seeds=4))
    spec["model"]["path"] = str(tmp_path)
    spec["commits"]["keep"] = 3
    assert checkpoint_bytes(GridSpec.model_validate(spec)) == 4 * 3 * 12 * 22
    spec["model"]["path"] = "org/model"
    assert checkpoint_bytes(GridSpec.model_validate(spec)) is None
    assert disk_line(GridSpec.model_validate(spec)).startswith("disk: not known")


def test_an_earlier_run_is_the_measure_and_one_without_phases_is_refused(tmp_path: Path) -> None:
    spec = trial_grid(seeds=2, steps=4, slots=2)
    truth = Recorded()
    simulate(spec, expand(spec), Conditions(Law()), truth)
    run_dir = tmp_path / "run"
    (tmp_path / "phases").mkdir()
    lines = b"".join(one.to_line() for one in truth.seen)
    (tmp_path / "phases" / "e000001-000001.jsonl").write_bytes(lines)
    with pytest.raises(UserError, match="not a run folder"):
        records_of(tmp_path)
    RunStore.open(run_dir, {}, {"spec": dump_grid(spec)})
    with pytest.raises(UserError, match="no phases are on record"):
        records_of(run_dir)
    shutil.move(tmp_path / "phases", run_dir)
    line = prediction_line(spec, run_dir, records_of(run_dir))
    wall = predict(spec, truth.seen).wall_seconds
    assert f"{round(wall)}s" in line
