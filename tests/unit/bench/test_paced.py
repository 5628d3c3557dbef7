"""Paced devices: what forwards last, what drafters would have guessed in real outputs, and the simulator's rollouts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specactor_ray.actors.paced import Pace, PacedDraftModel, PacedEngine, PacedHost, paced_times
from specactor_ray.bench.paced import record, simulate
from specactor_ray.bench.variants import emulated_gpus, plan_variants
from specactor_ray.cli.bench import bench_rollout
from specactor_ray.config.load import from_mapping, load_config
from specactor_ray.config.methods import drafter_specs
from specactor_ray.config.schema import Config, PacedConfig
from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.chains import RANKS
from specactor_ray.models.loading import load_model
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.sampling.candidates import candidates
from specactor_ray.sampling.rules import Rules
from specactor_ray.simulation.world import NO_GUESS, RecordedText
from specactor_ray.startup.machine import Machine
from specactor_ray.startup.resolve import resolve
from specactor_ray.table.requests import TargetRequest
from specactor_ray.table.table import RequestTable
from specactor_ray.table.view import TableView
from tests.fakes.trajectories import trajectory
from tests.refused import refused
from tests.tiny import VOCAB_SIZE, tiny_prompt_ids

MODES = ("plain", "coupled", "decoupled", "fon")
LIMIT = 24


def config(target: Path, draft: Path, **keys: object) -> Config:
    given = {
        "mode": "decoupled",
        "paced": {"device": "h100", "stretch": 2.0},
        "target": {"model": str(target), "dtype": "float32", "max_batch": 4, "max_model_len": 256},
        "drafters": [{"method": "draft_model", "model": str(draft), "dtype": "float32"}, {"method": "ngram"}],
        "speculation": {"window": 8, "branches": 16},
        **keys,
    }
    return resolve(from_mapping(given), Machine(2)).config


@pytest.fixture(scope="module")
def pair(tiny_model_dir: Path, tiny_draft_model_dir: Path) -> Config:
    return config(tiny_model_dir, tiny_draft_model_dir)


@pytest.fixture(scope="module")
def outputs(pair: Config) -> list[Trajectory]:
    """Plain outputs of the tiny target at temperature 1, by the engine of a paced verifier."""
    engine = PacedEngine.from_config(pair.target)
    engine.pace, engine.seconds = Pace(), lambda *step: 0.0
    requests = [
        TargetRequest(str(n), ids, SamplingParams(max_tokens=LIMIT + n, seed=900 + n))
        for n, ids in enumerate(tiny_prompt_ids(5))
    ]
    for request in requests:
        engine.add(engine.table.open(request))
    tokens = {str(n): list[int]() for n in range(len(requests))}
    while engine.has_work():
        for row, found, _ in engine.step().outputs():
            tokens[engine.table.requests[row].request_id] += found
    return [
        trajectory(tokens[one.request_id], (n, 0), prompt_token_ids=one.prompt_token_ids, sampling=one.sampling)
        for n, one in enumerate(requests)
    ]


class TestRecording:
    def test_ranks_are_those_of_the_drafters_own_draws_after_right_tokens(
        self, pair: Config, outputs: list[Trajectory], tiny_draft_model_dir: Path
    ) -> None:
        """Beside transformers: the drafter's logits after each right prefix, ranked with the target's noise."""
        text, model = record(pair, outputs, VOCAB_SIZE), load_model(str(tiny_draft_model_dir), dtype="float32")
        for one in outputs:
            prompt, count = len(one.prompt_token_ids), len(one.token_ids)
            with torch.inference_mode():
                logits = model(torch.tensor([[*one.prompt_token_ids, *one.token_ids]])).logits[0]
            rules = Rules(1)
            rules.write([0], [one.sampling], [-prompt])
            positions, rows = np.arange(prompt, prompt + count), np.zeros(count, np.int64)
            drawn = candidates(logits[prompt - 1 : prompt - 1 + count].contiguous(), positions, rows, rules)
            right = drawn.tokens == np.array(one.token_ids)[:, None]
            expected = np.where(right.any(axis=1), right.argmax(axis=1), RANKS + 1)
            assert text.ranks("draft_model", one.sampling, 0)[0].tolist() == expected.tolist()
            assert text.output(one.sampling, 0).tolist() == list(one.token_ids)
        ranks = np.concatenate([text.ranks("draft_model", one.sampling, 0)[0] for one in outputs])
        assert 0.2 < np.mean(ranks == 0) < 1.0, "the drafter is right in some places, and wrong in others"

    def test_the_target_as_its_own_drafter_is_right_at_every_position(
        self, tiny_model_dir: Path, outputs: list[Trajectory]
    ) -> None:
        text = record(config(tiny_model_dir, tiny_model_dir), outputs, VOCAB_SIZE)
        assert not any(text.ranks("draft_model", one.sampling, 0)[0].any() for one in outputs)

    def test_a_lookup_guesses_where_it_finds_a_match(self, pair: Config, outputs: list[Trajectory]) -> None:
        text = record(pair, outputs, VOCAB_SIZE)
        found = np.concatenate([text.ranks("ngram", one.sampling, 0)[0] for one in outputs])
        assert {NO_GUESS, 0} <= set(found.tolist()) <= {NO_GUESS, 0, 1}

    def test_an_attempt_goes_on_where_the_last_one_ended(self) -> None:
        text = RecordedText(9, {5: (np.arange(6), {"m": np.stack([np.arange(6), np.zeros(6)])})})
        sampling = SamplingParams(seed=5, first_position=2, max_tokens=3)
        assert text.output(sampling, 0).tolist() == [2, 3, 4] == text.ranks("m", sampling, 0)[0].tolist()


class TestSimulation:
    def test_every_variant_commits_the_recorded_tokens(self, pair: Config, outputs: list[Trajectory]) -> None:
        text = record(pair, outputs, VOCAB_SIZE)
        variants, _ = plan_variants(pair, MODES, [4])
        results = {one.label: simulate(one, outputs, text) for one in variants}
        assert {one.tokens for one in results.values()} == {sum(len(one.token_ids) for one in outputs)}
        plain, decoupled = results["plain 1x4"], results["decoupled draft_model 1x4 + 1"]
        assert plain.metrics.acceptance_length == 1.0 < decoupled.metrics.acceptance_length
        assert decoupled.tokens_per_s > plain.tokens_per_s
        again = simulate(variants[0], outputs, text)
        assert (again.digest, again.rollout_s) == (plain.digest, plain.rollout_s)

    def test_plain_rollouts_last_as_long_as_their_steps(self, pair: Config, outputs: list[Trajectory]) -> None:
        """Within a hundredth, for calls and Python: the longest output has this many steps of a known duration."""
        (variant,), _ = plan_variants(pair, ["plain"], [8])
        found = simulate(variant, outputs, record(pair, outputs, VOCAB_SIZE))
        step_s = paced_times(pair.paced).target(1, 1, 100, 0)
        assert found.rollout_s == pytest.approx(max(len(one.token_ids) for one in outputs) * step_s, rel=0.05)


class TestVariants:
    def test_plain_decoding_has_the_gpus_of_its_verifier_alone(self, pair: Config) -> None:
        variants, notes = plan_variants(pair, MODES, [1, 16])
        assert [one.label for one in variants[:5]] == [
            "plain 1x4",
            "coupled draft_model 1x4",
            "coupled ngram 1x4",
            "decoupled draft_model 1x4 + 1",
            "fon 1x4 + 1",
        ]
        assert [sum(emulated_gpus(one.config)) for one in variants[:5]] == [4, 4, 4, 5, 5]
        assert {one.config.target.cores for one in variants} == {1}
        assert any("decoupled ngram: left out" in note for note in notes)

    def test_what_cannot_be_paced_is_refused(self, tiny_model_dir: Path) -> None:
        for overrides, key in (
            (["target.backend=vllm"], "target.backend"),
            (["target.gpus=1"], "target.gpus"),
            (["drafters=[{method: eagle, model: head}]"], "drafters.0.method"),
            (["drafters=[{method: draft_model, model: m, gpus: 1}]"], "drafters.0.gpus"),
        ):
            with refused(key):
                load_config(None, ["paced.device=h100", *overrides])
        load_config(None, ["target.gpus=1"])

    @pytest.mark.parametrize(
        ("keys", "key", "words"),
        [
            ({"device": "h10"}, "device", "hardware h10"),
            ({"device": "smollm2_two_cores"}, "device", "steps of a run"),
            ({"target": "foo"}, "target", "model foo"),
            ({"target_gpus": 3}, "target_gpus", "40 attention heads"),
            ({"drafter_gpus": 3}, "drafter_gpus", "14 attention heads"),
            ({"drafter": "qwen2.5-32b-eagle3"}, "drafter", "reads hidden states"),
            ({"target": "qwen3-8b-eagle3"}, "target", "reads hidden states"),
        ],
    )
    def test_what_is_unknown_is_refused_before_anything_starts(
        self, keys: dict[str, Any], key: str, words: str
    ) -> None:
        with refused(f"paced.{key}", words):
            paced_times(PacedConfig(**{"device": "h100", **keys}))


class TestPace:
    def test_a_step_lasts_as_long_as_that_of_the_device(self, pair: Config) -> None:
        """No sooner, however fast this machine is; tokens are those of the engine without a pace."""
        engine = PacedEngine.from_config(pair.target)
        asked = list[tuple[int, ...]]()

        def seconds(*step: int) -> float:
            asked.append(step)
            return 0.03

        engine.pace, engine.seconds = Pace(), seconds
        ids = tiny_prompt_ids(2)
        for n in range(2):
            engine.add(engine.table.open(TargetRequest(str(n), ids[n], SamplingParams(max_tokens=4, seed=n))))
        begin, results = time.perf_counter(), [engine.step() for _ in range(2)]
        assert time.perf_counter() - begin >= 0.06
        assert all(one.forward_s >= 0.03 and one.sampling_s == 0.0 for one in results)
        prompts = sum(map(len, ids[:2]))
        assert asked == [(2, 0, prompts, prompts), (2, 2, prompts + 2, 0)]

    def test_a_forward_of_a_drafter_lasts_as_long_as_that_of_the_device(self, pair: Config) -> None:
        spec = drafter_specs(pair)["draft_model"]
        proposer = PacedHost(pair.paced).build_proposer(spec, pair.target, "cpu")
        assert isinstance(proposer, PacedDraftModel)
        waited = list[float]()
        proposer.pace.wait = lambda begin, seconds: waited.append(seconds) or seconds  # type: ignore[method-assign]
        table = RequestTable(4, 16, vocab_size=VOCAB_SIZE)
        view, ids = TableView(table, 0, 4, proposer.vocab_size), tiny_prompt_ids(1)[0]
        row = table.open(TargetRequest("a", ids, SamplingParams(max_tokens=30, seed=1)))
        for _ in range(2):
            proposer.propose(view, np.array([row], np.int32))
        times = paced_times(pair.paced).draft
        first, second = len(ids), len(ids) + 1
        expected = [times.seconds(1, first, first, first - 1), times.seconds(1, second, second, 0)]
        assert waited == pytest.approx(expected) and waited[1] > 2 * 1e-3, "twice the millisecond of a 0.5B model"

    def test_late_forwards_are_logged_once_in_a_while(self, caplog: pytest.LogCaptureFixture) -> None:
        pace = Pace()
        for _ in range(7):
            pace.wait(pace.now() - 1.0, 0.5)
        (record,) = caplog.records
        assert "6 of 6 forwards took longer" in record.message and "--stretch" in record.message


@pytest.mark.parametrize(
    ("drafters", "options", "modes"),
    [
        ("[{method: draft_model, model: smollm2-135m}]", {"paced": "h100"}, ["plain", "coupled", "decoupled"]),
        ("[{method: draft_model, model: smollm2-135m}, {method: ngram}]", {"paced": "h100"}, [*MODES]),
        ("[{method: ngram}]", {"overrides": ["paced.device=h100"]}, ["plain", "coupled", "decoupled"]),
    ],
)
def test_the_command_compares_the_modes_that_there_are(
    drafters: str, options: dict[str, Any], modes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A factor of the durations is for any device, of the option or of the configuration."""

    def measure(settings: Config, chosen: list[str], *others: Any) -> None:
        assert (chosen, settings.paced.device, settings.paced.stretch) == (modes, "h100", 3.0)
        raise InterruptedError

    monkeypatch.setattr("specactor_ray.bench.rollout_modes.run_bench", measure)
    overrides = [f"drafters={drafters}", "data.path=conf/prompts/editing.jsonl", *options.pop("overrides", ())]
    with pytest.raises(InterruptedError):
        bench_rollout(overrides=overrides, stretch=3.0, **options)
