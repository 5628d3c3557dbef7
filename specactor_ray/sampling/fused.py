"""Keyed sampling by the Triton kernels: rules and drafts on the device, one packed copy of the results to the host.

Importing this module imports triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specactor_ray.messages import SamplingParams
from specactor_ray.sampling import triton_kernels as kernels
from specactor_ray.sampling import verify_tails
from specactor_ray.sampling.numba_kernels import GREEDY_BELOW

_FEWEST_CHUNKS = 64
"""So that vocabularies up to 262,144 share their compiled kernels."""


class Rules:
    """Seed, temperature, top_k, top_p and position base of an engine's rows, on the device; written at admission.

    The output position of a row is its base plus the position that a call passes, so an engine may pass positions in
    the sequence and set the base to minus the length of the prompt.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.words = torch.zeros(slots, kernels.RULE_FIELDS, dtype=torch.int64, device=device)
        self._filtered = np.zeros(slots, bool)

    @property
    def any_filtered(self) -> bool:
        """Whether top-k or top-p may leave out tokens of some slot; then a call takes one kernel more."""
        return bool(self._filtered.any())

    def write(self, slots: Sequence[int], params: Sequence[SamplingParams], bases: Sequence[int]) -> None:
        """Set the rules of `slots` by one copy to the device."""
        columns = np.empty((1 + kernels.RULE_FIELDS, len(slots)), np.int64)
        columns[0] = slots
        columns[1] = np.array([one.seed for one in params], np.uint64).view(np.int64)
        columns[2] = np.array([one.temperature for one in params], np.float64).view(np.int64)
        columns[3] = [one.top_k for one in params]
        columns[4] = np.array([one.top_p for one in params], np.float64).view(np.int64)
        columns[5] = bases
        on_device = torch.from_numpy(columns).to(self.words.device)
        self.words[on_device[0]] = on_device[1:].T
        self._filtered[columns[0]] = [
            (one.top_k > 0 or one.top_p < 1.0) and one.temperature >= GREEDY_BELOW for one in params
        ]


def verify(
    logits: Tensor,
    offsets: Tensor,
    tail_offsets: Tensor,
    tails: Tensor,
    longest: int,
    positions: Tensor,
    slots: Tensor,
    rules: Rules,
    record_margins: bool,
) -> Tensor:
    """Sample and verify a batch of requests. All tensors are on the device of the logits; nothing waits for it.

    Args:
        logits: (M, V) float32, bfloat16 or float16; a row is contiguous.
        offsets: (N,) first logits row of each request.
        tail_offsets: (N + 1,) request i drafts `tails[tail_offsets[i]:tail_offsets[i + 1]]`.
        tails: Draft tokens of all requests.
        longest: Most drafts of a request, or more.
        positions: (N,) position of each request's first row; the base of its rule is added.
        slots: (N,) the request's slot in `rules`.
        rules: How the slots are sampled.
        record_margins: Whether margins are computed.

    Returns:
        (N, 2 + 3 * (longest + 1)) int64. Per request: the count of tokens, the status of the row after them (not OK:
        that row cannot be sampled), then as many columns of tokens (-1 past the count), of log-probabilities and of
        margins (bits of float64; undefined past the count, and margins unless recorded).
    """
    n, width, vocab = offsets.shape[0], longest + 1, logits.shape[1]
    chunks = -(-vocab // kernels.SCAN["BLOCK"])
    padded = max(_FEWEST_CHUNKS, 1 << (chunks - 1).bit_length())
    shape = (n * width, 2, chunks)
    scores = torch.empty(shape, dtype=torch.float64, device=logits.device)
    sums = torch.empty(shape, dtype=torch.float32, device=logits.device)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    out = torch.empty(n, 2 + 3 * width, dtype=torch.int64, device=logits.device)
    rows = (logits, logits.stride(0), vocab, offsets, tail_offsets, slots, positions, rules.words)
    parts = (scores, sums, ids)
    with torch.cuda.device_of(logits):
        kernels.scan[n * width, chunks](*rows, *parts, width, chunks, MARGIN=record_margins, **kernels.SCAN)
        if rules.any_filtered:
            kernels.filter_rows[(n * width,)](
                *rows, *parts, width, chunks, CHUNKS=padded, MARGIN=record_margins, **kernels.FILTER
            )
        kernels.commit[(n,)](
            *rows, *parts, tails, out, width, chunks, CHUNKS=padded, MARGIN=record_margins, **kernels.COMMIT
        )
    return out


def verify_lists(
    logits: Tensor,
    offsets: np.ndarray,
    tail_offsets: np.ndarray,
    tails: np.ndarray,
    params: Sequence[SamplingParams],
    positions: np.ndarray,
    record_margins: bool,
) -> np.ndarray:
    """`verify` with arguments of the host, all int64: the same array on the host."""
    n, device = len(params), logits.device
    rules = Rules(n, device)
    rules.write(range(n), params, [0] * n)
    parts = [offsets, tail_offsets, positions, np.arange(n), tails]
    sizes = [len(part) for part in parts]
    on_device = torch.from_numpy(np.concatenate(parts)).to(device).split(sizes)
    first, of_tails, at, slots, drafts = on_device
    longest = int(np.diff(tail_offsets).max())
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    out = verify(rows, first, of_tails, drafts, longest, at, slots, rules, record_margins)
    host: np.ndarray = out.cpu().numpy()
    return host


def difference(device: torch.device, dtype: torch.dtype, record_margins: bool, vocab_size: int = 6016) -> str:
    """How the kernels differ from the numba form in 64 rows, two of each request; empty where they do not."""
    n = 32
    logits = (3.0 * torch.randn(2 * n, vocab_size, generator=torch.Generator().manual_seed(1))).to(dtype)
    filters = ((0, 1.0), (0, 1.0), (40, 1.0), (0, 0.9), (50, 0.8))
    params = [
        SamplingParams((0.0, 0.6, 1.0, 2.0)[i % 4], top_k=filters[i % 5][0], top_p=filters[i % 5][1], seed=2**60 + i)
        for i in range(n)
    ]
    offsets, positions = range(0, 2 * n, 2), range(0, 100 * n, 100)
    right = [one.token_ids for one in verify_tails(logits, offsets, [()] * n, params, positions)]
    want = verify_tails(logits, offsets, right, params, positions, record_margins=record_margins)
    logits = logits.to(device)
    got = verify_tails(logits, offsets, right, params, positions, record_margins=record_margins, backend="triton")
    wrong = sum(a.token_ids != b.token_ids or a.margins != b.margins for a, b in zip(want, got, strict=True))
    return f"{wrong} of {n} requests get other tokens or margins than on the CPU" if wrong else ""
