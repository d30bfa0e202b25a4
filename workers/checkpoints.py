"""Checkpoints of model and optimiser by torch's distributed checkpointing, in safetensors files (nothing is unpickled).

Every rank writes its own shards; a checkpoint can be loaded under another number of ranks.
"""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter


def save(folder: Path, model: torch.nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Write all tensors of model and optimiser to ``folder``. All ranks call it together."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    dcp.save(_tensors(model, optimiser), storage_writer=writer)


def load(folder: Path, model: torch.nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Read a checkpoint into model and optimiser in place. All ranks call it together."""
    initialise_state(optimiser)
    dcp.load(_tensors(model, optimiser), storage_reader=HuggingFaceStorageReader(str(folder)))


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
