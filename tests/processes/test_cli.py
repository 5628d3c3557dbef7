"""The command line: exit codes, one clear line for each mistake, and what is left in the files afterwards."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from rich.console import Console

from specactor_ray.cli import main as cli
from specactor_ray.cli.report import cut_line, failed_prompts_line
from specactor_ray.config.load import from_mapping, load_config
from specactor_ray.config.schema import Config, ModeName
from specactor_ray.core.errors import ClusterError, InputError, ModelLoadError, UserError
from specactor_ray.core.files import write_json
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.trajectory import RolloutMetrics, Trajectory
from specactor_ray.runs.rollout import RunOutcome, run_rollout
from specactor_ray.runs.trajectories import TrajectoryWriter
from specactor_ray.sampling.seeds import derive_seed
from specactor_ray.transport.messages import RequestStats
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
    """The one line on standard error of a command that a user's mistake ended; a slow start shows others."""
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.strip().splitlines() if "checking and starting, " not in line]
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
        "existing output": (["data.path=good.jsonl", "data.output=there.jsonl"], "there.jsonl exists and is never"),
        "output in a file": (["data.path=good.jsonl", "data.output=there.jsonl/x"], "there.jsonl is not a folder"),
        "unknown key": (["data.paht=good.jsonl"], "data.paht: unknown key. Did you mean data.path?"),
        "max_tokens 0": (["sampling.max_tokens=0"], "sampling.max_tokens: 0 is not allowed. Fix: it must be a whole"),
        "negative temperature": (
            ["sampling.temperature=-1"],
            "sampling.temperature: -1.0 is not allowed. Fix: it must",
        ),
        "top_k of 64 bits": (["sampling.top_k=9223372036854775808"], "sampling.top_k: 9223372036854775808 is not"),
        "a seed of 5,000 digits": (["sampling.seed=" + "1" * 5000], "sampling.seed: '1111"),
        "a number of 401 digits": (["target.kv_cache_gb=" + "1" * 401], "target.kv_cache_gb: 1111"),
        "a name that is not UTF-8": (["run.name=\udcff"], "run.name: '\\udcff' is not valid YAML"),
        "a long value": (["run.name=" + "x" * 100_000], "... (100002 characters) cannot name a folder"),
        "a mistyped method": (["drafters=[{method: ngrams}]"], "Did you mean ngram?"),
        "a mistyped key of a prompt": (
            ["data.path=typo.jsonl"],
            "typo.jsonl, line 2: expected an object with one of "
            '"prompt", "messages" or "prompt_token_ids"; its keys are promt, id. Did you mean prompt?',
        ),
        "a configuration without --config": (["local_cpu"], "an override without `=`. Fix: write --config local_cpu."),
        "prompts without a key": (["good.jsonl"], "an override without `=`. Fix: write data.path=good.jsonl."),
        "a key without its section": (
            ["model=x"],
            "model: unknown key. Did you mean target.model or drafters.N.model?",
        ),
        "a key of another section": (["target.max_tokens=4"], "unknown key. Did you mean sampling.max_tokens?"),
        "tasks of training": (
            ["data.path=hf:x/y"],
            "data.path: hf:x/y names tasks, which only `specactor train` reads",
        ),
        "an element that is not there": (
            ["drafters=[]", "drafters.0.method=ngram"],
            "for example 'drafters=[{method: ngram}]'",
        ),
        "a stop text that is no list": (["sampling.stop=foo"], "Fix: sampling.stop is a list (a text each)"),
        "a section without a value": (["target="], "target: an override without a value would drop"),
        "two configurations": (["--config", LOCAL, "-c", LOCAL], "--config is given twice"),
        "no such config": (["--config", "none.yaml"], "none.yaml: there is no such file."),
        "a folder that cannot be made": (
            ["data.path=good.jsonl", "run.dir=/proc/x"],
            "cannot be written to (No such file or directory); name another folder",
        ),
        "output in no folder": (["data.path=good.jsonl", "data.output=no/x.jsonl"], "data.output: there is no folder"),
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
            "is no proposer: it lacks open, commit",
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
            (["simulate", "--config", "none.yaml"], "none.yaml"),
            (["simulate", "--config", "two_cores", "workload.request=3"], "workload.request: unknown key"),
        ):
            done = specactor(folder, *arguments)
            assert problem in error_line(done) and not {"ray", "torch", "transformers"} & set(done.heavy)

    def test_an_output_that_no_prompt_has_room_for(self, folder: Path) -> None:
        room = "data.path=good.jsonl", "sampling.max_tokens=300", "target.max_model_len=300"
        message = error_line(specactor(folder, "rollout", f"target.model={tiny_target()}", *room))
        assert "sampling.max_tokens: 300 leaves no room" in message and "target.max_model_len is 300" in message
        assert not (folder / "runs").exists()

    def test_another_cluster_is_named_before_anything_is_loaded(self, folder: Path) -> None:
        done = specactor(folder, "rollout", "data.path=good.jsonl", "target.gpus=1", RAY_ADDRESS="127.0.0.1:9")
        warning, error = " ".join(done.stderr.split()).split("error: ")
        assert "RAY_ADDRESS is set" in warning and "cluster.address=auto" in warning
        assert done.returncode == 2 and "target.gpus" in error

    BENCH_CASES: ClassVar = {
        "unknown mode": (["--modes", "plain,fast"], "--modes: 'fast' is not a mode; the modes are plain, coupled"),
        "no plain": (["--modes", "decoupled"], "--modes must contain plain"),
        "batch 0": (["--batch", "4,0"], "--batch: '0' is no whole number"),
        "batch of words": (["--batch", "many"], "--batch: 'many' is no whole number"),
        "max_tokens 0": (["--max-tokens", "0"], "sampling.max_tokens is 0; it must be a whole number from 1"),
        "malformed line": (["--prompts", "bad.jsonl"], "bad.jsonl, line 2: not valid JSON"),
        "no GPU": (["target.gpus=1", "cluster.num_gpus=0"], "target.gpus: the run needs 1 GPU(s) in all"),
        "no folder": (["--output", "/proc/x/bench.json"], "--output: /proc/x cannot be written to"),
        "existing report": (["--output", "there.jsonl"], "there.jsonl exists and is never overwritten"),
    }

    @pytest.mark.parametrize("name", BENCH_CASES)
    def test_bench(self, folder: Path, name: str) -> None:
        arguments, problem = self.BENCH_CASES[name]
        before = sorted(path.name for path in folder.rglob("*"))
        done = specactor(folder, "bench", "rollout", "--config", LOCAL, "data.path=good.jsonl", *arguments)
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

    @pytest.mark.parametrize("item", ["ngram", "ngram=", "=2", "ngram=-1", "ngram=two"])
    def test_scale(self, folder: Path, item: str) -> None:
        assert f"{item!r} is not METHOD=N" in error_line(specactor(folder, "scale", item, "--run", "x"))

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

    def test_only_the_keys_that_are_asked_for(self, folder: Path) -> None:
        text = specactor(folder, "config", "--help-keys", "Max_Batch", "draft_wait").stdout
        assert "target.max_batch" in text and "drafters.N.max_batch" in text and "speculation.draft_wait_s" in text
        assert "target.model" not in text
        assert "target.record_margins" in specactor(folder, "config", "--help-keys", "near-tie").stdout
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

    def test_ctrl_c_shows_what_was_measured(self, folder: Path, tiny_model_dir: Path) -> None:
        command = ["-m", "specactor_ray.cli.main", "demo", "--skip-training", "--model", str(tiny_model_dir)]
        process = subprocess.Popen(
            [sys.executable, *command, "--minutes", "9", "--output", "out"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            start_new_session=True,
        )
        assert process.stderr is not None
        begun = next(line for line in process.stderr if "warming up" in line or "round 1" in line)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        output, errors = process.communicate(timeout=240)
        assert begun and "Traceback" not in errors and "Ctrl-C: what was measured until now follows" in errors
        assert process.returncode == 130
        measured = (folder / "out" / "report.json").exists()
        assert measured or "nothing was measured" in output


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


class TestParsing:
    def test_batches(self) -> None:
        assert cli.parse_numbers("--batch", "1, 4,16,4") == [1, 4, 16]

    def test_modes(self) -> None:
        assert cli.parse_modes("plain, decoupled") == [ModeName.plain, ModeName.decoupled]

    def test_scale(self) -> None:
        assert cli.parse_scale(["ngram=2", "draft_model=0", "eagle=auto"]) == {
            "ngram": 2,
            "draft_model": 0,
            "eagle": None,
        }


class TestWriter:
    def test_the_name_is_given_when_all_is_there(self, tmp_path: Path) -> None:
        path = tmp_path / "out.jsonl"
        with TrajectoryWriter(path) as writer:
            for number in range(3):
                writer.write({"n": number, "text": "é\ud800"})
                assert not path.exists()
                lines = writer.partial.read_bytes().splitlines()
                assert [json.loads(line)["n"] for line in lines] == list(range(number + 1))
            writer.complete()
        assert len(path.read_text().splitlines()) == 3 and not writer.partial.exists()
        assert json.loads(path.read_text().splitlines()[0])["text"] == "é\ud800"

    def test_an_interrupted_run_keeps_its_lines_and_blocks_the_name(self, tmp_path: Path) -> None:
        path = tmp_path / "out.jsonl"
        with TrajectoryWriter(path) as writer:  # and no `complete`
            writer.write({"n": 0})
        assert not path.exists() and writer.where.read_text() == '{"n": 0}\n'
        with pytest.raises(InputError, match="interrupted and left its finished trajectories"):
            TrajectoryWriter(path)
        assert writer.where.read_text() == '{"n": 0}\n'

    def test_half_a_line_is_dropped(self, tmp_path: Path) -> None:
        partial = tmp_path / "out.jsonl.partial"
        partial.write_text('{"n": 0}\n{"n": 1}\n{"n"')
        with TrajectoryWriter(tmp_path / "out.jsonl", resume=True) as writer:
            assert writer.count == 2 and partial.read_text().endswith('{"n"'), "not before something is written"
            writer.write({"n": 2})
        assert partial.read_text() == '{"n": 0}\n{"n": 1}\n{"n": 2}\n'

    def test_nothing_written_leaves_nothing(self, tmp_path: Path) -> None:
        TrajectoryWriter(tmp_path / "out.jsonl").close()
        assert list(tmp_path.iterdir()) == []

    def test_a_link_to_nowhere_is_not_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "out.jsonl").symlink_to(tmp_path / "nowhere")
        with pytest.raises(InputError, match="exists and is never overwritten"):
            TrajectoryWriter(tmp_path / "out.jsonl")
        assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


class FakeRollout:
    """Stands in for `Rollout`: yields what the test scripted, or raises it."""

    script: ClassVar[list[Any]] = []
    skipped: ClassVar[set[tuple[int, int]]] = set()
    encoded: ClassVar[Any] = None
    address = "127.0.0.1:6379"

    def __init__(self, config: Config) -> None:
        self.config, self.run_name, self.closed = config, config.run.name, False
        self.committed_tokens = self.moved_requests = self.reissued_requests = 0
        first = self.script[0] if self.script else None
        if isinstance(first, ClusterError):
            raise first

    def __enter__(self) -> FakeRollout:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def metrics(self) -> RolloutMetrics:
        return RolloutMetrics(steps=5, row_steps=10, committed_tokens=self.committed_tokens)

    def fallbacks(self) -> list[str]:
        return []

    def status(self) -> list[dict[str, Any]]:
        health = {"health": {"method": "eagle", "alarm": True}}
        return [{"id": "verifier-0#1a2b", "kind": "verifier", "counters": {"inline": {"eagle-0#1a2b": health}}}]

    def stream(self, prompts: list[Any], skip: Collection[tuple[int, int]], encoded: Any) -> Iterator[Trajectory]:
        type(self).skipped = set(skip)
        type(self).encoded = encoded
        for item in self.script:
            if isinstance(item, BaseException):
                raise item
            if callable(item):
                item()
                continue
            self.committed_tokens += len(item.token_ids)
            yield item


def trajectory(index: int, error: str = "") -> Trajectory:
    tokens = () if error else (4, 5, 6)
    return Trajectory(
        f"1-{index}-0",
        index,
        0,
        (1, 2),
        tokens,
        tuple(-1.0 for _ in tokens),
        "text",
        "error" if error else "length",
        SamplingParams(seed=derive_seed(0, index, 0)),
        RequestStats(),
        error,
        prompt="abc"[index],
    )


class TestRun:
    @pytest.fixture(autouse=True)
    def _fake_rollout(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr("specactor_ray.rollout.rollout.Rollout", FakeRollout)
        monkeypatch.setattr("specactor_ray.runs.rollout._cluster_resources", dict)
        monkeypatch.chdir(tmp_path)

    def run(
        self,
        *script: Any,
        name: str | None = "r",
        resume: str = "never",
        shown: io.StringIO | None = None,
        lines: Sequence[str] = "abc",
        **more: Any,
    ) -> RunOutcome:
        FakeRollout.script = list(script)
        Path("prompts.txt").write_text("".join(f"{line}\n" for line in lines))
        sections = {"target": {"model": str(tiny_target())}}
        sections |= {section: more.pop(section) for section in ("sampling", "target") if section in more}
        data = {"path": "prompts.txt", **more}
        config = from_mapping({"mode": "plain", "run": {"name": name}, "resume": resume, "data": data, **sections})
        return run_rollout(config, Console(file=shown or io.StringIO(), width=400))

    def test_files_of_a_complete_run(self) -> None:
        outcome = self.run(trajectory(2), trajectory(0), trajectory(1))
        assert outcome.exit_code == 0 and outcome.folder == Path("runs/r")
        rows = [json.loads(line) for line in Path("runs/r/trajectories.jsonl").read_text().splitlines()]
        assert [row["prompt_index"] for row in rows] == [2, 0, 1]
        summary = json.loads(Path("runs/r/summary.json").read_text())
        assert summary == outcome.summary
        assert summary["status"] == "complete" and summary["tokens"] == 9
        assert summary["trajectories"]["finish_reasons"] == {"length": 3}
        (drafter,) = summary["drafters"]
        assert drafter.items() >= {"id": "eagle-0#1a2b", "method": "eagle", "alarm": True, "failures": 0}.items()
        assert {"ray", "torch", "transformers"} <= summary["versions"].keys() and summary["hardware"]["cores"] >= 1
        saved = yaml.safe_load(Path("runs/r/config.yaml").read_text())
        assert saved == summary["config"] and saved["data"]["path"] == "prompts.txt"
        assert sorted(path.name for path in Path("runs/r").iterdir()) == [
            "config.yaml",
            "summary.json",
            "trajectories.jsonl",
        ]

    def test_one_poison_prompt_fails_alone(self) -> None:
        outcome = self.run(trajectory(0), trajectory(1, error="longer than the context"), trajectory(2))
        assert outcome.exit_code == 0 and outcome.summary["trajectories"]["failed"] == 1
        assert outcome.summary["trajectories"]["failures"] == {"longer than the context": 1}
        rows = [json.loads(line) for line in outcome.trajectories.read_text().splitlines()]
        assert [row.get("error") for row in rows] == [None, "longer than the context", None]

    def test_a_prompt_that_fails_often_is_listed_once(self) -> None:
        counts = self.run(*[trajectory(1, error="no")] * 3, trajectory(0, error="no")).summary["trajectories"]
        assert counts["failed_prompts"] == {"0": 1, "1": 3}
        assert failed_prompts_line(counts["failed_prompts"]) == ["  failed prompts (counted from 1): 1, 2 (3 times)"]
        assert failed_prompts_line({}) == []

    def test_outputs_that_the_context_cuts_are_announced_and_counted(self) -> None:
        shown = io.StringIO()
        lines = ["a", " ".join(["the red fox sleeps on the mat."] * 4), "c"]
        sections = {"target": {"model": str(tiny_target()), "max_model_len": 40}, "sampling": {"max_tokens": 25}}
        outcome = self.run(trajectory(0), shown=shown, lines=lines, **sections)
        assert [len(token_ids) > 15 for token_ids, _ in FakeRollout.encoded] == [False, True, False]
        assert "warning: 1 of 3 prompts have more than 15 tokens" in shown.getvalue()
        assert re.search(r"memory: about \d+\.\d\d GiB will be held, and \d+\.\d\d GiB are free now", shown.getvalue())
        assert "sampling.max_tokens=25 of the context of 40" in shown.getvalue()
        counts = outcome.summary["trajectories"]
        assert counts["cut_by_context"] == 1 and cut_line(counts) and not cut_line({"cut_by_context": 0})

    def test_a_model_without_a_tokenizer_takes_token_ids(self, tmp_path: Path) -> None:
        bare = tmp_path / "bare"
        bare.mkdir()
        for name in ("config.json", "model.safetensors"):
            (bare / name).symlink_to(tiny_target() / name)
        Path("ids.jsonl").write_text('{"prompt_token_ids": [5, 6]}\n')
        target = {"model": str(bare)}
        assert self.run(trajectory(0), target=target, path="ids.jsonl").summary["status"] == "complete"
        Path("ids.jsonl").write_text('{"prompt_token_ids": [5, 6]}\n{"prompt": "a"}\n')
        with pytest.raises(
            ModelLoadError, match=r"no tokenizer.* Or give prompt 2 and all others as .*prompt_token_ids"
        ):
            self.run(trajectory(0), target=target, path="ids.jsonl", name="s")

    def test_all_failed(self) -> None:
        outcome = self.run(*(trajectory(number, error="no") for number in range(3)))
        assert outcome.exit_code == 1 and outcome.summary["status"] == "complete"

    def test_ctrl_c_keeps_what_had_finished(self) -> None:
        outcome = self.run(trajectory(0), trajectory(1), KeyboardInterrupt())
        assert outcome.exit_code == 130 and outcome.summary["status"] == "interrupted"
        assert outcome.trajectories == Path("runs/r/trajectories.jsonl.partial")
        assert len(outcome.trajectories.read_text().splitlines()) == 2
        assert not Path("runs/r/trajectories.jsonl").exists()
        assert json.loads(Path("runs/r/summary.json").read_text())["status"] == "interrupted"

    def test_sigterm_is_an_interruption_too(self) -> None:
        before = signal.getsignal(signal.SIGTERM)
        outcome = self.run(trajectory(0), lambda: os.kill(os.getpid(), signal.SIGTERM), trajectory(1))
        assert outcome.exit_code == 130 and outcome.summary["error"] == "SIGTERM"
        assert signal.getsignal(signal.SIGTERM) is before

    def test_a_crash_is_written_down_and_raised(self) -> None:
        with pytest.raises(RuntimeError, match="broken"):
            self.run(trajectory(0), RuntimeError("broken"))
        summary = json.loads(Path("runs/r/summary.json").read_text())
        assert (summary["status"], summary["error"]) == ("failed", "RuntimeError: broken")
        assert len(Path("runs/r/trajectories.jsonl.partial").read_text().splitlines()) == 1

    def test_no_cluster_leaves_nothing(self) -> None:
        with pytest.raises(ClusterError):
            self.run(ClusterError("no Ray cluster answers"))
        assert [path.name for path in Path().iterdir()] == ["prompts.txt"]

    def test_a_run_name_is_used_once(self) -> None:
        self.run(trajectory(0))
        before = Path("runs/r/summary.json").read_text()
        with pytest.raises(InputError, match=r"runs/r holds an earlier run"):
            self.run(trajectory(0))
        assert Path("runs/r/summary.json").read_text() == before

    def test_an_interrupted_run_is_continued(self) -> None:
        self.run(trajectory(2), trajectory(0, error="no"), KeyboardInterrupt(), name=None)
        (folder,) = Path("runs").iterdir()
        outcome = self.run(trajectory(1), name=None, resume="auto")
        assert FakeRollout.skipped == {(2, 0), (0, 0)}
        assert outcome.exit_code == 0 and outcome.folder == folder
        rows = [json.loads(line) for line in (folder / "trajectories.jsonl").read_text().splitlines()]
        assert [row["prompt_index"] for row in rows] == [2, 0, 1]
        summary = json.loads((folder / "summary.json").read_text())
        assert (summary["status"], summary["resumed"]) == ("complete", 2)
        counts = summary["trajectories"]
        assert (counts["total"], counts["finished"], counts["failed"], counts["tokens"]) == (3, 2, 1, 6)
        assert not self.run(trajectory(0), name=None, resume="auto").summary["resumed"], "nothing is unfinished now"

    @pytest.mark.parametrize(
        ("changed", "expected"),
        [
            ({"sampling": {"temperature": 0.5}}, r"sampling.temperature: is 0.5, and the interrupted run r has 1.0"),
            (
                {"target": {"model": str(tiny_draft())}},
                r"target.model: is '.*draft.*', and the interrupted run r has '",
            ),
            (
                {"output": "elsewhere.jsonl"},
                r"data.output: is '.*elsewhere.jsonl', and the interrupted run r",
            ),
            ({"limit": 1}, r"line 1: this trajectory is not one of the 1 prompts x 1 samples"),
            ({"path": "others.txt"}, r"line 1: this trajectory is not one of the 3 prompts"),
            ({"resume": "somewhere"}, r"resume: is 'somewhere'. Fix: a rollout takes auto or never"),
        ],
    )
    def test_other_settings_are_refused_and_nothing_is_lost(self, changed: dict[str, Any], expected: str) -> None:
        self.run(trajectory(2), KeyboardInterrupt())
        before = {path: path.read_bytes() for path in Path("runs/r").iterdir()}
        Path("others.txt").write_text("x\ny\nz\n")
        with pytest.raises(UserError, match=expected):
            self.run(trajectory(1), **{"resume": "auto", **changed})
        assert {path: path.read_bytes() for path in Path("runs/r").iterdir()} == before

    @pytest.mark.parametrize(
        "damage",
        [
            '{"prompt_index": 1}\n',
            "my notes\nwithout an end",
            "[]\n",
            '{"prompt_index": 1, "sample_index": 0, "finish_reason": [], "token_ids": []}\n',
            "",
        ],
    )
    def test_what_is_no_trajectory_is_named_and_stays(self, damage: str) -> None:
        self.run(trajectory(2), KeyboardInterrupt())
        partial = Path("runs/r/trajectories.jsonl.partial")
        partial.write_text(partial.read_text() + (damage or partial.read_text()))
        before = {path: path.read_bytes() for path in Path("runs/r").iterdir()}
        with pytest.raises(InputError, match=r"partial, line 2: this is no trajectory.* Fix: remove the line"):
            self.run(trajectory(1), resume="auto")
        assert {path: path.read_bytes() for path in Path("runs/r").iterdir()} == before

    @pytest.mark.parametrize("name", ["trajectories.jsonl.partial", "config.yaml"])
    def test_what_is_no_regular_file_is_not_read(self, name: str) -> None:
        self.run(trajectory(2), KeyboardInterrupt())
        (Path("runs/r") / name).unlink()
        os.mkfifo(Path("runs/r") / name)
        with pytest.raises(UserError, match=rf"{name}.* cannot be (opened|read).*not a regular file"):
            self.run(trajectory(1), resume="auto")

    def test_a_run_without_a_finished_trajectory_is_continued_too(self) -> None:
        self.run(KeyboardInterrupt())
        partial = Path("runs/r/trajectories.jsonl.partial")
        assert partial.read_bytes() == b""
        partial.write_text("half a line")
        with pytest.raises(ClusterError):
            self.run(ClusterError("no Ray cluster answers"), resume="auto")
        assert partial.read_text() == "half a line"
        outcome = self.run(*map(trajectory, range(3)), resume="auto")
        assert outcome.summary["resumed"] == 0 and len(outcome.trajectories.read_text().splitlines()) == 3
        with pytest.raises(InputError, match="it is complete, so there is nothing to continue in it"):
            self.run(trajectory(0), resume="auto")

    def test_an_output_elsewhere_is_found_again_from_another_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run(trajectory(2), KeyboardInterrupt(), output="out.jsonl")
        home = Path.cwd()
        (home / "other").mkdir()
        monkeypatch.chdir(home / "other")
        (home / "other" / "runs").symlink_to(home / "runs")
        outcome = self.run(trajectory(0), trajectory(1), resume="auto")
        assert outcome.trajectories == home / "out.jsonl" and outcome.summary["resumed"] == 1


def test_modules_in_the_current_folder_stand_in_for_nobody_elses(tmp_path: Path) -> None:
    folder = tmp_path / "downloads"
    folder.mkdir()
    for module in ("ray", "numpy", "torch", "yaml"):
        (folder / f"{module}.py").write_text("open('planted', 'w')\n")
    (folder / "mine.py").write_text("open('wanted', 'w')\ndef reward(sample):\n    return 1.0\n")
    script = tmp_path / "specactor"  # as pip writes it: its own folder comes first, not the current one
    script.write_text("from specactor_ray.cli.main import main\nmain()\n")
    done = run_program(folder, [str(script)], "status", "--address", "127.0.0.1:1")
    assert "no Ray cluster answers" in error_line(done)
    rewards = "reward.functions=[{name: 'mine:reward'}, {name: 'mine:other'}]"
    train = "train", "mode=plain", "data.path=reasoning_gym:none", "data.n=2", rewards
    assert "mine:other cannot be imported" in error_line(run_program(folder, [str(script)], *train))
    assert not (folder / "planted").exists()
    assert (folder / "wanted").exists()


def test_a_summary_is_for_its_owner_alone(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", {"config": {"data": {"options": {"token": "x"}}}})
    assert stat.S_IMODE((tmp_path / "summary.json").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_ctrl_c_while_modules_are_imported_prints_no_traceback(tmp_path: Path) -> None:
    """The module that comes first on the path stands for a signal that arrives during its import."""
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    done = run_program(tmp_path, ("-m", "specactor_ray"), "rollout", PYTHONPATH=f"{tmp_path}:{REPOSITORY}")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
