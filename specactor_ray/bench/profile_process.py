"""One device count's share of a profile, measured in a process bound to that number of cores.

A process is necessary because torch's thread pools keep the size they started with. The engine and the proposers are
called directly, without Ray.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from specactor_ray.bench.drafting_on_text import TextStream, measure_acceptance, seconds_per_token
from specactor_ray.cluster.cores import bind_to_cores
from specactor_ray.config.drafter_spec import drafter_spec
from specactor_ray.config.schema import Config, DrafterConfig
from specactor_ray.core.child import Child, Report
from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.core.types import SamplingParams
from specactor_ray.distill.corpus import CorpusRecord, RecordStore, RolloutRequest, collect
from specactor_ray.plan.costs import CostPoint
from specactor_ray.target.base import Drafts, TargetEngine, TargetRequest
from specactor_ray.target.rows import refuse_impossible

MAX_RECORDED_TOKENS = 128
"""Tokens of the longest output recorded for measuring acceptance."""
WRONG_TOKEN = 1
"""Draft token of timed verify steps. Verifying costs the same whether a draft is right; this one hardly ever is, so all
steps are alike."""

LEAST_STEP_TOKENS = 512
"""Least `max_step_tokens`; prompts are read in chunks of at least half of it."""


@dataclass(frozen=True)
class Axes:
    """Axes of the measured grid."""

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
        """Tokens by which a row may grow: in the measurement, and while the prompts of later rows are read."""
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
    """Core ids to run on; empty: cores stay as they are (on a GPU)."""
    device: str
    axes: Axes
    prompts: tuple[Any, ...] = ()
    """Prompts whose outputs are recorded; only the first process has them."""
    max_requests: int = 16
    recorded: tuple[CorpusRecord, ...] = ()
    """Records of another process."""


@dataclass
class Measured:
    """Measurements of a process."""

    devices: int
    recorded: tuple[CorpusRecord, ...]
    verify: list[CostPoint] = field(default_factory=list)
    drafting: dict[str, list[CostPoint]] = field(default_factory=dict)
    acceptance: dict[str, dict[str, Any]] = field(default_factory=dict)
    cpu_share: float = 1.0
    """CPU time of this process per core and second; far below 1 on cores that other processes use, too."""


def measure_share(share: Share, report: Report) -> Measured:
    """Record outputs unless the share has records, then measure verifying, drafting and acceptance; `report` once per
    figure."""
    config = roomy(share.config, share.axes)
    with _started(share, config) as (engine, measured):
        if not share.recorded:
            report("recorded outputs")
        begin, begin_cpu = time.perf_counter(), time.process_time()
        text, sampling = TextStream(measured.recorded), measured.recorded[0].sampling
        measured.verify = measure_verify(engine, text, sampling, share.devices, share.axes, report)
        cpu_s, wall_s = time.process_time() - begin_cpu, time.perf_counter() - begin
        measured.cpu_share = cpu_s / wall_s / share.devices
    for drafter in config.drafters:
        measure_method(drafter, share, text, measured, report)
    return measured


class ProfileSession(Child):
    """A process that keeps an engine, so that its steps can be timed repeatedly, seconds apart.

    Raises:
        UserError: The model or the prompts cannot be used.
        SpecActorError: The process failed.
    """

    def __init__(self, share: Share) -> None:
        super().__init__(_measure_on_demand, share, "profile")
        self.drafting: dict[str, list[CostPoint]] = self.receive()
        """Draft method → seconds per token, measured once."""

    def verify(self, axes: Axes) -> Sequence[CostPoint]:
        """Measure V over the axes. Batches and contexts must not exceed those of the share."""
        self.channel.send(axes)
        points: list[CostPoint] = self.receive()
        return points


def _measure_on_demand(share: Share, channel: Connection) -> None:
    def ignore(line: str) -> None: ...

    config = roomy(share.config, share.axes)
    with _started(share, config) as (engine, measured):
        text, sampling = TextStream(measured.recorded), measured.recorded[0].sampling
        for drafter in config.drafters:
            measure_method(drafter, share, text, measured, ignore)
        channel.send(measured.drafting)
        while True:
            channel.send(measure_verify(engine, text, sampling, share.devices, channel.recv(), ignore))


@contextlib.contextmanager
def _started(share: Share, config: Config) -> Iterator[tuple[TargetEngine, Measured]]:
    """An engine on the share's cores, and the records made on it or before."""
    from specactor_ray.target.registry import build_engine

    if share.cores:
        bind_to_cores(share.cores)
    engine = build_engine(config.target, share.device, max(share.axes.windows))
    try:
        _reject_contexts_too_long(share.axes, engine.max_model_len)
        recorded = share.recorded or tuple(record_outputs(engine, config, share.prompts, share.max_requests))
        yield engine, Measured(share.devices, recorded)
    finally:
        engine.close()


def record_outputs(
    engine: TargetEngine, config: Config, prompts: Sequence[Any], max_requests: int
) -> list[CorpusRecord]:
    """Decode the first `max_requests` samples of the prompts plainly, in their order. Raises InputError if no prompt
    could be answered."""
    requests, problem = list[RolloutRequest](), ""
    for request in _requests(config, prompts, max_requests):
        wanted = TargetRequest(str(request.index), request.prompt_token_ids, request.sampling)
        try:
            refuse_impossible(wanted, engine.vocab_size, engine.max_model_len)
            requests.append(request)
        except InputError as error:
            problem = str(error)
    found = collect(engine, requests, RecordStore(None, "profile"), max_open=max_requests)
    recorded = [record for record in found if record.output_token_ids]
    if not recorded:
        raise InputError(f"data.path: none of the prompts could be answered ({problem or 'the outputs are empty'})")
    return recorded


def measure_verify(
    engine: TargetEngine, text: TextStream, sampling: SamplingParams, devices: int, axes: Axes, report: Report
) -> list[CostPoint]:
    """Measure V over the axes; `window` 0 is plain decoding. One prefill per context: smaller batches drop rows.

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
    """Measure D of a draft method over the axes, and how often it is right on the records; added to `measured`."""
    from specactor_ray.draft.proposer import build_proposer

    axes, device = share.axes, "cuda" if drafter.gpus else "cpu"
    spec = drafter_spec("drafters", drafter, axes.draft_window, max(axes.batches))
    proposer = build_proposer(spec, share.config.target, device)
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
        measured.acceptance[drafter.method] = {
            "survival": list(found.survival),
            "steps": found.steps,
            "supply": found.drafted / max(found.steps, 1),
            "acceptance_rate": found.accepted / max(found.drafted, 1),
            "acceptance_length": 1.0 + found.accepted / max(found.steps, 1),
        }
        report(f"{drafter.method}, acceptance")


def _requests(config: Config, prompts: Sequence[Any], max_requests: int) -> list[RolloutRequest]:
    from specactor_ray.models.loading import load_tokenizer
    from specactor_ray.rollout.prompts import encode_prompt
    from specactor_ray.sampling.seeds import sample_of

    tokenizer = load_tokenizer(config.target.model, trust_remote_code=config.target.trust_remote_code)
    places = itertools.islice(itertools.product(range(len(prompts)), range(config.data.n)), max_requests)
    base = replace(config.sampling, max_tokens=min(config.sampling.max_tokens, MAX_RECORDED_TOKENS))
    return [
        RolloutRequest(
            index,
            encode_prompt(tokenizer, prompts[prompt], config.data.chat),
            sample_of(base, prompt, sample),
        )
        for index, (prompt, sample) in enumerate(places)
    ]


def _prefill(engine: TargetEngine, text: TextStream, sampling: SamplingParams, context: int, axes: Axes) -> int:
    """Prefill as many rows as the largest batch has; returns their number."""
    count = max(axes.batches)
    room = axes.room(context)
    sampling = replace(sampling, max_tokens=room, ignore_eos=True, stop_token_ids=(), stop=())
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
