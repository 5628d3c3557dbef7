"""Stage `hardware`: the machine, and what the device and the way to it do at best."""

from __future__ import annotations

import torch

from gpu_check.stage import Stage
from specactor_ray.core.machine import hardware, versions


def measure_hardware(stage: Stage) -> None:
    """Machine and software; GB/s of a copy on the device (bytes read plus bytes written), TFLOP/s of a dense matrix
    product, and microseconds of one small kernel from launch to completion and of a small copy to the host."""
    settings, figures = stage.settings, stage.entry["figures"]
    device, size = settings.device, settings.matmul_size
    figures |= {"host": hardware(), "versions": versions() | {"cuda": torch.version.cuda or "none"}}
    source = torch.empty(settings.copy_bytes, dtype=torch.uint8, device=device).random_()
    target, small = torch.empty_like(source), torch.zeros(64, device=device)
    left, right = torch.randn(2, size, size, device=device).to(getattr(torch, settings.dtype))
    figures["copy_gb_per_s"] = 2e-9 * settings.copy_bytes / stage.median_s(lambda: target.copy_(source))
    figures["matmul_tflop_per_s"] = 2e-12 * size**3 / stage.median_s(lambda: left @ right)
    figures["launch_us"] = 1e6 * stage.median_s(lambda: small.add_(1.0))
    figures["to_host_us"] = 1e6 * stage.median_s(small.tolist)
