"""One verifier and some drafters in threads, without Ray: real engine, real proposers, a channel that may misbehave."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import torch

from specactor_ray.config.methods import DrafterSpec
from specactor_ray.config.schema import SpeculationConfig, VerifyPolicy
from specactor_ray.draft.eagle.checkpoint import load_head
from specactor_ray.draft.eagle.proposer import EagleProposer, EagleRunner
from specactor_ray.draft.lookup import NgramProposer, SuffixProposer
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.draft.proposer import Proposer
from specactor_ray.draft.runner import DraftRunner
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.table.requests import TargetRequest
from specactor_ray.target.hf import HfEngine
from specactor_ray.transport.link import Link
from specactor_ray.transport.messages import Finished, Progress
from specactor_ray.verify.drafting import DrafterLink, Drafting, HostedDrafter
from specactor_ray.verify.loop import VerifyLoop
from tests.tiny import tiny_draft, tiny_eagle, tiny_target
from tests.unit.engine_conformance import Driver, run

torch.set_num_threads(1)
EAGLE_LAYERS = (0, 1, 2)
E = TypeVar("E", bound=EagleProposer)


def ragged(folder: Any, hidden_layers: Sequence[int] = (), cache_bytes: int = 16 << 20) -> RaggedModel:
    from transformers import AutoModelForCausalLM

    return RaggedModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), cache_bytes, hidden_layers)


def engine(hidden_layers: Sequence[int] = ()) -> HfEngine:
    return HfEngine(ragged(tiny_target(), hidden_layers), [eos_id()])


def eagle(kind: type[E] = EagleProposer, branches: int = 0) -> E:  # type: ignore[assignment]
    return kind(EagleRunner(load_head(str(tiny_eagle()), str(tiny_target())), 4 << 20), branches=branches)


def eos_id() -> int:
    from transformers import AutoTokenizer

    return int(AutoTokenizer.from_pretrained(tiny_target()).eos_token_id)


class Channel:
    """Delivers messages in another thread's stead: at once, or with loss, repetition and reordering."""

    def __init__(self, deliver: Callable[[Any], None], faults: random.Random | None) -> None:
        self._deliver, self._faults = deliver, faults
        self._held: list[Any] = []

    def __call__(self, message: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self._faults is None:
            self._deliver(message)
        else:
            self._misdeliver(message, self._faults)
        future.set_result(None)
        return future

    def _misdeliver(self, message: Any, faults: random.Random) -> None:
        messages = [message] * (faults.random() > 0.2) + [message] * (faults.random() < 0.2)
        self._held += [message] * (faults.random() < 0.2)
        if faults.random() < 0.3:
            messages, self._held = messages + self._held, []
        faults.shuffle(messages)
        for one in messages:
            self._deliver(one)


def spec_of(proposer: Proposer, window: int) -> DrafterSpec:
    """What a link says of its drafter."""
    return DrafterSpec(proposer.method, window=window, traits=proposer.traits)


class Bench:
    """One verifier and some drafters, connected; runs until all requests have ended. The verifier hosts all drafters
    (`coupled`), or the lookups (`hosts_lookups`)."""

    def __init__(
        self,
        proposers: Mapping[str, Proposer],
        coupled: bool,
        faults: random.Random | None = None,
        window: int = 6,
        narrow: int | None = None,
        branches: int = 0,
        hosts_lookups: bool = False,
        **speculation: Any,
    ) -> None:
        config = SpeculationConfig(window=narrow or window, **{"verify": VerifyPolicy.all, **speculation})
        reading = [proposer for proposer in proposers.values() if proposer.traits.reads_features]
        target = self.engine = engine(EAGLE_LAYERS if reading else ())
        sizes: Any = {"window": window, "branches": branches}
        drafts = Drafting("v0", coupled, config, target.table, **sizes, states_of=target.states)
        hosted = {
            name: DraftRunner(name, one)
            for name, one in proposers.items()
            if coupled or (hosts_lookups and one.traits.looks_up)
        }
        self.drafts: dict[str, DraftLoop] = {
            name: DraftLoop(name, one) for name, one in proposers.items() if name not in hosted
        }
        self.hosted = hosted
        self._threads: list[threading.Thread] = []
        self._attempt, self._next_event = 0, 0
        self.progress: list[Progress] = []
        """Commits of all steps."""
        self.verifier = VerifyLoop(
            target, drafts, [HostedDrafter(spec_of(one.proposer, window), one) for one in hosted.values()]
        )
        if not coupled:
            self._connect(self.drafts, window, faults)
        self._threads.append(threading.Thread(target=self.verifier.run, daemon=True))

    def _connect(self, apart: Mapping[str, DraftLoop], window: int, faults: random.Random | None) -> None:
        links = {}
        for name, loop in apart.items():
            link = Link(Channel(loop.deliver, faults))
            links[name] = DrafterLink(spec_of(loop.proposer, window), link)
            loop.set_verifiers({"v0": Link(Channel(self.verifier.deliver, faults))})
        self.verifier.set_drafters(links)
        self._threads += [threading.Thread(target=loop.run, daemon=True) for loop in apart.values()]

    def run(self, batch: Sequence[TargetRequest], timeout_s: float = 240.0) -> dict[str, list[int]]:
        for thread in self._threads:
            if not thread.is_alive():
                thread.start()
        self.verifier.submit([replace(request, attempt=self._attempt) for request in batch])
        self._attempt += 1
        tokens: dict[str, list[int]] = {request.request_id: [] for request in batch}
        left = set(tokens)
        self.finished: dict[str, Finished] = {}
        deadline = time.monotonic() + timeout_s
        while left and time.monotonic() < deadline:
            first, events = self.verifier.poll(self._next_event, 0.5)
            assert first == self._next_event
            self._next_event += len(events)
            for event in events:
                if isinstance(event, Progress):
                    self.progress.append(event)
                    end = 0
                    starts, lengths = event.starts.tolist(), event.lengths.tolist()
                    for (request_id, _), start, length in zip(event.requests, starts, lengths, strict=True):
                        assert start == len(tokens[request_id])
                        tokens[request_id] += event.tokens[end : end + length].tolist()
                        end += length
                elif isinstance(event, Finished):
                    left.remove(event.request_id)
                    self.finished[event.request_id] = event
        assert self.verifier.error is None
        assert not left, f"unfinished: {left}"
        return tokens

    def drafter(self, name: str) -> DraftLoop | DraftRunner:
        return self.hosted[name] if name in self.hosted else self.drafts[name]

    def await_closed(self) -> None:
        """Until the drafters know that all requests have ended."""
        deadline = time.monotonic() + 120.0
        while any(one.snapshot()["open_requests"] for one in (*self.drafts.values(), *self.hosted.values())):
            assert time.monotonic() < deadline, "open requests are left at the drafters of an idle verifier"
            time.sleep(0.01)

    def close(self) -> None:
        for loop in (self.verifier, *self.drafts.values()):
            loop.stop()
        for thread in self._threads:
            thread.join(10)


def truth_of(batch: Sequence[TargetRequest]) -> dict[str, list[int]]:
    """Plain decoding of requests of the tiny target."""
    return _truth_of(tuple(batch))


@functools.cache  # most tests use the same requests
def _truth_of(batch: tuple[TargetRequest, ...]) -> dict[str, list[int]]:
    target = Driver(engine())
    for request in batch:
        target.add(request)
    return run(target).tokens


def proposers(kind: str) -> dict[str, Proposer]:
    if kind == "ngram":
        return {"ngram-0": NgramProposer(2, 6, 4096, 64), "ngram-1": NgramProposer(2, 6, 4096, 64)}
    if kind == "suffix":
        return {"suffix-0": SuffixProposer(1, 6, 400, 64), "suffix-1": SuffixProposer(1, 6, 4096, 64)}
    if kind == "draft_model":
        return {"small-0": DraftModelProposer(ragged(tiny_draft()))}
    if kind == "eagle":
        return {"eagle-0": eagle()}
    return {
        name: one for method in ("ngram", "suffix", "draft_model", "eagle") for name, one in proposers(method).items()
    }
