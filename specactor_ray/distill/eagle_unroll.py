"""The head unrolled over its own predictions, all positions at once: EAGLE-3's training-time test (arXiv 2503.01840).

At inference the head starts from a true feature at an *anchor* `a` and then reads its own outputs: at depth `k` it is
at sequence position `a + k` and attends to the true features up to the anchor and to its own of depths 1..k. In
training every position is an anchor. Keys of depth 0 are shared by all anchors (causal attention); those of deeper
steps belong to one anchor only, so each adds one column to the scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from specactor_ray.draft.eagle.head import EagleHead


@dataclass(frozen=True, slots=True)
class EagleBatch:
    """Sequences of different lengths, padded on the right to `T` positions.

    Position `i` of a sequence `x` of `L` tokens holds the target's states of `x_i` and, as `next_ids`, `x_{i+1}`; so
    there are `L - 1` of them.
    """

    states: torch.Tensor
    """`(B, T, feature_size)`: auxiliary hidden states of the target."""
    next_ids: torch.Tensor
    """`(B, T)` int64."""
    predicts_output: torch.Tensor
    """`(B, T)` bool: position `i` predicts, like the target, a token `x_{i+1}` that counts: one of the output."""
    teacher: torch.Tensor
    """`(M, draft_vocab)`: the target's log-probabilities for `x_{i+1}` over the draft vocabulary, at the `M` positions
    where `predicts_output` holds, in its order."""
    final: torch.Tensor | None = None
    """`(M, hidden)`: input of the target's output layer at these positions."""

    def to(self, device: torch.device) -> EagleBatch:
        """The same batch on a device."""
        final = None if self.final is None else self.final.to(device)
        parts = (self.states, self.next_ids, self.predicts_output, self.teacher)
        states, next_ids, counts, teacher = (part.to(device) for part in parts)
        return EagleBatch(states, next_ids, counts, teacher, final)


@dataclass(slots=True)
class _Unroll:
    """Keys and values of all depths; `attend` is the head's attention.

    Depth 0 has those of every position; deeper ones have them for the anchors from `begin` on, fewer each time.
    """

    begin: int
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def attend(self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`q` `(B, heads, N, dim)` of the next depth."""
        self.keys.append(k)
        self.values.append(v)
        if len(self.keys) == 1:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            return out.transpose(1, 2).flatten(2)
        batch, heads, count, dim = q.shape
        kv_heads, end = k.shape[1], self.begin + count
        grouped = q.view(batch, kv_heads, heads // kv_heads, count, dim) * dim**-0.5
        shared = grouped @ self.keys[0][:, :, None, :end].transpose(-1, -2)
        future = torch.ones(count, end, dtype=torch.bool, device=q.device).triu(self.begin + 1)
        own = [(grouped * key[:, :, None, :count]).sum(-1, keepdim=True) for key in self.keys[1:]]
        weights = torch.softmax(torch.cat([shared.masked_fill(future, float("-inf")), *own], dim=-1), dim=-1)
        out = weights[..., :end] @ self.values[0][:, :, None, :end]
        for depth, value in enumerate(self.values[1:]):
            out = out + weights[..., end + depth, None] * value[:, :, None, :count]
        return out.reshape(batch, heads, count, dim).transpose(1, 2).flatten(2)


def unroll(head: EagleHead, batch: EagleBatch, depths: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Predictions at depth 0, 1, ..., `depths - 1`, of the anchors that have a target at that depth and count.

    Yields:
        `(outputs, rows)`: input of the head's output layer, `(N, hidden)`, and `(N,)` row in `batch.teacher` and
        `batch.final` of the target's side of the same prediction.
    """
    total, device = batch.next_ids.shape[1], batch.next_ids.device
    row_of = torch.full_like(batch.next_ids, -1)
    row_of[batch.predicts_output] = torch.arange(len(batch.teacher), device=device)
    counting = batch.predicts_output.any(dim=0).nonzero()
    # Most of a prompt is never predicted: beyond depth 0, which has its keys, it is left out.
    begin = max(int(counting[0]) - depths, 0) if len(counting) else 0
    positions = torch.arange(total, device=device)
    inputs, attention = head.fuse(batch.states), _Unroll(begin)
    for depth in range(depths):
        # Anchor a predicts x_{a + depth + 2}, like the target at position a + depth + 1.
        last = total - depth - 1
        if last <= begin:
            return
        first, end = (0, last + 1) if depth == 0 else (begin, last)
        at = positions[first + depth : end + depth].expand(len(inputs), -1)
        outputs = head(inputs[:, : end - first], batch.next_ids[:, first + depth : end + depth], at, attention.attend)
        outputs = outputs[:, begin - first : last - first]
        rows = row_of[:, begin + depth + 1 :]
        # The output layer costs as much as the rest, so only positions that count go on.
        yield head.norm(outputs[rows >= 0]), rows[rows >= 0]
        inputs = outputs


def unroll_loss(
    head: EagleHead, batch: EagleBatch, depths: int, decay: float = 0.8, regression: float = 2.0
) -> tuple[torch.Tensor, list[float]]:
    """Cross entropy against the target's distribution, and the distance of the inputs of the two output layers (smooth
    L1, if the batch has it), summed over depths with weights `decay ** depth`.

    Returns:
        The loss per position; and per depth the mean overlap `1 - TV` (total variation) of the two distributions: two
        samples with the same noise agree with probability at least `(1 - TV) / (1 + TV)`.
    """
    loss = batch.states.new_zeros(())
    overlaps = [0.0] * depths
    for depth, (outputs, rows) in enumerate(unroll(head, batch, depths)):
        if not len(rows):
            continue
        log_probs, probs = torch.log_softmax(head.lm_head(outputs).float(), dim=-1), batch.teacher[rows].exp()
        lost = -(probs * log_probs).sum(-1).mean()
        if batch.final is not None:
            lost = lost + regression * F.smooth_l1_loss(outputs.float(), batch.final[rows])
        loss = loss + decay**depth * lost
        with torch.no_grad():
            overlaps[depth] = float(torch.minimum(probs, log_probs.exp()).sum(-1).mean())
    return loss, overlaps
