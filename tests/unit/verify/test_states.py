"""Hidden states on their way from the cache of an engine to heads; loops are stepped by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from specactor_ray.config.schema import SpeculationConfig, VerifyPolicy
from specactor_ray.draft.eagle.proposer import EagleProposer
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.draft.runner import DraftRunner
from specactor_ray.table.requests import TargetRequest
from specactor_ray.target.admission import PrefixCache
from specactor_ray.target.base import Drafts, StepResult
from specactor_ray.target.hf import HfEngine
from specactor_ray.transport.link import Link, direct_sender
from specactor_ray.transport.messages import CommitBatch, Progress, States
from specactor_ray.verify import drafting as module
from specactor_ray.verify.drafting import DrafterLink, Drafting, HostedDrafter
from specactor_ray.verify.loop import VerifyLoop
from tests.fakes.loops import EAGLE_LAYERS, eagle, eos_id, ragged, spec_of, truth_of
from tests.tiny import tiny_target
from tests.unit.engine_conformance import requests

WINDOW, WIDTH = 4, 64 * len(EAGLE_LAYERS)


class Pair:
    """A verifier and one head, of the verifier's process or not; the head drafts whole windows between two steps."""

    def __init__(self, hosted: bool, head: EagleProposer | None = None, cache_bytes: int = 16 << 20) -> None:
        self.engine = HfEngine(ragged(tiny_target(), EAGLE_LAYERS, cache_bytes), [eos_id()])
        self.head = head or eagle()
        config = SpeculationConfig(window=WINDOW, verify=VerifyPolicy.all)
        table = self.engine.table
        self.drafting = Drafting("v0", hosted, config, table, window=WINDOW, states_of=self.engine.states)
        self.loop, spec = DraftLoop("eagle-0", self.head), spec_of(self.head, WINDOW)
        self.states, self._take = list[States](), self.head.add_features
        """States that the head has received."""
        self.head.add_features = self._add_features  # type: ignore[method-assign]
        self.kinds = set[type]()
        """Types of the states on their way."""
        mine = [HostedDrafter(spec, DraftRunner("eagle-0", self.head))] if hosted else []
        self.verifier = VerifyLoop(self.engine, self.drafting, mine)
        if not hosted:
            self.loop.set_verifiers({"v0": Link(direct_sender(self.verifier.deliver))})
            self.verifier.set_drafters({"eagle-0": DrafterLink(spec, Link(direct_sender(self._deliver)))})
        self.hosted, self.step, self.prefilled = hosted, self.engine.step, 0
        self.drafts = dict[tuple[str, int], list[int]]()
        """Request and committed tokens → the draft that a step verified."""
        self.engine.step = self._note  # type: ignore[method-assign]

    def _deliver(self, message: CommitBatch) -> None:
        if message.states is not None:
            self.kinds.add(type(message.states.states))
        self.loop.deliver(message)

    def _add_features(self, *arrays: Any) -> None:
        self.states.append(States(*arrays))
        self._take(*arrays)

    def _note(self, drafts: Drafts, window: int) -> StepResult:
        table, end = self.drafting.table, 0
        for row, length in zip(drafts.rows.tolist(), drafts.lengths.tolist(), strict=True):
            begin, end = end, end + length
            if length:
                name = table.requests[row].request_id, int(table.committed[row])
                self.drafts[name] = drafts.tokens[begin:end].tolist()
        result = self.step(drafts, window)
        self.prefilled += result.num_prefill_tokens
        return result

    def turn(self) -> None:
        """A step of the verifier, and all that the head drafts then."""
        self.verifier.run_once()
        while not self.hosted and self.loop.run_once():
            self.verifier._drafting.flush()

    def run(self, batch: Sequence[TargetRequest]) -> dict[str, list[int]]:
        """All outputs."""
        self.verifier.submit(batch)  # unless it was submitted before
        self.turn()
        for _ in range(2000):
            if not self.engine.has_work():
                break
            self.turn()
        tokens: dict[str, list[int]] = {request.request_id: [] for request in batch}
        for event in self.verifier.poll(0, 0.0)[1]:
            if isinstance(event, Progress):
                for name, fresh, _, _ in event.rows():
                    tokens[name] += fresh
        return tokens


def equal_drafts(one: Pair, other: Pair) -> int:
    """Drafts of two runs at the same places are equal as far as both go, the first ones of a request may be short while
    prompts are read. Returns how many are whole and equal."""
    pairs = [(one.drafts[name], other.drafts[name]) for name in one.drafts.keys() & other.drafts.keys()]
    assert all(mine[: len(yours)] == yours[: len(mine)] for mine, yours in pairs)
    return sum(mine == yours and len(mine) == WINDOW for mine, yours in pairs)


def samples(count: int) -> list[TargetRequest]:
    """Samples of one prompt of some pages."""
    (request,) = requests(1, 1.0, max_tokens=40)
    prompt = (request.prompt_token_ids * 20)[:150]
    sampling = request.sampling
    return [TargetRequest(f"s{i}", prompt, replace(sampling, seed=i)) for i in range(count)]


@pytest.mark.parametrize("hosted", [True, False], ids=["hosted", "apart"])
def test_samples_of_a_prompt_share_its_prefill_and_draft_as_if_they_did_not(
    hosted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = samples(8)
    shared, alone = Pair(hosted), Pair(hosted)
    tokens = shared.run(batch)
    with monkeypatch.context() as patched:
        patched.setattr(PrefixCache, "longest", lambda self, tokens: (-1, 0))
        assert alone.run(batch) == tokens == truth_of(batch)
    prompt, page = len(batch[0].prompt_token_ids), shared.engine._model.cache.page_size
    assert alone.prefilled == 8 * prompt and shared.prefilled <= prompt + 7 * page
    assert equal_drafts(shared, alone) > 100
    assert min(pair.verifier.snapshot()["accepted_tokens"] for pair in (shared, alone)) > 20


def test_a_head_drafts_in_another_process_what_it_drafts_in_the_verifiers() -> None:
    batch, pairs = requests(6, 1.0), [Pair(True), Pair(False)]
    hosted, apart = (pair.run(batch) for pair in pairs)
    assert hosted == apart == truth_of(batch)
    assert equal_drafts(*pairs) > 40
    assert pairs[1].kinds == {np.ndarray}


def test_a_preempted_request_gives_the_head_its_states_when_it_has_them_again() -> None:
    batch = requests(4, 1.0, max_tokens=220, ignore_eos=True)
    roomy, tight = Pair(True), Pair(True, cache_bytes=576 * 1792)
    assert roomy.run(batch) == tight.run(batch) == truth_of(batch)
    assert tight.prefilled > roomy.prefilled == sum(len(one.prompt_token_ids) for one in batch)
    assert equal_drafts(roomy, tight) > 100
    for pair in (roomy, tight):
        ends = dict[int, int]()
        for message in pair.states:
            for row, start, states in message.split():
                assert ends.get(row, 0) == start
                ends[row] = start + len(states)


class Moves(TorchFunctionMode):
    """Counts what is done with hidden states, which are as wide as no other tensor here."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = args[0] if args else None
        wide = isinstance(first, torch.Tensor) and first.dim() > 0 and first.shape[-1] == WIDTH
        wide = wide and not (func.__name__ == "to" and result is first)
        self.seen[func.__name__] += wide
        return result


def test_states_of_a_hosted_head_are_selected_once_and_never_leave_the_device() -> None:
    """Per step one selection in the engine's cache and one of what is read next, whatever the number of rows."""
    seen = []
    for count in (2, 8):
        pair = Pair(True)
        pair.verifier.submit(requests(count, 1.0, max_tokens=60, ignore_eos=True))
        while len(pair.engine.decoding()) < count or not pair.drafts:
            pair.turn()
        with Moves() as moves:
            for _ in range(8):
                pair.turn()
        assert len(pair.states[-1].rows) == count
        hosts = {"cpu", "to", "cuda", "numpy", "tolist", "item", "nonzero", "__array__", "clone", "contiguous"}
        assert not hosts & {name for name, times in moves.seen.items() if times}
        seen.append(+moves.seen)
    assert seen[0] == seen[1] and seen[0]["index_select"] == 16 and seen[0]["index_copy_"] == 8


def test_states_come_in_parts_and_a_head_that_joins_late_gets_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message is bounded however long the prompts; a head of this process gets no more than it reads."""
    monkeypatch.setattr(module, "STATES_UNDER_WAY", 40)

    class Slow(EagleProposer):
        most = 0

        def add_features(self, *arrays: Any) -> None:
            super().add_features(*arrays)
            self.most = max(self.most, self.unread)

        def extend(self) -> np.ndarray:
            return super().extend() if rng.random() < 0.5 else np.zeros(0, np.int32)

    rng = np.random.default_rng(1)
    batch = [replace(one, sampling=replace(one.sampling, ignore_eos=True)) for one in samples(3)]
    for hosted in (True, False):
        pair = Pair(hosted, eagle(Slow))
        links, pair.verifier.drafter_links = dict(pair.verifier.drafter_links), {}
        pair.verifier.set_drafters({})
        pair.verifier.submit(batch)
        for _ in range(6):
            pair.turn()
        pair.verifier.set_drafters(links)
        assert pair.run(batch) == truth_of(batch)
        assert pair.verifier.snapshot()["accepted_tokens"] > 0
        assert max(len(one.states) for one in pair.states) == 40
        assert not hosted or pair.head.most <= 40  # type: ignore[attr-defined]
        received: dict[int, list[int]] = {}
        for message in pair.states:
            for row, start, states in message.split():
                assert received.setdefault(row, [0])[-1] == start
                received[row].append(start + len(states))
        assert len(received) == 3 and all(ends[-1] > 150 for ends in received.values())
