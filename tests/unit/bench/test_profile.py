"""Measuring on the tiny models: acceptance without a target, costs, and the whole command in its own process."""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specactor_ray.bench.profile import default_devices, parse_axes, run_profile
from specactor_ray.bench.profile_process import (
    TextStream,
    measure_acceptance,
    measure_verify,
    record_outputs,
    seconds_per_token,
)
from specactor_ray.config.load import from_mapping
from specactor_ray.config.methods import DrafterSpec, Traits
from specactor_ray.config.schema import Config, TargetConfig
from specactor_ray.core.console import make_console
from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.core.types import SamplingParams
from specactor_ray.distill.corpus import CorpusRecord
from specactor_ray.draft.proposer import build_proposer
from specactor_ray.draft.slots import RowProposer
from specactor_ray.target.base import NO_DRAFTS, Drafts
from specactor_ray.target.hf import HfEngine
from specactor_ray.transport.messages import States
from tests import tiny

REPOSITORY = Path(__file__).parents[3]
WINDOW = 4


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path) -> HfEngine:
    return HfEngine.from_config(TargetConfig(model=str(tiny_model_dir), dtype="float32", kv_cache_gb=0.05, max_batch=8))


def configuration(target: Path, **sections: Any) -> Config:
    return from_mapping(
        {
            "target": {"model": str(target), "kv_cache_gb": 0.05},
            "drafters": [{"method": "ngram"}],
            "sampling": {"max_tokens": 24, "seed": 3},
            **sections,
        }
    )


@pytest.fixture(scope="module")
def recorded(engine: HfEngine, tiny_model_dir: Path) -> list[CorpusRecord]:
    config = configuration(tiny_model_dir, data={"n": 2})
    return record_outputs(engine, config, tiny.tiny_prompts(6), most=9)


def test_greater_depths_are_never_right_more_often() -> None:
    """Of the first tokens of two outputs one is right; only that output has a second one, and it is right too."""
    short = CorpusRecord(0, (1, 2), (5, 6), SamplingParams(max_tokens=100, seed=1))
    long = CorpusRecord(1, (1, 2), (5, 6, 7), SamplingParams(max_tokens=100, seed=2))
    oracle = Oracle({(1, 2, 1): [5, 9], (1, 2, 2): [5, 6, 7]})
    assert measure_acceptance(oracle, [short, long], 8, batch=1).survival == (0.5, 0.5)
    with pytest.raises(InputError, match="no draft could be held against"):
        measure_acceptance(oracle, [replace(short, output_token_ids=(5,))], 8, batch=1)


class Oracle(RowProposer):
    """A proposer that looks the answer up by prompt and seed."""

    method, vocab_size = "oracle", None
    traits = Traits(looks_up=True, reads_features=True)

    def __init__(self, answers: dict[tuple[int, ...], Any]) -> None:
        super().__init__()
        self._answers = answers
        self.features: list[Any] = []

    def add_features(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, states: Any) -> None:
        for slot, begin, values in States(slots, starts, lengths, states).split():
            self.features.append((self.request_ids[slot], begin, values[:, 0].tolist()))

    def guess(self, slot: int, prompt: np.ndarray, output: np.ndarray, room: int) -> Any:
        return self._answers[(*prompt.tolist(), self.samplings[slot].seed)][len(output) :]


class TestCosts:
    def test_samples_are_recorded_in_the_order_of_the_prompts(self, recorded: list[CorpusRecord]) -> None:
        assert len(recorded) == 9
        assert recorded[0].prompt_token_ids == recorded[1].prompt_token_ids != recorded[2].prompt_token_ids
        assert len({one.sampling.seed for one in recorded}) == 9
        assert all(0 < len(one.output_token_ids) <= 24 for one in recorded)

    def test_every_point_of_the_grid_is_measured_and_the_engine_is_left_empty(
        self, engine: HfEngine, recorded: list[CorpusRecord]
    ) -> None:
        axes = parse_axes([4, 1], [2, 1], [16, 64], 2)
        points = measure_verify(engine, recorded, 1, axes, lambda text: None)
        places = {(point.window, point.context, point.batch) for point in points}
        assert len(points) == axes.points(0)
        assert places == {(w, c, b) for w in (0, 1, 2) for c in (16, 64) for b in (1, 4)}
        assert all(point.seconds > 0.0 for point in points)
        assert not engine.has_work() and not len(engine.decoding())

    def test_every_step_has_the_room_that_the_one_before_announced(
        self, engine: HfEngine, recorded: list[CorpusRecord], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An engine with a step in flight drops drafts without room, and the figure would be that of a plain step."""
        calls, step = list[tuple[int, int]](), engine.step

        def noted(drafts: Drafts = NO_DRAFTS, window: int = 0) -> Any:
            calls.append((int(drafts.lengths.max(initial=0)), window))
            return step(drafts, window)

        monkeypatch.setattr(engine, "step", noted)
        measure_verify(engine, recorded, 1, parse_axes([4, 1], [2, 1], [16], 1), lambda text: None)
        assert max(calls)[0] == 2 and all(room == most for (_, room), (most, _) in itertools.pairwise(calls))

    def test_exported_features_reach_the_proposer_with_their_tokens(self, recorded: list[CorpusRecord]) -> None:
        """Each position's state once, in order, up to the one that predicted the newest committed token."""
        with_states = [replace(r, source=np.arange(r.num_tokens - 1.0)[:, None]) for r in recorded]
        oracle = Oracle({(*one.prompt_token_ids, one.sampling.seed): one.output_token_ids for one in recorded})
        measure_acceptance(oracle, with_states, WINDOW, batch=1)
        for number, one in enumerate(recorded):
            spans = [(begin, states) for name, begin, states in oracle.features if name == f"replay-{number}"]
            assert spans[0] == (0, list(range(len(one.prompt_token_ids))))
            together = [state for begin, states in spans for state in states]
            assert together == list(range(len(one.prompt_token_ids) + len(one.output_token_ids) - 1))
            assert all(states[0] == begin for begin, states in spans)

    def test_a_cache_too_small_to_draft_is_refused(
        self, recorded: list[CorpusRecord], tiny_draft_model_dir: Path
    ) -> None:
        """Otherwise the time of doing nothing would pass for the cost of drafting."""
        drafter = DrafterSpec("draft_model", model=str(tiny_draft_model_dir), kv_cache_gb=0.05, max_batch=8)
        text, endless = TextStream(recorded), SamplingParams(max_tokens=1000)
        with pytest.raises(InputError, match="draft_model drafts nothing for 1 of 1 requests of 600 tokens"):
            seconds_per_token(
                build_proposer(drafter, TargetConfig(), "cpu"), text, endless, batch=1, context=600, window=2, repeats=1
            )


class TestRefused:
    @pytest.mark.parametrize(
        ("axes", "problem"),
        [
            (([0], [1], [1], 1), "--batches: 0 is given"),
            (([1], [200], [1], 1), "--windows: 200 is given; use numbers from 1 to 128"),
            (([1], [1], [], 1), "--contexts: nothing is given"),
            (([1], [1], [1], 0), "--repeats: 0 is given"),
        ],
    )
    def test_axes(self, axes: Any, problem: str) -> None:
        with pytest.raises(InputError, match=problem):
            parse_axes(*axes)

    def test_what_can_be_seen_before_a_process_starts(self, tiny_model_dir: Path, tmp_path: Path) -> None:
        (tmp_path / "p.jsonl").write_text('{"prompt": "Add 1 and 2."}\n')
        (tmp_path / "there.json").write_text("precious")
        axes, console = parse_axes([1], [1], [16], 1), make_console(sys.stderr)
        config = configuration(tiny_model_dir, data={"path": str(tmp_path / "p.jsonl")})
        new = tmp_path / "new.json"
        cores = len(os.sched_getaffinity(0))
        assert default_devices(config)[0] == 1 and max(default_devices(config)) <= cores
        with pytest.raises(InputError, match=r"there.json exists and is never overwritten"):
            run_profile(config, axes, [1], tmp_path / "there.json", console)
        with pytest.raises(InputError, match=r"--output: there is no folder"):
            run_profile(config, axes, [1], tmp_path / "no" / "x.json", console)
        with pytest.raises(InputError, match=f"--devices: {cores + 1} cannot be measured"):
            run_profile(config, axes, [1, cores + 1], new, console)
        with pytest.raises(ConfigError, match=r"data.path: is not set"):
            run_profile(configuration(tiny_model_dir), axes, [1], new, console)
        config.drafters[0].gpus = 1
        with pytest.raises(ConfigError, match=r"drafters.0.gpus: the target runs on cores"):
            run_profile(config, axes, [1], new, console)
        assert not new.exists() and (tmp_path / "there.json").read_text() == "precious"
