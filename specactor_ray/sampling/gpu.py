"""Fused form of keyed sampling in Triton: one pass over the logits, drafts are compared on the device.

`scan` reads a chunk of a row per program. A bound without a logarithm excludes nearly every draw; the exact score, in
float64, is computed only for tokens that can still win. `filter_rows` applies top-k and top-p in rows that have them.
`commit` merges the chunks of a request's rows, compares the winners with its drafts up to the first difference, and
writes the results for the host into one buffer. `docs/design/keyed-sampling.md` proves that the tokens are those of
`sampling.cpu`, bit for bit. This requires that every float64 operation is rounded by itself:
`enable_fp_fusion=False`.

Importing this module imports triton. With TRITON_INTERPRET=1 the kernels run on tensors of the CPU.
"""
# mypy: disable-error-code=assignment
# Tuples of kernels grow in loops that are unrolled.

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from specactor_ray.sampling import cpu as kernels
from specactor_ray.sampling.gpu_noise import exp_f64, log_f64, perturbed, threefry2x32

RULE_FIELDS = 5
"""int64 words of a rule: seed, temperature (float64 bits), top_k, top_p (float64 bits), base of the output position."""
SCAN: dict[str, Any] = {"BLOCK": 4096, "num_warps": 8, "enable_fp_fusion": False}
FILTER: dict[str, Any] = {"BLOCK": 1024, "num_warps": 8, "maxnreg": 128, "enable_fp_fusion": False}
COMMIT: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": False}
"""Block sizes and options of the kernels' launches. Without `maxnreg` the assembler limits `filter_rows` of one rank to
80 registers on compute capability 8.0, and spills."""

_PARTS = ["offsets", "tail_offsets", "slots", "positions", "rules", "tails"]
"""Arguments that are parts of one buffer: whether they begin at a multiple of 16 bytes depends on the number of
requests, and the kernels would be compiled again in the middle of a run."""
_FIELDS = tl.constexpr(RULE_FIELDS)
_GREEDY_BELOW = tl.constexpr(kernels.GREEDY_BELOW)
_MAX_LOGIT = tl.constexpr(kernels.MAX_LOGIT)
_OK, _NAN, _POS_INF = tl.constexpr(kernels.OK), tl.constexpr(kernels.ERR_NAN), tl.constexpr(kernels.ERR_POS_INF)
_ALL_NEG_INF, _TOO_LARGE = tl.constexpr(kernels.ERR_ALL_NEG_INF), tl.constexpr(kernels.ERR_TOO_LARGE)
_MASS_UNIT = tl.constexpr(kernels.MASS_UNIT)
_LOG2E = tl.constexpr(1.4426950408889634)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)
_SEARCHED = tl.constexpr(128)  # requests at once
_LOWEST = tl.constexpr(-3e38)  # of y, where float32 overflows: finite logits stay candidates
_SLACK_BITS = tl.constexpr(1e-3)  # of the bound, absolute: its roundings near the winner add up to less than 4e-5
_SLACK_OF_DISTANCE = tl.constexpr(2.0**-20)  # and relative to the distance from the pivot: float32 has 24 bits
_SLACK_OF_LEVEL = tl.constexpr(2.0**-50)  # and relative to pivot / T: the roundings of the float64 scores


# --- the draw among the tokens of a block --------------------------------------------------------------------


@triton.jit
def _bits_per_logit(temperature):
    """1 / (T log 2), float32: logits become powers of two."""
    return (1.0 / temperature * _LOG2E).to(tl.float32)


@triton.jit
def _bound(y, v, k0, k1, position):
    """Upper bound of (score - pivot / T) / log 2 of a token, where y is its part without noise.

    With w = 1 - u, g <= -log(w), and ~x0 <= 2^32 w. The bits of a float, read as a fixed-point number, are a lower
    bound of its logarithm to base 2, at most 0.0861 below it.
    """
    x0, _ = threefry2x32(k0, k1, v.to(tl.uint32), position)
    bits = (~x0).to(tl.float32).to(tl.int32, bitcast=True)
    return tl.maximum(y, _LOWEST) + (159.0 - bits.to(tl.float32) * 1.1920928955078125e-07)


@triton.jit
def _bar(rival, level):
    """Least bound of a token that can reach the score `rival`."""
    distance = (rival - level) * _LOG2E
    slack = tl.abs(distance) * _SLACK_OF_DISTANCE + tl.abs(level) * (_SLACK_OF_LEVEL * _LOG2E) + _SLACK_BITS
    return tl.where(rival == -float("inf"), -float("inf"), distance - slack).to(tl.float32)


@triton.jit
def _nothing(RANKS: tl.constexpr):
    """A ranking without tokens: `RANKS` scores, float64, the best first, and their tokens."""
    scores, tokens = (tl.full((), -float("inf"), tl.float64),), (tl.full((), _NO_TOKEN, tl.int32),)
    for _ in tl.static_range(1, RANKS):
        scores += (tl.full((), -float("inf"), tl.float64),)
        tokens += (tl.full((), _NO_TOKEN, tl.int32),)
    return scores, tokens


@triton.jit
def _insert(score, at, scores, tokens, RANKS: tl.constexpr):
    """The ranking with one more token; among equal scores the lower token comes first."""
    best, ids = (), ()
    for rank in tl.static_range(RANKS):
        first = (score > scores[rank]) | ((score == scores[rank]) & (at < tokens[rank]))
        best += (tl.where(first, score, scores[rank]),)
        ids += (tl.where(first, at, tokens[rank]),)
        score, at = tl.where(first, scores[rank], score), tl.where(first, tokens[rank], at)
    return best, ids


@triton.jit
def _draw(row, v, bound, k0, k1, position, temperature, level, scores, tokens, RANKS: tl.constexpr):
    """The ranking after the tokens of a block, taken by descending bound as long as one can still enter it."""
    bar = _bar(scores[RANKS - 1], level)
    peak = tl.max(bound)
    while (peak >= bar) & (peak > -float("inf")):
        at = tl.min(tl.where(bound == peak, v, _NO_TOKEN))
        score = perturbed(tl.load(row + at).to(tl.float32), at, k0, k1, position, temperature)
        scores, tokens = _insert(score, at, scores, tokens, RANKS)
        bar = _bar(scores[RANKS - 1], level)
        bound = tl.where(v == at, -float("inf"), bound)
        peak = tl.max(bound)
    return scores, tokens


@triton.jit
def _take(scores, tokens):
    """(best score, its token, the scores of the others) of a block."""
    peak = tl.max(scores)
    token = tl.min(tl.where(scores == peak, tokens, _NO_TOKEN))
    token = tl.where(peak > -float("inf"), token, _NO_TOKEN)
    return peak.to(tl.float64), token, tl.where(tokens == token, -float("inf"), scores)


@triton.jit
def _ranking(scores, tokens, RANKS: tl.constexpr):
    """The ranking of a block; -inf and `_NO_TOKEN` where there are no more."""
    best, ids = (), ()
    for _ in tl.static_range(RANKS):
        score, token, scores = _take(scores, tokens)
        best += (score,)
        ids += (token,)
    return best, ids


# --- rows ----------------------------------------------------------------------------------------------------


@triton.jit
def _place(tail_offsets, requests, width, row):
    """(request, index among its rows, its number of drafts) of a row. Those of r begin at r + tail_offsets[r]."""
    request = row
    if width > 1:
        found = 0
        for begin in range(0, requests, _SEARCHED):
            r = begin + tl.arange(0, _SEARCHED)
            first = r + tl.load(tail_offsets + r, mask=r < requests, other=0)
            found += tl.sum(((first <= row) & (r < requests)).to(tl.int32))
        request = found - 1
    first = tl.load(tail_offsets + request).to(tl.int32)
    return request, row - request - first, tl.load(tail_offsets + request + 1).to(tl.int32) - first


@triton.jit
def _rule(rules, slots, positions, request, j):
    """(seed's low word, its high word, output position, T, top_k, top_p) of a request's row j."""
    rule = rules + tl.load(slots + request).to(tl.int64) * _FIELDS
    seed = tl.load(rule)
    temperature = tl.load(rule + 1).to(tl.float64, bitcast=True)
    top_p = tl.load(rule + 3).to(tl.float64, bitcast=True)
    position = tl.load(rule + 4) + tl.load(positions + request).to(tl.int64) + j
    return seed.to(tl.uint32), (seed >> 32).to(tl.uint32), position.to(tl.uint32), temperature, tl.load(rule + 2), top_p


@triton.jit(do_not_specialize=["requests", "width", "chunks"], do_not_specialize_on_alignment=_PARTS)
def scan(
    logits, stride, vocab, offsets, tail_offsets, slots, positions, rules, scores, sums, ids, requests, width, chunks,
    BLOCK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Grid (rows, chunks): a row for each request and each draft, request by request. Per row and chunk:

    scores: (row, RANKS, chunk), the best scores (float64; the logits themselves of a greedy row).
    ids: (row, RANKS, chunk), their tokens.
    sums: (row, 2, chunk), the largest logit (NaN if there is one), and the sum of exp((x - it) / T).
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    request, j, drafts = _place(tail_offsets, requests, width, row)
    if j <= drafts:
        k0, k1, position, temperature, _, _ = _rule(rules, slots, positions, request, j)
        greedy = temperature < _GREEDY_BELOW
        temperature = tl.where(greedy, 1.0, temperature)
        x_row = logits + (tl.load(offsets + request).to(tl.int64) + j) * stride
        v = chunk * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_row + v, mask=v < vocab, other=-float("inf")).to(tl.float32)
        nan = tl.max((x != x).to(tl.int32))
        x = tl.where(x != x, -float("inf"), x)
        top = tl.max(x)
        sound = (top > -float("inf")) & (top <= _MAX_LOGIT)
        pivot = tl.where(sound, top, 0.0)
        y = (x - pivot) * _bits_per_logit(temperature)
        total = tl.sum(tl.exp2(y))
        best, tokens = _nothing(RANKS)
        if greedy:
            best, tokens = _ranking(x, v, RANKS)
        else:
            level = pivot.to(tl.float64) / temperature
            above = tl.where(sound, -float("inf"), float("inf"))
            bound = tl.where(x > above, _bound(y, v, k0, k1, position), -float("inf"))
            best, tokens = _draw(x_row, v, bound, k0, k1, position, temperature, level, best, tokens, RANKS)
        at = row.to(tl.int64) * 2 * chunks + chunk
        tl.store(sums + at, tl.where(nan > 0, float("nan"), top))
        tl.store(sums + at + chunks, total)
        at = row.to(tl.int64) * RANKS * chunks + chunk
        for rank in tl.static_range(RANKS):
            tl.store(scores + at + rank * chunks, best[rank])
            tl.store(ids + at + rank * chunks, tokens[rank])


@triton.jit
def _merged(scores, ids, row, chunks, CHUNKS: tl.constexpr, RANKS: tl.constexpr):
    """The ranking of all chunks of a row."""
    e = tl.arange(0, CHUNKS * (RANKS if RANKS <= 2 else (4 if RANKS <= 4 else 8)))  # a power of two
    at = row.to(tl.int64) * RANKS * chunks + e
    best = tl.load(scores + at, mask=e < RANKS * chunks, other=-float("inf"))
    return _ranking(best, tl.load(ids + at, mask=e < RANKS * chunks, other=_NO_TOKEN), RANKS)


@triton.jit
def _top(sums, row, chunks, temperature, CHUNKS: tl.constexpr):
    """(status, largest logit, sum of exp((x - it) / T)) of all chunks of a row."""
    c = tl.arange(0, CHUNKS)
    at = row.to(tl.int64) * 2 * chunks + c
    tops = tl.load(sums + at, mask=c < chunks, other=-float("inf"))
    nan = tl.max((tops != tops).to(tl.int32))
    tops = tl.where(tops != tops, -float("inf"), tops)
    totals = tl.load(sums + at + chunks, mask=c < chunks, other=0.0)
    top = tl.max(tops)
    status = tl.where(top > _MAX_LOGIT, _TOO_LARGE, _OK)
    status = tl.where(top == -float("inf"), _ALL_NEG_INF, status)
    status = tl.where(top == float("inf"), _POS_INF, status)
    status = tl.where(nan > 0, _NAN, status)
    parts = totals * tl.exp2((tops - top) * _bits_per_logit(temperature))
    return status, top, tl.sum(parts.to(tl.float64))


# --- top-k and top-p -----------------------------------------------------------------------------------------
#
# The kept set is a prefix of the order (logit descending, id ascending). So a winner that is not kept, and all that
# come after it, are no candidates any more: draw again among the tokens before it, until the winner is kept.


@triton.jit
def _key(x):
    """int32 that sorts as the floats do; minus zero ties with zero."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    """The float of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mass(x, top, temperature):
    """exp((x - top) / T) in units of 1 / `MASS_UNIT`: sums of whole numbers do not depend on their order."""
    e = exp_f64((x.to(tl.float64) - top.to(tl.float64)) / temperature)
    return (e * _MASS_UNIT + 0.5).to(tl.int64)


@triton.jit
def _block(row, start, vocab, BLOCK: tl.constexpr):
    v = start + tl.arange(0, BLOCK)
    return v, tl.load(row + v, mask=v < vocab, other=-float("inf")).to(tl.float32)


@triton.jit
def _before(row, vocab, value, token, top, temperature, with_mass, BLOCK: tl.constexpr):
    """(number, mass) of the tokens before (value, token) in the order."""
    counts, masses = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int64)
    for start in range(0, vocab, BLOCK):
        v, x = _block(row, start, vocab, BLOCK)
        ahead = ((x > value) | ((x == value) & (v < token))) & (v < vocab)
        counts += ahead.to(tl.int32)
        if with_mass:
            masses += tl.where(ahead, _mass(x, top, temperature), 0)
    return tl.sum(counts), tl.sum(masses)


@triton.jit
def _whole_mass(row, vocab, top_k, top, temperature, BLOCK: tl.constexpr):
    """The mass of the tokens that remain after top-k."""
    low = _key(tl.full((), -float("inf"), tl.float32)).to(tl.int64)
    high = tl.where((top_k <= 0) | (top_k >= vocab), low, _key(top).to(tl.int64))
    while low < high:  # the largest key that at least k tokens reach
        middle = (low + high + 1) >> 1
        reached, _ = _before(row, vocab, _value(middle), _NO_TOKEN, top, temperature, False, BLOCK)
        low = tl.where(reached >= top_k, middle, low)
        high = tl.where(reached >= top_k, high, middle - 1)
    value = _value(low)
    count, mass = _before(row, vocab, value, -1, top, temperature, True, BLOCK)
    return mass + tl.maximum(top_k - count, 0) * _mass(value, top, temperature)


@triton.jit
def _is_kept(row, vocab, value, token, top, temperature, top_k, target, BLOCK: tl.constexpr):
    count, mass = _before(row, vocab, value, token, top, temperature, target < float("inf"), BLOCK)
    return ((top_k <= 0) | (count < top_k)) & (mass.to(tl.float64) < target)


@triton.jit
def _best_before(
    row, vocab, cut_value, cut_token, kept, top, k0, k1, position, temperature, BLOCK: tl.constexpr, RANKS: tl.constexpr
):  # fmt: skip
    """(score, token) of the best token before the cut, except those of `kept`."""
    level = top.to(tl.float64) / temperature
    best, ids = _nothing(1)
    for start in range(0, vocab, BLOCK):
        v, x = _block(row, start, vocab, BLOCK)
        allowed = (x > cut_value) | ((x == cut_value) & (v < cut_token))
        for rank in tl.static_range(RANKS - 1):  # with one more kept, nothing is drawn
            allowed = allowed & (v != kept[rank])
        y = (x - top) * _bits_per_logit(temperature)
        bound = tl.where(allowed & (x > -float("inf")), _bound(y, v, k0, k1, position), -float("inf"))
        best, ids = _draw(row, v, bound, k0, k1, position, temperature, level, best, ids, 1)
    return best[0], ids[0]


@triton.jit(do_not_specialize=["requests", "width", "chunks"], do_not_specialize_on_alignment=_PARTS)
def filter_rows(
    logits, stride, vocab, offsets, tail_offsets, slots, positions, rules, scores, sums, ids, requests, width, chunks,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). Replace the ranking of rows with top-k or top-p by that of the kept tokens."""
    row = tl.program_id(0)
    request, j, drafts = _place(tail_offsets, requests, width, row)
    k0, k1, position, temperature, top_k, top_p = _rule(rules, slots, positions, request, j)
    wanted = ((top_k > 0) | (top_p < 1.0)) & (temperature >= _GREEDY_BELOW)
    if wanted & (j <= drafts):
        status, top, _ = _top(sums, row, chunks, temperature, CHUNKS)
        if status == _OK:
            x_row = logits + (tl.load(offsets + request).to(tl.int64) + j) * stride
            target = tl.full((), float("inf"), tl.float64)
            if top_p < 1.0:
                target = top_p * _whole_mass(x_row, vocab, top_k, top, temperature, BLOCK).to(tl.float64)
            cut_value, cut_token = tl.full((), -float("inf"), tl.float32), vocab + 0
            merged, candidates = _merged(scores, ids, row, chunks, CHUNKS, RANKS)
            score, candidate = merged[0], candidates[0]
            best, tokens = _nothing(RANKS)
            found, go_on = tl.full((), 0, tl.int32), score == score
            while go_on:  # until enough tokens are kept, or none is left
                value = tl.load(x_row + candidate).to(tl.float32)
                kept = _is_kept(x_row, vocab, value, candidate, top, temperature, top_k, target, BLOCK)
                score, at = tl.where(kept, score, -float("inf")), tl.where(kept, candidate, _NO_TOKEN)
                best, tokens = _insert(score, at, best, tokens, RANKS)
                found += kept.to(tl.int32)
                cut_value = tl.where(kept, cut_value, value)
                cut_token = tl.where(kept, cut_token, candidate)
                go_on = found < RANKS
                if go_on:
                    score, candidate = _best_before(
                        x_row, vocab, cut_value, cut_token, tokens, top, k0, k1, position, temperature, BLOCK, RANKS
                    )
                    go_on = candidate != _NO_TOKEN
            e = tl.arange(0, CHUNKS * (RANKS if RANKS <= 2 else (4 if RANKS <= 4 else 8)))  # a power of two
            at = row.to(tl.int64) * RANKS * chunks
            tl.store(scores + at + e, -float("inf"), mask=(e >= RANKS) & (e < RANKS * chunks))
            for rank in tl.static_range(RANKS):
                tl.store(scores + at + rank, best[rank])
                tl.store(ids + at + rank, tokens[rank])


# --- requests ------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["requests", "width", "chunks"], do_not_specialize_on_alignment=_PARTS)
def commit(
    logits, stride, vocab, offsets, tail_offsets, slots, positions, rules, scores, sums, ids, tails, out, requests,
    width, chunks, CHUNKS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Grid (requests,). Row of `out`, int64: count, status, then `width` tokens (-1 past the count), log-probabilities
    and margins (float64 bits), and with more than two ranks the tokens from the second on, rank by rank (-1: none)."""
    request = tl.program_id(0)
    first = tl.load(tail_offsets + request).to(tl.int64)
    length = tl.load(tail_offsets + request + 1).to(tl.int64) - first
    line = out + request.to(tl.int64) * (2 + (2 + RANKS if RANKS > 2 else 3) * width)
    offset = tl.load(offsets + request).to(tl.int64)
    _, _, _, temperature, _, _ = _rule(rules, slots, positions, request, 0)
    temperature = tl.where(temperature < _GREEDY_BELOW, 1.0, temperature)
    count, go_on = tl.full((), 0, tl.int64), tl.full((), 1, tl.int32)
    status = tl.full((), _OK, tl.int32)
    while go_on == 1:
        row = request + first + count
        status, top, total = _top(sums, row, chunks, temperature, CHUNKS)
        go_on = tl.full((), 0, tl.int32)
        if status == _OK:
            best, tokens = _merged(scores, ids, row, chunks, CHUNKS, RANKS)
            token = tokens[0]
            x = tl.load(logits + (offset + count) * stride + token).to(tl.float32)
            logprob = (x.to(tl.float64) - top.to(tl.float64)) / temperature - log_f64(total)
            tl.store(line + 2 + count, token.to(tl.int64))
            tl.store(line + 2 + width + count, logprob.to(tl.int64, bitcast=True))
            if RANKS > 1:
                tl.store(line + 2 + 2 * width + count, (best[0] - best[1]).to(tl.int64, bitcast=True))
            if RANKS > 2:
                for rank in tl.static_range(1, RANKS):
                    other = tl.where(tokens[rank] == _NO_TOKEN, -1, tokens[rank])
                    tl.store(line + 2 + (2 + rank) * width + count, other.to(tl.int64))
            if count < length:
                go_on = (tl.load(tails + first + count).to(tl.int64) == token).to(tl.int32)
            count += 1
    tl.store(line, count)
    tl.store(line + 1, status.to(tl.int64))
    while count < width:
        tl.store(line + 2 + count, tl.full((), -1, tl.int64))
        count += 1
