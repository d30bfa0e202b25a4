"""Bootstrap draws over seeds and over validation problems.

A replicate keeps every cell and every compute mark, and draws anew what is random about a score: which
validation problems the set holds (the same draw for all cells and marks, since all are scored on the same
problems) and which seeds an allocation was trained with.

Where seeds are drawn, their spread already holds the luck of the single answers. Drawing problems by their raw
scores would count that luck again (Owen 2007, "The pigeonhole bootstrap": up to three times), so problems are
then drawn by what evaluations have in common (``common_scores``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student_t

from analysis.fitting.logistic import Array
from analysis.fitting.observations import Allocation, BasePoint, Observations


@dataclass(frozen=True)
class Resampling:
    """What one analysis resamples."""

    replicates: int
    seed: int
    problem_weights: Array | None
    """(P, R): weight of each problem in each replicate, each column summing to 1; None: problems are kept."""
    common: Mapping[Allocation, Array]
    """Of allocations with several seeds: (N, P) ``common_scores`` of their evaluations."""
    over_seeds: bool
    """Whether some allocation has several seeds."""
    missing: tuple[str, ...]
    """What the intervals do not hold, in words."""

    @property
    def over(self) -> tuple[str, ...]:
        """What is drawn anew: ``seeds``, ``problems``, both or nothing."""
        return ("seeds",) * self.over_seeds + ("problems",) * (self.problem_weights is not None)

    def drawn_rewards(self, group: Observations) -> Array:
        """(N, R) rewards of an allocation's evaluations on the drawn problems; (N, 1) where problems are kept."""
        scores = self.common.get(group.allocation, group.scores)
        return self._drawn(group.reward[:, None], scores)

    def drawn_base(self, base: BasePoint) -> Array:
        """(1, R) rewards of the base model on the drawn problems; (1, 1) where problems are kept."""
        return self._drawn(np.array([[base.reward]]), None if base.scores is None else base.scores[None])

    def _drawn(self, reward: Array, scores: Array | None) -> Array:
        weights = self.problem_weights
        if weights is None or scores is None or scores.shape[1] != len(weights):
            return reward
        return scores @ weights

    def drawn_seeds(self, group: Observations, deviations: Array) -> Array:
        """(N, R) what drawing other seeds adds to each evaluation; (N, 1) zeros for a single seed.

        deviations: (N,) reward of each evaluation less what its allocation has there. One standard normal multiplier
        holds for all evaluations of a seed, so curves move as wholes; the factor makes the variance of a mean over S seeds
        unbiased also for few (a multiplier bootstrap). Drawing whole seeds with replacement instead could never leave the
        range of the S that there are.
        """
        seeds = len(group.cells)
        if seeds < 2:
            return np.zeros((len(deviations), 1))
        key = [self.seed, group.allocation.problems_per_batch, group.allocation.rollouts_per_problem]
        rng = np.random.default_rng(key)  # of its own, so that cells added later leave the draw as it is
        multipliers = rng.standard_normal((seeds, self.replicates)) * np.sqrt(seeds / (seeds - 1.0))
        return np.asarray(deviations[:, None] * multipliers[group.cell_index])


def plan_resampling(observations: Sequence[Observations], replicates: int, seed: int) -> Resampling:
    """What can be drawn anew in these observations, and what cannot, in words."""
    sizes = [0 if group.scores is None else group.scores.shape[1] for group in observations]
    problems = max(filter(None, sizes), key=sizes.count, default=0)
    without = [group for group, size in zip(observations, sizes, strict=True) if size != problems]
    seeds = sorted({len(group.cells) for group in observations})
    missing = []
    if not replicates:
        missing.append("everything: no replicates were asked for")
    elif not problems:
        missing.append("validation problems: evaluations have no per-problem scores (eval_right)")
    elif without:
        names = ", ".join(group.allocation.name for group in without)
        missing.append(
            f"validation problems of {names}: not every evaluation has per-problem scores (eval_right)"
        )
    if replicates and seeds and seeds[0] == 1:
        single = [group.allocation.name for group in observations if len(group.cells) == 1]
        which = (
            "there is one seed only" if seeds[-1] == 1 else f"{len(single)} allocations have one seed only"
        )
        missing.append(f"seeds: {which}, so the luck of a training run is not in the intervals")
    few = next((count for count in seeds if 1 < count <= 5), None)
    if replicates and few:
        # The multipliers are normal; with a variance from S seeds, Student's t with S - 1 degrees is meant.
        share = 2.0 * float(student_t.cdf(1.645, few - 1)) - 1.0
        missing.append(
            f"the doubt about the spread itself: from {few} seeds a single curve's 90 % interval over seeds holds the truth "
            f"about {share:.0%} of the time; what many allocations decide together is hardly touched"
        )
    weights = None
    if problems and replicates:
        rng = np.random.default_rng([seed, problems])
        weights = rng.multinomial(problems, np.full(problems, 1.0 / problems), size=replicates).T / problems
    several = bool(seeds) and seeds[-1] > 1
    return Resampling(
        replicates=replicates,
        seed=seed,
        problem_weights=weights,
        common=_common_by_allocation(observations, problems) if weights is not None and several else {},
        over_seeds=several and replicates > 0,
        missing=tuple(missing),
    )


def common_scores(scores: Array) -> Array:
    """Per-problem scores without what is particular to one evaluation: the luck of its answers.

    scores: (N, P), N evaluations on the same P problems. Each row's deviations from its mean are replaced by their
    projection on the principal components that stand out from noise: the singular values above the optimal hard
    threshold for unknown noise, omega(beta) times their median (Gavish and Donoho 2014). Row means stay.
    """
    means = scores.mean(axis=1, keepdims=True)
    deviations = scores - means
    few_rows = len(scores) < scores.shape[1]
    square = deviations @ deviations.T if few_rows else deviations.T @ deviations  # of the shorter side
    squares, vectors = np.linalg.eigh(square)
    values = np.sqrt(np.maximum(squares, 0.0))
    beta = min(scores.shape) / max(scores.shape)
    omega = 0.56 * beta**3 - 0.95 * beta**2 + 1.82 * beta + 1.43
    kept = vectors[:, values > omega * np.median(values)]
    return means + (kept @ (kept.T @ deviations) if few_rows else (deviations @ kept) @ kept.T)


def _common_by_allocation(observations: Sequence[Observations], problems: int) -> dict[Allocation, Array]:
    scored = [g for g in observations if g.scores is not None and g.scores.shape[1] == problems]
    found = [group.scores for group in scored if group.scores is not None]
    parts = np.split(common_scores(np.concatenate(found)), np.cumsum([len(scores) for scores in found])[:-1])
    return {group.allocation: part for group, part in zip(scored, parts, strict=True) if len(group.cells) > 1}
