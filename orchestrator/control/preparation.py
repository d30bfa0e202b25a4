"""Pools are shown to serve a grid before its first cell starts."""

import asyncio
from dataclasses import dataclass

from grids.errors import UserError
from grids.spec import GridSpec
from orchestrator.console import format_scores
from orchestrator.control.data import GridData, PromptSet
from orchestrator.control.phases import Phases
from orchestrator.failures.decisions import Decision
from orchestrator.failures.faults import Fault, classify
from orchestrator.failures.ray_errors import root_cause
from orchestrator.pools.agreement import prove_agreement
from orchestrator.pools.pools import Pools
from orchestrator.pools.shared_pool import PoolLost
from orchestrator.pools.supervision import Supervision, persistently
from orchestrator.pools.work import Work
from orchestrator.store.cell_state import CellState
from orchestrator.store.phase_log import PhaseKind
from orchestrator.store.run_store import RunStore


@dataclass(frozen=True)
class Preparation:
    """What the start of a run needs."""

    spec: GridSpec
    data: GridData
    pools: Pools
    run_store: RunStore
    supervision: Supervision

    async def run(self) -> None:
        """Start the pools and prove them: golds fit, weights arrive, the base model is evaluated.

        What dies on the way is started again, as often as the policy lets a cell try.

        Raises:
            PoolLost: a pool cannot be started.
            Disagreement: sampler and learner do not compute the same policy.
            UserError: a gold answer is unfit.
        """
        try:
            await self._start()
            await persistently(self._prove, "start-up", self.spec.failures, self.supervision.say)
        except Exception as error:
            cause = root_cause(error)
            if isinstance(cause, UserError | PoolLost):
                raise cause from error
            raise PoolLost(f"start-up failed: {classify(cause).reason}") from error

    async def _start(self) -> None:
        began = self.supervision.clock.monotonic()
        await self.pools.start()
        self.supervision.say(f"all pools serve after {self.supervision.clock.monotonic() - began:.0f} s")

    async def _prove(self) -> None:
        for group in self.pools.learners:
            await group.open()
        for prompts in (self.data.train, self.data.validation):
            await self._require_sound_golds(prompts)
        difference = await prove_agreement(self.pools, self.data.validation.prompts, self.spec)
        self.supervision.say(
            f"sampler and learner agree to {difference:.1g} in log-probability on perturbed weights"
        )
        if self.run_store.read_base() is None:
            await self._evaluate_base()

    async def _require_sound_golds(self, prompts: PromptSet) -> None:
        unsound = await self.pools.grader.value(
            "unsound_golds", prompts.golds, work=Work(PhaseKind.START_UP, "start-up")
        )
        if unsound:
            first = unsound[0]
            raise UserError(
                f"{prompts.path}, row {prompts.rows[first]}: the gold answer {prompts.golds[first]!r} is empty or not equal "
                f"to itself under the verifier ({len(unsound)} such rows); mend or remove them"
            )

    async def _evaluate_base(self) -> None:
        """The base model's validation at C = 0, once for each run folder."""
        weights = await self.pools.learners[0].slots[0].begin_cell("base", 0, "base", None)

        def repeated(fault: Fault, decision: Decision) -> None:
            self.supervision.say(f"base model: {fault.reason}; {fault.phase} is repeated")

        phases = Phases(self.spec, self.data, self.pools, lambda: CellState(cell="base"), repeated)
        metrics, samples = await phases.evaluate(weights, "base", 0)
        now = int(self.supervision.clock.wall() * 1000)
        row = {"compute_rollouts": 0, **metrics, "logged_at_ms": now, "samples": samples}
        await asyncio.to_thread(self.run_store.write_base, row)
        self.supervision.say(f"base model: {format_scores(metrics)}")
