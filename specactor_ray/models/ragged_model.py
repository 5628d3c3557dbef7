"""A transformers causal language model that runs packed rows of different lengths over a paged cache.

Used by the target engine (`target/hf.py`) and by the small-model drafter (`draft/model.py`) alike.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from specactor_ray.core.device import to_device
from specactor_ray.core.errors import ConfigError, ModelLoadError
from specactor_ray.core.ragged import places
from specactor_ray.core.types import Probe
from specactor_ray.models.batch_invariance import FIX, KEY, Invariant, OtherOperators, invariant
from specactor_ray.models.layers import fuse
from specactor_ray.models.loading import tied, wrong_value_errors
from specactor_ray.models.packed_linear import (
    PackedLinear,
    assign_weights,
    can_pack,
    cheapest_row_counts,
    pack_linears,
)
from specactor_ray.models.paged_cache import PagedCache
from specactor_ray.models.probe import far_from, probe_model
from specactor_ray.models.ragged_attention import ATTENTION_NAME, MASKED_NAME, RaggedBatch, ShapeProbe, register
from specactor_ray.models.rotary import fix_positions
from specactor_ray.models.threads import thread_count

_REFUSED = {
    "deepseek_v4": "attends to compressed keys of earlier tokens",
    "llama4_text": "scales queries by their place among the tokens of a forward",
    "minimax_m3_vl_text": "chooses the blocks of tokens that it attends to",
    "youtu": "sets the embedding of its pad token to zero at every load, whatever the weight files hold",
}
"""Type of a model → what it does that the comparison at load does not reach."""
_COMPANY = 300
"""Tokens of the other row in the proof at load: several tiles of rows, of either size."""
HEAD_INPUT = -1
"""Entry of `hidden_layers` for the inputs of the output layer (after the last norm), which gives the logits."""


class RaggedModel:
    """Packed forwards of one model over one paged cache. Not thread-safe.

    Args:
        model: A causal language model in evaluation mode; its attention and linears are replaced.
        cache_bytes: Memory budget of the key/value cache.
        hidden_layers: Decoder layers (0-based) with output states that are kept in the cache (`PagedCache.states`),
            concatenated in this order; `HEAD_INPUT` stands for the states that enter the output layer.
        batch_invariant: See `TargetConfig`; ConfigError if that cannot be.

    Raises:
        ModelLoadError: The model does not compute here what it computes in transformers: its attention cannot be
            replaced, or is not causal within a window, or it keeps state elsewhere than in keys and values; or the
            budget is too small for one page.
    """

    ids: np.ndarray | None = None
    feature_size = 0

    def __init__(
        self, model: Any, cache_bytes: int, hidden_layers: Sequence[int] = (), batch_invariant: bool = False
    ) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.dtype = model.dtype
        self._threads = thread_count() if self.device.type == "cpu" else None
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self.max_positions = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 1 << 30)
        fix_positions(model)
        self._tied = tied(model)
        self._pad_to = [0]
        _require_replaceable_attention(model)
        self._invariant = batch_invariant
        self._kernels = invariant(model, self.device) if batch_invariant else contextlib.nullcontext()
        self._exported: dict[int, torch.Tensor] = {}
        self._hidden_layers = tuple(hidden_layers)
        try:
            self._prepare(cache_bytes)
        except (ConfigError, ModelLoadError):
            raise
        except wrong_value_errors() as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise ModelLoadError(
                f"{type(model).__name__} does not run over packed rows ({reason}), so this engine cannot serve it. "
                "Fix: use another model, or target.backend=vllm"
            ) from error

    def _prepare(self, cache_bytes: int) -> None:
        """Replace attention and linears, and compare the result with the model as it was."""
        probe = probe_model(self.model)
        if not np.isfinite(probe.logprobs).all():
            raise ModelLoadError(
                f"{type(self.model).__name__} gives log-probabilities that are no finite numbers in transformers: its "
                f"weights hold such numbers, or are too large for {str(self.dtype).removeprefix('torch.')}. "
                "Fix: copy the model again, or load it in another data type"
            )
        register()
        if can_pack(self.device, self.dtype):
            pack_linears(self.model)
            packed = [module for module in self.model.modules() if isinstance(module, PackedLinear)]
            self._pad_to = cheapest_row_counts(packed) if packed else [0]
        self._hook_hidden_layers()
        self.cache = self._make_cache(cache_bytes)
        fuse(self.model, self._warm_up)
        self._check(probe)
        if self._invariant:
            self._prove_invariance(probe.token_ids[: self.cache.slots // 2])

    @torch.inference_mode()
    def forward(self, rows: np.ndarray, counts: np.ndarray, tokens: np.ndarray, num_logits: np.ndarray) -> torch.Tensor:
        """Append tokens to rows and run all of them as one packed sequence.

        Every row must have room (`PagedCache.reserve`) for its tokens. Afterwards `cache.lengths` includes them; the
        caller truncates rejected ones.

        Args:
            rows: int `(n,)` rows of the cache.
            counts: int64 `(n,)` tokens of each row, at least 1.
            tokens: `(sum(counts),)`: tokens of all rows, row by row.
            num_logits: int64 `(n,)`: number of each row's last tokens that give logits, at most its tokens.

        Returns:
            Logits `(sum(num_logits), vocab)`; exported hidden states go to the cache.
        """
        padding = self._padding(len(tokens))
        positions = places(self.cache.lengths[rows], counts)
        wanted = places(np.cumsum(counts) - num_logits, num_logits)
        # Positions with logits are padded, too: the head is the widest linear layer.
        keep = _padded(wanted, self._padding(len(wanted)), wanted[-1]) if len(wanted) else np.zeros(1, np.int64)
        arrays = (_padded(tokens.astype(np.int64), padding, 0), _padded(positions, padding, 0), keep)
        batch = RaggedBatch(self.cache, rows, counts, arrays)
        if self._threads is not None:
            self._threads.apply()
        logits = self._run(batch, *batch.arrays)
        self.cache.lengths[rows] += counts
        return logits[: len(wanted)]

    def step(
        self,
        batch: RaggedBatch,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        _: torch.Tensor | None = None,
        last: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `draft.burst.Runner`; no features are given back."""
        keep = torch.arange(len(tokens), device=self.device) if last is None else last
        logits = self._run(batch, tokens, positions, keep)
        return logits, logits.new_empty(len(keep), 0)

    def load_weights(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights; the caller must truncate all rows to 0. InputError: a name or shape does not fit, and
        nothing was changed."""
        assign_weights(self.model, state_dict, self._tied)

    def _run(
        self, batch: RaggedBatch | ShapeProbe, tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor
    ) -> torch.Tensor:
        """Logits `(len(keep), V)` of the positions `keep` in the pack."""
        with self._kernels:
            output = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=keep,
                ragged_batch=batch,
            )
        if output.logits.shape[1] != len(keep):
            raise ModelLoadError(
                f"{type(self.model).__name__} ignores logits_to_keep, so this engine cannot serve it. "
                "Fix: use another model"
            )
        if self._hidden_layers and isinstance(batch, RaggedBatch):
            batch.cache.states.index_copy_(0, batch.slots, self._take_exported()[: batch.num_tokens].to(self.dtype))
        return output.logits[0]

    def _padding(self, count: int) -> int:
        return self._pad_to[count] - count if count < len(self._pad_to) else 0

    def _hook_hidden_layers(self) -> None:
        if not self._hidden_layers:
            return
        decoder = self.model.get_decoder()
        for index in self._hidden_layers:
            if index != HEAD_INPUT and not 0 <= index < len(decoder.layers):
                raise ModelLoadError(
                    f"hidden layer {index} does not exist: the model has layers 0 to {len(decoder.layers) - 1}"
                )
            module = decoder if index == HEAD_INPUT else decoder.layers[index]
            module.register_forward_hook(functools.partial(_keep_output, self._exported, index))

    def _take_exported(self) -> torch.Tensor:
        """Hidden states of all positions of the last forward, `(N, layers * hidden)`."""
        states = torch.cat([self._exported[index].flatten(0, -2) for index in self._hidden_layers], dim=-1)
        self._exported.clear()
        return states

    def _make_cache(self, cache_bytes: int) -> PagedCache:
        probe = ShapeProbe()
        self.model.set_attn_implementation(MASKED_NAME)
        with torch.inference_mode():
            self._run(probe, *to_device((np.array([0, 0]), np.array([0, 1]), np.array([1])), self.device))
        self.model.set_attn_implementation(ATTENTION_NAME)  # which needs no masks
        layers = sorted(probe.shapes)
        if layers != list(range(len(layers))) or len(layers) < self.model.config.get_text_config().num_hidden_layers:
            raise ModelLoadError(
                f"{type(self.model).__name__} does not run its attention through transformers' AttentionInterface "
                "in every layer, so this engine cannot serve it"
            )
        shapes, state_size = [probe.shapes[i] for i in layers], 0
        if self._hidden_layers:
            state_size = self._take_exported().shape[-1]
        return PagedCache(shapes, cache_bytes, self.dtype, self.device, state_size=state_size)

    def _check(self, probe: Probe) -> None:
        """Refuse a model that does not compute here what it computes in transformers: in two parts beside other rows,
        with rejected tokens between them."""
        tokens = probe.token_ids[: self.cache.slots // 2]
        count, first = len(tokens), len(tokens) // 3
        logits = read_in_parts(self, tokens, [first, count - first], count // 2, tokens[:0:-1][:2])
        following = torch.from_numpy(tokens[1:].astype(np.int64))[:, None]
        scores = torch.log_softmax(logits[:-1].float(), dim=-1).cpu().gather(1, following)[:, 0].numpy()
        far = far_from(probe, scores, self.dtype == torch.float32)
        if far:
            raise ModelLoadError(
                f"{type(self.model).__name__} does not give the log-probabilities of transformers here: they differ by "
                f"{far}, when a sequence is fed in two parts beside another one. It keeps state outside keys and "
                "values, or attends in a way that this engine does not have. Fix: use another model, or "
                "target.backend=vllm"
            )

    def _prove_invariance(self, tokens: np.ndarray) -> None:
        """ConfigError: a sequence does not give the same bits read at once, and in part beside another row and token by
        token, or it calls operators with bits that may depend on the batch."""
        name, single = type(self.model).__name__, min(3, len(tokens) - 1)
        parts = [len(tokens) - single, *[1] * single]
        with OtherOperators() as watch:
            found = [read_in_parts(self, tokens, [len(tokens)], 0)]
            found.append(read_in_parts(self, tokens, parts, self.cache.slots // 4))
        if watch.seen and isinstance(self._kernels, Invariant):
            problem = f"{name} calls {', '.join(sorted(watch.seen))}, whose results may depend on the number of rows."
            raise ConfigError(KEY, problem, f"use another model, or {FIX}")
        if not torch.equal(*found):
            different = int((found[0] != found[1]).any(dim=1).sum())
            problem = f"{different} of {len(tokens)} positions of {name} have other bits beside another row than alone."
            raise ConfigError(KEY, problem, FIX)

    def _warm_up(self) -> None:
        """One forward of a few tokens."""
        row = self.cache.open(6)
        assert row is not None  # they fit into a page
        self.forward(np.array([row]), np.array([6]), np.arange(6) % self.vocab_size, np.ones(1, np.int64))
        self.cache.free(row)


def read_in_parts(
    model: RaggedModel, tokens: np.ndarray, parts: Sequence[int], beside: int, rejected: np.ndarray | tuple[()] = ()
) -> torch.Tensor:
    """Logits `(n, V)` of a sequence that is read in parts, each beside a new row of `beside` tokens or fewer, and
    followed by `rejected` tokens, which are dropped (but not after the last)."""
    beside, found, begin = min(beside, _COMPANY, model.max_positions), list[torch.Tensor](), 0
    row = model.cache.open(len(tokens))
    assert row is not None  # it takes half of the cache
    for count in parts:
        rows, counts, given = [row], [count], [tokens[begin : begin + count]]
        if beside and (other := model.cache.open(beside)) is not None:
            rows, counts, given = [other, row], [beside, count], [np.resize(tokens[::-1], beside), *given]
        wanted = np.array([0, count][-len(rows) :])
        logits = model.forward(np.array(rows), np.array(counts), np.concatenate(given), wanted)
        found.append(logits.clone())
        if len(rejected) and begin + count < len(tokens):
            ones = np.array([row])
            model.forward(ones, np.array([len(rejected)]), np.asarray(rejected), np.array([1]))
            model.cache.truncate(ones, begin + count)
        for opened in rows[:-1]:
            model.cache.free(opened)
        begin, beside = begin + count, beside // 3
    model.cache.free(row)
    return torch.cat(found)


def _keep_output(kept: dict[int, torch.Tensor], index: int, module: Any, args: Any, output: Any) -> None:
    kept[index] = output if isinstance(output, torch.Tensor) else output[0]


def _padded(array: np.ndarray, count: int, value: int) -> np.ndarray:
    return np.concatenate([array, np.full(count, value, array.dtype)]) if count else array


def _require_replaceable_attention(model: Any) -> None:
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelLoadError(
            f"{type(model).__name__} does not support replaceable attention in transformers; "
            "use a model that does (Llama, Qwen, Mistral, Gemma, Phi, GPT-2, ... do)"
        )
    if (reason := _REFUSED.get(model.config.get_text_config().model_type)) is not None:
        raise ModelLoadError(f"{type(model).__name__} {reason}, so this engine cannot serve it. Fix: use another model")
    model.eval()
    model.requires_grad_(False)
