"""Keyed sampling by the Triton kernels: rules and drafts on the device, one packed copy of the results to the host.

Importing this module imports triton.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specactor_ray.core.types import SamplingParams
from specactor_ray.sampling import triton as kernels
from specactor_ray.sampling.candidates import MOST, candidates
from specactor_ray.sampling.keyed import Backend, verify_arrays
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


def difference(device: torch.device, dtype: torch.dtype, ranks: int, vocab_size: int = 6016) -> str:
    """Differences between the kernels and the numba form in 64 rows, two of each request (candidates: in 32); empty
    where there are none."""
    n = 32
    logits = (3.0 * torch.randn(2 * n, vocab_size, generator=torch.Generator().manual_seed(1))).to(dtype)
    filters = ((0, 1.0), (0, 1.0), (40, 1.0), (0, 0.9), (50, 0.8))
    params = [
        SamplingParams((0.0, 0.6, 1.0, 2.0)[i % 4], top_k=filters[i % 5][0], top_p=filters[i % 5][1], seed=2**60 + i)
        for i in range(n)
    ]
    rows = np.arange(n)

    def found(x: Tensor, drafts: np.ndarray, backend: Backend) -> tuple[np.ndarray, ...]:
        rules, offsets = Rules(n, x.device), np.arange(n + 1) * (len(drafts) // n)
        rules.write(range(n), params, [0] * n)
        if ranks == MOST:
            return candidates(x[:n], 100 * rows, rows, rules, backend=backend)
        arrays = (2 * rows, offsets, drafts, 100 * rows, rows, rules)
        result = verify_arrays(x, *arrays, ranks, backend=backend)
        return (result.tokens, result.margins) if ranks == 2 else (result.tokens,)

    right = found(logits, np.zeros(0, np.int32), "numba")[0][:, 0].astype(np.int32)
    pairs = zip(found(logits, right, "numba"), found(logits.to(device), right, "triton"), strict=True)
    count = int(np.any([(want != got).reshape(n, -1).any(axis=1) for want, got in pairs], axis=0).sum())
    return f"{count} of {n} requests get other tokens or margins than on the CPU" if count else ""
