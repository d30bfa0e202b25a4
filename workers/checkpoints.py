"""Checkpoints of model and optimiser by torch's distributed checkpointing, in safetensors files (nothing is unpickled).

Every rank writes its own shards; a checkpoint can be loaded under another number of ranks.
"""

import errno
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""How an operating system says that a disk, a quota or the largest file size is exhausted."""


class StorageFull(OSError):
    """The storage takes no more of a checkpoint; ``errno`` is one of ``FULL``, ``filename`` the checkpoint's folder."""


class CheckpointFailed(RuntimeError):
    """A checkpoint was not written or not read; the message says what happened on which rank."""


def save(folder: Path, model: torch.nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Write all tensors of model and optimiser to ``folder``. All ranks call it together.

    Raises:
        StorageFull: on every rank, when the storage of any rank takes no more.
        CheckpointFailed: on every rank, when any rank failed otherwise.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(_tensors(model, optimiser), storage_writer=writer)
    except CheckpointException as error:
        raise _as_plain_error(error, folder) from error


def load(folder: Path, model: torch.nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Read a checkpoint into model and optimiser in place. All ranks call it together.

    Raises:
        CheckpointFailed: on every rank, when any rank failed.
    """
    initialise_state(optimiser)
    try:
        dcp.load(_tensors(model, optimiser), storage_reader=HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:
        raise _as_plain_error(error, folder) from error


def _as_plain_error(error: CheckpointException, folder: Path) -> StorageFull | CheckpointFailed:
    """What happened on the ranks, which torch wraps in a ``BaseException`` that passes every ``except Exception``."""
    failures = {rank: failure for rank, (failure, _) in sorted(error.failures.items())}
    for failure in failures.values():
        if isinstance(failure, OSError) and failure.errno in FULL:
            return StorageFull(failure.errno, failure.strerror, str(folder))
    what = "; ".join(
        f"rank {rank}: {type(failure).__name__}: {failure}" for rank, failure in failures.items()
    )
    return CheckpointFailed(f"checkpoint {folder}: {what}")


def initialise_state(optimiser: torch.optim.Optimizer) -> None:
    """Give AdamW the state that it would make at its first step, so that there is something to load into."""
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            optimiser.state[parameter] = {
                "step": torch.tensor(0.0, dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def _tensors(model: torch.nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All state by name: ``model.<parameter>``, ``optimiser.<quantity>.<parameter>``."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for quantity, value in optimiser.state[parameter].items():
            tensors[f"optimiser.{quantity}.{name}"] = value
    return tensors
