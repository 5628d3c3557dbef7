#!/usr/bin/env python3
"""What our own Python costs, without Ray and without models: loops of verifiers and drafters.

The engine takes no time (what it takes here is subtracted), and drafters have the outputs. Each figure is the median
CPU time over steps after a warm-up, in one process on one thread.

    python scripts/bench_protocol.py --json FILE
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np
import torch

from points import JsonFile, run_script, show_points
from specactor_ray.config.methods import DrafterSpec, traits
from specactor_ray.config.schema import RaceName, SpeculationConfig, VerifyPolicy
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.lookup import NgramProposer, SuffixProposer
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.draft.runner import DraftRunner
from specactor_ray.models.paged_cache import LayerShape, PagedCache
from specactor_ray.table.requests import TargetRequest
from specactor_ray.table.table import RequestTable
from specactor_ray.table.view import TableView
from specactor_ray.target.base import Drafts, StepResult
from specactor_ray.transport.link import Link, direct_sender
from specactor_ray.transport.messages import CommitBatch, DraftOpen, TailBatch
from specactor_ray.verify.drafting import DrafterLink, Drafting, HostedDrafter
from specactor_ray.verify.loop import VerifyLoop

WARM_UP, STEPS = 24, 120
WINDOW, ACCURACY = 8, 0.75
LENGTH = 1 << 14


# ---- the verifier ----


class InstantEngine:
    """A target with known outputs. Its time is reported as that of the forward; `spent_s`: its CPU time, which is
    not counted as ours."""

    vocab_size, max_model_len, weight_version = 1000, 1 << 20, 0

    def __init__(self, rows: int) -> None:
        self.spent_s, self.table = 0.0, RequestTable(vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        self._truth = np.zeros((rows, LENGTH), np.int32)
        self._rows = np.zeros(0, np.int32)

    def add(self, row: int) -> None:
        self._truth[row] = output_of(self.table.requests[row].sampling.seed)
        self._rows = np.append(self._rows, np.int32(row))

    def decoding(self) -> np.ndarray:
        return self._rows

    def has_work(self) -> bool:
        return len(self._rows) > 0

    def step(self, drafts: Drafts, window: int = 0) -> StepResult:
        begin = time.thread_time()
        rows, drafted, firsts = self._rows, *np.zeros((2, len(self._rows)), np.int32)
        drafted[drafts.rows], firsts[drafts.rows] = drafts.lengths, np.cumsum(drafts.lengths) - drafts.lengths
        drafted, firsts, starts = drafted[rows], firsts[rows], self.table.committed[rows]
        column = np.arange(drafted.max(initial=0))
        within = column < drafted[:, None]
        guesses = drafts.tokens[np.where(within, firsts[:, None] + column, 0)]
        right = within & (guesses == self._truth[rows[:, None], starts[:, None] + column])
        accepted = np.logical_and.accumulate(right, axis=1).sum(axis=1).astype(np.int32)
        lengths = accepted + np.int32(1)
        column = np.arange(lengths.max(initial=0))
        tokens = self._truth[rows[:, None], starts[:, None] + column][column < lengths[:, None]]
        self.table.append(rows, lengths, tokens)
        logprobs, finish = np.full(len(tokens), -1.0, np.float32), np.zeros(len(rows), np.uint8)
        result = StepResult(rows, starts, lengths, tokens, logprobs, None, drafted, accepted, finish)
        result.num_tokens = len(rows) + int(drafted.sum())
        result.forward_s = time.thread_time() - begin
        self.spent_s += result.forward_s
        return result


def output_of(seed: int) -> list[int]:
    """An output of phrases, which it has in common with others."""
    phrases = np.random.default_rng(0).integers(0, 1000, (256, 16))
    output: list[int] = phrases[np.random.default_rng(seed).integers(0, 256, LENGTH // 16)].reshape(-1).tolist()
    return output


class Oracle:
    """A drafter that reads the outputs and is wrong now and then; its own time is not counted."""

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
        tails = self._tails(numbers, begins)[:, : None if self._sends else 1]
        handles = (np.repeat(column, tails.shape[1]) for column in (rows, generations, begins))
        lengths = np.full(len(rows) * tails.shape[1], WINDOW, np.int32)
        return TailBatch(self.drafter_id, *handles, lengths, tails.reshape(-1), token_s=1e-4)

    def _tails(self, numbers: np.ndarray, begins: np.ndarray) -> np.ndarray:
        """int32 `(rows, 1 + branches, WINDOW)`: the main chain, and at each of the first positions a branch, right
        where that is wrong."""
        places = begins[:, None] + np.arange(WINDOW)
        truth, main = self._truth[numbers[:, None], places], self._guesses[numbers[:, None], places]
        ats, column = np.arange(self._branches)[:, None], np.arange(WINDOW)
        others = np.where(column < ats, main[:, None], truth[:, None])
        others[(column == ats) & (truth == main)[:, None]] += 1
        return np.concatenate([main[:, None], others % 1000], axis=1)


def verifier_x(rows: int, drafters: int, branches: int) -> float:
    """The time of a verify step with branches over that without. They are made in both, since what that leaves in the
    caches of the processor makes the step slower."""
    return verifier_ms(rows, drafters, branches) / verifier_ms(rows, drafters, branches, sends=False)


def verifier_ms(rows: int, drafters: int, branches: int = 0, sends: bool = True) -> float:
    """Milliseconds of one verify step: taking tails in, deciding, committing, messages to drafters and rollout."""
    seeds = {f"request-{number}": number for number in range(rows)}
    oracles = [Oracle(f"oracle{number}-0#1", seeds, branches, sends) for number in range(drafters)]
    engine = InstantEngine(rows)
    config = SpeculationConfig(window=WINDOW, verify=VerifyPolicy.all, race=RaceName.always)
    drafting = Drafting("verifier-0#1", False, config, engine.table, max_batch=rows, branches=branches)
    loop = VerifyLoop(engine, drafting)  # type: ignore[arg-type]  # the methods that the loop does not call here
    loop.set_drafters(
        {
            one.drafter_id: DrafterLink(
                DrafterSpec(one.drafter_id.split("-")[0], window=WINDOW, max_batch=rows), one.link
            )
            for one in oracles
        }
    )
    return steps_ms(engine, loop, seeds, oracles)


def hosted_ms(rows: int) -> float:
    """Milliseconds of one verify step with a hosted `suffix`, its look-ups included."""
    engine, config = InstantEngine(rows), SpeculationConfig(window=WINDOW, verify=VerifyPolicy.all)
    drafting = Drafting("verifier-0#1", True, config, engine.table, max_batch=rows)
    spec = DrafterSpec("suffix", window=WINDOW, max_batch=rows, traits=traits("suffix"))
    hosted = HostedDrafter(spec, DraftRunner("suffix-0#1", SuffixProposer(max_batch=rows)))
    loop = VerifyLoop(engine, drafting, [hosted])  # type: ignore[arg-type]  # as above
    return steps_ms(engine, loop, {f"request-{number}": number for number in range(rows)})


def steps_ms(
    engine: InstantEngine, loop: VerifyLoop, seeds: Mapping[str, int], oracles: Sequence[Oracle] = ()
) -> float:
    """Median milliseconds of a step of requests with these seeds."""
    loop.submit(
        [TargetRequest(name, (1, 2, 3), SamplingParams(seed=seed, max_tokens=LENGTH)) for name, seed in seeds.items()]
    )
    spent, read = [], 0
    for _ in range(WARM_UP + STEPS):
        answers = [answer for one in oracles if (answer := one.answer()) is not None]
        before, begin = engine.spent_s, time.thread_time()
        for answer in answers:
            loop.deliver(answer)
        loop.run_once()
        spent.append(time.thread_time() - begin - (engine.spent_s - before))
        first, events = loop.poll(read, 0.0)
        read = first + len(events)
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
        begin = time.thread_time()
        loop.deliver(message)
        loop.run_once()
        spent.append(time.thread_time() - begin)
        heard.clear()
    return 1e3 * median(spent[WARM_UP:])


class InstantModel:
    """A model without a forward: every token is 1."""

    device, dtype, vocab_size, max_positions = torch.device("cpu"), torch.float32, 8, LENGTH
    ids, feature_size = None, 0

    def __init__(self, rows: int) -> None:
        self.cache = PagedCache([LayerShape(1, 1, 1)], 128 * rows * LENGTH, self.dtype, self.device)
        self._logits = torch.nn.functional.one_hot(torch.ones(rows, dtype=torch.long), self.vocab_size).float()
        self.spent_s = 0.0

    def forward(self, rows: np.ndarray, counts: np.ndarray, *arrays: np.ndarray) -> torch.Tensor:
        begin = time.thread_time()
        self.cache.lengths[rows] += counts
        output = self._logits[: arrays[-1].sum()]
        self.spent_s += time.thread_time() - begin
        return output


def model_proposer_us(rows: int, branches: int = 0) -> float:
    """Microseconds of CPU time of `draft_model` for a token of a row or branch, without the forward; of each window one
    half is right."""
    model = InstantModel(rows * (1 + branches))
    proposer = DraftModelProposer(model, rows, branches=branches)  # type: ignore[arg-type]  # what the proposer calls
    proposer.budget = rows * (1 + branches)
    table = RequestTable(WINDOW, branches)
    view = TableView(table, 0, WINDOW)
    for row in range(rows):
        sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH)
        table.open(TargetRequest(f"request-{row}", (1, 2, 3), sampling))
    mine, lengths = np.arange(rows, dtype=np.int32), np.full(rows, WINDOW // 2, np.int32)
    tokens = np.tile(np.array([1] * (WINDOW // 2 - 1) + [2], np.int32), rows)
    spent = []
    for step in range(WARM_UP + STEPS):
        drafted, model.spent_s, begin = 0, 0.0, time.thread_time()
        while len(changed := proposer.propose(view, mine)):
            drafted += max(proposer.rows_drafted, len(changed))
            table.tails(0, changed)
        table.follow(mine, lengths * step, lengths, tokens)
        spent.append((time.thread_time() - begin - model.spent_s) / drafted)
    return 1e6 * median(spent[WARM_UP:])


# ---- all of it ----

FIGURES: Mapping[str, Callable[[], float]] = {
    "verifier_ms_16_rows_1_drafter": lambda: verifier_ms(16, 1),
    "verifier_ms_128_rows_plain": lambda: verifier_ms(128, 0),
    "verifier_ms_128_rows_1_drafter": lambda: verifier_ms(128, 1),
    "verifier_ms_128_rows_hosted_suffix": lambda: hosted_ms(128),
    "verifier_ms_256_rows_3_drafters": lambda: verifier_ms(256, 3),
    "verifier_x_128_rows_1_drafter_4_branches": lambda: verifier_x(128, 1, 4),
    "verifier_x_256_rows_3_drafters_4_branches": lambda: verifier_x(256, 3, 4),
    "draft_loop_ms_128_rows_ngram": lambda: draft_loop_ms(128),
    "model_proposer_us_128_rows": lambda: model_proposer_us(128),
    "model_proposer_us_128_rows_4_branches": lambda: model_proposer_us(128, 4),
}


def main(json_file: JsonFile = None) -> None:
    torch.set_num_threads(1)
    points = []
    for name, measure in FIGURES.items():
        gc.collect()
        points.append({"figure": name, "value": measure()})
    show_points("figures", points, json_file)


if __name__ == "__main__":
    run_script(main)
