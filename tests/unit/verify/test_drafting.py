"""The verifier's side of drafting: what drafters are told of requests that end."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np

from specactor_ray.actors.process import ActorHost
from specactor_ray.actors.specs import VERIFIER, ActorSpec
from specactor_ray.config.methods import DrafterSpec, traits
from specactor_ray.config.schema import Config, ModeName, SpeculationConfig
from specactor_ray.draft.lookup import NgramProposer
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.table.table import RequestTable
from specactor_ray.transport.link import Link, direct_sender
from specactor_ray.transport.messages import CommitBatch, TailBatch
from specactor_ray.verify.drafting import DrafterLink, Drafting
from tests.unit.verify.tables import Claim, batch, ints, request


def spec_of(method: str) -> DrafterSpec:
    return DrafterSpec(method, traits=traits(method))


def opened_once() -> tuple[Drafting, list[CommitBatch], tuple[int, int]]:
    """A drafter `d` that was told of one request: its verifier's side, where it hears, and row and generation."""
    heard: list[CommitBatch] = []
    drafting = Drafting("v", False, SpeculationConfig(), RequestTable(vocab_size=100))
    drafting.set_drafters({"d": DrafterLink(DrafterSpec("m"), Link(direct_sender(heard.append)))})
    row = drafting.table.open(request("r"))
    drafting.revise(ints([row]))
    drafting.flush()
    (opened,) = heard.pop().opened
    return drafting, heard, (opened.row, opened.generation)


def test_a_request_that_a_drafter_should_not_have_open_is_closed() -> None:
    """Such as by an open that arrived twice, the second time after the close."""
    drafting, heard, handle = opened_once()
    row = handle[0]
    drafting.close(row, finished=True)

    def say(*handles: tuple[int, int]) -> tuple[tuple[int, int, bool], ...]:
        drafting.inbox.put(batch([Claim(*handle, 0, (1,)) for handle in handles]))
        drafting.take_messages()
        drafting.flush()
        return heard.pop().closed

    assert say(handle) == ((*handle, True),), "that it has ended is not forgotten"
    assert say(handle) == ((*handle, False),)
    assert drafting.table.open(request("new")) == row
    assert say(handle, (10**6, 1), handle) == ((*handle, False), (10**6, 1, False))
    drafting.revise(ints([row]))
    drafting.flush()
    assert heard.pop().opened[0].generation == drafting.table.generation[row]
    drafting.inbox.put(batch([Claim(row, int(drafting.table.generation[row]), 0, (1,))]))
    drafting.take_messages()
    drafting.flush()
    assert not heard and np.count_nonzero(drafting.table.length) == 1


def test_a_request_that_ends_before_it_is_opened_again_is_closed() -> None:
    """A drafter that asked for that keeps a place for it."""
    drafting, heard, handle = opened_once()
    drafting.inbox.put(dataclasses.replace(batch([]), lost=(handle,)))
    drafting.take_messages()
    drafting.close(handle[0], finished=True)
    drafting.flush()
    assert heard[-1].closed == ((*handle, False),)


def test_what_a_seat_left_open_at_a_drafter_ends_with_the_next_seat() -> None:
    """A list without the drafter deletes the seat with a close that was not sent, as its link was busy; the drafter
    never has an empty list of verifiers, and its last tail arrives while it has no seat."""
    under_way: list[Future[None]] = []
    drafting = Drafting("v", False, SpeculationConfig(), RequestTable(vocab_size=100))
    loop = DraftLoop("d", NgramProposer())
    tails = list[TailBatch]()
    loop.set_verifiers({"v": Link(direct_sender(tails.append))})

    def deliver(message: CommitBatch) -> Future[None]:
        loop.deliver(message)
        under_way.append(Future())
        return under_way[-1]

    def link() -> dict[str, DrafterLink]:
        return {"d": DrafterLink(spec_of("ngram"), Link(deliver))}

    drafting.set_drafters(link())
    row = drafting.table.open(request("r"))
    drafting.revise(ints([row]))
    drafting.flush()
    drafting.close(row, finished=True)
    drafting.flush()
    assert len(under_way) == 1, "the link is busy with the opening"
    drafting.set_drafters({})
    loop.run_once()
    drafting.inbox.put(tails.pop())
    drafting.take_messages()
    under_way.pop().set_result(None)
    assert loop.snapshot()["open_requests"] == 1
    drafting.set_drafters(link())
    drafting.flush()
    loop.run_once()
    assert loop.snapshot()["open_requests"] == 0
    under_way.pop().set_result(None)
    drafting.flush()
    assert not under_way, "a session is begun once"


def test_tails_are_kept_up_to_the_largest_window_and_most_branches_of_a_drafter() -> None:
    drafters = {"ngram": DrafterSpec(window=9), "eagle": DrafterSpec(branches=3)}
    spec = ActorSpec("v", VERIFIER, Config(ModeName.coupled, speculation=SpeculationConfig(window=4)), drafters)
    drafting = ActorHost().build_drafting(spec, SimpleNamespace(table=RequestTable(vocab_size=100), states=None))  # type: ignore[arg-type]
    assert drafting.table.tail.shape[2:] == (1 + 3, 9)
