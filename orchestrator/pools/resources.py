"""What the pools of a grid take, and whether a cluster has it."""

from collections.abc import Sequence

from grids.spec import GridSpec, PoolsSpec

Resources = dict[str, float]
"""Amounts of ``CPU`` and ``GPU``."""


def needed_resources(spec: GridSpec) -> Resources:
    """What all pools of a grid take together."""
    samplers, learners = spec.pools.samplers, spec.pools.learners
    ranks = learners.count * learners.ranks
    return {
        "CPU": samplers.count * samplers.cpus + ranks * learners.cpus + spec.verifier.workers,
        "GPU": samplers.count * samplers.gpus + ranks * learners.gpus,
    }


def engine_accelerators(pools: PoolsSpec) -> int:
    """Accelerators of one engine: GPUs, or cores in a pool without GPUs."""
    return pools.samplers.gpus or pools.samplers.cpus


def group_accelerators(pools: PoolsSpec) -> int:
    """Accelerators of all ranks of one learner group."""
    learners = pools.learners
    return learners.ranks * (learners.gpus or learners.cpus)


def rank_resources(pools: PoolsSpec) -> Resources:
    """What one rank of a learner group takes."""
    learners = pools.learners
    amounts: Resources = {"CPU": learners.cpus, "GPU": learners.gpus}
    return {resource: amount for resource, amount in amounts.items() if amount}


def resource_faults(spec: GridSpec, nodes: Sequence[Resources]) -> list[str]:
    """Why a grid does not fit on a cluster of these nodes; empty when it fits.

    Both count: all nodes together, and the largest single one, since an actor that no node can hold would wait for ever.
    """
    faults = []
    for resource, needed in needed_resources(spec).items():
        there = sum(node.get(resource, 0) for node in nodes)
        if needed > there:
            faults.append(
                f"pools: the grid needs {needed:g} {resource}s, the cluster has {there:g}; lower count, ranks, cpus or gpus "
                f"under pools, or add nodes"
            )
    for field, single in (
        ("pools.samplers", {"CPU": spec.pools.samplers.cpus, "GPU": spec.pools.samplers.gpus}),
        ("pools.learners", {"CPU": spec.pools.learners.cpus, "GPU": spec.pools.learners.gpus}),
        ("verifier.workers", {"CPU": spec.verifier.workers}),
    ):
        for resource, needed in single.items():
            largest = max((node.get(resource, 0) for node in nodes), default=0)
            if needed > largest:
                faults.append(
                    f"{field}: one takes {needed} {resource}s, the largest node has {largest:g}; lower it"
                )
    return faults
