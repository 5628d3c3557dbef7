"""Stage `engine`, and its parts shared with `vllm`: batches of requests in the package's loop around an engine.

The drafter is an oracle, so its accuracy is an argument and drafting is free: the stage measures verification and the
loop. The oracle has the output of the plain run; a request whose tokens have flipped in low precision has another
output from there on, and its oracle is wrong.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specactor_ray.bench.gpu_check.models import ragged_model
from specactor_ray.bench.gpu_check.settings import Cell, Settings
from specactor_ray.bench.gpu_check.stages import Stage
from specactor_ray.config.drafter_spec import DrafterSpec
from specactor_ray.config.methods import Traits
from specactor_ray.config.schema import RaceName, SpeculationConfig, VerifyPolicy
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.draft.slots import RowProposer
from specactor_ray.target.base import TargetEngine, TargetRequest
from specactor_ray.target.hf import HfEngine
from specactor_ray.transport.link import Link, direct_sender
from specactor_ray.transport.messages import Finished, Progress
from specactor_ray.verify.drafting import Drafting, HostedDrafter
from specactor_ray.verify.loop import VerifyLoop

STEP_TOKENS, WINDOW, _WARM_UP_TOKENS = 2048, 8, 4


def measure_engine(stage: Stage) -> None:
    """Fill a point per shape, dtype, requests and way with the `hf` engine; see `Batch.run`."""
    settings, batches = stage.settings, dict[Cell, CellRequests]()

    def measure(cell: Cell, way: str) -> str:
        if cell not in batches:
            batches.clear()
            tokens = cell.rows * (settings.prompt + settings.tokens + 256)
            model = ragged_model(cell.shape, cell.dtype, settings.device, tokens)
            engine = HfEngine(model, max_batch=cell.rows, max_step_tokens=STEP_TOKENS)
            batches[cell] = CellRequests(stage, engine, cell, {})
        return batches[cell].run(way)

    stage.each([(cell, way) for cell in settings.engine_cells for way in settings.ways], measure)


class OracleProposer(RowProposer):
    """Drafts the tokens of plain decoding (request id → tokens). A position is wrong with probability 1 - `accuracy`,
    the same ones in every call; a wrong token is the right token's successor in the vocabulary."""

    method = "oracle"
    traits = Traits(looks_up=True)

    def __init__(self, outputs: Mapping[str, Sequence[int]], accuracy: float, vocab_size: int) -> None:
        super().__init__(max_batch=1 << 20)
        self.vocab_size: int | None = vocab_size
        self._guesses: dict[str, list[int]] = {}
        for request_id, tokens in outputs.items():
            rng = random.Random(request_id)
            self._guesses[request_id] = [t if rng.random() < accuracy else (t + 1) % vocab_size for t in tokens]

    def guess(self, slot: int, prompt: np.ndarray, output: np.ndarray, room: int) -> Sequence[int]:
        return self._guesses.get(self.request_ids[slot], [])[len(output) : len(output) + room]


class CellRequests:
    """The requests of a cell, which an engine decodes in several ways; `key`: further columns that name the points."""

    def __init__(self, stage: Stage, engine: TargetEngine, cell: Cell, key: dict[str, str]) -> None:
        self._stage, self._engine, self._settings = stage, engine, stage.settings
        self._key, self._requests = {**key, **cell.columns}, requests(stage.settings, cell)
        self._plain: dict[str, list[int]] = {}
        self._plain_s = 0.0

    def run(self, way: str) -> str:
        """Decode the requests and add a point: tokens/s, prompts included, and times plain's; acceptance length (tokens
        a row and step); median ms of a step, means of its forward, sampling and Python; requests whose tokens are not
        plain's. Ways: `plain`; `k=3`, three drafts a row; `auto`, as many as pay, by the package's policy."""
        self._decode(way, _WARM_UP_TOKENS, warm_up=True)  # compiles and allocates
        outputs, steps, counters = self._decode(way, self._settings.tokens)
        if way == "plain":
            self._plain, self._plain_s = outputs, sum(steps)
        parts = {name: counters[f"{name}_s"] for name in ("forward", "sampling")}
        parts["Python"] = sum(steps) - sum(parts.values())
        point = {
            "tokens/s": sum(map(len, outputs.values())) / sum(steps),
            "x plain": self._plain_s / sum(steps) or None,
            "acc. length": counters["committed_tokens"] / counters["row_steps"],
            "step ms": 1e3 * statistics.median(steps),
            **{f"{name} ms": 1e3 * one / len(steps) for name, one in parts.items()},
            "differ": sum(tokens != outputs[name] for name, tokens in self._plain.items()),
        }
        self._stage.point({**self._key, "way": way}, **point)
        return f"{point['tokens/s']:.0f} tokens/s, {point['step ms']:.2f} ms a step"

    def _decode(
        self, way: str, tokens: int, warm_up: bool = False
    ) -> tuple[dict[str, list[int]], list[float], dict[str, Any]]:
        """Outputs of this length, seconds of each step, and the loop's counters. Leaves the engine free."""
        fixed, vocab_size, steps = int(way.partition("=")[2] or 0), self._engine.vocab_size, list[float]()
        verify, race = (VerifyPolicy.all, RaceName.always) if fixed else (VerifyPolicy.auto, RaceName.off)
        config = SpeculationConfig(window=fixed or WINDOW, verify=verify, race=race)
        drafting = Drafting("verifier-0", True, config, vocab_size, max_batch=len(self._requests))
        oracle = OracleProposer(self._plain, self._settings.accuracy, vocab_size)
        drafter = DraftLoop("oracle-0", oracle)
        spec = DrafterSpec(oracle.method, window=config.window, traits=oracle.traits)
        hosted = HostedDrafter(spec, Link(direct_sender(drafter.deliver)), drafter)
        verifier = VerifyLoop(self._engine, drafting, [] if way == "plain" else [hosted])
        verifier.submit([replace(one, sampling=replace(one.sampling, max_tokens=tokens)) for one in self._requests])
        working, stage = True, self._stage

        def advance() -> None:
            nonlocal working
            working = verifier.run_once()

        try:
            while working:
                steps.append(stage.seconds(advance) if warm_up else stage.step(advance, len(steps), 2 * tokens))
        finally:
            for row in range(len(drafting.table.requests)):
                self._engine.remove(row)
        outputs: dict[str, list[int]] = {request.request_id: [] for request in self._requests}
        for event in verifier.poll(0, 0.0)[1]:
            if isinstance(event, Finished) and event.finish_reason == "error":
                raise RuntimeError(f"{event.request_id} failed: {event.error}")
            for request_id, new, _, _ in event.rows() if isinstance(event, Progress) else ():
                outputs[request_id] += new
        return outputs, steps[:-1], verifier.snapshot()  # the last call found nothing to do


def requests(settings: Settings, cell: Cell) -> list[TargetRequest]:
    """Random prompts, each with a seed of its own, at temperature 1."""
    rng = random.Random(7)
    prompts = [tuple(rng.randrange(cell.shape.vocab_size) for _ in range(settings.prompt)) for _ in range(cell.rows)]
    sampling = [SamplingParams(1.0, max_tokens=settings.tokens, seed=i, ignore_eos=True) for i in range(cell.rows)]
    return [TargetRequest(f"r{i}", *pair) for i, pair in enumerate(zip(prompts, sampling, strict=True))]
