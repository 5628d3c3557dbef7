#!/usr/bin/env python3
"""What our own Python costs, without Ray and without models: loops, driver, simulator.

The engine takes no time (what it takes here is subtracted), drafters know the outputs, calls are answered at once. Each
figure is the median over steps after a warm-up, in one process on one thread.

    python scripts/bench_protocol.py                      # all
    python scripts/bench_protocol.py verifier driver      # some groups; `vllm` needs vLLM
    python scripts/bench_protocol.py --base REVISION      # in turns with another revision's copy of this script
    python scripts/bench_protocol.py --json FILE
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.util
import itertools
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from specactor_ray.actors.specs import ClusterView
from specactor_ray.cluster.calls import Calls
from specactor_ray.config.drafter_spec import DrafterSpec
from specactor_ray.config.schema import RaceName, SpeculationConfig, VerifyPolicy
from specactor_ray.core.types import SamplingParams  # fmt: skip
from specactor_ray.draft.lookup import NgramProposer
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.models.paged_cache import LayerShape, PagedCache
from specactor_ray.models.ragged_model import RaggedOutput
from specactor_ray.rollout.dispatch import Dispatcher
from specactor_ray.rollout.journal import JournalEntry
from specactor_ray.target.base import Drafts, StepResult, TargetRequest
from specactor_ray.transport.link import Link, direct_sender
from specactor_ray.transport.messages import (
    NO_BRANCHES,
    Branches,
    CommitBatch,
    DraftOpen,
    Progress,
    TailBatch,
    ToRollout,
)
from specactor_ray.verify.drafting import DrafterLink, Drafting
from specactor_ray.verify.loop import VerifyLoop

ROOT = Path(__file__).parents[1]
WARM_UP, STEPS = 24, 120
WINDOW, ACCURACY = 8, 0.75
LENGTH = 1 << 14
VERIFIERS, REQUESTS = 256, 16_384
ASKED: Mapping[str, float] = {
    "verifier_ms_16_rows_1_drafter": 0.2,
    "verifier_ms_128_rows_1_drafter": 0.5,
    "verifier_ms_256_rows_3_drafters": 1.5,
    "verifier_x_128_rows_1_drafter_4_branches": 1.3,
    "verifier_x_256_rows_3_drafters_4_branches": 1.3,
    "draft_loop_ms_128_rows_ngram": 0.35,
    "model_proposer_us_128_rows": 0.5,
    "model_proposer_us_128_rows_4_branches": 0.5,
    "vllm_ms_128_rows_0_drafts": 0.8,
    "vllm_ms_128_rows_3_drafts": 1.0,
    "vllm_ms_128_rows_8_drafts": 1.3,
    "driver_look_ms_256_verifiers_16384_requests": 1.0,
    "driver_us_per_progress_row": 2.0,
    "journal_bytes_per_token": 12.0,
    "simulator_row_steps_per_s": 90_000.0,
}
"""What is aimed at; the simulator's speed is to be high, the others low."""


# ---- the verifier ----


class InstantEngine:
    """A target whose outputs are known. What it takes is told as the forward's time, so it is not counted as ours."""

    vocab_size, max_model_len, weight_version = 1000, 1 << 20, 0

    def __init__(self, rows: int) -> None:
        self._truth = np.zeros((rows, LENGTH), np.int32)
        self._committed = np.zeros(rows, np.int32)
        self._rows = np.zeros(0, np.int32)

    def add(self, row: int, request: TargetRequest) -> None:
        self._truth[row] = output_of(request.sampling.seed)
        self._rows = np.append(self._rows, np.int32(row))

    def decoding(self) -> np.ndarray:
        return self._rows

    def has_work(self) -> bool:
        return len(self._rows) > 0

    def step(self, drafts: Drafts) -> StepResult:
        begin = time.perf_counter()
        rows, drafted, firsts = self._rows, *np.zeros((2, len(self._rows)), np.int32)
        drafted[drafts.rows], firsts[drafts.rows] = drafts.lengths, np.cumsum(drafts.lengths) - drafts.lengths
        drafted, firsts, starts = drafted[rows], firsts[rows], self._committed[rows]
        column = np.arange(drafted.max(initial=0))
        within = column < drafted[:, None]
        guesses = drafts.tokens[np.where(within, firsts[:, None] + column, 0)]
        right = within & (guesses == self._truth[rows[:, None], starts[:, None] + column])
        accepted = np.logical_and.accumulate(right, axis=1).sum(axis=1).astype(np.int32)
        lengths = accepted + np.int32(1)
        column = np.arange(lengths.max(initial=0))
        tokens = self._truth[rows[:, None], starts[:, None] + column][column < lengths[:, None]]
        self._committed[rows] += lengths
        logprobs, finish = np.full(len(tokens), -1.0, np.float32), np.zeros(len(rows), np.uint8)
        result = StepResult(rows, starts, lengths, tokens, logprobs, None, drafted, accepted, finish)
        result.num_tokens = len(rows) + int(drafted.sum())
        result.forward_s = time.perf_counter() - begin
        return result


def output_of(seed: int) -> list[int]:
    output: list[int] = np.random.default_rng(seed).integers(0, 1000, LENGTH).tolist()
    return output


class Oracle:
    """A drafter that knows the outputs and is wrong now and then; its own time is not counted."""

    def __init__(self, drafter_id: str, seeds: Mapping[str, int], branches: int, sends: bool) -> None:
        self.drafter_id, self._branches, self._sends = drafter_id, branches, sends
        self._truth = np.array([output_of(seed) for seed in seeds.values()], np.int32)
        wrong = np.random.default_rng(len(drafter_id)).random(self._truth.shape) > ACCURACY
        self._guesses = np.where(wrong, (self._truth + 1) % 1000, self._truth)
        self._numbers = {request_id: number for number, request_id in enumerate(seeds)}
        self._heard: list[CommitBatch] = []
        self._rows: dict[int, tuple[int, int]] = {}
        """Row → generation and number of its request."""
        self.link: Link[CommitBatch] = Link(direct_sender(self._heard.append))

    def answer(self) -> TailBatch | None:
        """Whole windows after the newest commits."""
        ends: dict[int, int] = {}
        for message in self._heard:
            for one in message.opened:
                self._rows[one.row] = (one.generation, self._numbers[one.request_id])
                ends[one.row] = len(one.committed_token_ids)
            for row, end in zip(message.rows.tolist(), (message.starts + message.lengths).tolist(), strict=True):
                ends[row] = end
        self._heard.clear()
        if not ends:
            return None
        rows, begins = np.array(list(ends), np.int32), np.array(list(ends.values()), np.int32)
        generations, numbers = np.array([self._rows[row] for row in ends], np.int32).T.copy()
        branches = self._branches_of(numbers, begins)
        return TailBatch(
            self.drafter_id,
            rows,
            generations,
            begins,
            np.full(len(rows), WINDOW, np.int32),
            self._guesses[numbers[:, None], begins[:, None] + np.arange(WINDOW)].reshape(-1),
            branches if self._sends else NO_BRANCHES,
            token_s=1e-4,
        )

    def _branches_of(self, numbers: np.ndarray, begins: np.ndarray) -> Branches:
        """At each of the first positions a branch up to the end of the window, right where the tail is wrong."""
        ats = np.arange(self._branches, dtype=np.int32)
        places = begins[:, None, None] + ats[:, None] + np.arange(WINDOW)
        tokens = self._truth[numbers[:, None, None], places]
        right = tokens[..., 0] == self._guesses[numbers[:, None], places[..., 0]]
        tokens[..., 0] = (tokens[..., 0] + right) % 1000
        within = np.broadcast_to(ats[:, None] + np.arange(WINDOW) < WINDOW, tokens.shape)
        owners = np.repeat(np.arange(len(numbers), dtype=np.int32), self._branches)
        sizes = np.tile(WINDOW - ats, len(numbers))
        return Branches(owners, np.tile(ats, len(numbers)), sizes, tokens[within])


def verifier_x(rows: int, drafters: int, branches: int) -> float:
    """The time of a verify step with branches over that without. They are made in both, since what that leaves in the
    caches of the processor makes the step slower."""
    return verifier_ms(rows, drafters, branches) / verifier_ms(rows, drafters, branches, sends=False)


def verifier_ms(rows: int, drafters: int, branches: int = 0, sends: bool = True) -> float:
    """Milliseconds of one verify step: taking tails in, deciding, committing, telling drafters and rollout."""
    seeds = {f"request-{number}": number for number in range(rows)}
    oracles = [Oracle(f"oracle{number}-0#1", seeds, branches, sends) for number in range(drafters)]
    engine = InstantEngine(rows)
    config = SpeculationConfig(window=WINDOW, verify=VerifyPolicy.all, race=RaceName.always)
    drafting = Drafting("verifier-0#1", False, config, engine.vocab_size, max_batch=rows, branches=branches)
    loop = VerifyLoop(engine, drafting)  # type: ignore[arg-type]  # the methods that the loop does not call here
    loop.submit(
        [TargetRequest(name, (1, 2, 3), SamplingParams(seed=seed, max_tokens=LENGTH)) for name, seed in seeds.items()]
    )
    loop.set_drafters(
        {
            one.drafter_id: DrafterLink(
                DrafterSpec(one.drafter_id.split("-")[0], window=WINDOW, max_batch=rows), one.link
            )
            for one in oracles
        }
    )
    spent, read = [], 0
    for _ in range(WARM_UP + STEPS):
        answers = [answer for one in oracles if (answer := one.answer()) is not None]
        before = loop.metrics.forward_s
        begin = time.perf_counter()
        for answer in answers:
            loop.deliver(answer)
        loop.run_once()
        spent.append(time.perf_counter() - begin - (loop.metrics.forward_s - before))
        first, events = loop.poll(read, 0.0)
        read = first + len(events)
    metrics = loop.metrics
    length, rescues = metrics.committed_tokens / metrics.row_steps, metrics.commit_rescues / metrics.row_steps
    print(f"{length:.2f} tokens a row and step, {rescues:.2f} rescues", file=sys.stderr)
    return 1e3 * median(spent[WARM_UP:])


# ---- the vLLM engine ----


class StubbedCore:
    """vLLM around our engine and sampler, in no time: every draft is right, and every step schedules all rows."""

    def __init__(self, rows: int, drafts: int) -> None:
        from specactor_ray.target.vllm_worker import KeyedSampler

        self.drafts, self.seconds = drafts, 0.0
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        packed = np.full((rows, 2 + 3 * (1 + drafts)), 7, np.int64)
        packed[:, 0], packed[:, 1] = 1 + drafts, 0
        self.packed = packed
        self.sampler = self.rejection_sampler = None
        self.device, self._logits = torch.device("cpu"), torch.zeros(rows * (1 + drafts), 8)
        self.discard_request_mask = SimpleNamespace(np=np.zeros(rows, bool))
        self.input_batch = SimpleNamespace(req_ids=[], num_computed_tokens_cpu=np.zeros(rows, np.int32))
        self.num_scheduled_tokens = SimpleNamespace(np=np.full(rows, 1 + drafts, np.int32))
        self.model_executor = self
        self.keyed = KeyedSampler(self, (), False)
        self.keyed.install()

    def preprocess_add_request(self, request: Any) -> tuple[Any, int]:
        return request, 0

    def add_request(self, request: Any, wave: int) -> None:
        ours = SimpleNamespace(request_id=request.request_id, sampling_params=request.sampling_params)
        ours.num_tokens, ours.num_computed_tokens = 3, 2
        self.requests[request.request_id] = ours
        self.running.append(ours)
        self.input_batch.req_ids.append(request.request_id)

    def update_draft_token_ids(self, drafts: Any) -> None:
        """vLLM keeps them with its requests."""

    def step_fn(self) -> None:
        begin = time.perf_counter()
        count = 1 + self.drafts
        self.input_batch.num_computed_tokens_cpu[:] = [one.num_computed_tokens for one in self.running]
        for one in self.running:
            one.num_tokens += count
            one.num_computed_tokens += count
        self.seconds += time.perf_counter() - begin
        self.sample_tokens()

    def sample_tokens(self) -> Any:
        """As the executor of a single rank, with our half of its worker."""
        self.keyed.begin(None)
        if not self.drafts:
            self.sampler(logits=self._logits, sampling_metadata=None)
        else:
            rows = len(self.running)
            ids, counts = torch.full((rows * self.drafts,), 7, dtype=torch.int32), [self.drafts] * rows
            metadata = SimpleNamespace(draft_token_ids=ids, num_draft_tokens=counts)
            self.rejection_sampler(metadata, None, self._logits, None)
        return SimpleNamespace(specactor=self.keyed.step)


def vllm_ms(rows: int, drafts: int) -> float:
    """Milliseconds of one step of `VllmEngine` and `KeyedSampler`, without vLLM's own and without the sampling."""
    from specactor_ray.target import vllm, vllm_bridge

    core = StubbedCore(rows, drafts)
    handle = vllm_bridge.EngineCoreHandle.__new__(vllm_bridge.EngineCoreHandle)
    vars(handle).update(_core=core, _scheduler=core, _ranks=1, vocab_size=1000, max_model_len=1 << 20)
    vars(handle).update(_ids={}, _row_of={}, _numbers=itertools.count(), _drafted=False, _done=None)
    handle._watch(core)
    settings = vllm_bridge.CoreSettings("", "", None, rows, rows * (1 + drafts), 0, 64)
    with (
        mock.patch.object(vllm, "EngineCoreHandle", return_value=handle),
        mock.patch("specactor_ray.sampling.keyed._run_numba", return_value=core.packed),
    ):
        engine = vllm.VllmEngine(settings, [2])
        for row in range(rows):
            sampling = SamplingParams(seed=row, max_tokens=LENGTH)
            engine.add(row, TargetRequest(str(row), (1, 2, 3), sampling))
        spent = []
        for _ in range(WARM_UP + STEPS):
            tails = Drafts(
                np.arange(rows, dtype=np.int32),
                np.full(rows, drafts, np.int32),
                np.full(rows * drafts, 7, np.int32),
            )
            before, begin = core.seconds, time.perf_counter()
            engine.decoding()
            engine.step(tails)
            spent.append(time.perf_counter() - begin - (core.seconds - before))
    return 1e3 * median(spent[WARM_UP:])


# ---- the draft loop ----


def draft_loop_ms(rows: int) -> float:
    """Milliseconds of one draft step of n-gram: taking commits in, looking up, publishing."""
    rng = np.random.default_rng(0)
    phrases = rng.integers(0, 1000, (32, 24))
    outputs = [phrases[rng.integers(0, 32, 200)].reshape(-1).astype(np.int32) for _ in range(rows)]
    loop = DraftLoop("ngram-0#1", NgramProposer(max_batch=rows))
    heard: list[TailBatch] = []
    loop.set_verifiers({"verifier-0#1": Link(direct_sender(heard.append))})
    numbers, ends = np.arange(rows, dtype=np.int32), np.full(rows, 400, np.int32)
    nothing = np.zeros(0, np.int32)
    opened = tuple(
        DraftOpen(n, 1 + n, f"request-{n}", (1, 2, 3), tuple(outputs[n][:400].tolist()), SamplingParams(), WINDOW)
        for n in range(rows)
    )
    loop.deliver(CommitBatch("verifier-0#1", *[nothing] * 5, opened))
    loop.run_once()
    spent = []
    for _ in range(WARM_UP + STEPS):
        counts = rng.integers(1, 5, rows).astype(np.int32)
        tokens = np.concatenate([outputs[n][ends[n] : ends[n] + counts[n]] for n in range(rows)])
        message = CommitBatch("verifier-0#1", numbers, 1 + numbers, ends.copy(), counts, tokens)
        ends += counts
        begin = time.perf_counter()
        loop.deliver(message)
        loop.run_once()
        spent.append(time.perf_counter() - begin)
        heard.clear()
    return 1e3 * median(spent[WARM_UP:])


class InstantModel:
    """A model without a forward: every token is 1."""

    device, dtype, vocab_size, max_positions = torch.device("cpu"), torch.float32, 8, LENGTH
    ids, feature_size = None, 0

    def __init__(self, rows: int) -> None:
        self.cache = PagedCache([LayerShape(1, 1, 1)], 8 * rows * LENGTH, self.dtype, self.device)
        self._logits = torch.nn.functional.one_hot(torch.ones(rows, dtype=torch.long), self.vocab_size).float()
        self.spent_s = 0.0

    def forward(self, rows: np.ndarray, counts: np.ndarray, *arrays: np.ndarray) -> RaggedOutput:
        begin = time.thread_time()
        self.cache.lengths[rows] += counts
        output = RaggedOutput(self._logits[: arrays[-1].sum()], None)
        self.spent_s += time.thread_time() - begin
        return output


def model_proposer_us(rows: int, branches: int = 0) -> float:
    """Microseconds of CPU time of `draft_model` for a token of a row or branch, without the forward; of each window one
    half is right."""
    model = InstantModel(rows * (1 + branches))
    proposer = DraftModelProposer(model, rows, branches=branches)  # type: ignore[arg-type]  # what the proposer calls
    proposer.budget = rows * (1 + branches)
    for slot in range(rows):
        sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH)
        proposer.open(slot, f"request-{slot}", (1, 2, 3), (), sampling, WINDOW)
    slots, lengths = np.arange(rows, dtype=np.int32), np.full(rows, WINDOW // 2, np.int32)
    tokens = np.tile(np.array([1] * (WINDOW // 2 - 1) + [2], np.int32), rows)
    spent = []
    for step in range(WARM_UP + STEPS):
        drafted, model.spent_s, begin = 0, 0.0, time.thread_time()
        while len(changed := proposer.extend()):
            drafted += max(proposer.rows_drafted, len(changed))
            proposer.tails(changed)
        proposer.commit(slots, lengths * step, lengths, tokens)
        spent.append((time.thread_time() - begin - model.spent_s) / drafted)
    return 1e6 * median(spent[WARM_UP:])


# ---- the driver ----


class HandClock:
    """Time that moves by calls only; `on_wait` is called in place of a wait for an event."""

    def __init__(self) -> None:
        self._now = 0.0
        self.on_wait: Callable[[], None] = lambda: None

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds

    def event(self) -> HandClock:
        return self

    def wait(self, timeout: float | None = None) -> None:
        self.on_wait()

    def set(self) -> None: ...

    def clear(self) -> None: ...


class InstantCluster:
    """Answers calls of the driver, and times what it does between two waits.

    Args:
        rows: Requests of each verifier that make progress in each answered poll; 0 never answers a poll.
        passes: Waits after which the driver is stopped.
    """

    def __init__(self, clock: HandClock, rows: int, passes: int) -> None:
        self._clock, self._rows, self._passes = clock, rows, passes
        clock.on_wait = self._end_of_pass
        self._answers: dict[object, Any] = {}
        self._pending: dict[object, str] = {}
        self._running: dict[str, list[TargetRequest]] = {f"verifier-{n}#1": [] for n in range(VERIFIERS)}
        self._ends: dict[str, int] = {}
        self._numbers = dict.fromkeys(self._running, 0)
        self.spent: list[float] = []
        self._begin: float | None = None
        self._all_out = False

    # ---- transport ----

    def send(self, actor: Any, method: str, arguments: Sequence[Any]) -> object:
        reference = object()
        if method == "view":
            self._answers[reference] = ClusterView(verifiers={name: name for name in self._running})
        elif method == "submit":
            self._running[actor].extend(arguments[0])
            self._answers[reference] = None
        elif method == "poll":
            self._pending[reference] = actor
        else:
            self._answers[reference] = None
        return reference

    def delivery(self, reference: object) -> InstantCluster:
        return self

    def add_done_callback(self, done: Callable[[Any], None]) -> None: ...

    def wait(self, references: Sequence[object], timeout_s: float) -> set[object]:
        return {one for one in references if one in self._answers}

    def take(self, reference: object, what: str = "the call") -> Any:
        return self._answers.pop(reference)

    def _end_of_pass(self) -> None:
        now = time.perf_counter()
        if self._begin is not None and self._all_out:
            self.spent.append(now - self._begin)
        if len(self.spent) >= self._passes:
            raise KeyboardInterrupt
        self._clock.sleep(0.3)  # longer than the driver waits, so the next pass has begun
        self._all_out = sum(map(len, self._running.values())) == REQUESTS
        if self._all_out and self._rows:
            for reference, actor in self._pending.items():
                self._answers[reference] = self._progress(actor)
            self._pending.clear()
        self._begin = time.perf_counter()

    def _progress(self, actor: str) -> tuple[int, list[ToRollout], dict[str, Any]]:
        running = self._running[actor][: self._rows]
        start, count = self._ends.get(actor, 0), len(running)
        self._ends[actor] = start + 3
        events: list[ToRollout] = [
            Progress(
                tuple((request.request_id, request.attempt) for request in running),
                np.full(count, start, np.int32),
                np.full(count, 3, np.int32),
                np.arange(3 * count, dtype=np.int32),
                np.zeros(3 * count, np.float32),
            )
        ]
        first = self._numbers[actor]
        self._numbers[actor] += len(events)
        return first, events, {}


def driver_pass_ms(rows: int, passes: int) -> float:
    """Milliseconds between two waits of the driver, with all requests handed out."""
    clock = HandClock()
    cluster = InstantCluster(clock, rows, passes)
    dispatcher = Dispatcher("controller", Calls(cluster, clock), REQUESTS // VERIFIERS, 1e6, 1e6)  # type: ignore[arg-type]
    entries = [JournalEntry(f"request-{n}", (1, 2, 3), SamplingParams(max_tokens=LENGTH)) for n in range(REQUESTS)]
    dispatcher.admit(entries)
    with contextlib.suppress(KeyboardInterrupt):
        while not dispatcher.step():
            pass
    return 1e3 * median(cluster.spent[2:])


def driver_us_per_row() -> float:
    """Microseconds of the driver for the progress of one request, journaling included, looking around not."""
    return 1e3 * (driver_pass_ms(REQUESTS // VERIFIERS, 6) - driver_pass_ms(0, 6)) / REQUESTS


def journal_bytes_per_token() -> float:
    """Resident memory of journaled tokens, in a process of its own."""
    text = subprocess.run(
        [sys.executable, __file__, "--journal"], check=True, capture_output=True, text=True, env=dict(os.environ)
    ).stdout
    return float(text)


def measure_journal() -> float:
    from specactor_ray.rollout.journal import Journal

    journal, tokens_each, count = Journal(), 2000, 2000
    rng = np.random.default_rng(0)
    for n in range(count):
        journal.add(JournalEntry(f"request-{n}", (1,), SamplingParams(max_tokens=LENGTH)))
        journal.hand_to(f"request-{n}", "v")
    before, requests = resident(), tuple((f"request-{n}", 1) for n in range(count))
    for start in range(0, tokens_each, 4):
        tokens, logprobs = rng.integers(0, 150_000, 4 * count), rng.random(4 * count)
        starts, lengths = np.full(count, start, np.int32), np.full(count, 4, np.int32)
        journal.progress(Progress(requests, starts, lengths, tokens.astype(np.int32), logprobs.astype(np.float32)))
    gc.collect()
    return (resident() - before) / (tokens_each * count)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- the simulator ----


def simulator_row_steps_per_s() -> float:
    """Row-steps per second of CPU time, of a decoupled verifier of 64 rows and its drafter on virtual time."""
    from specactor_ray.simulation.costs import build_world
    from specactor_ray.simulation.rollouts import SimulatedRollouts
    from specactor_ray.simulation.run import silence
    from specactor_ray.simulation.scenario import load_scenario

    silence()
    rates = []
    for requests in (8, 192, 192, 192):  # the first run imports and compiles
        overrides = [f"workload.requests={requests}", "workload.median_tokens=300", "workload.max_tokens=1000"]
        scenario = load_scenario(ROOT / "conf" / "simulation" / "qwen32b_5xh100.yaml", overrides)
        run = SimulatedRollouts("decoupled", scenario, build_world(scenario))
        begin = time.process_time()
        result = run.run()
        rates.append(result.metrics.row_steps / (time.process_time() - begin))
    return median(rates[1:])


# ---- all of it ----

GROUPS: Mapping[str, Mapping[str, Callable[[], float]]] = {
    "verifier": {
        "verifier_ms_16_rows_1_drafter": lambda: verifier_ms(16, 1),
        "verifier_ms_128_rows_1_drafter": lambda: verifier_ms(128, 1),
        "verifier_ms_256_rows_3_drafters": lambda: verifier_ms(256, 3),
        "verifier_x_128_rows_1_drafter_4_branches": lambda: verifier_x(128, 1, 4),
        "verifier_x_256_rows_3_drafters_4_branches": lambda: verifier_x(256, 3, 4),
    },
    "drafter": {
        "draft_loop_ms_128_rows_ngram": lambda: draft_loop_ms(128),
        "model_proposer_us_128_rows": lambda: model_proposer_us(128),
        "model_proposer_us_128_rows_4_branches": lambda: model_proposer_us(128, 4),
    },
    "vllm": {f"vllm_ms_128_rows_{k}_drafts": functools.partial(vllm_ms, 128, k) for k in (0, 3, 8)},
    "driver": {
        "driver_look_ms_256_verifiers_16384_requests": lambda: driver_pass_ms(0, 12),
        "driver_us_per_progress_row": driver_us_per_row,
        "journal_bytes_per_token": journal_bytes_per_token,
    },
    "simulator": {"simulator_row_steps_per_s": simulator_row_steps_per_s},
}


def measure(groups: Sequence[str]) -> Iterator[tuple[str, float]]:
    for group in groups:
        for name, function in GROUPS[group].items():
            gc.collect()
            yield name, function()


def measure_base(revision: str, groups: Sequence[str]) -> dict[str, float]:
    """The figures of another revision, by its own copy of this script."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        subprocess.run(["git", "worktree", "add", "--detach", str(tree), revision], cwd=ROOT, check=True, stdout=2)
        try:
            report = Path(folder) / "report.json"
            command = [sys.executable, "scripts/bench_protocol.py", *groups, "--json", str(report)]
            environment = {**os.environ, "PYTHONPATH": str(tree)}
            subprocess.run(command, cwd=tree, check=True, stdout=2, env=environment)
            figures: dict[str, float] = json.loads(report.read_text())
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True, stdout=2)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"{', '.join(GROUPS)}; default: all")
    parser.add_argument("--base", metavar="REVISION", help="also run this revision's copy, and print ratios")
    parser.add_argument("--json", metavar="FILE", help="write one object with all figures")
    parser.add_argument("--journal", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.journal:
        print(measure_journal())
        return
    logging.getLogger("specactor_ray").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    groups = arguments.groups or [name for name in GROUPS if name != "vllm" or importlib.util.find_spec("vllm")]
    if unknown := [group for group in groups if group not in GROUPS]:
        parser.error(f"{unknown[0]}: no such group; there are {', '.join(GROUPS)}")
    if arguments.json and Path(arguments.json).exists():
        parser.error(f"--json: {arguments.json} exists and is never overwritten; name another file")
    verify = ["git", "rev-parse", "-q", "--verify", f"{arguments.base}^{{commit}}"]
    if arguments.base and subprocess.run(verify, check=False, cwd=ROOT, capture_output=True).returncode:
        parser.error(f"--base: {arguments.base} is no revision of this repository; name a commit")
    base = measure_base(arguments.base, groups) if arguments.base else {}
    table = Table("figure", "now", "asked", *(["base", "x"] if base else []))
    console, figures = Console(), {}
    for name, value in measure(groups):
        figures[name] = value
        before = [f"{base[name]:,.2f}", f"{value / base[name]:.3f}"] if name in base else []
        asked = f"{ASKED[name]:g}" if name in ASKED else ""
        table.add_row(name, f"{value:,.2f}", asked, *before)
        print(f"{name}: {value:,.2f}", file=sys.stderr)
    console.print(table)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
