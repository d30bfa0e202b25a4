"""Budgets: reading them, saying them, and how many rollouts of an allocation one pays for."""

import re
from dataclasses import dataclass

import numpy as np

from analysis.fitting.logistic import Array
from analysis.fitting.observations import Observations
from analysis.options import ComputeUnit
from grids.errors import UserError

_SECONDS_PER_HOUR = 3600.0
_SIZES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_UNITS: dict[str, tuple[ComputeUnit, float]] = {
    "rollout": ("rollouts", 1.0),
    "token": ("tokens", 1.0),
    "gpu-hour": ("accelerator_seconds", _SECONDS_PER_HOUR),
    "accelerator-hour": ("accelerator_seconds", _SECONDS_PER_HOUR),
    "accelerator-second": ("accelerator_seconds", 1.0),
}
# Commas only where they part thousands, so that a decimal comma is refused and not read as ten times as much.
_BUDGET = re.compile(
    r"(?P<number>(?:\d{1,3}(?:,\d{3})+|\d+(?:_\d+)*)(?:\.\d+)?(?:e[+-]?\d+)?)"
    rf"\s*(?P<size>[kmbgt]?)[-\s]+(?P<unit>{'|'.join(unit.replace('-', '[- ]') for unit in _UNITS)})s?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Budget:
    """How much compute one run may use."""

    amount: float
    """In the unit; above 0."""
    unit: ComputeUnit


def parse_budget(text: str) -> Budget:
    """A budget such as ``5M-rollouts``, ``2.5B tokens``, ``300-gpu-hours`` or ``40_000-accelerator-seconds``.

    k, M, B (or G) and T stand for thousands, millions, billions and trillions, in either case. Raises UserError for any
    other form and for an amount that is not above 0 and finite.
    """
    match = _BUDGET.fullmatch(text.strip())
    amount = 0.0
    if match is not None:
        unit, factor = _UNITS[match["unit"].lower().replace(" ", "-")]
        amount = float(match["number"].replace(",", "")) * _SIZES[match["size"].lower()] * factor
    if match is None or not 0.0 < amount < np.inf:
        raise UserError(
            f"--budget: {text!r} is no budget; give an amount above 0 and its unit, for example 5M-rollouts, 2B-tokens, "
            f"300-gpu-hours (or accelerator-hours, accelerator-seconds); k, M, B and T are understood"
        )
    return Budget(amount, unit)


def budget_words(amount: float, unit: ComputeUnit) -> str:
    """An amount of compute for people: ``5M rollouts``, ``2B tokens``, ``300 accelerator-hours``."""
    if unit == "accelerator_seconds":
        return f"{amount / _SECONDS_PER_HOUR:,.4g} accelerator-hours"
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if amount >= 0.99995 * size:
            return f"{amount / size:.4g}{letter} {unit}"
    return f"{amount:.4g} {unit}"


def rollouts_within(group: Observations, amount: float) -> float:
    """How many rollouts an allocation makes with an amount of compute, in the unit of ``group.compute``.

    The mean over its cells; each cell is interpolated linearly between its evaluations (from nothing at the start) and goes on
    beyond the last one at the rate between its last two. Not rounded to whole steps.
    """
    return float(np.mean([_along(amount, cell.compute, cell.rollouts) for cell in _cells(group)]))


def compute_for(group: Observations, rollouts: float) -> float:
    """What so many rollouts cost, in the unit of ``group.compute``: ``rollouts_within`` the other way round."""
    return float(np.mean([_along(rollouts, cell.rollouts, cell.compute) for cell in _cells(group)]))


def surely_pays_for(group: Observations, rollouts: float) -> float:
    """An amount of compute with which every cell of an allocation, and so their mean, makes at least so many rollouts."""
    return max(_along(rollouts, cell.rollouts, cell.compute) for cell in _cells(group))


def _cells(group: Observations) -> list[Observations]:
    return [group.of_cell(index) for index in range(len(group.cells))]


def _along(at: float, x: Array, y: Array) -> float:
    """y at one place of a line through the origin and points with ascending x and y."""
    x, firsts = np.unique(x, return_index=True)
    x, y = np.r_[0.0, x], np.r_[0.0, y[firsts]]
    if at <= x[-1]:
        return float(np.interp(at, x, y))
    rate = (y[-1] - y[-2]) / (x[-1] - x[-2])
    return float(y[-1] + rate * (at - x[-1]))
