"""Verifiers that run by turns in one process, without Ray: on a shared machine all compared variants see the same
minutes. The first half of the demo compares plain decoding and drafting so."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specactor_ray.bench.comparison import Output
from specactor_ray.bench.demo_tasks import edit_prompts
from specactor_ray.cluster.cores import bind_to_cores
from specactor_ray.config.methods import drafter_spec
from specactor_ray.config.schema import DrafterConfig, SpeculationConfig, TargetConfig
from specactor_ray.core.child import Report
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.draft.proposer import build_proposer
from specactor_ray.rollout.prompts import encode_prompt
from specactor_ray.target.base import TargetRequest, build_engine
from specactor_ray.transport.link import Link, direct_sender
from specactor_ray.transport.messages import Finished, Progress
from specactor_ray.verify.drafting import Drafting, HostedDrafter
from specactor_ray.verify.loop import VerifyLoop

PROMPTS_PER_ROUND = 3
"""Prompts of a round: one of each kind of `demo_tasks.edit_prompts`, so that rounds are alike."""
LEAST_ROUNDS = 2
_TURN_TOKENS = 16
"""Tokens of a turn."""


class TurnTaker:
    """A verifier with the drafters it hosts (none: plain decoding), which runs when it is its turn.

    Args:
        speculation: Settings of drafting and verifying. Default: the configuration's default.
    """

    def __init__(
        self, drafters: Sequence[DrafterConfig], target: TargetConfig, speculation: SpeculationConfig | None = None
    ) -> None:
        engine, config = build_engine(target, "cpu", 0), speculation or SpeculationConfig()
        drafting = Drafting("verifier-0", True, config, engine.vocab_size, max_batch=target.max_batch)
        self.loop = VerifyLoop(engine, drafting, [_hosted(one, config, target) for one in drafters])
        self.seconds = 0.0
        """Time of all turns of a round."""
        self._next_event = 0

    def run(self, tokens: float) -> bool:
        """Take a turn: run until `tokens` tokens are committed in total. The last step may commit more.

        Returns:
            Whether they are committed; else all requests have ended.
        """
        begin = time.perf_counter()
        while self.loop.metrics.committed_tokens < tokens and self.loop.run_once():
            pass
        self.seconds += time.perf_counter() - begin
        return self.loop.metrics.committed_tokens >= tokens

    def outputs(self) -> dict[str, Output]:
        """Request → output for requests that have ended since the last call; none may be running."""
        first, events = self.loop.poll(self._next_event, 0.0)
        self._next_event = first + len(events)
        tokens: dict[str, list[int]] = {}
        outputs = {}
        for event in events:
            if isinstance(event, Progress):
                for request_id, more, _, _ in event.rows():
                    tokens.setdefault(request_id, []).extend(more)
            elif isinstance(event, Finished):
                ended = tuple(tokens.pop(event.request_id, ()))
                outputs[event.request_id] = Output(ended, event.finish_reason, event.error)
        return outputs


def _hosted(drafter: DrafterConfig, config: SpeculationConfig, target: TargetConfig) -> HostedDrafter:
    spec = drafter_spec("drafter", drafter, config.window, target.max_batch)
    loop = DraftLoop(f"{drafter.method}-0", build_proposer(spec, target, "cpu"))
    return HostedDrafter(spec, Link(direct_sender(loop.deliver)), loop)


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
    """Measure in this process; report steps in words, then a `Round` at the end of each round."""
    begin = time.monotonic()
    bind_to_cores(work.cores)
    report(f"loading the tokenizer of {work.target.model} (the first time, the built-in model is converted)")
    from specactor_ray.models.loading import load_tokenizer

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
        report(play_round(plain, auto, requests, number))


def play_round(plain: TurnTaker, auto: TurnTaker, requests: Sequence[TargetRequest], number: int) -> Round:
    """Decode the requests with both variants, by turns whose order changes from round to round."""
    both = (plain, auto) if number % 2 else (auto, plain)
    before = {one: one.loop.metrics.committed_tokens for one in both}
    steps = auto.loop.metrics.row_steps
    for one in both:
        one.loop.forget_history()  # an earlier round's outputs may be alike
        one.loop.submit(requests)
        one.seconds = 0.0
    unfinished = list(both)
    for goal in itertools.count(_TURN_TOKENS, _TURN_TOKENS):
        unfinished = [one for one in unfinished if one.run(before[one] + goal)]
        if not unfinished:
            break
    expected, got = plain.outputs(), auto.outputs()
    return Round(
        requests=len(expected),
        identical=sum(got.get(name) == output for name, output in expected.items()),
        tokens=sum(len(output.token_ids) for output in expected.values()),
        plain_s=plain.seconds,
        auto_s=auto.seconds,
        row_steps=auto.loop.metrics.row_steps - steps,
    )


def _requests(tokenizer: Any, prompts: Sequence[str], work: SideBySide, name: str) -> list[TargetRequest]:
    sampling = SamplingParams(temperature=0.0, max_tokens=work.max_tokens, seed=work.seed)
    return [
        TargetRequest(f"{name}-{index}", encode_prompt(tokenizer, prompt, chat=True), sampling)
        for index, prompt in enumerate(prompts)
    ]
