"""Plain decoding and drafting by turns on the same prompts, in its own process: the first half of the demo."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.core.child import Report

if TYPE_CHECKING:
    from specactor_ray.bench.by_turns import TurnTaker
    from specactor_ray.target.base import TargetRequest

PROMPTS_PER_ROUND = 3
"""Prompts of a round: one of each kind of `demo_tasks.edit_prompts`, so that rounds are alike."""
LEAST_ROUNDS = 2
_TURN_TOKENS = 16
"""Tokens of a turn: the two take turns within a round, too."""


@dataclass(frozen=True)
class SideBySide:
    """Arguments of the measurement."""

    target: TargetConfig
    drafters: tuple[DrafterConfig, ...]
    """Drafters of the variant that drafts."""
    cores: tuple[int, ...]
    max_tokens: int
    seed: int
    rounds: int
    """Most rounds."""
    seconds: float
    """Seconds after which no round begins, except the first `LEAST_ROUNDS`."""


@dataclass(frozen=True)
class Speed:
    """Speeds of a round under way."""

    round: int
    plain: float
    """Tokens per second in this round so far."""
    auto: float


@dataclass(frozen=True)
class Round:
    """Results of a round: the same prompts decoded by both variants."""

    requests: int
    identical: int
    """Requests whose tokens and end are the same in both."""
    tokens: int
    plain_s: float
    auto_s: float
    row_steps: int
    """Steps of the variant that drafts, summed over requests."""


def measure_side_by_side(work: SideBySide, report: Report) -> None:
    """Measure; report steps in words, then a `Speed` after every turn and a `Round` at the end of each round."""
    from specactor_ray.cluster.cores import bind_to_cores

    begin = time.monotonic()
    bind_to_cores(work.cores)
    report("loading torch")
    from specactor_ray.bench.by_turns import TurnTaker
    from specactor_ray.bench.demo_tasks import edit_prompts
    from specactor_ray.models.loading import load_tokenizer

    report(f"loading the tokenizer of {work.target.model} (the first time, the built-in model is converted)")
    tokenizer = load_tokenizer(work.target.model, trust_remote_code=work.target.trust_remote_code)
    report("loading the model for plain and for auto (the first time, kernels are compiled)")
    plain, auto = TurnTaker((), work.target), TurnTaker(work.drafters, work.target)
    prompts = edit_prompts(work.seed)
    report(f"warming up; both decode on {len(work.cores)} cores, with as many threads as other processes leave free")
    for one in (plain, auto):
        one.loop.submit(_requests(tokenizer, [next(prompts)], work, "warm-up"))
        one.run(math.inf)
        one.outputs()
    for number in range(1, work.rounds + 1):
        if number > LEAST_ROUNDS and time.monotonic() - begin > work.seconds:
            break
        requests = _requests(tokenizer, list(itertools.islice(prompts, PROMPTS_PER_ROUND)), work, str(number))
        report(play_round(plain, auto, requests, number, report))


def play_round(
    plain: TurnTaker, auto: TurnTaker, requests: Sequence[TargetRequest], number: int, report: Report
) -> Round:
    """Decode the requests with both variants, by turns whose order changes from round to round."""
    both = (plain, auto) if number % 2 else (auto, plain)
    before = {one: one.loop.metrics.committed_tokens for one in both}
    steps = auto.loop.metrics.row_steps
    for one in both:
        one.loop.forget_history()  # an earlier round's outputs may be alike
        one.loop.submit(requests)
        one.seconds.clear()

    def speed(one: TurnTaker) -> float:
        return (one.loop.metrics.committed_tokens - before[one]) / sum(one.seconds)

    unfinished = list(both)
    for goal in itertools.count(_TURN_TOKENS, _TURN_TOKENS):
        unfinished = [one for one in unfinished if one.run(before[one] + goal)]
        if not unfinished:
            break
        report(Speed(number, speed(plain), speed(auto)))
    expected, got = plain.outputs(), auto.outputs()
    return Round(
        requests=len(expected),
        identical=sum(got.get(name) == output for name, output in expected.items()),
        tokens=sum(len(output.token_ids) for output in expected.values()),
        plain_s=sum(plain.seconds),
        auto_s=sum(auto.seconds),
        row_steps=auto.loop.metrics.row_steps - steps,
    )


def _requests(tokenizer: Any, prompts: Sequence[str], work: SideBySide, name: str) -> list[TargetRequest]:
    from specactor_ray.core.types import SamplingParams
    from specactor_ray.rollout.prompts import encode_prompt
    from specactor_ray.target.base import TargetRequest

    sampling = SamplingParams(temperature=0.0, max_tokens=work.max_tokens, seed=work.seed)
    return [
        TargetRequest(f"{name}-{index}", encode_prompt(tokenizer, prompt, chat=True), sampling)
        for index, prompt in enumerate(prompts)
    ]
