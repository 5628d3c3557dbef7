"""Proposers of a user's own, one of each kind, and some that contradict themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specactor_ray.drafters.base import RowProposer, Traits
from specactor_ray.drafters.draft_model import DraftModelProposer
from specactor_ray.drafters.mirror import RequestMirror
from specactor_ray.messages import Features, SamplingParams


class Model(RowProposer):
    """Guesses that the output copies the prompt after its last token; one token a call, as a model does."""

    method, vocab_size = "own", None
    step = 1

    def __init__(self, config: Any) -> None:
        self.window = config.window
        self.mirrors: dict[str, RequestMirror] = {}
        self.opened: set[str] = set()
        self.calls = 0

    def open(
        self, request_id: str, prompt: Sequence[int], committed: Sequence[int], sampling: SamplingParams, window: int
    ) -> None:
        self.mirrors[request_id] = RequestMirror(prompt, committed, sampling, window)
        self.opened.add(request_id)

    def commit(self, request_id: str, start: int, token_ids: Sequence[int]) -> bool:
        mirror = self.mirrors.get(request_id)
        return mirror is not None and mirror.commit(start, token_ids).ok

    def extend(self) -> list[str]:
        self.calls += 1
        return [request_id for request_id, mirror in self.mirrors.items() if self._lengthen(mirror)]

    def tail(self, request_id: str) -> tuple[int, tuple[int, ...]]:
        mirror = self.mirrors[request_id]
        return mirror.base_len, tuple(mirror.tail)

    def pending(self, request_id: str) -> bool:
        return self.mirrors[request_id].room > 0

    def close(self, request_id: str, finished: bool = True) -> None:
        self.mirrors.pop(request_id, None)

    def _lengthen(self, mirror: RequestMirror) -> bool:
        known = [*mirror.prompt, *mirror.committed, *mirror.tail]
        after = known.index(known[-1]) + 1
        guess = known[after : after + min(self.step, mirror.room)]
        mirror.tail += guess
        return bool(guess)


class Lookup(Model):
    """The same, whole windows at once."""

    traits = Traits(looks_up=True)
    step = 99


class Learner(Model):
    """Keeps whole outputs."""

    traits = Traits(keeps_history=True)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.learned: dict[str, list[int]] = {}

    def close(self, request_id: str, finished: bool = True) -> None:
        mirror = self.mirrors.pop(request_id, None)
        if finished and mirror is not None:
            self.learned[request_id] = mirror.committed

    def forget_history(self) -> None:
        self.learned.clear()


class Reader(Model):
    """Notes which states it was sent."""

    traits = Traits(reads_features=True)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.spans: dict[str, list[Features]] = {}

    def add_features(self, request_id: str, features: Sequence[Features]) -> None:
        self.spans.setdefault(request_id, []).extend(features)


class Noisy(DraftModelProposer):
    """The package's own, under another name."""


class Deaf(Model):
    traits = Traits(reads_features=True)


class SecretReader(Model):
    def add_features(self, request_id: str, features: Sequence[Features]) -> None: ...


class SecretLearner(Model):
    def forget_history(self) -> None: ...


class Vague(Model):
    traits = {"looks_up": True}  # type: ignore[assignment]


class Unfinished(RowProposer):
    method, vocab_size = "own", None
