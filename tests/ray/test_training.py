"""Training from end to end on a tiny model: it learns, drafts change nothing, and no death loses anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from specactor_ray.config import load_config
from specactor_ray.observability.console import make_console
from specactor_ray.training.loop import TrainOutcome, train
from specactor_ray.training.run_folder import read_metrics
from specactor_ray.training.tracking import numbers
from tests import tiny

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[2]
FEW = ("trainer.prompts_per_step=4", "data.n=4")
"""Small steps, where nothing needs to be learnt well."""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    rows = [{"prompt": f"Tell me about the {c} {a}."} for c in tiny.COLOURS for a in tiny.ANIMALS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(tasks: Path, folder: Path, name: str, *more: str) -> list[str]:
    return [
        f"run.dir={folder}",
        f"run.name={name}",
        f"data.path={tasks}",
        f"target.model={tiny.tiny_target()}",
        "target.kv_cache_gb=0.05",
        "target.max_batch=64",
        "drafters=[{method: ngram}]",
        "reward.functions=[{name: 'tests.reward_functions:sleepy'}]",
        "data.n=8",
        "sampling.max_tokens=32",
        "trainer.prompts_per_step=8",
        "trainer.learning_rate=0.002",
        "tracking.tensorboard=false",
        *more,
    ]


def run(overrides: Sequence[str]) -> TrainOutcome:
    return train(load_config(None, overrides), make_console(sys.stderr))


def records(outcome_folder: Path) -> list[dict[str, Any]]:
    return read_metrics(outcome_folder / "metrics.jsonl")


def command(overrides: Sequence[str]) -> subprocess.Popen:
    arguments = [sys.executable, "-m", "specactor_ray.cli", "train", *overrides]
    return subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def wait_for_steps(process: subprocess.Popen, metrics: Path, steps: int, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= steps):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no steps were done"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tasks: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    common = ("trainer.steps=6", "checkpoint.every=2", "algorithm.name=ppo", *FEW)
    whole = command(settings(tasks, folder, "whole", *common))
    output = whole.communicate(timeout=200)[0]
    assert whole.returncode == 0, output

    killed = command(settings(tasks, folder, "killed", *common))
    wait_for_steps(killed, folder / "killed" / "metrics.jsonl", 3)
    os.kill(killed.pid, signal.SIGSTOP)  # or it would be at its end before another one has started
    second = command(settings(tasks, folder, "killed", *common, "resume=auto"))
    output = second.communicate(timeout=100)[0]
    assert second.returncode == 2 and f"process {killed.pid} on" in " ".join(output.split()), output
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=60)
    resumed = command(settings(tasks, folder, "killed", *common, "resume=auto"))
    output = resumed.communicate(timeout=200)[0]
    assert resumed.returncode == 0, output
    assert "goes on from" in output
    learnt = [[record["train"] for record in records(folder / name)] for name in ("whole", "killed")]
    assert len(learnt[0]) == 6
    assert learnt[0] == learnt[1]


@pytest.mark.slow
@pytest.mark.parametrize("whole_group", [False, True])
def test_sigterm_saves_and_ends(whole_group: bool, tasks: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    process = command(settings(tasks, folder, "r", "trainer.steps=500", "checkpoint.every=100"))
    wait_for_steps(process, folder / "r" / "metrics.jsonl", 2)
    if whole_group:  # as `timeout` and schedulers do: it reaches the private cluster too
        os.killpg(process.pid, signal.SIGTERM)
    else:
        process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=90)[0]
    assert process.returncode == 130, output
    assert "interrupted after step" in output
    steps = len(records(folder / "r"))
    assert [path.name for path in (folder / "r" / "checkpoints").iterdir()] == [f"step-{steps:06d}"]
    assert json.loads((folder / "r" / "summary.json").read_text())["status"] == "interrupted"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """For the tests after those that start a cluster of their own: there is never more than one."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, namespace="specactor", logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("grpo", ()),
        ("dapo", ()),
        ("ppo", ("trainer.epochs=2", "algorithm.gae_lambda=1.0")),
    ],
)
def test_a_tiny_model_learns(
    algorithm: str, more: tuple[str, ...], seed: int, tasks: Path, tmp_path: Path, cluster: None
) -> None:
    outcome = run(
        settings(
            tasks,
            tmp_path / "runs",
            f"{algorithm}-{seed}",
            f"algorithm.name={algorithm}",
            f"sampling.seed={seed}",
            "trainer.steps=10",
            *more,
        )
    )
    rewards = [record["train"]["reward_mean"] for record in records(outcome.folder)]
    assert outcome.status == "complete" and len(rewards) == 10
    first, last = sum(rewards[:2]) / 2, sum(rewards[-2:]) / 2
    assert last > first + 0.06, f"rewards: {rewards}"
    report = (outcome.folder / "report.md").read_text()
    assert f"{algorithm} on" in report and "| 10 |" in report


@pytest.mark.slow
def test_drafts_change_nothing_that_is_learnt(tasks: Path, tmp_path: Path, cluster: None) -> None:
    learnt = {}
    for mode in ("plain", "decoupled"):
        outcome = run(settings(tasks, tmp_path / "runs", mode, f"mode={mode}", "trainer.steps=6", *FEW))
        learnt[mode] = [record["train"] for record in records(outcome.folder)]
        drafted = [sum(pair[0] for pair in r["speed"]["by_method"].values()) for r in records(outcome.folder)]
        assert (sum(drafted) > 0) == (mode == "decoupled")
        assert all(record["gap"]["mean"] < 1e-4 for record in records(outcome.folder))
    assert learnt["plain"] == learnt["decoupled"]


@pytest.mark.slow
def test_a_head_learns_while_training_goes_on_and_changes_nothing_that_is_learnt(
    tasks: Path, tmp_path: Path, cluster: None
) -> None:
    online = "{where: off, steps_per_version: 2, learning_rate: 0.001, batch_tokens: 128, depths: 2}"
    head = f"drafters=[{{method: eagle, model: {tiny.tiny_eagle()}, kv_cache_gb: 0.02, online: {online}}}]"
    always = ("speculation.verify=all", "speculation.draft_wait_s=0.5", "speculation.breaker.min_acceptance=0")
    learnt = {}
    for where in ("plain", "drafter", "trainer"):
        how = "mode=plain" if where == "plain" else f"drafters.0.online.where={where}"
        outcome = run(settings(tasks, tmp_path / "runs", where, head, how, "trainer.steps=3", *FEW, *always))
        learnt[where] = [record["train"] for record in records(outcome.folder)]
        if where == "plain":
            continue
        figures = [record["drafter"]["eagle"] for record in records(outcome.folder)]
        versions = [figure["version"] for figure in figures]
        assert versions[0] == 0 and versions == sorted(versions) and versions[-1] > 0, figures
        assert all(0.0 < figure["acceptance"] <= 1.0 for figure in figures)
        written = dict(numbers(records(outcome.folder)[-1]))
        assert written["drafter/eagle/version"] == versions[-1]
        assert written["drafter/eagle/acceptance"] == figures[-1]["acceptance"]
        table = json.loads((outcome.folder / "summary.json").read_text())["totals"]["drafters"]["eagle"]
        assert {int(version) for version in table} == {int(v) for figure in figures for v in figure["by_version"]}
    assert learnt["plain"] == learnt["drafter"] == learnt["trainer"]
