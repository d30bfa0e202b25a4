"""Whether a frontier can tell the allocation law at all, and what it tells."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from analysis.fitting.intervals import Interval, interval
from analysis.fitting.law import MIDPOINT_NAME, MIN_LAW_POINTS, Axis, LawFit, fit_law, fit_laws
from analysis.fitting.logistic import Array, Logistics
from analysis.fitting.observations import Allocation

MIN_GRID_N = 4
"""Fewest values of n in a grid for a law of four parameters."""

MIN_OPTIMAL_N = 3
"""Fewest values that n* must take: with two, every step between them fits equally well."""

ROUNDING_VARIANCE = 1.0 / 12.0
"""Of log2 n where n is rounded to a power of two: no law can be told to fit closer than that."""

_LEVEL = 0.5  # doublings of n by which the plateau may differ from the n* that was seen


@dataclass(frozen=True)
class NStar:
    """n* along a frontier, as the law sees it."""

    x: Array
    """(G,) ascending, on the law's axis; only where at least two values of n were compared."""
    log2_n: Array
    """(G,)"""
    replicates: Array | None
    """(G, R)"""
    grid_n: tuple[int, ...]
    """The values of n that were compared anywhere."""
    evaluations: int
    """How many different computes were evaluated in the range of x: what the points are worth to an
    information criterion, since they lie on curves and are not independent."""
    unrejected_n: tuple[int, ...] | None
    """The values of n that may be the best at every x; None without replicates."""
    edge: Allocation | None
    """The leading allocation with the largest n*, where no larger n was tried that could have led in its place."""
    axis: Axis = "log10"


@dataclass(frozen=True)
class Form:
    """One form of n*, compared with the others."""

    name: Literal["sigmoid", "log-linear", "flat"]
    parameters: int
    sse: float
    aicc: float
    """Akaike's information criterion, corrected for few points; smaller is better."""
    preferred_share: float | None
    """In which share of the bootstrap replicates this form has the smallest AICc; None without replicates."""


@dataclass(frozen=True)
class LawVerdict:
    """What a frontier says about the law: the fit, or why there is none."""

    fit: LawFit | None
    """None when the law is not identified: no parameters are shown then."""
    intervals: dict[str, Interval]
    """Of ``rise``, ``steepness``, ``midpoint``, ``log2_floor`` and ``log2_plateau`` (L + b); empty without replicates."""
    forms: tuple[Form, ...]
    """The law against a log-linear and a flat n*, best first; empty where the law could not be fitted."""
    reasons: tuple[str, ...]
    """Why the law is not identified, in words."""
    notes: tuple[str, ...]
    """What to keep in mind about an identified law, in words: bounds, edges of the grid."""
    plateau_identified: bool
    floor_identified: bool
    replicates: Logistics | None = None
    """The law in each bootstrap replicate."""

    def n_interval(self, value: float, confidence: float) -> Interval | None:
        """The interval of the law's n at a compute (or number of steps); None without replicates."""
        if self.fit is None or self.replicates is None:
            return None
        x = np.log10(value) if self.fit.axis == "log10" else value
        return interval(2.0 ** self.replicates.predict([x])[0], confidence)

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
        x, x0 = ("log10 C" if fit.axis == "log10" else "M"), MIDPOINT_NAME[fit.axis]
        shown = [
            ("L", fit.rise, "rise"),
            ("k", fit.steepness, "steepness"),
            (x0, fit.midpoint, "midpoint"),
            ("b", fit.log2_floor, "log2_floor"),
        ]
        values = ", ".join(f"{name} = {value:.3g}{self._range(key)}" for name, value, key in shown)
        words = f"log2 n* = L / (1 + exp(-k ({x} - {x0}))) + b with {values}"
        if self.plateau_identified:
            low_high = self.intervals.get("log2_plateau")
            words += f"; plateau n = {fit.plateau:.0f}"
            words += f" [{2 ** low_high[0]:.0f}, {2 ** low_high[1]:.0f}]" if low_high else ""
        if self.floor_identified:
            words += f"; floor n = {fit.floor:.0f}"
        return ". ".join((words, *(note[0].upper() + note[1:] for note in self.notes))) + "."

    def _range(self, key: str) -> str:
        return "" if key not in self.intervals else " [{:.3g}, {:.3g}]".format(*self.intervals[key])


def judge_law(stars: NStar, confidence: float) -> LawVerdict:
    """Fit the law to a frontier's n*, if it can be identified."""
    optimal = sorted({int(n) for n in np.rint(2.0**stars.log2_n)})
    values = sorted(stars.grid_n)
    reasons = []
    if not values:
        reasons.append("no allocation could be fitted")
    elif len(values) < MIN_GRID_N:
        reasons.append(
            f"the fitted cells hold {_counted(values)} of n{_listed(values)}, "
            f"and a law of four parameters needs at least {MIN_GRID_N}"
        )
    if len(values) > 1 and len(optimal) < MIN_OPTIMAL_N:
        reasons.append(
            f"n* takes {_counted(optimal)}{_listed(optimal)}, and a curve needs at least {MIN_OPTIMAL_N}"
        )
    if stars.unrejected_n:
        constant = ", ".join(str(n) for n in stars.unrejected_n)
        reasons.append(
            f"n* may be flat: over all computes together, n = {constant} may be the best throughout"
        )
    if not reasons and len(stars.x) < MIN_LAW_POINTS:
        reasons.append(f"two values of n were compared at {len(stars.x)} computes only")
    if reasons:
        return _unidentified(reasons)
    fit, replicates = fit_law(stars.x, stars.log2_n, stars.axis), _replicates(stars)
    forms = _compare_forms(stars, fit, replicates)
    if fit.rise < 0.05:
        return _unidentified(["n* does not rise with compute, and the law can only rise"], forms)
    if forms[0].name == "flat":
        return _unidentified(["a flat n* explains the frontier as well, with fewer parameters"], forms)
    notes = [f"the fit rests on a bound: {words}" for words in fit.on_bound]
    plateau_note = _plateau_note(fit, stars, confidence)
    floor_note = _floor_note(fit, stars)
    if forms[0].name == "log-linear":
        words = "not identified: n* as a power of C explains the frontier as well"
        notes.append(f"saturation {words}")
        plateau_note, floor_note = plateau_note or f"plateau {words}", floor_note or f"floor {words}"
    notes += [note for note in (plateau_note, floor_note) if note]
    return LawVerdict(
        fit=fit,
        intervals=_intervals(replicates, confidence),
        forms=forms,
        reasons=(),
        notes=tuple(notes),
        plateau_identified=plateau_note is None,
        floor_identified=floor_note is None,
        replicates=replicates,
    )


def _replicates(stars: NStar) -> Logistics | None:
    return None if stars.replicates is None else fit_laws(stars.x, stars.replicates, stars.axis)


def _intervals(fits: Logistics | None, confidence: float) -> dict[str, Interval]:
    if fits is None:
        return {}
    return {
        "rise": interval(fits.high - fits.low, confidence),
        "steepness": interval(fits.slope, confidence),
        "midpoint": interval(fits.middle, confidence),
        "log2_floor": interval(fits.low, confidence),
        "log2_plateau": interval(fits.high, confidence),
    }


def _unidentified(reasons: Sequence[str], forms: tuple[Form, ...] = ()) -> LawVerdict:
    return LawVerdict(None, {}, forms, tuple(reasons), (), plateau_identified=False, floor_identified=False)


def _compare_forms(stars: NStar, fit: LawFit, fits: Logistics | None) -> tuple[Form, ...]:
    y = stars.log2_n[:, None]
    sse = {"sigmoid": np.array([fit.sse]), **_simple_sse(stars.x, y)}
    shares: dict[str, float] = {}
    if fits is not None and stars.replicates is not None:
        costs = {"sigmoid": fits.sse, **_simple_sse(stars.x, stars.replicates)}
        scores = np.stack([_aicc(stars, name, value) for name, value in costs.items()])
        won = np.bincount(scores.argmin(axis=0), minlength=len(costs)) / scores.shape[1]
        shares = dict(zip(costs, (float(share) for share in won), strict=True))
    forms = [
        Form(
            name,  # type: ignore[arg-type]
            _PARAMETERS[name],
            float(value[0]),
            float(_aicc(stars, name, value)[0]),
            shares.get(name),
        )
        for name, value in sse.items()
    ]
    return tuple(sorted(forms, key=lambda form: form.aicc))


_PARAMETERS = {"sigmoid": 4, "log-linear": 2, "flat": 1}


def _simple_sse(x: Array, y: Array) -> dict[str, Array]:
    """Sums of squares around a constant and around a line in x, each (R,), for y (G, R)."""
    centred, at = y - y.mean(axis=0), x - x.mean()
    flat = (centred**2).sum(axis=0)
    slope = at @ centred / max(float(at @ at), 1e-300)
    return {"log-linear": flat - slope**2 * float(at @ at), "flat": flat}


def _aicc(stars: NStar, name: str, sse: Array) -> Array:
    """AICc of Gaussian residuals whose variance holds the rounding of n to powers of two."""
    worth = max(min(stars.evaluations, len(stars.x)), 8)
    parameters = _PARAMETERS[name] + 1  # and the variance
    variance = sse / len(stars.x) + ROUNDING_VARIANCE
    correction = 2.0 * parameters * (parameters + 1) / (worth - parameters - 1)
    return worth * np.log(variance) + 2.0 * parameters + correction


def _plateau_note(fit: LawFit, stars: NStar, confidence: float) -> str | None:
    top = max(stars.grid_n)
    if (
        stars.replicates is not None
        and (2.0 ** stars.replicates[-1] > top / 1.5).mean() > (1.0 - confidence) / 2.0
    ):
        return f"plateau not identified: at the largest compute the interval of n* reaches the edge of the grid (largest n = {top})"
    last, largest = float(stars.log2_n[-1]), float(stars.log2_n.max())
    if stars.edge is not None:
        return f"plateau not identified: it rests on the edge of the grid ({stars.edge.name} has no larger n beside it)"
    if np.log2(fit.plateau) - largest > _LEVEL:
        return f"plateau not identified: n* still rises where the observed compute ends (n* = {2**last:.0f})"
    if abs(np.log2(fit.plateau) - last) > _LEVEL:
        return f"plateau not identified: the law levels at n = {fit.plateau:.0f}, where n* is {2**last:.0f}"
    return None


def _floor_note(fit: LawFit, stars: NStar) -> str | None:
    first, smallest = float(stars.log2_n[0]), float(stars.log2_n.min())
    if 2.0**smallest <= min(stars.grid_n):
        return f"floor not identified: it rests on the edge of the grid (smallest n = {min(stars.grid_n)})"
    if abs(fit.log2_floor - first) > _LEVEL:
        return (
            f"floor not identified: n* already rises where the observed compute begins (n* = {2**first:.0f})"
        )
    return None


def _counted(values: list[int]) -> str:
    return f"{len(values) or 'no'} value{'' if len(values) == 1 else 's'}"


def _listed(values: list[int]) -> str:
    return f" ({', '.join(str(value) for value in values)})" if values else ""
