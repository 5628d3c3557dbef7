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


class KilledError(Exception):
    """Stands for whatever ends a collection."""


def test_records_are_the_targets_rollouts_with_the_states_its_logits_are_made_from() -> None:
    model = load_model(str(tiny_target()))
    for record in recorded("heldout")[:6]:
        begin, states = len(record.prompt_token_ids) - 1, torch.from_numpy(record.states())[:, -64:]
        with torch.no_grad():
            logits = model(torch.tensor([[*record.prompt_token_ids, *record.output_token_ids]])).logits[0, begin:-1]
            assert torch.allclose(model.lm_head(states[begin:]), logits, atol=2e-2), "states are in half precision"
        assert len(states) == record.num_tokens - 1, "one for every position but the last, the prompt's included"


def test_an_interrupted_collection_goes_on_to_the_same_corpus(tmp_path: Path) -> None:
    wanted = requests(24, 9)
    whole = collect(make_engine(max_batch=8), RecordStore(wanted, tmp_path / "whole", "train"), 300, max_open=8)

    def stop(tokens: int) -> None:
        if tokens >= 200:
            raise KilledError

    with pytest.raises(KilledError):
        collect(make_engine(max_batch=8), RecordStore(wanted, tmp_path, "train"), 300, max_open=8, on_progress=stop)
    store = RecordStore(wanted, tmp_path, "train")
    assert store.known, "nothing was kept"
    # Another batch size admits other requests towards the end; what is returned is the same.
    again = collect(make_engine(max_batch=5), store, 300, max_open=5)
    assert again == whole and sum(len(record.output_token_ids) for record in whole) >= 300
    assert sum(len(record.output_token_ids) for record in whole[:-1]) < 300
    engine = make_engine()
    engine.close()  # cannot be stepped any more
    assert collect(engine, RecordStore(wanted, tmp_path, "train"), 300) == whole, "nothing is made again"


def test_parts_are_told_apart_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    parts = {"heldout": requests(2, 3), "heldout-greedy": requests(3, 4)}
    for part, wanted in parts.items():
        collect(make_engine(), RecordStore(wanted, tmp_path, part))
    for part, wanted in parts.items():
        assert sorted(RecordStore(wanted, tmp_path, part).known) == list(range(len(wanted)))
    damaged = tmp_path / "heldout-000001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(InputError, match=damaged.name):
        RecordStore(parts["heldout"], tmp_path, "heldout")


def test_a_folder_of_other_rollouts_is_refused(tmp_path: Path) -> None:
    def claim(folder: str, **facts: Any) -> None:
        claim_folder(tmp_path / folder, tmp_path / folder / "corpus.json", facts, "corpus")

    for _ in range(2):
        claim("c", temperature=1.0, target="abc")
    with pytest.raises(InputError, match=r"target 'abc' .*'xyz'.*temperature 1\.0 .*0\.5"):
        claim("c", temperature=0.5, target="xyz")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "precious").write_text("")
    with pytest.raises(InputError, match=r"\bx\b"):
        claim("x")
    (tmp_path / "c" / "corpus.json").write_text("{")
    with pytest.raises(InputError, match=r"corpus\.json is damaged"):
        claim("c", temperature=1.0, target="abc")
