"""`eagle`: a small head that predicts the target's next tokens from the target's hidden states.

EAGLE-3 (arXiv 2503.01840). The verifier streams the hidden states of committed positions with its commits. The head
runs ahead of them on its own outputs and *re-anchors* when states arrive: it restarts from the newest state, goes
through the surviving tail again, and replaces it from the first token on that it would no longer draft. Branches begin
on the head's outputs; a commit that refutes the main chain leaves the tokens of the one that agrees, and new states end
them all.

For `L` committed tokens, prompt included, the states of positions `0..L-2` are known: the target has not read the
newest token yet. The head's entry for position `i`, (state of `i`, token of `i + 1`), predicts the token of `i + 2`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from specactor_ray.config.methods import BUILT_IN, DrafterSpec
from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.device import to_device
from specactor_ray.core.ragged import begins, places
from specactor_ray.draft.chains import MAIN, Chains
from specactor_ray.draft.eagle.checkpoint import load_head
from specactor_ray.draft.eagle.head import EagleHead
from specactor_ray.draft.model import ModelProposer
from specactor_ray.models.layers import fuse
from specactor_ray.models.packed_linear import assign_weights, can_pack, pack_linears
from specactor_ray.models.paged_cache import LayerShape, PagedCache
from specactor_ray.models.ragged_attention import RaggedBatch, ragged_attention
from specactor_ray.models.shapes import GIB

_TRIED = 6
"""Positions of the forward that tests compiled layers."""


class EagleRunner:
    """Packed forwards of a head, which it owns, over a paged cache of `cache_bytes`. Not thread-safe."""

    def __init__(self, head: EagleHead, cache_bytes: int) -> None:
        self.model = self.head = head.eval().requires_grad_(False)
        self.config = head.config
        weight = head.fc.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.vocab_size, self.feature_size = self.config.vocab_size, self.config.hidden_size
        self.max_positions = int(self.config.layer.get("max_position_embeddings", 1 << 30))
        self._token_ids = head.draft_token_ids()
        ordered = bool((self._token_ids.diff() > 0).all())
        self.ids = self._token_ids.numpy().astype(np.uint32) if ordered and self.device.type == "cpu" else None
        """uint32 `(draft_vocab,)`: tokens of the logits; None: logits are over the target's vocabulary."""
        attention: Any = head.layers[0].self_attn
        shape = LayerShape(attention.kv_heads, attention.head_dim, attention.head_dim)
        if can_pack(self.device, self.dtype):
            pack_linears(head)
        self.cache = PagedCache([shape], cache_bytes, self.dtype, self.device)
        fuse(head, self._try_out)

    @torch.inference_mode()
    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """Features of the target's hidden states `(n, feature_size)`."""
        return self.head.fuse(states.to(self.device, self.dtype))

    @torch.inference_mode()
    def forward(
        self,
        rows: np.ndarray,
        positions: np.ndarray,
        counts: np.ndarray,
        token_ids: np.ndarray,
        features: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `counts` positions to each of the `rows` of the cache, which must have room: sequence positions, the
        token after each, and features or the head's own outputs, `(sum(counts), hidden)`.

        Returns outputs `(n, hidden)` of the last position of each row, and logits `(n, draft_vocab)`, or `(n, vocab)`
        with -inf for tokens outside of the draft vocabulary; see `ids`.
        """
        batch = RaggedBatch(self.cache, rows, counts, (token_ids.astype(np.int64), positions, np.cumsum(counts) - 1))
        tokens, places, last = batch.arrays
        logits, outputs = self.step(batch, tokens, places, features, last)
        self.cache.lengths[rows] += counts
        return outputs, logits

    def step(
        self,
        batch: RaggedBatch,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        features: torch.Tensor,
        last: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and outputs of all positions, or of those at `last`. Nothing waits for the device."""
        outputs = self.head(features[None], tokens[None], positions[None], _attend, ragged_batch=batch)[0]
        outputs = outputs if last is None else outputs.index_select(0, last)
        logits = self.head.logits(outputs)
        return logits if self.ids is not None else self._over_target_vocabulary(logits), outputs

    def _try_out(self) -> None:
        """Run all modules once."""
        (row, count), size = (self.cache.open(_TRIED), _TRIED), self.config.feature_size
        assert row is not None  # they fit into a page
        states = torch.linspace(-1.0, 1.0, count * size).sin().view(count, size)
        self.forward(np.array([row]), np.arange(count), np.array([count]), np.arange(count), self.fuse(states))
        self.cache.free(row)

    def load_weights(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Replace the trained weights (`checkpoint.trained_weights`). InputError: a name or shape does not match."""
        kept = {"embed_tokens.weight": self.head.embed_tokens.weight, "d2t": self.head.d2t}
        assign_weights(self.head, {**kept, **state_dict}, {})

    def _over_target_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        full = logits.new_full((len(logits), self.vocab_size), float("-inf"))
        return full.index_copy_(1, self._token_ids, logits)


def _attend(
    module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, ragged_batch: RaggedBatch
) -> torch.Tensor:
    return ragged_attention(module, q, k, v, None, ragged_batch=ragged_batch)[0].flatten(2)


class EagleProposer(ModelProposer):
    """`eagle`: drafts with an `EagleRunner`. It needs hidden states of all committed positions."""

    method = "eagle"
    traits = BUILT_IN[method].traits
    _runner: EagleRunner
    _by_row = (*ModelProposer._by_row, "_anchors", "_received", "_held", "_drafted")

    def __init__(self, runner: EagleRunner, *arguments: Any, **options: Any) -> None:
        super().__init__(runner, *arguments, **options)
        self._anchors, self._received, self._held = np.zeros((3, 0), np.int64)
        """int64 `(rows,)`: first position with an unread state (later entries are based on the head's own outputs);
        first position without a state; index of the first unread state in `_states`."""
        self._drafted = np.zeros(0, np.int32)
        """int32 `(rows,)`: tokens of the text that are committed, or drafted since the newest commit."""
        self._states = torch.empty(0, runner.config.feature_size, dtype=runner.dtype, device=runner.device)
        """Unread states, those of a row one after the other, among others that are not needed any more."""
        self._outputs = torch.empty(
            0, self.branches.most, runner.feature_size, dtype=runner.dtype, device=runner.device
        )
        """`(rows, branches + window, hidden)`: outputs of the head, features of the next positions: the newest one of
        each branch, then those that drew the first, second, ... token of the tail."""

    @classmethod
    def from_config(cls, config: DrafterSpec, target: TargetConfig, device: str) -> Self:
        assert config.model is not None  # validated
        trust = target.trust_remote_code
        head = load_head(config.model, target.model, dtype=config.dtype, device=device, trust_remote_code=trust)
        return cls(EagleRunner(head, int(config.kv_cache_gb * GIB)), config.max_batch, config.branches)

    def _advance(self, rows: np.ndarray, same: np.ndarray) -> None:
        super()._advance(rows, same)
        self._drop_guesses(rows[self._placed[rows]])

    @property
    def unread(self) -> int:  # type: ignore[override]
        return int((self._received - self._anchors).sum())

    def add_features(self, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray, states: torch.Tensor) -> None:
        """Queue states for `extend`. Known positions are skipped; after a gap the head restarts with less context."""
        if states.shape[1] != self._runner.config.feature_size:
            raise ValueError(
                f"hidden states are {states.shape[1]} wide; the head reads {self._runner.config.feature_size} "
                f"(layers {list(self._runner.config.exported_layers)} of the target)"
            )
        states, ends = states.to(self._states), starts.astype(np.int64) + lengths
        for i in np.flatnonzero(self._placed[rows] & (starts > self._received[rows])).tolist():
            self._begin_anew(int(rows[i]), int(starts[i]))
        new = self._placed[rows] & (ends > self._received[rows])
        firsts, rows, ends = (begins(lengths)[:-1] + self._received[rows] - starts)[new], rows[new], ends[new]
        left = np.flatnonzero(self._anchors < self._received)
        if len(left):  # each row's old states before its new ones
            owners = np.concatenate([left, rows])
            firsts = np.concatenate([self._held[left], len(self._states) + firsts])
            counts = np.concatenate([self._received[left] - self._anchors[left], ends - self._received[rows]])
            order = np.argsort(owners, kind="stable")
            firsts, counts, owners = firsts[order], counts[order], owners[order]
            kept = to_device([places(firsts, counts)], self._states.device)
            states = torch.cat([self._states, states]).index_select(0, *kept)
            at, heads = np.unique(owners, return_index=True)
            self._held[at] = begins(counts)[heads]
        else:
            self._held[rows] = firsts
        self._states, self._received[rows] = states, ends

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        """Replace the weights of the head. Cache entries made with the old weights stay: their states are gone."""
        self._runner.load_weights(state_dict)

    def sleep(self) -> None:
        self._states = self._states.new_empty(0, self._states.shape[1])
        super().sleep()

    # ---- places ----

    def _fit(self, rows: int) -> None:
        super()._fit(rows)
        old, width = self._outputs, self.branches.most + max(self.view.window, 1)
        if len(old) < rows or old.shape[1] < width:
            self._outputs = old.new_zeros(max(len(old), rows), max(old.shape[1], width), old.shape[2])
            self._outputs[: len(old), : old.shape[1]] = old

    def _enter(self, row: int) -> bool:
        if not super()._enter(row):
            return False
        self._begin_anew(row, 0)
        return True

    def _leave(self, row: int) -> None:
        super()._leave(row)
        self._anchors[row] = self._received[row]
        if self._generations[row] == self.view.table.generation[row]:
            self.view.write(row, ())

    def _begin_anew(self, row: int, first: int) -> None:
        """Restart with an empty cache; the context begins at position `first`."""
        self._anchors[row] = self._received[row] = first
        self._origins[row] = first + 1
        self._drop_guesses(np.array([row]))

    def _drop_guesses(self, rows: np.ndarray) -> None:
        """Drop entries that are based on the head's own outputs. The tails stay until they are drafted again."""
        self._drafted[rows] = self._known[rows]
        self._free(self.branches.release(rows))
        self._cache.truncate(self._cached[rows], self._anchors[rows] + 1 - self._origins[rows])

    # ---- one forward ----

    @property
    def _tips(self) -> np.ndarray:
        return self._drafted

    @property
    def _reads(self) -> np.ndarray:
        """bool `(rows,)`: has unread states, with a known token after each."""
        reads: np.ndarray = (self._anchors < self._received) & (self._received < self._known)
        return reads

    def _ready(self) -> Chains:
        ahead = (self._anchors >= self._origins) & (self._anchors == self._known - 1)
        waiting = self._fork_prefixes()
        reads = self._reads & ~waiting
        backlogs = np.where(reads, self._received - self._anchors, 1)
        return self._plan(self._placed & reads, self._placed & ahead, backlogs)

    def _fork_prefixes(self) -> np.ndarray:
        """Give new samples of a prompt the entries of others. Returns bool `(rows,)`: those that wait for entries that
        another one reads now."""
        whole, waiting = self._placed & (self._origins == 1), np.zeros(len(self._placed), np.bool_)
        table, known, size = self.view.table, self._known, self._cache.page_size
        lines, prompts = table.lines, table.prompts
        for row in np.flatnonzero(whole & (self._anchors == 0) & (known > size)).tolist():
            others = whole & ~waiting & (prompts == prompts[row]) & (lines[:, :size] == lines[row, :size]).all(axis=1)
            others[row] = False
            others = np.flatnonzero(others)
            same = np.zeros((len(others), known[row] + 1), np.bool_)
            same[:, :-1] = lines[others, : known[row]] == lines[row, : known[row]]
            # An entry has read the token after its position; the newest one is read in any case, for its output.
            common = np.minimum(same.argmin(axis=1), np.minimum(known[others], known[row] - 1)) - 1
            has = np.minimum(common, self._anchors[others])
            will = np.where(self._reads[others], np.minimum(common, self._received[others]), has)
            most = int(has.max(initial=0))
            if will.max(initial=0) - most >= size:
                waiting[row] = True
            elif most >= size:
                self._free(self._cached[[row]])
                self._cached[row] = self._cache.fork(self._cached[others[[has.argmax()]]], np.array([most]))[0]
                self._held[row] += most
                self._anchors[row], self._received[row] = most, max(most, self._received[row])
        return waiting

    def _begin(self, chains: Chains, held: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
        # Main chains read their unread states; all others append one entry on the head's own output.
        rows, numbers, most, known = chains.rows, chains.numbers, self.branches.most, self._known[chains.rows]
        begins, main, grown = self._origins[rows] + self._cache.lengths[held], numbers == MAIN, numbers != MAIN
        grown[grown] = self.branches.lengths[rows[grown], numbers[grown]] > 1  # others begin with the main chain's
        reads, flat = main & self._reads[rows], self._outputs.flatten(0, 1)
        sources = np.where(grown, numbers, most + begins - known) + rows * self._outputs.shape[1]
        features = flat.index_select(0, *to_device([sources[~reads]], flat.device))
        if reads.any():
            at = int(reads.argmax())  # chains that read are adjacent
            fused = self._fuse_states(rows[reads], counts[reads])
            features = torch.cat([features[:at], fused, features[at:]])
            self._anchors[rows[reads]] += counts[reads]
        return places(begins - 1, counts), features

    def _end(self, chains: Chains, shares: np.ndarray, outputs: torch.Tensor) -> None:
        # A main chain keeps each output, a branch the newest one.
        rows, main, flat = chains.rows, chains.numbers == MAIN, self._outputs.flatten(0, 1)
        firsts = np.where(main, self.branches.most + self._drafted[rows] - self._known[rows], chains.numbers)
        steps = np.arange(len(outputs))[:, None]
        kept = (steps < shares) & (main | (steps == shares - 1))
        targets = (rows.astype(np.int64) * self._outputs.shape[1] + firsts + np.where(main, steps, 0))[kept]
        sources, targets = to_device([np.flatnonzero(kept), targets], flat.device)
        flat.index_copy_(0, targets, outputs.flatten(0, 1).index_select(0, sources))

    def _run(
        self, chains: Chains, held: np.ndarray, counts: np.ndarray, tokens: np.ndarray, complete: np.ndarray
    ) -> torch.Tensor:
        positions, features = self._begin(chains, held, counts)
        outputs, logits = self._runner.forward(held, positions, counts, tokens, features)
        self._end(chains, np.ones(len(held), np.int64), outputs[None])
        if complete.all():
            return logits
        return logits.index_select(0, *to_device([np.flatnonzero(complete)], logits.device))

    def _fuse_states(self, rows: np.ndarray, counts: np.ndarray) -> torch.Tensor:
        """Take `counts` unread states of each row; returns their features `(sum(counts), hidden)`."""
        taken = to_device([places(self._held[rows], counts)], self._states.device)
        self._held[rows] += counts
        return self._runner.fuse(self._states.index_select(0, *taken))
