"""Replay: its figures are exactly those of the engine when the same proposer drafts for it in turn with it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from specactor_ray.distill.corpus import CorpusRecord
from specactor_ray.distill.evaluation import Step, facts_of, replay
from specactor_ray.draft.lookup import NgramProposer
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.draft.proposer import Proposer
from specactor_ray.models.loading import load_model
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.table.requests import TargetRequest
from specactor_ray.target.base import Drafts
from specactor_ray.target.hf import HfEngine
from tests.by_name import ByName, extend_fully
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


def coupled(engine: HfEngine, proposer: ByName, record: CorpusRecord, window: int) -> tuple[list[int], list[Step]]:
    """Real coupled decoding of one request: draft from the newest commit, verify all of it, commit."""
    steps, tokens = list[Step](), list[int]()
    engine.table.clear()
    engine.add(engine.table.open(TargetRequest("real", record.prompt_token_ids, record.sampling)))
    proposer.open("real", record.prompt_token_ids, (), record.sampling, window)
    while engine.has_work():
        tails: dict[int, tuple[int, ...]] = {}
        for decoding in engine.decoding().tolist():
            extend_fully(proposer)
            tails[decoding] = proposer.tail("real")[1]
        result = engine.step(Drafts.of(tails))
        for _, fresh, _ in result.outputs():
            assert proposer.commit("real", len(tokens), fresh)
            tokens += fresh
            if tails:
                steps.append((int(result.drafted[0]), int(result.accepted[0]), len(fresh)))
    proposer.close("real")
    return tokens, steps


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
    alone = [step for record in records for step in replay(draft_model(), [record], 5)]
    together = replay(draft_model(), records, 5, batch=3)
    assert sorted(together) == sorted(alone)
    assert sum(step[2] for step in together) == sum(len(record.output_token_ids) - 1 for record in records)


def test_figures_of_steps() -> None:
    facts = facts_of([(3, 2, 3), (0, 0, 1), (1, 1, 2)], window=3)
    assert (facts["steps"], facts["tokens"], facts["supply"], facts["acceptance_length"]) == (3, 6, 4 / 3, 2.0)
    assert facts["acceptance_rate"] == 0.75 and facts["by_position"] == [1.0, 1.0, 0.0]
    assert facts_of([], window=2)["by_position"] == [None, None]
