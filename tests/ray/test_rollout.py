"""Rollouts over real Ray actors: every mode gives the same tokens, whatever happens to drafters and verifiers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from specactor_ray import Rollout, SamplingParams
from specactor_ray.config import Config
from specactor_ray.config.load import from_mapping
from specactor_ray.config.schema import RaceName
from specactor_ray.core.errors import ConfigError, InputError, ModelLoadError
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.transport.messages import RequestStats
from tests.local_ray import local_ray
from tests.plain_decoding import cut_at_stops, plain_tokens
from tests.refused import refused
from tests.tiny import tiny_draft, tiny_eagle, tiny_prompts, tiny_target
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

PROMPTS = 16
SAMPLES = 4
SAMPLING = SamplingParams(temperature=1.0, max_tokens=48, seed=3)


cluster = local_ray(6, log_to_driver=False)


def config(mode: str, drafters: list[dict[str, Any]], verifiers: int = 2, **sections: Any) -> Config:
    target = {"model": str(tiny_target()), "dtype": "float32", "max_batch": 6, "kv_cache_gb": 0.05}
    settings: dict[str, Any] = {
        "mode": mode,
        "target": {**target, "replicas": verifiers},
        "drafters": drafters,
        # More actors than this machine has cores: the protocol is tested here, the placement elsewhere.
        "cluster": {"address": "local", "pin_cores": False, "health_interval_s": 0.5, "health_timeout_s": 5.0},
        "speculation": {"window": 6, "verify": "all", "draft_wait_s": 0.02},
        **sections,
    }
    return from_mapping(settings)


APART = {"method": "ngram", "replicas": 2, "hosted": False}
STOPS = ("ee", " is ", "3, ")
SMALL = {"method": "draft_model", "replicas": 1, "kv_cache_gb": 0.05}


def small() -> dict[str, Any]:
    return {**SMALL, "model": str(tiny_draft())}


def tokens_of(trajectories: list[Trajectory]) -> dict[str, tuple[int, ...]]:
    return {f"{t.prompt_index}/{t.sample_index}": t.token_ids for t in trajectories}


def generate(rollout: Rollout, temperature: float, meddle: Callable[[Rollout], None] | None = None) -> list[Trajectory]:
    """All samples of the prompts; `meddle` runs beside the stream."""
    sampling = SamplingParams(temperature=temperature, max_tokens=48, seed=3)
    meddler = threading.Thread(target=meddle, args=(rollout,), daemon=True) if meddle else None
    if meddler:
        meddler.start()
    done = rollout.generate(tiny_prompts(PROMPTS), sampling, n=SAMPLES)
    if meddler:
        meddler.join(60)
    assert len(done) == PROMPTS * SAMPLES
    return done


@contextmanager
def running(settings: Config) -> Iterator[Rollout]:
    """A rollout; when it has ended, none of its processes and placement groups is left."""
    with Rollout.from_config(settings) as rollout:
        yield rollout
        pids = [row["pid"] for row in rollout.status() if row.get("pid")]
    assert pids
    while any(psutil.pid_exists(pid) for pid in pids):  # up to the time limit of the test
        time.sleep(0.2)
    left = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
    assert not left


@pytest.fixture(scope="module")
def plain() -> dict[float, dict[str, tuple[int, ...]]]:
    """What plain decoding gives, without a rollout."""
    found = {}
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, max_tokens=48, seed=3)
        tokens = plain_tokens(tiny_target(), tiny_prompts(PROMPTS), sampling, SAMPLES)
        found[temperature] = {f"{prompt}/{sample}": one for (prompt, sample), one in tokens.items()}
    return found


COUPLED = "coupled"
RACE = "decoupled"
"""All methods race for every request, hidden states stream to the EAGLE head."""
METHODS = {COUPLED: {"suffix", "draft_model"}, RACE: {"ngram", "suffix", "draft_model", "eagle"}}


@pytest.fixture(scope="class", params=[COUPLED, RACE])
def by_mode(request: pytest.FixtureRequest) -> Iterator[Rollout]:
    suffix = {"method": "suffix", "min_match": 1}
    if request.param == COUPLED:
        settings = config("coupled", [suffix, small()])
    else:
        head = {"method": "eagle", "model": str(tiny_eagle()), "kv_cache_gb": 0.02}
        settings = config("decoupled", [suffix, small(), {**APART, "replicas": 1}, head])
        settings.speculation.race = RaceName.always
    with running(settings) as rollout:
        yield rollout


class TestModes:
    """One rollout of each mode goes through these, in this order."""

    def test_tokens_are_those_of_plain_decoding(self, plain: Any, by_mode: Rollout) -> None:
        done = [generate(by_mode, temperature) for temperature in (0.0, 1.0)]
        assert [tokens_of(trajectories) for trajectories in done] == [plain[0.0], plain[1.0]]
        assert all(len(t.logprobs) == len(t.token_ids) and not t.error for t in (*done[0], *done[1]))
        # What a verifier commits between the last journal entry and a move is computed again.
        assert by_mode.metrics().committed_tokens >= sum(len(t.token_ids) for t in (*done[0], *done[1]))
        # Every method guesses tokens that are committed. Which of them verifiers use depends on when they arrive.
        while (right := methods_right(by_mode)) != METHODS[by_mode.config.mode.value]:  # up to the test's time limit
            assert right < METHODS[by_mode.config.mode.value]
            done[1] = generate(by_mode, 1.0)
            assert tokens_of(done[1]) == plain[1.0]
        used = RequestStats.total(one.stats for one in (*done[0], *done[1])).by_method.keys()
        assert used and used <= METHODS[by_mode.config.mode.value]
        assert by_mode.metrics().accepted_tokens > 0

    def test_verifiers_learn_what_others_finished(self, plain: Any, by_mode: Rollout) -> None:
        tokens = sum(map(len, (*plain[0.0].values(), *plain[1.0].values())))
        wait_until(lambda: len(seen := histories(by_mode)) == 2 and min(seen) >= tokens, "histories of both", 200.0)

    def test_stop_texts_end_outputs(self, plain: Any, by_mode: Rollout) -> None:
        stopping = SamplingParams(max_tokens=48, seed=3, stop=STOPS)
        stopped = by_mode.generate(tiny_prompts(PROMPTS), stopping, n=SAMPLES)
        expected = {name: cut_at_stops(tiny_target(), tokens, STOPS) for name, tokens in plain[1.0].items()}
        assert {f"{t.prompt_index}/{t.sample_index}": (t.token_ids, t.text) for t in stopped} == expected
        for one in stopped:
            whole = cut_at_stops(tiny_target(), plain[1.0][f"{one.prompt_index}/{one.sample_index}"], ())[1]
            assert one.stop_reason is None or (one.stop_reason in STOPS and f"{one.text}{one.stop_reason}" in whole)
        assert any(one.stop_reason for one in stopped)

    def test_actors_are_those_of_the_mode(self, by_mode: Rollout) -> None:
        apart = sorted(row["method"] for row in by_mode.status() if row["kind"] == "drafter")
        assert apart == ([] if by_mode.config.mode.value == COUPLED else ["draft_model", "eagle", "ngram"])
        with refused("drafters.0.hosted" if apart else "mode"):
            by_mode.scale({"suffix": 3})

    @pytest.mark.parametrize("by_mode", [COUPLED], indirect=True)
    def test_a_killed_verifier_comes_back_with_its_weights_and_its_drafters(self, plain: Any, by_mode: Rollout) -> None:
        def kill(rollout: Rollout) -> None:
            before, pid = rollout.committed_tokens, pids(rollout, "verifier")[0]
            while rollout.committed_tokens == before:
                time.sleep(0.02)
            os.kill(pid, signal.SIGKILL)

        version = by_mode.update_weights(tiny_target())
        while not by_mode.reissued_requests:  # the process was killed while it had requests
            assert tokens_of(generate(by_mode, 1.0, kill)) == plain[1.0]
        by_mode.forget_history()
        end = time.monotonic() + 120.0
        while (drafting := hosted_methods(by_mode)) != [METHODS[COUPLED]] * 2:  # the replacement's among them
            assert time.monotonic() < end, drafting
            done = generate(by_mode, 1.0)
            assert tokens_of(done) == plain[1.0] and {one.weight_version for one in done} == {version}
        rows = [row for row in by_mode.status() if row["phase"] == "ready"]
        assert [(row["kind"], row["weight_version"]) for row in rows] == [("verifier", version)] * 2
        assert all("drafts itself" in row["note"] for row in rows)


def pids(rollout: Rollout, kind: str) -> list[int]:
    return [row["pid"] for row in rollout.status() if row["kind"] == kind and row["phase"] == "ready"]


def hosted(rollout: Rollout) -> list[dict[str, dict[str, Any]]]:
    """Counters of the drafters that each verifier hosts, by method."""
    counters = [row["counters"].get("hosted", {}) for row in rollout.status() if row["kind"] == "verifier"]
    return [{name.partition("-")[0]: one for name, one in one_each.items()} for one_each in counters]


def methods_right(rollout: Rollout) -> set[str]:
    """Methods with draft tokens that were committed."""
    return {drafter["method"] for drafter in rollout.drafters() if drafter["right"]}


def hosted_methods(rollout: Rollout) -> list[set[str]]:
    """By what methods each verifier has drafted."""
    return [{name for name, one in one_each.items() if one["tails"]} for one_each in hosted(rollout)]


def histories(rollout: Rollout) -> list[int]:
    """Tokens of outputs that the lookup of each verifier has seen."""
    return [one_each["suffix"]["history_tokens"] for one_each in hosted(rollout) if "suffix" in one_each]


@pytest.fixture(scope="class")
def rollout() -> Iterator[Rollout]:
    with running(config("decoupled", [APART], verifiers=1)) as rollout:
        yield rollout


class TestOneRollout:
    """What one rollout with n-gram drafters goes through, in this order."""

    def test_poison_fails_alone(self, plain: Any, rollout: Rollout) -> None:
        prompts: list[Any] = list(tiny_prompts(PROMPTS))
        prompts[3] = [1, 2, 10**6]
        prompts[5] = "word " * 2000
        prompts[7] = []
        done = rollout.generate(prompts, SAMPLING, n=SAMPLES)
        bad = {t.prompt_index: t.error for t in done if t.finish_reason == "error"}
        assert set(bad) == {3, 5, 7}
        assert "vocabulary" in bad[3] and "a context of 512 tokens holds at most" in bad[5] and "no tokens" in bad[7]
        for trajectory in done:
            if trajectory.prompt_index not in bad:
                assert trajectory.token_ids == plain[1.0][f"{trajectory.prompt_index}/{trajectory.sample_index}"]

    def test_every_prompt_may_be_sampled_in_its_own_way(self, plain: Any, rollout: Rollout) -> None:
        mixed = [SamplingParams(temperature=i % 2 * 1.0, max_tokens=48 // (1 + i), seed=3) for i in range(PROMPTS)]
        for strange in (mixed[:1], [], [mixed[0], None], [mixed[0], {"seed": 1}]):
            with pytest.raises(InputError):
                rollout.stream(tiny_prompts(2), strange)
        (one,) = rollout.stream(["not encoded"], SAMPLING, n=1, encoded=[((5, 6), "")])
        assert (one.prompt, one.prompt_token_ids, one.finish_reason != "error") == ("not encoded", (5, 6), True)
        done = tokens_of(rollout.generate(tiny_prompts(PROMPTS), mixed, n=SAMPLES))
        for place, tokens in done.items():
            params = mixed[int(place.partition("/")[0])]
            assert tokens == plain[params.temperature][place][: params.max_tokens]

    def test_a_killed_drafter_is_replaced(self, plain: Any, rollout: Rollout) -> None:
        lost = pids(rollout, "drafter")[0]
        stream = rollout.stream(tiny_prompts(PROMPTS), SAMPLING, n=SAMPLES)
        first = next(stream)
        os.kill(lost, signal.SIGKILL)
        assert tokens_of([first, *stream]) == plain[1.0]
        wait_until(lambda: len(now := pids(rollout, "drafter")) == 2 and lost not in now, "a replacement")
        assert tokens_of(rollout.generate(tiny_prompts(PROMPTS), SAMPLING, n=SAMPLES)) == plain[1.0]

    def test_a_stream_left_early_disturbs_no_other(self, plain: Any, rollout: Rollout) -> None:
        stream = rollout.stream(tiny_prompts(PROMPTS), SAMPLING, n=SAMPLES)
        next(stream)
        beside = rollout.stream(tiny_prompts(PROMPTS), SAMPLING, n=SAMPLES)
        first = next(beside)
        with pytest.raises(InputError):
            rollout.sleep()
        stream.close()
        assert tokens_of([first, *beside]) == plain[1.0]
        assert tokens_of(rollout.generate(tiny_prompts(PROMPTS), SAMPLING, n=SAMPLES)) == plain[1.0]

    def test_scaling_while_it_runs(self, plain: Any, rollout: Rollout) -> None:
        seen: list[int] = []

        def scale() -> None:
            for count in (3, 0, 1):
                rollout.scale({"ngram": count})
                while len(pids(rollout, "drafter")) != count:
                    time.sleep(0.2)
                seen.append(count)
            for wrong in ({"suffix": 1}, {"ngram": -1}):
                with pytest.raises(ConfigError):
                    rollout.scale(wrong)
            seen.append(-1)

        scaler = threading.Thread(target=scale, daemon=True)
        scaler.start()
        rounds = 0
        while scaler.is_alive() or rounds == 0:
            assert tokens_of(rollout.generate(tiny_prompts(PROMPTS), SAMPLING, n=SAMPLES)) == plain[1.0]
            rounds += 1
        assert seen == [3, 0, 1, -1]


def test_start_errors_leave_nothing_running(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        Rollout.from_config(config("plain", [], target={"model": str(tmp_path)}))
    other = {**SMALL, "model": "smollm2-135m"}
    with pytest.raises(ConfigError, match=r"49152.*512"):
        Rollout.from_config(config("decoupled", [other]))
    assert not [a for a in ray.util.list_named_actors(all_namespaces=True) if "specactor" in a["name"]]
