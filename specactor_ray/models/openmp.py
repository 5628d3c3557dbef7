"""Compiled functions on the threads of PyTorch's OpenMP pool: a second pool would compete with it."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from specactor_ray.core.jit import CFunction

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Data types that compiled functions read and write → their kind."""

_local = threading.local()


def padded(count: int) -> int:
    """The next multiple of 16."""
    return -(-count // 16) * 16


def run(function: CFunction, call: bytes, threads: int = 1) -> None:
    """Run a `c_function` on the same call in every thread of a team; the call's bytes hold the counters of tasks."""
    team = _team() if threads > 1 else None
    if team is None:
        function.call(call)
    else:
        team(function.address, call, threads, 0)


def workspace(size: int) -> int:
    """Address of at least `size` bytes that belong to the calling thread."""
    made: tuple[int, int, torch.Tensor] | None = getattr(_local, "workspace", None)
    if made is None or made[0] < size:
        room = torch.empty(size, dtype=torch.uint8)
        made = _local.workspace = size, room.data_ptr(), room
    return made[1]


@functools.cache
def _team() -> Callable[[int, bytes, int, int], None] | None:
    """`GOMP_parallel` of PyTorch's OpenMP library; None if that is not GNU OpenMP."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so"))
        team = library.GOMP_parallel
    except (OSError, AttributeError):
        return None
    team.argtypes, team.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return team
