"""Keyed sampling: the token at an output position is a pure function of (logits, seed, position).

The token at output position `t` of a request with seed `s`, counted from its `first_position`, is the argmax over v of

    logits[v] / T + g(s, t, v)

among the tokens that top-k and top-p leave; temperature 0 is the plain argmax. Ties go to the lowest id. `g` is
standard Gumbel noise of a counter-based generator, so this draws from the softmax, and every process, thread and device
draws the same. `docs/design/keyed-sampling.md` gives the construction and the reasons.

Filters apply in the order of Hugging Face and vLLM: temperature; top-k; top-p over the renormalised top-k set, by
(probability descending, id ascending). Exactly k tokens stay even when the k-th is tied. Log-probabilities are those
of softmax(logits / T) over the whole vocabulary, before the filters and without noise (T = 1 at temperature 0).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from specactor_ray.core.device import to_device
from specactor_ray.core.machine import fall_back
from specactor_ray.core.types import SamplingParams
from specactor_ray.sampling import cpu as kernels
from specactor_ray.sampling.rules import Rules

if TYPE_CHECKING:  # imported where it is used: it takes seconds
    import torch

logger = logging.getLogger(__name__)

Backend = Literal["auto", "numba", "triton"]
_FEWEST_CHUNKS = 64
"""Least number of chunks of the Triton kernels, with which vocabularies up to 262,144 share their compiled code."""

_PROBLEMS = {
    kernels.ERR_NAN: "logits contain NaN",
    kernels.ERR_POS_INF: "logits contain +inf",
    kernels.ERR_ALL_NEG_INF: "all logits are -inf",
    kernels.ERR_TOO_LARGE: f"a logit is above {kernels.MAX_LOGIT:g}",
}


class Found:
    """Tokens that `n` requests may commit, in one buffer, as a device sends it.

    Args:
        packed: int64 `(n, 2 + 3 * width)`. Per request: the count of tokens, the status of the row after them (not OK:
            that row cannot be sampled), then `width` columns of tokens (-1 past the count), of log-probabilities and of
            margins (bits of float64; undefined past the count, and margins unless they are recorded). With more than
            two ranks `width` columns more of the second, of the third, ... candidates (-1: there is none), for
            `candidates.unpacked`.
    """

    __slots__ = ("counts", "logprobs", "margins", "packed", "statuses", "tokens", "width")

    def __init__(self, packed: np.ndarray) -> None:
        self.packed, self.width = packed, (packed.shape[1] - 2) // 3
        floats, width = packed.view(np.float64), self.width
        self.counts, self.statuses, self.tokens = packed[:, 0], packed[:, 1], packed[:, 2 : 2 + width]
        self.logprobs, self.margins = floats[:, 2 + width : 2 + 2 * width], floats[:, 2 + 2 * width :]

    def __reduce__(self) -> tuple[type[Found], tuple[np.ndarray]]:
        return type(self), (self.packed,)

    def problems(self, lengths: np.ndarray) -> dict[int, str]:
        """Request → problem of its logits; `lengths`: draft tokens of each request."""
        return {
            i: f"{_PROBLEMS[int(self.statuses[i])]} (at its logits row {self.counts[i]} of {lengths[i] + 1})"
            for i in np.flatnonzero(self.statuses).tolist()
        }


def sample_rows(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    ranks: int = 1,
    *,
    backend: Backend = "auto",
) -> Found:
    """`verify_arrays` without drafts: one token per row of `(n, V)` logits, at the output positions of `n` requests."""
    rules, rows = Rules(len(params), logits.device), np.arange(len(params))
    rules.write(rows.tolist(), params, [0] * len(params))
    none, at = np.zeros(len(params) + 1, np.int64), np.asarray(positions, np.int64)
    return verify_arrays(logits, rows, none, np.zeros(0, np.int32), at, rows, rules, ranks, backend=backend)


def verify_arrays(
    logits: torch.Tensor,
    offsets: np.ndarray,
    tail_offsets: np.ndarray,
    drafts: np.ndarray,
    positions: np.ndarray,
    slots: np.ndarray,
    rules: Rules,
    ranks: int = 1,
    *,
    ids: np.ndarray | None = None,
    logprobs: bool = True,
    backend: Backend = "auto",
) -> Found:
    """Accept for each request the longest draft prefix that the target samples itself, and add the target's next token.

    Request i owns the logits rows from `offsets[i]` on, one for each of its drafts and one more; the j-th is the
    target's prediction for output position `positions[i] + j`. Rows past the first mismatch are not looked at; logits
    that cannot be sampled from become a status of their request.

    Args:
        logits: (M, V) float32, bfloat16 or float16.
        offsets: int64 (n,): first logits row of each request.
        tail_offsets: int64 (n + 1,): request i drafts `drafts[tail_offsets[i]:tail_offsets[i + 1]]`.
        drafts: int32, draft tokens of all requests.
        positions: int64 (n,): position of each request's first row; the base of its rule is added.
        slots: int64 (n,): the request's slot in `rules`.
        rules: Sampling rules of the slots.
        ranks: 1: tokens and log-probabilities; 2: the perturbed top-2 margins as well; more: the best candidates.
        ids: As in `candidates`.
        logprobs: Whether log-probabilities are needed.
        backend: "auto" takes triton on CUDA, else numba on the host; both give the same tokens.
    """
    longest = int(np.diff(tail_offsets).max(initial=0))
    arrays = offsets, tail_offsets, drafts, positions, slots
    begins, ends, tails, places, rows = to_device(arrays, logits.device)
    inputs = logits.detach(), begins, ends, tails, longest, places, rules, ranks, rows
    found = verify_on_device(*inputs, ids=ids, logprobs=logprobs, backend=backend, wait=True)
    return Found(found.cpu().numpy())


def verify_on_device(
    logits: torch.Tensor,
    offsets: torch.Tensor,
    tail_offsets: torch.Tensor,
    tails: torch.Tensor,
    longest: int,
    positions: torch.Tensor,
    rules: Rules,
    ranks: int,
    slots: torch.Tensor | None = None,
    *,
    ids: np.ndarray | None = None,
    logprobs: bool = True,
    backend: Backend = "auto",
    wait: bool = False,
) -> torch.Tensor:
    """`verify_arrays` with tensors on the device of the logits, without a wait for it; on GPUs by the Triton kernels.

    Args:
        longest: Most drafts of a request, or more.
        slots: None: 0, 1, and so on. A request at a position before its first one gets a token without a meaning.
        wait: Sample on the host, which waits, where the kernels do not run on a GPU.

    Returns:
        The buffer of `Found`, on that device, with `longest + 1` columns of each kind.

    Raises:
        RuntimeError: The Triton kernels do not run on this device, and `wait` is false.
    """
    import torch

    device, n, vocab = logits.device, len(positions), logits.shape[1]
    slots = torch.arange(n, device=device) if slots is None else slots
    name = fitting(device, logits.dtype, ranks) if backend == "auto" else backend
    if ids is not None and (name != "numba" or len(ids) != vocab):
        raise ValueError(f"{len(ids)} ids for {vocab} logits and backend {name}")
    if name == "triton" and n:
        x = logits if logits.stride(1) == 1 else logits.contiguous()
        return _by_triton(x, offsets, tail_offsets, tails, longest, positions, slots, rules, ranks)
    if device.type != "cpu" and not wait:
        raise RuntimeError("sampling runs on the host")
    scores = logits.cpu().float().contiguous().numpy()
    packed = np.full((n, 2 + (2 + ranks if ranks > 2 else 3) * (1 + longest)), -1, np.int64)
    rows = [one.cpu().numpy() for one in (offsets, tail_offsets, tails.int(), positions, slots)]
    tokens, out = _all_tokens(vocab) if ids is None else ids, (packed, packed.view(np.float64))
    kernels.verify_batch(scores, scores.view(np.int32), *rows, rules.table, tokens, ranks, logprobs, out)
    return torch.from_numpy(packed).to(device)


def _by_triton(
    logits: torch.Tensor,
    offsets: torch.Tensor,
    tail_offsets: torch.Tensor,
    tails: torch.Tensor,
    longest: int,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rules: Rules,
    ranks: int,
) -> torch.Tensor:
    """`verify_on_device` by the Triton kernels. A row of logits is contiguous; each entry of `tails` behind the last
    draft costs the start of some programs."""
    import torch

    from specactor_ray.sampling import gpu

    n, width, vocab = offsets.shape[0], longest + 1, logits.shape[1]
    most, chunks = min(n * width, n + len(tails)), -(-vocab // gpu.SCAN["BLOCK"])
    padded = max(_FEWEST_CHUNKS, 1 << (chunks - 1).bit_length())
    scores = torch.empty(most, ranks, chunks, dtype=torch.float64, device=logits.device)
    sums = torch.empty(most, 2, chunks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(most, ranks, chunks, dtype=torch.int32, device=logits.device)
    out = torch.empty(n, 2 + (2 + ranks if ranks > 2 else 3) * width, dtype=torch.int64, device=logits.device)
    rows = (logits, logits.stride(0), vocab, offsets, tail_offsets, slots, positions, rules.words)
    parts, sizes = (scores, sums, ids), (n, width, chunks)
    with torch.cuda.device_of(logits):
        gpu.scan[most, chunks](*rows, *parts, *sizes, RANKS=ranks, **gpu.SCAN)
        if rules.any_filtered:
            gpu.filter_rows[(most,)](*rows, *parts, *sizes, CHUNKS=padded, RANKS=ranks, **gpu.FILTER)
        gpu.commit[(n,)](*rows, *parts, tails, out, *sizes, CHUNKS=padded, RANKS=ranks, **gpu.COMMIT)
    return out


def warm_up(
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    ranks: int = 1,
    logits: torch.Tensor | None = None,
) -> None:
    """Compile or load the kernels for such logits now (some seconds on the first run of a machine), not in the first
    step. `logits`: two rows of a model, since size and stride of its vocabulary choose Triton's kernels, too."""
    import torch

    rules = [SamplingParams(seed=0, top_k=2, top_p=0.5)] * 2
    logits = torch.zeros(2, 16, dtype=dtype, device=device) if logits is None else logits
    sample_rows(logits, rules, [0, 1], ranks)


@functools.lru_cache(8)
def _all_tokens(vocab: int) -> np.ndarray:
    return np.arange(vocab, dtype=np.uint32)


@functools.cache
def fitting(device: torch.device, dtype: torch.dtype, ranks: int) -> Backend:
    """The backend of "auto": "triton" if its kernels run on the device and give the tokens of the numba form."""
    if device.type != "cuda":
        return "numba"
    try:
        problem = difference(device, dtype, ranks)
    except Exception as error:  # noqa: BLE001 - without triton, a compiler or a driver the host samples the same tokens
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    if problem:
        fall_back(logger, f"Sampling copies all logits from {device} to the host, far slower: {problem}")
    return "numba" if problem else "triton"


def difference(device: torch.device, dtype: torch.dtype, ranks: int, vocab_size: int = 6016) -> str:
    """Differences between the kernels on a device and the numba form in 64 rows, two of each request (candidates: in
    32); empty where there are none."""
    import torch

    n, most = 32, 1 if ranks > 2 else 2
    logits = (3.0 * torch.randn(2 * n, vocab_size, generator=torch.Generator().manual_seed(1))).to(dtype)
    filters = ((0, 1.0), (0, 1.0), (40, 1.0), (0, 0.9), (50, 0.8))
    params = [
        SamplingParams((0.0, 0.6, 1.0, 2.0)[i % 4], top_k=filters[i % 5][0], top_p=filters[i % 5][1], seed=2**60 + i)
        for i in range(n)
    ]
    rows = np.arange(n)

    def found(x: torch.Tensor, drafts: np.ndarray, backend: Backend) -> tuple[np.ndarray, ...]:
        rules, ends = Rules(n, x.device), np.arange(n + 1) * (len(drafts) // n)
        rules.write(range(n), params, [0] * n)
        arrays = (most * rows, ends, drafts, 100 * rows, rows, rules)
        result = verify_arrays(x, *arrays, ranks, logprobs=ranks <= 2, backend=backend)
        if ranks > 2:
            packed = result.packed
            gaps = packed.view(np.float64)[:, 4].astype(np.float32)  # of the first two candidates
            return packed[:, [0, 2, *range(5, 4 + ranks)]], gaps
        return (result.tokens, result.margins) if ranks == 2 else (result.tokens,)

    none = np.zeros(0, np.int32)
    right = none if ranks > 2 else found(logits, none, "numba")[0][:, 0].astype(np.int32)
    pairs = zip(found(logits, right, "numba"), found(logits.to(device), right, "triton"), strict=True)
    count = int(np.any([(want != got).reshape(n, -1).any(axis=1) for want, got in pairs], axis=0).sum())
    return f"{count} of {n} requests get other tokens or margins than on the CPU" if count else ""
