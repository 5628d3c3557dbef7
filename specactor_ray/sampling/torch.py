"""Torch form of keyed sampling, for logits on a GPU: the same integers give the same noise and the same tokens.

Everything is elementwise or along the vocabulary with fixed shapes, and nothing waits for the device. The noise
uses integer operations and float64 +, -, *, / only, each rounded by itself, so its bits do not depend on the
device's math library (`sampling.numba.log_f64` is the same formula).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from specactor_ray.sampling import numba as kernels
from specactor_ray.sampling.rules import filtered

_MASK = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry2x32(k0: Tensor, k1: Tensor, c0: Tensor, c1: Tensor) -> tuple[Tensor, Tensor]:
    """Threefry-2x32-20 on int64 tensors that hold 32-bit words; the arguments broadcast."""
    keys = (k0, k1, k0 ^ k1 ^ 0x1BD11BDA)
    x0, x1 = (c0 + k0) & _MASK, (c1 + k1) & _MASK
    for group in range(5):
        for bits in _ROTATIONS[group % 2]:
            x0 = (x0 + x1) & _MASK
            x1 = (((x1 << bits) & _MASK) | (x1 >> (32 - bits))) ^ x0
        x0 = (x0 + keys[(group + 1) % 3]) & _MASK
        x1 = (x1 + keys[(group + 2) % 3] + (group + 1)) & _MASK
    return x0, x1


def log_f64(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal float64 values, bit for bit `sampling.numba.log_f64`."""
    bits = x.view(torch.int64)
    k = ((bits >> 52) - 1023).to(torch.float64)
    m = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000).view(torch.float64)
    high = m > kernels._SQRT2
    m = torch.where(high, m * 0.5, m)
    k = torch.where(high, k + 1.0, k)
    f = m - 1.0
    s = f / (f + 2.0)
    z = s * s
    p = torch.full_like(z, 1.0 / 21.0)
    for odd in range(19, 0, -2):
        p = p * z + 1.0 / odd
    return k * kernels._LN2 + 2.0 * s * p


def gumbel(x0: Tensor, x1: Tensor) -> Tensor:
    """Gumbel noise, float32, from two Threefry words (int64 tensors of 32-bit words)."""
    u = (((x0 << 20) | (x1 >> 12)).to(torch.float64) + 0.5) * 2.0**-52
    return (-log_f64(-log_f64(u))).to(torch.float32)


def gumbel_rows(seeds: np.ndarray, positions: np.ndarray, vocab_size: int, device: torch.device) -> Tensor:
    """g(s, t, v) of N rows: (N, V) float32 on `device`."""
    words = np.stack([seeds.view(np.int64) & _MASK, (seeds >> np.uint64(32)).view(np.int64), positions])
    k0, k1, t = torch.from_numpy(words).to(device).unsqueeze(-1)
    v = torch.arange(vocab_size, dtype=torch.int64, device=device)
    return gumbel(*threefry2x32(k0, k1, v, t))


def _mass(y: Tensor) -> Tensor:
    """exp(y) of y <= 0 in whole units of 1 / `MASS_UNIT`, bit for bit `sampling.numba._mass`."""
    y = y.clamp_min(-700.0)
    k = torch.floor(y * 1.4426950408889634 + 0.5)
    r = (y - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10
    p = torch.full_like(r, 1.0 / math.factorial(13))
    for n in range(12, -1, -1):
        p = p * r + 1.0 / math.factorial(n)
    e = p * ((k.to(torch.int64) + 1023) << 52).view(torch.float64)
    return torch.floor(e * kernels.MASS_UNIT + 0.5).to(torch.int64)


def _kept(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """(N, V) bool: tokens that remain after top-k, then top-p, in the order (logit descending, id ascending)."""
    n, vocab = logits.shape
    values, ids = torch.sort(logits, dim=1, descending=True, stable=True)
    rank = torch.arange(vocab, device=logits.device)
    in_k = (rank < top_k) | (top_k <= 0)
    mass = _mass((values.double() - values[:, :1].double()) / temperature) * in_k
    mass_to = torch.cumsum(mass, dim=1)
    before = torch.cat([mass_to.new_zeros(n, 1), mass_to[:, :-1]], dim=1)
    keep = in_k & ((before.double() < top_p * mass_to[:, -1:].double()) | (top_p >= 1.0))
    last = (keep.sum(dim=1, keepdim=True) - 1).clamp_min(0)  # rows with NaN keep nothing; they are refused later
    cut_value, cut_id = values.gather(1, last), ids.gather(1, last)
    return (logits > cut_value) | ((logits == cut_value) & (rank <= cut_id))


def _statuses(logits: Tensor, top: Tensor) -> Tensor:
    status = torch.where(top > kernels.MAX_LOGIT, kernels.ERR_TOO_LARGE, kernels.OK)
    status = torch.where(top == -torch.inf, kernels.ERR_ALL_NEG_INF, status)
    status = torch.where(top == torch.inf, kernels.ERR_POS_INF, status)
    return torch.where(logits.isnan().any(dim=1), kernels.ERR_NAN, status)


def _perturbed(logits: Tensor, rules: np.ndarray, positions: np.ndarray) -> tuple[Tensor, Tensor]:
    """Scores (N, V) float64, -inf where top-k and top-p leave a token out; temperatures (N, 1), 1 for greedy rows.

    Args:
        logits: (N, V) float32.
        rules, positions: As in `sample_batch`.
    """
    numbers = np.stack([rules["temperature"], rules["top_k"].astype(np.float64), rules["top_p"]])
    rule = torch.from_numpy(numbers).to(logits.device).unsqueeze(-1)
    greedy = rule[0] < kernels.GREEDY_BELOW
    temperature = torch.where(greedy, 1.0, rule[0])
    noise = gumbel_rows(rules["seed"], positions, logits.shape[1], logits.device)
    score = logits.double() / temperature + torch.where(greedy, 0.0, noise.double())
    if filtered(rules).any():
        keep = greedy | _kept(logits, temperature, rule[1], rule[2])
        score = torch.where(keep, score, -torch.inf)
    return score, temperature


def sample_batch(
    logits: Tensor, rules: np.ndarray, positions: np.ndarray, want_margin: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, logprobs, margins, statuses) of N rows; margins are 0 without `want_margin`. One copy to the host.

    Args:
        logits: (N, V).
        rules: (N,) rows of `Rules.table`, without their bases.
        positions: int64 (N,) output positions.
        want_margin: Whether margins are computed.
    """
    (n, vocab), logits = logits.shape, logits.float()
    score, temperature = _perturbed(logits, rules, positions)
    token = torch.argmax(score, dim=1, keepdim=True)
    scaled = (logits.double() - logits.amax(dim=1, keepdim=True).double()) / temperature
    logprob = scaled.gather(1, token) - scaled.float().exp().sum(dim=1, keepdim=True, dtype=torch.float64).log()
    margin = torch.zeros(n, dtype=torch.float64, device=logits.device)
    if want_margin:
        two = torch.topk(score, min(2, vocab), dim=1).values
        margin = two[:, 0] - two[:, 1] if vocab > 1 else margin + torch.inf
    status = _statuses(logits, logits.amax(dim=1))
    host = torch.stack([token[:, 0].double(), logprob[:, 0], margin, status.double()]).cpu().numpy()
    return host[0].astype(np.int64), host[1], host[2], host[3].astype(np.int64)


def rank_batch(logits: Tensor, rules: np.ndarray, positions: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The best `most` tokens of N rows, int32 (N, most), -1 where there are no more, and float64 (N,), the first score
    minus the second (inf where there is none). One copy to the host. Other arguments as in `sample_batch`."""
    logits = logits.float()
    sound = _statuses(logits, logits.amax(dim=1)) == kernels.OK
    score = torch.where(sound.unsqueeze(-1), _perturbed(logits, rules, positions)[0], -torch.inf)
    tokens, scores = [], []
    for _ in range(most):
        token = torch.argmax(score, dim=1, keepdim=True)
        best = score.gather(1, token)
        tokens.append(torch.where(best > -torch.inf, token, -1).double())
        scores.append(best)
        score = score.scatter(1, token, -torch.inf)
    second = scores[1] if most > 1 else torch.full_like(scores[0], -torch.inf)
    gap = torch.where(second > -torch.inf, scores[0] - second, torch.inf)
    host = torch.cat([*tokens, gap], dim=1).cpu().numpy()
    return host[:, :most].astype(np.int32), host[:, most]
