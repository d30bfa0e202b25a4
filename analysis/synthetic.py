"""Synthetic grids whose allocation law is known, to test and to show the analysis with.

**The law.** log2 n*(C) = L / (1 + exp(-k (log10 C - log10 C0))) + b. A grid holds some values of n only, so
the compute-optimal n of a synthetic grid is the value nearest to the law in log2: two neighbours cross
exactly where the law passes the middle between them.

**The curves.** Each n has a bounded monotone sigmoid of compute,

    R_n(C) = R0 + g_n C^s / (C^s + m_n^s),

with one R0 and one s for all. Since 1 / (R_n - R0) = 1/g_n + (m_n^s / g_n) C^-s, the best n is the lowest of
straight lines in C^-s. Gains g_n that rise with n give falling intercepts, and the slopes follow from the
crossings: m_j^s/g_j = m_i^s/g_i + (1/g_i - 1/g_j) C_ij^s for neighbours i < j that cross at C_ij. Rising
crossings make these lines the corners of one envelope, so no other n comes between. Values of n that the law
never reaches never lead: above the plateau, n has the gain of the last leader and a midpoint that is
``LAG`` decades later for each value; below the floor, n has a lower gain and the midpoint of the first leader.

**Problems per batch.** B_p scales the gain by 1 - BATCH_PENALTY (log2 B_p - log2 BEST_PROBLEMS_PER_BATCH)^2, for
all n alike, so the law is the same at every B_p, and with B_p free it is that of the best B_p.

**Noise.** Each seed of an allocation has its own gain (relative sd ``GAIN_SD``) and log10 midpoint (sd
``LOG10_MIDPOINT_SD``), both with mean zero. The P validation problems are drawn from a population, the same for
all cells of a grid: problem j has a latent d_j, uniform in [-1, 1], and is answered rightly with probability
R + d_j R (1 - R), whose mean over the population is R. Each of the K answers to a problem is independent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from analysis.tables import GridTables
from grids.expansion import Cell, evaluated_steps
from grids.spec import EvaluationSpec

START = 0.45
"""R0, the base model's expected score."""
STEEPNESS = 1.3
"""s."""
FIRST_GAIN = 0.15
"""Gain of the smallest n of the grid."""
GAIN_PER_DOUBLING = 0.03
"""What a doubling of n adds to the gain, up to the last n that leads."""
LAG = 0.15
"""Decades by which each n above the plateau is later than the one before it."""
BEST_PROBLEMS_PER_BATCH = 64
BATCH_PENALTY = 0.005
"""Share of the gain that is lost one doubling of B_p away from the best."""
GAIN_SD = 0.01
LOG10_MIDPOINT_SD = 0.02
TRAINING_PROBLEMS = 6000
"""D, which epochs count."""


@dataclass(frozen=True)
class SyntheticLaw:
    """The law that a synthetic grid follows."""

    rise: float
    """L, doublings of n."""
    steepness: float
    """k, per decade of compute; above zero."""
    log10_midpoint: float
    """log10 C0."""
    log2_floor: float
    """b."""

    def log2_n(self, compute: ArrayLike) -> NDArray[np.float64]:
        """log2 n*(C) before it is rounded to the values of a grid; same shape as compute, which is above 0."""
        z = self.steepness * (np.log10(np.asarray(compute, dtype=np.float64)) - self.log10_midpoint)
        return self.rise / (1.0 + np.exp(-z)) + self.log2_floor

    def reaches(self, log2_n: float) -> float:
        """The compute C at which the law passes log2 n: 0 at or below the floor, infinite from the plateau up."""
        share = (log2_n - self.log2_floor) / self.rise
        if share <= 0.0:
            return 0.0
        if share >= 1.0:
            return float(np.inf)
        return float(10.0 ** (self.log10_midpoint - np.log(1.0 / share - 1.0) / self.steepness))


PAPER_LAW = SyntheticLaw(rise=6.09, steepness=4.75, log10_midpoint=5.84, log2_floor=2.73)
"""The paper's fit at B_p = 32 on the Easy set (arXiv 2603.12151): n* from 8 to 512."""


@dataclass(frozen=True)
class SyntheticGrid:
    """A grid to generate. The defaults have the paper's Easy size: 39 allocations, here with three seeds."""

    law: SyntheticLaw | None = PAPER_LAW
    """None: all n follow the curve of the smallest, so that no n is better than another."""
    problems_per_batch: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    """B_p, ascending."""
    rollouts_per_problem: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    """n, ascending."""
    max_batch_rollouts: int = 65_536
    seeds: tuple[int, ...] = (0, 1, 2)
    compute_rollouts: int = 2**23
    """C_max of each cell."""
    evaluation: EvaluationSpec = field(
        default_factory=lambda: EvaluationSpec(first_mark=2**15, marks_per_doubling=5)
    )
    """The compute marks, as in a real grid (41 up to C_max), and K."""
    validation_problems: int = 300
    """P."""
    first_midpoint: float = 1e5
    """Compute at half the gain, in rollouts, of the first n that leads. It sets the scale of compute."""

    def allocations(self) -> list[tuple[int, int]]:
        """All (B_p, n) whose batch fits, ordered by B_p and n."""
        return [
            (problems, rollouts)
            for problems in self.problems_per_batch
            for rollouts in self.rollouts_per_problem
            if problems * rollouts <= self.max_batch_rollouts
        ]


FLAT = SyntheticGrid(law=None)
"""No n is better than another."""
BEYOND_THE_EDGE = SyntheticGrid(law=SyntheticLaw(10.0, 4.0, 6.4, 2.73))
"""The law still rises where the grid's largest n takes the lead, and would level at n = 6,800."""
ONE_N = SyntheticGrid(rollouts_per_problem=(64,))
"""Nothing to allocate."""


def synthetic_grid(design: SyntheticGrid, rng: np.random.Generator) -> GridTables:
    """Generate a grid with noise: its tidy history, with per-problem scores, and the base model's row.

    The same design and generator state give the same grid. Every cell is finished.
    """
    history = _rows(design, design.seeds)
    # One jitter for each cell (allocation and seed), spread over the cell's rows.
    cells, of_row = np.unique(history["cell"].to_numpy(dtype=str), return_inverse=True)
    gain = (1.0 + GAIN_SD * rng.standard_normal(len(cells)))[of_row]
    shift = (LOG10_MIDPOINT_SD * rng.standard_normal(len(cells)))[of_row]
    reward = np.clip(_reward(design, history, gain, 10.0**shift), 0.0, 1.0)

    latent = rng.uniform(-1.0, 1.0, design.validation_problems)
    answers = design.evaluation.samples_per_problem
    right = _right_answers(np.append(reward, START), latent, answers, rng)
    return _tables(history, _scores(right, answers), right)


def true_grid(design: SyntheticGrid, marks_per_doubling: int = 60) -> GridTables:
    """The same grid without noise on dense marks: expected scores, one cell for each allocation, no jitter.

    There is no ``eval_right``. best_at_K and worst_at_K are expectations over the population of problems.
    """
    dense = replace(
        design, evaluation=design.evaluation.model_copy(update={"marks_per_doubling": marks_per_doubling})
    )
    history = _rows(dense, seeds=(0,))
    reward = np.append(_reward(design, history, 1.0, 1.0), START)
    return _tables(history, _expected_scores(reward, design.evaluation.samples_per_problem), right=None)


def expected_reward(
    design: SyntheticGrid, problems_per_batch: int, rollouts_per_problem: int, compute: ArrayLike
) -> NDArray[np.float64]:
    """The population's expected avg@K of an allocation at each compute (same shape, rollouts above 0)."""
    gain, midpoint = _population_curves(design.law, design.rollouts_per_problem, design.first_midpoint)[
        rollouts_per_problem
    ]
    return _sigmoid(compute, gain * _batch_factor(problems_per_batch), midpoint)


def _sigmoid(compute: ArrayLike, gain: ArrayLike, midpoint: ArrayLike) -> NDArray[np.float64]:
    ratio = np.asarray(midpoint, dtype=np.float64) / np.asarray(compute, dtype=np.float64)
    return START + np.asarray(gain, dtype=np.float64) / (1.0 + ratio**STEEPNESS)


def _batch_factor(problems_per_batch: ArrayLike) -> NDArray[np.float64]:
    doublings = np.log2(np.asarray(problems_per_batch, dtype=np.float64) / BEST_PROBLEMS_PER_BATCH)
    return 1.0 - BATCH_PENALTY * doublings**2


@cache
def _population_curves(
    law: SyntheticLaw | None, values: tuple[int, ...], first_midpoint: float
) -> Mapping[int, tuple[float, float]]:
    """By n: gain and midpoint of its curve at the best B_p."""
    if law is None:
        return dict.fromkeys(values, (FIRST_GAIN, first_midpoint))
    log2_n = np.log2(values)
    crossings = [law.reaches(middle) for middle in (log2_n[:-1] + log2_n[1:]) / 2.0]
    first = sum(crossing == 0.0 for crossing in crossings)
    last = len(values) - 1 - sum(np.isinf(crossing) for crossing in crossings)
    gains = FIRST_GAIN + GAIN_PER_DOUBLING * (np.minimum(log2_n, log2_n[last]) - log2_n[0])
    power = np.full(len(values), first_midpoint**STEEPNESS)  # m^s
    for index in range(first, last):
        at = crossings[index] ** STEEPNESS
        ratio = gains[index + 1] / gains[index]
        power[index + 1] = ratio * power[index] + (ratio - 1.0) * at
    midpoints = power ** (1.0 / STEEPNESS)
    midpoints[last + 1 :] = midpoints[last] * 10.0 ** (LAG * np.arange(1, len(values) - last))
    return {
        n: (float(gain), float(midpoint)) for n, gain, midpoint in zip(values, gains, midpoints, strict=True)
    }


def _rows(design: SyntheticGrid, seeds: Sequence[int]) -> pd.DataFrame:
    """All rows without scores, ordered by cell and step.

    Tokens: answers of 1,200 tokens (C -> 0) that lengthen as (1 + C/10^6)^0.1. Accelerator time: 1.6 s a rollout
    and 60 s a step.
    """
    cells = []
    steps_of_batch: dict[int, list[int]] = {}
    for problems, rollouts in design.allocations():
        batch = problems * rollouts
        if batch not in steps_of_batch:
            cell = Cell(problems, rollouts, 0, design.compute_rollouts // batch, learning_rate=1e-6)
            steps_of_batch[batch] = evaluated_steps(cell, design.evaluation)
        cells += [
            (f"bp{problems}-n{rollouts}-s{seed}", problems, rollouts, seed, steps_of_batch[batch])
            for seed in seeds
        ]
    columns = ["cell", "problems_per_batch", "rollouts_per_problem", "seed", "step"]
    rows = pd.DataFrame(sorted(cells), columns=columns).explode("step", ignore_index=True)
    step = rows["step"].to_numpy(dtype=np.int64)
    compute = step * (rows["problems_per_batch"] * rows["rollouts_per_problem"]).to_numpy()
    tokens = 1200e6 / 1.1 * ((1.0 + compute / 1e6) ** 1.1 - 1.0)
    return rows.assign(
        step=step,
        compute_rollouts=compute,
        compute_tokens=np.rint(tokens).astype(np.int64),
        accelerator_seconds=1.6 * compute + 60.0 * step,
        epochs=step * rows["problems_per_batch"] / TRAINING_PROBLEMS,
    )


def _tables(
    history: pd.DataFrame, scores: Mapping[str, NDArray[np.float64]], right: NDArray[np.int32] | None
) -> GridTables:
    """scores by metric, shape (rows + 1,), and right, shape (rows + 1, problems): the base model stands last."""
    base: dict[str, Any] = {"step": 0, "compute_rollouts": 0}
    base |= {metric: float(values[-1]) for metric, values in scores.items()}
    history = history.assign(**{metric: values[:-1] for metric, values in scores.items()})
    if right is not None:
        history["eval_right"] = list(right[:-1])
        base["eval_right"] = right[-1].tolist()
    return GridTables(
        name="synthetic",
        history=history,
        base=base,
        states=dict.fromkeys(history["cell"].unique(), "finished"),
        reasons={},
        complaints={},
        spec=None,
    )


def _reward(
    design: SyntheticGrid, rows: pd.DataFrame, gain_factor: ArrayLike, midpoint_factor: ArrayLike
) -> NDArray[np.float64]:
    curves = _population_curves(design.law, design.rollouts_per_problem, design.first_midpoint)
    gain, midpoint = np.array([curves[n] for n in rows["rollouts_per_problem"]]).T
    factor = _batch_factor(rows["problems_per_batch"])
    return _sigmoid(rows["compute_rollouts"], gain * factor * gain_factor, midpoint * midpoint_factor)


def _right_answers(
    reward: NDArray[np.float64], latent: NDArray[np.float64], answers: int, rng: np.random.Generator
) -> NDArray[np.int32]:
    """How many of the answers to each problem are right, shape (rows, problems)."""
    probability = reward[:, None] + np.outer(reward * (1.0 - reward), latent)
    return rng.binomial(answers, np.clip(probability, 0.0, 1.0)).astype(np.int32)


def _scores(right: NDArray[np.int32], answers: int) -> dict[str, NDArray[np.float64]]:
    return {
        f"avg_at_{answers}": right.mean(axis=1) / answers,
        f"best_at_{answers}": (right > 0).mean(axis=1),
        f"worst_at_{answers}": (right == answers).mean(axis=1),
    }


def _expected_scores(reward: NDArray[np.float64], answers: int) -> dict[str, NDArray[np.float64]]:
    """Expectations over the population; the quadrature is exact, since they are polynomials in the latent."""
    latent, weights = np.polynomial.legendre.leggauss(answers // 2 + 1)
    probability = reward[:, None] + np.outer(reward * (1.0 - reward), latent)
    weights = weights / 2.0
    return {
        f"avg_at_{answers}": reward,
        f"best_at_{answers}": 1.0 - (1.0 - probability) ** answers @ weights,
        f"worst_at_{answers}": probability**answers @ weights,
    }
