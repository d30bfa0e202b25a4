"""What is prescribed, against two allocations whose curves are known.

Small groups start early and level at 0.6, large ones start late and level at 0.8:
    bp32-n8   R(C) = 0.3 + 0.3 / (1 + 1e4 / C)   B = 256
    bp32-n64  R(C) = 0.3 + 0.5 / (1 + 1e5 / C)   B = 2048
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.findings import analyse
from analysis.options import FitOptions
from analysis.prescribing.budgets import parse_budget
from analysis.prescribing.prescription import Prescription, prescribe
from analysis.reading.sources import tables_from_frame
from analysis.synthetic import SyntheticGrid, expected_reward, synthetic_grid, true_grid
from grids.errors import UserError
from grids.loading import dump_grid, load_grid
from tests.analysis.conftest import Sigmoid, sigmoid

Cells = Mapping[tuple[int, int], Sigmoid]
SMALL: Sigmoid = (0.3, 0.6, 1e4, 1.0)
LARGE: Sigmoid = (0.3, 0.8, 1e5, 1.0)
TWO: Cells = {(32, 8): SMALL, (32, 64): LARGE}
PAPER_EASY = Path(__file__).parents[2] / "grids" / "paper_easy_qwen2.5_7b.yaml"
TOKENS_OF = {8: 100, 64: 1000}
"""Tokens of an answer, by n."""


def frame(cells: Cells, end: Mapping[int, int] | None = None, **columns: Any) -> pd.DataFrame:
    """Evaluations without noise at 2^12, 2^12.5, ... 2^20 rollouts (or up to ``end``, by n), at whole steps."""
    rows = []
    for (problems, n), shape in cells.items():
        batch = problems * n
        steps = {round(2 ** (12 + j / 2) / batch) for j in range(17)} - {0}
        for step in sorted(steps):
            compute = step * batch
            if compute <= (end or {}).get(n, 2**20):
                rows.append(
                    {
                        "problems_per_batch": problems,
                        "rollouts_per_problem": n,
                        "step": step,
                        "compute_rollouts": compute,
                        "compute_tokens": compute * TOKENS_OF.get(n, 100),
                        "avg_at_4": float(sigmoid(compute, *shape)),
                    }
                )
    return pd.DataFrame(rows).assign(**columns)


def prescribed(
    table: pd.DataFrame,
    budget: float,
    max_batch: int | None = None,
    spec: dict[str, Any] | None = None,
    **options: Any,
) -> Prescription:
    tables = replace(tables_from_frame(table, base={"avg_at_4": 0.3}), spec=spec)
    return prescribe(analyse(tables, FitOptions(**options)), budget, max_batch)


def said(prescription: Prescription, *words: str) -> bool:
    """Whether one remark holds all of these words."""
    return any(all(word in remark for word in words) for remark in prescription.remarks)


def test_a_small_budget_goes_to_small_groups() -> None:
    found = prescribed(frame(TWO), 65_536)
    assert found.best.allocation.name == "bp32-n8"
    assert (found.best.update_steps, found.best.compute_rollouts) == (256, 65_536)
    assert found.best.reward == pytest.approx(0.5603, abs=1e-3)  # 0.3 + 0.3 * 65536 / 75536
    (rival,) = found.runners_up
    assert rival.allocation.name == "bp32-n64" and rival.update_steps == 32
    assert rival.difference == pytest.approx(0.4980 - 0.5603, abs=2e-3)
    assert not found.extrapolates and not found.not_observed


def test_a_large_budget_goes_to_large_groups_in_whole_steps() -> None:
    found = prescribed(frame(TWO), 1_000_000)
    assert found.best.allocation.name == "bp32-n64"
    assert (found.best.update_steps, found.best.compute_rollouts) == (488, 999_424)
    assert found.best.reward == pytest.approx(0.7545, abs=1e-3)  # 0.3 + 0.5 * 999424 / 1099424


def test_larger_batches_than_allowed_do_not_compete() -> None:
    assert prescribed(frame(TWO), 1_000_000, max_batch=2047).best.allocation.name == "bp32-n8"
    with pytest.raises(UserError, match=r"^--max-batch: 255 .* at least 256$"):
        prescribed(frame(TWO), 1_000_000, max_batch=255)


def test_an_allocation_that_cannot_make_a_step_does_not_compete() -> None:
    found = prescribed(frame({**TWO, (1024, 64): (0.9, 0.95, 1e5, 1.0)}), 50_000)
    assert found.competitors == 2 and found.best.allocation.name == "bp32-n8"


def test_fewer_than_four_steps_are_not_ranked() -> None:
    # bp1024-n4 has the best score by far and was evaluated from its first step, at 4096 rollouts, on.
    table = frame({**TWO, (1024, 4): (0.9, 0.95, 1e5, 1.0)})
    three = prescribed(table, 4 * 4096 - 1)
    assert three.best.allocation.name == "bp32-n8" and three.competitors == 2
    assert said(three, "not ranked", "fewer than 4 steps", "bp1024-n4 (from 16.38k rollouts)")
    four = prescribed(table, 4 * 4096)
    assert (four.best.allocation.name, four.best.update_steps) == ("bp1024-n4", 4)


def test_equal_rewards_go_to_the_smaller_n() -> None:
    found = prescribed(frame({(32, 16): SMALL, (64, 8): SMALL}), 65_536)
    assert found.best.allocation.name == "bp64-n8"
    assert found.runners_up[0].difference == 0.0


def test_without_a_curve_nothing_is_prescribed() -> None:
    with pytest.raises(UserError, match="no allocation has a curve of avg_at_4"):
        prescribed(frame(TWO).head(3), 65_536)


def test_a_budget_beyond_every_observation_warns_how_far_it_extrapolates() -> None:
    found = prescribed(frame(TWO), 2**22)
    assert found.extrapolates and found.best.beyond == pytest.approx(4.0)
    assert found.best.reward == pytest.approx(0.7884, abs=5e-3)  # 0.3 + 0.5 * 4194304 / 4294304
    assert found.warning is not None
    assert "4 times the last evaluation of bp32-n64 (1.049M rollouts)" in found.warning
    assert "held-out check: curves fitted up to 262.1k rollouts" in found.warning
    # Curves without noise are met again, and 64 is the right choice from 2^18 to 2^20.
    assert "up to 4 times as much compute, and their choice loses 0.000" in found.warning
    assert prescribed(frame(TWO), 2**20).warning is None


def test_a_budget_beyond_four_times_the_observed_compute_is_refused_with_the_largest() -> None:
    with pytest.raises(UserError) as error:
        prescribed(frame(TWO), 1000 * 2**20)
    message = str(error.value)
    assert message.startswith(
        "--budget: 1.049B rollouts is 1,000 times the largest observed compute of table"
    )
    assert "largest budget to prescribe for is 4.194M rollouts" in message and "extend the grid" in message
    assert "law" not in message and "\n" not in message
    assert prescribed(frame(TWO), 4.194e6).extrapolates  # as the message says


def test_batches_that_are_not_allowed_do_not_lengthen_the_observed_compute() -> None:
    table = frame(TWO, end={8: 2**14})
    assert prescribed(table, 2**17).best.allocation.name == "bp32-n64"
    with pytest.raises(
        UserError, match=r"is 8 times the largest observed compute of table \(16\.38k rollouts\)"
    ):
        prescribed(table, 2**17, max_batch=256)


def test_a_refusal_hints_at_the_laws_n_where_there_is_a_law() -> None:
    analysis = analyse(
        true_grid(SyntheticGrid(problems_per_batch=(32,)), marks_per_doubling=5), FitOptions(replicates=0)
    )
    plateau = 2 ** (6.09 + 2.73)  # the generator's, which the law has reached by 1e9
    with pytest.raises(UserError, match=r"the law, which is no prescription, says n = \d+$") as error:
        prescribe(analysis, 1e9)
    assert int(str(error.value).rsplit(" ", 1)[1]) == pytest.approx(plateau, rel=0.3)


def test_an_allocation_that_stopped_far_before_the_budget_does_not_compete_by_extrapolation() -> None:
    # The best by far wherever it is seen, but only to 2^15: at 2^21 that would be 64 times its last evaluation.
    found = prescribed(frame({**TWO, (32, 16): (0.3, 0.99, 1e4, 1.0)}, end={16: 2**15}), 2**21)
    assert found.best.allocation.name == "bp32-n64" and found.competitors == 2
    assert [late.allocation.name for late in found.not_observed] == ["bp32-n16"]
    assert said(found, "not compared: bp32-n16", "1/5 of the budget")


def test_a_budget_before_every_evaluation_is_refused_with_the_smallest() -> None:
    with pytest.raises(UserError, match=r"^--budget: 3k rollouts is too early in table") as error:
        prescribed(frame(TWO), 3_000)
    assert "smallest budget to prescribe for is 4.1k rollouts" in str(error.value)  # 2^12, rounded up
    found = prescribed(frame(TWO), 4_100)
    assert (found.best.allocation.name, found.best.update_steps) == ("bp32-n8", 16)
    # 2^12 rollouts are two steps of bp32-n64.
    assert found.competitors == 1 and said(found, "not ranked", "bp32-n64 (from 8.192k rollouts)")


@pytest.mark.parametrize("compute", ["tokens", "accelerator_seconds"])
def test_the_smallest_budget_of_a_refusal_is_enough_where_seeds_cost_unequal_amounts(compute: str) -> None:
    first, second = frame(TWO, seed=0), frame(TWO, seed=1)
    second["compute_tokens"] = (1.7 * second["compute_tokens"]).round().astype(int)
    table = pd.concat([first, second], ignore_index=True)
    table["accelerator_seconds"] = 0.37 * table["compute_tokens"]
    with pytest.raises(UserError) as error:
        prescribed(table, 1_000, compute=compute)
    smallest = str(error.value).partition("prescribe for is ")[2].removesuffix(": give that")
    budget = parse_budget(smallest)
    assert budget.unit == compute
    found = prescribed(table, budget.amount, compute=compute)
    assert (found.best.allocation.name, found.best.observed) == ("bp32-n8", True)


def test_a_few_percent_beyond_the_last_evaluation_are_no_extrapolation() -> None:
    assert not prescribed(frame(TWO), 1.04 * 2**20).extrapolates
    assert prescribed(frame(TWO), 1.10 * 2**20).extrapolates


def test_a_rival_that_stopped_early_is_listed_but_does_not_compete() -> None:
    found = prescribed(frame(TWO, end={64: 2**17}), 2**20)
    assert found.best.allocation.name == "bp32-n8" and not found.extrapolates
    assert found.competitors == 1 and found.runners_up == ()
    (late,) = found.not_observed
    assert late.allocation.name == "bp32-n64" and late.observed_compute == (4096, 2**17)
    assert late.reward == pytest.approx(0.7565, abs=0.01)  # 0.3 + 0.5 * 1048576 / 1148576
    assert said(found, "bp32-n64 was observed only from", "to 131.1k rollouts", "would lead")
    assert said(found, "only n = 8 competes")


def test_tokens_are_converted_by_each_allocations_own_answers() -> None:
    found = prescribed(frame(TWO), 1e7, compute="tokens")
    assert found.best.allocation.name == "bp32-n8"
    assert found.best.update_steps == 390  # 1e7 / 100 tokens / 256
    assert found.best.compute == pytest.approx(390 * 256 * 100)
    assert found.best.reward == pytest.approx(0.5727, abs=1e-3)  # 0.3 + 0.3 * 99840 / 109840
    assert found.runners_up[0].update_steps == 4  # 1e7 / 1000 tokens / 2048


def test_accelerator_time_holds_for_the_cells_hardware() -> None:
    table = frame(TWO)
    table["accelerator_seconds"] = 2.0 * table["compute_rollouts"]
    found = prescribed(table, 400_000.0, compute="accelerator_seconds")
    # 200,000 rollouts each, where the curves are at 0.633 and 0.586.
    assert (found.best.allocation.name, found.best.update_steps) == ("bp32-n64", 97)
    assert (found.runners_up[0].allocation.name, found.runners_up[0].update_steps) == ("bp32-n8", 781)
    assert said(found, "hardware")


def test_the_learning_rate_is_the_allocations_last() -> None:
    table = frame(TWO)
    table["learning_rate"] = np.where(table["step"] < 10, 1e-7, table["rollouts_per_problem"] * 1e-8)
    found = prescribed(table, 1_000_000)
    assert found.best.learning_rate == pytest.approx(64e-8)
    assert found.runners_up[0].learning_rate == pytest.approx(8e-8)
    assert not said(found, "learning rate")


def test_a_falling_learning_rate_is_remarked_upon() -> None:
    table = frame(TWO)
    table["learning_rate"] = 1e-6 / table["step"]
    assert said(prescribed(table, 1_000_000), "learning rate of bp32-n64 falls")


def test_the_grids_rule_gives_the_learning_rate_where_there_is_a_grid() -> None:
    found = prescribed(frame(TWO), 1_000_000, spec=dump_grid(load_grid(PAPER_EASY)))
    assert found.best.learning_rate == pytest.approx(1e-6 * 2**0.5)  # anchor 1024, B = 2048


def test_an_unknown_learning_rate_is_named() -> None:
    found = prescribed(frame(TWO), 1_000_000)
    assert found.best.learning_rate is None
    assert said(found, "learning rate not known")


def test_few_steps_are_counted_against_the_warm_up() -> None:
    spec = dump_grid(load_grid(PAPER_EASY))  # 10 steps of warm-up
    assert said(prescribed(frame(TWO), 256 * 19, spec=spec), "only 19 update steps, of which 10 are warm-up")
    assert not said(prescribed(frame(TWO), 256 * 20, spec=spec), "update steps")
    assert said(prescribed(frame(TWO), 256 * 19), "only 19 update steps")


def test_the_edge_of_the_grid_is_named() -> None:
    assert said(prescribed(frame(TWO), 1_000_000), "bp32-n64", "no larger n was tried")
    inner: Cells = {**TWO, (32, 256): (0.3, 0.31, 1e5, 1.0)}
    assert not said(prescribed(frame(inner), 1_000_000), "edge")


def test_the_edge_of_a_ragged_grid_is_where_its_own_row_ends() -> None:
    poor: Sigmoid = (0.3, 0.31, 1e5, 1.0)
    ragged: Cells = {(16, 64): poor, (16, 128): poor, (32, 8): poor, (32, 64): LARGE, (64, 8): poor}
    assert said(prescribed(frame(ragged), 1_000_000), "bp32-n64", "no larger n and no larger B_p was tried")


def test_one_seed_without_scores_has_no_intervals_and_says_why() -> None:
    found = prescribed(frame(TWO), 1_000_000)
    assert found.best.reward_interval is None and found.n_interval is None and found.not_worse_n is None
    assert found.runners_up[0].told_from_best is None
    assert said(found, "no intervals", "per-problem scores")


def test_seeds_and_scores_give_intervals_of_everything() -> None:
    design = SyntheticGrid(
        problems_per_batch=(64,), rollouts_per_problem=(8, 64), seeds=(0, 1, 2), compute_rollouts=2**21
    )
    tables = synthetic_grid(design, np.random.default_rng(0))
    found = prescribe(analyse(tables, FitOptions(replicates=50)), 2**21)
    truth = expected_reward(design, 64, 64, 2**21)
    assert found.best.allocation.rollouts_per_problem == 64
    assert found.best.reward == pytest.approx(float(truth), abs=0.03)
    assert found.best.reward_interval is not None
    assert found.best.reward_interval[0] < found.best.reward < found.best.reward_interval[1]
    # The truth is 0.08 better, many times the noise of 300 problems and 3 seeds.
    assert found.best.best_share == 1.0 and found.n_share == 1.0 and found.n_interval == (64.0, 64.0)
    assert found.runners_up[0].told_from_best is True and found.not_worse_n == (64,)
    assert found.runners_up[0].best_share == 0.0


def test_what_cannot_be_told_apart_is_not() -> None:
    design = SyntheticGrid(
        law=None,
        problems_per_batch=(64,),
        rollouts_per_problem=(8, 16, 32),
        seeds=(0, 1, 2),
        compute_rollouts=2**21,
    )
    tables = synthetic_grid(design, np.random.default_rng(1))
    found = prescribe(analyse(tables, FitOptions(replicates=100)), 2**20)
    shares = [candidate.best_share for candidate in (found.best, *found.runners_up)]
    assert sum(share for share in shares if share is not None) == pytest.approx(1.0)
    assert found.not_worse_n == (8, 16, 32)


def test_the_law_stands_beside_the_curves_and_a_disagreement_is_named() -> None:
    analysis = analyse(
        true_grid(SyntheticGrid(problems_per_batch=(32,)), marks_per_doubling=5), FitOptions(replicates=0)
    )
    free = prescribe(analysis, 4e6)
    # The generator's law at 4e6 is 2^(6.09 / (1 + exp(-4.75 (6.602 - 5.84))) + 2.73) = 405; n* itself is rounded to 512.
    assert free.law_n == pytest.approx(405, rel=0.2) and free.law_n_interval is None
    assert free.best.allocation.rollouts_per_problem == 512 and not said(free, "the law says")
    small = prescribe(analysis, 4e6, max_batch_rollouts=1024)
    assert small.best.allocation.rollouts_per_problem <= 32
    assert said(small, "the law says n =", "factor 2")
    assert said(small, "no intervals: no replicates were asked for")


def test_the_laws_n_has_an_interval_where_there_are_replicates() -> None:
    design = SyntheticGrid(
        problems_per_batch=(32,), rollouts_per_problem=(8, 16, 32, 64, 128, 256, 512, 1024)
    )
    tables = synthetic_grid(design, np.random.default_rng(2))
    found = prescribe(analyse(tables, FitOptions(replicates=50)), 7e5)
    # The law at 7e5: 2^(6.09 / (1 + exp(-4.75 (5.845 - 5.84))) + 2.73) = 55
    assert found.law_n is not None and found.law_n_interval is not None
    assert found.law_n == pytest.approx(55, rel=0.4)
    low, high = found.law_n_interval
    assert 8 < low < found.law_n < high < 512
