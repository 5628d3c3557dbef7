"""Stage 7: whole rollouts of a batch in one process: plain, coupled, decoupled, with the product's loops and engine.

The drafter is an oracle, so its accuracy is dialled and drafting is free: what is measured is the cost of verifying and
of our loops. Coupled, the verifier's loop drives it; decoupled, it has a `DraftLoop` in a thread of its own. Oracles
know the output of a first, plain run; a request whose tokens have once flipped in low precision has another output from
there on, and its oracle is wrong. In float32 flips hardly occur, so those figures come first.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from specactor_ray.benchmarks.gpu_check.models import random_model
from specactor_ray.benchmarks.gpu_check.oracle import OracleProposer
from specactor_ray.benchmarks.gpu_check.settings import EndToEndGrid
from specactor_ray.benchmarks.gpu_check.stages import Stage
from specactor_ray.config.drafter_spec import DrafterSpec
from specactor_ray.config.schema import SpeculationConfig
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.messages import CommitBatch, Finished, Mode, Progress, SamplingParams
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.queues.link import Link, direct_sender
from specactor_ray.target.base import TargetRequest
from specactor_ray.target.hf import HfEngine
from specactor_ray.verify.drafting import Drafting
from specactor_ray.verify.loop import VerifyLoop
from specactor_ray.verify.seat import DrafterLink, HostedDrafter

_VERIFIER, _DRAFTER = "verifier-0", "oracle-0"
_STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of all requests."""

    tokens: dict[str, list[int]]
    margins: dict[str, list[float]]
    """Perturbed top-2 margins, if the engine recorded them."""
    seconds: float
    """From the first request's submission to the last one's end, prompts included."""
    counters: Mapping[str, Any]
    """Of the verifier's loop."""


def measure_end_to_end(stage: Stage) -> None:
    """Fill `runs`: per dtype, batch, mode and accuracy tokens/s, acceptance length (tokens a row and step), ratio to
    plain, seconds by part, and the tokens that differ from plain's."""
    grid = stage.settings.end_to_end
    stage.figures |= {"shape": grid.shape.name, "window": grid.window, "output_tokens": grid.tokens, "runs": []}
    for dtype in dict.fromkeys(dtype for dtype, _ in grid.cells):
        stage.check(dtype)
        batches = [batch for name, batch in grid.cells if name == dtype]
        model = random_model(grid.shape, dtype, stage.settings.device)
        tokens = max(batches) * (grid.prompt + grid.tokens + 256)
        ragged = RaggedModel(model, grid.shape.cache_bytes(tokens, getattr(torch, dtype).itemsize))
        for batch in batches:
            _measure_batch(stage, HfEngine(ragged, max_batch=batch, max_step_tokens=_STEP_TOKENS), dtype, batch)


def _measure_batch(stage: Stage, engine: HfEngine, dtype: str, batch: int) -> None:
    grid = stage.settings.end_to_end
    requests = _requests(grid, batch)
    engine.record_margins = True
    truth = run_mode(stage, engine, requests, Mode.PLAIN, None)  # also warms up
    engine.record_margins = False
    plain = run_mode(stage, engine, requests, Mode.PLAIN, None)

    def add(mode: Mode, accuracy: float | None, outcome: Outcome) -> None:
        entry = {"dtype": dtype, "batch": batch, "mode": str(mode), "accuracy": accuracy}
        entry |= _figures(outcome, truth, plain)
        stage.figures["runs"].append(entry)
        stage.note(_line(entry))

    add(Mode.PLAIN, None, plain)
    for accuracy in grid.accuracies:
        for mode in (Mode.COUPLED, Mode.DECOUPLED):
            oracle = OracleProposer(truth.tokens, accuracy, engine.vocab_size)
            add(mode, accuracy, run_mode(stage, engine, requests, mode, oracle))


def _requests(grid: EndToEndGrid, batch: int) -> list[TargetRequest]:
    rng = random.Random(7)
    return [
        TargetRequest(
            f"r{i}",
            tuple(rng.randrange(grid.shape.vocab) for _ in range(grid.prompt)),
            SamplingParams(1.0, max_tokens=grid.tokens, seed=i, ignore_eos=True),
        )
        for i in range(batch)
    ]


def run_mode(
    stage: Stage, engine: HfEngine, requests: Sequence[TargetRequest], mode: Mode, oracle: OracleProposer | None
) -> Outcome:
    """Run all requests to their end; the engine is free again afterwards, also after an interruption."""
    config = SpeculationConfig(window=stage.settings.end_to_end.window)
    drafting = Drafting(_VERIFIER, mode is Mode.COUPLED, config, engine.vocab_size, max_batch=len(requests))
    try:
        with _loop(engine, drafting, mode, oracle, config.window) as verifier:
            begin = time.perf_counter()
            verifier.submit(requests)
            while verifier.run_once():
                stage.check(f"the end of a run of {len(requests)} requests, {mode}")
            seconds = time.perf_counter() - begin
            _, events = verifier.poll(0, 0.0)
            counters = verifier.snapshot()
    finally:
        for row in range(len(drafting.table.requests)):
            engine.remove(row)
    failed = [event.error for event in events if isinstance(event, Finished) and event.finish_reason == "error"]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    outcome = Outcome({r.request_id: [] for r in requests}, {r.request_id: [] for r in requests}, seconds, counters)
    for event in events:
        for request_id, tokens, _, margins in event.rows() if isinstance(event, Progress) else ():
            outcome.tokens[request_id] += tokens
            outcome.margins[request_id] += margins
    return outcome


@contextmanager
def _loop(
    engine: HfEngine, drafting: Drafting, mode: Mode, oracle: OracleProposer | None, window: int
) -> Iterator[VerifyLoop]:
    """The verifier's loop, with its drafter connected as the mode asks."""
    if oracle is None:
        yield VerifyLoop(engine, drafting)
        return
    drafter = DraftLoop(_DRAFTER, oracle)
    link: Link[CommitBatch] = Link(direct_sender(drafter.deliver))
    spec = DrafterSpec(oracle.method, window=window, traits=oracle.traits)
    if mode is Mode.COUPLED:
        yield VerifyLoop(engine, drafting, [HostedDrafter(spec, link, drafter)])
        return
    verifier = VerifyLoop(engine, drafting)
    drafter.set_verifiers({_VERIFIER: Link(direct_sender(verifier.deliver))})
    verifier.set_drafters({_DRAFTER: DrafterLink(spec, link)})
    thread = threading.Thread(target=drafter.run, name="draft", daemon=True)
    thread.start()
    try:
        yield verifier
    finally:
        drafter.stop()
        thread.join(10.0)


def _figures(outcome: Outcome, truth: Outcome, plain: Outcome) -> dict[str, Any]:
    counters = outcome.counters
    committed = sum(map(len, outcome.tokens.values()))
    parts = ("steps", "supplied_tokens", "drafted_tokens", "accepted_tokens")
    seconds = ("forward_s", "sampling_s", "waiting_s", "protocol_s")
    return {
        "tokens_per_s": committed / outcome.seconds,
        "ratio_to_plain": plain.seconds / outcome.seconds,
        "acceptance_length": counters["committed_tokens"] / counters["row_steps"],
        "tokens": committed,
        "seconds": outcome.seconds,
        **{name: counters[name] for name in (*parts, *seconds)},
        **differences(truth, outcome),
    }


def differences(truth: Outcome, outcome: Outcome) -> dict[str, Any]:
    """Requests whose tokens are not those of the first plain run, the tokens from the first different one on, and for
    each such request `[output position, margin]` of the first difference: the margin of the plain run."""
    first = {}
    for request_id, tokens in truth.tokens.items():
        others = outcome.tokens[request_id]
        position = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), None)
        if position is None and len(tokens) != len(others):
            position = min(len(tokens), len(others))
        if position is not None:
            first[request_id] = position
    return {
        "different_requests": len(first),
        "different_tokens": sum(len(truth.tokens[request_id]) - position for request_id, position in first.items()),
        "first_differences": [
            [i, truth.margins[r][i] if i < len(truth.margins[r]) else -1.0] for r, i in first.items()
        ],
    }


def _line(entry: Mapping[str, Any]) -> str:
    dial = "" if entry["accuracy"] is None else f" {entry['accuracy']:g}"
    return (
        f"{entry['dtype']}, {entry['batch']} requests, {entry['mode']}{dial}: {entry['tokens_per_s']:.0f} tokens/s"
        f" ({entry['ratio_to_plain']:.2f}x), {entry['acceptance_length']:.2f} tokens a row and step,"
        f" {entry['different_requests']} requests differ from plain"
    )
