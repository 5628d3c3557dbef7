"""The verifier's side of drafting: what drafters are told of requests that end."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from specactor_ray.actors.process import ActorHost
from specactor_ray.actors.specs import VERIFIER, ActorSpec
from specactor_ray.config.methods import DrafterSpec, Traits, traits
from specactor_ray.config.schema import Config, ModeName, SpeculationConfig
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.lookup import NgramProposer
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.draft.requests import DraftRequests
from specactor_ray.target.base import States, TargetRequest
from specactor_ray.transport.link import Link, direct_sender
from specactor_ray.transport.messages import CommitBatch, TailBatch
from specactor_ray.verify._kernels import Committed
from specactor_ray.verify.drafting import MOST_READ, DrafterLink, Drafting, HostedDrafter
from tests.by_name import ByName
from tests.unit.verify.tables import Claim, batch, ints, request


def spec_of(method: str) -> DrafterSpec:
    return DrafterSpec(method, traits=traits(method))


def opened_once() -> tuple[Drafting, list[CommitBatch], tuple[int, int]]:
    """A drafter `d` that was told of one request: its verifier's side, where it hears, and row and generation."""
    heard: list[CommitBatch] = []
    drafting = Drafting("v", False, SpeculationConfig(), vocab_size=100)
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
    drafting = Drafting("v", False, SpeculationConfig(), vocab_size=100)
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
    drafting = ActorHost().build_drafting(spec, SimpleNamespace(vocab_size=100))  # type: ignore[arg-type]
    assert drafting.table.branch_tail.shape[2:] == (3, 9)
    three = Claim(0, 1, 0, (1,), ((0, (2,)), (0, (3,)), (1, (4,))))
    for claim in (three, three._replace(branches=(*three.branches, (1, (5,))))):
        drafting.inbox.put(batch([claim]))
    assert len(drafting.inbox) == 1 and list(drafting.snapshot()["malformed"].values()) == [1]


def ended() -> tuple[CommitBatch, tuple[int, ...]]:
    """What a lookup is told when a request of three tokens ends, of which it knows one, and how it then continues an
    output that begins alike."""
    proposer = NgramProposer(min_match=1, max_match=2, history_tokens=100, max_batch=4)
    heard: list[CommitBatch] = []
    mirrors = DraftRequests("d", proposer)

    def receive(message: CommitBatch) -> None:
        heard.append(message)
        mirrors.take(message)

    drafting = Drafting("v", False, SpeculationConfig(), vocab_size=100)
    drafting.set_drafters({"d": DrafterLink(spec_of("ngram"), Link(direct_sender(receive)))})
    row = drafting.table.open(request("r"))
    for step in range(3):
        drafting.revise(ints([row]))
        if step < 2:
            drafting.flush()
        drafting.commit(Committed(ints([row]), ints([1]), ints([50 + step]), ints([-1]), ints([0]), ints([0])))
    drafting.close(row, finished=True)
    drafting.table.open(request("in its row"))
    drafting.flush()
    learner = ByName(proposer)
    learner.open("another", (1, 2), (50,), SamplingParams(), 8)
    learner.extend()
    return heard[-1], learner.tail("another")[1]


def test_a_lookup_learns_from_an_output_up_to_its_end() -> None:
    message, learned = ended()
    assert message.tokens.tolist() == [51, 52] and message.closed[0][2]
    assert learned == (51, 52)


@pytest.mark.parametrize(
    ("looks_up", "left_out", "deliveries"),
    [
        (True, 0, [["a", "b", "c", "d", "e"]]),
        (False, 0, [["a", "b"], ["c"], ["d"], ["e"]]),
        (False, 1, [["a", "b", "c"], ["d", "e"]]),
        (False, 2, [["a", "b", "c", "d"], ["e"]]),
    ],
)
def test_a_model_reads_some_prompts_at_a_time(looks_up: bool, left_out: int, deliveries: list[list[str]]) -> None:
    """In order, as many as fit in the deliveries since its last turn, one at least."""
    heard: list[CommitBatch] = []
    drafting = Drafting("v", False, SpeculationConfig(), vocab_size=100)
    link = Link(direct_sender(heard.append))
    loop = DraftLoop("d", NgramProposer())
    spec = DrafterSpec("m", traits=Traits(looks_up=looks_up))
    drafting.set_drafters({"d": HostedDrafter(spec, link, loop) if left_out else DrafterLink(spec, link)})
    sizes = {"a": 0.75, "b": 0.25, "c": 0.5, "d": 1.5, "e": 0.1}
    rows = []
    for name, size in sizes.items():
        prompt = (1,) * (int(size * MOST_READ) - 1)
        rows.append(drafting.table.open(TargetRequest(name, prompt, SamplingParams(max_tokens=9), (7,))))
    drafting.revise(ints(rows))
    for _ in range(len(sizes)):
        for _ in range(left_out):
            drafting.flush(models_turn=False)
        drafting.flush()
        one = np.ones(len(rows), np.int32)
        drafting.commit(Committed(ints(rows), one, one, -one, 0 * one, 0 * one))
    assert [opened for message in heard if (opened := [one.request_id for one in message.opened])] == deliveries
    assert all(opened.row not in message.rows for message in heard for opened in message.opened)
    drafting.flush()
    assert sorted(heard[-1].rows.tolist()) == sorted(rows) and heard[-1].starts.tolist() == [5] * len(rows)


def test_states_of_a_prompt_that_is_read_in_pieces_are_kept_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that is opened at the first step reads the whole prompt, however long."""
    monkeypatch.setattr("specactor_ray.verify.drafting._KEPT_POSITIONS", 4)
    drafting = Drafting("v", False, SpeculationConfig(), vocab_size=100)
    row = drafting.table.open(TargetRequest("long", (1,) * 9, SamplingParams()))

    def kept(*spans: tuple[int, int]) -> list[int]:
        for begin, count in spans:
            drafting.keep(States(ints([row]), ints([begin]), ints([count]), np.zeros((count, 1), np.float32)))
        return [span.begin for span in drafting.features.since(row, -1)]

    assert kept((0, 3), (3, 3), (6, 3)) == [0, 3, 6]
    assert kept((9, 1), (10, 1), (11, 1)) == [0, 3, 6, 9, 10, 11]
    assert kept((12, 1), (13, 1)) == [10, 11, 12, 13]


def test_a_head_is_told_the_states_that_became_known_with_each_commit() -> None:
    heard: dict[str, list[CommitBatch]] = {"head": [], "lookup": []}
    drafting = Drafting("v", False, SpeculationConfig(), vocab_size=100)
    links = {name: Link(direct_sender(said.append)) for name, said in heard.items()}
    drafting.set_drafters(
        {
            "head": DrafterLink(spec_of("eagle"), links["head"]),
            "lookup": DrafterLink(spec_of("ngram"), links["lookup"]),
        }
    )
    row, other = (drafting.table.open(request(name)) for name in "ab")
    position = {row: 0, other: 0}

    def step(**fresh: int) -> None:
        """So many positions of `a` and of `b` were fed, and all but those of the prompt commit a token."""
        rows, counts = ints([row, other]), ints([fresh["a"], fresh["b"]])
        for one, fed in zip(rows.tolist(), counts.tolist(), strict=True):
            fed += position[one] == 0  # two of the prompt
            drafting.keep(States(ints([one]), ints([position[one]]), ints([fed]), np.zeros((fed, 4), np.float32)))
            position[one] += fed
        tokens = np.ones(counts.sum(), np.int32)
        drafting.commit(Committed(rows, counts, tokens, ints([-1, -1]), ints([0, 0]), ints([0, 0])))

    def told() -> list[tuple[int, list[tuple[int, int]]]]:
        drafting.flush()
        spans = heard["head"][-1].features
        return [(one, [(span.begin, span.end) for span in features]) for one, features in spans]

    step(a=1, b=1)
    drafting.revise(ints([row, other]))
    assert told() == []
    opened = {one.row: [(span.begin, span.end) for span in one.features] for one in heard["head"][-1].opened}
    assert opened == {row: [(0, 2)], other: [(0, 2)]}
    step(a=3, b=1)
    assert told() == [(row, [(2, 5)]), (other, [(2, 3)])]
    step(a=1, b=2)
    step(a=2, b=1)
    assert told() == [(row, [(5, 6), (6, 8)]), (other, [(3, 5), (5, 6)])], "all since it was told last"
    drafting.inbox.put(TailBatch("head", *[ints([])] * 5, lost=((row, int(drafting.table.generation[row])),)))
    drafting.take_messages()
    step(a=1, b=1)
    assert told() == [(other, [(6, 7)])]
    (again,) = heard["head"][-1].opened
    assert [(span.begin, span.end) for span in again.features] == [(0, 2), (2, 5), (5, 6), (6, 8), (8, 9)]
    assert len(heard["lookup"]) == len(heard["head"]) and not any(message.features for message in heard["lookup"])
    assert not any(one.features for message in heard["lookup"] for one in message.opened)
