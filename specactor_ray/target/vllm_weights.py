"""New weights in a running vLLM model: after `replace_weights` it equals one that was loaded with them. Only vLLM's
workers import this module.

vLLM reloads layer by layer. Its CPU build packs copies of weights, and a reload leaves some of them as they were:
experts, which are packed by the first load alone, and heads that share the weight of the embeddings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from specactor_ray.core.errors import WeightsError


@torch.no_grad()
def replace_weights(model: Any, config: VllmConfig, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load all weights, by the names of a checkpoint's files, into a model that runs. WeightsError: some parameters got
    none, or came in a way that a reload does not see; what the model computes is undefined then, as after any other
    error."""
    with set_current_vllm_config(config):
        if current_platform.is_cpu():
            for module in model.modules():
                if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                    module.quant_method.moe_kernel = None  # the kernel's first load packs the experts
        initialize_layerwise_reload(model)
        loaded = model.load_weights(weights)
        unseen = _unseen(model)
        finalize_layerwise_reload(model, config.model_config)
        if current_platform.is_cpu():
            _pack_shared(model)
    named = {name for name, _ in model.named_parameters()}
    lacking = sorted(unseen & named | (named - loaded if loaded is not None else set()))  # of tied ones, one has a name
    if lacking:
        raise WeightsError(f"vLLM found no weights for {len(lacking)} of its parameters (first: {lacking[:3]})")


def _unseen(model: torch.nn.Module) -> set[str]:
    """Names of parameters that no loader has got: a reload keeps tensors on `meta` until their loaders have all weights
    of a layer, so that a plain copy into one is lost (experts of GPT-OSS)."""
    found = set()
    for prefix, layer in model.named_modules():
        got = {name for name, _ in get_layerwise_info(layer).loaded_weights}
        waiting = {name for name, tensor in layer._parameters.items() if tensor is not None and tensor.is_meta}
        found |= {f"{prefix}.{name}" for name in waiting - got}
    return found


def _pack_shared(model: torch.nn.Module) -> None:
    """Pack the weights that several layers share, for each of them: a reload packs those of the first."""
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "cpu_linear")]
    uses = Counter(id(weight) for layer in model.modules() for weight in layer._parameters.values())
    for layer in layers:
        if layer.weight is not None and layer.weight.numel() and uses[id(layer.weight)] > 1:
            layer.quant_method.process_weights_after_loading(layer)
