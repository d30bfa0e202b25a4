"""The allocation law and its fit.

    log2 n*(x) = L / (1 + exp(-k (x - x0))) + b

L is the rise in doublings of n, k the steepness, x0 the place of half the rise, b the log2 of the floor; the
plateau is 2^(L+b). x is log10 C, log10 M or M. Source: "IsoCompute Playbook" (arXiv 2603.12151).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from analysis.fitting.logistic import Array, Limits, Logistics, fit_logistics, logistic, on_bounds

K_BOUNDS = (0.1, 50.0)
"""Bounds on k per decade: beyond 50 the law is a step for every practical spacing of points, below 0.1 a
line. On a linear axis the same numbers hold per half the range of the points."""

LARGEST_LOG2_N = 16.0
"""Bound on L + b."""

MIN_LAW_POINTS = 4
"""Fewest points for a law of four parameters."""

Axis = Literal["log10", "linear"]
MIDPOINT_NAME = {"log10": "log10 C0", "linear": "M0"}
"""What x0 is called on an axis."""
_STARTS = 5


@dataclass(frozen=True)
class LawFit:
    """A fitted law."""

    rise: float
    """L."""
    steepness: float
    """k, per unit of x."""
    midpoint: float
    """x0: log10 C0 on a logarithmic axis."""
    log2_floor: float
    """b."""
    sse: float
    """Sum of squared residuals in log2 n."""
    points: int
    on_bound: tuple[str, ...]
    """Parameters that rest on a bound of the fit, in words."""
    axis: Axis = "log10"

    @property
    def plateau(self) -> float:
        """n at large compute, 2^(L+b)."""
        return float(2.0 ** (self.rise + self.log2_floor))

    @property
    def floor(self) -> float:
        """n at small compute, 2^b."""
        return float(2.0**self.log2_floor)

    def predict(self, value: ArrayLike) -> Array:
        """n* at each compute (or number of steps), same shape, above 0; not yet on the axis of the law."""
        at = np.asarray(value, dtype=np.float64)
        x = np.log10(at) if self.axis == "log10" else at
        return 2.0 ** (self.rise * logistic(self.steepness * (x - self.midpoint)) + self.log2_floor)


def fit_law(x: ArrayLike, log2_n: ArrayLike, axis: Axis = "log10") -> LawFit:
    """Fit the law by least squares, to the global optimum within its bounds.

    x, log2_n: shape (points,), at least four points, x on the law's axis. Bounds: 0 <= b, L >= 0, L + b <= 16, k in
    K_BOUNDS, x0 within one decade of the data (on a linear axis: within half their range). Raises ValueError for too few
    points.
    """
    at, y = np.asarray(x, dtype=np.float64), np.asarray(log2_n, dtype=np.float64)
    if len(at) < MIN_LAW_POINTS:
        raise ValueError(f"{len(at)} points; the law needs at least {MIN_LAW_POINTS}")
    limits = _limits(at, axis)
    fit = fit_logistics(at, y[:, None], np.ones((len(at), 1)), limits, starts=_STARTS)
    ((_, bounds),) = enumerate(on_bounds(fit, limits))
    return LawFit(
        rise=float(fit.high[0] - fit.low[0]),
        steepness=float(fit.slope[0]),
        midpoint=float(fit.middle[0]),
        log2_floor=float(fit.low[0]),
        sse=float(fit.sse[0]),
        points=len(at),
        on_bound=_bound_words(bounds, limits, MIDPOINT_NAME[axis]),
        axis=axis,
    )


def fit_laws(x: Array, log2_n: Array, axis: Axis) -> Logistics:
    """The law fitted to each column of (G, R) replicates of log2 n*."""
    return fit_logistics(x, log2_n, np.ones((len(x), 1)), _limits(x, axis))


def _limits(x: Array, axis: Axis) -> Limits:
    unit = 1.0 if axis == "log10" else max(float(x.max() - x.min()) / 2.0, 1e-12)
    return Limits(
        floor=0.0,
        cap=LARGEST_LOG2_N,
        middle=(float(x.min()) - unit, float(x.max()) + unit),
        slope=(K_BOUNDS[0] / unit, K_BOUNDS[1] / unit),
    )


def _bound_words(bounds: dict[str, str], limits: Limits, midpoint: str) -> tuple[str, ...]:
    named = {
        ("slope", "lower"): f"k at its lower bound {limits.slope[0]:g}",
        ("slope", "upper"): f"k at its upper bound {limits.slope[1]:g}",
        ("middle", "lower"): f"{midpoint} at its lower bound {limits.middle[0]:.3g}",
        ("middle", "upper"): f"{midpoint} at its upper bound {limits.middle[1]:.3g}",
        ("low", "lower"): "b at its lower bound 0",
        ("high", "upper"): f"L + b at its upper bound {limits.cap:g}",
        ("gain", "lower"): "L at its lower bound 0",
    }
    return tuple(named[item] for item in bounds.items() if item in named)
