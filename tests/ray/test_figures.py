"""Every figure of a rollout's summary beside its trajectories: resumed, with stop texts, new weights and a killed
verifier."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specactor_ray.cli.report import rollout_table
from specactor_ray.config.load import from_mapping
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.trajectory import RolloutMetrics
from specactor_ray.runs import rollout as rollout_run
from specactor_ray.runs.trajectories import TrajectoryWriter
from specactor_ray.startup.machine import Machine
from specactor_ray.startup.mode import settle
from specactor_ray.transport.messages import RequestStats
from tests.faults.run import is_sum_of_steps
from tests.local_ray import local_ray
from tests.plain_decoding import cut_at_stops, plain_tokens
from tests.tiny import tiny_prompts, tiny_target

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
PROMPTS, SAMPLES = 40, 4
STOPS = ("ee", " is ", "3, ")
DEADLINE_S = 240.0


def settings(folder: Path) -> dict[str, Any]:
    return {
        "mode": "coupled",
        "target": {
            "model": str(tiny_target()),
            "dtype": "float32",
            "replicas": 2,
            "max_batch": 4,
            "kv_cache_gb": 0.05,
        },
        "drafters": [{"method": "ngram"}],
        "data": {"path": str(folder / "prompts.jsonl"), "n": SAMPLES},
        "sampling": {"max_tokens": 96, "seed": 3, "stop": list(STOPS)},
        "run": {"dir": str(folder / "runs")},
        "cluster": {"pin_cores": False, "health_interval_s": 0.5, "health_timeout_s": 5.0},
        "speculation": {"verify": "all"},
        "resume": "auto",
    }


def stats_of(row: Mapping[str, Any]) -> RequestStats:
    given = row["stats"]
    return RequestStats(**{**given, "by_method": {name: tuple(pair) for name, pair in given["by_method"].items()}})


def rows_of(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(summary["output"]).read_text().splitlines()]


Check = Callable[[Any, Mapping[str, Any], list[dict[str, Any]], list[dict[str, Any]]], bool]
SUMMARY: dict[str, Check] = {
    "run": lambda v, s, rows, fresh: v == Path(s["output"]).parent.name,
    "status": lambda v, s, rows, fresh: v == ("complete" if len(rows) == PROMPTS * SAMPLES else "failed"),
    "error": lambda v, s, rows, fresh: (v == "") == (s["status"] == "complete"),
    "started": lambda v, s, rows, fresh: time.strptime(v, "%Y-%m-%dT%H:%M:%S%z") is not None,
    "start_seconds": lambda v, s, rows, fresh: 0.0 < v < DEADLINE_S,
    "resumed": lambda v, s, rows, fresh: v == len(rows) - len(fresh),
    "seconds": lambda v, s, rows, fresh: 0.0 < v < DEADLINE_S,
    "tokens": lambda v, s, rows, fresh: v >= sum(len(row["token_ids"]) for row in fresh),
    "discarded_tokens": lambda v, s, rows, fresh: v >= sum(row["stats"]["discarded"] for row in fresh),
    "tokens_per_s": lambda v, s, rows, fresh: v == pytest.approx(s["tokens"] / s["seconds"], rel=0.01),
    "trajectories": lambda v, s, rows, fresh: (
        v
        == {
            "total": PROMPTS * SAMPLES,
            "finished": sum(not row.get("error") for row in rows),
            "failed": sum(bool(row.get("error")) for row in rows),
            "tokens": sum(len(row["token_ids"]) for row in rows),
            "finish_reasons": Counter(row["finish_reason"] for row in rows),
            "failures": Counter(row["error"] for row in rows if row.get("error")),
        }
    ),
    "reissued_requests": lambda v, s, rows, fresh: v >= 0,
    "metrics": lambda v, s, rows, fresh: v.keys() == RolloutMetrics().to_dict().keys() and counts(v, fresh),
    "drafts": lambda v, s, rows, fresh: v.startswith(f"about {s['metrics']['speedup']:.2f}x of plain decoding"),
    "config": lambda v, s, rows, fresh: v["sampling"]["stop"] == list(STOPS),
    "fallbacks": lambda v, s, rows, fresh: v == [],
    "identity": lambda v, s, rows, fresh: v["tokens_identical"] and "float32" in v["reason"],
    "costs": lambda v, s, rows, fresh: len(v["verify"]["1"]) > 1 and v["ladder"][0]["method"] == "ngram",
    "drafters": lambda v, s, rows, fresh: all(one["right"] <= one["tried"] for one in v),
    "actors": lambda v, s, rows, fresh: {one["kind"] for one in v} == {"verifier"},
    "output": lambda v, s, rows, fresh: v.endswith("jsonl" if s["status"] == "complete" else "jsonl.partial"),
    "versions": lambda v, s, rows, fresh: bool(v),
    "hardware": lambda v, s, rows, fresh: bool(v),
}
"""Each figure of the summary → whether it is that of the trajectories: of all, and of those after the resume."""


def counts(metrics: Mapping[str, Any], fresh: list[dict[str, Any]]) -> bool:
    """Whether the verifiers' counters cover the steps of these outputs: a counter comes with the events that it counts,
    or later."""
    total = RequestStats.total(map(stats_of, fresh))
    least = {"row_steps": total.steps, "drafted_tokens": total.drafted, "accepted_tokens": total.accepted}
    least["committed_tokens"] = sum(len(row["token_ids"]) for row in fresh) + total.discarded
    ratios = {
        "acceptance_length": metrics["committed_tokens"] / metrics["row_steps"],
        "acceptance_rate": metrics["accepted_tokens"] / metrics["drafted_tokens"],
        "supply": metrics["supplied_tokens"] / metrics["row_steps"],
        "supply_share": metrics["supplied_row_steps"] / metrics["row_steps"],
    }
    is_right = all(metrics[name] == pytest.approx(value) for name, value in ratios.items())
    return is_right and all(metrics[name] >= value for name, value in least.items())


@contextmanager
def meddling(rollout: Any) -> Iterator[None]:
    """New weights (the same ones) while requests run, then the death of a verifier that has some."""

    ended = threading.Event()

    def goes_on() -> bool:
        """Wait for tokens; whether there are more."""
        before = rollout.committed_tokens
        while rollout.committed_tokens == before and not ended.wait(0.01):
            pass
        return not ended.is_set()

    def meddle() -> None:
        if goes_on():
            rollout.update_weights(tiny_target(), "keep")
        if goes_on():
            os.kill(next(row["pid"] for row in rollout.status() if row["phase"] == "ready"), signal.SIGKILL)

    thread = threading.Thread(target=meddle, daemon=True)
    thread.start()
    yield
    ended.set()
    thread.join(DEADLINE_S)


cluster = local_ray(2)


def test_a_summary_is_that_of_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, console = tiny_prompts(PROMPTS), Console(record=True, width=160)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
    write, consume, written = TrajectoryWriter.write, rollout_run._consume, list[int]()

    def breaking(self: TrajectoryWriter, row: dict[str, Any]) -> None:
        if len(written) == 20:
            raise RuntimeError("broken off")
        written.append(1)
        write(self, row)

    def meddled(rollout: Any, *arguments: Any) -> None:
        with meddling(rollout):
            consume(rollout, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(TrajectoryWriter, "write", breaking)
        with pytest.raises(RuntimeError, match="broken off"):
            rollout_run.run_rollout(from_mapping(settings(tmp_path)), console)
    (folder,) = (tmp_path / "runs").iterdir()
    first = json.loads((folder / "summary.json").read_text())
    monkeypatch.setattr(rollout_run, "_consume", meddled)
    summary = rollout_run.run_rollout(from_mapping(settings(tmp_path)), console).summary

    rows = rows_of(summary)
    tokens = plain_tokens(tiny_target(), prompts, SamplingParams(1.0, max_tokens=96, seed=3), SAMPLES)
    for row in rows:
        expected = cut_at_stops(tiny_target(), tokens[row["prompt_index"], row["sample_index"]], STOPS)
        assert (tuple(row["token_ids"]), row["text"]) == expected
        assert is_sum_of_steps(stats_of(row), len(row["token_ids"])), row
    fresh = rows[20:]
    assert summary["resumed"] == 20
    for figures, all_rows, new in ((first, rows[:20], rows[:20]), (summary, rows, fresh)):
        assert figures.keys() == SUMMARY.keys()
        wrong = {
            name: figures[name] for name, check in SUMMARY.items() if not check(figures[name], figures, all_rows, new)
        }
        assert not wrong
    assert summary["tokens"] == sum(len(row["token_ids"]) for row in fresh), "no output was aborted"
    next_one = {**settings(tmp_path), "mode": "auto", "profile": str(folder / "summary.json")}
    assert settle(from_mapping(next_one), Machine.here())[1][-1].startswith("plan: "), "its costs plan the next run"
    console.print(rollout_table(summary))
    shown = console.export_text()
    assert f"{summary['trajectories']['tokens']:,} in these trajectories" in shown
    assert (
        "20 of them were there; the speed below is of the rest" in shown and f"{summary['tokens']:,} tokens in" in shown
    )
