"""Keyed sampling by the Triton kernels: rules and drafts on the device, one packed copy of the results to the host.

Importing this module imports triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specactor_ray.sampling import gpu as kernels
from specactor_ray.sampling.rules import Rules

_FEWEST_CHUNKS = 64
"""Least number of chunks, with which vocabularies up to 262,144 share their compiled kernels."""


def verify(
    logits: Tensor,
    offsets: Tensor,
    tail_offsets: Tensor,
    tails: Tensor,
    longest: int,
    positions: Tensor,
    slots: Tensor,
    rules: Rules,
    ranks: int,
) -> Tensor:
    """`keyed.verify_on_device` by the Triton kernels. A row of logits is contiguous; each entry of `tails` behind the
    last draft costs the start of some programs."""
    n, width, vocab = offsets.shape[0], longest + 1, logits.shape[1]
    most = min(n * width, n + len(tails))
    chunks = -(-vocab // kernels.SCAN["BLOCK"])
    padded = max(_FEWEST_CHUNKS, 1 << (chunks - 1).bit_length())
    scores = torch.empty(most, ranks, chunks, dtype=torch.float64, device=logits.device)
    sums = torch.empty(most, 2, chunks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(most, ranks, chunks, dtype=torch.int32, device=logits.device)
    out = torch.empty(n, 2 + (2 + ranks if ranks > 2 else 3) * width, dtype=torch.int64, device=logits.device)
    rows = (logits, logits.stride(0), vocab, offsets, tail_offsets, slots, positions, rules.words)
    parts, sizes = (scores, sums, ids), (n, width, chunks)
    with torch.cuda.device_of(logits):
        kernels.scan[most, chunks](*rows, *parts, *sizes, RANKS=ranks, **kernels.SCAN)
        if rules.any_filtered:
            kernels.filter_rows[(most,)](*rows, *parts, *sizes, CHUNKS=padded, RANKS=ranks, **kernels.FILTER)
        kernels.commit[(n,)](*rows, *parts, tails, out, *sizes, CHUNKS=padded, RANKS=ranks, **kernels.COMMIT)
    return out
