"""The corpus: a function of its requests and budget, whatever interrupted the collection."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specactor_ray.core.errors import InputError
from specactor_ray.distill.corpus import RecordStore, claim_folder, collect
from specactor_ray.models.loading import load_model
from specactor_ray.table.requests import Finish, TargetRequest
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


class Lengths:
    """An engine that ends requests after these numbers of tokens, all 5."""

    def __init__(self, *lengths: int) -> None:
        self.table, self._left, self._lengths = self, dict[int, int](), lengths

    def open(self, request: TargetRequest) -> int:
        return int(request.request_id)

    def add(self, row: int) -> None:
        self._left[row] = self._lengths[row]

    def close(self, row: int) -> None:
        del self._left[row]

    def step(self) -> Any:
        self._left = {row: left - 1 for row, left in self._left.items()}
        ends = {row: Finish.RUNNING if left else Finish.LENGTH for row, left in self._left.items()}
        states = SimpleNamespace(split=lambda: [(row, 0, torch.zeros(1, 2)) for row in ends])
        outputs = [(row, [5], end) for row, end in ends.items()]
        finish = np.array(list(ends.values()))
        return SimpleNamespace(rows=np.array(list(ends)), finish=finish, states=states, outputs=lambda: outputs)


@pytest.mark.parametrize("lengths", [(100, *[10] * 11), (10, 100, *[10] * 10), (5, 40, 9, 60, *[8] * 8)])
@pytest.mark.parametrize("steps", [6, 12, 20, 50])
def test_wherever_a_collection_stops_it_goes_on_to_the_same_corpus(
    lengths: tuple[int, ...], steps: int, tmp_path: Path
) -> None:
    """Also where the first requests are the longest, and later ones alone fill the budget."""

    def collected(folder: str, stop_after: int) -> list[tuple[int, int]]:
        left = itertools.count(stop_after, -1)

        def stop(tokens: int) -> None:
            if not next(left):
                raise KilledError

        store = RecordStore(requests(12, 1), tmp_path / folder, "train")
        return [(one.index, len(one.output_token_ids)) for one in collect(Lengths(*lengths), store, 60, 8, stop)]

    with contextlib.suppress(KilledError):
        collected("stopped", steps)
    assert collected("stopped", -1) == collected("whole", -1)
    assert not RecordStore(requests(12, 1), tmp_path / "stopped", "train").missing(60)


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
