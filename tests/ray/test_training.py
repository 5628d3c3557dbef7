"""Training from end to end on a tiny model: it learns, drafts change nothing, and no death loses anything."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from specactor_ray import Rollout
from specactor_ray.bench.train import run_bench
from specactor_ray.config import load_config
from specactor_ray.core.console import make_console
from specactor_ray.core.types import SamplingParams
from specactor_ray.runs.folder import RunOutcome
from specactor_ray.runs.records import read_records
from specactor_ray.trainer.conversations import Conversations
from specactor_ray.trainer.experience import Experience, ExperienceMaker
from specactor_ray.trainer.figures import numbers
from specactor_ray.trainer.run import train
from specactor_ray.trainer.trainer_ranks import TrainerRanks
from specactor_ray.transport.messages import WeightSet
from tests import tiny
from tests.local_ray import local_ray

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[2]
STEPS, METHODS = 8, ("suffix", "eagle")
FEW = ("trainer.prompts_per_step=4", "data.n=4")
"""Small steps, where nothing needs to be learnt well."""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    return write_tasks(tmp_path)


def write_tasks(folder: Path, what: str = "Tell me about", name: str = "tasks", **columns: Any) -> Path:
    path = folder / f"{name}.jsonl"
    rows = [{"prompt": f"{what} the {c} {a}.", **columns} for c in tiny.COLOURS for a in tiny.ANIMALS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def held_out(folder: Path, function: str = "hissing_or_kills", **columns: Any) -> tuple[str, ...]:
    """Evaluation on prompts of their own, with a reward function that may kill the run."""
    rows = [{"prompt": f"Tell me a story about the {animal}.", **columns} for animal in tiny.ANIMALS[:4]]
    (folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (
        f"evaluation.path={folder / 'held.jsonl'}",
        "evaluation.every=2",
        "evaluation.n=2",
        f"reward.functions=[{{name: 'tests.fakes.reward_functions:{function}'}}]",
    )


def written(folder: Path, name: str) -> list[dict[str, Any]]:
    """Rows of a file, without what drafts and time change."""
    rows = read_records(folder / f"{name}.jsonl")
    return [{key: row[key] for key in row if key not in ("seconds", "acceptance_length")} for row in rows]


def settings(tasks: Path, folder: Path, name: str, *more: str) -> list[str]:
    return [
        "mode=plain",
        f"run.dir={folder}",
        f"run.name={name}",
        f"data.path={tasks}",
        f"target.model={tiny.tiny_target()}",
        "target.kv_cache_gb=0.05",
        "target.max_batch=64",
        "reward.functions=[{name: 'tests.fakes.reward_functions:hissing'}]",
        "data.n=8",
        "sampling.max_tokens=32",
        "trainer.prompts_per_step=8",
        "trainer.learning_rate=0.002",
        "tracking.tensorboard=false",
        *more,
    ]


def run(overrides: Sequence[str]) -> RunOutcome:
    return train(load_config(None, overrides), make_console(sys.stderr))


def records(outcome_folder: Path) -> list[dict[str, Any]]:
    return read_records(outcome_folder / "metrics.jsonl")


DIES_IN_A_CHECKPOINT = """
import os, signal
from specactor_ray.cli.main import main
from specactor_ray.runs.checkpoint import CheckpointStore
save = CheckpointStore.save
def save_half(store, state, write):
    save(store, state, lambda folder: (write(folder), os.kill(os.getpid(), signal.SIGKILL)))
CheckpointStore.save = save_half
main()
"""


def command(overrides: Sequence[str], code: str = "", **environment: str) -> subprocess.Popen:
    program = ["-c", code] if code else ["-m", "specactor_ray.cli.main"]
    arguments, both = [sys.executable, *program, "train", *overrides], {**os.environ, **environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(arguments, cwd=ROOT, env=both, start_new_session=True, **pipes)


def wait_for_steps(process: subprocess.Popen, metrics: Path, steps: int, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= steps):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no steps were done"
        time.sleep(0.05)


def ended(process: subprocess.Popen, code: int, shown: str = "") -> str:
    """Output of a command, which has this exit code and shows this."""
    output = " ".join(process.communicate(timeout=240)[0].split())
    assert process.returncode == code and shown in output, output
    return output


def test_kills_change_nothing_of_an_adapter_on_a_mixture_under_dynamic_sampling(tmp_path: Path) -> None:
    """The run with drafts is killed in a rollout; the number of groups that it expects is another after the resume."""
    folder, mark = tmp_path / "struck", str(tmp_path / "killed")
    kills = {"kills": (str(folder / "metrics.jsonl"), 3, mark)}
    sources = [write_tasks(tmp_path, **kills), write_tasks(tmp_path, "Say something of", "more", **kills)]
    common = (
        "data.path=null",
        f"data.mixture=[{{path: {sources[0]}, weight: 2}}, {{path: {sources[1]}, weight: 1}}]",
        *("algorithm.name=dapo", "trainer.lora.rank=4", "data.n=2", "trainer.prompts_per_step=6"),
        *("trainer.steps=5", "checkpoint.every=2", "checkpoint.keep_best=false", *held_out(tmp_path, "coin_or_kills")),
    )
    drafted = ("resume=auto", "mode=coupled", "drafters=[{method: suffix}]", "speculation.verify=all")
    struck = settings(sources[0], tmp_path, "struck", *common, *drafted)
    ended(command(struck), -signal.SIGKILL)
    assert Path(mark).exists() and len(records(folder)) == 3
    ended(command(struck), 0, "(step 2)")
    ended(command(settings(sources[0], tmp_path, "whole", *common)), 0)

    whole, done = records(tmp_path / "whole"), records(folder)
    assert [record["train"] for record in done] == [record["train"] for record in whole] and len(done) == 5
    for name, rows in (("evaluations", 4), ("completions", 3 * 8 + 5 * 12)):
        assert written(folder, name) == written(tmp_path / "whole", name)
        assert len(written(folder, name)) >= rows, "also of groups that were replaced"
    assert all(one["train"]["groups"] * 2 == one["train"]["sampled"] >= one["train"]["samples"] == 12 for one in whole)
    assert sum(one["train"]["zero_variance_groups"] for one in whole) > 6
    assert not whole[0]["speed"]["oversampled"] and not done[2]["speed"]["oversampled"], "nothing is known yet"


def test_conversations_ahead_of_the_trainer_go_on_after_a_kill(tmp_path: Path) -> None:
    """Killed with steps of environments, a later rollout and maybe an update under way. Which weights a token is of
    depends on time; no prompt is left out, and evaluations are of the weights of their step."""
    folder, mark = tmp_path / "ahead", tmp_path / "killed"
    tasks = sums(tmp_path, kills=(str(folder / "metrics.jsonl"), 3, str(mark)))
    common = ("trainer.max_staleness=1", "trainer.steps=5", "checkpoint.every=2", "resume=auto", *CONVERSATION, *FEW)
    ahead = settings(tasks, tmp_path, "ahead", *common, *held_out(tmp_path))
    ended(command(ahead), -signal.SIGKILL)
    assert mark.exists() and 3 <= len(records(folder)) <= 4
    before = written(folder, "evaluations")
    ended(command(ahead), 0, "(step 2)")

    done, evaluations = records(folder), written(folder, "evaluations")
    assert [record["step"] for record in done] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in evaluations] == [0, 2, 4, 5] and evaluations[:2] == before[:2]
    assert [record["train"]["staleness_max"] for record in done[:1] + done[2:3]] == [0, 0], "nothing was made ahead"
    assert all(record["train"]["turns_mean"] > 2 and record["train"]["samples"] == 16 for record in done)
    rows = written(folder, "completions")
    found = {kind: [row for row in rows if row["kind"] == kind] for kind in ("train", "evaluation")}
    assert all(row["weight_version"] == row["step"] for row in found["evaluation"]) and len(found["evaluation"]) == 32
    prompts = Counter(row["prompt"] for row in found["train"])
    assert len(prompts) == 20 and set(prompts.values()) == {4}, "each step has its own prompts"


@pytest.mark.slow
def test_deaths_and_drafts_change_nothing_that_is_learnt(
    tasks: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A plain run, whose verifier and trainer take turns, is killed in an evaluation and in a checkpoint, terminated,
    and loses its cluster; at its end it has learnt and written what a whole run with drafts has, which teaches a head
    meanwhile."""
    folder, metrics = tmp_path / "struck", tmp_path / "struck" / "metrics.jsonl"
    every = ("checkpoint.every=2", *held_out(tmp_path, kills=(str(metrics), 4, str(tmp_path / "killed"))))
    struck = settings(
        tasks, tmp_path, "struck", f"trainer.steps={STEPS}", "resume=auto", "trainer.offload=true", *every
    )
    ended(command(struck), -signal.SIGKILL)
    assert [row["step"] for row in written(folder, "evaluations")] == [0, 2], "that of step 4 was under way"

    ended(command(struck, DIES_IN_A_CHECKPOINT), -signal.SIGKILL, "(step 2)")
    assert len(written(folder, "evaluations")) == 3, "that of step 4, before its checkpoint"

    stopped = command(struck)
    wait_for_steps(stopped, metrics, 5)
    os.killpg(stopped.pid, signal.SIGTERM)  # as `timeout` and schedulers do: it reaches the private cluster too
    output = stopped.communicate(timeout=240)[0]
    assert stopped.returncode == 130, output
    assert "continues from" in output and "interrupted after step" in output
    steps = len(records(folder))
    assert (folder / "checkpoints" / f"step-{steps:06d}").is_dir()
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"

    headless = command(struck, RAY_gcs_rpc_server_reconnect_timeout_s="5")
    wait_for_steps(headless, metrics, steps + 1)
    (head,) = [one for one in psutil.Process(headless.pid).children(recursive=True) if "gcs_server" in one.cmdline()[0]]
    head.kill()
    output = headless.communicate(timeout=240)[0]
    assert headless.returncode == 1 and f"(step {steps})" in " ".join(output.split()), output
    assert "Traceback" not in output, output

    resumed = command(struck)
    output = resumed.communicate(timeout=200)[0]
    assert resumed.returncode == 0 and "continues from" in output and " of the time of a step" in output, output
    shown = re.search(r"best checkpoint: specactor rollout target\.model=(\S+)", output)
    assert shown is not None and Path(shown[1], "model.safetensors").is_file()
    assert (folder / "training.png").is_file()

    whole = request.getfixturevalue("learnt")  # with a cluster for this process: there is never more than one
    plain, learnt = records(folder), records(whole)
    assert not any(record["speed"]["by_method"] for record in plain)
    assert [record["train"] for record in plain] == [record["train"] for record in learnt]
    assert all(record["gap"]["mean"] < 1e-4 for record in (*learnt, *plain))
    evaluations, completions = written(folder, "evaluations"), written(folder, "completions")
    assert evaluations == written(whole, "evaluations") and completions == written(whole, "completions")
    assert [row["step"] for row in evaluations] == [0, 2, 4, 6, 8] and len({row["mean"] for row in evaluations}) > 1
    assert len(completions) == 5 * 8 + STEPS * 32, "all of evaluations, some of steps"
    assert all(row["weight_version"] == row["step"] - (row["kind"] == "train") for row in completions)
    results = json.loads((folder / "summary.json").read_text())["results"]
    best = max(evaluations[1:], key=lambda row: row["mean"])["step"]
    assert results["best_checkpoint"].endswith(f"step-{best:06d}"), "the first one has no checkpoint"


cluster = local_ray(4, autouse=False)  # four verifiers take turns


@pytest.fixture(scope="module")
def learnt(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with drafts, after which outputs are better. Draft actors get new versions of a head in
    `test_weights.py`; here the verifier has it."""
    folder, versions, update_drafter = tmp_path_factory.mktemp("learnt"), list[int](), Rollout.update_drafter
    online = "{where: trainer, steps_per_version: 2, learning_rate: 0.001, batch_tokens: 128, depths: 2}"
    head = f"{{method: eagle, model: {tiny.tiny_eagle()}, kv_cache_gb: 0.02, online: {online}}}"
    drafts = ("mode=coupled", f"drafters=[{{method: suffix}}, {head}]", "speculation.verify=all")

    def update(rollout: Rollout, weights: WeightSet) -> None:
        update_drafter(rollout, weights)
        versions.append(weights.version)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Rollout, "update_drafter", update)
        chosen = settings(write_tasks(folder), folder, "grpo", f"trainer.steps={STEPS}", *drafts, *held_out(folder))
        also = {"frozen": ["drafters.1.online.where=off"], "suffix": ["drafters=[{method: suffix}]"]}
        report = run_bench(load_config(None, chosen), None, make_console(sys.stderr), also=also, plain_every=2)
    judged = report["thirds"][-1]["judged"]
    assert set(judged) == set(METHODS) and all(0 < right <= tried for tried, right in judged.values())
    assert 0 < report["thirds"][-1]["supplied"][0] <= report["thirds"][-1]["supplied"][1]
    assert report["drafted"] == "suffix, eagle taught"
    for part in report["epochs"]:
        assert {way: set(one["judged"]) for way, one in part["also"].items()} == {
            "frozen": set(METHODS),
            "suffix": {"suffix"},
        }
        assert all(tried > 0 for one in part["also"].values() for tried, _ in one["judged"].values())
    done = records(Path(report["run"]))
    rewards = [record["train"]["reward_mean"] for record in done]
    assert report["status"] == "complete" and len(report["steps"]) == len(rewards) == STEPS
    assert not any(step["differences"] for step in report["steps"])  # of all rollouts, in each second step a plain one
    assert [step["plain_s"] is not None for step in report["steps"]] == [True, False] * (STEPS // 2)
    assert sum(step["tokens"] for step in report["steps"]) == sum(record["speed"]["tokens"] for record in done)
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.06, f"rewards: {rewards}"
    assert len(versions) == STEPS and sorted(set(versions)) == versions and versions[0] > 0
    figures = {method: [record["speed"]["by_method"].get(method, [0, 0]) for record in done] for method in METHODS}
    table = json.loads(Path(report["run"], "summary.json").read_text())["totals"]["drafters"]
    assert table and sum(accepted for _, accepted in table.values()) > 0
    for method, pairs in figures.items():  # verifiers may use the drafts of one of them alone
        drafted, accepted = (sum(column) for column in zip(*pairs, strict=True))
        assert 0 <= accepted <= drafted and table.get(method, [0, 0]) == [drafted, accepted]
        rate = pairs[-1][1] / pairs[-1][0] if pairs[-1][0] else None
        assert dict(numbers(done[-1])).get(f"speed/acceptance_rate/{method}") == rate
    return Path(report["run"])


class Seen:
    """Experience of each step of the runs of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[Experience] = []
        self.rollout: Any = None
        collect = ExperienceMaker.collect

        def keep(maker: ExperienceMaker, rollout: Any, sampling: SamplingParams, step: int) -> Experience:
            self.rollout = rollout
            self.steps.append(collect(maker, rollout, sampling, step))
            return self.steps[-1]

        monkeypatch.setattr(ExperienceMaker, "collect", keep)

    def taken(self) -> list[list[tuple[Any, ...]]]:
        """Per step and sample: tokens, masks, log-probabilities as the trainer got them, and rewards."""
        steps, self.steps = self.steps, []
        return [
            [
                (
                    one.prompt.tolist(),
                    one.output.tolist(),
                    one.loss_mask.tolist(),
                    one.rollout_logprobs.tolist(),
                    one.reward,
                )
                for one in experience.samples
            ]
            for experience in steps
        ]


def sums(folder: Path, **columns: Any) -> Path:
    path = folder / "sums.jsonl"
    pairs = [(first, second) for first in range(2, 8) for second in range(3, 9)]
    rows = [{"prompt": f"Add {a} and {b}.", "answer": f"{a} plus {b} is {a + b}.", **columns} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


CONVERSATION = (
    "environment.name=tests.fakes.environments:Sums",
    "environment.turn_tokens=24",
    "sampling.max_tokens=64",
    "reward.functions=[{name: length, weight: -1.0}]",
)


def test_conversations_teach_the_same_with_drafts_and_after_an_interruption(
    tmp_path: Path, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run with drafts is interrupted in the middle of a rollout, with turns and steps of environments under way. An
    adapter is trained, of which plain and drafted rollouts run the merged weights."""
    seen, tasks, submit = Seen(monkeypatch), sums(tmp_path), Conversations.submit
    held = (f"evaluation.path={tasks}", "evaluation.limit=8", "evaluation.n=4", "evaluation.every=3")
    common = ("trainer.steps=3", "algorithm.name=ppo", "trainer.lora.rank=4", *CONVERSATION, *FEW, *held)
    whole = records(run(settings(tasks, tmp_path, "plain", *common)).folder)
    taken, steps = seen.taken(), list[Any]()
    assert len(whole) == 3 and not any(record["speed"]["by_method"] for record in whole)
    assert all(not any(record["failures"].values()) for record in whole)
    masks = [mask for step in taken for _, _, mask, _, _ in step]
    assert all(False in mask for mask in masks) and len({one[-1] for step in taken for one in step}) > 1

    def interrupt(made: Conversations, request: tuple[str, tuple[Any, ...]]) -> Any:
        steps.extend([request] if request[0] == "step" and seen.steps else [])
        if len(seen.steps) == 1 and len(steps) > 6:
            raise KeyboardInterrupt
        return submit(made, request)

    drafts = ("mode=coupled", "drafters=[{method: suffix}]", "speculation.verify=all")
    drafted = settings(tasks, tmp_path, "drafted", *common, *drafts)
    with monkeypatch.context() as patched:
        patched.setattr(Conversations, "submit", interrupt)
        assert run(drafted).status == "interrupted"
    assert seen.taken() == taken[:1]
    done = records(run([*drafted, "resume=auto"]).folder)
    assert seen.taken() == taken[1:]
    assert [record["train"] for record in done] == [record["train"] for record in whole]
    evaluations = written(tmp_path / "plain", "evaluations")
    assert written(tmp_path / "drafted", "evaluations") == evaluations and len(evaluations) == 2
    outputs = [row for row in written(tmp_path / "plain", "completions") if row["kind"] == "evaluation"]
    assert len(outputs) == 64
    for record in (*whole, *done):
        assert 2 < record["train"]["turns_mean"] < 3 and record["gap"]["mean"] < 1e-4
    assert any("suffix" in record["speed"]["by_method"] for record in done)


def test_rollouts_run_ahead_of_the_trainer(
    tasks: Path, tmp_path: Path, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, update = Seen(monkeypatch), TrainerRanks.update

    def update_later(trainer: TrainerRanks, *given: Any) -> dict[str, float]:
        """While the next step is rolled out, if there is one."""
        begun, end = seen.rollout.committed_tokens, time.monotonic() + 5.0
        while seen.rollout.committed_tokens == begun and time.monotonic() < end:
            time.sleep(0.01)
        return update(trainer, *given)

    monkeypatch.setattr(TrainerRanks, "update", update_later)
    common = ("trainer.max_staleness=1", "checkpoint.every=2", *FEW, *held_out(tmp_path), "evaluation.every=1")
    first = run(settings(tasks, tmp_path, "ahead", "trainer.steps=2", *common))
    last = run(settings(tasks, tmp_path, "ahead", "trainer.steps=4", "resume=auto", *common))
    assert first.status == last.status == "complete"
    done = [record["train"] for record in records(last.folder)]
    assert [one["staleness_max"] for one in done[:1] + done[2:3]] == [0, 0], "nothing was made ahead of these"
    assert all(0 <= one["staleness_mean"] <= one["staleness_max"] <= 1 for one in done)
    assert len(done) == 4 and any(one["staleness_mean"] > 0 for one in done)
    assert all("importance_weight" in one and one["skipped"] == 0 for one in done)
    tokens = sum(trajectory.num_own_tokens for step in seen.steps for trajectory in step.trajectories)
    assert sum(record["speed"]["tokens"] for record in records(last.folder)) == tokens
    assert [step.position for step in seen.steps] == [(4 * number, 0) for number in (1, 2, 3, 4)]
    rows = written(last.folder, "completions")
    evaluated = {row["step"]: row["weight_version"] for row in rows if row["kind"] == "evaluation"}
    assert evaluated == {step: step for step in range(5)}, "the weights of the step, while later steps were rolled out"
