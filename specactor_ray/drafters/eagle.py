"""`eagle`: a small head that predicts the target's next tokens from the target's own hidden states.

EAGLE-3 (arXiv 2503.01840; the head itself: `modeling/eagle_head.py`). The verifier streams the hidden states of
committed positions along with its commits. The head runs ahead of them on its own outputs, and whenever true ones
arrive it restarts from the newest (*re-anchors*): it goes through the surviving tail again, keeps it as far as it
would still guess the same, and replaces the rest. So guesses rest on at most one window of predicted features.

Of an output of `L` tokens in all (prompt included) the target's states of positions `0..L-2` are known: position `L-1`
holds the newest token, which the target has not read yet. The head's entry for position `i` is (state of `i`, token of
`i + 1`) and predicts the token of `i + 2`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.drafters.base import RowProposer
from specactor_ray.drafters.mirror import RequestMirror
from specactor_ray.drafters.registry import BUILT_IN
from specactor_ray.drafters.sound_rows import sample_sound_rows
from specactor_ray.messages import Features, SamplingParams
from specactor_ray.modeling.eagle_checkpoint import load_head
from specactor_ray.modeling.eagle_runner import EagleChunk, EagleRunner
from specactor_ray.modeling.ragged_cache import CacheRow
from specactor_ray.modeling.wire import from_wire
from specactor_ray.sampling import own_noise, warm_up

_MAX_STEP_TOKENS = 512
"""Most positions in one forward; the states of a long prompt are read in chunks of this size."""
_FIRST_RESERVATION = 128


@dataclass(slots=True)
class _Entry:
    """A mirror, and how far the head has come with it.

    The cache holds the head's entries of positions `[first, first + cache.length)`. The first `anchored` of them rest
    on true states, the others on the head's own outputs: they belong to the tail.
    """

    mirror: RequestMirror
    cache: CacheRow | None
    refused: bool = False
    """There is no place for it, as `max_batch` others have one."""
    has_place: bool = False
    promised: bool = False
    """It has got a place late, and lacks the states up to then: it is to be opened afresh."""
    first: int = 0
    anchored: int = 0
    unread: list[Features] = field(default_factory=list)
    """True states of the positions from `first + anchored` on, without gaps."""
    depth: int = 0
    """Tail tokens that were guessed, or found again, from the newest anchor."""
    output: torch.Tensor | None = None
    """`(hidden,)`: what the head put out at its last entry; takes the place of the next position's state."""
    answered: bool = False
    """All that can be said about the newest commit was reported."""

    @property
    def known(self) -> int:
        """Tokens of prompt and committed output."""
        return len(self.mirror.prompt) + len(self.mirror.committed)

    @property
    def anchor(self) -> int:
        """The first position whose true state the head has not read."""
        return self.first + self.anchored

    @property
    def next_state(self) -> int:
        """The first position whose true state has not come."""
        return self.unread[-1].end if self.unread else self.anchor

    def token(self, position: int) -> int:
        """The token at a sequence position, those of the tail included."""
        for part in (self.mirror.prompt, self.mirror.committed, self.mirror.tail):
            if position < len(part):
                return part[position]
            position -= len(part)
        raise IndexError("no token there")

    def begin_anew(self, first: int) -> None:
        """Forget all that was read; the context begins at position `first`."""
        self.unread, self.first, self.anchored, self.output = [], first, 0, None
        if self.cache is not None:
            self.cache.truncate(0)

    def guess(self, token: int) -> bool:
        """The head guesses `token` for the tail position `depth`. Returns whether that changes the tail."""
        tail = self.mirror.tail
        again = self.depth < len(tail) and tail[self.depth] == token
        if not again:
            tail[self.depth :] = [token]
        self.depth += 1
        return not again


class EagleProposer(RowProposer):
    """`Proposer` over an `EagleRunner`; it needs `add_features` after each `open` and `commit`.

    Args:
        runner: The head with its cache; owned by the proposer from now on.
        max_batch: Most requests drafted for at once; those beyond it are answered with "no guess" until one ends.
        shared_noise: Sample with the target's own noise (same seed, same position).
    """

    method = "eagle"
    traits = BUILT_IN[method].traits

    def __init__(self, runner: EagleRunner, max_batch: int = 64, shared_noise: bool = True) -> None:
        self._runner, self._shared_noise = runner, shared_noise
        self._places = max_batch
        """Requests that may yet be drafted for."""
        self._entries: dict[str, _Entry] = {}
        self.vocab_size: int | None = runner.config.vocab_size
        self.max_len = min(int(runner.config.layer.get("max_position_embeddings", 1 << 30)), runner.cache.slots)
        warm_up()

    @classmethod
    def from_config(cls, config: DrafterConfig, target: TargetConfig, device: str) -> Self:
        assert config.model is not None  # validated
        trust = target.trust_remote_code
        head = load_head(config.model, target.model, dtype=config.dtype, device=device, trust_remote_code=trust)
        return cls(EagleRunner(head, int(config.kv_cache_gb * 2**30)), config.max_batch, config.shared_noise)

    def open(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        committed_token_ids: Sequence[int],
        sampling: SamplingParams,
        window: int,
    ) -> None:
        self.close(request_id)
        noise = sampling if self._shared_noise else own_noise(sampling)
        mirror = RequestMirror(prompt_token_ids, committed_token_ids, noise, window)
        entry = self._entries[request_id] = _Entry(mirror, None, refused=True)
        if self._take_place(entry):
            wanted = len(prompt_token_ids) + len(committed_token_ids) + _FIRST_RESERVATION
            entry.cache = self._runner.cache.open(min(wanted, self.max_len))

    def commit(self, request_id: str, start: int, token_ids: Sequence[int]) -> bool:
        entry = self._entries.get(request_id)
        if entry is None or not entry.mirror.commit(start, token_ids).ok:
            return False
        if entry.refused and self._take_place(entry):
            entry.promised = True
        if entry.promised:
            return False
        entry.answered = False
        return True

    def add_features(self, request_id: str, features: Sequence[Features]) -> None:
        """True states came; they are read by the next `extend`. What is known already is passed over; behind a gap the
        head starts over, with less context. None are kept of a request that is too long for the head."""
        entry = self._entries.get(request_id)
        if entry is None or entry.cache is None:
            return
        if entry.known > self.max_len:
            self._give_up(entry)
            return
        for span in features:
            if span.states.shape[1] != self._runner.config.feature_size:
                raise ValueError(
                    f"hidden states are {span.states.shape[1]} wide; the head reads {self._runner.config.feature_size} "
                    f"(layers {list(self._runner.config.exported_layers)} of the target)"
                )
            if span.end <= entry.next_state:
                continue
            if span.begin > entry.next_state:
                entry.begin_anew(span.begin)
            entry.unread.append(Features(entry.next_state, span.states[entry.next_state - span.begin :]))

    def extend(self) -> list[str]:
        reported: dict[str, None] = {}
        while not reported:
            plan = self._plan()
            if plan:
                outputs, logits = self._runner.forward([chunk for _, chunk in plan])
                reported.update(dict.fromkeys(self._take([request_id for request_id, _ in plan], outputs, logits)))
            reported.update(dict.fromkeys(self._answer()))
            if not plan:
                break
        return list(reported)

    def tail(self, request_id: str) -> tuple[int, tuple[int, ...]]:
        mirror = self._entries[request_id].mirror
        return mirror.base_len, tuple(mirror.tail)

    def pending(self, request_id: str) -> bool:
        return self._can_extend(self._entries[request_id])

    def close(self, request_id: str, finished: bool = True) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._give_up(entry)

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        """New weights of the head. Entries that the old ones made stay: they are a little off, and rebuilding them
        would take states that are gone."""
        self._runner.load_weights(state_dict)

    # ---- one forward ----

    def _take_place(self, entry: _Entry) -> bool:
        """Draft for this request from now on, if there is a place."""
        entry.has_place, entry.refused = self._places > 0, self._places == 0
        self._places -= entry.has_place
        return entry.has_place

    def _can_extend(self, entry: _Entry) -> bool:
        return entry.cache is not None and (self._can_anchor(entry) or self._can_run_ahead(entry))

    def _can_anchor(self, entry: _Entry) -> bool:
        """There are true states to read, and the token after each is known."""
        return bool(entry.unread) and entry.next_state < entry.known and entry.known <= self.max_len

    def _can_run_ahead(self, entry: _Entry) -> bool:
        """The head has read all that is committed, and its tail may be lengthened or has to be gone through again."""
        return entry.output is not None and entry.anchor == entry.known - 1 and entry.depth < self._limit(entry)

    def _limit(self, entry: _Entry) -> int:
        """Most tokens of the tail."""
        left = entry.mirror.sampling.max_tokens - len(entry.mirror.committed)
        return max(0, min(entry.mirror.window, left, self.max_len - entry.known))

    def _plan(self) -> list[tuple[str, EagleChunk]]:
        """Per request that can be extended: unread true states, else one more entry on the head's own output."""
        plan, budget = list[tuple[str, EagleChunk]](), _MAX_STEP_TOKENS
        for request_id, entry in self._entries.items():
            if budget <= 0 or not self._can_extend(entry):
                continue
            cache = entry.cache
            assert cache is not None  # or it could not be extended
            if self._can_anchor(entry):
                cache.truncate(entry.anchored)
                entry.depth = 0
                features = self._read_states(entry, budget)
            else:
                assert entry.output is not None
                features = entry.output.unsqueeze(0)
            if not cache.reserve(cache.length + len(features)):
                self._give_up(entry)
                continue
            position = entry.first + cache.length
            tokens = [entry.token(position + offset + 1) for offset in range(len(features))]
            plan.append((request_id, EagleChunk(cache, position, tokens, features)))
            budget -= len(features)
        return plan

    def _read_states(self, entry: _Entry, budget: int) -> torch.Tensor:
        """The next unread states, at most `budget` of them, fused; the entry counts them as anchored."""
        parts, taken = [], 0
        while entry.unread and taken < budget:
            span = entry.unread.pop(0)
            part = span.states[: budget - taken]
            if len(part) < len(span.states):
                entry.unread.insert(0, Features(span.begin + len(part), span.states[len(part) :]))
            parts.append(from_wire(part))
            taken += len(part)
        entry.anchored += taken
        return self._runner.fuse(torch.cat(parts))

    def _take(self, request_ids: Sequence[str], outputs: torch.Tensor, logits: torch.Tensor) -> list[str]:
        """Sample for the requests that have read all they know; returns those whose tail changed."""
        guessing = []
        for row, request_id in enumerate(request_ids):
            entry = self._entries[request_id]
            entry.output = outputs[row]
            if entry.anchor == entry.known - 1 and entry.depth < self._limit(entry):
                guessing.append(row)
        if not guessing:
            return []
        entries = [self._entries[request_ids[row]] for row in guessing]
        tokens = sample_sound_rows(
            logits[guessing],
            [entry.mirror.sampling for entry in entries],
            [len(entry.mirror.committed) + entry.depth for entry in entries],
        )
        changed = []
        for index, entry in enumerate(entries):
            if index not in tokens:
                self._give_up(entry)
            elif entry.guess(tokens[index]):
                changed.append(request_ids[guessing[index]])
        return changed

    def _answer(self) -> list[str]:
        """Requests about whose newest commit nothing more can be said; each is reported once."""
        answered = []
        for request_id, entry in self._entries.items():
            if not entry.answered and not self._can_extend(entry):
                entry.answered = True
                answered.append(request_id)
        return answered

    def _give_up(self, entry: _Entry) -> None:
        """Draft no more for this request: another one may have its place and its part of the cache."""
        self._places += entry.has_place
        entry.has_place = False
        if entry.cache is not None:
            entry.cache.free()
            entry.cache = None
        entry.unread.clear()
        entry.mirror.tail.clear()
