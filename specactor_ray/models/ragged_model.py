"""A transformers causal language model that runs packed rows of different lengths over a ragged cache.

Used by the target engine (`target/hf.py`) and by the small-model drafter (`draft/model.py`) alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specactor_ray.errors import ModelLoadError
from specactor_ray.models.packed_linear import (
    PackedLinear,
    assign_weights,
    can_pack,
    cheapest_row_counts,
    pack_linears,
)
from specactor_ray.models.ragged_attention import RaggedBatch, register
from specactor_ray.models.ragged_cache import CacheRow, RaggedCache
from specactor_ray.models.threads import thread_count
from specactor_ray.ragged import places

HEAD_INPUT = -1
"""In `hidden_layers`: the states that enter the output layer (after the last norm), from which the logits are made."""
_CHECK_TOLERANCE = 0.05
"""Largest difference, relative to the largest logit, between one forward and the same in two parts."""


@dataclass(frozen=True, slots=True)
class RowChunk:
    """The next tokens of one row: they are appended to its cache; the last `num_logits` of them yield logits."""

    row: CacheRow
    token_ids: Sequence[int]
    num_logits: int


@dataclass(frozen=True, slots=True)
class RaggedOutput:
    """`logits` `(sum of num_logits, vocab)`, and the exported hidden states or None.

    `hidden_states` `(sum of tokens, layers * hidden)`: of every position of every chunk, in the order of the chunks.
    """

    logits: torch.Tensor
    hidden_states: torch.Tensor | None


class RaggedModel:
    """Packed forwards of one model over one ragged cache. Not thread-safe.

    Args:
        model: A causal language model in evaluation mode; its attention and linears are replaced.
        cache_bytes: Memory budget of the key/value cache.
        hidden_layers: Decoder layers (0-based) whose output states are exported, concatenated in this order;
            `HEAD_INPUT` stands for the states that enter the output layer.
        batched_attention: One padded attention call for all short rows. Default: on for GPUs.

    Raises:
        ModelLoadError: The model's attention cannot be replaced, or it keeps state elsewhere than in keys and
            values (recurrent layers), or the budget holds not even one block.
    """

    def __init__(
        self,
        model: Any,
        cache_bytes: int,
        hidden_layers: Sequence[int] = (),
        batched_attention: bool | None = None,
    ) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.dtype = model.dtype
        self._threads = thread_count() if self.device.type == "cpu" else None
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self.max_positions = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 1 << 30)
        self.batched = self.device.type != "cpu" if batched_attention is None else batched_attention
        self._tied = self._tied_names()
        self._pad_to = [0]
        _replace_attention(model)
        if can_pack(self.device, self.dtype):
            pack_linears(model)
            self._pad_to = self._tune_padding()
        self._exported: dict[int, torch.Tensor] = {}
        self._hidden_layers = tuple(hidden_layers)
        self._hook_hidden_layers()
        self.cache = self._make_cache(cache_bytes)
        self._check_split_forward()

    def forward(self, chunks: Sequence[RowChunk]) -> RaggedOutput:
        """`forward_packed` of chunks."""
        counts = np.array([len(chunk.token_ids) for chunk in chunks], np.int64)
        tokens = np.array([token for chunk in chunks for token in chunk.token_ids], np.int64)
        num_logits = np.array([chunk.num_logits for chunk in chunks], np.int64)
        return self.forward_packed([chunk.row for chunk in chunks], counts, tokens, num_logits)

    @torch.inference_mode()
    def forward_packed(
        self, rows: Sequence[CacheRow], counts: np.ndarray, tokens: np.ndarray, num_logits: np.ndarray
    ) -> RaggedOutput:
        """Append tokens to rows and run all of them as one packed sequence.

        Every row must have room (`CacheRow.reserve`) for its tokens. Afterwards `row.length` counts them; the
        caller truncates what it rejects.

        Args:
            rows: `n` rows.
            counts: `(n,)` tokens of each row.
            tokens: `(sum(counts),)`, those of all rows one after the other.
            num_logits: `(n,)`: so many of each row's tokens, the last ones, yield logits.

        Raises:
            ValueError: A row asks for more logits than it has tokens; nothing was appended.
        """
        if (num_logits > counts).any():
            raise ValueError("a chunk asks for more logits than it has tokens; they would be those of another row")
        padding = self._padding(len(tokens))
        batch = RaggedBatch(self.cache, rows, counts.tolist(), padding, self.device, self.batched)
        positions = places(np.array([row.length for row in rows], np.int64), counts)
        wanted = places(np.cumsum(counts) - num_logits, num_logits)
        # Positions whose logits are wanted are padded too: the head is the widest linear layer of all.
        keep = _padded(wanted, self._padding(len(wanted)), wanted[-1]) if len(wanted) else np.zeros(1, np.int64)
        if self._threads is not None:
            self._threads.apply()
        logits = self._run(_padded(tokens, padding, 0), _padded(positions, padding, 0), batch, keep)
        for row, count in zip(rows, batch.counts, strict=True):
            row.length += count
        return RaggedOutput(logits[: len(wanted)], self._take_exported(len(tokens)))

    @property
    def exports_states(self) -> bool:
        """Whether forwards return hidden states."""
        return bool(self._hidden_layers)

    def load_weights(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights; rows keep stale keys and must be truncated to 0 by the caller.

        Raises:
            InputError: A name or shape does not fit; nothing was changed.
        """
        assign_weights(self.model, state_dict, self._tied)

    def sleep(self) -> None:
        """Free the cache's memory, and on a GPU the weights' too; every row must be free."""
        self.cache.release()
        if self.device.type != "cpu":
            self.model.to("cpu")
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Take the memory back after `sleep`."""
        self.model.to(self.device)
        self.cache.allocate()

    def _run(self, tokens: np.ndarray, positions: np.ndarray, batch: RaggedBatch, keep: np.ndarray) -> torch.Tensor:
        ids, at, kept = (torch.from_numpy(one).to(self.device, torch.long) for one in (tokens, positions, keep))
        output = self.model(
            input_ids=ids[None], position_ids=at[None], use_cache=False, logits_to_keep=kept, ragged_batch=batch
        )
        return output.logits[0]

    def _padding(self, count: int) -> int:
        return self._pad_to[count] - count if count < len(self._pad_to) else 0

    def _tied_names(self) -> dict[str, str]:
        """Names of parameters that share their storage with an earlier one → that one's name."""
        first: dict[int, str] = {}
        tied: dict[str, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            source = first.setdefault(id(parameter), name)
            if source != name:
                tied[name] = source
                tied[source] = name
        return tied

    def _tune_padding(self) -> list[int]:
        layers = [module for module in self.model.modules() if isinstance(module, PackedLinear)]
        if not layers:
            return [0]
        return cheapest_row_counts(max(layers, key=lambda layer: layer.in_features * layer.out_features))

    def _hook_hidden_layers(self) -> None:
        if not self._hidden_layers:
            return
        layers = self.model.get_decoder().layers
        for index in self._hidden_layers:
            if index == HEAD_INPUT:
                self.model.get_decoder().register_forward_hook(self._keep_decoder_output)
                continue
            if not 0 <= index < len(layers):
                raise ModelLoadError(
                    f"hidden layer {index} does not exist: the model has layers 0 to {len(layers) - 1}"
                )
            layers[index].register_forward_hook(self._keep_output(index))

    def _keep_output(self, index: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            self._exported[index] = output[0] if isinstance(output, tuple) else output

        return hook

    def _keep_decoder_output(self, module: Any, args: Any, output: Any) -> None:
        self._exported[HEAD_INPUT] = output[0]

    def _take_exported(self, count: int) -> torch.Tensor | None:
        if not self._hidden_layers:
            return None
        states = [self._exported[i].reshape(-1, self._exported[i].shape[-1])[:count] for i in self._hidden_layers]
        self._exported.clear()
        return torch.cat(states, dim=-1)

    def _make_cache(self, cache_bytes: int) -> RaggedCache:
        probe = RaggedBatch(None, [], [], 0, self.device, batched=False)
        with torch.inference_mode():
            self._run(np.array([0, 0]), np.array([0, 1]), probe, np.array([1]))
        layers = sorted(probe.seen_shapes)
        if layers != list(range(len(layers))) or not layers:
            raise ModelLoadError(
                f"{type(self.model).__name__} does not run its attention through transformers' AttentionInterface "
                "in every layer, so this engine cannot serve it"
            )
        cache = RaggedCache([probe.seen_shapes[i] for i in layers], cache_bytes, self.dtype, self.device)
        if cache.slots == 0:
            raise ModelLoadError(
                f"a key/value cache of {cache_bytes} bytes holds no block of this model "
                f"({cache.bytes_per_token} bytes per token); give it more memory (kv_cache_gb)"
            )
        return cache

    def _check_split_forward(self) -> None:
        """A forward in two parts must equal one in a single part; it does not for models with recurrent layers."""
        tokens = [(7 * i + 3) % self.vocab_size for i in range(6)]
        whole = self._check_logits([tokens])
        parts = self._check_logits([tokens[:4], tokens[4:]])
        gap = float((whole - parts).abs().max() / whole.abs().max().clamp_min(1e-6))
        if not gap <= _CHECK_TOLERANCE:
            raise ModelLoadError(
                f"{type(self.model).__name__} does not give the same logits when a sequence is fed in two parts "
                f"(relative difference {gap:.3g}); it keeps state outside keys and values, which cannot be rolled back"
            )

    def _check_logits(self, parts: Sequence[Sequence[int]]) -> torch.Tensor:
        row = self.cache.open(16)
        if row is None:
            raise ModelLoadError("the key/value cache is too small for the model's self-check; raise kv_cache_gb")
        for part in parts:
            output = self.forward([RowChunk(row, part, 1)])
        row.free()
        return output.logits.float()


def _padded(array: np.ndarray, count: int, value: int) -> np.ndarray:
    return np.concatenate([array, np.full(count, value, array.dtype)]) if count else array


def _replace_attention(model: Any) -> None:
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelLoadError(
            f"{type(model).__name__} does not support replaceable attention in transformers; "
            "use a model that does (Llama, Qwen, Mistral, Gemma, Phi, GPT-2, ... do)"
        )
    name = register()
    model.set_attn_implementation(name)
    model.eval()
    model.requires_grad_(False)
