"""Seeds that are derived from other seeds. Imports no kernels."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

from specactor_ray.core.errors import InputError
from specactor_ray.core.types import SamplingParams


def derive_seed(run_seed: int, prompt_index: int, sample_index: int) -> int:
    """Seed of one sample of one prompt, in [0, 2**53), which every reader of JSON keeps: the upper 53 bits of the first
    8 bytes, little-endian, of keyless BLAKE2b.

    The hashed message is the three numbers as little-endian unsigned 64-bit words, under the personalisation
    `specactor-seed`. Stable across processes, machines and versions. A prompt in a later epoch needs another
    `run_seed` or `prompt_index`, or it gets the same answer again. InputError: a number is not in [0, 2**64).
    """
    numbers = {"run_seed": run_seed, "prompt_index": prompt_index, "sample_index": sample_index}
    for name, value in numbers.items():
        if not 0 <= value < 2**64:
            raise InputError(f"{name} is {value!r}; it must be between 0 and 2**64 - 1")
    message = struct.pack("<QQQ", *numbers.values())
    digest = hashlib.blake2b(message, digest_size=8, person=b"specactor-seed").digest()
    return int.from_bytes(digest, "little") >> 11


def sample_of(sampling: SamplingParams, prompt_index: int, sample_index: int) -> SamplingParams:
    """The parameters of one sample of one prompt: those of the run with the sample's own seed (`derive_seed`)."""
    return replace(sampling, seed=derive_seed(sampling.seed, prompt_index, sample_index))
