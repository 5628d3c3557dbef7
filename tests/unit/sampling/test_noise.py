"""The noise: Random123's Threefry, standard Gumbel, frozen, and unrelated between keys."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from scipy import stats

from specactor_ray.sampling import noise as noise_kernels
from tests.tails import gumbel_noise

ALPHA = 1e-4  # seeds are fixed: a p-value under this is a wrong distribution, not bad luck

# Known answers of Random123's threefry2x32 with 20 rounds: counter, key, result.
KNOWN = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_threefry_known_answers(counter, key, answer):
    got = noise_kernels.threefry2x32(*(np.uint32(word) for word in key + counter))
    assert tuple(int(word) for word in got) == answer


def test_noise_is_frozen():
    """Changing these numbers changes every sampled token of every user: never do it in silence."""
    assert hashlib.sha256(gumbel_noise(2**63 + 12345, 77, 50_000).tobytes()).hexdigest()[:16] == "7c69d2e6481e3e03"


def test_uniform_stays_inside_of_zero_and_one():
    ones = np.uint32(0xFFFFFFFF)
    assert noise_kernels.uniform(np.uint32(0), np.uint32(0)) == 2.0**-53
    assert noise_kernels.uniform(ones, ones) == 1 - 2.0**-53 < 1
    assert noise_kernels.gumbel(np.uint32(0), np.uint32(0)) == np.float32(-math.log(53 * math.log(2)))
    assert noise_kernels.gumbel(ones, ones) == np.float32(53 * math.log(2))
    for j in range(1, 2000, 7):  # the top cells of the grid, where a coarser one would lose the rare tokens
        low = np.uint32(0xFFFFFFFF - (j << 12))
        want = -math.log(-math.log1p(-(j + 0.5) * 2.0**-52))
        assert noise_kernels.gumbel(ones, low) == pytest.approx(want, abs=4e-6)


def test_own_logarithm_is_accurate():
    rng = np.random.default_rng(1)
    x = np.concatenate(
        [rng.random(20_000), 1 - 2.0 ** -np.arange(1, 54), 2.0 ** -np.arange(1, 54), rng.random(999) * 37]
    )
    numba_log = np.array([noise_kernels.log_f64(v) for v in x])
    np.testing.assert_allclose(numba_log, np.log(x), rtol=6e-16, atol=0)


def test_noise_is_standard_gumbel():
    noise = np.concatenate([gumbel_noise(99, t, 50_000) for t in range(20)]).astype(np.float64)
    assert stats.kstest(noise, stats.gumbel_r.cdf).pvalue > ALPHA
    assert stats.kstest(gumbel_noise(5, 0, 200_000), stats.gumbel_r.cdf).pvalue > ALPHA
    tail = (noise > 9.0).sum()  # 123 expected
    assert stats.binomtest(int(tail), len(noise), 1 - math.exp(-math.exp(-9.0))).pvalue > ALPHA


def test_neighbouring_keys_have_unrelated_noise():
    size = 50_000
    keys = [(0, 0), (1, 0), (0, 1), (1, 1), (2**32, 0), (2**63, 0), (0, 2**31), (2, 0), (0, 2), (2**33 + 1, 3)]
    uniforms = np.exp(-np.exp(-np.array([gumbel_noise(*key, size) for key in keys], np.float64)))
    correlation = np.corrcoef(uniforms)
    off = correlation[np.triu_indices(len(keys), 1)]
    assert np.abs(off).max() < 4.5 / math.sqrt(size)
    for lag in (1, 2, 4, 512):  # and along the vocabulary of one key
        assert abs(np.corrcoef(uniforms[0][lag:], uniforms[0][:-lag])[0, 1]) < 4.5 / math.sqrt(size)
        assert abs(np.corrcoef(uniforms[0][lag:], uniforms[2][:-lag])[0, 1]) < 4.5 / math.sqrt(size)
