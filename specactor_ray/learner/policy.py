"""The policy: a causal language model that gives log-probabilities, entropies and, for ppo, values of its outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from specactor_ray.learner.batching import MicroBatch


class TokenScores(NamedTuple):
    """Scores of the output tokens of a micro-batch; all `(B, T)` float32, 0 where the mask is 0. The distribution is
    softmax(logits / temperature), before top-k/top-p."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    """In nats."""
    values: torch.Tensor
    """Of the value head; zeros without one."""


class PolicyModel(nn.Module):
    """A transformers causal language model with an optional value head on its last hidden states.

    Only the positions that predict output tokens go through the output layer, the widest one: a hook in front of it
    selects them, so that the model's later operations on its logits still apply.

    Args:
        temperature: The logits are divided by it, as in the rollout.
        value_head: Add a scalar head, initialised to zero.
        entropy_gradient: Let gradients flow through the entropy (for an entropy bonus).
    """

    def __init__(
        self, model: Any, temperature: float = 1.0, value_head: bool = False, entropy_gradient: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature, self.entropy_gradient = temperature, entropy_gradient
        hidden = int(model.config.get_text_config().hidden_size)
        self.value_head = nn.Linear(hidden, 1) if value_head else None
        if self.value_head is not None:
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
        self._picked: tuple[torch.Tensor, torch.Tensor] | None = None
        self._states: torch.Tensor | None = None
        model.get_output_embeddings().register_forward_pre_hook(self._pick)

    def forward(self, batch: MicroBatch) -> TokenScores:
        """Score the output tokens of a micro-batch."""
        wanted = batch.mask > 0
        rows = torch.arange(wanted.shape[0], device=wanted.device)[:, None].expand_as(wanted)
        # Without any output token (an idle rank) one position still runs, so that all ranks do the same work.
        some = wanted
        if not bool(wanted.any()):
            some = torch.zeros_like(wanted)
            some[:, 0] = True
        self._picked = (rows[some], batch.positions[some])
        output = self.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
        logits = output.logits[0].float() / self.temperature
        states, self._states, self._picked = self._states, None, None
        logprobs = torch.log_softmax(logits, dim=-1)
        chosen = logprobs.gather(1, batch.targets[some][:, None])[:, 0]
        with torch.set_grad_enabled(self.entropy_gradient and torch.is_grad_enabled()):
            entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        values = torch.zeros_like(chosen)
        if self.value_head is not None and states is not None:
            values = self.value_head(states.to(self.value_head.weight.dtype))[:, 0].float()
        empty = torch.zeros(wanted.shape, dtype=torch.float32, device=wanted.device)
        return TokenScores(
            *(torch.where(wanted, empty.masked_scatter(some, value), empty) for value in (chosen, entropy, values))
        )

    def heads(self) -> dict[str, torch.Tensor]:
        """Parameters besides those of the language model."""
        return {} if self.value_head is None else dict(self.value_head.state_dict())

    def load_heads(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the result of `heads`."""
        if self.value_head is not None and state:
            self.value_head.load_state_dict(dict(state))

    def _pick(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if self._picked is None:
            return inputs
        self._states = inputs[0][self._picked]
        return (self._states[None], *inputs[1:])


@contextlib.contextmanager
def layer_outputs(model: nn.Module, layers: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
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
