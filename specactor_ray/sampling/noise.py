"""Keyed Gumbel noise, compiled by numba: a pure function of seed, position and token (`docs/design/keyed-sampling.md`).

Casts follow every operation, because numba widens `uint32 + uint32` to 64 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specactor_ray.core.jit import kernel

LN2 = 0.6931471805599453
SQRT2 = 1.4142135623730951
_PARITY = np.uint32(0x1BD11BDA)
_MANTISSA, _ONE_BITS = np.int64(0x000FFFFFFFFFFFFF), np.int64(0x3FF0000000000000)

_jit: Any = kernel()


@_jit
def _four_rounds(x0: Any, x1: Any, r0: Any, r1: Any, r2: Any, r3: Any) -> Any:
    x0 = np.uint32(x0 + x1)
    x1 = np.uint32(np.uint32(np.uint32(x1 << r0) | np.uint32(x1 >> np.uint32(32 - r0))) ^ x0)
    x0 = np.uint32(x0 + x1)
    x1 = np.uint32(np.uint32(np.uint32(x1 << r1) | np.uint32(x1 >> np.uint32(32 - r1))) ^ x0)
    x0 = np.uint32(x0 + x1)
    x1 = np.uint32(np.uint32(np.uint32(x1 << r2) | np.uint32(x1 >> np.uint32(32 - r2))) ^ x0)
    x0 = np.uint32(x0 + x1)
    x1 = np.uint32(np.uint32(np.uint32(x1 << r3) | np.uint32(x1 >> np.uint32(32 - r3))) ^ x0)
    return x0, x1


@_jit
def threefry2x32(k0: Any, k1: Any, c0: Any, c1: Any) -> Any:
    """Threefry-2x32-20 (Salmon et al., SC 2011): two uint32 key words, two counter words → two words."""
    a0, a1, a2, a3 = np.uint32(13), np.uint32(15), np.uint32(26), np.uint32(6)
    b0, b1, b2, b3 = np.uint32(17), np.uint32(29), np.uint32(16), np.uint32(24)
    k2 = np.uint32(k0 ^ k1 ^ _PARITY)
    x0, x1 = np.uint32(c0 + k0), np.uint32(c1 + k1)
    x0, x1 = _four_rounds(x0, x1, a0, a1, a2, a3)
    x0, x1 = np.uint32(x0 + k1), np.uint32(np.uint32(x1 + k2) + np.uint32(1))
    x0, x1 = _four_rounds(x0, x1, b0, b1, b2, b3)
    x0, x1 = np.uint32(x0 + k2), np.uint32(np.uint32(x1 + k0) + np.uint32(2))
    x0, x1 = _four_rounds(x0, x1, a0, a1, a2, a3)
    x0, x1 = np.uint32(x0 + k0), np.uint32(np.uint32(x1 + k1) + np.uint32(3))
    x0, x1 = _four_rounds(x0, x1, b0, b1, b2, b3)
    x0, x1 = np.uint32(x0 + k1), np.uint32(np.uint32(x1 + k2) + np.uint32(4))
    x0, x1 = _four_rounds(x0, x1, a0, a1, a2, a3)
    return np.uint32(x0 + k2), np.uint32(np.uint32(x1 + k0) + np.uint32(5))


@_jit
def log_f64(x: Any) -> Any:
    """Natural logarithm of a positive normal float64 by +, -, *, / alone, so that all devices give the same bits.

    x = 2^k (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)]; log(1 + f) = 2 atanh(s), s = f / (2 + f), |s| < 0.172:
    eleven terms of the odd series leave an error below 1e-17.
    """
    bits = np.float64(x).view(np.int64)
    k = np.float64((bits >> np.int64(52)) - np.int64(1023))
    m = np.int64((bits & _MANTISSA) | _ONE_BITS).view(np.float64)
    if m > SQRT2:
        m = m * 0.5
        k = k + 1.0
    f = m - 1.0
    s = f / (f + 2.0)
    z = s * s
    p = 1.0 / 21.0
    p = p * z + 1.0 / 19.0
    p = p * z + 1.0 / 17.0
    p = p * z + 1.0 / 15.0
    p = p * z + 1.0 / 13.0
    p = p * z + 1.0 / 11.0
    p = p * z + 1.0 / 9.0
    p = p * z + 1.0 / 7.0
    p = p * z + 1.0 / 5.0
    p = p * z + 1.0 / 3.0
    p = p * z + 1.0
    return k * LN2 + 2.0 * s * p


@_jit
def uniform(x0: Any, x1: Any) -> Any:
    """(h + 1/2) 2^-52 of the 52 high bits h of the two words: exact in float64, from 2^-53 to 1 - 2^-53."""
    h = np.int64((np.int64(x0) << np.int64(20)) | (np.int64(x1) >> np.int64(12)))
    return (np.float64(h) + 0.5) * 2.0**-52


@_jit
def gumbel(x0: Any, x1: Any) -> Any:
    """-log(-log(u)) of `uniform(x0, x1)`, rounded to float32; between -3.61 and 36.74."""
    return np.float32(-log_f64(-log_f64(uniform(x0, x1))))


@_jit
def keyed_gumbel(key: Any, v: Any) -> Any:
    """g(s, t, v), float32, for key = (low word of s, high word of s, t)."""
    x0, x1 = threefry2x32(key[0], key[1], np.uint32(v), key[2])
    return gumbel(x0, x1)


@_jit
def perturbed(logit: Any, v: Any, key: Any, temperature: Any) -> Any:
    """logit / T + g(s, t, v), float64."""
    return np.float64(logit) / temperature + np.float64(keyed_gumbel(key, v))
