"""Bursts: several tokens of the same chains in one go, captured or not, are the tokens of one forward after another."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from specactor_ray.core.errors import ModelLoadError
from specactor_ray.core.machine import fallbacks
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft import burst, model
from specactor_ray.draft.burst import LONGEST
from specactor_ray.draft.eagle.proposer import EagleProposer, EagleRunner
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.draft.runner import DraftRunner
from specactor_ray.models.captured import Captured
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.models.shapes import step_sizes
from tests.attention import Watch, attending_on_gpu, without_kernels
from tests.by_name import ByName, branches_of, extend_fully
from tests.fakes.capturer import FakeCapturer
from tests.fakes.clocks import HandClock
from tests.tiny import tiny_prompt_ids
from tests.unit.draft.test_draft_model import load
from tests.unit.draft.test_eagle import head, states_of

WINDOW = 6


class Drafter(ByName):
    """Settings go to the proposer."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("burst", "budget", "_run"):
            setattr(self.proposer, name, value)
        else:
            super().__setattr__(name, value)


def draft_model(**options: Any) -> Drafter:
    return Drafter(DraftModelProposer(RaggedModel(load(), options.pop("cache_bytes", 4 << 20)), **options))


def eagle(**options: Any) -> Drafter:
    return Drafter(EagleProposer(EagleRunner(head(), options.pop("cache_bytes", 4 << 20)), **options))


MAKERS = pytest.mark.parametrize("make", [draft_model, eagle])


class Request:
    """A request whose hidden states are drawn beforehand."""

    def __init__(self, number: int, sampling: SamplingParams) -> None:
        self.slot, self.prompt, self.sampling = number, tiny_prompt_ids(8)[number], sampling
        self.states, self.output, self.sent = states_of(400, number), list[int](), 0

    @property
    def name(self) -> str:
        return f"r{self.slot}"

    def open(self, drafter: Drafter, window: int = WINDOW) -> None:
        drafter.open(self.name, self.prompt, self.output, self.sampling, window)
        self.sent = 0
        self.tell_states(drafter)

    def commit(self, drafter: Drafter, fresh: list[int]) -> None:
        assert drafter.commit(self.name, len(self.output), fresh)
        self.output = self.output + fresh
        self.tell_states(drafter)

    def tell_states(self, drafter: Drafter) -> None:
        if drafter.traits.reads_features:
            end = len(self.prompt) + len(self.output) - 1
            drafter.add_features(self.name, self.sent, self.states[self.sent : end])
            self.sent = end


def requests_of(count: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    filters = ({}, {}, {"top_k": 20}, {"top_p": 0.9})
    return [
        Request(i, SamplingParams(rng.choice([0.0, 1.0]), max_tokens=60, seed=seed * 10 + i, **rng.choice(filters)))
        for i in range(count)
    ]


def drafts(drafter: Drafter, slots: int) -> list[Any]:
    """Tails and branches of all requests."""
    names = [f"r{slot}" for slot in range(slots)]
    return [[drafter.tail(name) for name in names], [sorted(branches_of(drafter, name)) for name in names]]


@MAKERS
def test_a_burst_is_fetched_once_and_steps_are_captured_at_the_start(make: Any) -> None:
    device = FakeCapturer()
    drafter, requests = make(capturer=device, max_batch=20), requests_of(5, 0)
    assert device.captures == len(step_sizes(20, 512)) and {rows for rows, _ in step_sizes(20, 512)} == {1, 4, 16, 20}
    for request in requests:
        request.sampling = SamplingParams(1.0, seed=request.slot, max_tokens=400)
        request.open(drafter, LONGEST + 4)
        request.commit(drafter, [7])
    drafter.burst = 1
    drafter.extend()
    launches, fetches = device.launches, device.fetches
    drafter.burst = LONGEST
    assert sorted(drafter.extend()) == [f"r{number}" for number in range(5)]
    assert (device.launches - launches, device.fetches - fetches) == (LONGEST, 1)
    assert drafter.drafted == LONGEST and drafter.rows_drafted == 5
    assert [len(tail) for _, tail in drafts(drafter, 5)[0]] == [LONGEST + 1] * 5
    for request in requests:
        request.commit(drafter, [8])
        extend_fully(drafter)
    assert device.captures == len(step_sizes(20, 512))


@MAKERS
@pytest.mark.parametrize(("branches", "most"), [(0, 512), (4, 512), (0, 17)])
def test_no_forward_is_eager_at_any_acceptance(
    make: Any, branches: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once prompts were read: one copy and one fetch a burst, whatever part of each tail is right, also where a forward
    does not take all that was accepted."""
    monkeypatch.setattr(model, "STEP_TOKENS", most)
    device, rng, copies = FakeCapturer(), random.Random(0), 0
    captured, plain = make(capturer=device, branches=branches), make(branches=branches)
    requests = requests_of(6, 4)
    for drafter in (captured, plain):
        drafter.burst, drafter.budget = 4, 12
        for request in requests:
            request.open(drafter)
        extend_fully(drafter)
    assert drafts(captured, 6) == drafts(plain, 6)

    def load(*arguments: Any) -> None:
        nonlocal copies
        copies += 1
        copy(*arguments)

    copy = Captured.load
    monkeypatch.setattr(Captured, "load", load)
    monkeypatch.setattr(captured.proposer, "_run", None)
    for turn in range(12):
        for request, (_, tail) in zip(requests, drafts(plain, 6)[0], strict=True):
            right = (0, len(tail), rng.randint(0, len(tail)), len(tail) * (request.slot == 0))[turn % 4]
            fresh, before = [*tail[:right], 7 + turn], request.output
            for drafter in (captured, plain):
                request.output = before
                request.sent = len(request.prompt) + len(before) - 1
                request.commit(drafter, fresh)
        copies, fetches = 0, device.fetches
        assert len(captured.extend())
        assert branches or copies == device.fetches - fetches == 1
        for drafter in (captured, plain):
            extend_fully(drafter)
        assert drafts(captured, 6) == drafts(plain, 6)


@MAKERS
def test_padding_and_rows_that_are_done_write_to_no_page_of_a_chain(make: Any) -> None:
    """Six rows of different shares in a bucket of eight: all that changes of the cache is what they draft, and the page
    that nobody holds."""
    device = FakeCapturer()
    drafter, requests = make(capturer=device), requests_of(6, 1)
    drafter._cache._pools[0].fill_(0.5)  # it holds what the memory held before, which may be no number
    for request in requests:
        request.sampling = SamplingParams(1.0, seed=request.slot, max_tokens=2 + request.slot)
        request.open(drafter)
        request.commit(drafter, [7])
    drafter.extend()
    cache = drafter._cache
    drafter.burst = LONGEST
    (placed,) = drafter._placed.nonzero()
    rows, before, lengths = drafter._cached[placed], cache._pools[0].clone(), cache.lengths.copy()
    while len(drafter.extend()):
        pass
    assert device.launches > 2 and len({int(n) for n in cache.lengths[rows] - lengths[rows]}) > 2
    changed = (cache._pools[0] != before).flatten(3).any(-1).any(0)
    scratch = drafter._bursts._unused // cache.page_size
    assert changed[scratch].any() and not changed[scratch, 1:].any()
    changed[scratch] = False
    pages = cache.page_table(rows, cache.lengths[rows])
    for row, held in zip(rows, pages, strict=True):
        for at in range(lengths[row], cache.lengths[row]):
            page, place = held[at // cache.page_size], at % cache.page_size
            assert changed[page, place]
            changed[page, place] = False
    assert not changed.any()


@MAKERS
def test_a_device_that_cannot_capture_drafts_without(make: Any) -> None:
    device = FakeCapturer(refuses=True)
    drafters = make(capturer=device), make()
    for drafter in drafters:
        drafter.burst = 4
        for request in requests_of(5, 3):
            request.open(drafter)
            request.commit(drafter, [7])
        extend_fully(drafter)
    assert drafts(drafters[0], 5) == drafts(drafters[1], 5) and any(tail for _, tail in drafts(drafters[0], 5)[0])
    assert not device.captures and not device.fetches
    assert "Drafting runs without CUDA graphs: operation not permitted when stream is capturing" in fallbacks()


@MAKERS
@pytest.mark.parametrize("most", [0, 16, 512])
def test_a_drafter_that_sleeps_holds_no_memory_and_drafts_the_same_afterwards(make: Any, most: int) -> None:
    """Also where requests are still open. 0: eager; 16: there is memory for small steps alone."""
    device = FakeCapturer(most=most) if most else None
    plain, drafter = make(), make(capturer=device, max_batch=6)

    def drafted(one: Drafter) -> list[Any]:
        one.burst = 4
        for request in requests_of(5, 3):
            request.open(one)
            request.commit(one, [7])
        extend_fully(one)
        return drafts(one, 5)

    before = drafted(drafter)
    assert before == drafted(plain) and any(tail for _, tail in before[0])
    pools = [weakref.ref(pool) for pool in drafter._cache._pools]
    for _ in range(2):
        drafter.sleep()
    assert not any(pool() is not None for pool in pools) and not drafter._cache._pools
    assert drafter._cache.free_slots == drafter._cache.slots - 16 * bool(most), "rows are left"
    assert device is None or not drafter._bursts._batches
    assert not len(drafter.extend()), "a loop that is idle asks it"
    drafter.wake()
    for slot in range(5):
        drafter.close(f"r{slot}", False)
    assert drafted(drafter) == before
    if device is not None:
        fit = sum(tokens <= most for _, tokens in step_sizes(6, 512))
        assert device.launches and (device.captures, device.warm_ups) == (2 * fit, fit * (1 if most == 512 else 2))


@MAKERS
def test_no_request_gets_a_place_in_a_sleeping_drafter(make: Any) -> None:
    drafter, requests = make(max_batch=1), requests_of(2, 3)
    for request in requests:
        request.open(drafter)
    assert drafter._waiting.tolist()[:2] == [False, True]
    drafter.sleep()
    requests[1].commit(drafter, [7])
    drafter.extend()
    assert not any(tail for _, tail in drafts(drafter, 2)[0])


@MAKERS
def test_a_cache_without_a_page_is_refused(make: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"1000 bytes holds no page of this model \(16 tokens of .*kv_cache_gb"):
        make(cache_bytes=1000)


@MAKERS
def test_a_dropped_drafter_holds_no_memory(make: Any) -> None:
    drafter, request = make(capturer=FakeCapturer(), max_batch=4), requests_of(1, 3)[0]
    request.open(drafter)
    extend_fully(drafter)
    held = [
        weakref.ref(one) for one in (drafter.proposer, *drafter._cache._pools, drafter._bursts, drafter._bursts._buffer)
    ]
    gc.collect()
    gc.disable()
    try:
        del drafter
        assert not any(one() is not None for one in held)
    finally:
        gc.enable()


@MAKERS
@pytest.mark.parametrize("captured", [False, True])
def test_a_full_cache_gives_up_what_it_gives_up_token_by_token(make: Any, captured: bool) -> None:
    probe = make()
    size = probe._cache.bytes_per_token * probe._cache.page_size
    requests = requests_of(3, 2)
    drafter = make(cache_bytes=size * 34, branches=4, capturer=FakeCapturer() if captured else None)
    drafter.burst, drafter.budget = LONGEST, 40
    for request in requests:
        request.sampling = SamplingParams(1.0, seed=request.slot, max_tokens=500)
        request.open(drafter)
        request.commit(drafter, [7])
    given_up = 0
    for end in range(2, 360, 12):
        extend_fully(drafter)
        for request in requests:
            _, tail = drafter.tail(request.name)
            assert len(tail) == WINDOW or not drafter._placed[request.slot]
            if drafter._placed[request.slot] or end < 200:
                request.commit(drafter, [7 + end % 50] * 12)
        given_up = int((~drafter._placed[:3]).sum())
    assert given_up
    for request in requests:
        drafter.close(request.name, True)
    scratch = drafter._bursts is not None
    assert drafter._cache.free_slots == drafter._cache.slots - 16 * scratch


@MAKERS
def test_a_row_without_numbers_ends_in_the_middle_of_a_burst(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its third token one row's logits are NaN; the others get all."""
    device = FakeCapturer()
    drafter, plain, requests = make(capturer=device), make(), requests_of(3, 0)
    for one in (drafter, plain):
        for request in requests:
            request.output = []
            request.open(one)
            request.commit(one, [7])
        one.extend()
    extend_fully(plain)
    inner, calls = drafter._bursts._runner.step, 0

    def poisoned(*arguments: Any) -> Any:
        nonlocal calls
        logits, outputs = inner(*arguments)
        calls += 1
        if calls >= 3:
            logits[1] = float("nan")
        return logits, outputs

    monkeypatch.setattr(drafter._bursts._runner, "step", poisoned)
    drafter.burst = LONGEST
    extend_fully(drafter)
    assert drafter._placed.tolist()[:3] == [True, False, True]
    assert drafter.table.judged[0].tolist() == [WINDOW, 0]
    (wanted, _), (found, _) = drafts(plain, 3), drafts(drafter, 3)
    assert found[0] == wanted[0] and found[2] == wanted[2]
    kept = 0 if drafter.traits.reads_features else 3  # a head that gives up drops its tail
    assert found[1][1] == wanted[1][1][:kept]


@pytest.mark.parametrize("captured", [False, True])
def test_a_turn_is_a_burst(captured: bool) -> None:
    class Timed(DraftModelProposer):
        """A token takes 10 ms."""

        def extend(self) -> np.ndarray:
            changed = super().extend()
            clock.seconds += 0.01 * self.drafted
            return changed

    clock, device = HandClock(), FakeCapturer() if captured else None
    drafter = ByName(Timed(RaggedModel(load(), 4 << 20), capturer=device))
    runner = DraftRunner("d", drafter.proposer, clock)
    drafter.open("r", (1, 2, 3), (), SamplingParams(max_tokens=40), 12)
    while len(runner.run(drafter.view, drafter.rows)):
        pass
    assert len(drafter.tail("r")[1]) == 12 and clock.seconds == pytest.approx(0.12)
    drafter.commit("r", 0, [499])
    drafted = []
    for most in (5, 20, 1):
        drafted.append((len(runner.run(drafter.view, drafter.rows, most)), len(drafter.tail("r")[1])))
    assert drafted == [(1, 5), (1, 12), (0, 12)]
    assert runner.token_s == pytest.approx(0.01)


@MAKERS
def test_nothing_in_a_step_waits_for_the_device(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the sampler: on GPUs it is Triton's, here it draws zeros."""

    class Watching(FakeCapturer):
        def capture(self, step: Callable[[], object], known: bool = False) -> Callable[[], object]:
            with Watch() as watch:
                step()
            seen.update(watch.seen)
            return super().capture(step, known)

    def zeros(logits: torch.Tensor, positions: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(len(positions), 5, dtype=torch.int64)

    seen = set[str]()
    without_kernels(monkeypatch)
    monkeypatch.setattr(burst, "candidates_on_device", zeros)
    with attending_on_gpu(fused=True):
        make(capturer=Watching(), max_batch=4)
    assert {"gather", "where", "index_copy_"} <= seen
