"""Replay: its figures are exactly those of the engine when the same proposer drafts for it in turn with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields

import pytest

from specactor_ray.distill.corpus import CorpusRecord
from specactor_ray.distill.evaluation import AcceptanceCounts, replay
from specactor_ray.draft.lookup import NgramProposer
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.draft.proposer import Proposer
from specactor_ray.models.loading import load_model
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.table.requests import TargetRequest
from specactor_ray.target.base import Drafts
from specactor_ray.target.hf import HfEngine
from tests.by_name import ByName
from tests.tiny import tiny_draft
from tests.unit.distill.recorded import make_engine, recorded


@functools.cache
def model() -> RaggedModel:
    return RaggedModel(load_model(str(tiny_draft())), 32 << 20)


def draft_model() -> Proposer:
    return DraftModelProposer(model())


PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "ngram": lambda: NgramProposer(history_tokens=0),
    "draft_model": draft_model,
}


def coupled(
    engine: HfEngine, proposer: ByName, record: CorpusRecord, window: int
) -> tuple[list[int], AcceptanceCounts]:
    """Real coupled decoding of one request: draft from the newest commit, verify all of it, commit."""
    counts, request_id = AcceptanceCounts(window), "real"
    tokens: list[int] = []
    engine.table.clear()
    engine.add(engine.table.open(TargetRequest(request_id, record.prompt_token_ids, record.sampling)))
    proposer.open(request_id, record.prompt_token_ids, (), record.sampling, window)
    while engine.has_work():
        tails: dict[int, tuple[int, ...]] = {}
        for decoding in engine.decoding().tolist():
            while proposer.extend():
                pass
            tails[decoding] = proposer.tail(request_id)[1]
        result = engine.step(Drafts.of(tails))
        for _, fresh, _ in result.outputs():
            start, drafted, accepted = len(tokens), int(result.drafted[0]), int(result.accepted[0])
            assert proposer.commit(request_id, start, fresh)
            tokens += fresh
            if tails:
                counts.steps += 1
                room = record.sampling.max_tokens - start - 1
                for position in range(min(window, room, len(record.output_token_ids) - start)):
                    counts.possible[position] += 1
                counts.committed += len(fresh)
                counts.drafted += drafted
                counts.accepted += accepted
                for position in range(min(accepted + 1, drafted, len(fresh))):
                    counts.reached[position] += 1
                    counts.right[position] += position < accepted
    proposer.close(request_id)
    return tokens, counts


@pytest.fixture(scope="module")
def engine() -> HfEngine:
    return make_engine(hidden_layers=())


@pytest.mark.parametrize("part", ["heldout", "greedy"])
@pytest.mark.parametrize("method", PROPOSERS)
def test_replay_counts_what_coupled_decoding_does(engine: HfEngine, method: str, part: str) -> None:
    for record in recorded(part)[:2]:
        tokens, expected = coupled(engine, ByName(PROPOSERS[method]()), record, window=4)
        assert tuple(tokens) == record.output_token_ids
        assert replay(PROPOSERS[method](), [record], window=4) == expected


def test_records_under_way_together_do_not_disturb_each_other() -> None:
    records = recorded("heldout")[:5]
    alone = [replay(draft_model(), [record], 5) for record in records]
    together = replay(draft_model(), records, 5, batch=3)
    for name in (field.name for field in fields(AcceptanceCounts) if field.name != "window"):
        values = [getattr(one, name) for one in alone]
        total = [sum(column) for column in zip(*values, strict=True)] if isinstance(values[0], list) else sum(values)
        assert getattr(together, name) == total, name
    assert together.committed == sum(len(record.output_token_ids) - 1 for record in records)
