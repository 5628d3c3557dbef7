"""The CPU kernels behind `specactor_ray.sampling`: keyed Gumbel-max over one row of logits, compiled by numba.

The docstring of `keyed.py` and `docs/design/keyed-sampling.md` define the results; this file computes them fast. A row
takes two passes over its logits: the maximum, then, block by block, exp(logit - max) (for the log-sum-exp), the
Threefry words, and one comparison per token that excludes nearly every draw before any logarithm is taken (`_bar`).
No kernel starts threads; all release the GIL.

Loops are simple enough for LLVM to vectorise them. Hence the casts after every operation: numba widens
`uint32 + uint32` to 64 bits; and the slices: numba cannot exclude a negative index in `x[start + i]`, so that the load
becomes a gather, three times as slow.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specactor_ray.core.jit import kernel
from specactor_ray.sampling import noise
from specactor_ray.sampling.noise import log_f64, perturbed, threefry2x32

OK, ERR_NAN, ERR_POS_INF, ERR_ALL_NEG_INF, ERR_TOO_LARGE = 0, 1, 2, 3, 4
MAX_LOGIT = 1e30
"""Largest valid logit: above it float32 differences of finite logits could overflow."""
GREEDY_BELOW = 1e-5
"""Temperature below which sampling is greedy, as in vLLM: logits divided by less exceed the noise anyway."""
MASS_UNIT = 2.0**42
"""Units of top-p: probabilities are whole numbers of exp((logit - max) / T) / 2^42; their sums do not depend on the
order, so that all forms agree on the cut. A sum fits into 64 bits for up to 2^21 tokens."""

_BLOCK = 512
_P_BINS, _P_BINS_PER_NAT = 2048, 64
_K_BINS, _K_BINS_PER_LOGIT = 4096, 128
_INF_BITS = np.int32(0x7F800000)
_MARGIN = 1.001  # relative slack of the pruning test; its errors sum to less than 1e-4

_jit: Any = kernel((noise,))
_jit_contract: Any = kernel((noise,), fastmath={"contract"})
_jit_reassoc: Any = kernel((noise,), fastmath={"reassoc", "nsz", "contract"})


# --- pieces of a row ---------------------------------------------------------------------------------------


@_jit
def _sortable(bits: Any) -> Any:
    """Float32 bits as an int32 that sorts as the floats do (NaN outside of the infinities)."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@_jit
def _key_range(bits: Any) -> Any:
    """Smallest and largest `_sortable` key: integer reductions vectorise, and NaN cannot hide in them."""
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for i in range(bits.shape[0]):
        key = _sortable(bits[i])
        low = min(low, key)
        high = max(high, key)
    return low, high


@_jit
def _max_logit(bits: Any) -> Any:
    """(status, largest logit)."""
    low, high = _key_range(bits)
    if high > _INF_BITS or low < _sortable(np.int32(_INF_BITS | np.int32(-0x80000000))):
        return ERR_NAN, np.float32(0)
    m = np.int32(_sortable(high)).view(np.float32)
    if m == np.inf:
        return ERR_POS_INF, m
    if m == -np.inf:
        return ERR_ALL_NEG_INF, m
    if m > MAX_LOGIT:
        return ERR_TOO_LARGE, m
    return OK, m


@_jit
def _first_index(x: Any, value: Any) -> Any:
    for i in range(x.shape[0]):
        if x[i] == value:
            return i
    return 0


@_jit_contract
def _exp_block(x: Any, start: Any, n: Any, m: Any, inv_t: Any, out: Any) -> None:
    """out[i] = exp((x - m) / T) in float32, relative error below 2e-5 (1e-6 near the top), never under e^-87."""
    block = x[start : start + n]
    for i in range(n):
        y = np.float32(np.float32(block[i] - m) * inv_t)
        y = y if y > np.float32(-87.0) else np.float32(-87.0)
        k = np.floor(np.float32(y * np.float32(1.4426950408889634) + np.float32(0.5)))
        r = np.float32(
            np.float32(y - np.float32(k * np.float32(0.693359375))) + np.float32(k * np.float32(2.12194440e-4))
        )
        p = np.float32(1.0 / 5040.0)
        p = np.float32(p * r + np.float32(1.0 / 720.0))
        p = np.float32(p * r + np.float32(1.0 / 120.0))
        p = np.float32(p * r + np.float32(1.0 / 24.0))
        p = np.float32(p * r + np.float32(1.0 / 6.0))
        p = np.float32(p * r + np.float32(0.5))
        p = np.float32(p * r + np.float32(1.0))
        p = np.float32(p * r + np.float32(1.0))
        scale = np.int32(np.int32(np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)
        out[i] = np.float32(p * scale)


@_jit_reassoc
def _sum_block(values: Any, n: Any) -> Any:
    total = np.float32(0)
    for i in range(n):
        total += values[i]
    return total


@_jit
def _log_sum_exp(x: Any, m: Any, inv_t: Any, e: Any) -> Any:
    total = 0.0
    for start in range(0, x.shape[0], _BLOCK):
        n = min(_BLOCK, x.shape[0] - start)
        _exp_block(x, start, n, m, inv_t, e)
        total += np.float64(_sum_block(e, n))
    return log_f64(total)


@_jit
def _hash_block(key: Any, ids: Any, gap: Any) -> None:
    """gap[i] = the whole part of (1 - u) 2^31 of a token, from the first Threefry word alone."""
    k0, k1, position = key
    for i in range(ids.shape[0]):
        x0, _ = threefry2x32(k0, k1, ids[i], position)
        gap[i] = np.float32(np.int32(np.uint32(~x0) >> np.uint32(1)))


@_jit
def _count_under(gap: Any, e: Any, bar: Any, n: Any) -> Any:
    count = np.int32(0)
    for i in range(n):
        count += np.int32(1) if gap[i] <= np.float32(e[i] * bar) else np.int32(0)
    return count


@_jit
def _bar(m: Any, temperature: Any, rival: Any) -> Any:
    """The pruning bar: token v can reach the score `rival` only if gap_v <= exp((x_v - m) / T) * bar.

    Proof. v reaches it iff g_v >= d, d = rival - x_v / T. With w = 1 - u: -log(u) >= w, so
    g_v = -log(-log(u)) <= -log(w), so w <= e^-d = exp((x_v - m) / T) exp(m / T - rival). gap_v never exceeds
    2^31 w. `_MARGIN` covers the roundings of g to float32 (under 4e-6 absolute), of the float32 exp (2e-5 relative)
    and of gap and products (1e-6); the term in |m / T| those of the float64 scores.
    """
    if rival == -np.inf:
        return np.float32(np.inf)
    top = np.float64(m) / temperature
    return np.float32(np.exp(top - rival + abs(top) * 2.0**-50) * 2.0**31 * _MARGIN)


# --- top-k and top-p -----------------------------------------------------------------------------------------
#
# The kept set is a prefix of the order (logit descending, id ascending), so its last member (value, id)
# describes it. A histogram over the distance to the maximum finds the bin the prefix ends in; only that bin is
# sorted. Bins are monotone in the logit, and equal logits share a bin.


@_jit
def _kept(value: Any, v: Any, cut_value: Any, cut_id: Any) -> Any:
    return value > cut_value or (value == cut_value and v <= cut_id)


@_jit
def _bin(value: Any, m: Any, scale: Any, bins: Any) -> Any:
    return np.int64(min((np.float64(m) - np.float64(value)) * scale, bins - 1.0))


@_jit
def _sorted_bin(x: Any, m: Any, scale: Any, bins: Any, which: Any, size: Any) -> Any:
    """Ids of the tokens in bin `which`, by (logit descending, id ascending)."""
    keys = np.empty(size, np.int64)
    n = 0
    for v in range(x.shape[0]):
        if _bin(x[v], m, scale, bins) == which:
            bits = np.float32(x[v] + np.float32(0.0)).view(np.int32)  # + 0.0: minus zero ties with zero
            keys[n] = (np.int64(~_sortable(bits)) << np.int64(32)) | np.int64(v)
            n += 1
    keys = np.sort(keys[:n])
    for i in range(n):
        keys[i] = keys[i] & np.int64(0xFFFFFFFF)
    return keys


@_jit
def top_k_cut(x: Any, m: Any, k: Any) -> Any:
    """(value, id) of the k-th token in the order (logit descending, id ascending)."""
    scale = np.float64(_K_BINS_PER_LOGIT)
    counts = np.zeros(_K_BINS, np.int64)
    for v in range(x.shape[0]):
        counts[_bin(x[v], m, scale, _K_BINS)] += 1
    b, before = 0, 0
    while before + counts[b] < k:
        before += counts[b]
        b += 1
    v = _sorted_bin(x, m, scale, _K_BINS, b, counts[b])[k - before - 1]
    return x[v], v


@_jit
def _exp_f64(y: Any) -> Any:
    """exp of y <= 0 in float64 to about 1e-15; branch-free, so that loops over it vectorise."""
    y = y if y > -700.0 else -700.0
    k = np.floor(y * 1.4426950408889634 + 0.5)
    r = (y - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10
    p = 1.0 / 6227020800.0
    p = p * r + 1.0 / 479001600.0
    p = p * r + 1.0 / 39916800.0
    p = p * r + 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    return p * np.int64(np.int64(np.int64(k) + np.int64(1023)) << np.int64(52)).view(np.float64)


@_jit
def _mass(value: Any, m: Any, temperature: Any) -> Any:
    """exp((value - m) / T) in whole units of 1 / `MASS_UNIT`, as a float64."""
    return np.floor(_exp_f64((np.float64(value) - np.float64(m)) / temperature) * MASS_UNIT + 0.5)


@_jit
def _mass_block(x: Any, start: Any, n: Any, m: Any, temperature: Any, out: Any) -> None:
    block = x[start : start + n]
    for i in range(n):
        out[i] = _mass(block[i], m, temperature)


@_jit
def top_p_cut(x: Any, m: Any, temperature: Any, top_p: Any, cut_value: Any, cut_id: Any) -> Any:
    """(value, id) of the last token kept: the first ones of the order after predecessors that hold less than top_p.

    Only tokens up to (cut_value, cut_id) count, and their mass is the whole (top-k first, then renormalise).
    """
    scale = _P_BINS_PER_NAT / temperature
    mass, counts = np.zeros(_P_BINS, np.int64), np.zeros(_P_BINS, np.int64)
    e = np.empty(_BLOCK, np.float64)
    for start in range(0, x.shape[0], _BLOCK):
        n = min(_BLOCK, x.shape[0] - start)
        _mass_block(x, start, n, m, temperature, e)
        for i in range(n):
            b = _bin(x[start + i], m, scale, _P_BINS)
            counts[b] += 1
            if _kept(x[start + i], start + i, cut_value, cut_id):
                mass[b] += np.int64(e[i])
    target = top_p * np.float64(mass.sum())
    b, before = 0, np.int64(0)
    while b < _P_BINS - 1 and np.float64(before + mass[b]) < target:
        before += mass[b]
        b += 1
    order = _sorted_bin(x, m, scale, _P_BINS, b, counts[b])
    last = -1
    for v in order:
        if not np.float64(before) < target or not _kept(x[v], v, cut_value, cut_id):
            break
        last = v
        before += np.int64(_mass(x[v], m, temperature))
    if last < 0:  # rounding ran past the last mass: everything up to the old cut stays
        return cut_value, cut_id
    return x[last], last


@_jit
def find_cut(x: Any, m: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    """(value, id) of the last token kept by top-k, then top-p; (-inf, V) keeps all."""
    cut_value, cut_id = np.float32(-np.inf), np.int64(x.shape[0])
    if 0 < top_k < x.shape[0]:
        cut_value, cut_id = top_k_cut(x, m, top_k)
    if top_p < 1.0:
        cut_value, cut_id = top_p_cut(x, m, temperature, top_p, cut_value, cut_id)
    return cut_value, cut_id


# --- a row, a batch ------------------------------------------------------------------------------------------


@_jit
def _insert(score: Any, token: Any, scores: Any, tokens: Any) -> None:
    """Insert a token into a ranking that it enters; among equal scores the lower token comes first."""
    place = len(scores) - 1
    while place > 0 and (score > scores[place - 1] or (score == scores[place - 1] and token < tokens[place - 1])):
        scores[place], tokens[place] = scores[place - 1], tokens[place - 1]
        place -= 1
    scores[place], tokens[place] = score, token


@_jit
def _scan_block(x: Any, start: Any, n: Any, ids: Any, key: Any, temperature: Any, cut: Any, m: Any, first: Any,
                scratch: Any, bar: Any, scores: Any, tokens: Any) -> Any:  # fmt: skip
    """Rank the tokens of a block that the bar lets through, except `first`. Returns the bar after them."""
    e, gap = scratch
    for i in range(n):
        v = start + i
        if gap[i] > np.float32(e[i] * bar) or not _kept(x[v], v, cut[0], cut[1]) or x[v] == -np.inf:
            continue
        score = perturbed(x[v], ids[v], key, temperature)
        if v != first and (score > scores[-1] or (score == scores[-1] and v < tokens[-1])):
            _insert(score, v, scores, tokens)
            bar = _bar(m, temperature, scores[-1])
    return bar


@_jit
def _draw(x: Any, m: Any, key: Any, rule: Any, ids: Any, want_logprob: Any, scratch: Any,
          scores: Any, tokens: Any) -> Any:  # fmt: skip
    """Rank the tokens by their perturbed scores. Returns the log-probability of the first one."""
    e, gap = scratch
    temperature, total, first = rule["temperature"], 0.0, _first_index(x, m)
    cut = find_cut(x, m, temperature, rule["top_k"], rule["top_p"])
    inv_t = np.float32(1.0 / temperature)
    # The most probable token comes first: its score makes a good bar, and no filter drops it.
    _insert(perturbed(m, ids[first], key, temperature), first, scores, tokens)
    bar = _bar(m, temperature, scores[-1])
    for start in range(0, x.shape[0], _BLOCK):
        n = min(_BLOCK, x.shape[0] - start)
        _exp_block(x, start, n, m, inv_t, e)
        if want_logprob:
            total += np.float64(_sum_block(e, n))
        _hash_block(key, ids[start : start + n], gap)
        if _count_under(gap, e, bar, n) > 0:
            bar = _scan_block(x, start, n, ids, key, temperature, cut, m, first, scratch, bar, scores, tokens)
    logprob = (np.float64(x[tokens[0]]) - np.float64(m)) / temperature
    return logprob - log_f64(total) if want_logprob else logprob


@_jit
def rank_row(x: Any, bits: Any, key: Any, rule: Any, ids: Any, want_logprob: Any, scratch: Any,
             scores: Any, tokens: Any) -> Any:  # fmt: skip
    """Rank the tokens of one row: the first one is the sample.

    Args:
        x: Logits, (V,) float32; `bits` is the same memory as int32.
        key: (seed's low word, its high word, position), uint32 each.
        rule: An entry of the table of `Rules`.
        ids: Tokens of the logits, uint32 (V,), ascending.
        scratch: (e, gap), float32 arrays of `_BLOCK` entries.
        scores, tokens: The ranking, float64 and int64; -inf and -1 where no more tokens are left.

    Returns:
        (status, log-probability of the sample, if wanted).
    """
    scores[:], tokens[:], logprob = -np.inf, -1, 0.0
    status, m = _max_logit(bits)
    if status != OK:
        return status, logprob
    if rule["temperature"] >= GREEDY_BELOW:
        logprob = _draw(x, m, key, rule, ids, want_logprob, scratch, scores, tokens)
    else:
        if len(tokens) == 1:
            tokens[0] = _first_index(x, m)
        else:
            for v in range(x.shape[0]):
                if x[v] > scores[-1]:
                    _insert(np.float64(x[v]), v, scores, tokens)
        if want_logprob:
            logprob = -_log_sum_exp(x, m, np.float32(1), scratch[0])
    for rank in range(len(tokens)):
        if tokens[rank] >= 0:
            tokens[rank] = ids[tokens[rank]]
    return status, logprob


@_jit
def verify_batch(logits: Any, bits: Any, row_offsets: Any, tail_offsets: Any, tails: Any, positions: Any, slots: Any,
                 rules: Any, ids: Any, ranks: Any, want_logprobs: Any, out: Any) -> None:  # fmt: skip
    """Sample each request position by position until the token differs from its tail or the tail is used up.

    Args:
        row_offsets: Request i reads the logits rows `row_offsets[i] + j`.
        tails: Draft tokens of all requests; request i has `tails[tail_offsets[i]:tail_offsets[i + 1]]`.
        positions: Position of each request's first row; the base of its rule is added.
        slots: Its slot in `rules`, the table of `Rules`.
        ids: As in `rank_row`.
        ranks: Number of ranked tokens per draw.
        out: The buffer of `keyed.Found`, filled with -1, as int64 and as float64.
    """
    packed, floats = out
    width = (packed.shape[1] - 2) // (2 + ranks if ranks > 2 else 3)
    scratch = (np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32))
    scores, tokens = np.empty(ranks, np.float64), np.empty(ranks, np.int64)
    for i in range(row_offsets.shape[0]):
        rule = rules[slots[i]]
        seed, position = rule["seed"], positions[i] + rule["base"]
        low, high = np.uint32(seed & np.uint64(0xFFFFFFFF)), np.uint32(seed >> np.uint64(32))
        first, tail_len = tail_offsets[i], tail_offsets[i + 1] - tail_offsets[i]
        count, status = 0, OK
        while count <= tail_len:
            row, key = row_offsets[i] + count, (low, high, np.uint32(position + count))
            status, logprob = rank_row(logits[row], bits[row], key, rule, ids, want_logprobs, scratch, scores, tokens)
            if status != OK:
                break
            packed[i, 2 + count], floats[i, 2 + width + count] = tokens[0], logprob
            if ranks > 1:
                floats[i, 2 + 2 * width + count] = scores[0] - scores[1]
            if ranks > 2:
                for rank in range(1, ranks):
                    packed[i, 2 + (2 + rank) * width + count] = tokens[rank]
            count += 1
            if count <= tail_len and tails[first + count - 1] != tokens[0]:
                break
        packed[i, 0], packed[i, 1] = count, status
