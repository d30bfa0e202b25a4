"""The policy model: loading, sharding, and what it says of the response tokens of a batch."""

from collections.abc import Iterator

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from workers.grpo import token_statistics
from workers.packing import DTYPES
from workers.rollouts import Rollouts


def load_policy(path: str) -> torch.nn.Module:
    """A causal language model with float32 weights, from a folder or the hub; code from there is never run."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    # Dropout would make the learner's log-probabilities differ from the sampler's.
    return model.eval()


def shard_policy(model: torch.nn.Module, mesh: DeviceMesh, dtype: str) -> FSDPModule:
    """Shard a model over the ranks of ``mesh`` in place, one group for each decoder layer.

    Weights and optimiser stay float32; with ``bfloat16`` forward and backward compute in it and gradients are reduced in float32.
    """
    policy = (
        MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32)
        if dtype != "float32"
        else None
    )
    # Not only the layers but the root too gives its gathered weights back after a forward pass: by default it would keep
    # them for the backward pass, and after a forward pass alone ``parameters()`` would be copies that no optimiser trains.
    options = {"mesh": mesh, "reshard_after_forward": True} | ({"mp_policy": policy} if policy else {})
    layer_classes = set(getattr(model, "_no_split_modules", None) or [])
    for module in model.modules():
        if type(module).__name__ in layer_classes:
            fully_shard(module, **options)
    return fully_shard(model, **options)


def perturb_(model: torch.nn.Module) -> None:
    """Change every weight a little, always in the same way: a start-up probe must see that each tensor arrives."""
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            scale = (
                0.05 * local.square().mean().sqrt() if local.numel() and bool((local != 0).any()) else 0.01
            )
            local.add_(scale * torch.cos(torch.arange(local.numel(), device=local.device)).view_as(local))


class ResponseBatch:
    """Some sequences of a batch, padded on the right: b sequences, L positions, T response tokens."""

    def __init__(self, rollouts: Rollouts, indices: np.ndarray, device: torch.device) -> None:
        """Gather the sequences ``indices`` (response numbers) of ``rollouts``."""
        offsets = rollouts.offsets
        prompts = [rollouts.prompts[i // rollouts.rollouts_per_problem] for i in indices]
        responses = [rollouts.tokens[offsets[i] : offsets[i + 1]] for i in indices]
        longest = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
        tokens = np.zeros((len(indices), longest), dtype=np.int64)
        positions = []
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            end = len(prompt) + len(response)
            tokens[row, : len(prompt)] = prompt
            tokens[row, len(prompt) : end] = response
            # The logits at a position say what comes next.
            positions.append(row * longest + np.arange(len(prompt) - 1, end - 1))
        self.tokens = torch.from_numpy(tokens).to(device)
        """[b, L]"""
        self.positions = torch.from_numpy(np.concatenate(positions)).to(device)
        """[T] positions in the flattened batch whose logits predict a response token."""
        self.token_index = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in indices])
        """[T] where each response token stands in ``rollouts.tokens``."""
        self.response_index = np.repeat(indices, rollouts.lengths[indices])
        """[T] the response that each token belongs to."""
        self.responses = torch.from_numpy(rollouts.tokens[self.token_index].astype(np.int64)).to(device)
        """[T] response tokens."""


def response_statistics(
    model: torch.nn.Module, batch: ResponseBatch, temperature: float, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """([T] log-probabilities, [T] entropies) of the response tokens of a batch."""

    def only_responses(_: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *rest = arguments
        return (hidden.flatten(0, 1)[batch.positions], *rest)

    # Logits of prompts and padding are never looked at, and can be most of the memory of a step.
    hook = model.get_output_embeddings().register_forward_pre_hook(only_responses)
    try:
        # No attention mask: padding lies on the right, where causal attention never looks, and without one the fast kernels serve.
        logits = model(input_ids=batch.tokens, use_cache=False).logits
    finally:
        hook.remove()
    return token_statistics(logits, batch.responses, temperature, entropy_gradient)


def full_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole parameters under their checkpoint names, tied ones once. All ranks must iterate together."""
    for name, parameter in model.named_parameters():
        yield name, parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
