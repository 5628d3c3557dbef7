"""Stage 4: the sampler's Triton kernels: their tokens beside those of the CPU, then their time beside torch's."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from specactor_ray.benchmarks.gpu_check.sampler import cost_of
from specactor_ray.benchmarks.gpu_check.stages import Stage
from specactor_ray.messages import SamplingParams
from specactor_ray.sampling.keyed import sample_rows
from specactor_ray.sampling.rules import Rules

_RULES = {"T=1": SamplingParams(), "T=0": SamplingParams(0.0), "top-p 0.95": SamplingParams(top_p=0.95)}


def measure_triton(stage: Stage) -> None:
    """Fill `different` (per dtype and margins: what the kernels get wrong, empty if nothing) and `points`: per number
    of rows milliseconds and peak memory of the kernels alone, per rule, and of the torch form at T=1."""
    settings, device = stage.settings, torch.device(stage.settings.device)
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        stage.note("left out: Triton's kernels need a GPU")
        return
    from specactor_ray.sampling.fused import difference, verify

    stage.figures |= {"different": {}, "points": []}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for margins in (False, True):
            name = f"{dtype}, margins {margins}"
            stage.check(name)
            found = difference(device, dtype, margins, settings.sampler_vocab)
            stage.figures["different"][name] = found
            stage.note(f"{name}: {found or 'equal'}")
    for n in settings.sampler_rows:
        logits = (3.0 * torch.randn(n, settings.sampler_vocab, device=device)).to(getattr(torch, settings.dtype))
        point: dict[str, Any] = {"rows": n}
        stage.figures["points"].append(point)
        index = torch.arange(n + 1, device=device)
        none = torch.zeros(n + 1, dtype=torch.int64, device=device)
        for name, rule in _RULES.items():
            stage.check(f"{n} rows, {name}")
            params = [rule] * n
            rules = Rules(n, device)
            rules.write(range(n), params, [0] * n)
            rows = (logits, index[:n], none, none, 0, index[:n], index[:n], rules, False)
            point[name] = cost_of(functools.partial(verify, *rows), device)
        stage.check(f"{n} rows, torch")
        in_torch = functools.partial(sample_rows, logits, [_RULES["T=1"]] * n, range(n), backend="torch")
        point["torch"] = cost_of(in_torch, device)
        stage.note(
            f"{n} rows, ms: " + ", ".join(f"{name} {point[name].get('ms', 0):.3g}" for name in [*_RULES, "torch"])
        )
    wrong = [f"{name}: {found}" for name, found in stage.figures["different"].items() if found]
    if wrong:
        raise RuntimeError("; ".join(wrong))
