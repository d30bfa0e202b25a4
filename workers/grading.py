"""From rollouts to rewards, and from rewards to the validation metrics."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from grids.spec import SamplingSpec, VerifierSpec
from workers.rollouts import Rollouts
from workers.verifier import Verifier


@dataclass(frozen=True)
class Grading:
    """Rewards of R rollouts."""

    rewards: np.ndarray
    """[R] float32."""
    failures: int
    """Responses whose grading crashed or hung; each scored 0."""


class Grader:
    """Grades rollouts against the gold answers of their problems."""

    def __init__(self, verifier: VerifierSpec, sampling: SamplingSpec) -> None:
        """Hold a verifier; ``start`` starts its processes."""
        self._verifier = Verifier(verifier.type, verifier.workers, verifier.time_limit_seconds)
        self._truncated_scores_zero = sampling.truncated_answer == "zero"

    @property
    def beats(self) -> int:
        """Signs of progress so far (``Verifier.beats``)."""
        return self._verifier.beats

    def start(self) -> None:
        """Start the verifier's processes; without it they start when they are first needed."""
        self._verifier.start()

    def grade(self, rollouts: Rollouts, golds: list[str]) -> Grading:
        """Rewards of rollouts whose G groups have these G gold answers."""
        grades = self._verifier.grade(
            rollouts.texts, np.repeat(golds, rollouts.rollouts_per_problem).tolist()
        )
        rewards = grades.rewards.astype(np.float32)
        if self._truncated_scores_zero:
            rewards = np.where(rollouts.truncated, np.float32(0), rewards)
        return Grading(rewards, grades.failures)

    def evaluate(
        self, rollouts: Rollouts, golds: list[str], kept: int
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Validation columns of rollouts with k samples a problem, and ``kept`` of them to read.

        Returns:
            (``evaluation_metrics`` with right answers for each problem, response length, truncation and grading failures, samples).
        """
        grading = self.grade(rollouts, golds)
        rewards = grading.rewards.reshape(-1, rollouts.rollouts_per_problem)
        metrics: dict[str, Any] = evaluation_metrics(rewards)
        metrics |= {
            "eval_right": right_answers(rewards),
            "eval_response_tokens": float(rollouts.lengths.mean()),
            "eval_truncated": float(rollouts.truncated.mean()),
            "eval_verifier_failures": float(grading.failures),
        }
        return metrics, kept_samples(rollouts, grading.rewards, golds, kept)

    def probe(self, rollouts: Rollouts, golds: list[str]) -> tuple[dict[str, Any], int]:
        """(columns of the train probe, answers whose grading crashed or hung) of rollouts with k samples a problem."""
        grading = self.grade(rollouts, golds)
        rewards = grading.rewards.reshape(-1, rollouts.rollouts_per_problem)
        columns = {
            f"train_probe_avg_at_{rollouts.rollouts_per_problem}": float(rewards.mean(dtype=np.float64)),
            "train_probe_right": right_answers(rewards),
        }
        return columns, grading.failures

    def unsound_golds(self, golds: list[str]) -> list[int]:
        """Indices of gold answers that are empty or not equal to themselves."""
        return self._verifier.check_golds(golds)


def evaluation_metrics(rewards: np.ndarray) -> dict[str, float]:
    """avg@k, best@k (any right: coverage) and worst@k (all right: sharpening), averaged over problems.

    Args:
        rewards: [P, k] rewards in [0, 1].
    """
    k = rewards.shape[1]
    return {
        f"avg_at_{k}": float(rewards.mean(dtype=np.float64)),
        f"best_at_{k}": float(rewards.max(axis=1).mean(dtype=np.float64)),
        f"worst_at_{k}": float(rewards.min(axis=1).mean(dtype=np.float64)),
    }


def right_answers(rewards: np.ndarray) -> list[int]:
    """How many of the k answers to each problem are right; rewards [P, k] are 0 or 1."""
    counts: list[int] = (rewards == 1).sum(axis=1).tolist()
    return counts


def evenly_spaced(count: int, size: int) -> list[int]:
    """``count`` positions spread over a set of ``size``, both ends included, ascending; all of a smaller set."""
    positions: list[int] = np.linspace(0, size - 1, num=min(count, size)).round().astype(np.int64).tolist()
    return positions


def kept_samples(
    rollouts: Rollouts, rewards: np.ndarray, golds: list[str], kept: int
) -> list[dict[str, Any]]:
    """The first response to each of ``kept`` problems spread evenly over the set, always the same problems."""
    samples = []
    for group in evenly_spaced(kept, len(golds)):
        index = group * rollouts.rollouts_per_problem
        samples.append(
            {
                "problem": group,
                "response": rollouts.texts[index],
                "gold": golds[group],
                "reward": float(rewards[index]),
                "truncated": bool(rollouts.truncated[index]),
            }
        )
    return samples
