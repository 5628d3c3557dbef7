"""Stage `vllm`: the product's vLLM engine beside `vllm.LLM`, with dummy weights, each in a process of its own.

Both are on the GPU at once and are measured by turns, so a ratio is of figures of the same minute. Drafts are oracles:
outputs of plain decoding are recorded and given as drafts, with a share of wrong tokens. The logits of dummy weights
are all but equal, so the noise chooses, and outputs are the same in every batch.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from gpu_check.child import Child, Report
from gpu_check.models import model_folder, random_prompts, vllm_target
from gpu_check.stage import Settings, Stage, shown
from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.machine import fallbacks
from specactor_ray.core.ragged import places
from specactor_ray.core.types import SamplingParams
from specactor_ray.models.shapes import GIB
from specactor_ray.table.requests import TargetRequest
from specactor_ray.target.base import NO_DRAFTS, Drafts

_STRIDE = 37
"""Steps between the places of neighbouring rows in the pattern of right and wrong drafts."""


class Oracle(NamedTuple):
    """Drafts of known tokens."""

    drafts: int
    """Draft tokens of each row in a step."""
    known: np.ndarray
    """int32 `(rows, tokens)`: outputs."""
    right: np.ndarray
    """bool `(rows, tokens)`: where the draft is right."""

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


class Run:
    """Requests from their prompts to their ends, step by step."""

    def __init__(self, rows: int, tokens: int) -> None:
        self.tokens = np.zeros((rows, tokens), np.int32)
        """Output tokens."""
        self.ends = np.zeros(rows, np.int64)
        """Output tokens of each row until now."""
        self.steps = 0
        """Steps, of which some are prefill; as many of these in every run of the same rows."""
        self._whole: list[tuple[float, int]] = []
        """Time and tokens of all rows after each step in which all of them decode."""

    def step(self) -> None:
        """Note that a step has ended."""
        self.steps += 1
        if self.ends.min() > 0 and self.ends.max() < self.tokens.shape[1]:
            self._whole.append((time.perf_counter(), int(self.ends.sum())))

    def figures(self) -> dict[str, float]:
        """Figures of the steps in which all rows decode. Raises RuntimeError if there are fewer than two."""
        rows, steps = len(self.ends), len(self._whole) - 1
        if steps < 1:
            raise RuntimeError(f"outputs are too short: {rows} rows never decode all at once")
        (begin, before), (end, after) = self._whole[0], self._whole[-1]
        rate = (after - before) / (end - begin)
        return {"ms": 1e3 * (end - begin) / steps, "tokens/s": rate, "tokens a step": (after - before) / rows / steps}


class Side(abc.ABC):
    """An engine that runs random prompts to outputs of the same length."""

    def __init__(self, settings: Settings, keyed: bool) -> None:
        self._settings, self._keyed = settings, keyed
        self._known: dict[int, np.ndarray] = {}
        """Number of rows → outputs of plain decoding."""
        self._watched: dict[tuple[Any, ...], tuple[float | None, dict[str, int]]] = {}

    @abc.abstractmethod
    def run(self, rows: int, tokens: int, oracle: Oracle = _PLAIN) -> Run:
        """Run requests; the prompts are the same in every run."""

    @abc.abstractmethod
    def call(self, method: str) -> Any:
        """Call a method of its worker."""

    def measure(self, rows: int, drafts: int, accept: float | None) -> dict[str, Any]:
        """Figures of a run. The first time, shorter runs precede it: they compile, and show graphs and kernels."""
        period, oracle = self._settings.target_tokens, _PLAIN
        if accept is not None:
            if rows not in self._known:
                self._known[rows] = self.run(rows, 2 * period).tokens
            oracle = Oracle(drafts, self._known[rows], pattern(rows, period, accept))
        if (cell := (rows, drafts, accept)) not in self._watched:
            self._watched[cell] = self._watch(rows, oracle)
        busy_ms, graphs = self._watched[cell]
        run = self.run(rows, 2 * period, oracle)
        same = float((run.tokens == self._known.setdefault(rows, run.tokens)).mean())
        figures = run.figures()
        exposed_ms = None if busy_ms is None else figures["ms"] - busy_ms
        return {**figures, "same %": 100 * same if self._keyed else None, "exposed ms": exposed_ms, "graphs": graphs}

    def _watch(self, rows: int, oracle: Oracle) -> tuple[float | None, dict[str, int]]:
        """Ms of a step in which the GPU is busy (None on a CPU), and the graphs of some steps, without prefill."""
        few = max(self._settings.target_tokens // 8, 1 + oracle.drafts)
        steps, busy_s, graphs = list[int](), list[float | None](), list[Counter[str]]()
        for tokens in (few, 2 * few):
            self.call("watch_begin")
            steps.append(self.run(rows, tokens, oracle).steps)
            counts, busy = self.call("watch_end")
            graphs.append(Counter(counts))
            busy_s.append(busy)
        first, second = busy_s
        ms = None if first is None or second is None else 1e3 * (second - first) / (steps[1] - steps[0])
        return ms, dict((graphs[1] - graphs[0]).most_common())


class OurSide(Side):
    """The product's engine, stepped as a verifier does it."""

    def __init__(self, settings: Settings, model: str) -> None:
        from specactor_ray.target.vllm import VllmEngine

        super().__init__(settings, keyed=True)
        self.engine = VllmEngine(vllm_target(settings, model), max(settings.drafts))

    def run(self, rows: int, tokens: int, oracle: Oracle = _PLAIN) -> Run:
        engine, run = self.engine, Run(rows, tokens)
        for row, prompt in enumerate(random_prompts(self._settings, rows)):
            sampling = SamplingParams(seed=row, max_tokens=tokens, ignore_eos=True)
            engine.add(engine.table.open(TargetRequest(f"r{row}", tuple(prompt), sampling)))
        while engine.has_work():
            live = engine.decoding()
            result = engine.step(oracle.tails(live, run.ends[live]), oracle.drafts)
            if result.errors:
                raise RuntimeError(f"requests ended with errors, such as {next(iter(result.errors.values()))}")
            at = places(run.ends[result.rows], result.lengths)
            run.tokens[np.repeat(result.rows, result.lengths), at] = result.tokens
            run.ends[result.rows] += result.lengths
            run.step()
        engine.table.clear()
        return run

    def call(self, method: str) -> Any:
        return self.engine._core.collective_rpc(method)[0]


_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
}


def stock_llm(config: TargetConfig, **arguments: Any) -> Any:
    """`vllm.LLM` with the settings of a section `target`, or with `arguments` in their place, and its engine core in
    this process. Choices that the product's engine has made in the environment are dropped."""
    os.environ |= _ENVIRONMENT
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "TRITON_INTERPRET"):
        os.environ.pop(name, None)
    from vllm import LLM

    from specactor_ray.target.vllm_cpu import kernel_scan_without_llvmlite

    settings = {
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_batch,
        "max_num_batched_tokens": config.max_step_tokens,
        "enforce_eager": not config.compiled,
        "generation_config": "vllm",
        "use_tqdm_on_load": False,
    }
    with kernel_scan_without_llvmlite():
        return LLM(**settings | arguments | config.engine_arguments)


class StockSide(Side):
    """`vllm.LLM` with its own sampling."""

    def __init__(self, settings: Settings, model: str) -> None:
        super().__init__(settings, keyed=False)
        config = vllm_target(settings, model)
        self._llm = stock_llm(
            config,
            model=model,
            kv_cache_memory_bytes=int(config.kv_cache_gb * GIB),
            gpu_memory_utilization=0.1,  # what must be free at the start; it sets nothing else beside a cache size
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )

    def run(self, rows: int, tokens: int, oracle: Oracle = _PLAIN) -> Run:
        from vllm import SamplingParams as VllmSamplingParams

        del oracle
        run, numbers, core = Run(rows, tokens), dict[str, int](), self._llm.llm_engine.engine_core
        sampling = VllmSamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in random_prompts(self._settings, rows)]
        get_output = core.get_output

        def noted() -> Any:
            found = get_output()
            for one in found.outputs:
                run.ends[numbers.setdefault(one.request_id, len(numbers))] += len(one.new_token_ids)
            if found.outputs:
                run.step()
            return found

        core.get_output = noted
        try:
            outputs = self._llm.generate(inputs, sampling, use_tqdm=False)
        finally:
            del core.get_output  # that of its class is left
        run.tokens[:] = [one.outputs[0].token_ids for one in outputs]
        return run

    def call(self, method: str) -> Any:
        return self._llm.collective_rpc(method)[0]


SIDES: Mapping[str, Callable[[Settings, str], Side]] = {"stock": StockSide, "ours": OurSide}
_side: list[Side] = []
"""The engine of this process."""


def make_side(work: tuple[str, Settings, str], report: Report) -> dict[str, Any]:
    """Start an engine in this process. Returns figures of the start."""
    name, settings, model = work
    begin = time.perf_counter()
    _side.append(SIDES[name](settings, model))
    _side[0].run(max(settings.rows), 8)  # compiles
    return {f"{name} start s": time.perf_counter() - begin, f"{name} fallbacks": fallbacks()}


def measure_side(work: tuple[int, int, float | None], report: Report) -> dict[str, Any]:
    """Measure the engine of this process."""
    return _side[0].measure(*work)


def measure_vllm(stage: Stage) -> None:
    """Fill a point for stock vLLM and for ours, per number of rows, draft tokens and share of right ones, with medians
    over `rounds` in which all of them take turns: ms of a decode step, tokens/s and their ratio to stock vLLM's of the
    same round, tokens of a row in a step, the share of tokens that are those of plain decoding, and the exposed part of
    the ms (the GPU is idle); and the graphs of some decode steps. Without one of the engines the other is measured."""
    settings, figures = stage.settings, stage.entry["figures"]
    stock, plain = ("stock", 0, None), [("ours", 0, None)] if 0 in settings.drafts else []
    drafted = [("ours", *one) for one in itertools.product(filter(None, settings.drafts), settings.accept)]
    rounds = defaultdict[tuple[Any, ...], dict[int, dict[str, Any]]](dict)
    with model_folder(settings) as model, contextlib.ExitStack() as stack:
        children = {name: stack.enter_context(contextlib.closing(Child(f"gpu-check {name}"))) for name in SIDES}

        def start(name: str) -> str:
            stage.require_time()
            found = children[name].call(make_side, (name, settings, model))
            figures.update(found)
            return shown(found)

        def measure(rows: int, number: int, name: str, drafts: int, accept: float | None) -> str:
            stage.require_time()
            found = children[name].call(measure_side, (rows, drafts, accept))
            rounds[rows, name, drafts, accept][number] = found
            base = rounds[rows, *stock].get(number)
            found["x stock"] = found["tokens/s"] / base["tokens/s"] if base else None
            same = [*rounds[rows, name, drafts, accept].values()]
            key = {"engine": name, "rows": rows, "drafts": drafts, "accept": accept}
            stage.point(key, rounds=len(same), **{column: middle([one[column] for one in same]) for column in found})
            return shown(found)

        stage.each([(name,) for name in SIDES], start)
        cells = [one for one in (stock, *plain, *drafted) if f"{one[0]} start s" in figures]
        for rows in settings.rows:
            stage.each([(rows, number, *one) for number in range(settings.rounds) for one in cells], measure)


def middle(values: list[Any]) -> Any:
    """The median of numbers; of anything else the newest."""
    return statistics.median(values) if all(isinstance(one, float) for one in values) else values[-1]


def pattern(rows: int, period: int, accept: float) -> np.ndarray:
    """bool `(rows, 2 * period)`: where drafts are right. Of every `period` tokens of a row exactly this share."""
    right = np.random.default_rng(11).permutation(period) < round(accept * period)
    return np.array([np.tile(np.roll(right, row * _STRIDE), 2) for row in range(rows)])
