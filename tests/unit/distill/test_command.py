"""`specactor drafter`: what it writes, what it refuses, and that a killed training goes on."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from specactor_ray.cli import main as cli
from specactor_ray.cli.train_drafter import train_drafter
from specactor_ray.config.methods import DrafterSpec
from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.errors import InputError
from specactor_ray.distill.card import DrafterRecipe
from specactor_ray.distill.corpus import RecordStore, split_prompts
from specactor_ray.distill.training import CHECKPOINT_FILE, HeadTrainer
from specactor_ray.draft.eagle.proposer import EagleProposer
from specactor_ray.draft.proposer import build_proposer
from specactor_ray.models.loading import load_tokenizer
from specactor_ray.runs.folder import RunInUseError
from tests.tiny import tiny_prompts, tiny_target

RECIPE = DrafterRecipe(
    str(tiny_target()),
    max_tokens=32,
    samples=1,
    draft_vocab=256,
    depths=2,
    tokens=600,
    epochs=6.0,
    window=4,
    max_batch=32,
    kv_cache_gb=0.05,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    prompts = dict.fromkeys(tiny_prompts(30, 4))
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


@pytest.fixture(scope="module")
def drafter(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("drafter") / "out"
    train(data, output)
    return output


def train(data: Path, output: Path, shown: io.StringIO | None = None) -> list[dict[str, Any]]:
    return train_drafter(RECIPE, data, output, Console(file=shown or io.StringIO(), width=400))


def specactor(*arguments: str | Path, code: int = 2) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    assert (ended.value.code or 0) == code


def train_options(prompts: Path, folder: Path, changes: dict[str, Any] | None = None) -> list[str | Path]:
    """Arguments; a change whose name has no dash is a setting."""
    options = {"--target": tiny_target(), "--data": prompts, "--output": folder, "epochs": "1"} | (changes or {})
    words = ((name, str(value)) if name.startswith("--") else (f"{name}={value}",) for name, value in options.items())
    return ["drafter", "train", *(word for pair in words for word in pair)]


def test_a_drafter_that_a_configuration_takes_as_it_is(drafter: Path, data: Path) -> None:
    """With its card. A second call shows it, and does not make it again."""
    config = DrafterSpec(method="eagle", model=str(drafter), dtype="float32", kv_cache_gb=0.1, max_batch=8)
    proposer = build_proposer(config, TargetConfig(model=str(tiny_target())), "cpu")
    assert isinstance(proposer, EagleProposer) and proposer.vocab_size == 512
    assert load_tokenizer(str(drafter)).chat_template == load_tokenizer(str(tiny_target())).chat_template
    assert not list(drafter.rglob("checkpoint*"))
    card = json.loads((drafter / "drafter.json").read_text())
    assert (card["method"], card["target"]["name"]) == ("eagle", str(tiny_target()))
    assert card["training"]["layers_read"] == [0, 1, 2] and card["training"]["corpus_tokens"] >= 400
    rows = card["acceptance"]
    assert [row["temperature"] for row in rows] == [1.0, 0.0]
    assert all(row["acceptance_length"] > 1.05 and len(row["by_position"]) == 4 for row in rows), rows
    weights = (drafter / "model.safetensors").stat().st_mtime_ns
    shown = io.StringIO()
    assert train(data, drafter, shown) == rows and "finished before" in shown.getvalue()
    assert (drafter / "model.safetensors").stat().st_mtime_ns == weights


@pytest.mark.parametrize("point", ["corpus", "training"])
def test_a_killed_training_goes_on_to_the_same_drafter(
    point: str, drafter: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at the fourth recorded rollout, or at the fourth step; until then no other process trains there."""
    output, calls, shown = tmp_path / "out", itertools.count(1), io.StringIO()
    owner, name = {"corpus": (RecordStore, "add"), "training": (HeadTrainer, "step")}[point]
    method = getattr(owner, name)

    def killed(*arguments: Any) -> Any:
        if next(calls) == 4:
            with pytest.raises(RunInUseError, match="--output: "):
                train(data, output)
            os.kill(os.getpid(), signal.SIGTERM)
        return method(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, killed)
        with pytest.raises(KeyboardInterrupt):
            train(data, output, shown)
    assert "same command" in shown.getvalue()
    assert not (output / "drafter.json").exists()
    checkpoint = output / "training" / CHECKPOINT_FILE
    if checkpoint.exists():
        good = checkpoint.read_bytes()
        checkpoint.write_bytes(b"PK\x03\x04 nothing of use")
        with pytest.raises(InputError, match=CHECKPOINT_FILE):
            train(data, output)
        checkpoint.write_bytes(good)
    assert checkpoint.exists() == (point == "training")
    train(data, output)
    card, whole = (json.loads((folder / "drafter.json").read_text()) for folder in (output, drafter))
    assert card["acceptance"] == whole["acceptance"] and card["training"]["steps"] == whole["training"]["steps"]
    ours, expected = (load_file(folder / "model.safetensors") for folder in (output, drafter))
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def copied(source: Path, folder: Path, leave_out: str = "", **changes: Any) -> Path:
    """A model with other values in its `config.json`, without the files whose names begin with `leave_out`."""
    folder.mkdir()
    for path in source.iterdir():
        if not (leave_out and path.name.startswith(leave_out)) and path.name != "config.json":
            (folder / path.name).symlink_to(path)
    (folder / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | changes))
    return folder


def test_what_cannot_be_trained(data: Path, drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, one line with the fix, and nothing left behind."""
    bare = copied(tiny_target(), tmp_path / "bare", leave_out="tokenizer")
    small = copied(tiny_target(), tmp_path / "small", vocab_size=100)
    out, ids, empty = (tmp_path / name for name in ("out", "ids.jsonl", "empty.jsonl"))
    ids.write_text('{"prompt": "a"}\n\n{"prompt_token_ids": [600]}\n')
    empty.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "\\ud800"}]}\n')
    for changes, problem in (
        ({"--data": ids}, "ids.jsonl, line 3: token id 600 is outside the target's vocabulary (0 to 511)"),
        ({"--data": empty}, f"--data: {empty}, prompt 2: the prompt is not valid Unicode"),
        ({"--heldout": empty}, f"--heldout: {empty}, prompt 2: the prompt is not valid Unicode"),
        ({"depths": "17"}, "depths: 17 is out of range"),
        ({"--target": "/nowhere/model"}, "There is no directory"),
        ({"--data": "/nowhere/data.jsonl"}, "there is no file"),
        ({"dtype": "int8"}, "dtype: 'int8' is not known"),
        ({"minute": "5"}, "minute"),
        ({"max_tokens": "512"}, "leaves no room for a prompt"),
        ({"max_tokens": "511"}, "none is left to train on"),
        ({"--target": bare}, "has no tokenizer"),
        ({"--target": small}, "the model's vocabulary has 100 tokens"),
        ({"--output": drafter}, "of another recipe ("),
        ({"--output": bare}, "exists and holds no drafter"),
    ):
        specactor(*train_options(data, out, changes))
        error = capsys.readouterr().err
        assert problem in error and error.count("\n") == 1, changes
        assert not out.exists() and not (bare / "training").exists()


def test_a_job_cannot_write_into_its_own_copy(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with pytest.raises(SystemExit) as ended:
        cli.run_as_job(["drafter", "train"], [str(o) for o in train_options(data, Path("relative"))[2:]])
    assert ended.value.code == 2 and not Path("relative").exists()


def test_no_prompt_is_trained_on_and_measured_on() -> None:
    prompts = [(i, i) for i in range(40)] + [(3, 3), (1,) * 50]
    split = split_prompts(prompts, None, 10)
    assert len(split.train) == 36 and len(split.held_out) == 4
    named = split_prompts(prompts, [(5, 5), (99,)], 10)
    assert (5, 5) not in named.train and len(named.train) == 39 and named.held_out == ((5, 5), (99,))
    for bad, held_out in (([(1, 2)], None), ([(1,) * 50], None), ([(1, 2)], [(1, 2)])):
        with pytest.raises(InputError):
            split_prompts(bad, held_out, 10)
