"""Stage 3: the product's keyed sampler over a whole vocabulary, beside a softmax of the same logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specactor_ray.benchmarks.gpu_check.stages import Stage
from specactor_ray.benchmarks.gpu_check.timing import median_s, synchronize
from specactor_ray.messages import SamplingParams
from specactor_ray.sampling.keyed import sample_rows, warm_up


def measure_sampler(stage: Stage) -> None:
    """Fill `points`: per number of rows milliseconds and peak memory (gigabytes above the logits; not on a CPU) of
    `sample_rows` at T=1 and T=0, to the tokens on the host, and of a float32 softmax."""
    settings, device = stage.settings, torch.device(stage.settings.device)
    dtype = getattr(torch, settings.dtype)
    warm_up()
    stage.figures |= {"vocab": settings.sampler_vocab, "dtype": settings.dtype, "points": []}
    for rows in settings.sampler_rows:
        stage.check(f"{rows} rows")
        logits = (3.0 * torch.randn(rows, settings.sampler_vocab, device=device)).to(dtype)
        point: dict[str, Any] = {"rows": rows}
        stage.figures["points"].append(point)
        for name, call in _calls(logits).items():
            stage.check(f"{rows} rows, {name}")
            point[name] = cost_of(call, device)
        stage.note(
            f"{rows} rows, ms: " + ", ".join(f"{name} {point[name].get('ms', 0):.3g}" for name in _calls(logits))
        )


def _calls(logits: torch.Tensor) -> dict[str, Callable[[], object]]:
    def keyed(temperature: float) -> Callable[[], object]:
        params = [SamplingParams(temperature, seed=row) for row in range(len(logits))]
        return lambda: sample_rows(logits, params, range(len(logits)))

    return {"T=1": keyed(1.0), "T=0": keyed(0.0), "softmax": lambda: torch.softmax(logits, -1, dtype=torch.float32)}


def cost_of(call: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """`ms`, and on a GPU `peak_gb`; or `error`, when there was too little memory."""
    try:
        cost: dict[str, Any] = {"ms": 1e3 * median_s(call, device)}
        if device.type == "cuda":
            cost["peak_gb"] = _peak_gb(call, device)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {"error": "out of memory"}
    return cost


def _peak_gb(call: Callable[[], object], device: torch.device) -> float:
    """Most memory that was allocated during the call above what was before it."""
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 1e9
