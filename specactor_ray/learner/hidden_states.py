"""Hidden states of the policy along samples: training input of drafters that read them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from specactor_ray.learner.batching import Sample, collate, cut_by_tokens
from specactor_ray.learner.engines.deepspeed_engine import DeepSpeedEngine
from specactor_ray.learner.engines.torch_engine import TorchEngine


@torch.no_grad()
def hidden_states(
    engine: TorchEngine | DeepSpeedEngine, samples: Sequence[Sample], layers: Sequence[int], max_tokens: int
) -> list[torch.Tensor]:
    """Outputs of some decoder layers, side by side, at all positions but the last: `(tokens - 1, layers * hidden)`
    float32 on the CPU, one per sample.

    All ranks must call it with the same samples: ZeRO-3 gathers the weights over all ranks. The forward is the one that
    scores samples, for the same reason.

    Args:
        layers: Indices of decoder layers.
        max_tokens: Most tokens, including padding, in one forward.
    """
    states = [torch.empty(0)] * len(samples)
    for group in cut_by_tokens(samples, max_tokens):
        with _outputs_of(engine.policy.model, layers) as outputs:
            engine.score(collate(samples, group).to(engine.device))
        whole = torch.cat([outputs[layer] for layer in layers], dim=-1).float().cpu()
        for row, index in enumerate(group):
            states[index] = whole[row, : samples[index].num_tokens - 1].clone()
    return states


@contextlib.contextmanager
def _outputs_of(model: nn.Module, layers: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Inside, the outputs of these decoder layers, `(B, L, hidden)`, are kept in the dictionary."""
    outputs: dict[int, torch.Tensor] = {}
    modules = model.get_decoder().layers  # type: ignore[operator]

    def keeper(layer: int) -> object:
        def keep(module: nn.Module, inputs: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
            outputs[layer] = (output if isinstance(output, torch.Tensor) else output[0]).detach()

        return keep

    hooks = [modules[layer].register_forward_hook(keeper(layer)) for layer in layers]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
