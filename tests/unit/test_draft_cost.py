"""What a draft token costs: per request, at the present load, and unmoved by outliers."""

from __future__ import annotations

import pytest

from specactor_ray.drafters.ngram import NgramProposer
from specactor_ray.loops.draft_loop import DraftLoop
from specactor_ray.messages import DraftOpen, DraftTail, SamplingParams
from specactor_ray.queues.conflation import for_verifier
from specactor_ray.queues.outbox import Outbox
from specactor_ray.speculation.draft_cost import DraftCost


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
    ticks = iter(range(1000))
    loop = DraftLoop("d", NgramProposer(1, 4, 0, 8), clock=lambda: 0.5 * next(ticks))
    got: list[DraftTail] = []
    loop.set_verifiers({"v": Outbox(lambda batch: got.extend(batch) or _done(), for_verifier())})
    loop.deliver([DraftOpen(f"r{i}", "v", (1, 2, 3, 1, 2, 3), (), SamplingParams(), 4) for i in range(2)])
    assert loop.run_once()
    assert [len(tail.token_ids) for tail in got] == [4, 4]
    assert all(tail.token_s == pytest.approx(0.5 * 2 / 8) for tail in got)
    assert loop.snapshot()["token_s"] == got[0].token_s
    assert not loop.run_once()


def _done():  # type: ignore[no-untyped-def]
    from concurrent.futures import Future

    future: Future[None] = Future()
    future.set_result(None)
    return future
