"""What a draft token of a model costs at the present load, unmoved by outliers; and that tails say it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from specactor_ray.draft.lookup import NgramProposer
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.draft.proposer import Proposer
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.transport.link import Link, direct_sender
from specactor_ray.transport.messages import TailBatch
from tests.batches import news, opening
from tests.fakes.clocks import HandClock
from tests.tiny import tiny_draft


def loop_of(proposer: Proposer, **arguments: Any) -> tuple[DraftLoop, list[TailBatch]]:
    """A loop, and what it tells its verifier."""
    loop, told = DraftLoop("d", proposer, **arguments), list[TailBatch]()
    loop.set_verifiers({"v0": Link(direct_sender(told.append))})
    return loop, told


def tiny_model() -> RaggedModel:
    from transformers import AutoModelForCausalLM

    return RaggedModel(AutoModelForCausalLM.from_pretrained(tiny_draft(), dtype=torch.float32), 4 << 20)


def test_an_outlier_does_not_count_and_an_old_measurement_is_forgotten() -> None:
    class Uneven(DraftModelProposer):
        """Every third answer takes it nine seconds."""

        def extend(self) -> np.ndarray:
            changed = super().extend()
            if len(changed):
                clock.seconds += next(durations)
            return changed

    clock, durations = HandClock(), itertools.chain([0.01, 0.01, 9.0] * 20, itertools.repeat(0.02))
    (loop, _), costs = loop_of(Uneven(tiny_model()), clock=clock), list[float]()
    for number in range(100):
        loop.deliver(news([opening(0, f"r{number}", window=1)]))
        loop.run_once()
        costs.append(loop.snapshot()["token_s"])
    assert costs[:60] == pytest.approx([0.01] * 60) and costs[-1] == pytest.approx(0.02)


def test_lookups_cost_nothing_worth_measuring() -> None:
    loop, told = loop_of(NgramProposer(1, 4, 0, 8), clock=HandClock(tick_s=0.5))
    loop.deliver(news([opening(row, prompt=(1, 2, 3, 1, 2, 3)) for row in range(2)]))
    assert loop.run_once()
    (batch,) = told
    assert batch.lengths.tolist() == [4, 4] and batch.token_s == 0.0
    assert not loop.run_once()


def test_tails_are_told_token_by_token_until_they_fill_the_window() -> None:
    loop, told = loop_of(DraftModelProposer(tiny_model()))
    loop.deliver(news([opening(0, prompt=(1, 2, 3), max_tokens=50)]))
    while loop.run_once():
        pass
    assert [batch.lengths.tolist() for batch in told] == [[1], [2], [3], [4]]
    loop.deliver(news(commits=[(0, 0, told[3].tokens[:1].tolist())]))
    while loop.run_once():
        pass
    (lengthened,) = told[4:]
    assert lengthened.bases.tolist() == [1] and lengthened.lengths.tolist() == [4]
    assert lengthened.tokens[:3].tolist() == told[3].tokens[1:].tolist(), "what a commit leaves of a tail stays"
