"""What a training run refuses before anything is started, and where it goes on."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from specactor_ray.config import Config, load_config, rules
from specactor_ray.config.load import from_mapping
from specactor_ray.config.training_schema import TrainerBackend
from specactor_ray.core.errors import ConfigError, InputError, UserError
from specactor_ray.core.files import append_json
from specactor_ray.models.loading import load_model, load_tokenizer
from specactor_ray.models.shapes import count_parameters
from specactor_ray.rollout.prompts import encode_prompt
from specactor_ray.runs.records import METRICS_FILE, read_records
from specactor_ray.runs.training import compare_settings, keep_dtype, open_run, settings_of
from specactor_ray.startup.machine import Devices, Machine, devices_of
from specactor_ray.startup.memory import check_memory, check_turn_of_trainer, settle_caches
from specactor_ray.startup.mode import settle
from specactor_ray.startup.resolve import resolve
from specactor_ray.trainer.run import (
    FIXES,
    activation_bytes,
    checked_tasks,
    dtype_note,
    longest_sample,
    plan_memory,
    prepared,
    train,
)
from tests.refused import refused
from tests.tiny import tiny_draft, tiny_eagle, tiny_target

HERE = Machine(16)
LONGEST = 128
"""Tokens of a sample."""
ADAPTED = ["trainer.lora.rank=8", "trainer.lora.targets=[q_proj]"]


def settled(tmp_path: Path, *overrides: str) -> Config:
    return settle(settings(tmp_path, *overrides), HERE, None)[0]


def settings(tmp_path: Path, *overrides: str) -> Config:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "Count from 1 to 5.", "answer": "5"}\n')
    base = [
        "mode=plain",
        f"run.dir={tmp_path / 'runs'}",
        f"data.path={tmp_path / 'tasks.jsonl'}",
        "data.n=4",
        f"target.model={tiny_target()}",
        "target.kv_cache_gb=0.05",
    ]
    return load_config(None, [*base, *overrides])


@pytest.mark.parametrize(
    ("override", "key", "named"),
    [
        ("data.n=1", "data.n", "grpo"),
        ("sampling.temperature=0", "sampling.temperature", ""),
        ("sampling.top_p=0.9", "sampling.top_p", "use 1,"),
        ("sampling.top_k=20", "sampling.top_k", "use 0,"),
        ("algorithm.name=ppo; algorithm.advantages=batch", "algorithm.advantages", "value head"),
        ("algorithm.importance=off; algorithm.importance_cap=2", "algorithm.importance_cap", "importance=token"),
        ("algorithm.clip_dual=1", "algorithm.clip_dual", "above 1"),
        ("trainer.ranks=2", "trainer.ranks", "trainer.backend=deepspeed"),
        ("trainer.warmup_steps=1000", "trainer.warmup_steps", ""),
        ("trainer.max_staleness=1; trainer.offload=true", "trainer.offload", ""),
        (
            "trainer.backend=deepspeed; trainer.zero_stage=3; trainer.gpus=1; trainer.offload=true",
            "trainer.zero_stage",
            "use 2",
        ),
        ("reward.functions=[{name: reasoning_gym}]", "reward.functions", "reasoning_gym"),
        ("trainer.accelerator=A100", "trainer.accelerator", "trainer.gpus=1"),
        (
            "trainer.colocate=true; trainer.gpus=1; target.gpus=1; trainer.accelerator=A100",
            "trainer.accelerator",
            "target.accelerator",
        ),
        (
            "trainer.colocate=true; trainer.gpus=1; target.gpus=1; trainer.accelerator=H100; target.accelerator='!T4'",
            "trainer.accelerator",
            "target.accelerator",
        ),
        ("trainer.colocate=true", "trainer.colocate", "target.gpus=1"),
        ("trainer.colocate=true; trainer.gpus=1", "trainer.colocate", "target.gpus=1"),
        (
            "trainer.colocate=true; trainer.gpus=1; target.gpus=1; trainer.max_staleness=1",
            "trainer.offload",
            "colocate",
        ),
        (
            "trainer.colocate=true; trainer.gpus=1; target.gpus=1; trainer.ranks=2; trainer.backend=deepspeed",
            "trainer.ranks",
            "target.replicas",
        ),
        ("reward.functions=[{name: exactmatch}]", "reward.functions", "exact_match, length, math, reasoning_gym"),
    ],
)
def test_refused_configurations(override: str, key: str, named: str, tmp_path: Path) -> None:
    with refused(key, named):
        prepared(settings(tmp_path, *override.split("; ")))


def test_a_transport_that_torch_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overrides(*more: str) -> Config:
        return prepared(settings(tmp_path, "trainer.weight_transport=broadcast", "trainer.gpus=1", *more))

    for backend, gpus in (("nccl", 1), ("gloo", 0)):  # of the target
        with monkeypatch.context() as patch:
            patch.setattr(f"torch.distributed.is_{backend}_available", lambda: False)
            with refused("trainer.weight_transport", backend, "trainer.weight_transport=object_store"):
                overrides(f"target.gpus={gpus}")
            if gpus:  # one GPU for both, or several processes with the target's GPUs
                overrides("target.gpus=1", "trainer.colocate=true")
                overrides("target.gpus=2", "target.tensor_parallel=2", "target.backend=vllm")


def test_tasks_that_cannot_be_used(tmp_path: Path) -> None:
    no_answer = "data.answer_key=solution; data.n=1; algorithm.name=ppo"
    for override, named in (
        ("sampling.max_tokens=600", "sampling.max_tokens"),
        (no_answer, "line 1.*'solution'.*exact_match"),
    ):
        config = prepared(settings(tmp_path, *override.split("; ")))
        with pytest.raises(UserError, match=named):
            checked_tasks(resolve(config, HERE))


REWARDS = """import nothing_here
---
def none(sample):
    pass
---
def of_trl(prompts, completions, **columns):
    return [0.0]
---
def raises(sample):
    return 1 / 0
---
def slow(sample):
    while True: pass
---
def of_a_column(sample): return len(sample.metadata["word"]) / len(sample.token_ids)
---
def of_json(sample): return 1.0 if json.loads(sample.text) else 0.0
import json
"""


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (0, r"mine:f.*ModuleNotFoundError: .*nothing_here' \(mine.py, line 1\)"),
        (1, r"mine:f \(mine.py, line 1\) .*None.* Fix: .*def f\(sample\)"),
        (2, r"mine:f \(mine.py, line 1\) returned 1 values for 2 completions"),
        (3, r"mine:f .* 4 x ZeroDivisionError: division by zero \(mine.py, line 2\)\. Fix: "),
        (4, r"reward.timeout_s \(0.5 s\)"),
        (5, ""),
        (6, ""),  # of answers that are numbers
    ],
)
def test_rewards_that_fail_are_refused_before_anything_starts(
    module: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With `reward.failure_value`, to which they may leave outputs, they are named in the log."""
    text = re.sub(r"def \w+", "def f", REWARDS.split("---\n")[module])
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    more = ["reward.timeout_s=0.5"] if module == 4 else []
    config = settings(tmp_path, "reward.functions=[{name: 'mine:f'}]", *more)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "Count from 1 to 5.", "answer": "5", "word": "five"}\n')
    if not message:
        assert checked_tasks(resolve(prepared(config), HERE)).position == 0, "no task is left out"
        return
    with pytest.raises(ConfigError, match=f"^reward.functions: .*{message}"):
        checked_tasks(resolve(prepared(config), HERE))
    if module == 3:
        config.reward.failure_value = 0.0
        checked_tasks(resolve(prepared(config), HERE))
        assert re.search(message.removesuffix(" Fix: "), caplog.text)


@pytest.mark.parametrize(
    ("overrides", "dtype", "note"),
    [
        (["target.dtype=bfloat16"], "bfloat16", "target.dtype is bfloat16, and trainer.dtype float32: .*=float32"),
        ([], "float32", ""),
        (["target.gpus=1"], "bfloat16", "target.dtype is bfloat16"),
        (["trainer.dtype=bfloat16", "target.dtype=float32"], "float32", "trainer.dtype bfloat16"),
    ],
)
def test_rollout_and_trainer_compute_in_one_type_or_the_start_says_so(
    overrides: list[str], dtype: str, note: str, tmp_path: Path
) -> None:
    config, _ = settle(prepared(settings(tmp_path, *overrides)), Machine(2, bfloat16=True), None)
    assert config.target.dtype == dtype
    notes = dtype_note(dtype, config.trainer.dtype)
    assert re.search(note, " ".join(notes)) and bool(notes) == bool(note)


def test_the_memory_plan(tmp_path: Path) -> None:
    """It refuses with the numbers, and has a head and its learning."""
    plans, head = {}, f"drafters=[{{method: eagle, model: {tiny_eagle()}, kv_cache_gb: 0.5}}]"
    for where in ("off", "trainer"):
        config = settled(tmp_path, "mode=decoupled", head, f"drafters.0.online.where={where}")
        plans[where] = plan_memory(config, LONGEST)
    assert 0.5 * 2**30 < plans["off"]["draft actors, 1 x eagle"] < 2**30
    (learning,) = plans["trainer"].keys() - plans["off"].keys()
    # At least the states it learns from: so many positions of three layers of 64 numbers.
    assert learning == "trainer, learning of eagle" and plans["trainer"][learning] > 8192 * 3 * 64 * 4
    check_memory(config, 16 * 2**30, plan_memory(config, LONGEST), FIXES)
    with pytest.raises(ConfigError, match=r"0.10 GiB(.|\n)*trainer.micro_batch_tokens"):
        check_memory(config, 0.1 * 2**30, plan_memory(config, LONGEST), FIXES)


def test_the_memory_plan_has_the_longest_sample(tmp_path: Path) -> None:
    """Its prompt is the longest that fits the model; with an environment a sample may fill the context. No micro-batch
    has more tokens than a step."""
    words, file, tokenizer = "the red fox sleeps", tmp_path / "long.jsonl", load_tokenizer(str(tiny_target()))
    prompts = [*[" ".join([words] * count) for count in (1, 7, 20, 90)], " ".join(["9 8 7 6"] * 12)]
    counts = [len(encode_prompt(tokenizer, prompt, True)) for prompt in prompts]
    assert counts[2] < counts[4] < 140 < counts[3] and len(prompts[4]) < len(prompts[2]), "digits are tokens"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    mixed = ["data.path=null", f"data.mixture=[{{path: {tmp_path / 'tasks.jsonl'}}}, {{path: {file}}}]"]
    turns = ["environment.name=retry", "environment.max_turns=2"]
    small = ["sampling.max_tokens=100", "target.max_model_len=240", "reward.functions=[{name: length}]"]
    for more, tokens in (([f"data.path={file}"], counts[4] + 100), (mixed, counts[4] + 100), (turns, 240)):
        resolved = resolve(prepared(settings(tmp_path, *small, "trainer.micro_batch_tokens=30", *more)), HERE)
        config, text = resolved.config, count_parameters(str(tiny_target()), False)[1]
        longest = longest_sample(resolved, checked_tasks(resolved))
        assert longest == tokens
        for most, planned in ((30, longest), (1000, 1000), (1 << 20, 8 * 4 * longest)):
            config.trainer.micro_batch_tokens = most
            assert plan_memory(config, longest)["trainer, activations"] == activation_bytes(text, planned, False)


def test_a_gpu_that_cannot_hold_the_trainers_turn_is_refused(tmp_path: Path) -> None:
    overrides = ["target.gpus=1", "trainer.gpus=1", "trainer.colocate=true", "trainer.dtype=bfloat16"]
    config = prepared(settled(tmp_path, *overrides))
    assert config.trainer.offload, "they take turns"
    machine, plan = Machine(2, 1, (80 * 2**30,)), plan_memory(config, LONGEST)
    assert devices_of(config, trains=True).fit(Devices(16, 1))
    check_turn_of_trainer(config, machine, plan)
    billions = {**plan, "trainer, weights, gradients, moments": 16 * 7e9}
    with pytest.raises(ConfigError, match=r"moments: 104\.\d+ GiB.* of 80\.00 GiB are usable") as error:
        check_turn_of_trainer(config, machine, billions)
    assert error.value.key == "trainer.colocate" and "trainer.micro_batch_tokens" in error.value.fix
    config.trainer.backend = TrainerBackend.deepspeed
    with pytest.raises(ConfigError, match=r"buckets of DeepSpeed: 2\.79 GiB"):
        check_turn_of_trainer(config, machine, billions)
    caches = []
    for colocate in (False, True):
        config.trainer.colocate = colocate
        config.target.kv_cache_gb, config.target.max_batch = None, 1 << 20
        settle_caches(config, replace(machine, gpu_bytes=(8 * 2**30,)))
        caches.append(config.target.kv_cache_gb)
    assert caches[0] - caches[1] == pytest.approx(1.0), "the trainer's context"


def test_the_memory_plan_of_an_adapter(tmp_path: Path) -> None:
    """Without a second model as the reference, and without gradients and moments of frozen weights. Its targets are
    checked with it."""
    size, key = load_model(str(tiny_target())).num_parameters(), "trainer, weights, gradients, moments"
    whole, adapted = (
        plan_memory(settled(tmp_path, "algorithm.kl_coef=0.1", *more), LONGEST)
        for more in ([], ["trainer.lora.rank=2"])
    )
    trained = 2 * 4 * ((64 + 64) * 2 + (64 + 32) * 2 + (64 + 176) * 3)  # in four layers
    assert whole[key] - adapted[key] == 4 * (3 * size - 4 * trained)
    assert whole.keys() - adapted.keys() == {"trainer, reference model"}
    with refused("trainer.lora.targets", "'qproj' matches nothing", "q_proj"):
        plan_memory(settled(tmp_path, "trainer.lora.rank=2", "trainer.lora.targets=[qproj]"), LONGEST)


def begin(tmp_path: Path, *overrides: str, steps: int = 0) -> Config:
    """A run with a checkpoint after `steps` and records of one step more."""
    config = settings(tmp_path, "run.name=r", *overrides)
    run = open_run(config, 10)

    def write(folder: Path) -> None:
        (folder / "weights").mkdir()
        (folder / "weights" / "model.bin").write_text("w")

    run.store.save(replace(run.state, step=steps, position=9), write)
    append_json(run.folder / METRICS_FILE, *({"step": s, "note": "a\u2028b"} for s in range(1, steps + 2)))
    with (run.folder / METRICS_FILE).open("a") as file:
        file.write('{"step": ')
    run.close()
    return config


def test_where_a_run_goes_on(tmp_path: Path) -> None:
    """By name, as the latest that is not finished, or as a new run from a checkpoint's path. Later records are dropped,
    and the data type stays, where `auto` would be another one on this machine."""
    begin(tmp_path, "target.dtype=bfloat16", steps=3)
    path = tmp_path / "runs" / "r" / "checkpoints" / "step-000003"
    file = tmp_path / "runs" / "r" / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join([lines[0], b"\0\xff" * 9, b'{"step": "2"}', *lines[1:]]))
    for overrides, dtype in ((["run.name=r"], "bfloat16"), ([], "bfloat16"), (["target.dtype=float32"], "float32")):
        config = settings(tmp_path, "resume=auto", *overrides)
        keep_dtype(config)
        run = open_run(config)
        assert (run.state.step, run.state.position, run.checkpoint, run.is_saved) == (3, 9, path, True)
        assert [record["step"] for record in read_records(run.folder / METRICS_FILE)] == [1, 2, 3]
        assert config.target.dtype == load_config(run.folder / "config-from-step-000003.yaml").target.dtype == dtype
        run.close()
    run = open_run(settings(tmp_path, f"resume={path}", "run.name=second"))
    assert (run.folder.name, run.state.step, run.checkpoint) == ("second", 3, path)
    assert not run.is_saved, "its first step comes after a checkpoint of its own"
    with pytest.raises(InputError, match="/nothing"):
        open_run(settings(tmp_path, f"resume={tmp_path}/nothing", "run.name=third"))


def test_where_a_run_begins_anew(tmp_path: Path) -> None:
    assert open_run(settings(tmp_path, "resume=auto", "run.name=new")).state.step == 0
    begin(tmp_path, steps=3)
    with pytest.raises(InputError, match=r"run\.name"):
        open_run(settings(tmp_path, "run.name=r"))
    (tmp_path / "runs" / "r" / "summary.json").write_text('{"status": "complete"}')
    assert open_run(settings(tmp_path, "resume=auto")).folder.name not in ("r", "new")


def test_a_run_that_is_being_trained_is_not_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nor is its folder of checkpoints."""
    where = f"checkpoint.dir={tmp_path / 'shared'}"
    begin(tmp_path, where, steps=3)
    with pytest.raises(InputError, match=r"checkpoint\.dir: "):
        open_run(settings(tmp_path, where, "run.name=other"))
    live = open_run(settings(tmp_path, where, "resume=auto", "run.name=r"))
    partial = live.store.folder / ".partial-step-000004"
    partial.mkdir()
    metrics = (live.folder / METRICS_FILE).read_text() + '{"step": 4}\n'
    (live.folder / METRICS_FILE).write_text(metrics)
    for resume in ("auto", "never"):
        with pytest.raises(InputError, match=rf"run.name: .*{os.getpid()}"):
            open_run(settings(tmp_path, f"resume={resume}", "run.name=r"))
    with pytest.raises(InputError, match=rf"checkpoint.dir: .*{os.getpid()}"):
        open_run(settings(tmp_path, where, "run.name=third"))
    assert not (tmp_path / "runs" / "third").exists()
    with caplog.at_level(logging.INFO):
        other = open_run(settings(tmp_path, "resume=auto"))
    assert other.folder != live.folder and other.checkpoint is None and "resume=auto leaves out r" in caplog.text
    assert partial.is_dir() and (live.folder / METRICS_FILE).read_text() == metrics, (
        "nothing of the live run was touched"
    )
    live.close()
    assert open_run(settings(tmp_path, where, "resume=auto", "run.name=r")).state.step == 3


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        ("key", r"it was .*/shared\), or begin a new run by resume=never"),
        ("folder", r"/shared has none of the checkpoints"),
        ("folder of a killed run", r"/shared has none of the checkpoints"),
        ("other key", r"/new has none of the checkpoints .*/shared\)"),
        ("manifest", r"none of the 1 checkpoints in .*/shared is sound.* Fix: restore"),
    ],
)
def test_a_run_whose_checkpoints_are_lost_is_not_erased(tmp_path: Path, lost: str, named: str) -> None:
    shared = tmp_path / "shared"
    where, again = [f"checkpoint.dir={shared}"], ("resume=auto", "run.name=r")
    begin(tmp_path, *where, steps=3)
    (tmp_path / "runs" / "r" / "summary.json").write_text('{"status": "complete", "checkpoints": ["step-000003"]}')
    if lost.startswith("folder"):
        shutil.rmtree(shared)
    if lost == "folder of a killed run":
        (tmp_path / "runs" / "r" / "summary.json").unlink()
        append_json(tmp_path / "runs" / "r" / METRICS_FILE, {"step": 5, "timeline": {"checkpoint": [0.0, 1.0]}})
    if lost == "manifest":
        (shared / "step-000003" / "manifest.json").write_text("")
    where = {"key": [], "other key": [f"checkpoint.dir={tmp_path / 'new'}"]}.get(lost, where)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=rf"^checkpoint\.dir: .*{named}"):
        open_run(settings(tmp_path, *where, *again))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "new").exists()


def test_a_resumed_run_that_is_refused_later_keeps_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path, steps=3)
    monkeypatch.setattr("specactor_ray.trainer.run.check_memory", Mock(side_effect=ConfigError("target", "too large.")))
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    with refused("target", "too large"):
        train(settings(tmp_path, "resume=auto", "run.name=r"), Console(file=io.StringIO()))
    assert {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()} == before


def test_a_run_that_was_stopped_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    begin(tmp_path)
    shutil.rmtree(tmp_path / "runs" / "r" / "checkpoints")
    run = open_run(settings(tmp_path, "resume=auto", "run.name=r"))
    assert (run.state.step, run.checkpoint, read_records(run.folder / METRICS_FILE)) == (0, None, [])


@pytest.mark.parametrize(
    ("override", "key", "named"),
    [
        (f"target.model={tiny_draft()}", "target.model", "hidden_size"),
        ("sampling.seed=5", "sampling.seed", "sampling.seed=0"),
        ("data.shuffle=false", "data.shuffle", "true"),
        ("data.options={a: 1}", "data.options", ""),
        ("data.map=mine:rows", "data.map", "data.map=null"),
        ("data.mixture=[{path: tasks.jsonl}]", "data.mixture", ""),
        ("tasks", "data.path", "10"),
        ("algorithm.name=ppo", "algorithm.name", "grpo"),
        ("trainer.backend=deepspeed", "trainer.backend", ""),
        ("trainer.lora.rank=null", "trainer.lora.rank", "trainer.lora.rank=8"),
        ("trainer.lora.alpha=8", "trainer.lora.alpha", "32"),
        ("trainer.lora.targets=[v_proj]", "trainer.lora.targets", "q_proj"),
    ],
)
def test_settings_that_a_checkpoint_does_not_fit_are_refused(
    override: str, key: str, named: str, tmp_path: Path
) -> None:
    begin(tmp_path, *ADAPTED, steps=3)
    checkpoint = tmp_path / "runs" / "r" / "checkpoints" / "step-000003"
    overrides, tasks = ([*ADAPTED, override], 10) if override != "tasks" else (ADAPTED, 11)
    for how in (["resume=auto", "run.name=r"], [f"resume={checkpoint}", "run.name=second"]):
        with refused(key, named):
            open_run(settings(tmp_path, *overrides, *how), tasks)
    assert not (tmp_path / "runs" / "second").exists()
    records = (tmp_path / "runs" / "r" / "metrics.jsonl").read_text()
    assert records.endswith('{"step": '), "refused before anything was changed"


def test_an_adapter_is_not_put_on_weights_that_were_trained_whole(tmp_path: Path) -> None:
    """Nor on those of a version that had no adapters."""
    config = begin(tmp_path, steps=3)
    state = tmp_path / "runs" / "r" / "checkpoints" / "step-000003" / "state.json"
    saved = json.loads(state.read_text())
    for known in (saved["settings"], {k: v for k, v in saved["settings"].items() if "lora" not in k}):
        now = settings_of(from_mapping({"trainer": {"lora": {"rank": 8}}}))
        with refused("trainer.lora.rank", "trainer.lora.rank=null, or begin a new run from its weights"):
            compare_settings(state.parent, known, {**now, "data.path": known["data.path"]})
        compare_settings(state.parent, known, {**settings_of(config), "trainer.lora.rank": None})


def test_other_settings_that_changed_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Options may hold secrets; neither messages nor checkpoints have them."""
    begin(tmp_path, "environment.name=retry", steps=3)
    changed = ("data.n=2", "trainer.learning_rate=0.5", "algorithm.name=rloo", "trainer.steps=900")
    secret = ("environment.name=retry", "environment.options={token: secret}")
    run = open_run(settings(tmp_path, "resume=auto", "run.name=r", *changed, *secret))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    warned = {re.sub(r"\d{6,}(?=$| now)", "OPTIONS", line) for line in warnings}
    assert warned == {
        "data.n is 2 now; up to step-000003 it was 4",
        "trainer.learning_rate is 0.5 now; up to step-000003 it was 1e-06",
        "algorithm.name is rloo now; up to step-000003 it was grpo",
        "environment.options is OPTIONS now; up to step-000003 it was OPTIONS",
    }
    assert run.state.settings["data.n"] == 2, "what later checkpoints are made with"
    assert run.state.settings["environment.name"] == "retry" and "secret" not in json.dumps(run.state.settings)


def test_evaluations_of_a_resumed_run_can_be_compared_with_those_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of a run that had none may begin."""
    held, again = f"evaluation.path={tmp_path}/./held.jsonl", ("resume=auto", "run.name=r")
    begin(tmp_path, steps=3)
    for more in ((), ("evaluation.every=3",)):
        open_run(settings(tmp_path, held, "evaluation.n=2", *more, *again)).close()
    assert "evaluation.n is 2 now; up to step-000003 it was 1" in caplog.text
    (tmp_path / "more").mkdir()
    begin(tmp_path / "more", held, steps=3)
    for changed in ("evaluation.n=3", "evaluation.path=null", "evaluation.options={a: 1}", "evaluation.share=0.5"):
        with refused(changed.partition("=")[0], "resume=never"):
            open_run(settings(tmp_path / "more", held, changed, *again))
    open_run(settings(tmp_path / "more", held.replace("/./", "/"), "evaluation.every=3", *again)).close()


def test_packages_that_are_missing_are_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules.importlib.util, "find_spec", lambda _name: None)
    for section, values in (
        ("trainer.backend", {"trainer": {"backend": "deepspeed"}}),
        ("trainer.lora.rank", {"trainer": {"lora": {"rank": 8}}}),
        ("tracking.wandb_project", {"tracking": {"wandb_project": "mine"}}),
    ):
        with refused(section, "not installed"):
            rules.validate_training(from_mapping({**values, "data": {"n": 4}}))
