"""A smaller model out of the target: some of its layers, everything else as it is."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

from specactor_ray.errors import ModelLoadError
from specactor_ray.models.builtin import quiet_transformers


def num_layers(model: Any) -> int:
    """Decoder layers of a transformers causal language model."""
    return int(model.config.get_text_config().num_hidden_layers)


def prune_layers(model: Any, keep: Sequence[int]) -> Any:
    """A new model of the same kind with only these layers, weights copied from `model`.

    Args:
        model: A transformers causal language model.
        keep: Indices of the layers to keep, rising.

    Returns:
        The model on the same device, in float32 and evaluation mode. Its configuration says how many layers it has;
        lists with an entry per layer (such as `layer_types`) are cut to the kept ones.

    Raises:
        ModelLoadError: The model has no plain list of layers.
    """
    from transformers import AutoModelForCausalLM

    config, total = copy.deepcopy(model.config), num_layers(model)
    text = config.get_text_config()
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == total:
            setattr(text, name, [value[i] for i in keep])
    text.num_hidden_layers = len(keep)
    path = re.escape(_path_of_layers(model, total))
    places = {str(old): str(new) for new, old in enumerate(keep)}
    weights = {}
    for name, tensor in model.state_dict().items():
        match = re.match(rf"({path}\.)(\d+)(\..*)", name)
        if match is None:
            weights[name] = tensor
        elif match[2] in places:
            weights[f"{match[1]}{places[match[2]]}{match[3]}"] = tensor
    auto: Any = AutoModelForCausalLM
    with quiet_transformers():
        pruned = auto.from_config(config).float()
    pruned.load_state_dict(weights)
    pruned.tie_weights()
    pruned.generation_config = copy.deepcopy(model.generation_config)
    return pruned.to(model.device).eval()


def _path_of_layers(model: Any, total: int) -> str:
    """Name of the list of decoder layers, for example `model.layers`."""
    from torch import nn

    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == total:
            return name
    raise ModelLoadError(
        f"{type(model).__name__} keeps its layers in no list of {total} modules, so none can be left out. "
        "Fix: use a target such as Llama, Qwen, Mistral or Gemma"
    )
