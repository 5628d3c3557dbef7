"""Outputs under way, with the target's hidden states, kept until they end and can be learned from.

A draft actor sees everything that is needed: the verifier streams the states of committed positions to those who draft
on them (`messages.Features`). Like all messages these may come late, twice or not at all; what is recorded has no gaps,
only a later beginning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specactor_ray.drafter_training.eagle import EagleExample
from specactor_ray.messages import DraftOpen, Features
from specactor_ray.modeling.wire import from_wire


@dataclass(slots=True)
class _Recording:
    """One request. States are those of the positions `[first, end)`."""

    token_ids: list[int]
    num_prompt: int
    first: int = 0
    end: int = 0
    states: deque[torch.Tensor] = field(default_factory=deque)

    def __len__(self) -> int:
        return self.end - self.first

    def take(self, features: Features) -> None:
        """States of further positions; behind a gap the recording begins anew."""
        if features.end <= self.end:
            return
        if features.begin > self.end:
            self.states.clear()
            self.first = self.end = features.begin
        self.states.append(from_wire(features.states[self.end - features.begin :]))
        self.end = features.end

    def drop_oldest(self) -> None:
        self.first += len(self.states.popleft())


class RolloutRecorder:
    """Records the requests that are open at a draft actor.

    Args:
        max_tokens: Most positions whose states are kept, of all requests together. Where there are more, the longest
            recording loses its beginning.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._recordings: dict[str, _Recording] = {}
        self.tokens = 0
        """Positions whose states are kept."""

    def open(self, message: DraftOpen) -> None:
        """Begin a recording, in place of one of the same request."""
        self.forget(message.request_id)
        tokens = [*message.prompt_token_ids, *message.committed_token_ids]
        self._recordings[message.request_id] = _Recording(tokens, len(message.prompt_token_ids))
        self._take(message.request_id, message.features)

    def commit(self, request_id: str, start: int, token_ids: Sequence[int], features: Sequence[Features]) -> None:
        """Further output tokens, and the states that came with them. After a gap in the tokens nothing is recorded
        until the request is opened again."""
        recording = self._recordings.get(request_id)
        if recording is None:
            return
        known = len(recording.token_ids) - recording.num_prompt
        if start > known:
            self.forget(request_id)
            return
        recording.token_ids.extend(token_ids[known - start :])
        self._take(request_id, features)

    def close(self, request_id: str) -> EagleExample | None:
        """The request has ended: what there is to learn from it, if anything."""
        recording = self._recordings.get(request_id)
        self.forget(request_id)
        if recording is None:
            return None
        count = min(len(recording), len(recording.token_ids) - 1 - recording.first)
        if recording.first + count < recording.num_prompt or count < 1:
            return None  # no position of it predicts an output token
        states = torch.cat(list(recording.states))[:count]
        return EagleExample(tuple(recording.token_ids), recording.num_prompt, states, first=recording.first)

    def forget(self, request_id: str) -> None:
        """Drop a recording; unknown ids are ignored."""
        recording = self._recordings.pop(request_id, None)
        if recording is not None:
            self.tokens -= len(recording)

    def _take(self, request_id: str, features: Sequence[Features]) -> None:
        recording = self._recordings[request_id]
        before = len(recording)
        for span in features:
            recording.take(span)
        self.tokens += len(recording) - before
        while self.tokens > self._max_tokens:
            longest = max(self._recordings.values(), key=len)
            self.tokens -= len(longest.states[0])
            longest.drop_oldest()
