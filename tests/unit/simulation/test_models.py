"""The models of the virtual cluster: what is said and guessed, what the engine and drafters do with time and cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from specactor_ray.core.types import SamplingParams
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.simulation.kernel import Kernel, Process, VirtualClock
from specactor_ray.simulation.models import SimulatedEngine, SimulatedProposer
from specactor_ray.simulation.scenario import PythonConfig, SkillConfig, WorkloadConfig
from specactor_ray.simulation.world import NO_GUESS, DraftTime, GeneratedText, World, draw_lengths, linear
from specactor_ray.table.requests import TargetRequest
from specactor_ray.target.base import NO_DRAFTS, Drafts, StepResult
from tests.batches import news, opening
from tests.by_name import ByName
from tests.fakes.virtual import Bench
from tests.number_text import HashedText
from tests.unit.engine_conformance import Driver, EngineConformance

LENGTH, REQUESTS = 640, 200


def skill(mean: float, spread: float = 0.0, burst: float = 0.0, method: str = "m", **others: float) -> SkillConfig:
    return SkillConfig(method, mean, spread, burst, **others)


def generated(*skills: SkillConfig, correlation: float = 0.0) -> GeneratedText:
    return GeneratedText(dict.fromkeys(range(REQUESTS), LENGTH), skills, correlation, seed=1)


def rights(text: GeneratedText, method: str, seed: int) -> list[bool]:
    right: list[bool] = (ranks(text, method, seed)[0] == 0).tolist()
    return right


def ranks(text: GeneratedText, method: str, seed: int) -> np.ndarray:
    return text.ranks(method, SamplingParams(max_tokens=LENGTH, seed=seed), 0)


class TestText:
    def test_the_mean_is_as_configured_whatever_it_varies_over(self) -> None:
        text = generated(skill(0.35, spread=0.4, burst=0.8))
        means = [fmean(rights(text, "m", seed)) for seed in range(REQUESTS)]
        assert fmean(means) == pytest.approx(0.35, abs=0.03) and max(means) - min(means) > 0.15
        late = np.array([rights(generated(skill(0.8, decay=0.6)), "m", seed)[-64:] for seed in range(REQUESTS)])
        assert late.mean() < 0.6, "ends are worse"

    def test_correlated_methods_are_right_at_the_same_places(self) -> None:
        def agreement(correlation: float) -> float:
            skills = [skill(0.7, spread=0.3, method=method) for method in "ab"]
            text = generated(*skills, correlation=correlation)
            return float(np.mean([np.equal(rights(text, "a", s), rights(text, "b", s)) for s in range(40)]))

        assert agreement(1.0) == 1.0 and agreement(0.0) == pytest.approx(0.7**2 + 0.3**2, abs=0.05)

    def test_a_lookup_has_guesses_in_some_stretches_only(self) -> None:
        text = generated(skill(0.9, coverage=0.3))
        found = np.array([ranks(text, "m", seed)[0] for seed in range(100)]).reshape(100, -1, 32) != NO_GUESS
        assert found.mean() == pytest.approx(0.3, abs=0.04) and (found.all(2) == found.any(2)).all()

    def test_candidates_and_gaps_are_as_measured(self) -> None:
        """SmolLM2-135M at temperature 1, with drafters whose first candidate is right in 0.58-0.61 of positions."""
        found = np.concatenate([ranks(generated(skill(0.58, 0.3, 0.3)), "m", seed) for seed in range(REQUESTS)], 1)
        order, rank = np.argsort(found[1], kind="stable"), found[0]
        quarters = [rank[part] for part in np.array_split(order, 4)]
        assert [np.mean(q == 0) for q in quarters] == pytest.approx([0.35, 0.45, 0.63, 0.88], abs=0.08)
        seconds = [np.mean(q[q > 0] == 1) for q in quarters]
        assert seconds == pytest.approx([0.28, 0.32, 0.49, 0.52], abs=0.08)
        assert np.mean(rank[rank > 0] == 1) == pytest.approx(0.4, abs=0.03)
        for right, share in ((2, 0.18), (3, 0.12), (4, 0.1)):
            assert np.mean(rank[rank >= right] == right) == pytest.approx(share, abs=0.02)


class Engine:
    """An engine on a kernel of its own."""

    def __init__(self, lengths: dict[int, int], **settings: Any) -> None:
        self.kernel = Kernel(0)
        self.process = Process("verifier-0", slowness=settings.pop("slowness", 1.0))
        self.clock = VirtualClock(self.kernel, self.process)
        world = World(
            GeneratedText(lengths, []),
            linear(1.0, 0.001),
            python=PythonConfig(*settings.pop("python", (0.0, 0.0, 0.0))),
        )
        limits = {"max_batch": 8, "max_step_tokens": 1000, "cache_tokens": float("inf"), **settings}
        self.engine = Driver(SimulatedEngine(self.clock, world, **limits))

    def add(self, seed: int, prompt: int = 10, most: int = 1000) -> None:
        sampling = SamplingParams(max_tokens=most, seed=seed)
        self.engine.add(TargetRequest(str(seed), tuple(range(prompt)), sampling))

    def run(self, script: Callable[[], None]) -> float:
        self.clock.spawn(script, "script")
        self.kernel.run()
        assert not self.kernel.crashes, self.kernel.crashes
        return self.kernel.now

    def tokens(self, seed: int) -> Sequence[int]:
        return self.engine._world.text.output(SamplingParams(max_tokens=1000, seed=seed), 0)


class OnKernel:
    """A simulated engine whose steps are made from outside of its virtual time."""

    def __init__(self, one: Engine) -> None:
        self._one = one

    def __getattr__(self, name: str) -> Any:
        return getattr(self._one.engine.engine, name)

    def step(self, drafts: Drafts = NO_DRAFTS, window: int = 0) -> StepResult:
        results: list[StepResult] = []
        self._one.run(lambda: results.append(self._one.engine.engine.step(drafts)))
        return results[0]


class TestConformance(EngineConformance):
    @classmethod
    def make_engine(cls, **limits: Any) -> Any:
        one = Engine({1000 + i: 60 - 4 * i for i in range(12)}, **limits)
        one.engine.table.vocab_size = 512  # that of the suite's prompts, which a simulated engine does not read
        return OnKernel(one)


class TestEngine:
    def test_steps_take_what_the_cost_model_and_python_say_on_a_node_of_this_speed(self) -> None:
        one = Engine({1: 5}, slowness=2.0, python=(1e5, 0.0, 0.0))
        one.add(1)
        one.engine.engine.speculates = lambda: True
        results, accepted = [], []

        def script() -> None:
            for tails in (None, {"1": list(one.tokens(1)[1:3])}):  # prefills, and gives the first token
                accepted.append([output.num_accepted for output in one.engine.step(tails)])
                results.append(one.engine.result)

        assert one.run(script) == pytest.approx(2.0 * (1.010 + 1.003 + 0.1))
        assert [(r.num_prefill_tokens, r.num_tokens) for r in results] == [(10, 10), (0, 3)]
        assert [r.forward_s for r in results] == pytest.approx([2.02, 2.006])
        assert accepted[1] == [2]

    def test_a_full_cache_takes_from_the_newest_which_is_prefilled_again(self) -> None:
        one = Engine({1: 60, 2: 60}, cache_tokens=100)
        for seed in (1, 2):
            one.add(seed, prompt=30, most=70)
        ended, rows = [], []

        def script() -> None:
            while one.engine.has_work():
                outputs, result = one.engine.step(), one.engine.result
                rows.append((result.num_tokens - result.num_prefill_tokens, result.num_prefill_tokens))
                assert one.engine.cached_tokens <= 100 + 2
                ended.extend(output.request_id for output in outputs if output.finish_reason)

        one.run(script)
        assert ended == ["1", "2"]
        assert rows[0] == (0, 60) and (2, 0) in rows
        again = [prefilled for _, prefilled in rows[1:] if prefilled]
        assert len(again) == 1 and 30 < again[0] <= 90  # prompt and what it had said


class Time:
    """Takes `forward_s` a forward, and `context_s` a token of context; records what it is asked."""

    def __init__(self, read: list[Any], forward_s: float = 0.0, context_s: float = 0.0) -> None:
        self.read, self.forward_s, self.context_s = read, forward_s, context_s

    def __call__(self, rows: int, positions: int, context_tokens: int, prefill_tokens: int) -> float:
        self.read.append((rows, positions, context_tokens, prefill_tokens))
        return self.forward_s + self.context_s * context_tokens


class Drafting:
    """A proposer with one request, of the seed 1 and a window of 4, on a kernel of its own."""

    def __init__(self, time: DraftTime, accuracy: float, prompt: int = 2, branches: int = 0) -> None:
        text, sampling = GeneratedText({1: 400}, [skill(accuracy)]), SamplingParams(max_tokens=400, seed=1)
        self.truth = text.output(sampling, 0).astype(np.int32)
        self.clock = VirtualClock(Kernel(0), Process("d"))
        world = World(text, drafting={"m": time})
        self.proposer = SimulatedProposer("m", self.clock, world, branches=branches)
        self.requests = ByName(self.proposer, 4)
        self.requests.open("1", (0,) * prompt, (), sampling, window=4)

    def run(self, script: Callable[[], Any]) -> float:
        self.clock.spawn(script, "script")
        self.clock.kernel.run()
        assert not self.clock.kernel.crashes
        return self.clock.kernel.now

    def extend(self, rounds: int) -> None:
        for _ in range(rounds):
            self.requests.extend()

    def tail(self) -> np.ndarray:
        return np.array(self.requests.tail("1")[1], np.int32)


class TestDrafters:
    @pytest.mark.parametrize(
        ("time", "seconds", "lengths"),
        [
            (DraftTime(linear(0.5)), 2.0, [1, 2, 3, 4]),
            (DraftTime(linear(0.25, 0.125), is_lookup=True), 0.75, [4, 4, 4, 4]),
        ],
    )
    def test_a_model_drafts_a_token_a_forward_and_a_lookup_all_at_once(
        self, time: DraftTime, seconds: float, lengths: list[int]
    ) -> None:
        one, tails = Drafting(time, 0.999), list[np.ndarray]()

        def script() -> None:
            for _ in range(4):
                one.extend(1)
                tails.append(one.tail())

        assert one.run(script) == seconds
        assert [len(tail) for tail in tails] == lengths
        assert tails[-1].tolist() == one.truth[:4].tolist()

    def test_chains_read_contexts_of_their_own_and_a_branch_takes_the_place_of_a_chain(self) -> None:
        read: list[Any] = []
        one = Drafting(DraftTime(Time(read, 0.1)), 0.5, branches=4)
        one.proposer.budget = 2
        misses = kept = known = 0

        def play() -> None:
            nonlocal misses, kept, known
            one.extend(3)
            assert read == [(1, 1, 2, 1), (2, 2, 6, 0), (2, 2, 8, 0)]  # rows, positions, contexts, prompt
            one.proposer.budget = 8
            while known < 380:
                tail = one.tail()
                agreed = int(np.cumprod(tail == one.truth[known : known + len(tail)]).sum())
                tokens = one.truth[known : known + agreed + 1]
                one.requests.commit("1", known, tokens.tolist())
                known += agreed + 1
                misses += agreed < len(tail)
                kept += agreed < len(tail) and len(one.tail()) > 0
                one.extend(2)

        one.run(play)
        assert 0.25 < kept / misses < 0.7

    def test_a_head_reads_the_states_of_all_committed_positions(self) -> None:
        read: list[Any] = []
        fusion = DraftTime(Time(read, 0.125), fusion=lambda states: read.append(states) or 0.5 * (states > 0))
        one = Drafting(fusion, 0.999)

        def play() -> None:
            one.extend(4)
            one.requests.commit("1", 0, one.truth[:5].tolist())
            one.extend(2)

        assert one.run(play) == 6 * 0.125 + 2 * 0.5
        # States of new positions; rows, positions, context, positions read beside the newest one.
        first = [2, (1, 1, 2, 1), 0, (1, 1, 3, 0), 0, (1, 1, 4, 0), 0, (1, 1, 5, 0)]
        assert read == [*first, 5, (1, 1, 7, 4), 0, (1, 1, 8, 0)]

    @pytest.mark.parametrize(("merge_s", "seconds"), [(0.1, 0.600 + 0.790 + 0.792), (math.inf, 3.006)])
    def test_branches_read_the_pages_in_common_once_where_that_is_faster(self, merge_s: float, seconds: float) -> None:
        one = Drafting(DraftTime(Time([], context_s=1e-3), merge_s=merge_s), 0.5, prompt=600, branches=4)
        one.proposer.budget = 2
        assert one.run(lambda: one.extend(3)) == pytest.approx(seconds)


def test_lengths_are_log_normal_and_cut() -> None:
    lengths = draw_lengths(WorkloadConfig(median_tokens=500, sigma=0.8, max_tokens=2000), 4000, "x")
    assert sorted(lengths)[2000] == pytest.approx(500, rel=0.05)
    assert max(lengths) == 2000 and min(lengths) >= 1
    assert set(draw_lengths(WorkloadConfig(median_tokens=64, sigma=0.0), 10, "x")) == {64}


class Broken(SimulatedProposer):
    """As after an error of the device: no draft step works any more."""

    def extend(self) -> np.ndarray:
        self._clock.work(0.1)
        if self._generations.any():
            raise RuntimeError("CUDA error")
        return np.zeros(0, np.int32)


def test_a_proposer_that_stays_broken_ends_its_loop() -> None:
    bench = Bench()
    loop = DraftLoop("ngram-0", Broken("ngram", bench.clock, World(HashedText())), bench.clock)

    def open_again_and_again() -> bool:
        thread = bench.clock.spawn(loop.run, "draft")
        for number in range(20):
            loop.deliver(news([opening(number)]))
            bench.clock.sleep(1.0)
        return thread.is_alive()

    assert not bench.run(open_again_and_again)
    assert loop.snapshot()["failures"] == 8
