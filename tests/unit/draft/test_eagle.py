"""The EAGLE head and its proposer, against plain dense computations of the same head."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from specactor_ray.core.errors import ModelLoadError
from specactor_ray.core.types import SamplingParams
from specactor_ray.distill.eagle import EagleBatch, EagleExample, expected_counts, make_batch, most_frequent_ids, unroll
from specactor_ray.draft.eagle.checkpoint import load_head, read_head_config, save_head, trained_weights
from specactor_ray.draft.eagle.head import EagleHead
from specactor_ray.draft.eagle.proposer import EagleProposer
from specactor_ray.draft.eagle.runner import EagleRunner
from specactor_ray.sampling.candidates import MOST
from specactor_ray.sampling.keyed import sample_rows
from specactor_ray.sampling.seeds import own_noise
from specactor_ray.transport.messages import Features
from tests.by_name import ByName
from tests.tiny import tiny_eagle, tiny_prompt_ids, tiny_target

WINDOW = 4


def head() -> EagleHead:
    return load_head(str(tiny_eagle()), str(tiny_target()))


def eagle(**arguments: int) -> ByName:
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


def extend_fully(drafter: ByName) -> list[str]:
    reported = []
    for _ in range(200):
        changed = drafter.extend()
        reported += changed
        if not changed:
            return reported
    raise AssertionError("extend never came to rest")


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

    def new_features(self, repeat: int = 0) -> list[Features]:
        begin, end = max(self.sent - repeat, 0), len(self.tokens) - 1
        self.first = begin if begin > self.received else self.first
        self.sent = self.received = end
        return [Features(begin, self.states[begin:end])]

    def commit(self, drafter: ByName, fresh: list[int], repeat: int = 0, late: bool = False) -> None:
        start = len(self.output)
        self.output += fresh
        assert drafter.commit(self.name, start, fresh)
        if not late:
            drafter.add_features(self.name, self.new_features(repeat))

    def lose_states(self) -> None:
        """Those that have not been sent, but for the newest one."""
        self.sent = max(self.sent, len(self.tokens) - 2)

    def expected(self, reference: EagleHead, along: tuple[int, ...] = ()) -> tuple[int, ...]:
        history = (self.states, self.tokens, len(self.prompt), self.sampling, self.first)
        return expected_tail(reference, *history, along)


def branches_of(drafter: ByName, name: str) -> list[tuple[int, tuple[int, ...]]]:
    """Branches that are published: place in the tail, tokens."""
    found = drafter.tails(np.array([drafter.slots[name]], np.int32)).branches
    parts = np.split(found.tokens, np.cumsum(found.lengths)[:-1])
    return [(at, tuple(part.tolist())) for at, part in zip(found.ats.tolist(), parts, strict=False)]


@pytest.mark.parametrize("branches", [0, 1, 6])
@pytest.mark.parametrize("seed", range(4))
def test_tails_and_branches_after_any_history_are_those_of_a_fresh_computation(seed: int, branches: int) -> None:
    rng, reference = random.Random(seed), head()
    drafter = eagle(branches=branches)
    requests = [Sequence(number, rng.choice([0.0, 1.0])) for number in range(4)]
    for request in requests:
        drafter.open(request.name, request.prompt, (), request.sampling, WINDOW)
        request.commit(drafter, [rng.randrange(400)])
    for _ in range(8):
        for _ in range(rng.randint(0, 6)):
            drafter.proposer.budget = rng.randint(0, 12)
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
        drafter.add_features(request.name, request.new_features())
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
    assert drafter._runner.cache.free_slots == drafter._runner.cache.slots, "cache was leaked"


def test_the_branch_that_agrees_is_the_tail_at_once_and_is_then_drafted_again() -> None:
    drafter, reference, request = eagle(branches=4), head(), Sequence(0, 1.0)
    drafter.proposer.budget = 99
    drafter.open(request.name, request.prompt, (), request.sampling, WINDOW)
    request.commit(drafter, [7])
    for _ in range(4):
        extend_fully(drafter)
        _, tail = drafter.tail(request.name)
        at, branch = max(branches_of(drafter, request.name), key=lambda found: len(found[1]))
        request.commit(drafter, [*tail[:at], branch[0]], late=True)
        assert drafter.tail(request.name) == (len(request.output), branch[1:]) != (len(request.output), ())
        assert not drafter.extend() or drafter.tail(request.name)[1] == branch[1:], "without states nothing is drafted"
        drafter.add_features(request.name, request.new_features())
    extend_fully(drafter)
    assert drafter.tail(request.name) == (len(request.output), request.expected(reference))
    assert drafter.branches.outcomes.tolist() == [4, 4]


def test_a_taught_head_goes_on_with_its_branches() -> None:
    """Entries of old weights stay; tails and commits are those of a head without branches."""
    plain, other = eagle(), eagle(branches=4)
    other.proposer.budget = 99
    taught, mine, its = head(), Sequence(0, 1.0), Sequence(0, 1.0)
    for drafter, request in ((plain, mine), (other, its)):
        drafter.open(request.name, request.prompt, (), request.sampling, WINDOW)
        request.commit(drafter, [7])
    for number in range(4):
        for drafter in (plain, other):
            extend_fully(drafter)
        assert branches_of(other, its.name) and plain.tail(mine.name) == other.tail(its.name)
        with torch.no_grad():
            taught.lm_head.weight.copy_(taught.lm_head.weight.roll(number + 1, 0))
        for drafter in (plain, other):
            drafter.load_weights(number, trained_weights(taught))
        at, branch = branches_of(other, its.name)[0]
        fresh = [*other.tail(its.name)[1][:at], branch[0]]
        mine.commit(plain, fresh)
        its.commit(other, fresh)
        assert other.tail(its.name)[1] == branch[1:]


def test_a_surviving_tail_is_gone_through_again_and_kept_where_it_still_fits() -> None:
    drafter = eagle()
    request = Sequence(0, 1.0)
    drafter.open(request.name, request.prompt, (), request.sampling, WINDOW)
    request.commit(drafter, [7])
    extend_fully(drafter)
    _, before = drafter.tail(request.name)
    request.commit(drafter, [before[0]])
    assert drafter.tail(request.name) == (2, before[1:]), "what survives stays on offer until it is refuted"
    assert extend_fully(drafter)[-1:] == [request.name]
    expected = expected_tail(head(), request.states, request.tokens, len(request.prompt), request.sampling)
    assert drafter.tail(request.name) == (2, expected)


def test_rows_are_counted_where_there_was_one_forward() -> None:
    """What goes through a surviving tail again changes nothing, so that an `extend` runs several."""
    drafter, request, forwards = eagle(), Sequence(1, 1.0), [0]
    forward = drafter._runner.forward

    def counted(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        forwards[-1] += 1
        return forward(*arguments)

    drafter._runner.forward = counted  # type: ignore[method-assign, assignment]
    drafter.open(request.name, request.prompt, (), request.sampling, WINDOW)
    request.commit(drafter, [7])
    extend_fully(drafter)
    for _ in range(6):
        request.commit(drafter, [drafter.tail(request.name)[1][0]])
        forwards.append(0)
        while drafter.extend():
            assert drafter.rows_drafted == (forwards[-1] == 1)
            forwards.append(0)
    assert max(forwards[1:]) > 1


def test_a_tail_that_ends_with_the_output_is_drafted_again() -> None:
    drafter, request = eagle(branches=4), Sequence(0, 1.0)
    request.sampling, drafter.proposer.budget = replace(request.sampling, max_tokens=WINDOW + 1), 99
    drafter.open(request.name, request.prompt, (), request.sampling, WINDOW)
    request.commit(drafter, [7])
    extend_fully(drafter)
    _, before = drafter.tail(request.name)
    request.commit(drafter, [before[0]])
    assert drafter.tail(request.name) == (2, before[1:])
    extend_fully(drafter)
    assert drafter.tail(request.name)[1] == request.expected(head())[:-1] != before[1:]


def test_a_gap_in_the_states_means_less_context() -> None:
    drafter = eagle()
    request = Sequence(1, 1.0)
    drafter.open(request.name, request.prompt, (3, 4, 5), request.sampling, WINDOW)
    request.output = [3, 4, 5]
    assert extend_fully(drafter) == [request.name], "without states there is no guess, and that is said once"
    assert drafter.tail(request.name) == (3, ())
    request.sent = first = len(request.prompt) + 1
    request.commit(drafter, [6, 7])
    extend_fully(drafter)
    expected = expected_tail(head(), request.states, request.tokens, len(request.prompt), request.sampling, first)
    assert drafter.tail(request.name) == (5, expected)


def test_a_long_prompt_is_read_in_parts() -> None:
    drafter = eagle()
    request = Sequence(2, 1.0)
    request.prompt, request.states = tuple(request.prompt * 40)[:900], states_of(1000, 9)
    drafter.proposer.max_len = 1000
    drafter.open(request.name, request.prompt, (), request.sampling, WINDOW)
    request.commit(drafter, [8])
    extend_fully(drafter)
    expected = expected_tail(head(), request.states, request.tokens, len(request.prompt), request.sampling)
    assert drafter.tail(request.name) == (1, expected)


def test_a_request_too_long_for_the_head_leaves_its_place_to_another() -> None:
    drafter = eagle(max_batch=1)
    first, second = Sequence(0, 0.0), Sequence(1, 0.0)
    for request in (first, second):
        drafter.open(request.name, request.prompt, (), request.sampling, WINDOW)
    assert drafter.commit(first.name, 0, [9] * drafter.max_len) and drafter.commit(second.name, 0, [9])
    drafter.add_features(first.name, [])
    assert not drafter.commit(second.name, 1, [9]), "there is a place: to be opened with all states"
    drafter.close(first.name)
    drafter.close(second.name)
    assert drafter._places == 1


def test_limits_are_answered_quietly() -> None:
    drafter = eagle(max_batch=1)
    first, second = Sequence(0, 0.0), Sequence(1, 0.0)
    for request in (first, second):
        drafter.open(request.name, request.prompt, (), request.sampling, WINDOW)
        request.commit(drafter, [9])
    extend_fully(drafter)
    assert len(drafter.tail(first.name)[1]) == WINDOW and drafter.tail(second.name) == (1, ())
    assert not drafter.commit("nobody", 0, [1])
    assert not drafter.commit(first.name, 5, [1]), "a gap asks for a fresh open"
    with pytest.raises(ValueError, match="the head reads 192"):
        drafter.add_features(first.name, [Features(0, states_of(50, 0, width=64))])
    third = Sequence(2, 0.0)
    drafter.open(third.name, third.prompt, (), third.sampling, WINDOW)
    drafter.close(first.name)
    assert not drafter.commit(second.name, 1, [9]), "there is a place: to be opened with all states"
    third.commit(drafter, [9])  # and none for this one
    assert not drafter.commit(second.name, 1, [9]), "until it is opened"
    drafter.open(second.name, second.prompt, (9, 9), second.sampling, WINDOW)
    second.output = [9, 9]
    drafter.add_features(second.name, [Features(0, second.states[: len(second.tokens) - 1])])
    extend_fully(drafter)
    assert [len(drafter.tail(one.name)[1]) for one in (second, third)] == [WINDOW, 0]


def test_no_states_are_kept_of_a_request_that_is_too_long_for_the_head() -> None:
    drafter, request = eagle(), Sequence(0, 0.0)
    drafter.open(request.name, request.prompt, (), request.sampling, WINDOW)
    drafter.proposer.max_len = len(request.prompt) + 8
    for token in range(3, 40):
        request.commit(drafter, [token])
        extend_fully(drafter)
    assert drafter.tail(request.name) == (len(request.output), ())
    assert not drafter._unread


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
            drafter.open(request.name, request.prompt, (), request.sampling, WINDOW)
            request.commit(drafter, [7])
            extend_fully(drafter)
            seen.append((drafter.tail(request.name), branches_of(drafter, request.name)))
    assert found[0] == found[1] and any(tail for _, tail in [one for one, _ in found[0]])


@pytest.mark.parametrize("branches", [0, 4])
def test_a_row_that_cannot_be_sampled_from_costs_the_others_nothing(branches: int) -> None:
    drafter = eagle(branches=branches)
    requests = [Sequence(number, 1.0) for number in range(3)]
    for request in requests:
        drafter.open(request.name, request.prompt, (), request.sampling, WINDOW)
        request.commit(drafter, [9])
    drafter.proposer.budget = 99
    drafter.extend()
    bad, forward = drafter._rows[drafter.slots["r1"]], drafter._runner.forward

    def poisoned(rows: np.ndarray, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, logits = (tensor.clone() for tensor in forward(rows, *arguments))
        logits[np.flatnonzero(rows == bad)] = float("nan")
        return outputs, logits

    drafter._runner.forward = poisoned  # type: ignore[method-assign, assignment]
    assert sorted(set(drafter.extend())) == ["r0", "r1", "r2"], "also that there is no guess for r1"
    assert drafter.tail("r1") == (1, ()) and not branches_of(drafter, "r1")
    extend_fully(drafter)
    for request in (requests[0], requests[2]):
        assert drafter.tail(request.name) == (1, request.expected(head()))
    for request in requests:
        drafter.close(request.name)
    assert drafter._runner.cache.free_slots == drafter._runner.cache.slots


def test_a_branch_that_cannot_be_sampled_from_is_given_up_alone() -> None:
    drafter, request = eagle(branches=4), Sequence(0, 1.0)
    drafter.open(request.name, request.prompt, (), request.sampling, WINDOW)
    request.commit(drafter, [9])
    drafter.proposer.budget = 99
    forward = drafter._runner.forward

    def poisoned(rows: np.ndarray, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, logits = (tensor.clone() for tensor in forward(rows, *arguments))
        logits[np.flatnonzero(rows != drafter._rows[drafter.slots["r0"]])] = float("nan")
        return outputs, logits

    drafter._runner.forward = poisoned  # type: ignore[method-assign, assignment]
    extend_fully(drafter)
    assert drafter.tail(request.name) == (1, request.expected(head())) and not branches_of(drafter, request.name)
    drafter.close(request.name)
    assert drafter._runner.cache.free_slots == drafter._runner.cache.slots


def test_own_noise_changes_the_samples() -> None:
    request = Sequence(0, 1.0)
    tails = []
    for shared in (True, False):
        drafter = eagle(shared_noise=shared)
        drafter.open(request.name, request.prompt, (), request.sampling, WINDOW)
        request.sent, request.output = 0, []
        request.commit(drafter, [9])
        extend_fully(drafter)
        tails.append(drafter.tail(request.name)[1])
    expected = expected_tail(head(), request.states, request.tokens, len(request.prompt), own_noise(request.sampling))
    assert tails[1] == expected != tails[0]


def test_the_unroll_of_training_equals_running_ahead() -> None:
    """At every depth and anchor, with the true tokens fed in: the same log-probabilities as one entry after the
    other."""
    model, depths, length = head(), 3, 14
    tokens = tuple(random.Random(0).randrange(400) for _ in range(length))
    example = EagleExample(tokens, 1, torch.from_numpy(states_of(length - 1, 3)))
    batch = make_batch([example, EagleExample(tokens[:9], 1, example.states[:8])], model)
    everything = torch.ones_like(batch.predicts_output)
    teacher = torch.zeros(everything.numel(), model.config.draft_vocab_size)
    batch = EagleBatch(batch.states, batch.next_ids, everything, teacher)
    with torch.no_grad():
        for depth, (entering, _) in enumerate(unroll(model, batch, depths)):
            count = length - 1 - depth - 1
            for anchor in range(count):
                inputs = model.fuse(example.states[: anchor + 1])
                for k in range(depth + 1):
                    outputs = dense_outputs(model, inputs, list(tokens[1 : anchor + k + 2]), 0)
                    inputs = torch.cat([inputs, outputs[-1:]])
                assert torch.allclose(entering[anchor], model.norm(outputs[-1]), atol=1e-4)


def test_prompts_take_no_part_in_the_unroll_but_as_context() -> None:
    """Where only the end counts, the outputs are those that unrolling everything gives there."""
    model, length = head(), 20
    tokens = tuple(random.Random(1).randrange(400) for _ in range(length))
    example = EagleExample(tokens, 1, torch.from_numpy(states_of(length - 1, 4)))
    batch = make_batch([example], model)
    late = torch.zeros_like(batch.predicts_output)
    late[:, 12:] = True
    size = model.config.draft_vocab_size
    whole = EagleBatch(batch.states, batch.next_ids, torch.ones_like(late), torch.zeros(length - 1, size))
    part = EagleBatch(batch.states, batch.next_ids, late, torch.zeros(length - 1 - 12, size))
    with torch.no_grad():
        for depth, ((all_of, _), (some, rows)) in enumerate(
            zip(unroll(model, whole, 4), unroll(model, part, 4), strict=False)
        ):
            assert rows.tolist() == list(range(max(depth + 1 - 12, 0), length - 1 - 12))
            assert torch.allclose(some, all_of[12 - depth - 1 :], atol=1e-5)


def test_the_teacher_is_the_targets_distribution() -> None:
    from transformers import AutoModelForCausalLM

    model = head()
    target: Any = AutoModelForCausalLM.from_pretrained(tiny_target(), dtype=torch.float32)
    tokens = tiny_prompt_ids(1)[0]
    with torch.no_grad():
        final = target.model(torch.tensor([tokens])).last_hidden_state[0, :-1]
        logits = target(torch.tensor([tokens])).logits[0, :-1] / 0.7
    states = torch.from_numpy(states_of(len(final), 0))
    example = EagleExample(tokens, 3, states, final, temperature=0.7)
    batch = make_batch([example], model)
    expected = torch.log_softmax(logits[2:, model.draft_token_ids()], dim=-1)
    assert torch.allclose(batch.teacher, expected, atol=1e-5) and torch.equal(batch.final, final[2:])
    assert batch.predicts_output[0].tolist() == [False] * 2 + [True] * (len(final) - 2)
    expected_mass = torch.softmax(logits[2:], dim=-1).sum(0)
    assert torch.allclose(expected_counts(target, example), expected_mass, atol=1e-4)


def test_sampled_tokens_stand_in_for_the_teacher() -> None:
    model = head()
    ids = model.draft_token_ids().tolist()
    foreign = next(token for token in range(512) if token not in ids)
    tokens = (ids[5], ids[6], ids[7], foreign, ids[9])
    batch = make_batch([EagleExample(tokens, 2, torch.from_numpy(states_of(4, 0)))], model)
    assert batch.predicts_output.tolist() == [[False, True, False, True]], "what the head cannot say does not count"
    assert batch.teacher.exp().argmax(-1).tolist() == [7, 9] and batch.teacher.exp().sum(-1).tolist() == [1, 1]


def test_the_draft_vocabulary_holds_the_most_frequent_ids() -> None:
    counts = torch.tensor([0, 5, 1, 5, 0, 9])
    assert most_frequent_ids(counts, 3).tolist() == [1, 3, 5]
    assert most_frequent_ids(counts, 3, always=[4]).tolist() == [1, 4, 5]
    assert most_frequent_ids(counts, 5).tolist() == [0, 1, 2, 3, 5], "of equal counts the lower id"
    assert most_frequent_ids(counts, 99).tolist() == list(range(6))


class TestCheckpoint:
    def test_a_head_survives_the_disk(self, tmp_path: Path) -> None:
        first = head()
        save_head(first, tmp_path)
        second = load_head(str(tmp_path), str(tiny_target()))
        assert second.config == first.config
        assert all(torch.equal(tensor, second.state_dict()[key]) for key, tensor in first.state_dict().items())

    def test_the_files_follow_the_format_of_speculators(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file

        save_head(head(), tmp_path)
        facts, weights = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
        assert facts["speculators_model_type"] == "eagle3" and facts["draft_vocab_size"] == len(weights["d2t"])
        assert facts["speculators_config"]["proposal_methods"][0]["speculative_tokens"] > 0
        assert weights["t2d"].sum() == facts["draft_vocab_size"]
        hidden = facts["transformer_layer_config"]["hidden_size"]
        assert weights["layers.0.self_attn.q_proj.weight"].shape[1] == 2 * hidden

    def test_the_format_of_the_authors_loads(self, tmp_path: Path) -> None:
        first = head()
        config = first.config
        facts = {**config.layer, "draft_vocab_size": config.draft_vocab_size}
        facts["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(config.aux_layers)}
        (tmp_path / "config.json").write_text(json.dumps(facts))
        weights = {key.replace("layers.0.", "midlayer."): value for key, value in trained_weights(first).items()}
        mapping = {"d2t": first.d2t, "t2d": torch.zeros(512, dtype=torch.bool)}
        torch.save({**weights, **mapping}, tmp_path / "pytorch_model.bin")
        second = load_head(str(tmp_path), str(tiny_target()))
        assert all(torch.equal(tensor, second.state_dict()[key]) for key, tensor in first.state_dict().items())

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"target_hidden_size": 4096}, ["4096 numbers", "has 64"]),
            ({"transformer_layer_config.vocab_size": 32000}, ["32000 tokens", "has 512"]),
            ({"specactor_ray": {"verifier_layers": 30}}, ["30 decoder layers", "has 4"]),
            ({"eagle_aux_hidden_state_layer_ids": [2, 15, 27]}, ["27 decoder layers", "has 4"]),
            ({"speculators_model_type": "mlp"}, ["mlp", "eagle3"]),
            ({"draft_vocab_size": 77}, ["77"]),
        ],
    )
    def test_a_head_for_another_target_is_refused(
        self, tmp_path: Path, change: dict[str, Any], words: list[str]
    ) -> None:
        save_head(head(), tmp_path)
        path = tmp_path / "config.json"
        facts = json.loads(path.read_text())
        for key, value in change.items():
            *parents, last = key.split(".")
            place = facts
            for parent in parents:
                place = place[parent]
            place[last] = value
        path.write_text(json.dumps(facts))
        with pytest.raises(ModelLoadError) as caught:
            load_head(str(tmp_path), str(tiny_target()))
        assert all(word in str(caught.value) for word in words), caught.value

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("draft_vocab_size", "many"),
            ("draft_vocab_size", [1]),
            ("draft_vocab_size", 0),
            ("draft_vocab_size", 1e99),
            ("transformer_layer_config", [1, 2]),
            ("transformer_layer_config.hidden_size", {}),
            ("transformer_layer_config.num_attention_heads", True),
            ("transformer_layer_config.num_hidden_layers", "one"),
            ("transformer_layer_config.rope_parameters", 7),
            ("transformer_layer_config.hidden_act", ["silu"]),
            ("target_hidden_size", -64),
            ("eagle_aux_hidden_state_layer_ids", 3),
            ("eagle_aux_hidden_state_layer_ids", ["low"]),
            ("eagle_aux_hidden_state_layer_ids", [0]),
            ("speculators_config", "x"),
            ("speculators_config.verifier", [1]),
            ("eagle_config", 3),
            ("specactor_ray", [1]),
            ("specactor_ray.verifier_layers", "x"),
        ],
    )
    def test_a_value_of_the_wrong_kind_is_named(self, tmp_path: Path, key: str, value: Any) -> None:
        save_head(head(), tmp_path)
        path = tmp_path / "config.json"
        facts = json.loads(path.read_text())
        *parents, last = key.split(".")
        place = facts
        for parent in parents:
            place = place[parent]
        place[last] = value
        path.write_text(json.dumps(facts))
        with pytest.raises(ModelLoadError) as caught:
            load_head(str(tmp_path), str(tiny_target()))
        assert str(path) in str(caught.value)
        if last not in ("rope_parameters", "hidden_act"):
            assert last in str(caught.value), caught.value

    @pytest.mark.parametrize("text", ["[" * 100000, '{"draft_vocab_size": ' + "9" * 5000 + "}", '{"a"'])
    def test_a_configuration_that_cannot_be_read_is_named(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelLoadError, match=r"config\.json is not valid JSON"):
            read_head_config(str(tmp_path), str(tiny_target()))

    @pytest.mark.parametrize("weights", [b"nothing", b"", None])
    def test_weights_that_are_none_are_not_run(self, tmp_path: Path, weights: bytes | None) -> None:
        save_head(head(), tmp_path)
        (tmp_path / "model.safetensors").unlink()
        path = tmp_path / "pytorch_model.bin"
        if weights is None:
            torch.save({"a": Path("x")}, path)  # a class that torch.load would have to import
        else:
            path.write_bytes(weights)
        with pytest.raises(ModelLoadError, match="cannot be read"):
            load_head(str(tmp_path), str(tiny_target()))

    def test_what_is_not_there_is_said(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"no config\.json"):
            read_head_config(str(tmp_path), str(tiny_target()))
        save_head(head(), tmp_path)
        whole = (tmp_path / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ModelLoadError, match="cannot be read"):
            load_head(str(tmp_path), str(tiny_target()))


def test_new_weights_take_effect_in_a_running_head() -> None:
    drafter = eagle()
    request, other = Sequence(0, 1.0), head()
    with torch.no_grad():
        other.lm_head.weight.copy_(other.lm_head.weight.flip(0))
    drafter.load_weights(3, trained_weights(other))
    drafter.open(request.name, request.prompt, (), request.sampling, WINDOW)
    request.commit(drafter, [9])
    extend_fully(drafter)
    expected = expected_tail(other, request.states, request.tokens, len(request.prompt), request.sampling)
    assert drafter.tail(request.name)[1] == expected
