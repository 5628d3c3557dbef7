"""Training an EAGLE head from recorded rollouts, and what becomes of it."""

from __future__ import annotations

import pytest
import torch

from specactor_ray.config.methods import DrafterSpec
from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.errors import InputError
from specactor_ray.distill.corpus import CorpusRecord, RecordStore, collect
from specactor_ray.distill.eagle_student import Batch, EagleStudent, reject_foreign_layers
from specactor_ray.distill.evaluation import replay
from specactor_ray.distill.measuring import head_config
from specactor_ray.distill.recipe import CorpusRecipe, TrainRecipe
from specactor_ray.draft.eagle.proposer import EagleProposer
from specactor_ray.draft.eagle.runner import EagleRunner
from specactor_ray.draft.registry import build_proposer
from specactor_ray.models.loading import load_model
from specactor_ray.models.ragged_model import HEAD_INPUT
from specactor_ray.transport.messages import Features
from tests.by_name import ByName
from tests.tiny import tiny_eagle, tiny_target
from tests.unit.distill.recorded import make_engine, requests

LAYERS = (0, 1, 2, HEAD_INPUT)
RECIPE = TrainRecipe(
    CorpusRecipe(str(tiny_target()), max_tokens=32),
    tokens=400,
    draft_vocab=256,
    depths=2,
    minutes=None,
    epochs=3.0,
    learning_rate=2e-3,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> RecordStore:
    store = RecordStore(tmp_path_factory.mktemp("corpus"), "train")
    collect(make_engine(hidden_layers=LAYERS, max_batch=16), requests(12, 8), store)
    return store


def load(store: RecordStore, records: list[CorpusRecord]) -> Batch:
    return [(record, store.states(record.index)) for record in records]


def prepared(store: RecordStore) -> EagleStudent:
    student = EagleStudent(RECIPE, "cpu")
    assert student.hidden_layers == LAYERS
    student.prepare(store.records(), store.states)
    return student


def test_steps_lower_the_loss_and_leave_alone_what_is_the_targets(corpus: RecordStore) -> None:
    student = prepared(corpus)
    frozen = {"embed_tokens.weight", "lm_head.weight"}
    before = {name: weight.clone() for name, weight in student.module.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in student.module.parameters() if p.requires_grad], lr=2e-3)
    batch, losses = load(corpus, corpus.records()), []
    for _ in range(8):
        sums = student.backward(batch)
        losses.append(sums["loss"] / sums["tokens"])
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    changed = {name for name, weight in student.module.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == before.keys() - frozen
    again = prepared(corpus)
    assert all(torch.equal(again.trained()[name], before[name]) for name in changed), "a start of its own every time"
    again.load_trained(student.trained())
    assert torch.equal(again.trained()["fc.weight"], student.trained()["fc.weight"])


def test_matches_are_what_the_proposer_hits_after_the_recorded_prefix(corpus: RecordStore) -> None:
    student = prepared(corpus)
    records = corpus.records()[:4]
    sums = student.held_out(load(corpus, records))
    proposer, hits, tried = ByName(EagleProposer(EagleRunner(student.module, 4 << 20))), 0, 0
    for record in records:
        states = corpus.states(record.index)[:, :-64].float().numpy()
        for position in range(1, len(record.output_token_ids)):
            known = len(record.prompt_token_ids) + position - 1
            proposer.open("r", record.prompt_token_ids, record.output_token_ids[:position], record.sampling, 1)
            proposer.add_features("r", [Features(0, states[:known])])
            proposer.extend()
            hits += proposer.tail("r")[1] == record.output_token_ids[position : position + 1]
            tried += 1
    # The first token of an output is predicted from inside the prompt: an anchor that no proposer ever has.
    assert abs(hits - sums["matches"]) <= len(records)
    assert tried == sums["tokens"] - len(records)


def test_a_trained_head_is_right_ahead_and_shared_noise_helps(corpus: RecordStore) -> None:
    drafter = DrafterSpec(method="eagle", model=str(tiny_eagle()), max_batch=16)
    head = head_config(drafter, str(tiny_target()))
    assert head is not None
    lengths = []
    for shared in (True, False):
        drafter.shared_noise = shared
        proposer = build_proposer(drafter, TargetConfig(model=str(tiny_target())), "cpu")
        counts = replay(
            proposer,
            corpus.records(),
            3,
            features=lambda record: corpus.states(record.index)[:, : head.feature_size].float().numpy(),
        )
        lengths.append(counts.acceptance_length)
    assert lengths[0] > max(lengths[1], 1.1)
    assert replay(proposer, corpus.records(), 3).accepted == 0, "without states there are no guesses"


def test_a_target_of_another_build_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 32}
    with pytest.raises(InputError, match=r"--target.*Llama family"):
        reject_foreign_layers(GPT2LMHeadModel(GPT2Config(**shape)), "gpt2")
    reject_foreign_layers(load_model(str(tiny_target())), "tiny")
