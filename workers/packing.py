"""Tensors to arrays that travel through Ray's object store, and back."""

from collections.abc import Iterable, Iterator

import torch

from workers.weights import Weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pack_weights(version: str, dtype: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> Weights:
    """Copy tensors to arrays of ``dtype``."""
    torch_dtype = DTYPES[dtype]
    arrays = {}
    for name, tensor in tensors:
        # ``contiguous().clone()`` because the optimiser goes on changing the tensor in place.
        cast = tensor.detach().to(device="cpu", dtype=torch_dtype).contiguous().clone()
        arrays[name] = (cast.view(torch.int16) if torch_dtype is torch.bfloat16 else cast).numpy()
    return Weights(version, dtype, arrays)


def unpack_weights(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of ``weights``. Arrays from the object store are read-only, so each is copied once."""
    for name, array in weights.tensors.items():
        tensor = torch.from_numpy(array.copy())
        yield name, tensor.view(torch.bfloat16) if weights.dtype == "bfloat16" else tensor
