"""The records of a training run: tables of drafters, a full disk, and a run that was taken over."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from specactor_ray.config import Config
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.trajectory import RolloutMetrics, Trajectory
from specactor_ray.runs.checkpoint import CheckpointStore, TrainState
from specactor_ray.runs.training import TrainingRun
from specactor_ray.trainer.display import TrainingDisplay, write_report
from specactor_ray.trainer.experience import Experience
from specactor_ray.trainer.record import MetricsFile, StepRecorder, numbers, staleness_of, totals_of


def record(step: int, by_method: dict[str, list[int]]) -> dict[str, Any]:
    names = ("reward_mean", "reward_std", "pass_rate", "length_mean", "entropy", "loss", "grad_norm")
    train = dict.fromkeys(names, 0.5)
    speed = {"tokens": 10, "tokens_per_s": 5.0, "acceptance_length": 1.2, "rollout_share": 0.5, "by_method": by_method}
    return {
        "step": step,
        "train": {**train, "skipped": 0},
        "gap": {"mean": 0.0},
        "speed": speed,
        "seconds": {"step": 1.0, "rollout": 0.5, "update": 0.2, "sync": 0.1},
        "failures": {"reward": {}},
    }


RECORDS = [
    record(1, {"eagle": [10, 2], "ngram": [4, 4]}),
    record(2, {"eagle": [40, 18], "ngram": [0, 0], "suffix": [0, 0]}),
]


def test_acceptance_is_tracked_for_each_method_that_drafted() -> None:
    tracked = {name: value for name, value in numbers(RECORDS[1]) if name.startswith("speed/acceptance_rate/")}
    assert tracked == {"speed/acceptance_rate/eagle": 0.45}


def test_the_whole_run_has_a_table_of_its_drafters(tmp_path: Path) -> None:
    totals = totals_of(RECORDS)
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
    write_report(tmp_path, {**facts, "totals": totals_of([record(1, {})])}, [record(1, {})])
    assert "| drafter |" not in (tmp_path / "report.md").read_text(), "a plain run has no drafters"


UPDATE = dict.fromkeys(("loss", "entropy", "grad_norm", "skipped", "logprob_gap", "logprob_gap_max"), 0.0)


def recorder(folder: Path) -> tuple[TrainingRun, StepRecorder]:
    config = Config()
    config.tracking.tensorboard = False
    run = TrainingRun(folder, CheckpointStore(folder / "c", 1, False), TrainState(), None, ())
    rollout: Any = SimpleNamespace(
        reset_metrics=lambda: None,
        metrics=RolloutMetrics,
        fallbacks=list,
        drafters=lambda: [{"alarm": True}, {"alarm": False}],
    )
    return run, StepRecorder(config, run, rollout, TrainingDisplay(Console(file=io.StringIO()), 1))


def test_a_full_disk_costs_no_record_and_does_not_end_the_run(tmp_path: Path) -> None:
    run, record = recorder(tmp_path)
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


SCRIPT = """
import resource, signal, sys
from pathlib import Path
from specactor_ray.trainer.record import MetricsFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = MetricsFile(Path(sys.argv[1]))
assert file.append({"step": 1, "text": "x" * 60})
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
before = file.path.read_bytes()
for step in (2, 3):  # the first 20 bytes of the line would have room
    assert not file.append({"step": step, "text": "y" * 60})
    assert file.path.read_bytes() == before
assert (file.failures, [record["step"] for record in file.pending]) == (2, [2, 3])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert file.append({"step": 4}) and not file.pending
"""


def test_records_wait_for_room_and_no_half_line_is_left(tmp_path: Path) -> None:
    """A real limit on the size of files, in a process of its own."""
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_what_was_written_before_stays(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    file = MetricsFile(path)
    assert file.append({"step": 2})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def trajectory(tokens: int, version: int, versions: tuple[tuple[int, int], ...], mask: str = "") -> Trajectory:
    own, ids = tuple(one == "1" for one in mask), tuple(range(tokens))
    done = Trajectory("r", 0, 0, (1,), ids, (0.0,) * tokens, "", "stop", SamplingParams())
    return replace(done, weight_version=version, versions=versions, loss_mask=own)


def test_staleness_is_counted_in_own_tokens() -> None:
    plain, mixed = trajectory(4, 5, ()), trajectory(6, 5, ((3, 1), (4, 5)), mask="110011")
    assert plain.own_tokens_by_version() == {5: 4}
    assert mixed.own_tokens_by_version() == {3: 1, 4: 2, 5: 1}
    experience = Experience([], [plain, mixed], [])
    assert staleness_of(experience, 5) == {"staleness_mean": (2 + 2 * 1) / 8, "staleness_max": 2}
    assert staleness_of(Experience([], [], []), 5) == {"staleness_mean": 0.0, "staleness_max": 0}
