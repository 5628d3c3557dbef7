"""The command line: exit codes, one clear line for each mistake, and what is left in the files afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from specactor_ray.cli import main as cli
from specactor_ray.config.load import from_mapping, load_config
from tests.fakes.forked_command import specactor
from tests.tiny import tiny_target

REPOSITORY = Path(__file__).parents[2]
LOCAL = str(REPOSITORY / "conf" / "local_cpu.yaml")


def run_program(folder: Path, program: Sequence[str], *arguments: str, **env: str) -> Any:
    """Run a program in a folder, in an interpreter of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "COLUMNS"))}
    return subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        env={**clean, "PYTHONPATH": str(REPOSITORY), **env},
    )


def files(folder: Path) -> list[str]:
    """Names of all files and folders, without bytecode of imported modules."""
    return sorted(path.name for path in folder.rglob("*") if "__pycache__" not in path.parts)


def error_line(done: Any) -> str:
    """The one line on standard error of a command that a user's mistake ended, after the phases of its start."""
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.strip().splitlines() if "checking " not in line]
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    return lines[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "good.jsonl").write_text('{"prompt": "Say hello."}\n')
    (tmp_path / "bad.jsonl").write_text('{"prompt": "Say hello."}\n{"prompt": \n')
    (tmp_path / "ids.jsonl").write_text('{"prompt_token_ids": [1, 99999]}\n')
    (tmp_path / "there.jsonl").write_text("precious\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "bare" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return tmp_path


NO_MODEL, NO_CORES = ["target.model=./none"], ["mode=plain", "target.cores=999"]
MISTAKES: list[tuple[list[str], str]] = [
    # what a rollout needs; the keys of the configuration are in tests/unit/config
    (["rollout", "data.path=bad.jsonl"], "bad.jsonl, line 2: "),
    (["rollout", "data.path=none.jsonl"], "data.path: "),
    (["rollout", "data.path=ids.jsonl", f"target.model={tiny_target()}"], "ids.jsonl, line 1: "),
    (["rollout", "data.path=null"], "data.path: "),
    (["rollout", "data.path=hf:x/y"], "data.path: hf:x/y"),
    (["rollout", "local_cpu"], "local_cpu"),
    (["rollout", "--config", LOCAL, "-c", LOCAL], "--config is given twice"),
    (["rollout", "--config", "none.yaml"], "none.yaml: "),
    (["rollout", *NO_MODEL], "target.model: "),
    (["rollout", "target.model=no-one/none"], "target.model: "),
    (["rollout", "mode=decoupled", "drafters=[{method: draft_model, model: ./none}]"], "drafters.0.model: "),
    (["rollout", "target.model=./bare"], "./bare"),
    (["rollout", *NO_CORES], "target.cores: "),
    (["rollout", "target.gpus=1", "cluster.num_gpus=0"], "target.gpus: "),
    (["rollout", "drafters=[{method: 'broken:Mine'}]"], "ZeroDivisionErr"),
    (["rollout", f"target.model={tiny_target()}", "sampling.max_tokens=512"], "sampling.max_tokens: "),
    (["rollout", "mode=auto", "profile=good.jsonl"], "profile: "),
    (["rollout", "cluster.address=nonsense"], "cluster.address: "),
    (["rollout", "cluster.address=127.0.0.1:1"], "127.0.0.1:1"),
    (["train", "data.path=null", "data.n=1"], "data.path: "),
    (["train", *NO_MODEL], "target.model: "),
    (["train", *NO_CORES], "target.cores: "),
    (["train", "trainer.gpus=1", "cluster.num_gpus=0"], "trainer.gpus: "),
    (["train", "checkpoint.dir=/proc/x"], "checkpoint.dir: /proc/x"),
    (["bench", "rollout", "--modes=plain,fast"], "--modes: 'fast'"),
    (["bench", "rollout", "--modes=decoupled"], "--modes must contain plain"),
    (["bench", "rollout", "--stretch=2"], "--stretch is for --paced"),
    (["bench", "rollout", "--paced=h10", *NO_MODEL], "hardware h10: "),
    (["bench", "rollout", "--batch=4,0"], "--batch: '4,0'"),
    (["bench", "rollout", "--prompts=bad.jsonl"], "bad.jsonl, line 2: "),
    (["bench", "rollout", "--output=/proc/x/bench.json"], "--output: /proc/x"),
    (["bench", "rollout", "--output=there.jsonl"], "there.jsonl"),
    (["serve", "--port=0", "--host=0.0.0.0"], "--host 0.0.0.0: other machines would reach the server"),
    (["serve", "--port=0", "--host=no.such.host.invalid", "target.model=nowhere"], "--host no.such.host.invalid: "),
    (["serve", "--port=0", "target.model=nowhere"], "nowhere"),
    (["serve", "--port=0", "--model-name="], "--model-name is empty"),
    (["scale", "ngram", "--run", "x"], "METHOD=N"),
    (["scale", "ngram=-1", "--run", "x"], "METHOD=N"),
    (["scale", f"ngram={'1' * 5000}", "--run", "x"], "METHOD=N"),
    (["scale", "ngram=1", "ngram=3", "--run", "x"], "ngram is given twice"),
    (["plan", "profile=~nosuch/s.json"], "~nosuch/s.json: there is no home folder"),
    (["rollout", "target.model=~nosuch/m", "data.path=p.txt"], "~nosuch/m: there is no home folder"),
    (["status", "--run", "x", "--address", "127.0.0.1:1"], "127.0.0.1:1"),
    (["config", "--help-keys", "nosuchthing"], "'nosuchthing'"),
    (["report", "none"], "none: no folder"),
    (["report", "bare"], "bare is no folder of a training or of a rollout"),
    (["report", "bare", "--output", "there.jsonl"], "--output: there.jsonl"),
    (["demo", "--minutes", "0"], "--minutes: "),
    (["demo", "--output", "bare"], "--output: bare"),
    (["demo", "--output", "/proc/x"], "--output: /proc/x"),
    (["demo", "--model", "no/such/model"], "--model: "),
]
MADE_OF_PROMPTS = ("rollout", "train", "bench")


class TestUserErrors:
    @pytest.mark.parametrize(("arguments", "problem"), MISTAKES, ids=[" ".join(one)[:60] for one, _ in MISTAKES])
    def test_one_line_before_torch_is_imported_and_nothing_left(
        self, folder: Path, arguments: list[str], problem: str
    ) -> None:
        before = files(folder)
        given = [one for one in ("data.path=good.jsonl", "data.n=2") if arguments[0] in MADE_OF_PROMPTS]
        at = 2 if arguments[0] == "bench" else 1
        key = {"SPECACTOR_API_KEY": "a" * 20} if "--host=no.such.host.invalid" in arguments else {}
        done = specactor(folder, *arguments[:at], *given, *arguments[at:], HF_HUB_OFFLINE="1", **key)
        assert problem in error_line(done)
        assert not done.stdout and not {"torch", "transformers", "vllm"} & set(done.heavy)
        assert not (arguments[0] in ("rollout", "train") and done.heavy)
        assert files(folder) == before
        assert (folder / "there.jsonl").read_text() == "precious\n"

    def test_mistakes_of_a_scenario_load_neither_ray_nor_torch(self, folder: Path) -> None:
        for arguments, problem in (
            (["simulate", "run", "--config", "none.yaml"], "none.yaml"),
            (["simulate", "run", "--config", "two_cores", "workload.request=3"], "workload.request: "),
            (["simulate", "run", "--config", "two_cores", "--acceptance", "good.jsonl"], "--acceptance: "),
        ):
            done = specactor(folder, *arguments)
            assert problem in error_line(done) and not {"ray", "torch", "transformers"} & set(done.heavy)

    @pytest.mark.parametrize(("setting", "meant"), [("epoch=3", "Did you mean epochs?"), ("device=cpu", "")])
    def test_settings_of_drafters(self, folder: Path, setting: str, meant: str) -> None:
        where = ["--target", "x", "--data", "good.jsonl", "--output", "head"]
        line, (shown, *_) = error_line(specactor(folder, "drafter", "train", *where, setting)), setting.split("=")
        assert f"error: {shown}: " in line and (meant in line) and "target" not in line
        about = specactor(folder, "drafter", "train", "--help", COLUMNS="200").stdout
        assert "max_tokens" in about and "learning_rate" in about

    def test_an_unknown_command_and_an_unknown_option(self, folder: Path) -> None:
        for arguments in (["roll"], ["rollout", "--confg", "x"]):
            done = specactor(folder, *arguments)
            assert done.returncode == 2 and "Traceback" not in done.stderr


class TestConfigCommand:
    def test_the_printed_configuration_is_a_whole_and_resolved(self, folder: Path) -> None:
        done = specactor(folder, "config", "--config", LOCAL, "target.max_batch=3", "data.path=good.jsonl")
        assert done.returncode == 0 and from_mapping(yaml.safe_load(done.stdout)) == load_config(
            LOCAL, ["target.max_batch=3", "data.path=good.jsonl"]
        )

    def test_the_keys_are_explained(self, folder: Path) -> None:
        text = specactor(folder, "config", "--help-keys").stdout
        for expected in ("speculation.draft_wait_s", "drafters.N.method", "one of auto, plain, coupled, decoupled"):
            assert expected in text
        text = specactor(folder, "config", "--help-keys", "Max_Batch", "draft_wait").stdout
        assert "drafters.N.max_batch" in text and "draft_wait_s" in text and "target.model" not in text

    def test_the_version(self, folder: Path) -> None:
        done = specactor(folder, "--version")
        versions = dict(line.split(" ", 1) for line in done.stdout.splitlines())
        assert done.returncode == 0 and {"specactor-ray", "python", "torch", "ray"} <= versions.keys()


class TestJobs:
    def test_a_job_goes_to_the_cluster_at_hand_and_starts_none(self, folder: Path) -> None:
        program = str(REPOSITORY / "jobs" / "rollout.py"), "--config", LOCAL, "data.path=good.jsonl"
        done = run_program(folder, program, RAY_ADDRESS="127.0.0.1:1")
        assert done.returncode == 2
        assert "127.0.0.1:1 (RAY_ADDRESS)" in done.stderr.splitlines()[-1]

    def test_arguments_override_the_folder_of_a_job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[list[str]] = []
        monkeypatch.setattr(cli, "main", lambda arguments: seen.append(list(arguments)))
        monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
        cli.run_as_job(["rollout"], ["--config", LOCAL])
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
        cli.run_as_job(["rollout"], ["--config", LOCAL, "run.dir=/mine"])
        cli.run_as_job(["drafter", "train"], [])
        assert seen == [
            ["rollout", "--config", LOCAL],
            ["rollout", f"run.dir={cli.JOB_RUNS}", "--config", LOCAL, "run.dir=/mine"],
            ["drafter", "train"],
        ]


TRAINS = ("mode=plain", "data.path=tasks.jsonl", "data.n=2", f"target.model={tiny_target()}", "target.kv_cache_gb=0.05")
SHARED = (
    *("trainer.colocate=true", "trainer.gpus=1", "target.gpus=1", "target.cores=1", "trainer.prompts_per_step=4096"),
    "trainer.micro_batch_tokens=400000",
    "target.dtype=bfloat16",
)
UNUSABLE: list[tuple[tuple[str, ...], str]] = [
    (("reward.functions=[{name: 'none.such:f'}]",), "reward.functions: none.such:f cannot be imported"),
    (("reward.functions=[{name: 'mine:other'}]",), "reward.functions: mine:other cannot be imported"),
    (("reward.functions=[{name: 'mine:text'}]",), "reward.functions: mine:text gave no reward to made-up outputs"),
    (("algorithm.loss=none.such:f",), "algorithm.loss: none.such:f cannot be imported"),
    (("environment.name=none.such:E",), "environment.name: none.such:E cannot be imported"),
    (("trainer.weight_transport=smoke",), "trainer.weight_transport: 'smoke'"),
    (("trainer.lora.rank=2", "trainer.lora.targets=[qproj]"), "trainer.lora.targets: 'qproj' matches nothing"),
    (SHARED, "trainer.colocate: an update takes "),
]


@pytest.mark.parametrize(("overrides", "problem"), UNUSABLE, ids=[problem[:30] for _, problem in UNUSABLE])
def test_what_a_training_cannot_use_is_refused_before_ray_is_imported(
    tmp_path: Path, overrides: tuple[str, ...], problem: str
) -> None:
    """With a fix, and nothing is left. The last one has a GPU of 6 GiB, by its driver."""
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "Count from 1 to 5.", "answer": "5"}\n')
    (tmp_path / "mine.py").write_text("def text(sample):\n    return '1.0'\n")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 6144\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    before, path = files(tmp_path), f"{tmp_path}:{os.environ['PATH']}" if overrides is SHARED else os.environ["PATH"]
    done = specactor(tmp_path, "train", *TRAINS, *overrides, HF_HUB_OFFLINE="1", PATH=path)
    line = error_line(done)
    assert problem in line and " Fix: " in line
    assert "ray" not in done.heavy and not done.stdout and files(tmp_path) == before


def test_modules_in_the_current_folder_stand_in_for_nobody_elses(tmp_path: Path) -> None:
    folder = tmp_path / "downloads"
    folder.mkdir()
    for module in ("ray", "numpy", "torch", "yaml"):
        (folder / f"{module}.py").write_text("open('planted', 'w')\n")
    (folder / "mine.py").write_text("open('wanted', 'w')\ndef reward(sample):\n    return 1.0\n")
    script = tmp_path / "specactor"  # as pip writes it: its own folder comes first, not the current one
    script.write_text("from specactor_ray.__main__ import main\nmain()\n")
    done = run_program(folder, [str(script)], "status", "--address", "127.0.0.1:1")
    assert "127.0.0.1:1" in error_line(done)
    rewards = "reward.functions=[{name: 'mine:reward'}, {name: 'mine:other'}]"
    train = "train", "mode=plain", "data.path=reasoning_gym:none", "data.n=2", rewards
    assert "mine:other" in error_line(run_program(folder, [str(script)], *train))
    assert not (folder / "planted").exists()
    assert (folder / "wanted").exists()


@pytest.mark.parametrize("arguments", [["doctor"], ["config"], ["rollout"]], ids=" ".join)
def test_a_removed_current_folder_is_said(tmp_path: Path, arguments: list[str]) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    program = "import os, sys; os.rmdir(os.getcwd()); from specactor_ray.cli.main import main; main(sys.argv[1:])"
    assert "current folder has been removed" in error_line(run_program(gone, ["-c", program], *arguments))


@pytest.mark.parametrize("arguments", [["rollout", "data.path="], ["config", "--config", ""]], ids=lambda one: one[0])
def test_a_name_that_is_not_utf8_is_said(tmp_path: Path, arguments: list[str]) -> None:
    *first, last = arguments
    name = os.fsdecode(b"caf\xe9.jsonl")
    done = run_program(tmp_path, ["-m", "specactor_ray.cli.main"], *first, last + name)
    assert "caf\\udce9.jsonl" in error_line(done) and "is not valid UTF-8" in done.stderr
