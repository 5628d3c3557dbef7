"""The small-model proposer: its tails are what the model samples with the request's own noise, after any history."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.sampling.candidates import MOST
from tests.by_name import ByName, branches_of, extend_fully
from tests.fakes.capturer import FakeCapturer
from tests.tails import sample_rows
from tests.tiny import tiny_draft, tiny_prompt_ids


def load() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_draft(), dtype=torch.float32)


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    return load()


def proposer(cache_bytes: int = 16 << 20, branches: int = 0, capturer: Any = None) -> ByName:
    drafter = DraftModelProposer(RaggedModel(load(), cache_bytes), 64, branches, capturer)
    drafter.budget = 40
    return ByName(drafter)


def expected_tail(
    model: torch.nn.Module, prompt: tuple[int, ...], committed: list[int], sampling: SamplingParams, length: int
) -> tuple[int, ...]:
    """By fresh, uncached forwards."""
    tail: list[int] = []
    for _ in range(length):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *committed, *tail]])).logits[0, -1:]
        tail += sample_rows(logits, [sampling], [len(committed) + len(tail)]).token_ids
    return tuple(tail)


def check_branches(
    model: torch.nn.Module, drafter: ByName, name: str, prompt: tuple[int, ...], sampling: SamplingParams
) -> int:
    """Each branch begins with a later candidate and continues as a fresh model does. Returns their number."""
    (base, tail), found = drafter.tail(name), branches_of(drafter, name)
    committed = drafter.view.output(drafter.slots[name]).tolist()
    assert len(committed) == base
    for at, tokens in found:
        prefix = [*committed, *tail[:at]]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *prefix]])).logits[0, -1:]
        ranked = []
        for _ in range(MOST):
            ranked += sample_rows(logits, [sampling], [len(prefix)]).token_ids
            logits[0, ranked[-1]] = -torch.inf
        assert ranked[0] == tail[at] and tokens[0] in ranked[1:]
        assert len(tokens) > 1 and at + len(tokens) <= drafter.view.window
        assert tuple(tokens[1:]) == expected_tail(model, prompt, [*prefix, tokens[0]], sampling, len(tokens) - 1)
    assert len({(at, tokens[0]) for at, tokens in found}) == len(found)
    return len(found)


def check_empty(drafter: ByName) -> None:
    """Close all requests: the cache is as it was at the start."""
    for name in list(drafter.slots):
        drafter.close(name)
    cache, scratch = drafter._cache, int(drafter._bursts is not None)  # bursts keep a page
    assert cache.free_slots == cache.slots - scratch * cache.page_size
    assert sorted(cache._free_rows) == list(range(scratch, len(cache.lengths)))


@pytest.mark.parametrize("branches", [0, 4])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_tails_after_any_history_are_those_of_a_fresh_model(
    reference: torch.nn.Module, seed: int, captured: bool, branches: int
) -> None:
    """Token by token and in bursts, captured or not."""
    rng, device = random.Random(seed), FakeCapturer() if captured else None
    drafter = proposer(branches=branches, capturer=device)
    prompts = tiny_prompt_ids(4, seed)
    samplings = [
        SamplingParams(rng.choice([0.0, 1.0]), max_tokens=60, seed=seed * 10 + i, **filters)
        for i, filters in enumerate(({}, {}, {"top_k": 20}, {"top_p": 0.9}))
    ]
    committed: list[list[int]] = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        drafter.open(f"r{i}", prompt, (), samplings[i], window=5)
    for _ in range(8):
        for _ in range(rng.randint(0, 7)):
            drafter.proposer.budget, drafter.proposer.burst = rng.choice([0, 6, 40]), rng.choice([1, 3, 50])
            drafter.extend()
        for i in rng.sample(range(4), rng.randint(1, 4)):
            _, tail = drafter.tail(f"r{i}")
            for at, tokens in branches_of(drafter, f"r{i}")[-1:]:
                tail = (*tail[:at], *tokens)
            fresh = list(tail[: rng.randint(0, len(tail))]) + [rng.randrange(400) for _ in range(rng.randint(0, 2))]
            if not fresh:
                continue
            assert drafter.commit(f"r{i}", len(committed[i]), fresh)
            assert drafter.commit(f"r{i}", len(committed[i]), fresh), "a repeated commit is harmless"
            committed[i] += fresh
    drafter.proposer.budget = 40
    extend_fully(drafter)
    found = 0
    for i, prompt in enumerate(prompts):
        base, tail = drafter.tail(f"r{i}")
        assert base == len(committed[i])
        assert tail == expected_tail(reference, prompt, committed[i], samplings[i], 5)
        found += check_branches(reference, drafter, f"r{i}", prompt, samplings[i])
    assert (found > 4) == (branches > 0)
    assert device is None or 0 < device.fetches < device.launches
    check_empty(drafter)


def test_branches_push_out_no_main_chain(reference: torch.nn.Module) -> None:
    """The cache holds three requests with their tails to the last page, and branches no longer than it has room."""
    probe = RaggedModel(load(), 16 << 20)
    drafter = proposer(probe.cache.bytes_per_token * 16 * 11 * 3, branches=8)
    sampling, prompts = SamplingParams(temperature=1.0, seed=5, max_tokens=400), tiny_prompt_ids(3)
    output = list(range(100, 270))
    for i, prompt in enumerate(prompts[:2]):
        drafter.open(f"r{i}", prompt, (), sampling, 5)
    extend_fully(drafter)
    drafter.open("r2", prompts[2], (), sampling, 5)
    extend_fully(drafter)
    most = 0
    for end in range(10, 171 - max(map(len, prompts)), 10):
        for i in range(3):
            assert drafter.commit(f"r{i}", end - 10, output[end - 10 : end])
        extend_fully(drafter)
        for i in range(3):
            assert len(drafter.tail(f"r{i}")[1]) == 5
            most = max(most, len(branches_of(drafter, f"r{i}")))
    assert most == 8 and not drafter._cache.free_slots, "the cache is full"
    for i, prompt in enumerate(prompts):
        assert drafter.tail(f"r{i}")[1] == expected_tail(reference, prompt, output[:end], sampling, 5)
        check_branches(reference, drafter, f"r{i}", prompt, sampling)
    check_empty(drafter)


@pytest.mark.parametrize(("seed", "share", "branches"), [(0, 0.15, 0), (2, 0.12, 0), (2, 0.12, 4)])
def test_requests_that_lost_their_pages_are_drafted_for_again(
    reference: torch.nn.Module, seed: int, share: float, branches: int
) -> None:
    """16 requests, a few of which are long, in a part of the pages that 16 long ones need: the last ones have drafts
    in almost every step, branches or not, and their tails are those of a fresh model."""
    rng, prompts = np.random.default_rng(seed), [prompt[:20] for prompt in tiny_prompt_ids(16)]
    lengths = np.clip(np.exp(rng.normal(4.9, 0.8, 16)), 20, 450).astype(int)
    probe = RaggedModel(load(), 1 << 20).cache
    pages = int(share * 16 * (20 + lengths.max()) / probe.page_size)
    drafter = proposer(pages * probe.page_size * probe.bytes_per_token, branches)
    drafter.proposer.budget, drafter.proposer.burst = 16 * (1 + branches), 8
    samplings = [SamplingParams(temperature=1.0, seed=i, max_tokens=480) for i in range(16)]
    outputs: list[list[int]] = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        drafter.open(f"r{i}", prompt, (), samplings[i], 5)
    lost, steps, left = 0, list[list[bool]](), set(range(16))
    while left:
        drafter.extend()
        lost += int(drafter._waiting.sum())
        steps.append([])
        for i in sorted(left):
            _, tail = drafter.tail(f"r{i}")
            steps[-1].append(not tail)
            right = int(np.argmin([*(rng.random(len(tail)) < 0.8), False]))
            fresh = [*tail[:right], int(rng.integers(5, 300))]
            assert drafter.commit(f"r{i}", len(outputs[i]), fresh)
            outputs[i] += fresh
            if len(outputs[i]) >= lengths[i]:
                drafter.close(f"r{i}")
                left.discard(i)
        if len(steps) % 40 == 0 and left:
            extend_fully(drafter)
            for i in sorted(left):
                tail = drafter.tail(f"r{i}")[1]
                assert tail == expected_tail(reference, prompts[i], outputs[i], samplings[i], len(tail))
    late = [one for step in steps[3 * len(steps) // 4 :] for one in step]
    assert lost > 20 and sum(late) <= 0.05 * len(late)
    check_empty(drafter)


def test_a_larger_window_and_the_models_end_leave_branches_right(reference: torch.nn.Module) -> None:
    drafter, prompts = proposer(branches=4), tiny_prompt_ids(2)
    sampling = SamplingParams(temperature=1.0, seed=6, max_tokens=200)

    def check(i: int, window: int) -> None:
        extend_fully(drafter)
        assert drafter.tail(f"r{i}")[1] == expected_tail(reference, prompts[i], [], sampling, window)
        assert check_branches(reference, drafter, f"r{i}", prompts[i], sampling) == 4

    for i, prompt in enumerate(prompts):
        drafter.open(f"r{i}", prompt, (), sampling, 3)
    check(0, 3)
    check(1, 3)
    drafter.open("r1", prompts[1], (), sampling, 9)
    check(0, 9)
    check(1, 9)
    drafter.proposer.max_len = len(prompts[1]) + 6
    drafter.open("r1", prompts[1], (), sampling, 9)
    check(1, 6)
    check_empty(drafter)


def test_a_chain_that_cannot_be_sampled_from_costs_the_others_nothing(reference: torch.nn.Module) -> None:
    """The main chain of one request, and half of the branches."""
    drafter, prompts = proposer(branches=4), tiny_prompt_ids(3)
    samplings = [SamplingParams(temperature=1.0, max_tokens=60, seed=i) for i in range(3)]
    for i, prompt in enumerate(prompts):
        drafter.open(f"r{i}", prompt, (), samplings[i], 5)
    drafter.extend()
    mains, forward, poisoned = drafter._cached[[drafter.slots[f"r{i}"] for i in range(3)]], drafter._runner.forward, 0

    def poison(rows: np.ndarray, *arrays: np.ndarray) -> torch.Tensor:
        nonlocal poisoned
        logits, branches = forward(rows, *arrays).clone(), np.flatnonzero(~np.isin(rows, mains))[::2]
        logits[np.append(branches, np.flatnonzero(rows == mains[1]))] = float("nan")
        poisoned += len(branches)
        return logits

    drafter._runner.forward = poison
    assert sorted(drafter.extend()) == ["r0", "r1", "r2"], "also that there is no more of r1"
    assert len(drafter.tail("r1")[1]) == 1
    assert drafter.table.judged[0].tolist() == [5, 0], "a whole window that is not drafted counts as wrong"
    extend_fully(drafter)
    for i in (0, 2):
        assert drafter.tail(f"r{i}")[1] == expected_tail(reference, prompts[i], [], samplings[i], 5)
        check_branches(reference, drafter, f"r{i}", prompts[i], samplings[i])
    assert poisoned > 2 and drafter.commit("r1", 0, [9])
    assert drafter.extend() == ["r1"], "each further commit is answered"
    check_empty(drafter)
