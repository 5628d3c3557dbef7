"""One device count's share of a profile, measured in a process bound to that number of cores.

A process, because torch's thread pools keep the size they started with. The engine and the proposers are driven
directly, without Ray.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from specactor_ray.benchmarks.drafting_on_text import Recorded, TextStream, measure_acceptance, seconds_per_token
from specactor_ray.child import Report
from specactor_ray.cluster.cores import bind_to_cores
from specactor_ray.config.schema import Config, DrafterConfig
from specactor_ray.errors import ConfigError, InputError
from specactor_ray.messages import SamplingParams
from specactor_ray.speculation.costs import CostPoint
from specactor_ray.target.base import Drafts, TargetEngine, TargetRequest

MAX_RECORDED_TOKENS = 128
"""Longest output recorded for measuring acceptance."""
WRONG_TOKEN = 1
"""Verifying costs the same whether a draft is right; this one hardly ever is, so that all steps are alike."""

LEAST_STEP_TOKENS = 512
"""Prompts are read in chunks of at least half of this."""


@dataclass(frozen=True)
class Axes:
    """What is measured."""

    batches: tuple[int, ...]
    windows: tuple[int, ...]
    """Draft tokens, from 1 up; plain decoding (0) is always measured too."""
    contexts: tuple[int, ...]
    repeats: int

    @property
    def growth(self) -> int:
        """Tokens by which the first row grows while one context is measured."""
        return len(self.batches) * (len(self.windows) + 1) * (self.repeats + 1)

    def room(self, context: int) -> int:
        """Tokens a row may grow by: in the measurement, and while rows that were admitted later are read in."""
        reading = max(self.batches) * (context * 2 // LEAST_STEP_TOKENS + 1)
        return self.growth + reading + self.windows[-1] + 8

    @property
    def draft_window(self) -> int:
        """Window at which drafting is timed: the middle one."""
        return self.windows[len(self.windows) // 2]

    def verify_points(self) -> int:
        return len(self.batches) * (len(self.windows) + 1) * len(self.contexts)

    def draft_points(self) -> int:
        return len(self.batches) * len(self.contexts)


@dataclass(frozen=True)
class Share:
    """The work of one process."""

    config: Config
    devices: int
    cores: tuple[int, ...]
    """Cores to run on; empty leaves them as they are (on a GPU)."""
    device: str
    axes: Axes
    prompts: tuple[Any, ...] = ()
    """Prompts to record outputs of; only the first process has them."""
    max_requests: int = 16
    recorded: tuple[Recorded, ...] = ()
    """What another process recorded."""


@dataclass
class Measured:
    """What a process found."""

    devices: int
    verify: list[CostPoint]
    drafting: dict[str, list[CostPoint]]
    acceptance: dict[str, dict[str, Any]]
    recorded: tuple[Recorded, ...]
    cpu_share: float
    """CPU time this process got per core and second; far below 1 on cores that others use too."""


def measure_share(share: Share, report: Report) -> Measured:
    """Record outputs if asked to, then measure verifying, drafting and acceptance; `report` once per figure."""
    from specactor_ray.target.registry import build_engine

    if share.cores:
        bind_to_cores(share.cores)
    axes, config = share.axes, roomy(share.config, share.axes)
    engine = build_engine(config.target, share.device, max(axes.windows))
    try:
        _reject_contexts_too_long(axes, engine.max_model_len)
        recorded = share.recorded or record_outputs(engine, config, share.prompts, share.max_requests)
        if not share.recorded:
            report("recorded outputs")
        text, sampling = TextStream(recorded), recorded[0].sampling
        begin, begin_cpu = time.perf_counter(), time.process_time()
        verify = measure_verify(engine, text, sampling, share.devices, axes, report)
        cpu_share = (time.process_time() - begin_cpu) / (time.perf_counter() - begin) / share.devices
    finally:
        engine.close()
    measured = Measured(share.devices, verify, {}, {}, tuple(recorded), cpu_share)
    for drafter in config.drafters:
        measure_method(drafter, share, text, measured, report)
    return measured


def record_outputs(engine: TargetEngine, config: Config, prompts: Sequence[Any], max_requests: int) -> list[Recorded]:
    """Plain decoding of the first `max_requests` samples of the prompts, in their order.

    Raises:
        InputError: No prompt could be answered.
    """
    requests = _requests(config, prompts, max_requests)
    problem = ""
    outputs: dict[int, list[int]] = {}
    states: dict[int, list[np.ndarray]] = {}
    for row, request in enumerate(requests):
        try:
            engine.add(row, request)
            outputs[row], states[row] = [], []
        except InputError as error:
            problem = str(error)
    while engine.has_work():
        result = engine.step()
        for row, tokens, _ in result.outputs():
            outputs[row] += tokens
        for row, _, values in result.states.split() if result.states is not None else ():
            states[row].append(values)
    recorded = [
        Recorded(r.prompt_token_ids, tuple(outputs[row]), r.sampling, _whole(states[row]))
        for row, r in enumerate(requests)
        if outputs.get(row)
    ]
    if not recorded:
        raise InputError(f"data.path: none of the prompts could be answered ({problem or 'the outputs are empty'})")
    return recorded


def _whole(states: Sequence[np.ndarray]) -> np.ndarray | None:
    return np.concatenate(list(states)) if states else None


def measure_verify(
    engine: TargetEngine, text: TextStream, sampling: SamplingParams, devices: int, axes: Axes, report: Report
) -> list[CostPoint]:
    """V over the axes, `window` 0 being plain decoding. One prefill per context: rows are dropped for smaller batches.

    The windows take turns, so that a slow spell of the machine falls on all of them alike.
    """
    windows = (0, *axes.windows)
    points = []
    for context in axes.contexts:
        rows = _prefill(engine, text, sampling, max(1, context - axes.growth // 2), axes)
        for batch in sorted(axes.batches, reverse=True):
            for row in range(batch, rows):
                engine.remove(row)
            rows = batch
            times: dict[int, list[float]] = {window: [] for window in windows}
            for _, window in itertools.product(range(axes.repeats + 1), windows):
                drafts = Drafts.of(dict.fromkeys(range(rows), [WRONG_TOKEN] * window))
                begin = time.perf_counter()
                engine.step(drafts)
                times[window].append(time.perf_counter() - begin)
            for window in windows:
                points.append(CostPoint(devices, window, context, batch, median(times[window][1:])))
                report(f"verify, context {context}, batch {batch}, window {window}")
        for row in range(rows):
            engine.remove(row)
    return points


def measure_method(drafter: DrafterConfig, share: Share, text: TextStream, measured: Measured, report: Report) -> None:
    """D of a draft method over the axes, and how often it is right on what was recorded; added to `measured`."""
    from specactor_ray.draft.registry import build_proposer

    axes, device = share.axes, "cuda" if drafter.gpus else "cpu"
    proposer = build_proposer(drafter, share.config.target, device)
    endless = replace(measured.recorded[0].sampling, max_tokens=1 << 20, ignore_eos=True)
    points = []
    for context, batch in itertools.product(axes.contexts, axes.batches):
        seconds = seconds_per_token(
            proposer, text, endless, batch=batch, context=context, window=axes.draft_window, repeats=axes.repeats + 1
        )
        points.append(CostPoint(share.devices, 0, context, batch, median(seconds[1:])))
        report(f"{drafter.method}, context {context}, batch {batch}")
    measured.drafting[drafter.method] = points
    if not share.recorded:
        found = measure_acceptance(proposer, measured.recorded, axes.windows[-1], max(axes.batches))
        measured.acceptance[drafter.method] = found.to_dict()
        report(f"{drafter.method}, acceptance")


def _requests(config: Config, prompts: Sequence[Any], max_requests: int) -> list[TargetRequest]:
    from specactor_ray.models.loading import load_tokenizer
    from specactor_ray.rollout.prompts import encode_prompt
    from specactor_ray.sampling.keyed import derive_seed

    tokenizer = load_tokenizer(config.target.model, trust_remote_code=config.target.trust_remote_code)
    places = itertools.islice(itertools.product(range(len(prompts)), range(config.data.n)), max_requests)
    base = replace(config.sampling, max_tokens=min(config.sampling.max_tokens, MAX_RECORDED_TOKENS))
    return [
        TargetRequest(
            f"record-{prompt}-{sample}",
            encode_prompt(tokenizer, prompts[prompt], config.data.chat),
            replace(base, seed=derive_seed(base.seed, prompt, sample)),
        )
        for prompt, sample in places
    ]


def _prefill(engine: TargetEngine, text: TextStream, sampling: SamplingParams, context: int, axes: Axes) -> int:
    """Fill as many rows as the largest batch has, all read in; returns how many."""
    count = max(axes.batches)
    room = axes.room(context)
    sampling = replace(sampling, max_tokens=room, ignore_eos=True, stop_token_ids=())
    for row in range(count):
        engine.add(row, TargetRequest(f"row-{row}", text.tokens(9973 * row, 9973 * row + context), sampling))
    while len(engine.decoding()) < count:
        before = len(engine.decoding())
        read = engine.step().num_prefill_tokens
        if not read and len(engine.decoding()) <= before:
            problem = f"the cache holds no {count} requests of {context + room} tokens."
            raise ConfigError("target.kv_cache_gb", problem, "raise it, or profile smaller --batches or --contexts.")
    return count


def roomy(config: Config, axes: Axes) -> Config:
    """The configuration with room for the largest batch and step."""
    config = copy.deepcopy(config)
    batch = max(axes.batches)
    config.target.max_batch = batch
    config.target.max_step_tokens = max(
        config.target.max_step_tokens, batch * (axes.windows[-1] + 1), LEAST_STEP_TOKENS, 2 * batch
    )
    config.target.record_margins = False
    for drafter in config.drafters:
        drafter.max_batch = max(drafter.max_batch or 0, batch)
    return config


def _reject_contexts_too_long(axes: Axes, max_model_len: int) -> None:
    needed = max(axes.contexts) + axes.room(max(axes.contexts))
    if needed > max_model_len:
        raise InputError(
            f"--contexts: {max(axes.contexts)} tokens and the {needed - max(axes.contexts)} of the measurement itself "
            f"exceed the {max_model_len} that the target holds (target.max_model_len, its context, target.kv_cache_gb)"
        )
