"""Proof that sampler and learner compute the same policy."""

import numpy as np

from grids.errors import UserError
from grids.spec import GridSpec
from orchestrator.pools.pools import Pools
from orchestrator.pools.work import Work
from orchestrator.store.phase_log import PhaseKind
from workers.rollouts import Rollouts, rollout_seed
from workers.sampler import SamplingRequest

LOGPROB_BOUNDS = {"float32": 1e-3, "bfloat16": 0.1}
"""How far sampler and learner may lie apart in the log-probability of a token: the largest difference in float32, where both
compute the same function up to rounding; the mean difference in bfloat16, whose 8 bits make single tokens differ by several
tenths between kernels."""


class Disagreement(UserError):
    """Sampler and learner do not compute the same policy."""


async def prove_agreement(pools: Pools, prompts: list[list[int]], spec: GridSpec) -> float:
    """Show that weights get from every learner group to the engines, and that both compute the same policy.

    Each group changes all its weights a little, so that a tensor which does not arrive is seen, and engines sample from them. Every
    engine is tried with the first group, every group with the first engine.

    Returns:
        The largest difference found, in the sense of ``LOGPROB_BOUNDS``.

    Raises:
        Disagreement: it exceeds the bound.
    """
    probe = prompts[:8]
    seeds = [rollout_seed("probe", position) for position in range(len(probe))]
    request = SamplingRequest(probe, seeds, rollouts_per_problem=4)
    pairs = [(0, engine) for engine in range(len(pools.samplers.members))]
    pairs += [(group, 0) for group in range(1, len(pools.learners))]
    largest = 0.0
    for group, number in pairs:
        learner = pools.learners[group].slots[0]
        name = f"probe-{group}-{number}"
        await learner.begin_cell(name, 0, f"{name}/base", None)
        weights = await learner.perturb(f"{name}/perturbed")
        ((_, reference),) = await pools.samplers.values_and_references(
            "sample",
            request,
            weights,
            [len(probe)],
            work=Work(PhaseKind.START_UP, name),
            member=pools.samplers.members[number],
        )
        rollouts: Rollouts = await reference
        differences = np.abs(await learner.logprobs(reference) - rollouts.logprobs)
        difference = float(differences.max() if spec.model.dtype == "float32" else differences.mean())
        require_agreement(
            difference, spec.model.dtype, f"on the start-up probe of engine {number}, group {group}"
        )
        largest = max(largest, difference)
    return largest


def require_agreement(difference: float, dtype: str, where: str) -> None:
    """Raise ``Disagreement`` when sampler and learner lie further apart than the bound of their type."""
    bound = LOGPROB_BOUNDS[dtype]
    if not difference <= bound:
        raise Disagreement(
            f"model: sampler and learner differ by {difference:.3g} in the log-probability of a token {where}, the bound in "
            f"{dtype} is {bound:g}; the engine does not hold the learner's weights, so nothing it samples would be on-policy"
        )
