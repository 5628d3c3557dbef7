"""Stage 1: the device, its software, and its two ceilings: copying and multiplying matrices."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib import metadata
from typing import Any

import torch

from specactor_ray.benchmarks.gpu_check.stages import Stage
from specactor_ray.benchmarks.gpu_check.timing import median_s

_PACKAGES = ("torch", "triton", "transformers", "numba", "numpy")


def measure_hardware(stage: Stage) -> None:
    """Facts, GB/s of a copy on the device (bytes read plus bytes written), TFLOP/s of a dense matrix product, and
    microseconds of one small kernel from launch to completion and of a small copy to the host."""
    settings, figures = stage.settings, stage.figures
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    figures |= _facts(device)
    stage.note(f"{figures['device']}, torch {figures['versions']['torch']}")
    stage.check("the copy")
    figures["copy_gb_per_s"] = 2e-9 * settings.copy_bytes / _copy_s(settings.copy_bytes, device)
    stage.check("the matrix product")
    size = settings.matmul_size
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    figures["matmul_tflop_per_s"] = 2e-12 * size**3 / median_s(lambda: left @ right, device)
    small = torch.zeros(64, device=device)
    figures["launch_us"] = 1e6 * median_s(lambda: small.add_(1.0), device, warm_ups=20)
    figures["to_host_us"] = 1e6 * median_s(small.tolist, device, warm_ups=20)
    figures["units"] = {"matmul": f"{settings.dtype} {size}^3", "copy": f"{settings.copy_bytes} bytes"}
    stage.note(f"copy {figures['copy_gb_per_s']:.0f} GB/s, product {figures['matmul_tflop_per_s']:.3g} TFLOP/s")


def _copy_s(size: int, device: torch.device) -> float:
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return median_s(lambda: target.copy_(source), device)


def device_name(device: str) -> str:
    """`NVIDIA H200`, or the processor's architecture."""
    return torch.cuda.get_device_name() if device == "cuda" else f"cpu {platform.machine()}"


def _facts(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "device": device_name(device.type),
        "host_cores": len(os.sched_getaffinity(0)),
        "versions": {"python": platform.python_version(), **_versions()},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["memory_gb"] = properties.total_memory / 1e9
        facts["multiprocessors"] = properties.multi_processor_count
        facts["compute_capability"] = f"{properties.major}.{properties.minor}"
        facts["versions"] |= {"cuda": torch.version.cuda or "", "driver": _driver()}
    return facts


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _driver() -> str:
    """The driver's version, or nothing where nvidia-smi does not say."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return ""
