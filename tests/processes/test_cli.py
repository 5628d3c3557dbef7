"""The command line: exit codes, one clear line for each mistake, and what is left in the files afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from specactor_ray.cli import main as cli
from specactor_ray.config.load import from_mapping, load_config
from specactor_ray.config.schema import Config
from tests.fakes.forked_command import specactor
from tests.tiny import tiny_draft, tiny_target

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


def error_line(done: Any) -> str:
    """The one line on standard error of a command that a user's mistake ended, after the phases of its start."""
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.strip().splitlines() if "checking model, " not in line]
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    return lines[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "good.jsonl").write_text('{"prompt": "Say hello."}\n')
    (tmp_path / "bad.jsonl").write_text('{"prompt": "Say hello."}\n{"prompt": \n')
    (tmp_path / "typo.jsonl").write_text('{"prompt": "Say hello."}\n{"promt": "Say hello.", "id": 1}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "plain.txt").write_text("Say hello.\nSay goodbye.\n")
    (tmp_path / "there.jsonl").write_text("precious\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "bare" / "model.safetensors").touch()
    return tmp_path


class TestUserErrors:
    CASES: ClassVar = {
        "malformed line": (["data.path=bad.jsonl"], "bad.jsonl, line 2: not valid JSON"),
        "no such prompts": (["data.path=none.jsonl"], "there is no file none.jsonl"),
        "empty prompts": (["data.path=empty.jsonl"], "empty.jsonl: no prompts in it"),
        "no data.path": (["data.path=null"], "data.path: is not set."),
        "a mistyped key of a prompt": (
            ["data.path=typo.jsonl"],
            "typo.jsonl, line 2: expected an object with one of "
            '"prompt", "messages" or "prompt_token_ids"; its keys are promt, id. Did you mean prompt?',
        ),
        "a configuration without --config": (["local_cpu"], "an override without `=`. Fix: write --config local_cpu."),
        "prompts without a key": (["good.jsonl"], "an override without `=`. Fix: write data.path=good.jsonl."),
        "tasks of training": (
            ["data.path=hf:x/y"],
            "data.path: hf:x/y names tasks, which only `specactor train` reads",
        ),
        "two configurations": (["--config", LOCAL, "-c", LOCAL], "--config is given twice"),
        "no such config": (["--config", "none.yaml"], "none.yaml: there is no such file."),
        "a folder that cannot be made": (
            ["data.path=good.jsonl", "run.dir=/proc/x"],
            "cannot be written to (No such file or directory); name another folder",
        ),
    }

    @pytest.mark.parametrize("name", CASES)
    def test_rollout(self, folder: Path, name: str) -> None:
        arguments, problem = self.CASES[name]
        before = sorted(path.name for path in folder.rglob("*"))
        config = [] if "--config" in arguments else ["--config", LOCAL]
        assert problem in error_line(specactor(folder, "rollout", *config, *arguments))
        assert sorted(path.name for path in folder.rglob("*")) == before, "something was left behind"
        assert (folder / "there.jsonl").read_text() == "precious\n"

    AT_ONCE: ClassVar = {
        "no such model": (["target.model=./none"], "target.model: There is no directory './none'"),
        "no such id": (["target.model=no-one/none"], "target.model: The model 'no-one/none' is neither"),
        "no such draft model": (
            ["mode=decoupled", "drafters=[{method: draft_model, model: ./none}]"],
            "drafters.0.model: There is no directory './none'",
        ),
        "no such head": (["drafters=[{method: eagle, model: bare/x}]"], "drafters.0.model: There is no EAGLE head"),
        "no tokenizer": (["target.model=./bare"], "The model directory ./bare has no tokenizer"),
        "too many cores": (["mode=plain", "target.cores=999"], "target.cores: the run needs 999 CPU cores"),
        "too many draft actors": (
            ["mode=decoupled", "drafters=[{method: ngram, hosted: false, replicas: 998}]"],
            "drafters: the run needs 999 CPU cores (1 verifier(s) with 1 each, 998 draft actor(s) with 998 in all)",
        ),
        "more than Ray gives out": (
            ["mode=plain", "cluster.pin_cores=false", "cluster.num_cpus=3", "target.cores=4"],
            "target.cores: the run needs 4 CPU cores (1 verifier(s) with 4 each), and there are",
        ),
        "no such GPU": (["target.gpus=1", "cluster.num_gpus=0"], "target.gpus: the run needs 1 GPU(s) in all"),
        "a draft actor's GPU": (
            [
                *("mode=decoupled", "target.gpus=1", "cluster.num_gpus=1", f"target.model={tiny_target()}"),
                f"drafters=[{{method: draft_model, model: {tiny_draft()}, gpus: 1}}]",
            ],
            "drafters.0.gpus: the run needs 2 GPU(s) in all (target.gpus 1, drafters.0.gpus 1), and there are 1.",
        ),
        "a trainer's GPU": (["trainer.gpus=1", "cluster.num_gpus=0"], "trainer.gpus: the run needs 1 GPU(s) in all"),
        "a trainer's checkpoints": (["checkpoint.dir=/proc/x"], "checkpoint.dir: /proc/x cannot be written to"),
        "no such proposer": (["drafters=[{method: 'no.mod:Class'}]"], "drafters.0.method: no.mod:Class cannot be im"),
        "a broken module": (["drafters=[{method: 'broken:Mine'}]"], "broken:Mine cannot be imported (ZeroDivisionErr"),
        "a class of another kind": (
            ["drafters=[{method: 'json:JSONDecoder'}]"],
            "is no proposer",
        ),
        "an output beyond the context": (
            [f"target.model={tiny_target()}", "sampling.max_tokens=512"],
            "sampling.max_tokens: 512 leaves no room for a prompt: prompt and output share one context",
        ),
        "no profile": (["profile=good.jsonl"], "profile: good.jsonl is no profile of specactor. Fix: measure it again"),
        "no address": (["cluster.address=nonsense"], "cluster.address: 'nonsense' is not the address of a Ray cluster"),
        "nothing at the address": (["cluster.address=127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1"),
    }
    TRAINS: ClassVar = ("no such model", "too many cores", "a trainer's GPU", "a trainer's checkpoints")

    @pytest.mark.parametrize(
        ("command", "name"),
        [*(("rollout", name) for name in AT_ONCE if "trainer" not in name), *(("train", name) for name in TRAINS)],
    )
    def test_before_ray_and_torch_are_even_imported(self, folder: Path, command: str, name: str) -> None:
        arguments, problem = self.AT_ONCE[name]
        done = specactor(folder, command, "data.path=good.jsonl", "data.n=2", *arguments, HF_HUB_OFFLINE="1")
        assert problem in error_line(done)
        assert (done.stdout, done.heavy) == ("", ()) and not (folder / "runs").exists()

    def test_mistakes_of_a_benchmark_and_of_a_scenario_load_neither_ray_nor_torch(self, folder: Path) -> None:
        for arguments, problem in (
            (["bench", "rollout", "data.path=good.jsonl", "--modes", "coupled"], "--modes must contain plain"),
            (["simulate", "run", "--config", "none.yaml"], "none.yaml"),
            (["simulate", "run", "--config", "two_cores", "workload.request=3"], "workload.request: unknown key"),
        ):
            done = specactor(folder, *arguments)
            assert problem in error_line(done) and not {"ray", "torch", "transformers"} & set(done.heavy)

    def test_another_cluster_is_named_before_anything_is_loaded(self, folder: Path) -> None:
        done = specactor(folder, "rollout", "data.path=good.jsonl", "target.gpus=1", RAY_ADDRESS="127.0.0.1:9")
        warning, error = " ".join(done.stderr.split()).split("error: ")
        assert "RAY_ADDRESS is set" in warning and "cluster.address=auto" in warning
        assert done.returncode == 2 and "target.gpus" in error

    @pytest.mark.parametrize(
        ("option", "problem"),
        [
            ("--modes=plain,fast", "--modes: 'fast' is not a mode; the modes are plain, coupled"),
            ("--modes=decoupled", "--modes must contain plain"),
            ("--batch=4,0", "--batch: '0' is no whole number"),
            ("--prompts=bad.jsonl", "bad.jsonl, line 2: not valid JSON"),
            ("--output=/proc/x/bench.json", "--output: /proc/x cannot be written to"),
            ("--output=there.jsonl", "there.jsonl exists and is never overwritten"),
        ],
    )
    def test_bench(self, folder: Path, option: str, problem: str) -> None:
        before = sorted(path.name for path in folder.rglob("*"))
        done = specactor(folder, "bench", "rollout", "--config", LOCAL, "data.path=good.jsonl", option)
        assert problem in error_line(done)
        assert sorted(path.name for path in folder.rglob("*")) == before, "something was left behind"

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            (["rollout", "data.paht=x"], "data.paht: unknown key. Did you mean data.path?"),
            (["train", "--config", "none.yaml"], "none.yaml: there is no such file."),
            (["bench", "cluster.num_cpus=2"], "cluster.num_cpus: is set, but a cluster that runs already"),
            (["--address", "ray://u:secret@h:1", "rollout"], "--address: 'ray://***@h:1' is not the address of a dash"),
        ],
    )
    def test_submit_before_the_upload(self, folder: Path, arguments: list[str], problem: str) -> None:
        assert problem in error_line(specactor(folder, "submit", "--address", "http://127.0.0.1:1", *arguments))

    def test_submit_of_an_unknown_option(self, folder: Path) -> None:
        done = specactor(folder, "submit", "--address", "http://127.0.0.1:1", "bench", "--mode", "plain")
        assert done.returncode == 2 and "No such option" in done.stderr and "Traceback" not in done.stderr

    def test_submit_leaves_to_the_job_what_only_the_cluster_has(self, folder: Path) -> None:
        cli.check_job_arguments(["rollout"], ["data.path=x"])
        cli.check_job_arguments(["train"], ["-c", "/no.yaml"])
        elsewhere = "rollout", "run.name=${oc.env:OF_THE_CLUSTER}"
        done = specactor(folder, "submit", "--address", "http://127.0.0.1:1", *elsewhere)
        assert "no Ray job server answers at http://127.0.0.1:1" in error_line(done)

    @pytest.mark.parametrize("item", ["ngram", "=2", "ngram=-1"])
    def test_scale(self, folder: Path, item: str) -> None:
        assert f"{item!r} is not METHOD=N" in error_line(specactor(folder, "scale", item, "--run", "x"))

    @pytest.mark.parametrize(
        ("command", "setting", "meant"),
        [("train", "epoch=3", "epochs"), ("train", "device=cpu", ""), ("eval", "tokens=3", "max_tokens")],
    )
    def test_settings_of_drafters(self, folder: Path, command: str, setting: str, meant: str) -> None:
        where = ["--output", "head"] if command == "train" else ["--method", "ngram"]
        done = specactor(folder, "drafter", command, "--target", "x", "--data", "good.jsonl", *where, setting)
        line, (shown, *_) = error_line(done), setting.split("=")
        assert f"error: {shown}: is no setting of this command." in line and (meant in line) and "target" not in line
        about = specactor(folder, "drafter", command, "--help", COLUMNS="200").stdout
        assert "max_tokens" in about and ("learning_rate" in about) == (command == "train") == ("epochs" in line)

    def test_an_unknown_command_and_an_unknown_option(self, folder: Path) -> None:
        for arguments in (["roll"], ["rollout", "--confg", "x"]):
            done = specactor(folder, *arguments)
            assert done.returncode == 2 and "Traceback" not in done.stderr

    def test_a_cluster_that_is_not_there(self, folder: Path) -> None:
        done = specactor(folder, "status", "--run", "x", "--address", "127.0.0.1:1")
        assert "no Ray cluster answers at 127.0.0.1:1" in error_line(done)


class TestConfigCommand:
    def test_the_defaults_are_a_whole_configuration(self, folder: Path) -> None:
        done = specactor(folder, "config")
        assert done.returncode == 0 and done.stdout.startswith("mode: auto\n")
        assert from_mapping(yaml.safe_load(done.stdout)) == Config()
        assert "data.path: is not set." in error_line(specactor(folder, "rollout"))

    def test_the_printed_configuration_is_the_resolved_one(self, folder: Path) -> None:
        done = specactor(folder, "config", "--config", LOCAL, "target.max_batch=3", "data.path=good.jsonl")
        assert done.returncode == 0
        (folder / "again.yaml").write_text(done.stdout)
        assert load_config(folder / "again.yaml") == load_config(LOCAL, ["target.max_batch=3", "data.path=good.jsonl"])

    def test_what_comes_from_the_environment_is_not_printed(self, folder: Path) -> None:
        options = 'data.options={a: {token: "${oc.env:SECRET}"}, b: "${data.options.a}"}'
        done = specactor(folder, "config", "mode=plain", options, SECRET="hunter2")
        assert done.returncode == 0 and "${oc.env:SECRET}" in done.stdout and "hunter2" not in done.stdout
        done = specactor(folder, "config", "mode=plain", "target.max_batch=${oc.env:SECRET}", SECRET="hunter2")
        assert "target.max_batch: '${oc.env:SECRET}' stands for" in error_line(done) and "hunter2" not in done.stderr

    def test_the_keys_are_explained(self, folder: Path) -> None:
        text = specactor(folder, "config", "--help-keys").stdout
        for expected in ("speculation.draft_wait_s", "drafters.N.method", "one of auto, plain, coupled, decoupled"):
            assert expected in text
        text = specactor(folder, "config", "--help-keys", "Max_Batch", "draft_wait").stdout
        assert "drafters.N.max_batch" in text and "draft_wait_s" in text and "target.model" not in text
        assert "contains 'nosuchthing'" in error_line(specactor(folder, "config", "--help-keys", "nosuchthing"))

    def test_the_version(self, folder: Path) -> None:
        done = specactor(folder, "--version")
        versions = dict(line.split(" ", 1) for line in done.stdout.splitlines())
        assert done.returncode == 0 and {"specactor-ray", "python", "torch", "ray"} <= versions.keys()


class TestDemo:
    def test_mistakes(self, folder: Path) -> None:
        assert "--minutes: 0 is no time" in error_line(specactor(folder, "demo", "--minutes", "0"))
        (folder / "here").mkdir()
        assert "--output: here exists" in error_line(specactor(folder, "demo", "--output", "here"))
        assert "--output: /proc/x cannot be written" in error_line(specactor(folder, "demo", "--output", "/proc/x"))
        message = error_line(specactor(folder, "demo", "--model", "no/such/model"))
        assert "--model: There is no directory 'no/such/model'" in message
        assert not (folder / "runs").exists()


class TestLogByDefault:
    PROGRAM = (
        "import logging, sys\n"
        "if sys.argv[1]: logging.basicConfig(level=sys.argv[1])\n"
        "from specactor_ray.core.console import log_by_default\n"
        "log_by_default(); log_by_default()\n"
        "logging.getLogger('specactor_ray.rollout').info('mode: coupled')\n"
    )

    @pytest.mark.parametrize(("level", "times"), [("", 1), ("WARNING", 0), ("INFO", 1)])
    def test_a_program_without_logging_sees_what_is_chosen(self, folder: Path, level: str, times: int) -> None:
        done = run_program(folder, ("-c", self.PROGRAM), level)
        assert done.stderr.count("mode: coupled") == times


class TestJobs:
    @pytest.mark.parametrize("job", ["rollout.py", "bench.py"])
    def test_a_job_reports_mistakes_like_the_command(self, folder: Path, job: str) -> None:
        done = run_program(folder, [str(REPOSITORY / "jobs" / job)], "--config", LOCAL, "data.path=bad.jsonl")
        assert "bad.jsonl, line 2" in error_line(done)

    def test_a_job_goes_to_the_cluster_at_hand_and_starts_none(self, folder: Path) -> None:
        program = str(REPOSITORY / "jobs" / "rollout.py"), "--config", LOCAL, "data.path=good.jsonl"
        done = run_program(folder, program, RAY_ADDRESS="127.0.0.1:1")
        assert done.returncode == 2
        assert "no Ray cluster answers at 127.0.0.1:1" in done.stderr.splitlines()[-1]

    def test_an_address_among_the_arguments_wins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[list[str]] = []
        monkeypatch.setattr(cli, "main", lambda arguments: seen.append(list(arguments)))
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
        cli.run_as_job(["rollout"], ["--config", LOCAL, "cluster.address=10.0.0.9:6379"])
        assert load_config(None, ["mode=plain", seen[0][1], seen[0][-1]]).cluster.address == "10.0.0.9:6379"
        monkeypatch.delenv("RAY_ADDRESS")
        monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
        cli.run_as_job(["rollout"], ["--config", LOCAL])
        assert seen[1] == ["rollout", "--config", LOCAL]


def test_modules_in_the_current_folder_stand_in_for_nobody_elses(tmp_path: Path) -> None:
    folder = tmp_path / "downloads"
    folder.mkdir()
    for module in ("ray", "numpy", "torch", "yaml"):
        (folder / f"{module}.py").write_text("open('planted', 'w')\n")
    (folder / "mine.py").write_text("open('wanted', 'w')\ndef reward(sample):\n    return 1.0\n")
    script = tmp_path / "specactor"  # as pip writes it: its own folder comes first, not the current one
    script.write_text("from specactor_ray.__main__ import main\nmain()\n")
    done = run_program(folder, [str(script)], "status", "--address", "127.0.0.1:1")
    assert "no Ray cluster answers" in error_line(done)
    rewards = "reward.functions=[{name: 'mine:reward'}, {name: 'mine:other'}]"
    train = "train", "mode=plain", "data.path=reasoning_gym:none", "data.n=2", rewards
    assert "mine:other cannot be imported" in error_line(run_program(folder, [str(script)], *train))
    assert not (folder / "planted").exists()
    assert (folder / "wanted").exists()
