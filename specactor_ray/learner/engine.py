"""The policy, a causal language model that scores its outputs, and its optimizer in one process; a rank's part of a
checkpoint."""

from __future__ import annotations

import contextlib
import functools
import math
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import nn
from torch.utils.checkpoint import checkpoint

from specactor_ray.config.training_schema import TrainerConfig
from specactor_ray.learner.batching import MicroBatch, Sample, collate, cut_by_tokens
from specactor_ray.models.offload import held_by, offload, reload
from specactor_ray.models.packed_attention import PACKED_NAME, PackedRow

_STATE_FILE = "optimizer.pt"


Tick = Callable[[], None]
"""Called after each piece of work: a micro-batch, an optimizer step, a bucket, a file. A rank without any hangs."""


@dataclass(slots=True)
class SavedPart:
    """One rank's part of a checkpoint. A disk error is recorded, not raised: a rank that left a save early would block
    the others in a collective."""

    folder: Path
    """The checkpoint."""
    node: str = field(default_factory=socket.gethostname)
    sizes: dict[str, int] = field(default_factory=dict)
    """Size in bytes of each file that the rank wrote, by its name relative to the folder."""
    problem: str = ""
    """First error; empty if everything was written."""

    @contextlib.contextmanager
    def writing(self, *files: Path) -> Iterator[None]:
        """Inside, these files are written; a folder stands for all files in it."""
        try:
            yield
            for file in files:
                for path in file.rglob("*") if file.is_dir() else [file]:
                    if path.is_file():
                        self.sizes[path.relative_to(self.folder).as_posix()] = path.stat().st_size
        except (OSError, RuntimeError, SafetensorError) as error:  # three kinds of a full disk
            self.problem = self.problem or f"{type(error).__name__}: {error}"


class TokenScores(NamedTuple):
    """Scores of the output tokens of a micro-batch; all `(B, T)` float32, 0 where the mask is 0. The distribution is
    softmax(logits / temperature), before top-k/top-p."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    """Entropy in nats."""
    values: torch.Tensor
    """Values of the value head; zeros without one."""


Forward = Callable[[MicroBatch, int], TokenScores]
"""Scores a micro-batch in a number of chunks."""
CHUNK_TOKENS = 1024
"""Largest number of positions in a chunk: logits of one chunk are in memory at a time."""


class PolicyModel(nn.Module):
    """A transformers causal language model with an optional value head on its last hidden states.

    The trunk runs once. The model's own operations behind it, the output layer and what it does with the logits, run
    on chunks of the positions that predict output tokens, and again in the backward pass, so that there is no array of
    all tokens by the vocabulary. If the model attends by `PACKED_NAME`, the trunk sees no padding.

    The logits are divided by `temperature`, as in the rollout. `entropy_gradient` lets gradients flow through the
    entropy, for an entropy bonus.
    """

    def __init__(
        self, model: Any, temperature: float = 1.0, value_head: bool = False, entropy_gradient: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature, self.entropy_gradient = temperature, entropy_gradient
        hidden = int(model.config.get_text_config().hidden_size)
        self.value_head = nn.Linear(hidden, 1) if value_head else None
        for parameter in () if self.value_head is None else self.value_head.parameters():
            nn.init.zeros_(parameter)

    @property
    def packed(self) -> bool:
        """Whether the samples of a micro-batch form one row without padding."""
        return bool(self.model.config._attn_implementation == PACKED_NAME)

    def forward(self, batch: MicroBatch, chunks: int = 1) -> TokenScores:
        """Score the output tokens of a micro-batch in `chunks` chunks."""
        wanted = batch.mask > 0
        # Without any output token (an idle rank) one position still runs, so that all ranks do the same work.
        some = wanted
        if not bool(wanted.any()):
            some = torch.zeros_like(wanted)
            some[:, 0] = True
        output, rows = self._run_trunk(batch)
        states = output.last_hidden_state.flatten(0, 1)[(rows[:, None] + batch.positions)[some]]
        parts = zip(states.tensor_split(chunks), batch.targets[some].tensor_split(chunks), strict=True)
        scored = (functools.partial(self._score, type(output), *part) for part in parts)
        if chunks > 1:
            found = [checkpoint(score, use_reentrant=False, preserve_rng_state=False) for score in scored]
        else:
            found = [score() for score in scored]
        chosen, entropy = (torch.cat(values) for values in zip(*found, strict=True))
        values = torch.zeros_like(chosen)
        if self.value_head is not None:
            values = self.value_head(states.to(self.value_head.weight.dtype))[:, 0].float()
        empty = torch.zeros(wanted.shape, dtype=torch.float32, device=wanted.device)
        return TokenScores(
            *(torch.where(wanted, empty.masked_scatter(some, value), empty) for value in (chosen, entropy, values))
        )

    def _run_trunk(self, batch: MicroBatch) -> tuple[Any, torch.Tensor]:
        """The trunk's output, and int64 `(B,)` the index of each sample's first position in its rows, one after the
        other."""
        trunk, inside = trunk_of(self.model), batch.attention_mask > 0
        if self.packed:
            lengths, places = batch.attention_mask.sum(dim=1), batch.attention_mask.cumsum(dim=1) - 1
            ids = {"input_ids": batch.input_ids[inside][None], "position_ids": places[inside][None]}
            return trunk(**ids, use_cache=False, packed_row=PackedRow.of(lengths)), lengths.cumsum(0) - lengths
        output = trunk(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
        return output, torch.arange(len(inside), device=inside.device) * inside.shape[1]

    def _score(self, kind: type, states: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of the targets and entropy, `(n,)`, from last hidden states `(n, hidden)`: the model's own
        forward, with its trunk replaced by a function that returns them as this kind of output."""
        trunk = trunk_of(self.model)
        trunk.forward = lambda *args, **kwargs: kind(last_hidden_state=states[None])
        try:
            logits = self.model(input_ids=targets[None], use_cache=False).logits[0].float() / self.temperature
        finally:
            del trunk.forward
        logprobs = torch.log_softmax(logits, dim=-1)
        with torch.set_grad_enabled(self.entropy_gradient and torch.is_grad_enabled()):
            entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        return logprobs.gather(1, targets[:, None])[:, 0], entropy


def trunk_of(model: Any) -> Any:
    """The part of a causal language model that ends with its last hidden states."""
    trunk = model.get_decoder()
    return model.model if trunk is model else trunk


class TorchEngine:
    """AdamW over a float32 policy in one process; the interface of every engine."""

    def __init__(self, policy: PolicyModel, config: TrainerConfig, tick: Tick = lambda: None) -> None:
        self.policy, self._config, self._tick = policy, config, tick
        self.rank, self.world_size = 0, 1
        self.device = next(policy.parameters()).device
        self.forward: Forward = autocast(self.device, config.dtype)(policy.__call__)
        self._optimizer = make_optimizer(policy, config, self.device)
        self._frozen: list[PolicyModel] = []

    def score(self, batch: MicroBatch, model: Forward | None = None) -> TokenScores:
        """Forward pass of the policy, or of the model of `frozen`; with gradients unless inside `torch.no_grad`."""
        # As many chunks in all ranks: ZeRO-3 gathers the output layer for each.
        most = int(self.over_ranks(batch.mask.count_nonzero(), maximum=True))
        scores = (model or self.forward)(batch, max(-(-most // CHUNK_TOKENS), 1))
        self._tick()
        return scores

    def frozen(self, model: PolicyModel) -> Forward:
        """A model on the CPU that is never trained, on the engine's device: its forward, which gives what it would give
        with float32 weights. All ranks call it together."""
        round_linear_weights(model, getattr(torch, self._config.dtype))
        self._frozen.append(model)
        return autocast(self.device, self._config.dtype)(model.to(self.device).__call__)  # type: ignore[no-any-return]

    @torch.no_grad()
    def hidden_states(self, samples: Sequence[Sample], layers: Sequence[int]) -> list[torch.Tensor]:
        """Outputs of these decoder layers, side by side, at all positions but the last: `(tokens - 1, layers * hidden)`
        float32 on the CPU, one per sample. All ranks must call it with the same samples: ZeRO-3 gathers the weights
        over all ranks, for which the forward must be the one that scores samples."""
        states = [torch.empty(0)] * len(samples)
        lengths, packed = [sample.num_tokens for sample in samples], self.policy.packed
        for group in cut_by_tokens(lengths, self._config.micro_batch_tokens, packed):
            with layer_outputs(self.policy.model, layers) as outputs:
                batch = collate(samples, group).to(self.device)
                self.score(replace(batch, mask=torch.zeros_like(batch.mask)))  # few for the output layer
            whole = torch.cat([outputs[layer] for layer in layers], dim=-1).float().cpu()
            rows = whole[0].split([lengths[index] for index in group]) if packed else whole
            for row, index in zip(rows, group, strict=True):
                states[index] = row[: lengths[index] - 1].clone()
        return states

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Accumulate gradients; `last` marks the last call of an optimizer step. Gradients of all ranks are summed."""
        loss.backward()
        self._tick()

    def step(self, learning_rate: float) -> float:
        """Clip, update, and drop the gradients; without an update if they are 0 or not finite. Returns the norm before
        clipping, which is 0 only if every element is."""
        norm = clipped_step(self._optimizer, self._config.max_grad_norm, learning_rate)
        self._tick()
        return norm

    def skip(self) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def over_ranks(self, values: torch.Tensor, maximum: bool = False) -> torch.Tensor:
        """Element-wise sum, or maximum, over the ranks."""
        return values

    @contextlib.contextmanager
    def gathered(self, parameters: list[torch.nn.Parameter]) -> Iterator[None]:
        """Inside, these parameters are whole in every rank; all ranks enter together."""
        yield

    def save(self, folder: Path, part: SavedPart) -> None:
        """Write the training state besides the weights: the optimizer's state, and the value head."""
        head = self.policy.value_head
        state = {"optimizer": self._optimizer.state_dict(), "heads": {} if head is None else head.state_dict()}
        with part.writing(folder / _STATE_FILE):
            torch.save(state, folder / _STATE_FILE)
        self._tick()

    def load(self, folder: Path) -> None:
        """Restore the files of `save`; the model's weights were loaded already."""
        state = torch.load(folder / _STATE_FILE, map_location=self.device, weights_only=True)
        with settings_kept(self._optimizer):
            self._optimizer.load_state_dict(state["optimizer"])
        if self.policy.value_head is not None:
            self.policy.value_head.load_state_dict(state["heads"])

    def offload(self) -> None:
        """Move weights, optimizer and frozen models to host memory until `reload`, and drop gradients. Weights can be
        exported and saved meanwhile. Idempotent."""
        self.skip()
        offload(held_by(self.policy, *self._frozen, optimizer=self._optimizer))

    def reload(self) -> None:
        reload(held_by(self.policy, *self._frozen, optimizer=self._optimizer), self.device)


def clipped_step(optimizer: torch.optim.Optimizer, max_norm: float, learning_rate: float) -> float:
    """Clip the gradients, update, and drop the gradients; without an update if they are not finite, or 0, where the
    optimizer's moments alone would move the weights. Returns their norm before clipping, at least the largest element:
    squares of small ones are 0 in float32."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    largest = float(torch.nn.utils.get_total_norm(gradients, math.inf))
    norm = max(float(torch.nn.utils.clip_grad_norm_(parameters, max_norm)), largest)
    if math.isfinite(norm) and norm > 0.0:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def make_optimizer(policy: nn.Module, config: TrainerConfig, device: torch.device) -> torch.optim.Optimizer:
    """AdamW of torch, as one kernel on GPUs; DeepSpeed's own one needs a compiler there."""
    groups = parameter_groups(policy, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=device.type == "cuda")


@contextlib.contextmanager
def settings_kept(optimizer: Any) -> Iterator[None]:
    """Inside, a state is loaded; the settings of the parameter groups stay those of the configuration."""
    settings = [{name: group[name] for name in group.keys() - {"params"}} for group in optimizer.param_groups]
    yield
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        group.update(kept)


def parameter_groups(policy: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters in two groups: matrices, with weight decay, and norms and biases, without."""
    matrices, others = list[nn.Parameter](), list[nn.Parameter]()
    for parameter in policy.parameters():
        if parameter.requires_grad:
            (matrices if len(getattr(parameter, "ds_shape", parameter.shape)) >= 2 else others).append(parameter)
    groups = ((matrices, weight_decay), (others, 0.0))
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in groups if parameters]


@contextlib.contextmanager
def layer_outputs(model: nn.Module, layers: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Inside, the outputs of these decoder layers, `(B, L, hidden)`, are kept in the dictionary."""
    outputs: dict[int, torch.Tensor] = {}

    def keep(layer: int, module: nn.Module, inputs: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        outputs[layer] = (output if isinstance(output, torch.Tensor) else output[0]).detach()

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            module = trunk_of(model).layers[layer]
            hooks.enter_context(module.register_forward_hook(functools.partial(keep, layer)))
        yield outputs


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """Context and decorator for arithmetic of this type; float32 changes nothing."""
    return torch.autocast(device.type, dtype=getattr(torch, dtype), enabled=dtype != "float32")


def round_linear_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Round the weights that autocast rounds in every forward anyway, those of linear layers, so that all log-
    probabilities under autocast stay the same to the last bit. A weight that an embedding shares stays as it is."""
    modules = list(model.modules())
    kept = {id(weight) for module in modules if type(module) is not nn.Linear for weight in module._parameters.values()}
    for module in modules:
        for weight in module._parameters.values() if type(module) is nn.Linear else ():
            if weight is not None and id(weight) not in kept:
                weight.data = weight.data.to(dtype)
