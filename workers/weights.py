"""Weights on their way from a learner to the samplers: named arrays that travel through Ray's object store."""

from dataclasses import dataclass

import numpy as np


def weights_version(cell: str, attempt: int, step: int) -> str:
    """The name of a cell's weights after an update step, of one attempt: another one's are never taken for them."""
    return f"{cell}/attempt-{attempt}/step-{step}"


def version_step(version: str) -> int:
    """The update step after which these weights stood."""
    return int(version.rpartition("step-")[2])


@dataclass(frozen=True)
class Weights:
    """One version of a policy's weights under the names of its transformers checkpoint."""

    version: str
    """Names cell and update step, so that rollouts can say which weights made them."""
    dtype: str
    """``float32`` or ``bfloat16``; numpy has no bfloat16, which therefore travels as int16."""
    tensors: dict[str, np.ndarray]


def mismatched_tensors(sent: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> list[str]:
    """Sentences that name every tensor which is missing, unknown or of another shape; empty when all fit."""
    faults = [f"{name} was not sent" for name in sorted(expected.keys() - sent.keys())]
    faults += [f"{name} is unknown to the engine" for name in sorted(sent.keys() - expected.keys())]
    faults += [
        f"{name} has shape {sent[name]}, the engine has {expected[name]}"
        for name in sorted(sent.keys() & expected.keys())
        if sent[name] != expected[name]
    ]
    return faults
