"""Training of EAGLE heads, against plain dense computations of the same head."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from specactor_ray.distill.eagle import (
    EagleBatch,
    EagleExample,
    expected_counts,
    make_batch,
    most_frequent_ids,
    sampled_example,
    unroll,
)
from specactor_ray.learner.batching import Sample
from tests.tiny import tiny_prompt_ids, tiny_target
from tests.unit.draft.test_eagle import dense_outputs, head, states_of


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
    prompt, output = np.array(tokens[:2]), np.array(tokens[2:])
    own = np.array([True, True, False])  # the last one is an environment's
    sample = Sample(prompt, output, np.zeros(3, np.float32), 1.0, 1.0, own)
    for first, counting in ((0, [False, True, False, False]), (2, [False, False])):
        states = torch.from_numpy(states_of(4, 0))
        example = replace(sampled_example(sample, states), states=states[first:], first=first)
        assert make_batch([example], model).predicts_output.tolist() == [counting]
    assert batch.teacher.exp().argmax(-1).tolist() == [7, 9] and batch.teacher.exp().sum(-1).tolist() == [1, 1]


def test_the_draft_vocabulary_holds_the_most_frequent_ids() -> None:
    counts = torch.tensor([0, 5, 1, 5, 0, 9])
    assert most_frequent_ids(counts, 3).tolist() == [1, 3, 5]
    assert most_frequent_ids(counts, 3, always=[4]).tolist() == [1, 4, 5]
    assert most_frequent_ids(counts, 5).tolist() == [0, 1, 2, 3, 5], "of equal counts the lower id"
    assert most_frequent_ids(counts, 99).tolist() == list(range(6))
