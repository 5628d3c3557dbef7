"""The noise of `sampling.noise` and the exponential function of `sampling.cpu` in Triton: the same bits."""

from __future__ import annotations

import triton
import triton.language as tl

from specactor_ray.sampling import noise

_LN2, _SQRT2 = tl.constexpr(noise.LN2), tl.constexpr(noise.SQRT2)


@triton.jit
def _four_rounds(x0, x1, R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr):
    x0 = x0 + x1
    x1 = ((x1 << R0) | (x1 >> (32 - R0))) ^ x0
    x0 = x0 + x1
    x1 = ((x1 << R1) | (x1 >> (32 - R1))) ^ x0
    x0 = x0 + x1
    x1 = ((x1 << R2) | (x1 >> (32 - R2))) ^ x0
    x0 = x0 + x1
    x1 = ((x1 << R3) | (x1 >> (32 - R3))) ^ x0
    return x0, x1


@triton.jit
def threefry2x32(k0, k1, c0, c1):
    k2 = k0 ^ k1 ^ 0x1BD11BDA
    x0, x1 = _four_rounds(c0 + k0, c1 + k1, 13, 15, 26, 6)
    x0, x1 = _four_rounds(x0 + k1, x1 + k2 + 1, 17, 29, 16, 24)
    x0, x1 = _four_rounds(x0 + k2, x1 + k0 + 2, 13, 15, 26, 6)
    x0, x1 = _four_rounds(x0 + k0, x1 + k1 + 3, 17, 29, 16, 24)
    x0, x1 = _four_rounds(x0 + k1, x1 + k2 + 4, 13, 15, 26, 6)
    return x0 + k2, x1 + k0 + 5


@triton.jit
def log_f64(x):
    bits = x.to(tl.int64, bitcast=True)
    k = ((bits >> 52) - 1023).to(tl.float64)
    m = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    high = m > _SQRT2
    m = tl.where(high, m * 0.5, m)
    k = tl.where(high, k + 1.0, k)
    f = m - 1.0
    s = f / (f + 2.0)
    z = s * s
    p = z * (1.0 / 21.0) + 1.0 / 19.0
    p = p * z + 1.0 / 17.0
    p = p * z + 1.0 / 15.0
    p = p * z + 1.0 / 13.0
    p = p * z + 1.0 / 11.0
    p = p * z + 1.0 / 9.0
    p = p * z + 1.0 / 7.0
    p = p * z + 1.0 / 5.0
    p = p * z + 1.0 / 3.0
    p = p * z + 1.0
    return k * _LN2 + 2.0 * s * p


@triton.jit
def exp_f64(y):
    y = tl.where(y > -700.0, y, -700.0)
    k = tl.floor(y * 1.4426950408889634 + 0.5)
    r = (y - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10
    p = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0
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
    return p * ((k.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def perturbed(logit, v, k0, k1, position, temperature):
    """logit / T + g(s, t, v) in float64, g rounded to float32."""
    x0, x1 = threefry2x32(k0, k1, v.to(tl.uint32), position)
    h = (x0.to(tl.int64) << 20) | (x1 >> 12).to(tl.int64)
    u = (h.to(tl.float64) + 0.5) * 2.220446049250313e-16
    g = (-log_f64(-log_f64(u))).to(tl.float32)
    return logit.to(tl.float64) / temperature + g.to(tl.float64)
