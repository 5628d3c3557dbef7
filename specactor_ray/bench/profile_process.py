"""The part of a profile with one device count, measured in a process bound to that number of cores.

A process is necessary because torch's thread pools keep the size they started with. The engine and the proposers are
called directly, without Ray. Sampling is keyed, so the next token of the target does not depend on the drafter:
recorded outputs of plain decoding are the truth for every draft method and window, and no target is needed beside a
proposer.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from specactor_ray.cluster.cores import bind_to_cores
from specactor_ray.config.methods import drafter_spec
from specactor_ray.config.schema import Config, DrafterConfig
from specactor_ray.core.child import Report
from specactor_ray.core.errors import ConfigError, InputError, SpecActorError
from specactor_ray.core.ragged import common_prefix, places
from specactor_ray.core.types import SamplingParams
from specactor_ray.distill.corpus import CorpusRecord, RecordStore, collect
from specactor_ray.distill.evaluation import AcceptanceCounts, draft_all, replay
from specactor_ray.draft.proposer import Proposer, packed
from specactor_ray.plan.costs import CostPoint
from specactor_ray.table.requests import TargetRequest, refuse_impossible
from specactor_ray.target.base import Drafts, TargetEngine, build_engine

RECORDED = 16
"""Samples on which acceptance is measured."""
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

    def points(self, drafters: int) -> int:
        """Number of points of the grid."""
        return len(self.batches) * len(self.contexts) * (len(self.windows) + 1 + drafters)


@dataclass(frozen=True)
class Share:
    """The work of one process."""

    config: Config
    devices: int
    """Cores of the process, or 1 GPU."""
    axes: Axes
    prompts: tuple[Any, ...] = ()
    """Prompts of the recorded outputs; only the first process has them."""
    recorded: tuple[CorpusRecord, ...] = ()
    """Records of another process."""


@dataclass
class Measured:
    """Measurements of a process."""

    recorded: tuple[CorpusRecord, ...]
    verify: list[CostPoint]
    drafting: dict[str, list[CostPoint]] = field(default_factory=dict)
    acceptance: dict[str, dict[str, Any]] = field(default_factory=dict)


def measure_share(share: Share, report: Report) -> Measured:
    """Record outputs unless the share has records, then measure verifying, drafting and acceptance; `report` once per
    figure."""
    config, axes, gpus = roomy(share.config, share.axes), share.axes, share.config.target.gpus
    if not gpus:
        bind_to_cores(tuple(sorted(os.sched_getaffinity(0)))[: share.devices])
    with contextlib.closing(build_engine(config.target, "cuda" if gpus else "cpu", max(axes.windows))) as engine:
        needed = max(axes.contexts) + axes.room(max(axes.contexts))
        if needed > engine.max_model_len:
            tokens = f"{max(axes.contexts)} tokens and the {needed - max(axes.contexts)} of the measurement itself"
            limits = "target.max_model_len, its context, target.kv_cache_gb"
            raise InputError(f"--contexts: {tokens} exceed the {engine.max_model_len} that the target holds ({limits})")
        recorded = share.recorded
        if not recorded:
            recorded = tuple(record_outputs(engine, config, share.prompts))
            report("recorded outputs")
        measured = Measured(recorded, measure_verify(engine, recorded, share.devices, axes, report))
    for drafter in config.drafters:
        _measure_method(drafter, share, measured, report)
    return measured


def roomy(config: Config, axes: Axes) -> Config:
    """The configuration with room for the largest batch and step."""
    config, batch = copy.deepcopy(config), max(axes.batches)
    config.target.max_batch = batch
    config.target.max_step_tokens = max(
        config.target.max_step_tokens, batch * (axes.windows[-1] + 1), LEAST_STEP_TOKENS, 2 * batch
    )
    config.target.record_margins = False
    return config


def record_outputs(
    engine: TargetEngine, config: Config, prompts: Sequence[Any], most: int = RECORDED
) -> list[CorpusRecord]:
    """Decode the first `most` samples of the prompts plainly, in their order. Raises InputError if no prompt could be
    answered."""
    from specactor_ray.models.loading import load_tokenizer
    from specactor_ray.rollout.prompts import encode_prompt
    from specactor_ray.sampling.seeds import sample_of

    tokenizer = load_tokenizer(config.target.model, trust_remote_code=config.target.trust_remote_code)
    base = replace(config.sampling, max_tokens=min(config.sampling.max_tokens, MAX_RECORDED_TOKENS))
    places = itertools.islice(itertools.product(range(len(prompts)), range(config.data.n)), most)
    requests, problem = list[TargetRequest](), "the outputs are empty"
    for index, (prompt, sample) in enumerate(places):
        ids, sampling = encode_prompt(tokenizer, prompts[prompt], config.data.chat), sample_of(base, prompt, sample)
        try:
            request = TargetRequest(str(index), ids, sampling)
            refuse_impossible(request, engine.vocab_size, engine.max_model_len)
            requests.append(request)
        except InputError as error:
            problem = str(error)
    found = collect(engine, RecordStore(requests), max_open=most)
    recorded = [record for record in found if record.output_token_ids]
    if not recorded:
        raise InputError(f"data.path: none of the prompts could be answered ({problem})")
    return recorded


class TextStream:
    """All recorded tokens one after the other, as often as needed; features likewise, where there are any."""

    def __init__(self, recorded: Sequence[CorpusRecord]) -> None:
        self._tokens = [token for one in recorded for token in (*one.prompt_token_ids, *one.output_token_ids)]
        states = [one.states() for one in recorded if one.source is not None]
        self._states = np.concatenate(states) if states else None

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        return tuple(self._tokens[position % len(self._tokens)] for position in range(start, end))

    def feed(self, proposer: Proposer, begins: Sequence[int], counts: Sequence[int]) -> None:
        """Give each slot states for `counts` positions from `begins` on, if there are any. They are real states, but of
        other tokens: only their shape matters here."""
        if self._states is not None:
            from specactor_ray.models.weight_buckets import from_wire

            starts, lengths = np.array([begins, counts], np.int32)
            states = self._states[places(starts, lengths) % len(self._states)]
            slots = np.arange(len(starts), dtype=np.int32)
            proposer.add_features(slots, starts, lengths, from_wire(states))


def measure_verify(
    engine: TargetEngine, recorded: Sequence[CorpusRecord], devices: int, axes: Axes, report: Report
) -> list[CostPoint]:
    """Measure V over the axes; `window` 0 is plain decoding. One prefill per context: smaller batches drop rows.

    The windows take turns, so that a slow spell of the machine falls on all of them alike. Each step announces the next
    one's window: an engine with a step in flight plans that one with its room.
    """
    windows, points = (0, *axes.windows), []
    turns = [window for _ in range(axes.repeats + 1) for window in windows]
    for context in axes.contexts:
        rows = _prefill(engine, recorded, max(1, context - axes.growth // 2), axes)
        for batch in sorted(axes.batches, reverse=True):
            for row in range(batch, rows):
                engine.remove(row)
            rows = batch
            times: dict[int, list[float]] = {window: [] for window in windows}
            for window, following in itertools.pairwise([*turns, 0]):
                drafts = Drafts.of(dict.fromkeys(range(rows), [WRONG_TOKEN] * window))
                begin = time.perf_counter()
                engine.step(drafts, following)
                times[window].append(time.perf_counter() - begin)
            for window in windows:
                points.append(CostPoint(devices, window, context, batch, median(times[window][1:])))
                report(f"verify, context {context}, batch {batch}, window {window}")
        for row in range(rows):
            engine.remove(row)
    return points


def _prefill(engine: TargetEngine, recorded: Sequence[CorpusRecord], context: int, axes: Axes) -> int:
    """Prefill as many rows as the largest batch has; returns their number."""
    text, count, room = TextStream(recorded), max(axes.batches), axes.room(context)
    sampling = replace(recorded[0].sampling, max_tokens=room, ignore_eos=True, stop_token_ids=(), stop=())
    for row in range(count):
        request = TargetRequest(f"row-{row}", text.tokens(9973 * row, 9973 * row + context), sampling)
        engine.add(engine.table.open(request))
    while len(engine.decoding()) < count:
        before = len(engine.decoding())
        read = engine.step().num_prefill_tokens
        if not read and len(engine.decoding()) <= before:
            problem = f"the cache holds no {count} requests of {context + room} tokens."
            raise ConfigError("target.kv_cache_gb", problem, "raise it, or profile smaller --batches or --contexts.")
    return count


def _measure_method(drafter: DrafterConfig, share: Share, measured: Measured, report: Report) -> None:
    """Measure D of a draft method over the axes, and how often it is right on the records; added to `measured`."""
    from specactor_ray.draft.proposer import build_proposer

    axes, text = share.axes, TextStream(measured.recorded)
    window, batch, drafter = axes.draft_window, max(axes.batches), copy.copy(drafter)
    drafter.max_batch = max(drafter.max_batch or 0, batch)
    spec = drafter_spec("drafters", drafter, window, batch)
    proposer = build_proposer(spec, share.config.target, "cuda" if drafter.gpus else "cpu")
    endless = replace(measured.recorded[0].sampling, max_tokens=1 << 20, ignore_eos=True)
    points = measured.drafting[drafter.method] = []
    for context, rows in itertools.product(axes.contexts, axes.batches):
        limits = {"batch": rows, "context": context, "window": window, "repeats": axes.repeats + 1}
        seconds = seconds_per_token(proposer, text, endless, **limits)
        points.append(CostPoint(share.devices, 0, context, rows, median(seconds[1:])))
        report(f"{drafter.method}, context {context}, batch {rows}")
    if not share.recorded:
        found = measure_acceptance(proposer, measured.recorded, axes.windows[-1], batch)
        facts = found.facts()
        measured.acceptance[drafter.method] = {
            "survival": list(found.survival),
            **{name: facts[name] for name in ("steps", "acceptance_rate")},
        }
        report(f"{drafter.method}, acceptance")


def seconds_per_token(
    proposer: Proposer,
    text: TextStream,
    sampling: SamplingParams,
    *,
    batch: int,
    context: int,
    window: int,
    repeats: int,
) -> list[float]:
    """Seconds to draft one token for each of `batch` requests, once per repeat: the work between two verify steps, the
    commit of the right tokens and one more and then drafting until the window is full, divided by the window. So a
    method that finds its whole window at once is measured like one that drafts token by token. Raises InputError if a
    model drafts nothing, since its cache or its context is too small."""
    slots = np.arange(batch, dtype=np.int32)
    at = [9973 * slot for slot in range(batch)]  # far apart in the text, so that rows are no copies of each other
    committed = [0] * batch
    for slot in range(batch):
        begin = at[slot]
        at[slot] = begin + context
        proposer.open(slot, f"profile-{slot}", text.tokens(begin, begin + context), (), sampling, window)
    text.feed(proposer, [0] * batch, [context - 1] * batch)
    draft_all(proposer, slots, window)
    _reject_silent(proposer, slots, context)
    seconds = []
    for _ in range(repeats):
        commits = list[tuple[int, int, Sequence[int]]]()
        for slot, (_, tail) in enumerate(proposer.tails(slots).rows()):
            truth = text.tokens(at[slot], at[slot] + len(tail) + 1)
            count = common_prefix(tail, truth) + 1
            commits.append((slot, committed[slot], truth[:count]))
            at[slot] += count
            committed[slot] += count
        arrays = packed(commits)
        begin_s = time.perf_counter()
        if not proposer.commit(*arrays).all():
            raise SpecActorError(f"{proposer.method} lost track of a request while it was profiled")
        counts = [len(tokens) for _, _, tokens in commits]
        # The newest token's state comes with the next commit.
        text.feed(proposer, [context + start - 1 for _, start, _ in commits], counts)
        draft_all(proposer, slots, window)
        seconds.append((time.perf_counter() - begin_s) / window)
    for slot in range(batch):
        proposer.close(slot, finished=False)
    return seconds


def _reject_silent(proposer: Proposer, slots: np.ndarray, context: int) -> None:
    if proposer.vocab_size is None:  # lookups may find nothing
        return
    silent = int((proposer.tails(slots).lengths == 0).sum())
    if silent:
        raise InputError(
            f"{proposer.method} drafts nothing for {silent} of {len(slots)} requests of {context} tokens: its cache or "
            "its context is too small. Fix: raise its kv_cache_gb, or profile smaller --batches or --contexts"
        )


def measure_acceptance(
    proposer: Proposer, recorded: Sequence[CorpusRecord], window: int, batch: int
) -> AcceptanceCounts:
    """Draft for the recorded requests, `batch` at a time, in order: later ones may use the outputs of those that ended.

    Raises:
        InputError: The outputs are too short to compare any draft with them.
    """
    counts = replay(proposer, recorded, window, batch)
    if not counts.survival:
        raise InputError("no draft could be held against an output: the outputs are too short to measure acceptance")
    return counts
