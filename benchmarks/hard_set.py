"""A learner's update on a hard set, where most groups have no right answer, with and without leaving those groups out.

    python -m benchmarks.hard_set --without-signal 0.8 --repetitions 9

One rank, the shipped model, a batch of made-up answers. Gradients of both ways are compared; times are those of whole updates.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import command
from grids.spec import HardRecipe, ModelSpec, OptimiserSpec
from workers import grpo
from workers.learner import LearnerRank
from workers.learning import LearnerSettings
from workers.rollouts import Rollouts

QUICKSTART = Path(__file__).parents[1] / "grids" / "quickstart"
LARGEST_DIFFERENCE = 1e-6
"""Of gradients, relative to the norm of the whole gradient where that is above 1."""


def all_contribute(advantages: np.ndarray, *_: object, **__: object) -> np.ndarray:
    """What computes every answer."""
    return np.ones(len(advantages), dtype=bool)


def make_batch(problems: int, n: int, tokens: int, without_signal: float) -> tuple[Rollouts, np.ndarray]:
    """Answers of up to ``tokens`` tokens; no answer of a share of the problems is right, every second one of the others."""
    random = np.random.default_rng(0)
    lengths = random.integers(max(1, tokens // 2), tokens + 1, size=problems * n)
    rewards = np.zeros((problems, n), dtype=np.float32)
    rewards[round(problems * without_signal) :, ::2] = 1
    rollouts = Rollouts(
        rollouts_per_problem=n,
        prompts=[random.integers(3, 40, size=8).astype(np.int32) for _ in range(problems)],
        tokens=random.integers(1, 40, size=lengths.sum()).astype(np.int32),
        logprobs=random.normal(-2, 0.5, size=lengths.sum()).astype(np.float32),
        lengths=lengths,
        truncated=np.zeros(problems * n, dtype=bool),
        texts=[""] * (problems * n),
        weights_version="step-0",
    )
    return rollouts, rewards.reshape(-1)


def open_learner() -> LearnerRank:
    """A group of one rank in this process."""
    settings = LearnerSettings(
        model=ModelSpec(path=str(QUICKSTART / "model")),
        recipe=HardRecipe(type="hard"),
        optimiser=OptimiserSpec(learning_rate=1e-4),
        temperature=1.0,
        micro_batch_tokens=16_384,
        threads=1,
        on_gpu=False,
    )
    learner = LearnerRank(settings, rank=0, ranks=1)
    learner.join(*learner.open_store())
    return learner


def gradients(learner: LearnerRank, rollouts: Rollouts, rewards: np.ndarray) -> np.ndarray:
    """All gradients of a batch, flat."""
    learner.begin_cell(0, "step-0", None)
    learner.backward(rollouts, rewards)
    return np.concatenate([gradient.ravel() for gradient in learner.gradients().values()])


def update_seconds(learner: LearnerRank, rollouts: Rollouts, rewards: np.ndarray, step: int) -> float:
    """Seconds of one update."""
    batch = replace(rollouts, weights_version=f"step-{step}")
    started = time.monotonic()
    learner.update(0, f"step-{step + 1}", 1e-4, batch, rewards)
    return time.monotonic() - started


def measure(problems: int, n: int, tokens: int, without_signal: float, repetitions: int) -> dict[str, Any]:
    """Both ways in turns."""
    learner = open_learner()
    rollouts, rewards = make_batch(problems, n, tokens, without_signal)
    found = gradients(learner, rollouts, rewards)
    with mock.patch.object(grpo, "contributing", all_contribute):
        expected = gradients(learner, rollouts, rewards)
    scale = max(1.0, float(np.linalg.norm(expected)))
    learner.begin_cell(0, "step-0", None)
    whole: list[float] = []
    left_out: list[float] = []
    for repetition in range(repetitions + 1):
        seconds = update_seconds(learner, rollouts, rewards, 2 * repetition)
        with mock.patch.object(grpo, "contributing", all_contribute):
            seconds_of_all = update_seconds(learner, rollouts, rewards, 2 * repetition + 1)
        if repetition:  # the first one warms up
            left_out.append(seconds)
            whole.append(seconds_of_all)
    return {
        "answers": problems * n,
        "without_signal": without_signal,
        "seconds": left_out,
        "seconds_computing_all": whole,
        "ratio": statistics.median(all_ / some for all_, some in zip(whole, left_out, strict=True)),
        "gradient_norm": float(np.linalg.norm(expected)),
        "largest_difference": float(np.abs(found - expected).max()) / scale,
    }


def main() -> int:
    """Print the figures; 1 when gradients differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--problems", type=command.count, default=32)
    parser.add_argument("--n", type=command.count, default=64)
    parser.add_argument("--tokens", type=command.count, default=16)
    parser.add_argument(
        "--without-signal", type=command.share, default=0.8, help="share of groups without a right answer"
    )
    parser.add_argument("--repetitions", type=command.count, default=9)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    figures = measure(
        arguments.problems, arguments.n, arguments.tokens, arguments.without_signal, arguments.repetitions
    )
    equal = figures["largest_difference"] <= LARGEST_DIFFERENCE
    if arguments.format == "json":
        print(json.dumps(figures, indent=1))
    else:
        some, everything = (
            statistics.median(figures["seconds"]),
            statistics.median(figures["seconds_computing_all"]),
        )
        print(
            f"{figures['answers']:,} answers, {figures['without_signal']:.0%} of the groups without a right one"
        )
        print(
            f"update: {some:.3f} s; computing every answer: {everything:.3f} s; {figures['ratio']:.2f} times as fast (median)"
        )
        print(
            f"gradients differ by at most {figures['largest_difference']:.1g} at a norm of {figures['gradient_norm']:.3g}"
        )
    return 0 if equal and figures["gradient_norm"] > 0 else 1


if __name__ == "__main__":
    command.run(main)
