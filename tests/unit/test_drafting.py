"""The verifier's side of drafting: what drafters are told to let go."""

from __future__ import annotations

import numpy as np

from specactor_ray.config.schema import SpeculationConfig
from specactor_ray.messages import CommitBatch
from specactor_ray.queues.link import Link, direct_sender
from specactor_ray.verify.drafting import DrafterLink, Drafting
from tests.unit.spec.tables import Claim, batch, ints, request


def test_a_request_that_a_drafter_should_not_have_open_is_closed() -> None:
    """Such as by an open that arrived twice, the second time after the close."""
    heard: list[CommitBatch] = []
    drafting = Drafting("v", False, SpeculationConfig(), vocab_size=100)
    drafting.set_drafters({"d": DrafterLink("ngram", 8, Link(direct_sender(heard.append)))})
    row = drafting.table.open(request("r"))
    drafting.revise(ints([row]))
    drafting.flush()
    (opened,) = heard.pop().opened
    drafting.close(row, finished=True)

    def say(*handles: tuple[int, int]) -> tuple[tuple[int, int, bool], ...]:
        drafting.inbox.put(batch([Claim(*handle, 0, (1,)) for handle in handles]))
        drafting.take_messages()
        drafting.flush()
        return heard.pop().closed

    handle = (opened.row, opened.generation)
    assert say(handle) == ((*handle, True),), "that it has ended is not forgotten"
    assert say(handle) == ((*handle, False),)
    assert drafting.table.open(request("new")) == row
    assert say(handle, (10**6, 1), handle) == ((*handle, False),)
    drafting.revise(ints([row]))
    drafting.flush()
    assert heard.pop().opened[0].generation == drafting.table.generation[row]
    drafting.inbox.put(batch([Claim(row, int(drafting.table.generation[row]), 0, (1,))]))
    drafting.take_messages()
    drafting.flush()
    assert not heard and np.count_nonzero(drafting.table.length) == 1
