"""What a training run writes down about its drafters."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from specactor_ray.config import Config
from specactor_ray.core.errors import SpecActorError
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.trajectory import RolloutMetrics, Trajectory
from specactor_ray.runs.checkpoint import CheckpointStore, TrainState
from specactor_ray.runs.training import TrainingRun
from specactor_ray.trainer.display import TrainingDisplay
from specactor_ray.trainer.experience import Experience
from specactor_ray.trainer.record import StepRecorder, _totals
from specactor_ray.trainer.report import write_report
from specactor_ray.trainer.tracking import numbers
from specactor_ray.transport.messages import RequestStats


def record(step: int, by_method: dict[str, list[int]]) -> dict[str, Any]:
    train = {"reward_mean": 0.5, "pass_rate": 0.0, "length_mean": 8.0, "entropy": 1.0, "loss": 0.1, "grad_norm": 1.0}
    speed = {"tokens": 10, "tokens_per_s": 5.0, "acceptance_length": 1.2, "supply": 2.0, "by_method": by_method}
    return {
        "step": step,
        "train": {**train, "skipped": 0},
        "gap": {"mean": 0.0},
        "speed": speed,
        "seconds": {"step": 1.0, "rollout": 0.5},
        "failures": {"reward": {}},
    }


def sample(stats: RequestStats) -> Trajectory:
    return Trajectory("r", 0, 0, (1,), (2,), (-0.5,), "two", "stop", SamplingParams(), stats)


RECORDS = [
    record(1, {"eagle": [10, 2], "ngram": [4, 4]}),
    record(2, {"eagle": [40, 18], "ngram": [0, 0], "suffix": [0, 0]}),
]


def test_acceptance_is_tracked_for_each_method_that_drafted() -> None:
    tracked = {name: value for name, value in numbers(RECORDS[1]) if name.startswith("speed/acceptance_rate/")}
    assert tracked == {"speed/acceptance_rate/eagle": 0.45}


def test_the_whole_run_has_a_table_of_its_drafters(tmp_path: Path) -> None:
    totals = _totals(RECORDS)
    assert totals["drafters"] == {"eagle": [50, 20], "ngram": [4, 4], "suffix": [0, 0]}
    config = {"algorithm": {"name": "grpo"}, "data": {"path": "d"}, "target": {"model": "m"}, "mode": "decoupled"}
    facts = {
        "run": "r",
        "status": "complete",
        "error": "",
        "steps": 2,
        "config": config,
        "hardware": {},
        "versions": {},
        "fallbacks": ["torch samples"],
    }
    write_report(tmp_path, {**facts, "totals": totals}, RECORDS)
    text = (tmp_path / "report.md").read_text()
    assert "Fallbacks: torch samples" in text
    assert "| eagle | 50 | 20 | 40.0% |" in text and "| ngram | 4 | 4 | 100.0% |" in text
    assert "| suffix" not in text, "it drafted nothing"
    write_report(tmp_path, {**facts, "totals": _totals([record(1, {})])}, [record(1, {})])
    assert "| drafter |" not in (tmp_path / "report.md").read_text(), "a plain run has no drafters"


UPDATE = dict.fromkeys(("loss", "entropy", "grad_norm", "skipped", "logprob_gap", "logprob_gap_max"), 0.0)


class Lease:
    """A lease that can be taken away."""

    lost = False

    def check(self) -> None:
        if self.lost:
            raise SpecActorError("taken over")

    def release(self) -> None: ...


def recorder(folder: Path, lease: Lease) -> tuple[TrainingRun, StepRecorder]:
    config = Config()
    config.tracking.tensorboard = False
    run = TrainingRun(folder, CheckpointStore(folder / "c", 1, False), TrainState(), None, (lease,))  # type: ignore[arg-type]
    rollout: Any = SimpleNamespace(
        reset_metrics=lambda: None,
        metrics=RolloutMetrics,
        fallbacks=list,
        drafters=lambda: [{"alarm": True}, {"alarm": False}],
    )
    return run, StepRecorder(config, run, rollout, TrainingDisplay(Console(file=io.StringIO()), 1))


def test_a_full_disk_costs_no_record_and_does_not_end_the_run(tmp_path: Path) -> None:
    run, record = recorder(tmp_path, Lease())
    run.metrics_file.symlink_to(tmp_path / "no such folder" / "metrics.jsonl")  # which cannot be written to either
    for step in (1, 2):
        record.begin(step - 1)
        record.end(step, Experience([], [], []), UPDATE, 0)
    summary = record.finish("complete", 0).summary
    assert (summary["steps"], summary["metrics_failures"], summary["metrics_pending"]) == (2, 3, 2)
    assert summary["drafters"] == [{"alarm": True}, {"alarm": False}]
    run.metrics_file.unlink()
    assert record.finish("complete", 0).summary["metrics_pending"] == 0
    assert [json.loads(line)["step"] for line in run.metrics_file.read_text().splitlines()] == [1, 2]


def test_drafts_that_go_bad_are_an_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _run, record = recorder(tmp_path, Lease())
    for step, accepted in enumerate((300, 310, 290, 4, 3), start=1):
        record.begin(step - 1)
        drafted = ({"ngram": (700, accepted), "eagle": (900, 90)}, {"ngram": (300, 0)})
        done = [sample(RequestStats(by_method=pairs)) for pairs in drafted]
        record.end(step, Experience([], done, []), UPDATE, 0)
    (alarm,) = [line for line in caplog.messages if "does not follow the policy any more" in line]
    assert alarm.startswith("step 4: only 0.4% of the draft tokens of ngram were right, usually 30.")


def test_nothing_is_written_into_a_run_that_was_taken_over(tmp_path: Path) -> None:
    lease = Lease()
    run, record = recorder(tmp_path, lease)
    record.begin(0)
    record.end(1, Experience([], [], []), UPDATE, 0)
    lease.lost = True
    with pytest.raises(SpecActorError, match="taken over"):
        record.end(2, Experience([], [], []), UPDATE, 0)
    assert record.finish("failed", 0).status == "failed"
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert len(run.metrics_file.read_text().splitlines()) == 1
