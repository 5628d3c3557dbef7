"""The records of a training run: tables of drafters, a full disk, and a run that was taken over."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specactor_ray.config import Config
from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.identity import token_identity
from specactor_ray.rollout.trajectory import RolloutMetrics
from specactor_ray.runs.checkpoint import CheckpointStore, TrainState
from specactor_ray.runs.records import METRICS_FILE
from specactor_ray.runs.training import TrainingRun
from specactor_ray.trainer.data import Task
from specactor_ray.trainer.experience import Experience
from specactor_ray.trainer.figures import numbers, results_of, staleness_of, step_line
from specactor_ray.trainer.record import StepRecorder
from specactor_ray.trainer.rewards import Score
from specactor_ray.transport.messages import RequestStats
from tests.fakes.trajectories import trajectory


class Ticks:
    """A clock, and a rollout whose counters grow with it: 10 tokens in 5 row-steps and 2 discarded ones a second."""

    def __init__(self) -> None:
        self.now = 100.0
        self.fallbacks, self.drafters = list, list
        self.resolved = SimpleNamespace(identity=token_identity("cpu", "float32", False))
        self.health = {"method": "eagle", "alarm": True}

    def status(self) -> list[dict[str, Any]]:
        return [{"id": "eagle-0", "counters": {"cost": [], "health": self.health}}]

    def perf_counter(self) -> float:
        return self.now

    def metrics(self) -> RolloutMetrics:
        seconds = round(self.now)
        return RolloutMetrics(row_steps=5 * seconds, committed_tokens=12 * seconds, supplied_tokens=15 * seconds)

    @property
    def committed_tokens(self) -> int:
        return 10 * round(self.now)

    @property
    def discarded_tokens(self) -> int:
        return 2 * round(self.now)


class Recorded:
    """A recorder on hand-driven time."""

    def __init__(self, folder: Path, ticks: Ticks, done: int = 0, **trainer: Any) -> None:
        config = Config(target=TargetConfig(dtype="float32"))
        config.tracking.tensorboard = False
        config.tracking.completions = 1
        for name, value in trainer.items():
            setattr(config.trainer, name, value)
        self.run = TrainingRun(folder, CheckpointStore(folder / "c", 1, False), TrainState(step=done), None, ())
        self.lines = list[str]()
        rollout: Any = ticks
        self.recorder = StepRecorder(config, self.run, self.lines.append)
        self.opened = self.recorder.open(rollout)
        self.opened.__enter__()

    def steps(self, *experiences: Experience, **update: float) -> None:
        first = self.run.state.step + 1
        for step, experience in enumerate(experiences, start=first):
            self.recorder.begin(step - 1)
            self.recorder.end(step, experience, {**UPDATE, **update}, 0)

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run.folder / METRICS_FILE).read_text().splitlines()]


def test_a_step_in_a_line_for_every_width() -> None:
    """The most important figures that fit, without those that say nothing."""
    train: dict[str, Any] = {"reward_mean": 0.6, "reward_std": 0.2, "sampled": 16, "pass_rate": 0.25, "kl": 0.00125}
    train |= {"length_mean": 9.94, "entropy": 1.2, "grad_norm": -0.0, "turns_mean": None, "loss": -0.0}
    speed = {"tokens_per_s": 412.3, "acceptance_length": 1.74, "by_method": {"suffix": [100, 47], "ngram": [0, 0]}}
    record = {"train": train, "speed": speed, "seconds": {"rollout": 1.24, "step": 8.1}, "step": 12}
    lines = {width: step_line(record, 30, width) for width in range(40, 220)}
    assert all(len(line) <= max(width, 31) for width, line in lines.items())
    assert all(len(lines[width]) <= len(lines[width + 20]) for width in range(40, 199))
    assert lines[80] == "step 12/30: reward 0.600 ±0.050, pass 25%, length 9.9, rollout 1.2 of 8.1 s"
    ends = ", acc. length 1.74, kl 0.0013, entropy 1.200, grad 0.000, 412 tokens/s, 47% of suffix's drafts right"
    assert lines[219] == lines[80] + ends


def test_what_a_run_came_to() -> None:
    """Rates over all steps: of 30 + 60 tokens in 1 + 4 seconds, in 20 + 30 steps of requests."""
    figures = [(0.25, 30, 30.0, 1.5, 1.0, 5.0), (0.75, 60, 15.0, 2.0, 4.0, 15.0), (None, 0, 0.0, 0.0, 0.0, 0.0)]
    records = [
        {
            "step": step,
            "train": {"reward_mean": reward},
            "speed": {"tokens": count, "generated_tokens": count, "tokens_per_s": rate, "acceptance_length": length},
            "seconds": {"rollout": rollout_s, "step": step_s},
        }
        for step, (reward, count, rate, length, rollout_s, step_s) in enumerate(figures, start=1)
    ]
    expected = {"first_reward": 0.25, "last_reward": 0.75, "best_reward": 0.75, "best_step": 2}
    assert results_of(records) == {**expected, "tokens_per_s": 18.0, "acceptance_length": 1.8, "rollout_share": 0.25}
    assert set(results_of([]).values()) == {None}


UPDATE = dict.fromkeys(("loss", "entropy", "grad_norm", "logprob_gap", "logprob_gap_max", "logprob_gap_kl"), 0.0)
SAMPLE: Any = object()
UPDATE |= {"skipped": 1.0, "no_gradient": 2.0}


def test_a_full_disk_costs_no_record_and_does_not_end_the_run(tmp_path: Path) -> None:
    ticks = Ticks()
    recorded = Recorded(tmp_path, ticks)
    file = recorded.run.folder / METRICS_FILE
    file.symlink_to(tmp_path / "no such folder" / "metrics.jsonl")  # which cannot be written to either
    recorded.steps(Experience(), Experience())
    summary = recorded.recorder.finish("complete", 0).summary
    assert (summary["steps"], summary["metrics_pending"]) == (2, 2)
    assert recorded.lines[1].startswith("step 2/100: reward -, length")
    assert summary["drafters"] == [{"id": "eagle-0", **ticks.health, "failures": 0, "malformed": 0}]
    assert summary["costs"]["verify"] == {"1": []}, "its verifiers have reported nothing"
    file.unlink()
    assert recorded.recorder.finish("complete", 0).summary["metrics_pending"] == 0
    assert [record["step"] for record in recorded.records] == [1, 2]


def test_a_tracker_that_fails_ends_neither_the_run_nor_other_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tracked = list[int]()

    def fails(*arguments: Any) -> None:
        raise ValueError("step must be monotonic")

    trackers = [fails, lambda step, figures, outputs: tracked.append(step)]
    monkeypatch.setattr("specactor_ray.trainer.record.open_trackers", lambda *arguments: trackers)
    Recorded(tmp_path, Ticks()).steps(Experience(), Experience())
    assert tracked == [1, 2]
    assert "step 2 was not tracked: ValueError: step must be monotonic" in caplog.text


def test_a_resumed_run_is_judged_by_the_gap_of_its_first_step(tmp_path: Path) -> None:
    for done, gap, problem in ((0, 1e-6, ""), (2, 2e-2, "step 4: log-probabilities of rollout and trainer differ by")):
        recorded = Recorded(tmp_path, Ticks(), done)
        recorded.steps(Experience([SAMPLE]), Experience([SAMPLE]), logprob_gap=gap)
        assert recorded.recorder.problem.startswith(problem) and bool(recorded.recorder.problem) == bool(problem)


@pytest.mark.parametrize("ahead", [0, 1])
def test_figures_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """Acceptance is that of the step's samples, also where they were generated before the step; rates are of all tokens
    generated since the last record, without those of an evaluation. The last checkpoint counts in the totals. The
    outputs of step and evaluation are written."""
    ticks = Ticks()
    monkeypatch.setattr("specactor_ray.trainer.record.time", ticks)
    recorded = Recorded(tmp_path, ticks, max_staleness=ahead)
    record = recorded.recorder
    stats = RequestStats(4, 10, 5, 1, {"ngram": (6, 4), "eagle": (4, 1)}), RequestStats(6, 0, 0, 0, {})
    outputs = [trajectory(range(size), (n, 0), stats=one) for n, size, one in zip((0, 1), (8, 6), stats, strict=True)]
    tasks = [Task(n, "p", one, {"data_source": one}) for n, one in enumerate("ab", start=5)]
    scores: list[Score | None] = [Score(1.0, {"exact_match": 1.0, "short": 0.5}), Score(0.0, {"exact_match": None})]
    counts = {"turns": 5, "groups": 3, "discarded_samples": 4, "discarded_tokens": 30}
    experience = Experience([SAMPLE], outputs, tasks, scores, reward_wait_s=1.0, environment_s=8.0, **counts)
    ticks.now += 7.0  # of a start that is in no figure
    for step in (1, 2):
        with record.timed("evaluation"):
            ticks.now += 5
        assert record.evaluated(step - 1, experience) == 0.5
        record.begin(step - 1)
        for phase, seconds in {"rollout": 4, "update": 2, "sync": 1}.items():
            with record.timed(phase):
                ticks.now += seconds / 2
                experience.spans |= {"outputs": (ticks.now - 1, ticks.now)} if phase == "rollout" else {}
                ticks.now += seconds / 2
        record.end(step, experience, UPDATE, 9)
        with record.timed("checkpoint"):
            ticks.now += 3
    summary = record.finish("complete", 0).summary
    totals, results = summary["totals"], summary["results"]
    for found, step, seconds in zip(recorded.records, (1, 2), (12, 15), strict=True):
        tracked = {name: value for name, value in numbers(found) if name.startswith("speed/acceptance_rate/")}
        assert tracked == {"speed/acceptance_rate/ngram": 4 / 6, "speed/acceptance_rate/eagle": 0.25}
        train = {"reward_mean": 0.5, "reward_std": 0.5, "pass_rate": 0.5, "length_mean": 7.0, "truncated": 0.0}
        train |= {"samples": 1, "sampled": 2, "zero_variance_groups": 0, "groups": 3, "turns_mean": 2.5}
        train |= {"skipped_tasks": 0, **{name: UPDATE[name] for name in UPDATE if not name.startswith("logprob")}}
        train |= {"reward/exact_match": 1.0, "reward/short": 0.5}
        train |= {"reward_by_source/a": 1.0, "reward_by_source/b": 0.0}
        train |= {"staleness_mean": step - 1, "staleness_max": step - 1} if ahead else {}
        counted = seconds if ahead else 7  # since the record before, or since the evaluation
        speed = {"tokens": 14, "generated_tokens": 10 * counted, "discarded_tokens": 2 * counted, "sync_bytes": 9}
        speed |= {"tokens_per_s": 10.0 if ahead else 10 * counted / 3, "rollout_share": 4 / seconds}
        speed |= {"acceptance_length": 1.5, "acceptance_rate": 0.5, "supply": 3.0, "drafter_alarms": 0}
        speed |= {"reward_wait_s": 1.0, "environment_s": 4.0, "oversampled": 4, "oversampled_tokens": 30}
        assert found["speed"].pop("by_method") == {"ngram": [6, 4], "eagle": [4, 1]}
        assert found["train"] == pytest.approx(train) and found["speed"] == pytest.approx(speed), "and no other figure"
        phases = {"rollout": 4.0, "update": 2.0, "sync": 1.0, "checkpoint": seconds - 12.0, "step": seconds}
        phases |= {"drafter": 0.0, "evaluation": 5.0}
        began = {"checkpoint": [0.0, 3.0]} if step == 2 else {}  # of the step before, after its record
        at = seconds - 7.0
        outputs = {"evaluation": [at - 5, at], "rollout": [at, at + 4], "outputs": [at + 1, at + 2]}
        assert found["timeline"] == {**began, **outputs, "update": [at + 4, at + 6], "sync": [at + 6, at + 7]}
        assert found["seconds"] == phases and found["gap"] == {"mean": 0.0, "max": 0.0, "kl": 0.0}
    phases = {"rollout": 8.0, "update": 4.0, "sync": 2.0, "evaluation": 10.0, "checkpoint": 6.0}
    assert totals["seconds"] == {**phases, "drafter": 0.0, "step": 30.0}
    assert totals["tokens"] == 28 and totals["drafters"] == {"ngram": [12, 8], "eagle": [8, 2]}
    evaluations = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    evaluation = {"scored": 2, "mean": 0.5, "pass@1": 0.5, "standard_error": 0.5, "samples": 2, "length_mean": 7.0}
    evaluation |= {"truncated": 0.0, "tokens": 14, "acceptance_length": 1.5, "seconds": 5.0}
    evaluation |= {"reward/exact_match": 1.0, "reward/short": 0.5, "reward_by_source/a": 1.0, "reward_by_source/b": 0.0}
    evaluation["failures"] = {"reward": {}, "rollout": {}}
    assert evaluations == [{"step": step, **evaluation} for step in (0, 1)]
    assert [results[f"{which}_evaluation"]["step"] for which in ("first", "last", "best")] == [0, 1, 0]
    written = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert [(row["step"], row["kind"]) for row in written] == [
        *((0, "evaluation"), (0, "evaluation"), (1, "train"), (1, "evaluation"), (1, "evaluation"), (2, "train"))
    ]
    completion = {"step": 1, "kind": "train", "task": 5, "sample": 0, "prompt": "p", "text": "", "answer": "a"}
    completion |= {"reward": 1.0, "rewards": {"exact_match": 1.0, "short": 0.5}, "length": 8, "finish_reason": "stop"}
    assert written[2] == {**completion, "acceptance_length": 2.25, "weight_version": 0}
    assert recorded.lines[0].startswith("evaluation of step 0/100: reward 0.500 ±0.500, pass@1 50%, length 7.0, 0% cut")
    assert [line.split() for line in recorded.lines[1].splitlines()][2] == ["1.000", "p", "a"]


def test_a_step_without_a_reward_and_one_with_skipped_tasks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning each in the log; the numbers are in the metrics and the summary."""
    recorded = Recorded(tmp_path, Ticks())
    reasons = Counter({"ValueError: no box": 2, "TimeoutError: 5 s": 3, "TimeoutError: 6 s": 1})
    failures = {"reward": reasons, "rollout": Counter[str]()}
    skip = "t.jsonl, line 4, has 9 tokens, and 3 is the limit"
    unscored = Experience([], [trajectory(range(4))], [Task(0, "p")], [None], failures=failures)
    recorded.steps(unscored, Experience(skipped_tasks=99, first_skip=skip))
    totals = recorded.recorder.finish("failed", 0).summary["totals"]
    found, skipped = recorded.records
    assert [found["train"][name] for name in ("reward_mean", "reward_std", "pass_rate")] == [None] * 3
    assert ": reward -, length 4.0, rollout 0" in recorded.lines[0]
    assert found["gap"] == {"mean": None, "max": None, "kl": None} and found["train"]["entropy"] is None
    assert "step 1: 6 samples have no reward: 4 x TimeoutError, such as: 5 s, 2 x ValueError: no box" in caplog.text
    assert "step 1: optimizer steps left out: 2 (the gradient is 0)" in caplog.text
    assert totals["failures"] == {"reward": dict(reasons), "rollout": {}}
    assert totals["left_out"] == {"skipped": 2, "no_gradient": 4}
    assert not [name for name, value in numbers(found) if value is None]
    assert skipped["train"]["skipped_tasks"] == totals["skipped_tasks"] == 99
    assert caplog.text.count("tasks skipped") == 1
    assert "step 2: tasks skipped: 99 (the first: t.jsonl, line 4, has 9 tokens" in caplog.text


def test_staleness_is_counted_in_own_tokens() -> None:
    plain = trajectory(range(4), weight_version=5)
    mask = (True, True, False, False, True, True)
    mixed = trajectory(range(6), weight_version=5, versions=((3, 1), (4, 5)), loss_mask=mask)
    experience = Experience(trajectories=[plain, mixed])
    assert staleness_of(experience, 5) == {"staleness_mean": (2 + 2 * 1) / 8, "staleness_max": 2}
    assert staleness_of(Experience(), 5) == {"staleness_mean": 0.0, "staleness_max": 0}
