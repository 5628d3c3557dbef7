"""Stage `hardware`: the machine, its software, and the device's limits of copying and of multiplying matrices."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specactor_ray.bench.gpu_check.stages import Stage
from specactor_ray.core.environment import hardware, versions


def measure_hardware(stage: Stage) -> None:
    """Facts, GB/s of a copy on the device (bytes read plus bytes written), TFLOP/s of a dense matrix product, and
    microseconds of one small kernel from launch to completion and of a small copy to the host."""
    settings, figures = stage.settings, stage.entry["figures"]
    device, dtype, size = settings.device, getattr(torch, settings.dtype), settings.matmul_size
    figures |= {"host": hardware(), "versions": versions()}
    if device == "cuda":
        found = torch.cuda.get_device_properties(device)
        figures |= {"memory_gb": found.total_memory / 1e9, "capability": f"{found.major}.{found.minor}"}
        figures["versions"]["cuda"] = torch.version.cuda or ""
    source = torch.empty(settings.copy_bytes, dtype=torch.uint8, device=device).random_()
    target, small = torch.empty_like(source), torch.zeros(64, device=device)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    measured: dict[str, tuple[float, Callable[[], object]]] = {
        "copy_gb_per_s": (2e-9 * settings.copy_bytes, lambda: target.copy_(source)),
        "matmul_tflop_per_s": (2e-12 * size**3, lambda: left @ right),
        "launch_us": (0.0, lambda: small.add_(1.0)),
        "to_host_us": (0.0, small.tolist),
    }

    def measure(name: str) -> str:
        amount, call = measured[name]
        seconds = stage.median_s(call)
        figures[name] = amount / seconds if amount else 1e6 * seconds
        return f"{figures[name]:.4g}"

    stage.each([(name,) for name in measured], measure)
