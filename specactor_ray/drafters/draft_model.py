"""`draft_model`: a smaller transformers model with the target's vocabulary drafts token by token, batched.

It samples with the target's own keyed noise (same seed, same position), so it agrees with the target far more
often than a drafter with draws of its own: P[match] >= (1 - TV) / (1 + TV) for total variation TV between the
two distributions (Daliri, Musco, Suresh, arXiv 2408.07978). Independent draws match with sum_v p(v) q(v) only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.drafters.base import RowProposer
from specactor_ray.drafters.mirror import RequestMirror
from specactor_ray.drafters.registry import BUILT_IN
from specactor_ray.drafters.sound_rows import sample_sound_rows
from specactor_ray.messages import SamplingParams
from specactor_ray.modeling.loading import load_model
from specactor_ray.modeling.ragged_cache import CacheRow
from specactor_ray.modeling.ragged_model import RaggedModel, RowChunk
from specactor_ray.sampling import own_noise, warm_up

_MAX_STEP_TOKENS = 512
"""Most positions in one forward; a long prompt is read in chunks of this size."""
_FIRST_RESERVATION = 128


@dataclass(slots=True)
class _Mirrored:
    """A mirror and its cache row; each row takes one of the `max_batch` places. Without one nothing is drafted."""

    mirror: RequestMirror
    cache: CacheRow | None
    refused: bool = False
    """There was no place or no room for it; a later commit tries again."""
    answered: bool = False
    """All that can be said about the newest commit was reported."""

    @property
    def length(self) -> int:
        """Tokens of prompt, committed output and tail."""
        return len(self.mirror.prompt) + len(self.mirror.committed) + len(self.mirror.tail)

    def tokens(self, begin: int, end: int) -> list[int]:
        """The sequence's tokens `[begin, end)`."""
        parts: tuple[Sequence[int], ...] = (self.mirror.prompt, self.mirror.committed, self.mirror.tail)
        result: list[int] = []
        for part in parts:
            if begin < len(part) and end > 0:
                result.extend(part[max(begin, 0) : end])
            begin, end = begin - len(part), end - len(part)
        return result


class DraftModelProposer(RowProposer):
    """`Proposer` over a `RaggedModel`.

    Args:
        model: The small model with its cache; owned by the proposer from now on.
        max_batch: Most requests drafted for at once; those beyond it are answered with "no guess" until one ends.
        shared_noise: Sample with the target's noise; without it with independent noise, to measure what sharing gains.
    """

    method = "draft_model"
    traits = BUILT_IN[method].traits

    def __init__(self, model: RaggedModel, max_batch: int = 64, shared_noise: bool = True) -> None:
        self._model = model
        self._shared_noise = shared_noise
        self._places = max_batch
        """Requests that may yet be drafted for."""
        self._requests: dict[str, _Mirrored] = {}
        self.vocab_size: int | None = model.vocab_size
        self.max_len = min(model.max_positions, model.cache.slots)
        warm_up(model.device, model.dtype)

    @classmethod
    def from_config(cls, config: DrafterConfig, target: TargetConfig, device: str) -> Self:
        assert config.model is not None  # validated
        model = load_model(config.model, dtype=config.dtype, device=device, trust_remote_code=config.trust_remote_code)
        return cls(RaggedModel(model, int(config.kv_cache_gb * 2**30)), config.max_batch, config.shared_noise)

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
        entry = self._requests[request_id] = _Mirrored(mirror, None, refused=True)
        self._take_place(entry)

    def commit(self, request_id: str, start: int, token_ids: Sequence[int]) -> bool:
        entry = self._requests.get(request_id)
        if entry is None:
            return False
        known = entry.mirror.base_len
        outcome = entry.mirror.commit(start, token_ids)
        if not outcome.ok:
            return False
        entry.answered = False
        if entry.refused:
            self._take_place(entry)
        elif entry.cache is not None:
            # What the cache read is right up to the agreed tail; if all of it agreed, the surviving tail is right too.
            agreed = len(entry.mirror.prompt) + known + outcome.matched + outcome.survived
            entry.cache.truncate(min(entry.cache.length, agreed))
        return True

    def extend(self) -> list[str]:
        answered = self._answer()
        finishing: list[str] = []
        while not finishing:
            chunks, finishing = self._plan()
            if not chunks:
                return answered
            logits = self._model.forward(chunks).logits
        return answered + self._append_samples(finishing, logits)

    def tail(self, request_id: str) -> tuple[int, tuple[int, ...]]:
        mirror = self._requests[request_id].mirror
        return len(mirror.committed), tuple(mirror.tail)

    def pending(self, request_id: str) -> bool:
        return self._can_extend(self._requests[request_id])

    def close(self, request_id: str, finished: bool = True) -> None:
        entry = self._requests.pop(request_id, None)
        if entry is not None:
            self._give_up(entry)

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        self._model.load_weights(state_dict)
        for entry in self._requests.values():
            entry.mirror.tail.clear()
            if entry.cache is not None:
                entry.cache.truncate(0)

    def _take_place(self, entry: _Mirrored) -> None:
        """Draft for this request from now on, if there is a place and room in the cache."""
        if self._places:
            wanted = len(entry.mirror.prompt) + len(entry.mirror.committed) + _FIRST_RESERVATION
            entry.cache = self._model.cache.open(min(wanted, self.max_len))
            entry.refused = entry.cache is None
            self._places -= not entry.refused

    def _can_extend(self, entry: _Mirrored) -> bool:
        if entry.cache is None or entry.mirror.room <= 0:
            return False
        left = entry.mirror.sampling.max_tokens - len(entry.mirror.committed) - len(entry.mirror.tail)
        return left > 0 and entry.length < self.max_len

    def _answer(self) -> list[str]:
        """Requests whose newest commit is answered although nothing is drafted, once: they cannot be drafted for, or
        what is left of their tail is all that is wanted."""
        answered = []
        for request_id, entry in self._requests.items():
            if not entry.answered and not self._can_extend(entry):
                entry.answered = True
                answered.append(request_id)
        return answered

    def _plan(self) -> tuple[list[RowChunk], list[str]]:
        """Chunks for one forward, requests that lack least first; and the requests whose next token it yields."""
        extendable = [(request_id, entry) for request_id, entry in self._requests.items() if self._can_extend(entry)]
        extendable.sort(key=lambda item: item[1].length - (item[1].cache.length if item[1].cache else 0))
        chunks, finishing, budget = [], [], _MAX_STEP_TOKENS
        for request_id, entry in extendable:
            cache = entry.cache
            if cache is None or budget <= 0:
                break
            begin, end = cache.length, min(entry.length, cache.length + budget)
            if not cache.reserve(end):
                self._give_up(entry)
                continue
            complete = end == entry.length
            chunks.append(RowChunk(cache, entry.tokens(begin, end), int(complete)))
            budget -= end - begin
            if complete:
                finishing.append(request_id)
        return chunks, finishing

    def _append_samples(self, request_ids: Sequence[str], logits: Any) -> list[str]:
        mirrors = [self._requests[request_id].mirror for request_id in request_ids]
        tokens = sample_sound_rows(
            logits,
            [mirror.sampling for mirror in mirrors],
            [len(mirror.committed) + len(mirror.tail) for mirror in mirrors],
        )
        for row, request_id in enumerate(request_ids):
            entry = self._requests[request_id]
            if row in tokens:
                entry.mirror.tail.append(tokens[row])
            else:
                self._give_up(entry)  # logits that cannot be sampled from
            entry.answered = not self._can_extend(entry)
        return list(request_ids)

    def _give_up(self, entry: _Mirrored) -> None:
        """Draft no more for this request: another one may have its place and its part of the cache."""
        if entry.cache is not None:
            entry.cache.free()
            entry.cache = None
            self._places += 1
