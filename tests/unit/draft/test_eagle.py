"""The EAGLE head and its proposer, against plain dense computations of the same head."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.eagle.checkpoint import load_head
from specactor_ray.draft.eagle.head import EagleHead
from specactor_ray.draft.eagle.proposer import EagleProposer, EagleRunner
from specactor_ray.sampling.candidates import MOST
from tests.by_name import ByName, branches_of, extend_fully
from tests.fakes.capturer import FakeCapturer
from tests.tails import sample_rows
from tests.tiny import tiny_eagle, tiny_prompt_ids, tiny_target

WINDOW = 4


def head() -> EagleHead:
    return load_head(str(tiny_eagle()), str(tiny_target()))


def eagle(**arguments: Any) -> ByName:
    return ByName(EagleProposer(EagleRunner(head(), 4 << 20), **arguments))


def states_of(count: int, seed: int, width: int = 192) -> np.ndarray:
    """Some states; what the head makes of them is all that is compared."""
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


def dense_outputs(head: EagleHead, inputs: torch.Tensor, next_ids: list[int], first: int) -> torch.Tensor:
    """All outputs of one sequence of entries by one causal attention, without a cache."""

    def attend(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    positions = torch.arange(first, first + len(next_ids)).unsqueeze(0)
    return head(inputs.unsqueeze(0), torch.tensor([next_ids]), positions, attend)[0]


@torch.no_grad()
def expected_tail(
    head: EagleHead,
    states: np.ndarray,
    tokens: list[int],
    num_prompt: int,
    sampling: SamplingParams,
    first: int = 0,
    along: tuple[int, ...] = (),
) -> tuple[int, ...]:
    """What the head guesses after `tokens`, from nothing at every step; states of `[first, L - 1)` are known.

    `along`: A branch: some guesses, and one more, which has to be one of the best of its draw, from the second on.
    """
    inputs, guessed = head.fuse(torch.from_numpy(states[first : len(tokens) - 1])), list[int]()
    while len(guessed) < WINDOW:
        outputs = dense_outputs(head, inputs, [*tokens, *guessed][first + 1 :], first)
        logits = torch.full((1, head.config.vocab_size), float("-inf"))
        logits[:, head.draft_token_ids()] = head.logits(outputs[-1:])
        best = []
        for _ in range(MOST):
            best += sample_rows(logits, [sampling], [len(tokens) - num_prompt + len(guessed)]).token_ids
            logits[:, best] = float("-inf")
        if len(guessed) + 1 == len(along):
            assert along[-1] in best[1:]
            best[0] = along[-1]
        guessed.append(best[0])
        inputs = torch.cat([inputs, outputs[-1:]])
    assert tuple(guessed[: len(along)]) == along
    return tuple(guessed)


class Sequence:
    """A request whose true states are drawn beforehand, committed piece by piece."""

    def __init__(self, number: int, temperature: float) -> None:
        self.name = f"r{number}"
        self.prompt = tiny_prompt_ids(4)[number]
        self.sampling = SamplingParams(temperature=temperature, max_tokens=200, seed=50 + number)
        self.states = states_of(400, number)
        self.output: list[int] = []
        self.sent = self.first = self.received = 0

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output]

    def new_states(self, repeat: int = 0) -> tuple[int, np.ndarray]:
        begin, end = max(self.sent - repeat, 0), len(self.tokens) - 1
        self.first = begin if begin > self.received else self.first
        self.sent = self.received = end
        return begin, self.states[begin:end]

    def begin(self, drafter: ByName, token: int) -> None:
        """Open it, and commit its first token."""
        drafter.open(self.name, self.prompt, (), self.sampling, WINDOW)
        self.commit(drafter, [token])

    def commit(self, drafter: ByName, fresh: list[int], repeat: int = 0, late: bool = False) -> None:
        start = len(self.output)
        self.output += fresh
        assert drafter.commit(self.name, start, fresh)
        if not late:
            drafter.add_features(self.name, *self.new_states(repeat))

    def lose_states(self) -> None:
        """Those that have not been sent, but for the newest one."""
        self.sent = max(self.sent, len(self.tokens) - 2)

    def expected(self, reference: EagleHead, along: tuple[int, ...] = ()) -> tuple[int, ...]:
        history = (self.states, self.tokens, len(self.prompt), self.sampling, self.first)
        return expected_tail(reference, *history, along)


@pytest.mark.parametrize("branches", [0, 1, 6])
@pytest.mark.parametrize("seed", range(4))
def test_tails_and_branches_after_any_history_are_those_of_a_fresh_computation(seed: int, branches: int) -> None:
    """Token by token and in bursts, captured or not."""
    rng, reference, captured = random.Random(seed), head(), seed % 2
    drafter = eagle(branches=branches, capturer=FakeCapturer() if captured else None)
    requests = [Sequence(number, rng.choice([0.0, 1.0])) for number in range(4)]
    for request in requests:
        request.begin(drafter, rng.randrange(400))
    for _ in range(8):
        for _ in range(rng.randint(0, 6)):
            drafter.proposer.budget, drafter.proposer.burst = rng.randint(0, 12), rng.choice([1, 3, 50])
            drafter.extend()
        for request in rng.sample(requests, rng.randint(1, 4)):
            right = list(drafter.tail(request.name)[1])
            if rng.random() < 0.4:
                for at, branch in branches_of(drafter, request.name)[-1:]:
                    right = [*right[:at], *branch]
            right = right[: rng.randint(0, len(right))]
            if not right or rng.random() < 0.5:
                right.append(rng.randrange(400))
            request.commit(drafter, right, rng.randint(0, 3), late=rng.random() < 0.3)
            if rng.random() < 0.2:
                request.lose_states()
    for request in requests:
        drafter.add_features(request.name, *request.new_states())
    drafter.proposer.budget = 99
    extend_fully(drafter)
    found = 0
    for request in requests:
        expected = request.expected(reference)
        assert drafter.tail(request.name) == (len(request.output), expected)
        for at, tokens in branches_of(drafter, request.name):
            assert request.expected(reference, (*expected[:at], tokens[0]))[at:] == tokens
            found += 1
        drafter.close(request.name)
    assert found >= 4 * min(branches, 2)
    cache = drafter._runner.cache
    assert cache.free_slots == cache.slots - captured * cache.page_size, "cache was leaked"


def test_the_branch_that_agrees_is_the_tail_at_once_and_is_then_drafted_again() -> None:
    drafter, reference, request = eagle(branches=4), head(), Sequence(0, 1.0)
    drafter.proposer.budget = 99
    request.begin(drafter, 7)
    for _ in range(4):
        extend_fully(drafter)
        _, tail = drafter.tail(request.name)
        at, branch = max(branches_of(drafter, request.name), key=lambda found: len(found[1]))
        request.commit(drafter, [*tail[:at], branch[0]], late=True)
        assert drafter.tail(request.name) == (len(request.output), branch[1:]) != (len(request.output), ())
        assert not drafter.extend() or drafter.tail(request.name)[1] == branch[1:], "without states nothing is drafted"
        drafter.add_features(request.name, *request.new_states())
    extend_fully(drafter)
    assert drafter.tail(request.name) == (len(request.output), request.expected(reference))


def test_a_tail_that_ends_with_the_output_is_drafted_again() -> None:
    drafter, request = eagle(branches=4), Sequence(0, 1.0)
    request.sampling, drafter.proposer.budget = replace(request.sampling, max_tokens=WINDOW + 1), 99
    request.begin(drafter, 7)
    extend_fully(drafter)
    _, before = drafter.tail(request.name)
    request.commit(drafter, [before[0]])
    assert drafter.tail(request.name) == (2, before[1:])
    extend_fully(drafter)
    assert drafter.tail(request.name)[1] == request.expected(head())[:-1] != before[1:]


def test_a_long_prompt_is_read_in_parts() -> None:
    drafter = eagle()
    request = Sequence(2, 1.0)
    request.prompt, request.states = tuple(request.prompt * 40)[:900], states_of(1000, 9)
    drafter.proposer.max_len = 1000
    request.begin(drafter, 8)
    extend_fully(drafter)
    expected = expected_tail(head(), request.states, request.tokens, len(request.prompt), request.sampling)
    assert drafter.tail(request.name) == (1, expected)


def test_a_request_too_long_for_the_head_leaves_its_place_to_another() -> None:
    drafter = eagle(max_batch=1)
    first, second = Sequence(0, 0.0), Sequence(1, 0.0)
    for request in (first, second):
        drafter.open(request.name, request.prompt, (), request.sampling, WINDOW)
    drafter.add_features(first.name, 0, states_of(50, 0, width=64))
    with pytest.raises(ValueError, match="the head reads 192"):
        drafter.extend()
    drafter.view.states.clear()
    assert drafter.commit(second.name, 0, [9])
    assert drafter.commit(first.name, 0, [9] * drafter.max_len)
    drafter.add_features(first.name, 0, first.states)
    assert not drafter.unread, "no states are kept"
    assert not drafter.commit(second.name, 1, [9]), "there is a place: to be opened with all states"
    drafter.close(first.name)
    drafter.close(second.name)
    assert drafter._places == 1


def test_a_request_that_lost_its_pages_is_opened_again_with_all_states() -> None:
    """The cache holds one and a half of the requests; the first one ends when the second one has lost its pages."""
    cache_bytes = EagleRunner(head(), 1 << 20).cache.bytes_per_token * 160
    drafter, reference = ByName(EagleProposer(EagleRunner(head(), cache_bytes))), head()
    first, second = Sequence(0, 0.0), Sequence(1, 1.0)
    for request in (first, second):
        request.begin(drafter, 7)
    for _ in range(60):
        extend_fully(drafter)
        for request in (first, second):
            if not drafter._waiting[drafter.slots[request.name]]:
                request.commit(drafter, [9, 8])
    slots = [drafter.slots[request.name] for request in (first, second)]
    assert drafter._waiting[slots].sum() == 1
    lost, kept = (first, second) if drafter._waiting[slots[0]] else (second, first)
    assert not drafter.tail(lost.name)[1] and drafter.commit(lost.name, len(lost.output), [5]), "there are no pages yet"
    lost.output.append(5)
    drafter.close(kept.name)
    assert not drafter.commit(lost.name, len(lost.output), [6]), "there are: to be opened again"
    lost.output.append(6)
    drafter.open(lost.name, lost.prompt, lost.output, lost.sampling, WINDOW)
    lost.sent = 0
    drafter.add_features(lost.name, *lost.new_states())
    extend_fully(drafter)
    assert drafter.tail(lost.name) == (len(lost.output), lost.expected(reference))
    drafter.close(lost.name)
    assert drafter._cache.free_slots == drafter._cache.slots, "cache was leaked"


@pytest.mark.parametrize("branches", [0, 4])
def test_draws_over_the_draft_vocabulary_are_those_over_the_whole_one(branches: int) -> None:
    """On CPUs no logits of the target's vocabulary are made; with them, tails and branches are the same."""
    runners = [EagleRunner(head(), 4 << 20) for _ in range(2)]
    assert runners[0].ids is not None and len(runners[0].ids) < head().config.vocab_size
    runners[1].ids = None
    found: list[Any] = [[], []]
    for runner, seen in zip(runners, found, strict=True):
        drafter = ByName(EagleProposer(runner, branches=branches))
        drafter.proposer.budget = 99
        for request in (Sequence(0, 0.0), Sequence(1, 1.0), Sequence(2, 1.0)):
            request.begin(drafter, 7)
            extend_fully(drafter)
            seen.append((drafter.tail(request.name), branches_of(drafter, request.name)))
    assert found[0] == found[1] and any(tail for _, tail in [one for one, _ in found[0]])


@pytest.mark.parametrize("late", [False, True])
def test_samples_of_a_prompt_are_read_once(late: bool) -> None:
    """Whether they come together, or one by one while others are read, drafted for or closed."""
    drafter, reference = eagle(), head()
    runner, read = drafter.proposer._runner, list[int]()
    forward = runner.forward

    def counted(rows: Any, positions: Any, counts: Any, *arrays: Any) -> Any:
        read.extend(counts[counts > 1].tolist())
        return forward(rows, positions, counts, *arrays)

    runner.forward = counted
    prompt, states = tuple(tiny_prompt_ids(1)[0] * 20)[:200], states_of(400, 3)
    samples = [Sequence(0, 1.0) for _ in range(5)]
    for number, one in enumerate(samples):
        one.name, one.sampling = f"s{number}", replace(one.sampling, seed=number)
        one.prompt, one.states = prompt, states if number < 4 else states_of(400, 4)
    samples[4].prompt = tuple(reversed(prompt))  # of another prompt
    for number, one in enumerate(samples):
        one.begin(drafter, 7 + number % 3)
        if late:
            extend_fully(drafter)
            assert drafter.tail(one.name) == (1, one.expected(reference))
    extend_fully(drafter)
    page = runner.cache.page_size
    assert sum(read) <= 2 * len(prompt) + 3 * page + 10
    drafter.close(samples[0].name)
    for number, one in enumerate(samples[1:]):
        one.states = np.concatenate([one.states[: len(prompt)], states_of(50, number)])  # contexts are different now
        one.commit(drafter, [number, 9])
    extend_fully(drafter)
    for one in samples[1:]:
        assert drafter.tail(one.name) == (len(one.output), one.expected(reference))
        drafter.close(one.name)
    assert runner.cache.free_slots == runner.cache.slots, "cache was leaked"
