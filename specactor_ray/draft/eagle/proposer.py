"""`eagle`: a small head that predicts the target's next tokens from the target's hidden states.

EAGLE-3 (arXiv 2503.01840; the head: `draft/eagle/head.py`). The verifier streams the hidden states of committed
positions with its commits. The head runs ahead of them on its own outputs and *re-anchors* when states arrive: it
restarts from the newest state, goes through the surviving tail again, and replaces it from the first token on that it
would no longer draft. So a draft rests on at most one window of predicted features.

For `L` committed tokens, prompt included, the states of positions `0..L-2` are known: the target has not read the
newest token yet. The head's entry for position `i`, (state of `i`, token of `i + 1`), predicts the token of `i + 2`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch

from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.draft.branches import Chains, main_chains
from specactor_ray.draft.eagle.checkpoint import load_head
from specactor_ray.draft.eagle.runner import EagleRunner
from specactor_ray.draft.footprint import head_text
from specactor_ray.draft.model_proposer import ModelProposer
from specactor_ray.draft.registry import BUILT_IN
from specactor_ray.messages import Features
from specactor_ray.models.cache_size import device_bytes, drafter_cache_bytes
from specactor_ray.models.wire import from_wire
from specactor_ray.ragged import places


class EagleProposer(ModelProposer):
    """`Proposer` over an `EagleRunner`; it needs `add_features` after each `open` and `commit`.

    Args:
        runner: The head with its cache; owned by the proposer.
        max_batch, shared_noise: See `ModelProposer`.
    """

    method = "eagle"
    traits = BUILT_IN[method].traits
    _by_slot = (
        *ModelProposer._by_slot, "_first", "_anchor", "_received", "_depth", "_promised", "_has_output"
    )  # fmt: skip

    def __init__(self, runner: EagleRunner, max_batch: int = 64, shared_noise: bool = True) -> None:
        config = runner.config
        max_positions = int(config.layer.get("max_position_embeddings", 1 << 30))
        super().__init__(runner.cache, runner.dtype, config.vocab_size, max_positions, max_batch, shared_noise)
        self._runner = runner
        self._first, self._anchor, self._received, self._depth = np.zeros((4, 0), np.int32)
        """int32 `(slots,)`: position of the first cache entry; first position with an unread state; first position
        without a state; tail tokens drafted or confirmed since the anchor. Entries from the anchor on rest on own
        outputs."""
        self._unread: dict[int, list[Features]] = {}
        """Slot → states of the positions from `_anchor` to `_received`."""
        self._promised, self._has_output = np.zeros((2, 0), np.bool_)
        """bool `(slots,)`: got a place late and lacks earlier states, so it has to be opened again; has a row in
        `_outputs`."""
        self._outputs = torch.empty(0, config.hidden_size, dtype=runner.dtype, device=runner.device)
        """`(slots, hidden)`: the head's output at its last entry, the feature of the next position."""

    @classmethod
    def from_config(cls, config: DrafterConfig, target: TargetConfig, device: str) -> Self:
        assert config.model is not None  # validated
        trust = target.trust_remote_code
        head = load_head(config.model, target.model, dtype=config.dtype, device=device, trust_remote_code=trust)
        total = None if device == "cpu" else device_bytes(device)
        cache = drafter_cache_bytes(config, head_text(head), head.fc.weight.itemsize, total)
        return cls(EagleRunner(head, cache), config.max_batch, config.shared_noise)

    def commit(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        good = super().commit(slots, starts, lengths, tokens)
        good[good] = ~self._promised[slots[good]]
        return good

    def add_features(self, slot: int, features: Sequence[Features]) -> None:
        """Queue states for the next `extend`. Known positions are skipped; after a gap the head starts over with less
        context; a request that is too long for the head is given up."""
        if not self.mirrors.is_open(slot) or not self._placed[slot]:
            return
        if self.mirrors.known[slot] > self.max_len:
            self._give_up(slot)
            return
        for span in features:
            if span.states.shape[1] != self._runner.config.feature_size:
                raise ValueError(
                    f"hidden states are {span.states.shape[1]} wide; the head reads {self._runner.config.feature_size} "
                    f"(layers {list(self._runner.config.exported_layers)} of the target)"
                )
            if span.begin > self._received[slot]:
                self._begin_anew(slot, span.begin)
            received = int(self._received[slot])
            if span.end > received:
                self._unread[slot].append(Features(received, span.states[received - span.begin :]))
                self._received[slot] = span.end

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        """Replace the weights of the head. Cache entries of the old ones stay: their states are gone."""
        self._runner.load_weights(state_dict)

    # ---- places ----

    def _fit(self, slots: int) -> None:
        super()._fit(slots)
        old = self._outputs
        if len(old) < slots:
            self._outputs = old.new_empty(slots, old.shape[1])
            self._outputs[: len(old)] = old

    def _enter(self, slot: int, late: bool) -> bool:
        if not super()._enter(slot, late):
            return False
        self._promised[slot] = late
        self._begin_anew(slot, 0)
        return True

    def _leave(self, slot: int, finished: bool) -> None:
        super()._leave(slot, finished)
        del self._unread[slot]
        self.mirrors.ends[slot] = self.mirrors.known[slot]

    def _begin_anew(self, slot: int, first: int) -> None:
        """Restart with an empty cache; the context begins at position `first`."""
        self._unread[slot] = []
        self._first[slot] = self._anchor[slot] = self._received[slot] = first
        self._cache.truncate(self._rows[[slot]], 0)
        self._has_output[slot] = False

    # ---- one forward ----

    def _ready(self) -> Chains:
        return main_chains(np.concatenate([np.flatnonzero(self._can_anchor()), np.flatnonzero(self._can_run_ahead())]))

    def _can_anchor(self) -> np.ndarray:
        """bool `(slots,)`: has unread states, with a known token after each."""
        known = self.mirrors.known
        return self._placed & (self._anchor < self._received) & (self._received < known) & (known <= self.max_len)

    def _can_run_ahead(self) -> np.ndarray:
        """bool `(slots,)`: has read all states, and the tail has room or unconfirmed tokens."""
        known = self.mirrors.known
        room = np.minimum(self.mirrors.limits, self.max_len) - known
        return self._placed & self._has_output & (self._anchor == known - 1) & (self._depth < room)

    def _forward(self, chains: Chains) -> np.ndarray:
        """Read the unread states, or append one entry on the head's own output."""
        slots = chains.slots
        reading = slots[self._anchor[slots] < self._received[slots]]
        self._cache.truncate(self._rows[reading], self._anchor[reading] - self._first[reading])
        self._depth[reading] = 0
        counts = np.maximum(self._received[slots] - self._anchor[slots], 1)
        chains, rows, counts = self._reserve(chains, self._rows[slots], counts)
        slots = chains.slots
        if not len(slots):
            return slots
        begins, reads = self._first[slots] + self._cached(slots), self._anchor[slots] < self._received[slots]
        features = [self._outputs[slots[~reads]]]
        if reads.any():
            features.insert(0, self._read_states(slots[reads], counts[reads]))
        tokens = self.mirrors.tokens(slots, begins + 1, counts)
        outputs, logits = self._runner.forward(rows, places(begins, counts), counts, tokens, torch.cat(features))
        self._anchor[slots[reads]] = (begins + counts)[reads]
        self._outputs[slots], self._has_output[slots] = outputs, True
        guessing = self._can_run_ahead()[slots]
        return self._guess(slots[guessing], logits[guessing])

    def _read_states(self, slots: np.ndarray, counts: np.ndarray) -> torch.Tensor:
        """Take `counts` unread states of each slot; returns their features `(sum(counts), hidden)`."""
        parts = []
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            unread = self._unread[slot]
            while count:
                span = unread.pop(0)
                part = span.states[:count]
                if len(part) < len(span.states):
                    unread.insert(0, Features(span.begin + len(part), span.states[len(part) :]))
                parts.append(from_wire(part))
                count -= len(part)
        return self._runner.fuse(torch.cat(parts))

    def _guess(self, slots: np.ndarray, logits: torch.Tensor) -> np.ndarray:
        """Sample the tail tokens at `_depth`; another token replaces the rest of the tail. Returns changed slots."""
        mirrors, places = self.mirrors, self.mirrors.known[slots] + self._depth[slots]
        tokens = self._sample(slots, logits, places)
        again = (places < mirrors.ends[slots]) & (mirrors.lines[slots, places] == tokens)
        self._depth[slots] += 1
        drawn = ~again & (tokens >= 0)
        mirrors.lines[slots[drawn], places[drawn]] = tokens[drawn]
        mirrors.ends[slots[drawn]] = places[drawn] + 1
        return slots[~again]
