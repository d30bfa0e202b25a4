import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.against_trl import fastest_variant, grid, write_problems
from benchmarks.grid_rate import GridRate
from benchmarks.trl_report import Repetition, Result, to_json, to_text
from benchmarks.trl_runs import TrlFailed, TrlRate, Variant, settings_of, together
from grids.errors import UserError
from grids.expansion import evaluated_steps, expand
from grids.loading import dump_grid, parse_grid

TRL = TrlRate(
    seconds=80.0,
    rollouts=40_000,
    start_up_seconds=12.0,
    train_reward=0.5,
    response_tokens=6.0,
    zero_variance=0.01,
    version="1.16.0",
)
OURS = GridRate(
    seconds=40.0,
    rollouts=40_000,
    start_up_seconds=20.0,
    batch_rollouts=512,
    sampling_seconds=0.2,
    learning_seconds=0.3,
    train_reward=0.5,
    response_tokens=6.0,
    zero_variance=0.01,
)
"""Alone 0.2 s + 0.3 s on one core each for 512 rollouts: two cores that are never idle make 2 * 512 / 0.5 = 2,048 a second."""


def test_both_sides_train_the_same_cells_and_ours_is_evaluated_at_the_end_alone(tmp_path: Path) -> None:
    options = argparse.Namespace(n=16, problems=32, steps=5, samplers=2, slots=3, kl=0.001)
    spec = grid(options, "both", write_problems("easy", tmp_path), tmp_path / "validation.jsonl", cells=2)
    as_written = parse_grid(json.dumps(dump_grid(spec)), tmp_path / "both.yaml")
    assert as_written == spec
    assert [(cell.id, cell.update_steps) for cell in expand(spec)] == [("bp32-n16-s0", 5), ("bp32-n16-s1", 5)]
    assert [evaluated_steps(cell, spec.evaluation) for cell in expand(spec)] == [[5], [5]]
    assert spec.pools.learners.cells_in_flight == 3
    settings = settings_of(spec)
    # The quickstart's 2e-4 at 1,024 rollouts, scaled by the root: 512 rollouts learn at 2e-4 / sqrt(2).
    assert settings["learning_rate"] == pytest.approx(1.41421356e-4)
    expected = {
        "steps": 5,
        "seeds": [0, 1],
        "kl_coefficient": 0.001,
        "tis_cap": 2.0,
        "max_tokens": 8,
        "temperature": 1.0,
        "warmup_steps": 10,
        "prompt_template": "{prompt}=",
    }
    assert settings | expected == settings
    assert (spec.recipe.entropy_coefficient, spec.verifier.type) == (0, "exact")


def test_the_signal_set_holds_just_the_problems_that_are_right_about_half_the_time(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in write_problems("signal", tmp_path).read_text().splitlines()]
    assert {row["avg_at_16"] for row in rows} == {0.4375, 0.5, 0.5625}
    assert len(rows) == 341 + 335 + 339  # counted in the shipped file


def test_the_fastest_variant_is_measured_and_one_that_does_not_run_says_why() -> None:
    def run(variant: Variant) -> TrlRate:
        if variant.generation != "generate":
            raise TrlFailed("RuntimeError: no paged attention")
        # Two threads are faster, two micro-batches faster still, four slower.
        seconds = {1: 80.0, 2: 50.0}[variant.threads] + {1: 0.0, 2: -10.0, 4: 10.0}[variant.micro_batches]
        return replace(TRL, seconds=seconds)

    chosen, tries = fastest_variant(run, batch=512, processes=1)
    assert chosen == Variant("generate", threads=2, micro_batches=2)
    assert tries["generate, 2 threads, whole batch"] == 800.0
    assert tries["continuous, 1 thread, whole batch"] == "RuntimeError: no paged attention"
    assert fastest_variant(run, batch=30, processes=1)[1].keys() - tries.keys() == set()
    assert "generate, 2 threads, 4 micro-batches" not in fastest_variant(run, batch=30, processes=1)[1]


def test_processes_that_share_the_cores_are_tried_with_the_threads_that_are_left() -> None:
    asked: list[Variant] = []

    def run(variant: Variant) -> TrlRate:
        asked.append(variant)
        return TRL

    fastest_variant(run, batch=512, processes=2)
    assert {variant.generation for variant in asked} == {"generate", "continuous", "vllm"}
    assert {(variant.processes, variant.threads) for variant in asked} == {(2, 1)}


def test_rates_of_processes_at_once_add_up() -> None:
    # 40,000 in 80 s beside 20,000 in 80 s: 750 a second; two thirds of the rollouts are the first's.
    other = replace(TRL, rollouts=20_000, train_reward=0.8, start_up_seconds=15.0)
    both = together([TRL, other])
    assert both.rollouts == 60_000
    assert both.rollouts_per_second == pytest.approx(750.0)
    assert both.train_reward == pytest.approx(0.6)
    assert both.start_up_seconds == 15.0


def test_trl_that_does_not_run_at_all_is_one_line() -> None:
    def run(variant: Variant) -> TrlRate:
        raise TrlFailed("ImportError: no torch")

    with pytest.raises(UserError, match="ImportError: no torch") as raised:
        fastest_variant(run, batch=512, processes=1)
    assert "\n" not in str(raised.value)


def test_ratio_and_ceiling_are_those_of_the_medians() -> None:
    slow = replace(TRL, seconds=160.0)
    runs = [Repetition(trl, OURS, OURS) for trl in (TRL, slow, TRL)]
    options = {"set": "easy", "n": 16, "problems": 32, "cells": 4, "steps": 20, "samplers": 2}
    options |= {"slots": 2, "kl": 0.0}
    result = Result(
        options, {"generate, 1 thread, whole batch": 500.0}, "generate, 1 thread, whole batch", runs
    )
    # 40,000 / 40 s against 40,000 / 80 s; 1,000 of 2,048 rollouts/s.
    ratio = "ratio: 2.00 times TRL's rollouts per second, 49% of the ceiling"
    text = to_text(result)
    assert text.splitlines()[-1] == ratio
    content = json.loads(to_json(result))
    assert content["median_rollouts_per_second"] == {"trl": 500.0, "ours": 1000.0, "ceiling": 2048.0}
    assert content["ratio"] == 2.0
