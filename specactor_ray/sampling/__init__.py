"""Keyed sampling: the token at an output position is a pure function of (logits, seed, position).

The token at output position `t` of a request with seed `s` is the argmax over v of

    logits[v] / T + g(s, t, v)

among the tokens that top-k and top-p leave; temperature 0 is the plain argmax. Ties go to the lowest id. `g` is
standard Gumbel noise, so this draws from the softmax (the Gumbel-max trick); it comes from a counter-based
generator keyed on (s, t, v), so every process, thread and device draws the same. Hence verification is token
comparison, the output does not depend on who drafted, and a drafter that samples with the same seed and position
agrees with the target with probability at least (1 - TV) / (1 + TV) (Daliri, Musco, Suresh, arXiv 2408.07978).
`docs/design/keyed-sampling.md` gives the construction and the reasons.

Filters, in the order Hugging Face and vLLM apply them: temperature; top-k; top-p over the renormalised top-k set.
Tokens are ordered by (probability descending, id ascending); top-k keeps the first k, top-p the shortest prefix
that holds at least `top_p` of the mass. Exactly k tokens stay even when the k-th is tied.

Log-probabilities are those of softmax(logits / T) over the whole vocabulary, before top-k and top-p and without
noise (T = 1 at temperature 0): the distribution the policy defines, and the one a trainer recomputes.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Literal

import numpy as np

from specactor_ray.errors import InputError, SpecActorError
from specactor_ray.messages import SamplingParams
from specactor_ray.sampling import numba_kernels as kernels

if TYPE_CHECKING:  # lookups draw noise without torch
    import torch

logger = logging.getLogger(__name__)

Backend = Literal["auto", "numba", "torch", "triton"]

_PROBLEMS = {
    kernels.ERR_NAN: "logits contain NaN",
    kernels.ERR_POS_INF: "logits contain +inf",
    kernels.ERR_ALL_NEG_INF: "all logits are -inf",
    kernels.ERR_TOO_LARGE: f"a logit is above {kernels.MAX_LOGIT:g}",
}
_MAX_POSITION = 2**32 - 1
_DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16")


class SamplingError(SpecActorError):
    """Some rows have logits no token can be drawn from. No results are returned; the other rows are sound.

    Sampling has no state: drop `rows` and call again.

    Attributes:
        problems: Index in the batch (of `sample_rows` or `verify_tails`) → what is wrong with its logits.
    """

    def __init__(self, problems: dict[int, str]) -> None:
        self.problems = dict(problems)
        super().__init__("cannot sample: " + "; ".join(f"row {i}: {text}" for i, text in self.problems.items()))

    @property
    def rows(self) -> tuple[int, ...]:
        """Batch indices of the bad rows."""
        return tuple(self.problems)

    def __reduce__(self) -> tuple[type[SamplingError], tuple[dict[int, str]]]:
        return type(self), (self.problems,)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per row."""

    token_ids: list[int]
    logprobs: list[float]
    """Of softmax(logits / T), before top-k/top-p and noise."""
    margins: list[float] | None = None
    """Best minus second-best perturbed score among the allowed tokens (inf if only one is); at temperature 0 the
    gap of the two largest logits. None unless asked for."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What one request may commit: the accepted draft tokens and one recovered or bonus token."""

    token_ids: list[int]
    logprobs: list[float]
    num_accepted: int
    """Draft tokens that equalled the sampled ones; `len(token_ids) - 1`."""
    margins: list[float] | None = None


def derive_seed(run_seed: int, prompt_index: int, sample_index: int) -> int:
    """Seed of one sample of one prompt: the first 8 bytes, little-endian, of keyless BLAKE2b.

    The hashed message is the three numbers as little-endian unsigned 64-bit words, under the personalisation
    `specactor-seed`. Stable across processes, machines and versions. A prompt that comes back in a later epoch
    needs another `run_seed` or `prompt_index`, or it is answered the same way again.

    Returns:
        An unsigned 64-bit number.

    Raises:
        InputError: A number is not in [0, 2**64).
    """
    numbers = {"run_seed": run_seed, "prompt_index": prompt_index, "sample_index": sample_index}
    for name, value in numbers.items():
        if not 0 <= value < 2**64:
            raise InputError(f"{name} is {value!r}; it must be between 0 and 2**64 - 1")
    message = struct.pack("<QQQ", *numbers.values())
    return int.from_bytes(hashlib.blake2b(message, digest_size=8, person=b"specactor-seed").digest(), "little")


def own_noise(sampling: SamplingParams) -> SamplingParams:
    """The same request with noise of the drafter's own: another seed, derived from the request's (BLAKE2b under the
    personalisation `specactor-draft`), so that draws are independent of the target's and still the same every time."""
    digest = hashlib.blake2b(struct.pack("<Q", sampling.seed), digest_size=8, person=b"specactor-draft").digest()
    return replace(sampling, seed=int.from_bytes(digest, "little"))


def gumbel_noise(seed: int, position: int, vocab_size: int) -> np.ndarray:
    """The noise g(seed, position, v) of all v: (vocab_size,) float32. `sample_rows` does not need it.

    Args:
        seed: In [0, 2**64).
        position: Output position, in [0, 2**32).
    """
    out = np.empty(vocab_size, np.float32)
    kernels.fill_gumbel((np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32), np.uint32(position)), out)
    return out


def sample_rows(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    *,
    record_margins: bool = False,
    backend: Backend = "auto",
) -> Sampled:
    """Sample one token per row.

    Args:
        logits: (N, V) float32, bfloat16 or float16.
        params: N; seed, temperature, top_k and top_p are used.
        positions: N output positions the tokens are for.
        record_margins: Also return the perturbed top-2 margins.
        backend: "auto" takes numba for CPU tensors, triton on CUDA, torch elsewhere; all give the same tokens.

    Raises:
        SamplingError: Logits of a row hold NaN or +inf, or are all -inf.
        ValueError: Shapes, dtype or positions do not fit.
    """
    empty: list[Sequence[int]] = [()] * len(params)
    results = verify_tails(
        logits, range(len(params)), empty, params, positions, record_margins=record_margins, backend=backend
    )
    if len(results) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(results)} params")
    margins = [r.margins[0] for r in results if r.margins is not None] if record_margins else None
    return Sampled([r.token_ids[0] for r in results], [r.logprobs[0] for r in results], margins)


def verify_tails(
    logits: torch.Tensor,
    row_offsets: Sequence[int],
    tails: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    *,
    record_margins: bool = False,
    backend: Backend = "auto",
) -> list[Verified]:
    """Accept per request the longest draft prefix the target samples itself, and add the target's next token.

    Request i owns the `len(tails[i]) + 1` logits rows from `row_offsets[i]` on; the j-th is the target's
    prediction for output position `positions[i] + j`. Rows past the first mismatch are not looked at.

    Args:
        logits: (M, V) float32, bfloat16 or float16.
        row_offsets: First logits row of each request.
        tails: Draft tokens of each request, any length including 0.
        params: Of each request; seed, temperature, top_k and top_p are used.
        positions: Output position of each request's first row.
        record_margins: Also return the perturbed top-2 margins.
        backend: "auto" takes numba for CPU tensors, triton on CUDA, torch elsewhere; all give the same tokens.

    Raises:
        SamplingError: Logits of a row that had to be sampled hold NaN or +inf, or are all -inf.
        ValueError: Shapes, dtype or positions do not fit.
    """
    lengths = np.fromiter(map(len, tails), np.int64, len(tails))
    offsets = np.asarray(row_offsets, np.int64).reshape(-1)
    first = np.asarray(positions, np.int64).reshape(-1)
    _check(logits, offsets, lengths, len(params), first)
    if not len(params):
        return []
    logits = logits.detach()
    run = _FORMS[_fitting(logits, record_margins) if backend == "auto" else backend]
    return _collect(run(logits, offsets, lengths, tails, params, first, record_margins), lengths, record_margins)


def warm_up(
    device: torch.device | None = None, dtype: torch.dtype | None = None, *, record_margins: bool = False
) -> None:
    """Compile or load the kernels now (some seconds on the first run of a machine), not in the first step.

    Args:
        device: Where logits will be; without it, on the CPU.
        dtype: Of these logits.
        record_margins: Whether margins will be asked for.
    """
    import torch

    params = [SamplingParams(seed=0, top_k=2, top_p=0.5)] * 2
    sample_rows(torch.zeros(2, 8), params, [0, 1], backend="numba")
    if device is not None:
        _fitting(torch.empty(0, dtype=dtype, device=device), record_margins)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Flat results: request i has `counts[i]` of them from `starts[i]` on."""

    tokens: list[int]
    logprobs: list[float]
    margins: list[float]
    starts: list[int]
    counts: list[int]
    statuses: list[int]


def _check(logits: torch.Tensor, offsets: np.ndarray, lengths: np.ndarray, n: int, first: np.ndarray) -> None:
    if logits.ndim != 2 or str(logits.dtype) not in _DTYPES or logits.shape[1] == 0:
        raise ValueError(f"logits must be (rows, vocabulary) in float32, bfloat16 or float16, got {tuple(logits.shape)}"
                         f" {logits.dtype}")  # fmt: skip
    if not len(offsets) == len(lengths) == n == len(first):
        raise ValueError(f"{n} params for {len(offsets)} row offsets, {len(lengths)} tails and {len(first)} positions")
    if n and (offsets.min() < 0 or (offsets + lengths).max() >= logits.shape[0]):
        raise ValueError(f"row offsets and tails reach outside of the {logits.shape[0]} rows of logits")
    if n and (first.min() < 0 or (first + lengths).max() > _MAX_POSITION):
        raise ValueError(f"positions must be between 0 and {_MAX_POSITION}")


def _run_numba(
    logits: torch.Tensor,
    offsets: np.ndarray,
    lengths: np.ndarray,
    tails: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    first: np.ndarray,
    record_margins: bool,
) -> _Columns:
    n = len(params)
    x = logits.cpu().float().contiguous().numpy()
    tail_offsets, flat = _flattened(lengths, tails)
    rules = (
        np.array([p.seed for p in params], np.uint64),
        first,
        np.array([p.temperature for p in params], np.float64),
        np.array([p.top_k for p in params], np.int64),
        np.array([p.top_p for p in params], np.float64),
    )
    rows = len(flat) + n
    tokens, counts, statuses = np.zeros(rows, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    logprobs, margins = np.zeros(rows), np.zeros(rows)
    out = (tokens, logprobs, margins, counts, statuses)
    kernels.verify_batch(x, x.view(np.int32), offsets, tail_offsets, flat, rules, record_margins, out)
    starts = tail_offsets[:-1] + np.arange(n)
    return _Columns(
        tokens.tolist(), logprobs.tolist(), margins.tolist(), starts.tolist(), counts.tolist(), statuses.tolist()
    )


def _run_torch(
    logits: torch.Tensor,
    offsets: np.ndarray,
    lengths: np.ndarray,
    tails: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    first: np.ndarray,
    record_margins: bool,
) -> _Columns:
    """Every row is sampled at once, then compared with the tails on the host."""
    import torch

    from specactor_ray.sampling import torch_kernels

    owners = [i for i, length in enumerate(lengths.tolist()) for _ in range(length + 1)]
    steps = [j for length in lengths.tolist() for j in range(length + 1)]
    rows = torch.tensor([int(offsets[i]) + j for i, j in zip(owners, steps, strict=True)], device=logits.device)
    tokens, logprobs, margins, row_status = torch_kernels.sample_batch(
        logits[rows],
        [params[i].seed for i in owners],
        [int(first[i]) + j for i, j in zip(owners, steps, strict=True)],
        [params[i].temperature for i in owners],
        [params[i].top_k for i in owners],
        [params[i].top_p for i in owners],
        record_margins,
    )
    starts, counts, statuses = [], [], []
    start = 0
    for tail in tails:
        count, status = _walk(tail, tokens, row_status, start)
        starts.append(start)
        counts.append(count)
        statuses.append(status)
        start += len(tail) + 1
    return _Columns(tokens, logprobs, margins, starts, counts, statuses)


def _walk(tail: Sequence[int], tokens: list[int], row_status: list[int], start: int) -> tuple[int, int]:
    """(tokens to commit, status) of one request whose rows begin at `start`."""
    for j in range(len(tail) + 1):
        if row_status[start + j] != kernels.OK:
            return j, row_status[start + j]
        if j < len(tail) and tail[j] != tokens[start + j]:
            break
    return j + 1, kernels.OK


def _run_triton(
    logits: torch.Tensor,
    offsets: np.ndarray,
    lengths: np.ndarray,
    tails: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    first: np.ndarray,
    record_margins: bool,
) -> _Columns:
    from specactor_ray.sampling import fused

    tail_offsets, flat = _flattened(lengths, tails)
    found = fused.verify_lists(logits, offsets, tail_offsets, flat, params, first, record_margins)
    tokens, logprobs, margins = np.split(found[:, 2:], 3, axis=1)
    return _Columns(
        tokens.ravel().tolist(),
        logprobs.ravel().view(np.float64).tolist(),
        margins.ravel().view(np.float64).tolist(),
        [i * tokens.shape[1] for i in range(len(params))],
        found[:, 0].tolist(),
        found[:, 1].tolist(),
    )


def _flattened(lengths: np.ndarray, tails: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(where each tail begins and the last one ends, the tokens of all tails)."""
    tail_offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=tail_offsets[1:])
    return tail_offsets, np.fromiter(chain.from_iterable(tails), np.int64, int(tail_offsets[-1]))


_FORMS = {"numba": _run_numba, "torch": _run_torch, "triton": _run_triton}


def _fitting(logits: torch.Tensor, record_margins: bool) -> str:
    """The form that "auto" takes."""
    if logits.device.type == "cpu":
        return "numba"
    return "triton" if _fused_is_exact(logits.device, logits.dtype, record_margins) else "torch"


@functools.cache
def _fused_is_exact(device: torch.device, dtype: torch.dtype, record_margins: bool) -> bool:
    """Whether the Triton kernels run on the device and give the tokens of the numba form."""
    if device.type != "cuda":
        return False
    try:
        from specactor_ray.sampling.fused import difference

        problem = difference(device, dtype, record_margins)
    except Exception as error:  # noqa: BLE001 - whatever is missing (triton, a compiler, a driver), torch samples alike
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    if problem:
        logger.warning("Sampling on %s uses torch operations, many times slower than Triton's: %s", device, problem)
    return not problem


def _collect(columns: _Columns, lengths: np.ndarray, record_margins: bool) -> list[Verified]:
    if any(columns.statuses):
        raise SamplingError(
            {
                i: f"{_PROBLEMS[status]} (at its logits row {columns.counts[i]} of {lengths[i] + 1})"
                for i, status in enumerate(columns.statuses)
                if status
            }
        )
    results = []
    for start, count in zip(columns.starts, columns.counts, strict=True):
        span = slice(start, start + count)
        margins = columns.margins[span] if record_margins else None
        results.append(Verified(columns.tokens[span], columns.logprobs[span], count - 1, margins))
    return results
