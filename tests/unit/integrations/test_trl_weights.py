"""TRL sends parameters; the buffers of the trained model come after them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("httpx")

from specactor_ray.integrations.trl import RolloutClient
from specactor_ray.models.loading import named_weights
from tests.families import make_model


@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v3", "llama-tied"])
@pytest.mark.parametrize("all_of_it", [False, True])
def test_a_model_arrives_whole(name: str, all_of_it: bool) -> None:
    model, client = make_model(name), object.__new__(RolloutClient)
    accelerator = SimpleNamespace(unwrap_model=lambda wrapped: wrapped)
    client._trainer = SimpleNamespace(accelerator=accelerator, model=model)
    pairs: Any = named_weights(model) if all_of_it else model.named_parameters()
    sent = list(client._whole(pairs))
    assert sorted(key for key, _ in sent) == sorted(key for key, _ in named_weights(model)), "each once"
    assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in sent)
