"""What the simulated grid's command says of decisions, and what it calls a fault."""

import pytest

from benchmarks.simulate import as_text, decision_figures, faults_of, measure, options


def test_decisions_of_a_kind_are_told_by_their_mean_the_99th_percentile_and_the_longest() -> None:
    # 990 of 0.5 ms, nine of 2 ms and one of 87 ms: 495 + 18 + 87 = 600 ms in all.
    figures = decision_figures([0.087, *[0.0005] * 990, *[0.002] * 9])
    assert figures == pytest.approx({"number": 1000, "mean_ms": 0.6, "p99_ms": 2.0, "longest_ms": 87.0})


def test_a_rare_kind_of_decision_that_is_slow_is_a_fault_among_millions_of_fast_ones() -> None:
    fast = {"number": 10**6, "mean_ms": 0.01, "p99_ms": 0.02, "longest_ms": 50.0}
    slow = {"number": 2, "mean_ms": 1.5, "p99_ms": 2.0, "longest_ms": 2.0}
    figures = {"finished": 3, "cells": 3, "failures_per_hour": 0.0, "ratio": 1.0, "decisions": {"fast": fast}}
    assert faults_of(figures) == []
    (fault,) = faults_of(figures | {"decisions": {"fast": fast, "slow": slow}})
    assert "slow" in fault and "1.500 ms" in fault


def test_a_small_grid_has_decisions_of_every_kind() -> None:
    arguments = ["--cells", "4", "--samplers", "2", "--groups", "1", "--compute", "4096"]
    figures = measure(options(arguments))
    # Each cell is put in line once and taken once.
    decisions = {kind: one["number"] for kind, one in figures["decisions"].items()}
    assert decisions == {
        "who a free member serves": figures["phases"],
        "what a phase tells of costs": figures["phases"],
        "what is left of a cell": figures["update_steps"],
        "which cell a slot takes": 4,
        "where a cell stands in line": 4,
    }
    text = as_text(figures)
    assert all(kind in text for kind in decisions)
