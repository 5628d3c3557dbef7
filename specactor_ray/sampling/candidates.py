"""Best candidates of keyed draws, for drafters with branches (`draft/branches.py`).

A drafter that samples with the target's noise needs the next best tokens of the same draw as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specactor_ray.core.jit import kernel
from specactor_ray.sampling import keyed, noise
from specactor_ray.sampling import numba as base
from specactor_ray.sampling.keyed import Backend
from specactor_ray.sampling.noise import perturbed, threefry2x32
from specactor_ray.sampling.rules import Rules, SamplingBatch

if TYPE_CHECKING:
    import torch

_jit: Any = kernel(sources=(base, noise))
MOST = 5
"""Most candidates per draw."""


class Candidates(NamedTuple):
    """Candidates of `n` draws."""

    tokens: np.ndarray
    """int32 `(n, most)`, the best first; `verify_arrays` samples the first one. -1: top-k and top-p leave no more, or
    the logits cannot be sampled from."""
    gaps: np.ndarray
    """float32 `(n,)`: first minus second perturbed score; inf where there is no second."""


_ALL = np.zeros(0, np.uint32)
"""Value of `ids` for a whole vocabulary."""


def candidates(
    logits: torch.Tensor,
    positions: np.ndarray,
    slots: np.ndarray,
    rules: Rules,
    most: int = MOST,
    *,
    ids: np.ndarray | None = None,
    backend: Backend = "auto",
) -> Candidates:
    """Rank the tokens of one draw per row.

    Args:
        logits: (n, V) float32, bfloat16 or float16.
        positions: int64 `(n,)`: positions of the draws; the base of the rule is added.
        slots: int64 `(n,)`: slots in `rules`.
        rules: Sampling rules of the slots.
        most: Candidates per draw, `MOST` or 1.
        ids: uint32 `(V,)`, ascending: tokens of the logits, if these are a part of the vocabulary. The result is that
            of logits over the whole vocabulary with -inf elsewhere; only numba supports it.
        backend: As in `verify_arrays`.

    Raises:
        ValueError: Shapes, dtype, positions or backend do not fit.
    """
    n, logits = len(slots), logits.detach()
    rows, none = np.arange(n), np.zeros(n + 1, np.int64)
    keyed.longest(logits, rows, none, positions, slots, rules)
    name = keyed.fitting(logits, most) if backend == "auto" else backend
    if ids is not None and (name != "numba" or len(ids) != logits.shape[1]):
        raise ValueError(f"{len(ids)} ids for {logits.shape[1]} logits and backend {name}")
    if name == "triton" and n:
        from specactor_ray.sampling import fused

        batch = SamplingBatch(logits, rows, none, none[:0], 1, positions, slots, rules, most)
        return unpacked(fused.verify_on_host(batch), most)
    tokens, gaps = np.full((n, most), -1, np.int32), np.full(n, np.inf, np.float32)
    x = logits.cpu().float().contiguous().numpy()
    _rank_rows(x, x.view(np.int32), positions, slots, rules.table, _ALL if ids is None else ids, tokens, gaps)
    return Candidates(tokens, gaps)


def candidates_on_device(
    logits: torch.Tensor, positions: torch.Tensor, rules: Rules, most: int, *, ids: np.ndarray | None = None
) -> torch.Tensor:
    """`candidates` for the slots 0, 1, ..., without a wait for the device; on GPUs by the Triton kernels.

    Returns:
        int64 `(n, words)`, for `unpacked`. In each line word 0 is positive if there is a token, which is word 2.

    Raises:
        RuntimeError: The Triton kernels do not run on this device.
    """
    import torch

    n = len(positions)
    if logits.device.type != "cpu":
        from specactor_ray.sampling import fused

        if keyed.fitting(logits, most) != "triton":
            raise RuntimeError("sampling runs on the host")
        order = torch.arange(n, device=logits.device)
        none = torch.zeros(n + 1, dtype=torch.int64, device=logits.device)
        return fused.verify(logits, order, none, none[:1], 0, positions, order, rules, most)
    tokens, gaps = candidates(logits, positions.numpy(), np.arange(n), rules, most, ids=ids)
    packed = np.zeros((n, 5 if most == 1 else 4 + tokens.shape[1]), np.int64)
    packed[:, 0], packed[:, 2], packed.view(np.float64)[:, 4] = tokens[:, 0] >= 0, tokens[:, 0], gaps
    packed[:, 5:] = tokens[:, 1:]
    return torch.from_numpy(packed)


def unpacked(packed: np.ndarray, most: int) -> Candidates:
    """Candidates from int64 `(n, words)`, the buffer of `fused.verify` without drafts."""
    drawn = packed[:, 0] > 0
    tokens = np.where(drawn, packed[:, [2, *range(5, 4 + most)]].T, -1).T
    gaps = np.where(drawn & (most > 1), packed.view(np.float64)[:, 4], np.inf)
    with np.errstate(over="ignore"):  # a gap to a token that is masked by the lowest float
        return Candidates(np.ascontiguousarray(tokens, np.int32), gaps.astype(np.float32))


def warm_up(device: torch.device, dtype: torch.dtype, most: int = MOST) -> None:
    """Compile or load the kernels for this device, dtype and number of candidates."""
    import torch

    zero = np.zeros(1, np.int64)
    candidates(torch.zeros(1, 8, dtype=dtype, device=device), zero, zero, Rules(1, device), most)


@_jit
def _insert(score: Any, v: Any, scores: Any, tokens: Any) -> None:
    """Insert a candidate by its score; among equal scores the lower token comes first."""
    place = len(scores) - 1
    while place > 0 and score > scores[place - 1]:
        scores[place], tokens[place] = scores[place - 1], tokens[place - 1]
        place -= 1
    scores[place], tokens[place] = score, v


@_jit
def _hash_tokens(key: Any, ids: Any, gap: Any) -> None:
    """`_hash_block` of these tokens."""
    k0, k1, position = key
    for i in range(len(ids)):
        x0, _ = threefry2x32(k0, k1, ids[i], position)
        gap[i] = np.float32(np.int32(np.uint32(~x0) >> np.uint32(1)))


@_jit
def _rank_row(x: Any, bits: Any, key: Any, rule: Any, scratch: Any, ids: Any, scores: Any, tokens: Any) -> None:
    e, gap = scratch
    temperature = rule["temperature"]
    status, m = base._max_logit(bits)
    if status != base.OK:
        return
    if len(tokens) == 1 and not len(ids):
        sampled = (rule["top_k"], rule["top_p"], False, scratch)
        is_greedy = temperature < base.GREEDY_BELOW
        tokens[0] = base._first_index(x, m) if is_greedy else base.sample_row(x, bits, key, temperature, *sampled)[1]
        return
    scores[:] = -np.inf
    if temperature < base.GREEDY_BELOW:
        for v in range(len(x)):
            if x[v] > scores[-1]:
                _insert(np.float64(x[v]), np.int64(ids[v]) if len(ids) else v, scores, tokens)
        return
    cut = base.find_cut(x, m, temperature, rule["top_k"], rule["top_p"])
    inv_t, bar = np.float32(1.0 / temperature), np.float32(np.inf)
    for start in range(0, len(x), base._BLOCK):
        n = min(base._BLOCK, len(x) - start)
        base._exp_block(x, start, n, m, inv_t, e)
        if len(ids):
            _hash_tokens(key, ids[start : start + n], gap)
        else:
            base._hash_block(key, start, n, gap)
        if base._count_under(gap, e, bar, n) == 0:
            continue
        for i in range(n):
            v = start + i
            if gap[i] > np.float32(e[i] * bar) or not base._kept(x[v], v, cut[0], cut[1]) or x[v] == -np.inf:
                continue
            token = np.int64(ids[v]) if len(ids) else v
            score = perturbed(x[v], token, key, temperature)
            if score > scores[-1]:
                _insert(score, token, scores, tokens)
                bar = base._bar(m, temperature, scores[-1])


@_jit
def _rank_rows(
    logits: Any, bits: Any, positions: Any, slots: Any, rules: Any, ids: Any, tokens: Any, gaps: Any
) -> None:
    scratch = (np.empty(base._BLOCK, np.float32), np.empty(base._BLOCK, np.float32))
    scores = np.empty(tokens.shape[1], np.float64)
    for i in range(len(slots)):
        rule = rules[slots[i]]
        seed, position = rule["seed"], positions[i] + rule["base"]
        key = (np.uint32(seed & np.uint64(0xFFFFFFFF)), np.uint32(seed >> np.uint64(32)), np.uint32(position))
        _rank_row(logits[i], bits[i], key, rule, scratch, ids, scores, tokens[i])
        if len(scores) > 1 and tokens[i, 1] >= 0:
            gaps[i] = scores[0] - scores[1]
