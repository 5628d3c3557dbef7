"""What a draft token costs: per request, at the present load, unmoved by outliers; and that tails say it."""

from __future__ import annotations

import pytest
import torch

from specactor_ray.draft.cost import DraftCost
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.drafters.base import Proposer
from specactor_ray.drafters.draft_model import DraftModelProposer
from specactor_ray.drafters.ngram import NgramProposer
from specactor_ray.messages import TailBatch
from specactor_ray.modeling.ragged_model import RaggedModel
from specactor_ray.queues.link import Link, direct_sender
from tests.batches import news, opening
from tests.clocks import HandClock
from tests.tiny import tiny_draft


def loop_of(proposer: Proposer, **arguments: HandClock) -> tuple[DraftLoop, list[TailBatch]]:
    """A loop, and what it tells its verifier."""
    loop, told = DraftLoop("d", proposer, **arguments), list[TailBatch]()
    loop.set_verifiers({"v0": Link(direct_sender(told.append))})
    return loop, told


def tiny_model() -> RaggedModel:
    from transformers import AutoModelForCausalLM

    return RaggedModel(AutoModelForCausalLM.from_pretrained(tiny_draft(), dtype=torch.float32), 4 << 20)


def test_a_request_waits_for_the_whole_batch() -> None:
    cost = DraftCost()
    assert cost.token_s == 0.0
    cost.record(0.010, requests=8, tokens=8)
    assert cost.token_s == pytest.approx(0.010), "one forward gives each of 8 requests one token"
    cost = DraftCost()
    cost.record(0.010, requests=4, tokens=32)
    assert cost.token_s == pytest.approx(0.010 / 8), "eight tokens for each of four requests, after 10 ms"


def test_outliers_nonsense_and_old_measurements_do_not_count() -> None:
    cost = DraftCost(memory=5)
    for seconds in (0.01, 0.01, 9.0, 0.01, 0.01):
        cost.record(seconds, 1, 1)
    for seconds, requests, tokens in ((0.0, 1, 1), (-1.0, 1, 1), (float("nan"), 1, 1), (1.0, 0, 1), (1.0, 1, 0)):
        cost.record(seconds, requests, tokens)
    assert cost.token_s == pytest.approx(0.01)
    for _ in range(4):
        cost.record(0.02, 1, 1)
    assert cost.token_s == pytest.approx(0.02)
    with pytest.raises(ValueError, match="memory"):
        DraftCost(0)


def test_reading_prompts_counts_only_as_long_as_nothing_else_is_known() -> None:
    cost = DraftCost()
    cost.record(3.0, 8, 8, reads_prompts=True)
    assert cost.token_s == pytest.approx(3.0)
    cost.record(0.01, 8, 8)
    assert cost.token_s == pytest.approx(0.01)
    cost.record(5.0, 8, 8, reads_prompts=True)
    assert cost.token_s == pytest.approx(0.01)


def test_a_model_is_not_slow_because_it_read_prompts_first() -> None:
    class Slow(DraftModelProposer):
        """Reading a prompt takes it three seconds, a token a tenth."""

        def extend(self) -> list[str]:
            clock.seconds += 0.1 if clock.seconds else 3.0
            return super().extend()

    clock = HandClock()
    loop, told = loop_of(Slow(tiny_model()), clock=clock)
    loop.deliver(news([opening(0, prompt=(1, 2, 3))]))
    for _ in range(3):
        loop.run_once()
    assert told[0].token_s == pytest.approx(3.0) and told[-1].token_s == pytest.approx(0.1)


def test_tails_carry_what_the_drafter_measured() -> None:
    loop, told = loop_of(NgramProposer(1, 4, 0, 8), clock=HandClock(tick_s=0.5))
    loop.deliver(news([opening(row, prompt=(1, 2, 3, 1, 2, 3)) for row in range(2)]))
    assert loop.run_once()
    (batch,) = told
    assert batch.lengths.tolist() == [4, 4]
    assert batch.token_s == pytest.approx(0.5 * 2 / 8) and loop.snapshot()["token_s"] == batch.token_s
    assert not loop.run_once()


def test_tails_are_told_token_by_token_and_say_when_they_are_complete() -> None:
    loop, told = loop_of(DraftModelProposer(tiny_model()))
    loop.deliver(news([opening(0, prompt=(1, 2, 3), max_tokens=50)]))
    while loop.run_once():
        pass
    assert [(batch.lengths.tolist(), batch.complete.tolist()) for batch in told] == [
        ([length], [length == 4]) for length in (1, 2, 3, 4)
    ]
    loop.deliver(news(commits=[(0, 0, told[3].tokens[:1].tolist(), 3)]))
    while loop.run_once():
        pass
    (left,) = told[4:]
    assert left.bases.tolist() == [1] and left.complete.all(), "what a commit leaves of a tail may fill the window, too"
    assert left.tokens.tolist() == told[3].tokens[1:].tolist()
