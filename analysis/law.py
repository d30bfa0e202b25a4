"""The allocation law of the frontier, and whether a grid can tell it at all.

    log2 n*(C) = L / (1 + exp(-k (log10 C - log10 C0))) + b

L is the rise in doublings of n, k the steepness per decade, C0 the compute at half the rise, b the log2 of
the floor; the plateau is 2^(L+b). Source: "IsoCompute Playbook" (arXiv 2603.12151).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares

from analysis.frontier import FrontierPoint
from analysis.logistic import logistic, starting_points

K_BOUND = 50.0
"""Upper bound on k: beyond it the law is a step for every practical spacing of points."""

MIN_GRID_N = 4
"""Fewest values of n in a grid for a law of four parameters."""

MIN_OPTIMAL_N = 3
"""Fewest values that n* must take: with two, every step between them fits equally well."""

_STARTING_K = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, K_BOUND)
_PARAMETERS = ("L", "k", "log10 C0", "b")
_BOUND_TOLERANCE = 1e-3
_LEVEL = 0.5  # doublings of n by which the plateau may exceed the largest n* that was seen


@dataclass(frozen=True)
class LawFit:
    """A fitted law."""

    rise: float
    """L."""
    steepness: float
    """k."""
    log10_midpoint: float
    """log10 C0."""
    log2_floor: float
    """b."""
    sse: float
    """Sum of squared residuals in log2 n."""
    points: int
    on_bound: tuple[str, ...]
    """Parameters that rest on a bound of the fit, in words."""

    @property
    def plateau(self) -> float:
        """n at large compute, 2^(L+b)."""
        return float(2.0 ** (self.rise + self.log2_floor))

    @property
    def floor(self) -> float:
        """n at small compute, 2^b."""
        return float(2.0**self.log2_floor)

    def predict(self, compute: ArrayLike) -> NDArray[np.float64]:
        """n*(C), same shape as compute; compute > 0."""
        log10_c = np.log10(np.asarray(compute, dtype=np.float64))
        unit = logistic(self.steepness * (log10_c - self.log10_midpoint))
        return 2.0 ** (self.rise * unit + self.log2_floor)


@dataclass(frozen=True)
class LawVerdict:
    """What a frontier says about the law: the fit, or why there is none."""

    fit: LawFit | None
    """None when the law is not identified: no parameters are shown then."""
    reasons: tuple[str, ...]
    """Why the law is not identified, in words."""
    notes: tuple[str, ...]
    """What to keep in mind about an identified law, in words: bounds, edges of the grid."""
    plateau_identified: bool
    floor_identified: bool

    @property
    def identified(self) -> bool:
        """Whether the law's parameters may be read at all."""
        return self.fit is not None

    @property
    def text(self) -> str:
        """The verdict as one paragraph."""
        if self.fit is None:
            return "The law is not identified: " + "; ".join(self.reasons) + "."
        fit = self.fit
        words = (
            f"log2 n*(C) = L / (1 + exp(-k (log10 C - log10 C0))) + b with "
            f"L = {fit.rise:.2f}, k = {fit.steepness:.2f}, "
            f"log10 C0 = {fit.log10_midpoint:.2f}, b = {fit.log2_floor:.2f}"
        )
        if self.plateau_identified:
            words += f"; plateau n = {fit.plateau:.0f}"
        if self.floor_identified:
            words += f"; floor n = {fit.floor:.0f}"
        return ". ".join((words, *(note[0].upper() + note[1:] for note in self.notes))) + "."


def fit_law(log10_c: ArrayLike, log2_n: ArrayLike) -> LawFit:
    """Fit the law by bounded least squares, from the best start for each of several k, and keep the best.

    log10_c, log2_n: shape (points,), at least four points. Bounds: 0 <= L <= 16, 0 <= k <= K_BOUND, log10 C0
    within one decade of the data, 0 <= b <= 16. Raises ValueError for too few points.
    """
    x = np.asarray(log10_c, dtype=np.float64)
    y = np.asarray(log2_n, dtype=np.float64)
    if len(x) < len(_PARAMETERS):
        raise ValueError(f"{len(x)} points; the law needs at least {len(_PARAMETERS)}")
    lower = np.array([0.0, 0.0, x.min() - 1.0, 0.0])
    upper = np.array([16.0, K_BOUND, x.max() + 1.0, 16.0])

    def residuals(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        rise, steepness, mid, low = theta
        return rise * logistic(steepness * (x - mid)) + low - y

    starts = [
        np.clip([rise, k, mid, low], lower + 1e-4, upper - 1e-4)
        for low, rise, mid, k in starting_points(x, y, _STARTING_K)
    ]
    fits = [
        least_squares(residuals, start, bounds=(lower, upper), xtol=1e-10, ftol=1e-10) for start in starts
    ]
    best = min(fits, key=lambda fit: fit.cost)
    margin = _BOUND_TOLERANCE * (upper - lower)
    on_bound = [
        f"{name} at its {side} bound {bound:g}"
        for name, value, low_end, high_end, width in zip(
            _PARAMETERS, best.x, lower, upper, margin, strict=True
        )
        for side, bound in (("lower", low_end), ("upper", high_end))
        if abs(value - bound) <= width
    ]
    rise, steepness, mid, low = (float(value) for value in best.x)
    return LawFit(rise, steepness, mid, low, 2.0 * float(best.cost), len(x), tuple(on_bound))


def judge_law(points: Sequence[FrontierPoint], grid_n: Sequence[int]) -> LawVerdict:
    """Fit the law to a frontier's n*(C) where two or more n were compared, if it can be identified.

    grid_n: the values of n of the cells that were fitted.
    """
    used = [point for point in points if point.is_contested]
    optimal = sorted({point.rollouts_per_problem for point in used})
    values = sorted(set(grid_n))
    reasons = []
    if not values:
        reasons.append("no cell could be fitted")
    elif len(values) < MIN_GRID_N:
        reasons.append(
            f"the fitted cells hold {_counted(values)} of n{_listed(values)}, "
            f"and a law of four parameters needs at least {MIN_GRID_N}"
        )
    if values and len(optimal) < MIN_OPTIMAL_N:
        reasons.append(
            f"n* takes {_counted(optimal)}{_listed(optimal)}, and a curve needs at least {MIN_OPTIMAL_N}"
        )
    if reasons:
        return LawVerdict(None, tuple(reasons), (), plateau_identified=False, floor_identified=False)

    fit = fit_law(
        [np.log10(point.compute_rollouts) for point in used],
        [np.log2(point.rollouts_per_problem) for point in used],
    )
    if {"L at its lower bound 0", "k at its lower bound 0"} & set(fit.on_bound):
        reason = "n* does not rise with compute, and the law can only rise"
        return LawVerdict(None, (reason,), (), plateau_identified=False, floor_identified=False)
    notes = [f"the fit rests on a bound: {words}" for words in fit.on_bound]
    plateau_note = _plateau_note(fit, optimal, values)
    floor_identified = optimal[0] != values[0]
    if plateau_note:
        notes.append(plateau_note)
    if not floor_identified:
        notes.append(f"floor not identified: it rests on the edge of the grid (smallest n = {values[0]})")
    return LawVerdict(fit, (), tuple(notes), plateau_note is None, floor_identified)


def _plateau_note(fit: LawFit, optimal: list[int], values: list[int]) -> str | None:
    if optimal[-1] == values[-1]:
        return f"plateau not identified: it rests on the edge of the grid (largest n = {values[-1]})"
    if np.log2(fit.plateau / optimal[-1]) > _LEVEL:
        return (
            f"plateau not identified: n*(C) still rises where the observed compute ends (n* = {optimal[-1]})"
        )
    return None


def _counted(values: list[int]) -> str:
    return f"{len(values) or 'no'} value{'' if len(values) == 1 else 's'}"


def _listed(values: list[int]) -> str:
    return f" ({', '.join(str(value) for value in values)})" if values else ""
