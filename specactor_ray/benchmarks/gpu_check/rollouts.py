"""Stage `engine`, and what `vllm` shares with it: batches in one process, with the product's loops around an engine.

The drafter is an oracle, so its accuracy is dialled and drafting is free: what is measured is verification and our
loops. It has the output of the plain run; a request whose tokens have once flipped in low precision has another output
from there on, and its oracle is wrong.
"""

from __future__ import annotations

import random
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specactor_ray.benchmarks.gpu_check.models import ragged_model
from specactor_ray.benchmarks.gpu_check.oracle import OracleProposer
from specactor_ray.benchmarks.gpu_check.settings import ModelShape, RolloutGrid
from specactor_ray.benchmarks.gpu_check.stages import Stage
from specactor_ray.config.drafter_spec import DrafterSpec
from specactor_ray.config.schema import RaceName, SpeculationConfig, VerifyPolicy
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.messages import CommitBatch, Finished, Progress, SamplingParams
from specactor_ray.queues.link import Link, direct_sender
from specactor_ray.target.base import TargetEngine, TargetRequest
from specactor_ray.target.hf import HfEngine
from specactor_ray.verify.drafting import Drafting
from specactor_ray.verify.loop import VerifyLoop
from specactor_ray.verify.seat import DrafterLink, HostedDrafter

Columns = dict[str, Any]
STEP_TOKENS = 2048
WINDOW = 8
_VERIFIER, _DRAFTER = "verifier-0", "oracle-0"


def measure_engine(stage: Stage) -> None:
    """Fill a point per shape, dtype, requests and way with the `hf` engine; see `Batch.run`."""
    grid, batches = stage.settings.engine, dict[tuple[Any, ...], Batch]()

    def measure(shape: ModelShape, dtype: str, rows: int, way: str) -> str:
        cell = (shape, dtype, rows)
        if cell not in batches:
            batches.clear()
            model = ragged_model(shape, dtype, stage.settings.device, rows * (grid.prompt + grid.tokens + 256))
            batches[cell] = Batch(stage, HfEngine(model, max_batch=rows, max_step_tokens=STEP_TOKENS), grid, {}, *cell)
        return batches[cell].run(way)

    stage.each([(*cell, way) for cell in grid.cells for way in grid.ways], measure)


class Batch:
    """The requests of a cell, which an engine decodes in several ways.

    Args:
        stage: Takes the points.
        engine: Free between two runs.
        grid: Lengths, and the oracle's accuracy.
        head: First columns of the points.
        shape, dtype: Of the model.
        rows: Requests.
    """

    def __init__(
        self,
        stage: Stage,
        engine: TargetEngine,
        grid: RolloutGrid,
        head: Columns,
        shape: ModelShape,
        dtype: str,
        rows: int,
    ) -> None:
        self._stage, self._engine, self._grid = stage, engine, grid
        self._head = {**head, "shape": shape.name, "dtype": dtype, "rows": rows}
        self.requests = requests(grid, shape, rows)
        self._plain: dict[str, list[int]] = {}
        self._plain_s = 0.0

    def run(self, way: str) -> str:
        """Decode the requests and add a point: tokens/s, prompts included, and how many times plain's; tokens a row and
        step; median ms of the steps, and means of forward, sampling, waits for drafts and our Python; requests whose
        tokens are not plain's.

        Args:
            way: `plain`; `k=3`: three drafts a row, always; `auto`: as many as pays, by the product's policy;
                `decoupled`: likewise, from a drafter in a thread of its own.
        """
        if not self._plain:
            self._decode("plain")  # compiles and allocates
        outputs, steps, seconds, counters = self._decode(way)
        if way == "plain":
            self._plain, self._plain_s = outputs, seconds
        parts = {name: counters[f"{name}_s"] for name in ("forward", "sampling", "waiting")}
        parts["python"] = sum(steps) - sum(parts.values())
        point = {
            "tokens/s": sum(map(len, outputs.values())) / seconds,
            "x plain": self._plain_s / seconds,
            "tokens/row/step": counters["committed_tokens"] / max(counters["row_steps"], 1),
            "step ms": 1e3 * statistics.median(steps),
            **{f"{name} ms": 1e3 * one / len(steps) for name, one in parts.items()},
            "differ": sum(tokens != outputs[name] for name, tokens in self._plain.items()),
        }
        self._stage.point(**self._head, way=way, **point)
        return f"{point['tokens/s']:.0f} tokens/s ({point['x plain']:.2f}x), {point['step ms']:.2f} ms a step"

    def _decode(self, way: str) -> tuple[dict[str, list[int]], list[float], float, dict[str, Any]]:
        """Outputs, seconds of each step, their sum, and the loop's counters. Leaves the engine free, also on errors."""
        fixed = int(way.partition("=")[2] or 0)
        verify, race = (VerifyPolicy.all, RaceName.always) if fixed else (VerifyPolicy.auto, RaceName.off)
        config = SpeculationConfig(window=fixed or WINDOW, verify=verify, race=race)
        vocab_size, steps, most = self._engine.vocab_size, list[float](), 2 * self._grid.tokens
        drafting = Drafting(_VERIFIER, way != "decoupled", config, vocab_size, max_batch=len(self.requests))
        oracle = OracleProposer(self._plain, self._grid.accuracy, vocab_size)
        try:
            with _loop(self._engine, drafting, way, oracle, config.window) as verifier:
                verifier.submit(self.requests)
                running = [True]
                while running.pop():
                    steps.append(self._stage.step(lambda: running.append(verifier.run_once()), len(steps), most))
                _, events = verifier.poll(0, 0.0)
                counters = verifier.snapshot()
        finally:
            for row in range(len(drafting.table.requests)):
                self._engine.remove(row)
        outputs: dict[str, list[int]] = {request.request_id: [] for request in self.requests}
        for event in events:
            if isinstance(event, Finished) and event.finish_reason == "error":
                raise RuntimeError(f"{event.request_id} failed: {event.error}")
            for request_id, tokens, _, _ in event.rows() if isinstance(event, Progress) else ():
                outputs[request_id] += tokens
        return outputs, steps[:-1], sum(steps), counters  # the last call finds nothing to do


def requests(grid: RolloutGrid, shape: ModelShape, rows: int) -> list[TargetRequest]:
    """Random prompts, each with a seed of its own, at temperature 1."""
    rng = random.Random(7)
    prompts = [tuple(rng.randrange(shape.vocab) for _ in range(grid.prompt)) for _ in range(rows)]
    sampling = [SamplingParams(1.0, max_tokens=grid.tokens, seed=i, ignore_eos=True) for i in range(rows)]
    return [TargetRequest(f"r{i}", *pair) for i, pair in enumerate(zip(prompts, sampling, strict=True))]


@contextmanager
def _loop(
    engine: TargetEngine, drafting: Drafting, way: str, oracle: OracleProposer, window: int
) -> Iterator[VerifyLoop]:
    """The verifier's loop with its drafter: none, hosted, or in a thread."""
    if way == "plain":
        yield VerifyLoop(engine, drafting)
        return
    drafter = DraftLoop(_DRAFTER, oracle)
    link: Link[CommitBatch] = Link(direct_sender(drafter.deliver))
    spec = DrafterSpec(oracle.method, window=window, traits=oracle.traits)
    if way != "decoupled":
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
