"""Samples and micro-batches: the input of the trainer, and its division to fit the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory as input of the trainer."""

    prompt: np.ndarray
    """`(P,)` int64 token ids."""
    output: np.ndarray
    """`(T,)` int64 token ids."""
    rollout_logprobs: np.ndarray
    """`(T,)` float32, as computed by the verifier; 0 where the loss mask is 0."""
    reward: float
    """Reward of the whole output, assigned to its last token of the policy."""
    advantage: float | np.ndarray
    """Advantage of every token, or one for each token of the policy; ppo computes its own from `reward`."""
    loss_mask: np.ndarray
    """`(T,)` bool: the policy's own tokens, at least one; those of an environment are not trained on."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Right-padded rows. `B` samples, `L` positions, `T` output positions."""

    input_ids: torch.Tensor
    """`(B, L)` int64."""
    attention_mask: torch.Tensor
    """`(B, L)` int64."""
    positions: torch.Tensor
    """`(B, T)` int64: position whose logits predict output token t; 0 where the mask is 0."""
    targets: torch.Tensor
    """`(B, T)` int64: the output tokens; 0 where the mask is 0."""
    mask: torch.Tensor
    """`(B, T)` float32: 1 for tokens of the policy, 0 for those of an environment and padding."""
    rollout_logprobs: torch.Tensor
    """`(B, T)` float32; 0 where the mask is 0."""
    rewards: torch.Tensor
    """`(B, T)` float64, assigned to the last token of the policy."""
    advantages: torch.Tensor
    """`(B, T)` float32; 0 where the mask is 0."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same batch on another device."""
        return MicroBatch(*(getattr(self, one.name).to(device) for one in fields(self)))


def cut_by_tokens(lengths: Sequence[int], max_tokens: int, packed: bool = False) -> list[list[int]]:
    """Indices of the samples in groups whose padded size stays within `max_tokens`, similar lengths together; `packed`:
    whose sum does, each in the first group with room. A longer sample is a group by itself. The longest come first, so
    that a lack of memory shows at once."""
    groups, sizes = list[list[int]](), list[int]()
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        first = 0 if packed else max(len(groups) - 1, 0)
        for number, group in enumerate(groups[first:], first):
            added = lengths[index if packed else group[0]]
            if sizes[number] + added <= max_tokens:
                group.append(index)
                sizes[number] += added
                break
        else:
            groups.append([index])
            sizes.append(lengths[index])
    return groups


def share_out(groups: Sequence[list[int]], ranks: int) -> list[list[list[int]]]:
    """Rank → its groups, assigned round robin. All ranks get the same number, since they step together: missing groups
    are empty."""
    rounds = -(-len(groups) // ranks)
    padded = [*groups, *([] for _ in range(rounds * ranks - len(groups)))]
    return [padded[rank::ranks] for rank in range(ranks)]


def collate(samples: Sequence[Sample], indices: Sequence[int]) -> MicroBatch:
    """The samples at these indices as right-padded rows; without indices one row of padding with an empty mask, which
    has no effect."""
    chosen = [samples[i] for i in indices]
    rows, width = max(len(chosen), 1), max((len(sample.output) for sample in chosen), default=1)
    lengths = torch.tensor([sample.num_tokens for sample in chosen] or [1])
    places = torch.arange(max(int(lengths.max()), 2))
    input_ids, attention_mask = torch.zeros((rows, len(places)), dtype=torch.long), (places < lengths[:, None]).long()
    positions, targets = torch.zeros((rows, width), dtype=torch.long), torch.zeros((rows, width), dtype=torch.long)
    mask, logprobs = torch.zeros(rows, width), torch.zeros(rows, width)
    rewards, advantages = torch.zeros(rows, width, dtype=torch.float64), torch.zeros(rows, width)
    for row, sample in enumerate(chosen):
        tokens = torch.tensor(np.concatenate([sample.prompt, sample.output]))
        input_ids[row, : len(tokens)] = tokens
        own = torch.nonzero(torch.tensor(sample.loss_mask))[:, 0]
        positions[row, own] = own + (len(sample.prompt) - 1)
        targets[row, own] = tokens[own + len(sample.prompt)]
        mask[row, own] = 1.0
        logprobs[row, own] = torch.tensor(sample.rollout_logprobs)[own]
        rewards[row, own[-1:]] = sample.reward
        advantages[row, own] = torch.as_tensor(sample.advantage, dtype=torch.float32)
    return MicroBatch(input_ids, attention_mask, positions, targets, mask, logprobs, rewards, advantages)
