"""Counters that instances must not share: ruff (RUF012) refuses lists and dicts in classes, not arrays."""

from __future__ import annotations

from tests.fakes.own_proposers import Learner


class Forgetful(Learner):
    def __init__(self) -> None:
        """A class of a user's own may not call that of its base."""


def test_proposers_share_no_counters() -> None:
    first, second = Forgetful(), Forgetful()
    assert first.forward_s is not second.forward_s
