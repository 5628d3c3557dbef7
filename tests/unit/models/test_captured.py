"""Captured steps: sizes, captures and releases, and decode steps of the engine beside eager ones."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from specactor_ray.core.errors import InputError
from specactor_ray.core.machine import fallbacks
from specactor_ray.core.types import SamplingParams
from specactor_ray.models.ragged_model import HEAD_INPUT
from specactor_ray.models.shapes import longest_tail, step_sizes
from specactor_ray.table.requests import TargetRequest
from specactor_ray.target import hf
from specactor_ray.target.base import Drafts, StepResult
from specactor_ray.target.hf import HfEngine
from tests.attention import Watch, attending_on_gpu, without_kernels
from tests.fakes.capturer import FakeCapturer
from tests.tiny import tiny_prompt_ids
from tests.unit.engine_conformance import Driver, answers, requests, run
from tests.unit.target.test_hf_engine import load, raw

FILTERS: tuple[dict[str, Any], ...] = ({}, {"top_k": 9}, {"top_p": 0.8}, {}, {"top_k": 30, "top_p": 0.9})


@pytest.mark.parametrize(("rows", "tokens"), [(1, 512), (3, 7), (16, 512), (128, 1152), (256, 4096)])
def test_every_mix_of_tails_has_a_step_and_steps_are_few(rows: int, tokens: int) -> None:
    all_sizes = step_sizes(rows, tokens)
    assert len(set(all_sizes)) == len(all_sizes) <= 90
    assert {r for r, n in all_sizes} == {r for r, n in all_sizes if r == n}, "bursts go on with a token of each row"
    for r, n in all_sizes:
        assert r <= rows and r <= n <= tokens
    for n in range(1, rows + 1):
        most = min(n * (1 + longest_tail(rows)), tokens, 2048)
        assert any(r >= n and size >= most for r, size in all_sizes), (n, most)
        # Padding is at most as many tokens again, or 128.
        for wanted in range(n, most + 1):
            least = min(size for r, size in all_sizes if r >= n and size >= wanted)
            assert least <= max(2 * wanted, wanted + 128, 4 * n), (n, wanted, least)


class Turns:
    """An engine in which requests decode, with drafts that are right up to a random place."""

    def __init__(self, engine: HfEngine, count: int, **sampling: Any) -> None:
        self.engine, self.rng, self.truth = engine, random.Random(0), dict[int, list[int]]()
        for row, prompt in enumerate(tiny_prompt_ids(count)):
            one = SamplingParams((0.0, 1.0)[row % 2], max_tokens=150, seed=row, ignore_eos=True, **FILTERS[row % 5])
            engine.add(engine.table.open(TargetRequest(f"r{row}", tuple(prompt), replace(one, **sampling))))
        while len(engine.decoding()) < count:
            engine.step()

    def step(self, lengths: list[int]) -> StepResult:
        tails = {row: [self.rng.randrange(400) for _ in range(length)] for row, length in enumerate(lengths) if length}
        return self.engine.step(Drafts.of(tails))


def equal(ours: StepResult, theirs: StepResult) -> bool:
    pairs = [(getattr(ours, name), getattr(theirs, name)) for name in ("rows", "lengths", "tokens", "accepted")]
    pairs += [(ours.logprobs, theirs.logprobs), (ours.margins, theirs.margins)]
    if theirs.states is not None:
        pairs += [(ours.states.states.cpu(), theirs.states.states.cpu()), (ours.states.starts, theirs.states.starts)]
    return all(a is b is None or np.array_equal(a, b) for a, b in pairs)


MIXES = ([0, 0, 0, 0, 0], [3, 3, 3, 3, 3], [0, 4, 1, 0, 2], [16, 0, 0, 0, 1], [0, 9, 9, 2, 0], [16, 16, 16, 16, 16])


@pytest.mark.parametrize("hidden", [(), (0, HEAD_INPUT)])
def test_a_decode_step_is_a_launch_and_a_fetch(hidden: tuple[int, ...]) -> None:
    """For any mix of tails, and its tokens, log-probabilities, margins and states are those of an eager one."""
    device = FakeCapturer()
    options = {"record_margins": not hidden, "hidden_layers": hidden, "max_batch": 6}
    ours, theirs = (Turns(raw(capturer=one, **options), 5) for one in (device, None))
    assert device.captures == len(step_sizes(6, 512)) and device.launches == device.fetches == 1, "all prompts at once"
    for turn, mix in enumerate(MIXES * 2):
        launches, fetches = device.launches, device.fetches
        found = ours.step(mix)
        assert (device.launches - launches, device.fetches - fetches) == (1, 1)
        assert equal(found, theirs.step(mix)), turn
        assert found.drafted.sum() == sum(mix)
    assert device.captures == len(step_sizes(6, 512))


@pytest.mark.parametrize(
    ("sampling", "mix"), [({"logprobs": 2}, [1] * 5), ({}, [40, 0, 0, 0, 0]), ({"prompt_logprobs": True}, None)]
)
def test_what_a_captured_step_lacks_is_eager(sampling: dict[str, Any], mix: list[int] | None) -> None:
    device = FakeCapturer()
    ours, theirs = (Turns(raw(capturer=one), 5, **sampling) for one in (device, None))
    launches = device.launches
    assert launches == (not sampling)
    if mix is not None:
        found, wanted = ours.step(mix), theirs.step(mix)
        assert device.launches == launches and np.array_equal(found.tokens, wanted.tokens)
        assert (found.tops is None) == (wanted.tops is None) == (not sampling)


@pytest.mark.parametrize("length", [2, 70, 300])
def test_steps_beside_a_prompt_are_captured(length: int) -> None:
    """In whole or in chunks, with tails beside it; only the rows whose prompts were read sample a token."""
    device = FakeCapturer()
    ours, theirs = (Turns(raw(capturer=one, max_step_tokens=100), 3) for one in (device, None))
    launches, steps = device.launches, 0
    for turns in (ours, theirs):
        late = TargetRequest("late", tuple(range(5, 5 + length)), SamplingParams(seed=4))
        turns.engine.add(turns.engine.table.open(late))
    for mix in ([0, 3, 0], [2, 2, 2], [0, 0, 0], [0, 9, 0]):
        found, wanted, steps = ours.step(mix), theirs.step(mix), steps + 1
        assert equal(found, wanted) and found.num_prefill_tokens == wanted.num_prefill_tokens
    assert device.launches - launches == steps


def test_padding_writes_to_no_page_of_a_row() -> None:
    """All that a step changes of the cache is what its rows read, and the first slot of the page that nobody holds."""
    engine = raw(capturer=FakeCapturer(), max_batch=16)
    cache = engine._model.cache
    for pool in cache._pools:
        pool.zero_()  # it holds what the memory held before, such as the same keys of another engine
    turns, rows = Turns(engine, 5), engine._admission.cache_rows(np.arange(5, dtype=np.int32))
    for mix in MIXES:
        before, lengths = [pool.clone() for pool in cache._pools], cache.lengths[rows].copy()
        turns.step(mix)
        changed = torch.stack([(x != y).flatten(3).any(-1).any(0) for x, y in zip(cache._pools, before, strict=True)])
        found = changed.any(0).flatten().nonzero()[:, 0].tolist()
        pages = cache.page_table(rows, lengths + 17)
        wanted = {
            int(pages[i, at // cache.page_size]) * cache.page_size + at % cache.page_size
            for i in range(5)
            for at in range(lengths[i], lengths[i] + 1 + mix[i])
        }
        assert wanted <= set(found) and set(found) - wanted <= {engine._decode._unused}


def test_sleep_drops_the_steps_and_waking_captures_them_again() -> None:
    device, batch = FakeCapturer(), requests(3, 1.0)
    engine = Driver(raw(capturer=device, max_batch=4))
    before, captures, releases = answers(engine, batch).tokens, device.captures, device.releases
    engine.sleep()
    assert device.releases == releases + 1 and engine._decode.find(np.ones(2, np.int64)) is None
    engine.wake()
    engine.wake()
    assert (device.captures, device.warm_ups) == (2 * captures, captures), "kernels are compiled once"
    assert answers(engine, batch).tokens == before, "no step of before is repeated"
    assert before == answers(Driver(raw(max_batch=4)), batch).tokens
    engine.load_weights(1, {name: tensor * 1.3 for name, tensor in load().state_dict().items()})
    assert device.captures == 2 * captures and answers(engine, batch).tokens != before


def test_a_device_that_cannot_capture_is_named_and_decodes_without() -> None:
    batch, device = requests(3, 1.0), FakeCapturer(refuses=True)
    engine = Driver(raw(capturer=device))
    assert answers(engine, batch).tokens == answers(Driver(raw()), batch).tokens
    assert not device.launches and not device.fetches
    assert "The engine runs without CUDA graphs: operation not permitted when stream is capturing" in fallbacks()
    engine.sleep()
    engine.wake()
    assert not device.captures


def test_steps_that_do_not_fit_are_eager_until_the_next_wake() -> None:
    engine = raw(capturer=(device := FakeCapturer(most=64)), max_batch=4)
    turns, eager, every = Turns(engine, 4), Turns(raw(max_batch=4), 4), step_sizes(4, 512)
    assert device.captures == sum(tokens <= 64 for _, tokens in every) < len(every)
    least = min(tokens for _, tokens in every if tokens > 64)
    reason = f"from {least} tokens on: out of memory, use a smaller kv_cache_gb"
    assert f"The engine runs without CUDA graphs {reason}" in fallbacks()
    for mix, launched in (([0, 3, 1, 2], 1), ([16, 16, 16, 16], 0)):
        launches = device.launches
        assert equal(turns.step(mix), eager.step(mix)) and device.launches - launches == launched
    for row in range(4):
        engine.remove(row)
    engine.sleep()
    device.most, device.captures = 1 << 30, 0
    engine.wake()
    assert device.captures == len(every)


@pytest.mark.parametrize("hidden", [(), (0, HEAD_INPUT)])
def test_a_closed_engine_holds_no_memory(hidden: tuple[int, ...]) -> None:
    """Without a garbage collection, which may come late."""
    engine = raw(capturer=FakeCapturer(), max_batch=4, hidden_layers=hidden)
    Turns(engine, 3).step([1, 0, 2])
    model, steps = engine._model, engine._decode
    assert steps is not None
    held = [weakref.ref(one) for one in (model, model.model.lm_head.weight, *model.cache._pools, steps, steps._buffer)]
    del model, steps
    gc.collect()
    gc.disable()
    try:
        engine.close()
        assert not any(one() is not None for one in held)
    finally:
        gc.enable()


def test_the_page_of_the_steps_is_no_room_for_requests() -> None:
    """A request that fills all other pages runs, and a longer one is refused."""
    size = raw()._model.cache.bytes_per_token * 16
    for pages, device in ((6, FakeCapturer()), (1, FakeCapturer())):
        engine = Driver(raw(cache_bytes=size * pages, capturer=device))
        assert engine.max_model_len == 16 * max(pages - 1, 1)
        prompt = (5,) * (engine.max_model_len - 4)
        engine.add(TargetRequest("whole", prompt, SamplingParams(1.0, max_tokens=50, ignore_eos=True)))
        assert len(run(engine).tokens["whole"]) == 4
        assert (device.launches > 0) == (pages > 1)
        with pytest.raises(InputError, match="cache budget"):
            engine.add(TargetRequest("long", (5,) * engine.max_model_len, SamplingParams()))
    assert "The engine runs without CUDA graphs: the cache has a single page" in fallbacks()


def test_nothing_in_a_decode_step_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the sampler: on GPUs it is Triton's, here it finds nothing. A step runs at its capture, as on a GPU."""

    class Watching(FakeCapturer):
        def capture(self, step: Callable[[], object], known: bool = False) -> Callable[[], object]:
            with Watch() as watch:
                step()
                step()
            seen.update(watch.seen)
            return super().capture(step, known)

    def nothing(logits: torch.Tensor, offsets: torch.Tensor, *rest: Any) -> torch.Tensor:
        return torch.zeros(len(offsets), 2 + 3 * (1 + rest[2]), dtype=torch.int64)

    seen = set[str]()
    without_kernels(monkeypatch)
    monkeypatch.setattr(hf, "verify_on_device", nothing)
    with attending_on_gpu(fused=True):
        raw(capturer=Watching(), max_batch=3, max_step_tokens=20, hidden_layers=[1])
    assert {"index_copy_", "copy_"} <= seen
