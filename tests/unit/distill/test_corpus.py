"""The corpus: a function of its requests and budget, whatever interrupted the collection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specactor_ray.core.errors import InputError
from specactor_ray.distill.corpus import RecordStore, claim_folder, collect
from specactor_ray.models.loading import load_model
from tests.tiny import tiny_target
from tests.unit.distill.recorded import make_engine, recorded, requests


class Killed(Exception):
    """Stands for whatever ends a collection."""


def test_records_are_the_targets_rollouts_with_the_states_its_logits_are_made_from() -> None:
    records, store = recorded("heldout")
    model = load_model(str(tiny_target()))
    for record in records[:6]:
        context = torch.tensor([[*record.prompt_token_ids, *record.output_token_ids]])
        with torch.no_grad():
            logits = model(context).logits[0, len(record.prompt_token_ids) - 1 : -1]
            states = store.states(record.index)[:, -64:]
            ours = model.lm_head(states[len(record.prompt_token_ids) - 1 :].float())
        assert len(states) == record.num_tokens - 1, "one for every position but the last, the prompt's included"
        assert torch.allclose(ours, logits, atol=2e-2), "states are kept in half precision"
    assert {record.finish_reason for record in records} <= {"stop", "length"}


def test_an_interrupted_collection_goes_on_to_the_same_corpus(tmp_path: Path) -> None:
    wanted = requests(24, 9)
    whole = collect(make_engine(max_batch=8), wanted, RecordStore(tmp_path / "whole", "train"), 300, max_open=8)

    def stop(tokens: int) -> None:
        if tokens >= 200:
            raise Killed

    store = RecordStore(tmp_path / "parts", "train")
    with pytest.raises(Killed):
        collect(make_engine(max_batch=8), wanted, store, 300, max_open=8, on_progress=stop)
    store = RecordStore(tmp_path / "parts", "train")  # what is on disk
    before = set(store.known)
    # Another batch size admits other requests towards the end; what is returned is the same.
    again = collect(make_engine(max_batch=5), wanted, store, 300, max_open=5)
    assert again == whole and sum(len(r.output_token_ids) for r in whole) >= 300
    assert sum(len(r.output_token_ids) for r in whole[:-1]) < 300
    assert before, "nothing was kept"


def test_what_is_recorded_is_not_made_again(tmp_path: Path) -> None:
    wanted = requests(6, 3)
    first = collect(make_engine(), wanted, RecordStore(tmp_path, "train"))
    engine = make_engine()
    engine.close()  # cannot be stepped any more
    assert collect(engine, wanted, RecordStore(tmp_path, "train")) == first


def test_a_part_whose_name_begins_with_anothers_is_another_part(tmp_path: Path) -> None:
    for part, seed in (("heldout", 3), ("heldout-greedy", 4)):
        collect(make_engine(), requests(3, seed), RecordStore(tmp_path, part))
    for part, seed in (("heldout", 3), ("heldout-greedy", 4)):
        again = RecordStore(tmp_path, part).known
        assert [record.sampling for record in again.values()] == [request.sampling for request in requests(3, seed)]


def test_a_damaged_file_is_put_aside_and_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted = requests(4, 3)
    first = collect(make_engine(), wanted, RecordStore(tmp_path, "train"))
    damaged = tmp_path / "train-000002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:100])
    store = RecordStore(tmp_path, "train")
    assert "is damaged" in caplog.text and [*store.known] == [0, 1, 3]
    assert collect(make_engine(), wanted, store) == first == [*RecordStore(tmp_path, "train").known.values()]


def test_a_folder_of_other_rollouts_is_refused(tmp_path: Path) -> None:
    def claim(folder: str, **facts: Any) -> None:
        claim_folder(tmp_path / folder, tmp_path / folder / "corpus.json", facts, "corpus")

    for _ in range(2):
        claim("c", temperature=1.0, target="abc")
    with pytest.raises(InputError, match=r"target 'abc' there, 'xyz' wanted; temperature 1.0 there, 0.5 wanted"):
        claim("c", temperature=0.5, target="xyz")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "precious").write_text("")
    with pytest.raises(InputError, match="holds no corpus"):
        claim("x")
