"""Loading weights inside a vLLM worker process.

The engine imports this class by name (``worker_extension_cls``) and mixes it into its worker. It lives in a module of its own
because importing a job's main module there would run the job again.
"""

import torch

from workers.packing import unpack_weights
from workers.weights import Weights


class WeightLoading:
    """Methods that a vLLM worker gains; called by ``LLM.collective_rpc``."""

    def load_weights_in_place(self, weights: Weights) -> list[str]:
        """Replace the weights of the model. Returns the engine's parameters that nothing was loaded into.

        Works layer by layer with vLLM's reload machinery, since on CPU the engine has packed and freed the weights
        that it loaded first.
        """
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        runner = self.model_runner  # type: ignore[attr-defined]
        model = runner.get_model()
        parameters = {name for name, _ in model.named_parameters()}
        with torch.no_grad():
            initialize_layerwise_reload(model)
            loaded = model.load_weights(unpack_weights(weights))
            finalize_layerwise_reload(model, runner.model_config)
            _repack_shared_weights(model)
        return sorted(parameters - set(loaded))


def _repack_shared_weights(model: torch.nn.Module) -> None:
    """Pack again what an output head shares with the embeddings.

    In vLLM 0.32 on CPU a reload leaves the packed copy of a tied output head at its old values: log-probabilities then belong to
    neither the old nor the new model. Every module that still holds a weight beside its packed copy is packed again.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel() > 0:
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
