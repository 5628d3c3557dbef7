"""A noisy drafter is right in the asked share of its draws, also where it was not measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specactor_ray.core.types import SamplingParams
from specactor_ray.models import builtin, loading, noisy
from tests.plain_decoding import plain_tokens
from tests.tiny import tiny_prompts


def chats(n: int, seed: int = 0) -> list[noisy.Chat]:
    return [[{"role": "user", "content": prompt}] for prompt in tiny_prompts(n, seed)]


def answers(model: Path, prompts: list[noisy.Chat]) -> list[noisy.DrawnText]:
    return noisy.answers_of(loading.load_model(str(model)), loading.load_tokenizer(str(model)), prompts)


@pytest.fixture(autouse=True)
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noisy, "hardware", lambda: {"vector": []})
    monkeypatch.setattr(noisy, "shipped_prompts", lambda: chats(32, seed=1))


def test_the_answers_are_those_of_rollouts(tiny_model_dir: Path) -> None:
    expected = plain_tokens(tiny_model_dir, tiny_prompts(8), SamplingParams(max_tokens=64), samples=2)
    found = answers(tiny_model_dir, chats(8))
    for number, answer in enumerate(found):
        output = expected[number, 0]
        assert tuple(answer.token_ids[-len(output) :]) == output == tuple(draws[0] for draws in answer.draws)
        assert answer.draws[0][1] == expected[number, 1][0]
    assert noisy.right_share(loading.load_model(str(tiny_model_dir)), found) == 1.0


@pytest.mark.parametrize("share", [0.4, 0.75])
def test_the_share_is_the_one_asked(share: float, tiny_model_dir: Path, tmp_path: Path) -> None:
    folder, again = tmp_path / "one", tmp_path / "two"
    for path in (folder, again):
        path.mkdir()
        noisy.add_noise(tiny_model_dir, share, path)
    assert (folder / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    record = json.loads((folder / "noise.json").read_text())
    assert abs(record["right"] - share) <= noisy._TOLERANCE and record["draws"] > 1000
    drafter, held_out = loading.load_model(str(folder)), answers(tiny_model_dir, chats(64, seed=2))
    assert abs(noisy.right_share(drafter, held_out) - share) < 0.05
    assert loading.load_tokenizer(str(folder)).eos_token_id == 1 and drafter.config.vocab_size == 512
    own = loading.load_model(str(tiny_model_dir)).state_dict()
    same = {name for name, weight in drafter.state_dict().items() if torch.equal(weight, own[name])}
    assert same and all("norm" in name or "embed" in name or "lm_head" in name for name in same)


def test_a_name_with_a_share_and_a_size_is_both(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECACTOR_CACHE", str(tmp_path))
    monkeypatch.setattr(builtin, "convert_smollm2", lambda folder: _copy(tiny_model_dir, folder))
    drafter, big = (loading.load_model(name) for name in ("smollm2-135m~0.60", "smollm2-135m~.6@3m"))
    ids = torch.arange(3, 30)[None]
    assert torch.allclose(drafter(ids).logits, big(ids).logits, rtol=0, atol=1e-3)
    assert big.config.hidden_size > drafter.config.hidden_size
    version = f"-v{builtin._RECIPE_VERSION}"
    names = {path.name.removesuffix(version) for path in (tmp_path / "models").iterdir() if path.is_dir()}
    assert names == {"smollm2-135m", "smollm2-135m~0.6", "smollm2-135m~0.6@0.003b"}


def _copy(source: Path, folder: Path) -> None:
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
