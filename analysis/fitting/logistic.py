"""Least squares with a bounded logistic, for many data sets at once, to the global optimum.

    y = low (1 - u) + high u,   u = 1 / (1 + exp(-slope (x - middle))),   floor <= low <= high <= cap

The reward curves and the allocation law are both of this form. Given (middle, slope), the best levels are a
convex quadratic programme in two unknowns, solved in closed form; so only (middle, slope) are searched
(variable projection, Golub and Pereyra 1973): first over a mesh, which needs no starting values, then by
Levenberg-Marquardt steps with Kaufman's projected Jacobian (1975) from the best mesh points.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

_ITERATIONS = (
    60  # for each start; most data sets need about ten in all, and those that are done are not touched again
)
_BOUND_TOLERANCE = 1e-3  # share of a parameter's allowed width that counts as resting on the bound


@dataclass(frozen=True)
class Limits:
    """What the four parameters may be."""

    floor: float
    """Smallest ``low``."""
    cap: float
    """Largest ``high``."""
    middle: tuple[float, float]
    slope: tuple[float, float]
    """Both ends above 0."""


@dataclass(frozen=True)
class Logistics:
    """Fits to B data sets; every array has shape (B,)."""

    low: Array
    high: Array
    middle: Array
    slope: Array
    sse: Array
    """Weighted sum of squared residuals."""
    converged: NDArray[np.bool_]

    def predict(self, x: ArrayLike) -> Array:
        """Values at x, shape (points, B)."""
        points = np.asarray(x, dtype=np.float64)
        unit = logistic(self.slope * (points[:, None] - self.middle))
        return self.low + (self.high - self.low) * unit

    def __getitem__(self, index: NDArray[np.intp]) -> "Logistics":
        """Some of the data sets."""
        return Logistics(*(np.asarray(getattr(self, field.name))[index] for field in fields(self)))


def logistic(z: ArrayLike) -> Array:
    """1 / (1 + exp(-z)), same shape; z may be infinite."""
    return 1.0 / (1.0 + np.exp(-np.clip(z, -40.0, 40.0)))


def fit_logistics(x: Array, y: Array, weights: Array, limits: Limits, starts: int = 1) -> Logistics:
    """The best fit to each column of ``y``.

    x: shape (N,), may hold -inf (where y is ``low``). y: shape (N, B). weights: shape (N, 1), or (N, B) where
    they differ between the data sets; not negative. starts: mesh points, of different slopes, that are
    refined for each data set.
    """
    begin_middle, begin_slope = _best_of_mesh(x, y, weights, limits, starts)
    tiled = np.tile(y, (1, starts))
    tiled_weights = np.tile(weights, (1, starts)) if weights.shape[1] > 1 else weights
    begin = np.stack([begin_middle.ravel(), np.log(begin_slope.ravel())])
    refined = _refine(x, tiled, tiled_weights, limits, begin, _ITERATIONS * starts)
    if starts == 1:
        return refined
    sse = refined.sse.reshape(starts, -1)
    columns = sse.shape[1]
    return refined[sse.argmin(axis=0) * columns + np.arange(columns)]


def on_bounds(fit: Logistics, limits: Limits) -> list[dict[str, str]]:
    """For each data set the parameters that rest on a bound: name to ``lower`` or ``upper``; ``gain`` at its
    lower bound means low = high."""
    span = limits.cap - limits.floor
    checks = (
        ("low", fit.low, limits.floor, limits.cap, span),
        ("high", fit.high, -np.inf, limits.cap, span),
        ("gain", fit.high - fit.low, 0.0, np.inf, 1e-3 * span),
        ("middle", fit.middle, *limits.middle, limits.middle[1] - limits.middle[0]),
        ("slope", np.log(fit.slope), *np.log(limits.slope), np.log(limits.slope[1] / limits.slope[0])),
    )
    found: list[dict[str, str]] = [{} for _ in fit.low]
    for name, values, lower, upper, width in checks:
        for side, distance in (("lower", values - lower), ("upper", upper - values)):
            for index in np.flatnonzero(distance <= _BOUND_TOLERANCE * width):
                found[index][name] = side
    return found


def _mesh(x: Array, limits: Limits) -> list[tuple[float, Array]]:
    """Slopes and, for each, the middles to try: as far apart as a curve of that slope is wide, and no further
    outside the points than it can be told from a level line."""
    finite = x[np.isfinite(x)]
    first, last = float(finite.min()), float(finite.max())
    narrowest = max(last - first, 1e-9) / 60.0
    mesh = []
    for slope in np.geomspace(*limits.slope, 12):
        low, high = max(limits.middle[0], first - 4.0 / slope), min(limits.middle[1], last + 4.0 / slope)
        count = 1 + int(np.ceil((high - low) / max(0.7 / slope, narrowest)))
        mesh.append((float(slope), np.linspace(low, high, max(count, 3))))
    return mesh


def _best_of_mesh(x: Array, y: Array, weights: Array, limits: Limits, starts: int) -> tuple[Array, Array]:
    """The mesh's best (middle, slope) of each data set for the ``starts`` best slopes, shapes (starts, B)."""
    mesh = _mesh(x, limits)
    wy = weights * y
    total, ysum, yysum = weights.sum(axis=0), wy.sum(axis=0), (wy * y).sum(axis=0)
    best_sse = np.empty((len(mesh), y.shape[1]))
    best_middle = np.empty((len(mesh), y.shape[1]))
    for index, (slope, middles) in enumerate(mesh):
        unit = logistic(slope * (x - middles[:, None]))  # (middles, N)
        sums = _Sums(total, unit @ weights, (unit * unit) @ weights, ysum, unit @ wy, yysum)
        sse = _cost_of_allowed_levels(sums, limits)
        leader = sse.argmin(axis=0)
        best_sse[index] = sse[leader, np.arange(y.shape[1])]
        best_middle[index] = middles[leader]
    order = np.argsort(best_sse, axis=0, kind="stable")[:starts]
    slopes = np.array([slope for slope, _middles in mesh])
    return np.take_along_axis(best_middle, order, axis=0), slopes[order]


@dataclass(frozen=True)
class _Sums:
    """Weighted sums over the points, each broadcastable to one common shape."""

    w: Array
    u: Array
    uu: Array
    y: Array
    uy: Array
    yy: Array


@dataclass(frozen=True)
class _Levels:
    low: Array
    high: Array
    sse: Array
    edge: NDArray[np.int8]
    """Which bound holds: _INSIDE none, _LOW low = floor, _HIGH high = cap, _LEVEL low = high."""


_INSIDE, _LOW, _HIGH, _LEVEL = 0, 1, 2, 3


def _bounded_levels(sums: _Sums, limits: Limits) -> _Levels:
    """The best levels: the unbounded solution where it is allowed, else the best edge of the triangle floor
    <= low <= high <= cap."""
    mean_u, mean_y = sums.u / sums.w, sums.y / sums.w
    spread = sums.uu - sums.u * mean_u
    inverse = np.where(spread > 1e-12 * sums.w, 1.0 / np.maximum(spread, 1e-300), 0.0)
    together = sums.uy - sums.y * mean_u
    gain = together * inverse
    low = mean_y - gain * mean_u
    high = low + gain
    sse = (sums.yy - sums.y * mean_y) - gain * together
    edge = np.zeros(sse.shape, dtype=np.int8)
    outside = (gain < 0.0) | (low < limits.floor) | (high > limits.cap)
    if outside.any():
        some = _Sums(*(np.broadcast_to(getattr(sums, f.name), sse.shape)[outside] for f in fields(sums)))
        low[outside], high[outside], sse[outside], edge[outside] = _best_edge(some, limits)
    return _Levels(low, high, np.maximum(sse, 0.0), edge)


def _cost_of_allowed_levels(sums: _Sums, limits: Limits) -> Array:
    """The cost of the unbounded levels moved into their bounds: an upper bound of the best cost, and far cheaper."""
    mean_u, mean_y = sums.u / sums.w, sums.y / sums.w
    spread = sums.uu - sums.u * mean_u
    inverse = np.where(spread > 1e-12 * sums.w, 1.0 / np.maximum(spread, 1e-300), 0.0)
    together = sums.uy - sums.y * mean_u
    gain = np.maximum(together * inverse, 0.0)
    low = np.clip(mean_y - gain * mean_u, limits.floor, limits.cap)
    gain = np.minimum(gain, limits.cap - low)
    off = mean_y - low - gain * mean_u
    return (sums.yy - sums.y * mean_y) + sums.w * off * off + gain * (gain * spread - 2.0 * together)


def _best_edge(sums: _Sums, limits: Limits) -> tuple[Array, Array, Array, NDArray[np.int8]]:
    """(low, high, sse, edge) of the best edge of the triangle; all one-dimensional."""
    aa, ab, bb, ay, by = _normal(sums)

    def cost(low: Array | float, high: Array | float) -> Array:
        return (
            sums.yy - 2.0 * (low * ay + high * by) + low * low * aa + 2.0 * low * high * ab + high * high * bb
        )

    high = np.clip((by - limits.floor * ab) / np.maximum(bb, 1e-300), limits.floor, limits.cap)
    low = np.clip((ay - limits.cap * ab) / np.maximum(aa, 1e-300), limits.floor, limits.cap)
    level = np.clip(sums.y / sums.w, limits.floor, limits.cap)
    floor, cap = np.full_like(level, limits.floor), np.full_like(level, limits.cap)
    costs = np.stack([cost(floor, high), cost(low, cap), cost(level, level)])
    best, at = costs.argmin(axis=0), np.arange(costs.shape[1])
    lows, highs = np.stack([floor, low, level]), np.stack([high, cap, level])
    return lows[best, at], highs[best, at], costs[best, at], (best + _LOW).astype(np.int8)


def _normal(sums: _Sums) -> tuple[Array, Array, Array, Array, Array]:
    """Normal equations of (low, high), whose basis is (1 - u, u): entries 00, 01, 11 and the right-hand side."""
    return sums.w - 2.0 * sums.u + sums.uu, sums.u - sums.uu, sums.uu, sums.y - sums.uy, sums.uy


def _inverse_of_free(sums: _Sums, edge: NDArray[np.int8]) -> tuple[Array, Array, Array]:
    """Entries 00, 01, 11 of the inverse normal matrix of those levels that no bound holds."""
    aa, ab, bb, _, _ = _normal(sums)
    inside = edge == _INSIDE
    det = np.where(inside, np.maximum(aa * bb - ab * ab, 1e-300), 1.0)
    return (
        np.where(inside, bb / det, np.where(edge == _HIGH, 1.0 / np.maximum(aa, 1e-300), 0.0)),
        np.where(inside, -ab / det, 0.0),
        np.where(inside, aa / det, np.where(edge == _LOW, 1.0 / np.maximum(bb, 1e-300), 0.0)),
    )


def _refine(x: Array, y: Array, weights: Array, limits: Limits, theta: Array, iterations: int) -> Logistics:
    """Levenberg-Marquardt on (middle, log slope); data sets that have converged are left out of later steps."""
    columns = y.shape[1]
    log_limits = (np.log(limits.slope[0]), np.log(limits.slope[1]))
    state = _evaluate(x, y, weights, limits, theta)
    result = {name: np.zeros(columns) for name in ("low", "high", "middle", "slope", "sse")}
    converged = np.zeros(columns, dtype=bool)
    active = np.arange(columns)
    damping = np.full(columns, 1e-3)

    def keep(which: NDArray[np.bool_]) -> None:
        index = active[which]
        result["low"][index], result["high"][index] = state.low[which], state.high[which]
        result["middle"][index], result["slope"][index] = theta[0][which], np.exp(theta[1][which])
        result["sse"][index] = state.sse[which]

    for _ in range(iterations):
        step = _step(state, theta, damping, limits.middle, log_limits)
        trial = np.stack(
            [np.clip(theta[0] + step[0], *limits.middle), np.clip(theta[1] + step[1], *log_limits)]
        )
        moved = np.abs(trial - theta)
        new = _evaluate(x, y, weights, limits, trial)
        better = new.sse < state.sse
        gained = np.where(better, state.sse - new.sse, 0.0)
        small_step = (moved[0] < 1e-9) & (moved[1] < 1e-9)
        done = small_step | (better & (gained <= 1e-9 * state.sse)) | (damping > 1e12)
        theta = np.where(better, trial, theta)
        state = state.choose(better, new)
        damping = np.where(better, damping * 0.2, damping * 8.0)
        if done.any():
            keep(done)
            converged[active[done]] = True
            rest = ~done
            active, theta, damping = active[rest], theta[:, rest], damping[rest]
            if not len(active):
                break
            state = state.subset(rest)
            y = y[:, rest]
            weights = weights[:, rest] if weights.shape[1] > 1 else weights
    keep(np.ones(len(active), dtype=bool))
    return Logistics(**result, converged=converged)


@dataclass(frozen=True)
class _State:
    """At one (middle, log slope) of each data set: the levels, the cost and the projected normal equations."""

    low: Array
    high: Array
    sse: Array
    h11: Array
    h12: Array
    h22: Array
    g1: Array
    g2: Array

    def _map(self, function: Callable[[str, Array], Array]) -> "_State":
        return _State(*(function(field.name, getattr(self, field.name)) for field in fields(self)))

    def choose(self, take_new: NDArray[np.bool_], new: "_State") -> "_State":
        return self._map(lambda name, value: np.where(take_new, getattr(new, name), value))

    def subset(self, which: NDArray[np.bool_]) -> "_State":
        return self._map(lambda _name, value: value[which])


def _evaluate(x: Array, y: Array, weights: Array, limits: Limits, theta: Array) -> _State:
    slope = np.exp(theta[1])
    z = np.clip(slope * (x[:, None] - theta[0]), -40.0, 40.0)
    unit = 1.0 / (1.0 + np.exp(-z))

    def total(*factors: Array) -> Array:
        """The weighted sum over the points of a product."""
        if weights.shape[1] == 1 and len(factors) == 2:
            return np.einsum("n,nb,nb->b", weights[:, 0], *factors)
        product = factors[0] * factors[1] if len(factors) == 2 else factors[0]
        return weights[:, 0] @ product if weights.shape[1] == 1 else np.einsum("nb,nb->b", weights, product)

    sums = _Sums(weights.sum(axis=0), total(unit), total(unit, unit), total(y), total(unit, y), total(y, y))
    best = _bounded_levels(sums, limits)
    gain = best.high - best.low
    residual = y - best.low - gain * unit
    sse = total(residual, residual)  # again from the residuals: the sums above cancel where the fit is good
    bell = unit * (1.0 - unit)
    bell_z = bell * z
    # Jacobian of the fitted values: -gain slope bell by middle, gain bell z by log slope.
    scale1, scale2 = -gain * slope, gain
    b_u, b_1, z_u, z_1 = total(bell, unit), total(bell), total(bell_z, unit), total(bell_z)
    on_low1, on_high1 = scale1 * (b_1 - b_u), scale1 * b_u
    on_low2, on_high2 = scale2 * (z_1 - z_u), scale2 * z_u
    i00, i01, i11 = _inverse_of_free(sums, best.edge)

    def projected(p_low: Array, p_high: Array, q_low: Array, q_high: Array) -> Array:
        return p_low * (i00 * q_low + i01 * q_high) + p_high * (i01 * q_low + i11 * q_high)

    return _State(
        low=best.low,
        high=best.high,
        sse=sse,
        h11=scale1 * scale1 * total(bell, bell) - projected(on_low1, on_high1, on_low1, on_high1),
        h12=scale1 * scale2 * total(bell, bell_z) - projected(on_low1, on_high1, on_low2, on_high2),
        h22=scale2 * scale2 * total(bell_z, bell_z) - projected(on_low2, on_high2, on_low2, on_high2),
        g1=scale1 * total(bell, residual),
        g2=scale2 * total(bell_z, residual),
    )


def _step(
    state: _State, theta: Array, damping: Array, middle: tuple[float, float], log_slope: tuple[float, float]
) -> Array:
    """The damped step, shape (2, B); a parameter on a bound that would leave its range stays."""

    def stuck(value: Array, gradient: Array, limits: tuple[float, float]) -> NDArray[np.bool_]:
        return ((value <= limits[0]) & (gradient < 0)) | ((value >= limits[1]) & (gradient > 0))

    tiny = 1e-300
    a = np.maximum(state.h11, 0.0) * (1.0 + damping) + tiny
    c = np.maximum(state.h22, 0.0) * (1.0 + damping) + tiny
    stuck1, stuck2 = stuck(theta[0], state.g1, middle), stuck(theta[1], state.g2, log_slope)
    b = np.where(stuck1 | stuck2, 0.0, state.h12)
    g1, g2 = np.where(stuck1, 0.0, state.g1), np.where(stuck2, 0.0, state.g2)
    det = a * c - b * b
    good = det > 1e-14 * a * c
    safe = np.where(good, det, 1.0)
    step1 = np.where(good, (c * g1 - b * g2) / safe, g1 / a)
    step2 = np.where(good, (a * g2 - b * g1) / safe, g2 / c)
    # A long way in one step leaves the region in which the linearisation means anything.
    return np.stack([np.clip(step1, -1.0, 1.0), np.clip(step2, -1.5, 1.5)])
