"""Weights by the names of a checkpoint's files, as vLLM reads them; in some families, such as Mixtral, transformers'
modules have other names."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from specactor_ray.core.errors import WeightsError
from specactor_ray.models.loading import load_empty_model, weight_shapes, wrong_value_errors
from specactor_ray.models.packed_linear import whole_weights


class WeightFormat:
    """Names and shapes of a model's weights, and the way from transformers' modules to a checkpoint's files."""

    def __init__(self, model: str, *, trust_remote_code: bool = False) -> None:
        self._model = load_empty_model(model, trust_remote_code=trust_remote_code)
        self._shapes, self._tied = weight_shapes(self._model)

    def of_files(self, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights as `save_pretrained` writes them, each tied one once.

        Raises:
            InputError: They do not fit the model.
            WeightsError: transformers cannot convert them.
        """
        from transformers.core_model_loading import revert_weight_conversion

        weights = whole_weights(state_dict, self._shapes, self._tied)
        own = {name: tensor for name, tensor in weights.items() if name not in self._tied}
        try:
            return dict(revert_weight_conversion(self._model, own))
        except wrong_value_errors() as error:
            kind = type(self._model).__name__
            raise WeightsError(f"transformers cannot write the weights of {kind} for vLLM: {error}") from error
