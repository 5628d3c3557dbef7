"""Trackers get the figures of steps and evaluations, and a table of a few outputs."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specactor_ray.config import Config
from specactor_ray.core.console import as_text, make_table
from specactor_ray.runs.checkpoint import CheckpointStore, TrainState
from specactor_ray.runs.training import TrainingRun
from specactor_ray.trainer.figures import shown_rows
from specactor_ray.trainer.tracking import open_trackers


def test_figures_and_outputs_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three outputs of different prompts: whole in trackers, a line in the terminal. One that cannot be closed ends
    nothing."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logged = list[tuple[dict[str, Any], int]]()

    def finish() -> None:
        logged.append(({}, -1))
        raise RuntimeError("the network is down")

    run = SimpleNamespace(log=lambda row, step: logged.append((row, step)), finish=finish)
    wandb = SimpleNamespace(init=lambda **options: run, Table=lambda columns, data: (columns, data))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = Config()
    config.tracking.wandb_project = "mine"
    rows = [
        {
            "task": task,
            "prompt": [{"role": "user", "content": f"{task}?"}],
            "text": "a\n|b",
            "answer": None,
            "reward": 1.0,
        }
        for task in (5, 5, 6, 7, 8)
    ]
    table = shown_rows(rows)
    assert table == [{"reward": "1.000", "prompt": f"{n}?", "text": "a\n|b", "answer": ""} for n in (5, 6, 7)]
    assert shown_rows(rows, 80)[0]["text"] == r"a\n|b" and not shown_rows([])
    assert shown_rows([{**rows[0], "text": "x" * 80 + "end"}], 80)[0]["text"] == "…" + "x" * 14 + "end"
    wide = shown_rows([{**rows[0], "prompt": "y" * 99, "answer": "z" * 99, "text": "x" * 99}], 80)
    assert all(len(line) <= 80 for line in as_text(make_table(wide), 80).split("\n"))
    assert "1.000" in as_text(make_table(wide), 80)
    with contextlib.ExitStack() as parts:
        store = CheckpointStore(tmp_path / "c", 1, True)
        for tracker in open_trackers(config, TrainingRun(tmp_path, store, TrainState(), None, ()), parts):
            tracker(3, {"evaluation/mean": 0.5}, table)
            tracker(4, {"train/reward_mean": 0.25}, ())
    columns = ["reward", "prompt", "text", "answer"]
    outputs = (columns, [list(row.values()) for row in table])
    assert logged == [({"evaluation/mean": 0.5, "completions": outputs}, 3), ({"train/reward_mean": 0.25}, 4), ({}, -1)]
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(one.step, one.value) for one in events.Scalars("evaluation/mean")] == [(3, 0.5)]
    (text,) = events.Tensors("completions/text_summary")
    lines = text.tensor_proto.string_val[0].decode().split("\n")
    assert len(lines) == 5 and lines[2] == r"| 1.000 | 5? | a<br>\|b |  |"
