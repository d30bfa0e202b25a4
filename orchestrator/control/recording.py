"""What becomes of a phase that was served: a line in the run folder, knowledge of costs, figures in MLflow."""

from collections import deque
from collections.abc import Callable
from pathlib import Path

from grids.spec import GridSpec
from orchestrator.clock import Clock
from orchestrator.scheduling.costs import CostModel
from orchestrator.scheduling.usage import Usage, pool_sizes, usage
from orchestrator.store.phase_log import RECENT_RECORDS, PhaseKind, PhaseLog, PhaseRecord, recent_records
from orchestrator.tracking.tracker import Tracker

REPORT_SECONDS = 60.0
"""How often the pools' figures go to MLflow."""


class Recording:
    """Takes the phases of a run. What earlier controllers have recorded is known from the start."""

    def __init__(
        self,
        spec: GridSpec,
        run_dir: Path,
        phase_log: PhaseLog,
        tracker: Tracker,
        clock: Clock,
        trained_rollouts: int,
        say: Callable[[str], None],
        began: float,
    ) -> None:
        """Nothing served yet.

        Args:
            spec: of the run.
            run_dir: its folder.
            phase_log: takes the records.
            tracker: takes the figures.
            clock: of the run.
            trained_rollouts: of all cells before this start, from where the step of MLflow's charts goes on.
            say: tells people when the first rollouts to learn from are there.
            began: Unix seconds at which they began to wait for them.
        """
        self.costs = CostModel(recent_records(run_dir))
        self._sizes = pool_sizes(spec)
        self._log, self._tracker, self._clock = phase_log, tracker, clock
        self._trained_rollouts = trained_rollouts
        self._recent: deque[PhaseRecord] = deque(maxlen=RECENT_RECORDS)
        self._reported_at = clock.monotonic()
        self._say, self._began = say, began
        self._sampled = False

    def take(self, record: PhaseRecord) -> None:
        """A phase was served. Returns at once and never raises."""
        self._log.add(record)
        self.costs.observe(record)
        self._recent.append(record)
        if record.kind is PhaseKind.SAMPLING and not record.failed and not self._sampled:
            self._sampled = True
            self._say(f"first rollouts to learn from {record.ended_at - self._began:.0f} s after the start")
        if record.kind is PhaseKind.LEARNING and not record.failed:
            self._trained_rollouts += record.sequences
        waited = self._clock.monotonic() - self._reported_at
        if waited >= REPORT_SECONDS or waited < 0:  # a clock that went back would put it off
            self._report()

    def _report(self) -> None:
        self._reported_at = self._clock.monotonic()
        found = usage(self._recent, self._sizes)
        if found is not None:
            at_ms = int(self._clock.wall() * 1000)
            self._tracker.grid_metrics(figures(found), self._trained_rollouts, at_ms)


def figures(found: Usage) -> dict[str, float]:
    """The pools' figures as metrics of the grid's run: ``busy_share_<pool>``, ``queue_wait_<pool>`` in seconds, and rates."""
    metrics = {f"busy_share_{pool}": one.busy_share for pool, one in found.pools.items()}
    metrics |= {f"queue_wait_{pool}": one.mean_wait for pool, one in found.pools.items()}
    return metrics | {
        "rollouts_per_second": found.rollouts_per_second,
        "tokens_per_second": found.tokens_per_second,
    }
