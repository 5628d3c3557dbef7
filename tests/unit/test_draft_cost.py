"""What a draft token costs: per request, at the present load, and unmoved by outliers."""

from __future__ import annotations

import pytest
import torch

from specactor_ray.drafters.draft_model import DraftModelProposer
from specactor_ray.drafters.ngram import NgramProposer
from specactor_ray.loops.draft_loop import DraftLoop
from specactor_ray.messages import Commit, DraftOpen, DraftTail, Mode, SamplingParams
from specactor_ray.modeling.ragged_model import RaggedModel
from specactor_ray.queues.conflation import for_verifier
from specactor_ray.queues.outbox import Outbox
from specactor_ray.speculation.draft_cost import DraftCost
from specactor_ray.speculation.wait_cost import WaitCost
from tests.clocks import HandClock
from tests.tiny import tiny_draft


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
    for _ in range(3):
        cost.record(0.02, 1, 1)
    assert cost.token_s == pytest.approx(0.02)
    with pytest.raises(ValueError, match="memory"):
        DraftCost(0)


def test_tails_carry_what_the_drafter_measured() -> None:
    loop = DraftLoop("d", NgramProposer(1, 4, 0, 8), clock=HandClock(tick_s=0.5))
    got: list[DraftTail] = []
    loop.set_verifiers({"v": Outbox(lambda batch: got.extend(batch) or _done(), for_verifier())})
    loop.deliver([DraftOpen(f"r{i}", "v", (1, 2, 3, 1, 2, 3), (), SamplingParams(), 4) for i in range(2)])
    assert loop.run_once()
    assert [len(tail.token_ids) for tail in got] == [4, 4]
    assert all(tail.token_s == pytest.approx(0.5 * 2 / 8) for tail in got)
    assert loop.snapshot()["token_s"] == got[0].token_s
    assert not loop.run_once()


def test_a_wait_is_drafting_and_the_rest() -> None:
    cost = WaitCost(memory=3)
    assert cost.wait_s == cost.overhead_s == 0.0
    for waited, drafting in ((0.010, 0.006), (5.0, 0.006), (0.012, 0.006)):
        cost.record(waited, drafting)
    assert cost.wait_s == pytest.approx(0.012) and cost.overhead_s == pytest.approx(0.006)
    for _ in range(3):
        cost.record(0.004, 0.009)
    assert cost.wait_s == pytest.approx(0.004) and cost.overhead_s == 0.0, "the drafter says that it took longer"
    with pytest.raises(ValueError, match="memory"):
        WaitCost(0)


@pytest.mark.parametrize("mode", [Mode.COUPLED, Mode.DECOUPLED])
def test_a_coupled_verifier_is_sent_whole_tails_only(mode: Mode) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_draft(), dtype=torch.float32)
    loop = DraftLoop("d", DraftModelProposer(RaggedModel(model, 4 << 20)))
    got: list[DraftTail] = []
    loop.set_verifiers({"v": Outbox(lambda batch: got.extend(batch) or _done(), for_verifier())})
    loop.deliver([DraftOpen("r", "v", (1, 2, 3), (), SamplingParams(max_tokens=50), 4, mode)])
    while loop.run_once():
        pass
    assert [len(tail.token_ids) for tail in got] == ([4] if mode is Mode.COUPLED else [1, 2, 3, 4])
    assert got[-1].complete
    loop.deliver([Commit("r", "v", 0, got[-1].token_ids[:1], 3, mode)])
    while loop.run_once():
        pass
    assert len(got[-1].token_ids) == 3 and got[-1].complete, "what a commit leaves of a tail is one, too"


def _done():  # type: ignore[no-untyped-def]
    from concurrent.futures import Future

    future: Future[None] = Future()
    future.set_result(None)
    return future
