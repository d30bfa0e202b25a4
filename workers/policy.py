"""The policy model: loading, sharding, and what it says of the response tokens of a batch."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from workers.grpo import token_statistics
from workers.lean_imports import without_unused
from workers.packing import DTYPES
from workers.rollouts import Rollouts


def load_policy(path: str) -> torch.nn.Module:
    """A causal language model with float32 weights, from a folder or the hub; code from there is never run."""
    with without_unused():
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


LONGEST_SHARED_ROW = 2048
"""Tokens of a row that holds several responses, however wide the model is: its mask has the square of it."""


def shared_row_tokens(model: torch.nn.Module) -> int:
    """Up to how many tokens responses, to one problem or several, share a row; 0 where the model's attention does not allow it.

    Sharing computes a prompt once and pads little, and has each token look over a longer row. A layer's matrices take about
    24 h^2 operations a token and its attention 4 h a token that it looks over, h being the model's width: in a row of h tokens a
    sixth of the former.
    """
    config = model.config
    # What a row's mask says is followed by transformers' attention over everything before, not by windows or recurrent layers.
    everywhere = all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or ())
    if (
        not everywhere
        or getattr(config, "sliding_window", None)
        or not getattr(model, "_supports_sdpa", False)
    ):
        return 0
    return min(LONGEST_SHARED_ROW, int(getattr(config, "hidden_size", 0)))


class ResponseBatch:
    """Some responses of a batch in b rows of L positions, T response tokens in all.

    A row holds responses one after the other and is padded on the right. Responses to the same problem that follow each other
    stand behind one copy of their prompt. Each response sees its prompt and itself alone, at the positions that it would have
    alone.
    """

    def __init__(self, rollouts: Rollouts, rows: Sequence[np.ndarray], device: torch.device) -> None:
        """Gather the responses of ``rollouts`` whose numbers ``rows`` tell, in that order."""
        offsets, n = rollouts.offsets, rollouts.rollouts_per_problem
        runs = [np.split(row, np.flatnonzero(np.diff(row // n)) + 1) for row in rows]
        longest = max(
            sum(len(rollouts.prompts[run[0] // n]) for run in row_runs) + int(rollouts.lengths[row].sum())
            for row_runs, row in zip(runs, rows, strict=True)
        )
        tokens = np.zeros((len(rows), longest), dtype=np.int64)
        places = np.tile(np.arange(longest), (len(rows), 1))
        prompts = np.full((len(rows), longest), -1)
        parts = np.full((len(rows), longest), -1)
        predicting = []
        for number, row_runs in enumerate(runs):
            end = 0
            for place, run in enumerate(row_runs):
                prompt = rollouts.prompts[run[0] // n]
                start, end = end, end + len(prompt)
                last = number * longest + end - 1
                tokens[number, start:end], places[number, start:end] = prompt, np.arange(len(prompt))
                parts[number, start:end] = 0
                first = start
                for part, response in enumerate(run, start=1):
                    start, end = end, end + int(rollouts.lengths[response])
                    tokens[number, start:end] = rollouts.tokens[offsets[response] : offsets[response + 1]]
                    places[number, start:end] = np.arange(len(prompt), len(prompt) + end - start)
                    parts[number, start:end] = part
                    # The logits at a position say what comes next; the prompt's last ones what each response begins with.
                    predicting.append(number * longest + np.arange(start - 1, end - 1))
                    predicting[-1][0] = last
                prompts[number, first:end] = place
        responses = np.concatenate(rows)
        self.tokens = torch.from_numpy(tokens).to(device)
        """[b, L]"""
        self.places = torch.from_numpy(places).to(device)
        """[b, L] positions in the sequence of prompt and response"""
        self.positions = torch.from_numpy(np.concatenate(predicting)).to(device)
        """[T] positions in the flattened batch whose logits predict a response token."""
        self.token_index = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in responses])
        """[T] where each response token stands in ``rollouts.tokens``."""
        self.response_index = np.repeat(responses, rollouts.lengths[responses])
        """[T] the response that each token belongs to."""
        self.responses = torch.from_numpy(rollouts.tokens[self.token_index].astype(np.int64)).to(device)
        """[T] response tokens."""
        self.mask = None
        """[b, 1, L, L] which positions (last) a position sees; None where that is all before it, for which there are fast kernels:
        padding lies on the right, where nothing looks."""
        if any(len(row) > 1 for row in rows):
            prompt_of, part = torch.from_numpy(prompts).to(device), torch.from_numpy(parts).to(device)
            seen = (part[:, None, :] == 0) | (part[:, None, :] == part[:, :, None])
            seen &= prompt_of[:, None, :] == prompt_of[:, :, None]
            self.mask = seen.tril_()[:, None]


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
        shared = {} if batch.mask is None else {"attention_mask": batch.mask, "position_ids": batch.places}
        logits = model(input_ids=batch.tokens, use_cache=False, **shared).logits
    finally:
        hook.remove()
    return token_statistics(logits, batch.responses, temperature, entropy_gradient)


def full_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole parameters under their checkpoint names, tied ones once. All ranks must iterate together."""
    for name, parameter in model.named_parameters():
        yield name, parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
