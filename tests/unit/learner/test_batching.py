"""Micro-batches: nothing is lost, nothing is too big, and their parts add up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.learner.batching import Sample, collate, cut_by_tokens, share_out


def sample(prompt: int, output: int, start: int = 1) -> Sample:
    prompt_ids = np.arange(start, start + prompt, dtype=np.int64)
    output_ids = np.arange(100, 100 + output, dtype=np.int64)
    logprobs, own = -np.ones(output, dtype=np.float32), np.ones(output, dtype=np.bool_)
    return Sample(prompt_ids, output_ids, logprobs, reward=2.0, advantage=0.5, loss_mask=own)


lengths = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=40)


@given(lengths, st.integers(8, 200), st.integers(1, 5))
def test_every_sample_is_in_one_group_that_fits_and_ranks_get_equally_many(
    sizes: list[tuple[int, int]], budget: int, ranks: int
) -> None:
    totals = [sum(size) for size in sizes]
    groups = cut_by_tokens(totals, budget)
    assert sorted(index for group in groups for index in group) == list(range(len(sizes)))
    assert all(len(group) == 1 or len(group) * max(totals[index] for index in group) <= budget for group in groups)
    shares = share_out(groups, ranks)
    assert len({len(share) for share in shares}) == 1
    assert sorted(group for share in shares for group in share if group) == sorted(groups)


def test_collate() -> None:
    """The tokens of an environment are context only; the reward is given at the last own token."""
    own = np.array([True, False, True, False])
    batch = collate([sample(3, 2), replace(sample(1, 4, start=50), loss_mask=own)], [0, 1])
    assert batch.input_ids.tolist() == [[1, 2, 3, 100, 101], [50, 100, 101, 102, 103]]
    assert batch.attention_mask.tolist() == [[1] * 5] * 2
    assert batch.positions.tolist() == [[2, 3, 0, 0], [0, 0, 2, 0]]  # the position before each own token predicts it
    assert batch.targets.tolist() == [[100, 101, 0, 0], [100, 0, 102, 0]]
    assert batch.mask.tolist() == [[1, 1, 0, 0], [1, 0, 1, 0]]
    assert batch.rollout_logprobs.tolist() == [[-1, -1, 0, 0], [-1, 0, -1, 0]]
    assert batch.rewards.tolist() == [[0, 2, 0, 0], [0, 0, 2, 0]]
    assert batch.advantages.tolist() == [[0.5, 0.5, 0, 0], [0.5, 0, 0.5, 0]]
    empty = collate([sample(3, 2)], [])
    assert empty.mask.sum() == 0 and empty.attention_mask.sum() == 1
