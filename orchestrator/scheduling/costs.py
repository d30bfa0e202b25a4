"""What phases cost, learnt from those that were served."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from orchestrator.store.phase_log import PhaseKind, PhaseRecord

TRAINING = (PhaseKind.SAMPLING, PhaseKind.GRADING, PhaseKind.LEARNING)
"""The phases of a step, in order."""
PRIOR_RECORDS = 0.01
"""Weight of the prior, in records of average size: it decides only what the records leave open."""
UNSEEN_PHASE = 64.0
"""What a phase costs beside its sequences while nothing is known, in sequences."""
REFIT_GROWTH = 1.05
"""A fit serves until there are so many times more records."""


class CostModel:
    """Seconds of a phase, a + b * sequences + c * tokens, for each kind of phase.

    Non-negative least squares over running sums, with a weak prior towards the mean seconds of a sequence (a = c = 0): records of
    one size cannot tell a from b, and are then scaled with the sequences. A member's first call of a kind, also after one that
    failed, loads and compiles things: it counts only where there is nothing else. Failed phases do not count.
    """

    def __init__(self, records: Iterable[PhaseRecord] = ()) -> None:
        """What these records tell."""
        self.observations = 0
        """Records so far."""
        self._sums: defaultdict[PhaseKind, _Sums] = defaultdict(_Sums)
        self._first_sums: defaultdict[PhaseKind, _Sums] = defaultdict(_Sums)
        self._warm: set[tuple[str, PhaseKind]] = set()
        self._evaluations: set[tuple[str, int]] = set()
        self._trained = self._waited = 0.0
        for record in records:
            self.observe(record)

    def observe(self, record: PhaseRecord) -> None:
        """Learn from one more record."""
        self.observations += 1
        member = (record.member, record.kind)
        if record.failed:
            self._warm.discard(member)
            return
        sums = self._sums if member in self._warm else self._first_sums
        self._warm.add(member)
        sums[record.kind].add(record.sequences, record.tokens, record.busy_seconds)
        if record.kind is PhaseKind.EVALUATION:
            self._evaluations.add((record.cell, record.step))
        elif record.kind in TRAINING:
            self._trained += record.busy_seconds
            self._waited += record.waited_seconds

    def knows(self, kind: PhaseKind) -> bool:
        """Whether any phase of this kind has been seen."""
        return kind in self._sums or kind in self._first_sums

    def seconds(self, kind: PhaseKind, sequences: float, tokens: float | None = None) -> float:
        """Expected seconds of a phase; with its kind's mean tokens for each sequence where ``tokens`` is None.

        A kind that was never seen costs what another one of training does. Before there is any the seconds mean nothing, but of
        two cells with as many rollouts the one with more steps takes longer.
        """
        found = self._known(kind) or next((sums for other in TRAINING if (sums := self._known(other))), None)
        return UNSEEN_PHASE + sequences if found is None else found.seconds(sequences, tokens)

    def evaluation_seconds(self, kind: PhaseKind) -> float:
        """Expected seconds of all phases of this kind, sampling or grading, in one evaluation; 0 before any was seen."""
        seen = [sums[kind] for sums in (self._sums, self._first_sums) if kind in sums]
        if not seen or not self._evaluations:
            return 0.0
        calls, sequences, tokens = (sum(getattr(sums, name) for sums in seen) for name in _COUNTS)
        mean = self.seconds(kind, sequences / calls, tokens / calls)
        return mean * calls / len(self._evaluations)

    @property
    def stretch(self) -> float:
        """By what factor waiting in queues lengthens the phases of training; 1 before any was seen."""
        return (self._trained + self._waited) / self._trained if self._trained > 0 else 1.0

    def _known(self, kind: PhaseKind) -> "_Sums | None":
        return self._sums.get(kind) or self._first_sums.get(kind)


_COUNTS = ("calls", "sequences", "tokens")


class _Sums:
    """Running sums of one kind of phase, and the fit that they give."""

    def __init__(self) -> None:
        self.calls = 0
        self.sequences = self.tokens = 0.0
        self._moments = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3
        self._coefficients = (0.0, 0.0, 0.0)
        self._fitted_calls = 0

    def add(self, sequences: int, tokens: int, seconds: float) -> None:
        features = (1.0, float(sequences), float(tokens))
        self.calls += 1
        self.sequences += sequences
        self.tokens += tokens
        for i in range(3):
            self._products[i] += features[i] * seconds
            for j in range(3):
                self._moments[i][j] += features[i] * features[j]

    def seconds(self, sequences: float, tokens: float | None) -> float:
        if self._fitted_calls == 0 or self.calls >= REFIT_GROWTH * self._fitted_calls:
            self._coefficients = _fit(self._moments, self._products)
            self._fitted_calls = self.calls
        if tokens is None:
            tokens = sequences * self.tokens / self.sequences if self.sequences else 0.0
        constant, of_sequence, of_token = self._coefficients
        return constant + of_sequence * sequences + of_token * tokens


def _fit(moments: Sequence[Sequence[float]], products: Sequence[float]) -> tuple[float, float, float]:
    """The (a, b, c) >= 0 that minimise the squared error plus the prior's.

    The optimum under the bounds is the free one of the features that it uses; with three features all subsets can be tried.
    """
    calls = moments[0][0]
    scales = [math.sqrt(moments[i][i] / calls) for i in range(3)]
    # Features of mean square 1: the prior weighs the same in all of them.
    prior = [0.0, 0.0, 0.0]
    if moments[0][1] > 0:
        prior[1] = products[0] / moments[0][1] * scales[1]
    used = [i for i in range(3) if scales[i] > 0]
    best, best_gain = (0.0, 0.0, 0.0), -math.inf
    for size in range(1, len(used) + 1):
        for subset in itertools.combinations(used, size):
            matrix = [
                [moments[i][j] / (scales[i] * scales[j]) + (PRIOR_RECORDS if i == j else 0.0) for j in subset]
                for i in subset
            ]
            right = [products[i] / scales[i] + PRIOR_RECORDS * prior[i] for i in subset]
            values = _solve(matrix, right)
            gain = sum(value * side for value, side in zip(values, right, strict=True))
            if min(values) >= 0 and gain > best_gain:
                found = dict(zip(subset, values, strict=True))
                best_gain = gain
                best = tuple(found.get(i, 0.0) / (scales[i] or 1.0) for i in range(3))  # type: ignore[assignment]
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """The solution of a small positive definite system, by elimination."""
    size = len(right)
    rows = [[*matrix[i], right[i]] for i in range(size)]
    for i in range(size):
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [value - factor * pivot for value, pivot in zip(rows[k], rows[i], strict=True)]
    values = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * values[j] for j in range(i + 1, size))
        values[i] = (rows[i][size] - rest) / rows[i][i]
    return values
