"""`specactor init`, `specactor doctor`, and the files for containers and Kubernetes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from specactor_ray.cli import doctor
from specactor_ray.cli.doctor import State, diagnose
from specactor_ray.cli.main import app
from specactor_ray.config import load_config
from specactor_ray.core.errors import InputError

REPOSITORY = Path(__file__).parents[3]
DEPLOY = REPOSITORY / "docs" / "deploy"


def test_init_copies_configurations_that_run_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(app, ["init", str(tmp_path / "work")])
    assert done.exit_code == 0, done.output
    again = CliRunner().invoke(app, ["init", str(tmp_path / "work")])
    assert isinstance(again.exception, InputError), "it replaces nothing"
    monkeypatch.chdir(tmp_path / "work")
    config = load_config("conf/local_cpu.yaml")
    assert config.data.path is not None and Path(config.data.path).is_file()
    assert Path("conf/simulation/qwen32b_256xh100.yaml").is_file()


def test_doctor_finds_what_is_here() -> None:
    found = {one.what: one for one in diagnose()}
    assert found["hf"].state is State.OK and "ray " in found["installed"].found
    assert {"cores", "memory", "shared memory", "open files", "GPUs", "vllm"} <= found.keys()
    assert all(one.fix for one in found.values() if one.state is State.WRONG)


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "OPTIONAL", (("no_such_module", "no-such", "nothing", "pip install no-such"),))
    monkeypatch.setattr(doctor, "versions", lambda: {"ray": "not installed", "torch": "2.11"})
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1 and "to fix: ray: pip install ray" in done.output
    assert "optional: no-such: pip install no-such" in done.output and "torch 2.11" in done.output


def test_doctor_names_what_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["transformers>=5.0", "ray[default]>=2.52", "trl<1.17,>=1.16; extra == 'trl'", "absent>=3"]
    monkeypatch.setattr(doctor, "requires", lambda name: needed)
    found = {"transformers": "4.40.0", "ray": "2.60.0", "trl": "1.0", "python": "3.11"}
    assert list(doctor._too_old(found)) == [("transformers", "transformers>=5.0")]


def test_a_gpu_without_a_cuda_torch_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gpu_memories", lambda: [80 << 30])
    monkeypatch.setattr("torch.version.cuda", None)
    gpus = next(iter(doctor._gpus()))
    assert gpus.state is State.WRONG and "CPU build" in gpus.fix


def test_the_manifest_runs_a_command_of_the_documents() -> None:
    job: dict[str, Any] = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    _python, _m, module, *arguments = shlex.split(spec["entrypoint"])
    assert module == "specactor_ray.jobs.rollout" and arguments[0] == "--config"
    load_config(arguments[1], arguments[2:])
    page = (REPOSITORY / "docs" / "training.md").read_text()
    (line,) = [line for line in page.splitlines() if f"-m {module}" in line]
    assert [one for one in arguments if not one.startswith("run.dir=")] == shlex.split(line.partition(module)[2])
    cluster = spec["rayClusterSpec"]
    assert f"ray=={cluster['rayVersion']}\n" in (REPOSITORY / "constraints.txt").read_text()
    assert cluster["authOptions"] == {"mode": "token"}
