"""Stage `triton`: the keyed sampler's kernels: tokens compared with the CPU's, then times compared with others."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from importlib.util import find_spec

import torch

from specactor_ray.bench.gpu_check.stages import Stage
from specactor_ray.core.types import SamplingParams
from specactor_ray.sampling.candidates import MOST
from specactor_ray.sampling.keyed import sample_rows, warm_up
from specactor_ray.sampling.rules import Rules

_RULES = {"T=1": SamplingParams(), "T=0": SamplingParams(0.0), "top-p 0.95": SamplingParams(top_p=0.95)}
_DTYPES = ("float32", "bfloat16", "float16")
_RANKS = {"tokens": 1, "margins": 2, "candidates": MOST}


def measure_triton(stage: Stage) -> None:
    """Fill `different`: per vocabulary, dtype and results how 64 rows of all temperatures and filters differ from
    numba's, empty if they do not. Then a point per number of rows: ms of the kernels alone by rule, and with candidates
    at T=1, and GB/s of logits that they read; of the package's call at T=1, with tokens to the host; of the host form;
    and peak GB above the logits. Raises RuntimeError where a token or a margin differs."""
    settings, different, reason = stage.settings, dict[str, str](), _why_not(stage.settings.device)
    warm_up()

    def compare(vocab: int, dtype: str, results: str) -> str:
        from specactor_ray.sampling.fused import difference

        asked, found = (torch.device(settings.device), getattr(torch, dtype), _RANKS[results], vocab), list[str]()
        stage.seconds(lambda: found.append(difference(*asked)))
        different[f"{vocab} {dtype} {results}"] = found[0]
        return found[0] or "equal"

    def measure(rows: int, form: str) -> str:
        logits = 3.0 * torch.randn(rows, settings.sampler_vocabs[-1], device=settings.device)
        call = _call(logits := logits.to(getattr(torch, settings.dtype)), form)
        seconds = stage.median_s(call)
        columns = {f"{form} ms": 1e3 * seconds, f"{form} GB": stage.peak_gb(call)}
        if form == "T=1":
            columns["gb_per_s"] = 1e-9 * logits.nbytes / seconds
        stage.point({"rows": rows}, **{name: one for name, one in columns.items() if one is not None})
        return f"{1e3 * seconds:.3g} ms"

    if reason:
        stage.entry["not_measured"].append(f"the kernels: {reason}")
    else:
        stage.entry["figures"]["different"] = different
        stage.each(itertools.product(settings.sampler_vocabs, _DTYPES, _RANKS), compare)
    forms = [*([] if reason else (*_RULES, "candidates")), "product", "host"]
    stage.each(itertools.product(settings.sampler_rows, forms), measure)
    if wrong := [f"{name}: {found}" for name, found in different.items() if found]:
        raise RuntimeError("; ".join(wrong))


def _why_not(device: str) -> str:
    if find_spec("triton") is None:
        return "triton is not installed"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "they need a GPU, or TRITON_INTERPRET=1"
    return ""


def _call(logits: torch.Tensor, form: str) -> Callable[[], object]:
    n = len(logits)
    if form in ("product", "host"):
        params = [SamplingParams(seed=row) for row in range(n)]
        return lambda: sample_rows(logits, params, range(n), backend="numba" if form == "host" else "auto")
    from specactor_ray.sampling.fused import verify

    rules, index = Rules(n, logits.device), torch.arange(n, device=logits.device)
    rules.write(range(n), [_RULES.get(form, SamplingParams())] * n, [0] * n)
    none = torch.zeros(n + 1, dtype=torch.int64, device=logits.device)
    return lambda: verify(logits, index, none, none, 0, index, index, rules, _RANKS.get(form, 1))
