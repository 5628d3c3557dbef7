"""Memory and compute that drafting takes, by method: measured with small models on this CPU, and by the memory plan and
the cost model for targets of 0.1 to 70 billion parameters on H100s."""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil

from points import Point
from recorded_drafts import WINDOW, Recipe, outputs_of, proposer_of
from specactor_ray.config.methods import traits
from specactor_ray.core.plot import Panel
from specactor_ray.distill.evaluation import replay
from specactor_ray.draft import _lookup_kernels as kernels
from specactor_ray.draft.eagle.checkpoint import read_head_config
from specactor_ray.draft.lookup import SuffixProposer, TokenLog
from specactor_ray.draft.proposer import STEP_TOKENS, Proposer
from specactor_ray.models.shapes import GIB
from specactor_ray.plan.hardware import ModelSpec, RooflineCost, find_model, load_hardware
from specactor_ray.plan.search import geometric
from specactor_ray.target.base import STATES_UNDER_WAY
from specactor_ray.target.sizes import captured_bytes, in_blocks
from specactor_ray.transport.messages import CommitBatch, States, TailBatch

TARGETS = {
    "smollm2-135m": (None, 1),
    "qwen2.5-1.5b": ("qwen2.5-0.5b", 1),
    "qwen2.5-7b": ("qwen2.5-0.5b", 2),
    "qwen2.5-32b": ("qwen2.5-0.5b", 8),
    "llama-3.3-70b": ("llama-3.2-1b", 8),
}
"""Target → draft model, and GPUs of a verifier, which have room for the largest batch."""
BATCHES = (1, 4, 16, 64, 256, 1024)
CHANCE = {"suffix": 0.65, "eagle": 0.68, "draft_model": 0.72}
"""Chance that a draft token behind right ones is right, as in conf/simulation/qwen32b_5xh100.yaml."""
COVERAGE = {"suffix": 0.3, "eagle": 1.0, "draft_model": 1.0}
"""Share of requests with a draft."""
REQUEST, ATTENDED = 2048, 1024
"""Tokens of a request for which there is room, and those to which a step attends."""
_HEAD_VOCABULARY = 32_000
_MATCHES = 2, 8
"""Defaults of `min_match` and `max_match`."""
_CPU_BATCHES, _CPU_TOKENS = (1, 16, 64), 12


# ---- H100s ----


def head_of(target: ModelSpec) -> ModelSpec:
    """An EAGLE-3 head: a layer of the target, three hidden states, a draft vocabulary of 32,000."""
    return replace(target, layers=1, vocabulary=min(target.vocabulary, _HEAD_VOCABULARY), features=3)


def gpu_points() -> Iterator[Point]:
    """A point for each target, batch and method: memory, and the GPU time of accepted tokens."""
    hardware = load_hardware("h100")
    for name, (small, gpus) in TARGETS.items():
        target = find_model(name)
        verify = RooflineCost(hardware, target, gpus)
        drafters = {"suffix": None, "eagle": head_of(target), "draft_model": find_model(small) if small else None}
        for batch in BATCHES:
            for method, model in drafters.items():
                if method == "suffix" or model is not None:
                    point = {"target": name, "batch": batch, "method": method, **memory(method, model, target, batch)}
                    yield point | _times(method, model, verify, batch)


def memory(method: str, model: ModelSpec | None, target: ModelSpec, batch: int) -> dict[str, float]:
    """Bytes of a drafter for `batch` requests of a target: weights, cache of keys and values, captured steps, other
    state, messages of a step of a request between a verifier and a draft actor, and their sum without messages, GiB."""
    weights = cache = graphs = 0.0
    if model is None:
        log = TokenLog(SuffixProposer.history, *_MATCHES, SuffixProposer.scopes)
        own = batch * REQUEST * 4 * (kernels.LINKS + 2 * len(log.arrays[2]))
        state = float(log.rows.nbytes + log.heads.nbytes + own)
    else:
        weights = float(model.parameters * model.weight_bytes)
        cache = float(in_blocks(REQUEST, batch) * model.kv_bytes_per_token)
        rows, shape = min(batch, STEP_TOKENS), text_of(model)
        graphs = captured_bytes(shape, model.weight_bytes, rows, STEP_TOKENS, rows)
        state = 0.0
        if model.features:
            state = float((2 * STATES_UNDER_WAY + STEP_TOKENS) * model.features * target.hidden * 2)
    total = weights + cache + graphs + state
    parts = {"weights": weights, "cache": cache, "graphs": graphs, "state": state, "total": total}
    return {f"{part} GiB": size / GIB for part, size in parts.items()} | {
        "message bytes": message_bytes(batch, target.hidden * model.features if model else 0)
    }


def text_of(model: ModelSpec) -> Any:
    """The shape in the names of a model's configuration."""
    names = {"num_hidden_layers": model.layers, "hidden_size": model.hidden, "vocab_size": model.vocabulary}
    return SimpleNamespace(**names, intermediate_size=model.ffn)


def message_bytes(batch: int, width: int, committed: int = 2) -> float:
    """Bytes of pickled messages per request and step: a tail of a whole window, the committed tokens, and hidden states
    of `width` numbers of two bytes for each of these."""
    rows, ones = np.arange(batch, dtype=np.int32), np.ones(batch, np.int32)
    tails = TailBatch("eagle-0#1", rows, ones, ones, WINDOW * ones, np.zeros(batch * WINDOW, np.int32))
    states = None
    if width:
        values = np.zeros((batch * committed, width), np.int16)
        states = States(rows, ones, committed * ones, values)
    tokens = np.zeros(batch * committed, np.int32)
    commits = CommitBatch("verifier-0#1", rows, ones, ones, committed * ones, tokens, states=states)
    return sum(len(pickle.dumps(message, protocol=5)) for message in (tails, commits)) / batch


def _times(method: str, model: ModelSpec | None, verify: RooflineCost, batch: int) -> dict[str, Any]:
    """The fastest window in turns with the verifier, its speed, x plain, and GPU-ms of a plain token and of an accepted
    draft token: those of verifying it and of drafting, on the verifier's GPUs, which wait (`in turns`), or on one more
    (`apart`)."""
    gpus, context, coverage = verify.tensor_parallel, batch * ATTENDED, COVERAGE[method]
    draft_s = RooflineCost(verify.device, model).seconds(batch, batch, context) if model else 0.0
    plain_s = verify.seconds(batch, batch, context)
    survival = geometric(np.array([CHANCE[method]]), WINDOW)[0]
    found = []
    for window in range(1, WINDOW + 1):
        accepted = batch * coverage * float(survival[1 : window + 1].sum())
        more_s = verify.seconds(batch, batch + round(batch * coverage * window), context) - plain_s
        drafting_s = window * draft_s
        speed = (batch + accepted) / (plain_s + more_s + drafting_s) / (batch / plain_s)
        times = ((more_s + drafting_s) * gpus, more_s * gpus + drafting_s)
        found.append((speed, window, *(1e3 * one / accepted for one in times)))
    speed, window, turns, apart = max(found)
    names = ("x plain", "window", "plain GPU-ms", "GPU-ms in turns", "GPU-ms apart")
    return dict(zip(names, (speed, window, 1e3 * gpus * plain_s / batch, turns, apart), strict=True))


def memory_panels(points: Sequence[Point]) -> list[Panel]:
    """Memory of the methods over batch, for a small and a large target, and GPU time of an accepted token beside that
    of a plain one."""
    marks = {"suffix": "C2", "eagle": "C1", "draft_model": "C0"}

    def panel(target: str, what: str) -> Panel:
        def draw(axes: Any) -> None:
            for method, colour in marks.items():
                mine = [point for point in points if (point["target"], point["method"]) == (target, method)]
                axes.plot([one["batch"] for one in mine], [one[what] for one in mine], "o-", color=colour, label=method)
            if what != "total GiB":
                mine = [point for point in points if (point["target"], point["method"]) == (target, "suffix")]
                plain = [one["plain GPU-ms"] for one in mine]
                axes.plot([one["batch"] for one in mine], plain, "k--", label="plain token")
            label = "GiB" if what == "total GiB" else "GPU-ms of an accepted token"
            axes.set(title=target, xlabel="requests at once", ylabel=label, xscale="log", yscale="log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_major_formatter("{x:g}")

        return draw

    names = ("qwen2.5-1.5b", "qwen2.5-32b")
    return [panel(name, what) for what in ("total GiB", "GPU-ms in turns") for name in names]


# ---- this CPU ----


class _Timed:
    """A proposer with the CPU seconds of each of its calls that drafts for all requests."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer, self.seconds = proposer, list[float]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)

    def propose(self, view: Any, rows: np.ndarray) -> np.ndarray:
        """See `Proposer.propose`."""
        begin = time.process_time()
        changed = self._proposer.propose(view, rows)
        if len(changed) == len(rows):
            self.seconds.append(time.process_time() - begin)
        return changed


def cpu_points(recipe: Recipe, prompts: Path) -> list[Point]:
    """A point per method: CPU-ms in which it drafts a token (a lookup: a whole window) for 1, 16 and 64 requests, lower
    quartile of its calls, and MiB of memory that it takes for 64."""
    process, points = psutil.Process(), list[Point]()
    with tempfile.TemporaryDirectory() as folder:
        recipe = replace(recipe, max_tokens=_CPU_TOKENS)
        records = outputs_of(recipe, prompts, Path(folder))
        width = read_head_config(recipe.head, recipe.target).feature_size if recipe.head else None
        for method in recipe.drafters:
            before, point = process.memory_info().rss, {"method": method}
            for batch in _CPU_BATCHES:
                mine = [replace(records[n % len(records)], index=n) for n in range(batch)]
                timed: Any = _Timed(proposer_of(recipe, method))
                replay(timed, mine, WINDOW, batch, width=width if traits(method).reads_features else None)
                point[f"CPU-ms, {batch}"] = 1e3 * float(np.quantile(timed.seconds, 0.25))
            point["MiB, 64"] = (process.memory_info().rss - before) / 2**20
            points.append(point)
    return points
