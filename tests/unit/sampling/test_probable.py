"""The most probable tokens of sampled positions: the softmax's, ties by id, whatever is sampled beside them."""

from __future__ import annotations

import numpy as np
import torch

from specactor_ray.core.types import SamplingParams
from specactor_ray.sampling.keyed import verify_arrays
from specactor_ray.sampling.probable import most_probable
from specactor_ray.sampling.rules import Rules


def requests() -> list[SamplingParams]:
    temperatures, filters = (0.0, 0.6, 1.0, 2.0), ((0, 1.0), (5, 1.0), (0, 0.8))
    return [
        SamplingParams(temperatures[i % 4], *filters[i % 3], seed=i, logprobs=(0, 1, 20, 3, 0, 7)[i % 6])
        for i in range(24)
    ]


def test_they_are_those_of_the_softmax_and_ties_go_by_id() -> None:
    params, vocab = requests(), 300
    n, generator = len(params), torch.Generator().manual_seed(0)
    logits = 2.0 * torch.randn(2 * n, vocab, generator=generator)
    logits[5, 7:10] = logits[5].max() + 1  # ties, all of them in the first 3
    logits[6, :290] = -torch.inf
    rules = Rules(4)
    rules.write(range(n), params, [0] * n)
    slots, offsets = np.arange(n), 2 * np.arange(n)
    arguments = (logits, offsets, np.arange(n + 1), np.zeros(n, np.int32), 10 + slots, slots, rules)
    first = verify_arrays(*arguments).tokens[:, 0]
    drafts = np.where(slots % 2 == 0, first, (first + 1) % vocab).astype(np.int32)
    found = verify_arrays(logits, offsets, np.arange(n + 1), drafts, 10 + slots, slots, rules)
    assert found.counts.tolist() == [2, 1] * (n // 2)
    tops = most_probable(logits, offsets, found, slots, rules)
    assert tops is not None and tops.counts.tolist() == [one.logprobs for one in params]
    end = 0
    for i, one in enumerate(params):
        for j in range(int(found.counts[i]) if one.logprobs else 0):
            begin, end = end, end + one.logprobs
            row = logits[2 * i + j].double() / (one.temperature or 1.0)
            order = np.lexsort((np.arange(vocab), -row.numpy()))[: one.logprobs]
            assert tops.tokens[begin:end].tolist() == order.tolist()
            expected = row.log_softmax(0)[torch.from_numpy(order)].numpy()
            np.testing.assert_allclose(tops.logprobs[begin:end], expected, atol=2e-5)
            own = dict(zip(tops.tokens[begin:end].tolist(), tops.logprobs[begin:end].tolist(), strict=True))
            token, logprob = int(found.tokens[i, j]), float(np.float32(found.logprobs[i, j]))
            assert own.get(token, logprob) == logprob, "the sampled token has one log-probability"
    assert end == len(tops.tokens) == len(tops.logprobs)
