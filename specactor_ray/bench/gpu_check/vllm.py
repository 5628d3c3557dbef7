"""Stage `vllm`: the product's vLLM engine beside `vllm.LLM`, with dummy weights, each in a process of its own.

Drafts are oracles: outputs of plain decoding are recorded and given as drafts, with a share of wrong tokens. The logits
of dummy weights are all but equal, so the noise chooses, and outputs are the same in every batch.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from specactor_ray.bench.gpu_check.models import model_folder, random_prompts, vllm_target
from specactor_ray.bench.gpu_check.stage import Settings, Stage
from specactor_ray.bench.micro import cell
from specactor_ray.core.errors import SpecActorError
from specactor_ray.core.ragged import places
from specactor_ray.core.types import SamplingParams
from specactor_ray.models.cache_size import GIB
from specactor_ray.target.base import NO_DRAFTS, Drafts, TargetRequest

_STRIDE = 37
"""Steps between the places of neighbouring rows in the pattern of right and wrong drafts."""


_STOCK = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
}
"""Variables of the process of stock vLLM."""


class Run(NamedTuple):
    """Requests from their prompts to their ends."""

    seconds: float
    steps: int
    """Steps, of which some are prefill; as many of these in every run of the same rows."""
    tokens: np.ndarray
    """int32 `(rows, tokens)`."""


class Oracle(NamedTuple):
    """Drafts of known tokens."""

    drafts: int
    """Draft tokens of each row in a step."""
    known: np.ndarray
    """int32 `(rows, tokens)`: outputs; bool, the same shape: where the draft is right."""
    right: np.ndarray

    def tails(self, rows: np.ndarray, ends: np.ndarray) -> Drafts:
        """Drafts of `rows`, which have `ends` output tokens."""
        lengths = np.clip(self.known.shape[1] - ends - 1, 0, self.drafts)
        if not lengths.any():
            return NO_DRAFTS
        column = np.arange(self.drafts)
        at = np.minimum(ends[:, None] + column, self.known.shape[1] - 1)
        known = self.known[rows[:, None], at]
        tokens = np.where(self.right[rows[:, None], at], known, known ^ 1)
        return Drafts(rows, lengths.astype(np.int32), tokens[column < lengths[:, None]].astype(np.int32))


_PLAIN = Oracle(0, np.zeros((0, 0), np.int32), np.zeros((0, 0), np.bool_))


class Side(Protocol):
    """An engine that runs random prompts to outputs of the same length."""

    def run(self, rows: int, tokens: int, oracle: Oracle) -> Run:
        """Run requests; the prompts are the same in every run."""

    def call(self, method: str) -> Any:
        """Call a method of its worker."""


class OurSide:
    """The product's engine, stepped as a verifier does it."""

    def __init__(self, settings: Settings, model: str) -> None:
        from specactor_ray.target.vllm import VllmEngine

        self._settings = settings
        self.engine = VllmEngine(vllm_target(settings, model), max(settings.drafts))

    def run(self, rows: int, tokens: int, oracle: Oracle) -> Run:
        engine, ends = self.engine, np.zeros(rows, np.int64)
        found, steps = np.zeros((rows, tokens), np.int32), 0
        for row, prompt in enumerate(random_prompts(self._settings, rows)):
            sampling = SamplingParams(seed=row, max_tokens=tokens, ignore_eos=True)
            engine.add(row, TargetRequest(f"r{row}", tuple(prompt), sampling))
        begin = time.perf_counter()
        while engine.has_work():
            live = engine.decoding()
            result = engine.step(oracle.tails(live, ends[live]), oracle.drafts)
            if result.errors:
                raise RuntimeError(f"requests ended with errors, such as {next(iter(result.errors.values()))}")
            at = places(ends[result.rows], result.lengths)
            found[np.repeat(result.rows, result.lengths), at] = result.tokens
            ends[result.rows] += result.lengths
            steps += 1
        return Run(time.perf_counter() - begin, steps, found)

    def call(self, method: str) -> Any:
        return self.engine._core.collective_rpc(method)[0]


class StockSide:
    """`vllm.LLM` with its own sampling."""

    def __init__(self, settings: Settings, model: str) -> None:
        config = vllm_target(settings, model)
        os.environ |= _STOCK
        for name in ("VLLM_USE_V2_MODEL_RUNNER", "TRITON_INTERPRET"):
            os.environ.pop(name, None)  # choices of ours
        from vllm import LLM

        from specactor_ray.target.vllm import kernel_scan_without_llvmlite

        with kernel_scan_without_llvmlite():
            self._llm = LLM(
                model=model,
                dtype=config.dtype,
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_batch,
                max_num_batched_tokens=config.max_step_tokens,
                kv_cache_memory_bytes=int(config.kv_cache_gb * GIB),
                enforce_eager=not config.compiled,
                skip_tokenizer_init=True,
                generation_config="vllm",
                use_tqdm_on_load=False,
                disable_log_stats=True,
                **config.engine_arguments,
            )
        self._settings = settings

    def run(self, rows: int, tokens: int, oracle: Oracle) -> Run:
        from vllm import SamplingParams as VllmSamplingParams

        del oracle
        sampling = VllmSamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in random_prompts(self._settings, rows)]
        begin = time.perf_counter()
        outputs = self._llm.generate(inputs, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        return Run(seconds, tokens, np.array([one.outputs[0].token_ids for one in outputs], np.int32))

    def call(self, method: str) -> Any:
        return self._llm.collective_rpc(method)[0]


SIDES: Mapping[str, Callable[[Settings, str], Side]] = {"stock": StockSide, "ours": OurSide}


def measure_vllm(stage: Stage) -> None:
    """Fill a point for stock vLLM and for ours, per number of rows, draft tokens and share of right ones: ms of a
    decode step, tokens/s and their ratio to stock vLLM's, tokens of a row in a step, the share of tokens that are those
    of plain decoding; then the exposed part of the ms (the GPU is idle), and the graphs of the decode steps.

    Raises RuntimeError where an engine failed; the other one is measured.
    """
    failures = list[str]()
    with model_folder(stage.settings) as model:
        for name in SIDES:
            try:
                stage.apart(measure_side, name, model)
            except SpecActorError as error:
                failures.append(f"{name}: {str(error).strip().splitlines()[-1]}")
    if failures:
        raise RuntimeError("; ".join(failures))


def measure_side(stage: Stage, name: str, model: str) -> None:
    """Measure one engine in this process."""
    settings, begin = stage.settings, time.perf_counter()
    side = SIDES[name](settings, model)
    stage.entry["figures"][f"{name} start s"] = time.perf_counter() - begin
    stage.changed(f"{stage.name}, {name}: started")
    most, tokens = max(settings.rows), 2 * settings.target_tokens
    known = dict[int, np.ndarray]()

    def oracle(rows: int, drafts: int, accept: float | None) -> Oracle:
        if accept is None:
            return _PLAIN
        if rows not in known:
            known[rows] = side.run(rows, tokens, _PLAIN).tokens
        return Oracle(drafts, known[rows], pattern(rows, settings.target_tokens, accept))

    def measure(rows: int, drafts: int, accept: float | None, what: str) -> str:
        key = {"engine": name, "rows": rows, "drafts": drafts, "accept": accept}
        given = oracle(rows, drafts, accept)
        if what == "graphs":
            figures = exposure(stage, side, rows, given, stage.point(key)["ms"])
        else:
            figures, found = speed(stage, side, rows, given)
            known.setdefault(rows, found)
            figures["same %"] = 100.0 * float((found == known[rows]).mean()) if name == "ours" else None
            figures["x stock"] = ratio_to_stock(stage, rows, figures["tokens/s"])
        stage.point(key, **figures)
        return ", ".join(f"{title} {cell(value)}" for title, value in figures.items())

    side.run(most, 8, _PLAIN)  # compiles
    drafted = [(0, None), *itertools.product(filter(None, settings.drafts), settings.accept)]
    cells = [one for one in drafted if one[0] in settings.drafts and (name == "ours" or not one[0])]
    stage.each(((rows, *one, what) for rows in settings.rows for one in cells for what in ("speed", "graphs")), measure)


def speed(stage: Stage, side: Side, rows: int, oracle: Oracle) -> tuple[dict[str, Any], np.ndarray]:
    """Figures of the second half of long outputs, and the tokens of these."""
    half = stage.settings.target_tokens
    short, long = (run_in_time(stage, side, rows, tokens, oracle) for tokens in (half, 2 * half))
    seconds, steps = long.seconds - short.seconds, long.steps - short.steps
    figures = {"ms": 1e3 * seconds / steps, "tokens/s": rows * half / seconds, "tokens a step": half / steps}
    return figures, long.tokens


def exposure(stage: Stage, side: Side, rows: int, oracle: Oracle, ms: float) -> dict[str, Any]:
    """Exposed ms of a step that takes `ms`, and the graphs of some steps, without those of prefill."""
    few = max(stage.settings.target_tokens // 8, 1 + oracle.drafts)
    runs, busy_s, graphs = list[Run](), list[float | None](), list[Counter[str]]()
    for tokens in (few, 2 * few):
        side.call("watch_begin")
        runs.append(run_in_time(stage, side, rows, tokens, oracle))
        counts, busy = side.call("watch_end")
        graphs.append(Counter(counts))
        busy_s.append(busy)
    first, second = busy_s
    steps = runs[1].steps - runs[0].steps
    exposed = None if first is None or second is None else ms - 1e3 * (second - first) / steps
    return {"exposed ms": exposed, "graphs": dict((graphs[1] - graphs[0]).most_common())}


def run_in_time(stage: Stage, side: Side, rows: int, tokens: int, oracle: Oracle) -> Run:
    found = list[Run]()
    stage.seconds(lambda: found.append(side.run(rows, tokens, oracle)))
    return found[0]


def ratio_to_stock(stage: Stage, rows: int, tokens_per_s: float) -> float | None:
    """Tokens/s over those of stock vLLM, if these have been measured."""
    for point in stage.entry["points"]:
        if (point["engine"], point["rows"]) == ("stock", rows) and "tokens/s" in point:
            return tokens_per_s / float(point["tokens/s"])
    return None


def pattern(rows: int, period: int, accept: float) -> np.ndarray:
    """bool `(rows, 2 * period)`: where drafts are right. Of every `period` tokens of a row exactly this share."""
    right = np.random.default_rng(11).permutation(period) < round(accept * period)
    return np.array([np.tile(np.roll(right, row * _STRIDE), 2) for row in range(rows)])
