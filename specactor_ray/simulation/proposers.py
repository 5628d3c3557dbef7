"""Drafters of the virtual cluster: proposers that take time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specactor_ray.drafters.base import Proposer
from specactor_ray.drafters.mirror import RequestMirror
from specactor_ray.messages import SamplingParams
from specactor_ray.simulation.kernel import VirtualClock
from specactor_ray.simulation.text import NO_GUESS
from specactor_ray.simulation.world import World


class SimulatedProposer:
    """Guesses what the world's text says that its method guesses.

    A forward drafts one token for every request that has room in its window; a lookup fills all windows at once, as far
    as it finds something. What a request's cache lacks is prefilled in the next forward.

    Args:
        name: Its actor.
        method: The draft method it stands for.
        clock: Time of its process.
        world: Text and durations.
        random: A number in [0, 1), for what corrupt drafters say.
    """

    weight_version = 0
    vocab_size: int | None

    def __init__(self, name: str, method: str, clock: VirtualClock, world: World, random: Callable[[], float]) -> None:
        self.method, self.vocab_size = method, world.text.vocab_size
        self._name, self._clock, self._world, self._random = name, clock, world, random
        self._time = world.draft_time(method)
        self._mirrors: dict[str, RequestMirror] = {}
        self._changed: dict[str, None] = {}
        self._to_prefill = 0
        self._cached = 0
        """Tokens of all requests that it follows; lookups keep none."""

    def open(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        committed_token_ids: Sequence[int],
        sampling: SamplingParams,
        window: int,
    ) -> None:
        self._free(request_id)
        self._mirrors[request_id] = RequestMirror(prompt_token_ids, committed_token_ids, sampling, window)
        self._changed[request_id] = None
        if not self._time.is_lookup:
            tokens = len(prompt_token_ids) + len(committed_token_ids)
            self._to_prefill += tokens
            self._cached += tokens

    def commit(self, request_id: str, start: int, token_ids: Sequence[int], window: int) -> bool:
        mirror = self._mirrors.get(request_id)
        if mirror is None:
            return False
        outcome = mirror.commit(start, token_ids, window)
        if not outcome.ok:
            return False
        if not self._time.is_lookup:
            self._cached += outcome.advanced
        self._changed[request_id] = None
        return True

    def extend(self) -> list[str]:
        changed, self._changed = self._changed, {}
        if self._time.is_lookup:
            self._look_up([self._mirrors[name] for name in changed])
        else:
            changed.update(dict.fromkeys(self._forward()))
        return list(changed)

    def _forward(self) -> Sequence[str]:
        growing = {name: mirror for name, mirror in self._mirrors.items() if mirror.room}
        if growing:
            context = sum(len(mirror.prompt) + mirror.base_len for mirror in growing.values())
            self._work(len(growing), len(growing), context)
        for mirror in growing.values():
            mirror.tail.append(max(self._guess(mirror), 0))
        return list(growing)

    def _look_up(self, mirrors: Sequence[RequestMirror]) -> None:
        found = 0
        for mirror in mirrors:
            before = len(mirror.tail)
            while mirror.room and (token := self._guess(mirror)) != NO_GUESS:
                mirror.tail.append(token)
            found += len(mirror.tail) - before
        if mirrors:
            self._work(len(mirrors), found, 0)

    def _guess(self, mirror: RequestMirror) -> int:
        world, seed = self._world, mirror.sampling.seed
        if self._name in world.corrupt:
            return int(self._random() * 2e9) - 10**9
        position = mirror.base_len + len(mirror.tail)
        return world.text.guess(self.method, seed, world.version_of.get(seed, 0), position)

    def _work(self, rows: int, positions: int, context: int) -> None:
        clock, world, prefill = self._clock, self._world, self._to_prefill
        self._to_prefill = 0
        seconds = self._time.forward.seconds(rows, positions, context, prefill)
        begin = clock.now()
        clock.work(seconds + world.python.draft_s(clock.process, rows))
        world.record.span(self._name, "draft", begin, clock.now(), rows, positions)
        world.record.streams(self._name, len(self._mirrors), self._cached)
        world.python.begin(clock.process)

    def tail(self, request_id: str) -> tuple[int, tuple[int, ...]]:
        mirror = self._mirrors[request_id]
        return mirror.base_len, tuple(mirror.tail)

    def pending(self, request_id: str) -> bool:
        mirror = self._mirrors.get(request_id)
        return mirror is not None and mirror.room > 0 and (not self._time.is_lookup or request_id in self._changed)

    def close(self, request_id: str, finished: bool = True) -> None:
        self._free(request_id)
        self._mirrors.pop(request_id, None)
        self._changed.pop(request_id, None)

    def _free(self, request_id: str) -> None:
        mirror = self._mirrors.get(request_id)
        if mirror is not None and not self._time.is_lookup:
            self._cached -= len(mirror.prompt) + mirror.base_len

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        self._clock.work(self._world.times.sync_s)
        self.weight_version = version


class TimedProposer:
    """A real lookup over recorded tokens, which takes as long as a cost model says.

    Args:
        inner: The product's own proposer.
        clock: Time of its process.
        world: Durations.
        name: Its actor.
    """

    def __init__(self, inner: Proposer, clock: VirtualClock, world: World, name: str) -> None:
        self.method, self.vocab_size, self.weight_version = inner.method, inner.vocab_size, inner.weight_version
        self.commit, self.tail, self.pending, self.load_weights = (
            inner.commit,
            inner.tail,
            inner.pending,
            inner.load_weights,
        )
        self.forget_history = getattr(inner, "forget_history", lambda: None)
        self._inner, self._clock, self._world, self._name = inner, clock, world, name
        self._open: dict[str, None] = {}
        self._time = world.draft_time(inner.method)

    def open(self, request_id: str, *arguments: Any) -> None:
        self._inner.open(request_id, *arguments)
        self._open[request_id] = None
        self._world.record.streams(self._name, len(self._open), 0)  # lookups keep no cache

    def close(self, request_id: str, finished: bool = True) -> None:
        self._inner.close(request_id, finished)
        self._open.pop(request_id, None)
        self._world.record.streams(self._name, len(self._open), 0)

    def extend(self) -> list[str]:
        clock, world = self._clock, self._world
        world.python.begin(clock.process)  # what the lookup itself takes is what the cost model says
        changed = self._inner.extend()
        if changed:
            found = sum(len(self._inner.tail(name)[1]) for name in changed)
            begin, own_s = clock.now(), world.python.draft_s(clock.process, len(changed))
            clock.work(self._time.forward.seconds(len(changed), found, 0) + own_s)
            world.record.span(self._name, "draft", begin, clock.now(), len(changed), found)
        return changed
