"""Health of a drafter: checksum and alarm."""

from __future__ import annotations

import pytest
import torch

from specactor_ray.config.methods import Checkpoint, Traits
from specactor_ray.draft.loop import ENOUGH, Health, checksum

MODEL = Traits(checkpoint=Checkpoint.MODEL)


@pytest.mark.parametrize(
    ("traits", "missed", "alarm"),
    [
        (MODEL, ENOUGH - 1, False),
        (MODEL, ENOUGH, True),
        (Traits(draws_noise=True), ENOUGH, True),  # a model of a user's own
        (Traits(), 10**9, False),
    ],
)
def test_the_alarm_is_for_weights_that_are_never_right(traits: Traits, missed: int, alarm: bool) -> None:
    health = Health("d-0", "d", traits)
    health.observe(missed, 0)
    assert health.to_dict()["alarm"] is alarm


def test_an_alarm_is_logged_at_its_begin_and_its_end() -> None:
    health = Health("eagle-0#1a2b", "eagle", MODEL)
    assert health.observe(500, 300) == ""
    health.renew(7, "00c0ffee")
    assert health.to_dict()["tried"] == 0 and health.observe(500 + ENOUGH - 1, 300) == ""
    warning = health.observe(500 + ENOUGH, 300)
    for words in ("eagle-0#1a2b (eagle)", f"last {ENOUGH} draft tokens", "version 7", "00c0ffee", "Fix: "):
        assert words in warning
    assert health.observe(900, 300) == "" and health.observe(900, 300) == ""
    assert health.to_dict() == {
        "method": "eagle", "version": 7, "checksum": "00c0ffee", "tried": 400, "right": 0, "missed": 400, "alarm": True
    }  # fmt: skip
    health.renew(8, "0badcafe")
    assert health.to_dict()["alarm"], "nothing says that these weights are better"
    assert health.observe(910 + ENOUGH, 300) == "" and health.to_dict()["alarm"]
    ended = health.observe(1200, 301)
    assert "right again" in ended and "version 8" in ended and not health.to_dict()["alarm"]


def test_a_checksum_tells_weights_apart() -> None:
    weights = {"a": torch.arange(6000.0).reshape(60, 100), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.ones(0)}
    first = checksum(weights)
    assert len(first) == 8 and checksum(dict(reversed(weights.items()))) == first
    others = [{**weights, "a": weights["a"] + 1}, {**weights, "b": -weights["b"]}, {**weights, "d": weights["b"]}]
    assert len({first, *map(checksum, others)}) == 4
    assert checksum({}) == ""
