"""The wheel alone, outside of a checkout: configurations, prompts and jobs are in it and are found by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "specactor_ray", "conf", "jobs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools writes into the source tree."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in BUILT_FROM:
        if (REPOSITORY / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(REPOSITORY / name, source)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(folder))
    run(sys.executable, "-m", "pip", "wheel", *options, str(source), cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of an environment with the wheel; what it depends on comes from this one, without what is editable here."""
    home = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", str(home))
    install = ("install", "--quiet", "--no-deps", "--no-index", str(wheel))
    run(sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), *install)
    (site,) = home.glob("lib/*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def run(*command: str, cwd: Path | None = None, code: int = 0) -> Any:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHON"))}
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=280)
    assert done.returncode == code, done.stderr
    return done


def test_it_holds_each_file_once(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        (metadata,) = [archive.read(name).decode() for name in archive.namelist() if name.endswith("METADATA")]
    assert all(name.startswith("specactor_ray/") for name in names) and len(set(names)) == len(names)
    for folder in ("conf", "jobs"):
        here = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / folder).rglob("*.[jpy]*")}
        there = {name.removeprefix("specactor_ray/") for name in names if name.startswith(f"specactor_ray/{folder}/")}
        assert here and there == {name for name in here if "__pycache__" not in name}
    assert len([name for name in names if name.endswith("/h100.yaml")]) == 1
    for extra in ("rl", "deepspeed", "vllm", "trl"):
        assert f"Provides-Extra: {extra}\n" in metadata


def test_shipped_files_are_found_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    where = run(str(installed / "python"), "-c", "import specactor_ray; print(specactor_ray.__file__)", cwd=tmp_path)
    assert Path(where.stdout.strip()).is_relative_to(installed.parent)
    specactor = str(installed / "specactor")
    known = yaml.safe_load(run(specactor, "config", "--config", "local_cpu", "data.n=3", cwd=tmp_path).stdout)
    assert known["target"]["model"] == "smollm2-135m" and known["data"]["n"] == 3
    same = run(specactor, "config", "--config", "conf/local_cpu.yaml", "data.n=3", cwd=tmp_path).stdout
    assert yaml.safe_load(same) == known
    unknown = run(specactor, "config", "--config", "local_gpu", cwd=tmp_path, code=2).stderr
    for_training = "train_calculator_cpu, train_demo, train_gsm8k, train_local_cpu, train_one_gpu"
    benches = "bench_history_renames, bench_history_sums, bench_repetition, bench_train_renames"
    assert f"{benches}, fastest_of_n, local_cpu, paced_32b, {for_training}" in unknown
    read = (
        f"from specactor_ray.rollout.prompts import read_prompts; print(len(read_prompts({known['data']['path']!r})))"
    )
    assert int(run(str(installed / "python"), "-c", read, cwd=tmp_path).stdout) > 1


@pytest.mark.parametrize("job", ["rollout", "train", "bench", "train_drafter"])
def test_jobs_are_modules(installed: Path, tmp_path: Path, job: str) -> None:
    wrong = {"train_drafter": ["--data", "x", "--target", "x", "--output", "x", "none=1"]}
    arguments = wrong.get(job, ["--config", "none"])
    done = run(str(installed / "python"), "-m", f"specactor_ray.jobs.{job}", *arguments, cwd=tmp_path, code=2)
    assert done.stderr.startswith("error: ") and "none" in done.stderr
