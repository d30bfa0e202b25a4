"""What ``plan`` says before anything is spent."""

import pytest

from grids.loading import parse_grid
from grids.spec import GridSpec
from orchestrator.operating.planning import plan_rows, warnings
from orchestrator.pools.resources import needed_resources, resource_faults
from tests.grids.test_spec import GRID, PATH


def grid(*replacements: tuple[str, str]) -> GridSpec:
    text = GRID + "pools: {samplers: {count: 2, cpus: 3}, learners: {count: 2, ranks: 4, cpus: 1}}\n"
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    return parse_grid(text, PATH)


def test_a_row_states_the_cells_batch_steps_compute_and_learning_rate() -> None:
    row = plan_rows(grid())[0]
    # B = 16 * 4, M = 4096 / 64; the rate is 2e-4 * sqrt(64 / 1024); marks 1024, 1448, 2048, 2896, 4096.
    assert row == {
        "cell": "bp16-n4-s0",
        "B_p": 16,
        "n": 4,
        "seed": 0,
        "B": 64,
        "M": 64,
        "C": 4096,
        "learning_rate": pytest.approx(5e-5),
        "evaluations": 5,
    }


def test_rounding_missing_files_and_a_last_mark_before_the_end_are_warned_of() -> None:
    text = "\n".join(warnings(grid(("4096", "5000"))))
    assert "grid.compute_rollouts: 5,000 is no multiple of the batch in 2 cells" in text
    # 19 batches of 256.
    assert "bp16-n16-s0, to 4,864" in text
    assert "the last mark falls before the end of 2 cells" in text
    assert "problems.train: /grids/train.jsonl is not on this machine" in text
    assert "model.path: org/model" in text


def test_assumptions_are_repeated() -> None:
    spec = parse_grid(GRID + "assumptions: [C_max is unpublished]\n", PATH)
    assert "assumption: C_max is unpublished" in warnings(spec)


def test_pools_need_the_sum_of_their_members() -> None:
    # 2 samplers of 3 cores, 2 groups of 4 ranks of 1 core, and one verifier process.
    assert needed_resources(grid()) == {"CPU": 15, "GPU": 0}


def test_a_grid_that_fits_has_no_faults() -> None:
    assert resource_faults(grid(), [{"CPU": 8}, {"CPU": 8}]) == []


def test_too_small_a_cluster_is_told_with_both_numbers() -> None:
    (fault,) = resource_faults(grid(), [{"CPU": 8}, {"CPU": 6}])
    assert "needs 15 CPUs, the cluster has 14" in fault


def test_an_actor_that_no_single_node_holds_is_a_fault_though_the_sum_suffices() -> None:
    (fault,) = resource_faults(grid(), [{"CPU": 2}] * 10)
    assert fault.startswith("pools.samplers: one takes 3 CPUs, the largest node has 2")


def test_missing_gpus_are_told() -> None:
    spec = grid(("cpus: 3", "cpus: 3, gpus: 1"))
    faults = resource_faults(spec, [{"CPU": 100}])
    assert any("needs 2 GPUs, the cluster has 0" in fault for fault in faults)
