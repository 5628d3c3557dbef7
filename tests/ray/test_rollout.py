"""Rollouts over real Ray actors: every mode gives the same tokens, whatever happens to drafters and verifiers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from specactor_ray import Rollout, SamplingParams
from specactor_ray.config import Config
from specactor_ray.config.load import from_mapping
from specactor_ray.config.schema import Candidates, RaceName
from specactor_ray.errors import ConfigError, InputError, ModelLoadError
from specactor_ray.rollout.trajectory import Trajectory
from tests.tiny import tiny_draft, tiny_eagle, tiny_prompts, tiny_target

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

PROMPTS = 16
SAMPLES = 4
SAMPLING = SamplingParams(temperature=1.0, max_tokens=48, seed=3)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=12, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def config(mode: str, drafters: list[dict[str, Any]], verifiers: int = 2, **sections: Any) -> Config:
    settings: dict[str, Any] = {
        "mode": mode,
        "target": {"model": str(tiny_target()), "replicas": verifiers, "max_batch": 6, "kv_cache_gb": 0.05},
        "drafters": drafters,
        # More actors than this machine has cores: the protocol is tested here, the placement elsewhere.
        "cluster": {"address": "local", "pin_cores": False, "health_interval_s": 0.5, "health_timeout_s": 5.0},
        "speculation": {"window": 6, "verify": "all", "draft_wait_s": 0.02, "coupled_wait_s": 0.5},
        **sections,
    }
    return from_mapping(settings)


NGRAM = {"method": "ngram", "replicas": 2}
SMALL = {"method": "draft_model", "replicas": 1, "kv_cache_gb": 0.05}


def small() -> dict[str, Any]:
    return {**SMALL, "model": str(tiny_draft())}


def tokens_of(trajectories: list[Trajectory]) -> dict[str, tuple[int, ...]]:
    return {f"{t.prompt_index}/{t.sample_index}": t.token_ids for t in trajectories}


def roll(
    settings: Config, temperature: float, meddle: Callable[[Rollout], None] | None = None, max_tokens: int = 48
) -> tuple[list[Trajectory], dict[str, Any]]:
    """All samples of the prompts; `meddle` runs beside the stream."""
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=3)
    with Rollout.from_config(settings) as rollout:
        meddler = threading.Thread(target=meddle, args=(rollout,), daemon=True) if meddle else None
        if meddler:
            meddler.start()
        done = rollout.generate(tiny_prompts(PROMPTS), sampling, n=SAMPLES)
        if meddler:
            meddler.join(60)
        metrics = {**rollout.metrics().to_dict(), "moved_requests": rollout.moved_requests}
    assert len(done) == PROMPTS * SAMPLES
    return done, metrics


@pytest.fixture(scope="module")
def plain() -> dict[float, dict[str, tuple[int, ...]]]:
    return {temperature: tokens_of(roll(config("plain", []), temperature)[0]) for temperature in (0.0, 1.0)}


@pytest.mark.parametrize(
    ("mode", "temperature", "race", "inline"),
    [
        ("coupled", 0.0, "tail", False),
        ("coupled", 1.0, "always", False),
        ("coupled", 1.0, "tail", None),
        ("decoupled", 0.0, "off", None),
    ],
)
def test_modes_are_token_for_token_plain(
    plain: Any, mode: str, temperature: float, race: str, inline: bool | None
) -> None:
    settings = config(mode, [{**NGRAM, "inline": inline}, {**small(), "inline": inline}])
    settings.speculation.race = RaceName[race]
    done, metrics = roll(settings, temperature)
    assert tokens_of(done) == plain[temperature]
    assert metrics["accepted_tokens"] > 0
    computed_again = metrics["committed_tokens"] - sum(len(t.token_ids) for t in done)
    # What a verifier commits between the last journal entry and a move is computed again by the next one.
    assert computed_again >= 0 if metrics["moved_requests"] else computed_again == 0
    assert all(len(t.logprobs) == len(t.token_ids) and not t.error for t in done)


def test_fastest_of_n_with_trees_is_token_for_token_plain(plain: Any) -> None:
    """All methods race for every request, hidden states stream to the EAGLE head, all guesses are verified at once."""
    head = {"method": "eagle", "model": str(tiny_eagle()), "kv_cache_gb": 0.02}
    settings = config("decoupled", [NGRAM, {"method": "suffix", "min_match": 1}, small(), head])
    settings.speculation.race, settings.speculation.candidates = RaceName.always, Candidates.tree
    done, metrics = roll(settings, 1.0)
    assert tokens_of(done) == plain[1.0]
    drafted = {drafter_id.partition("-")[0] for drafter_id, (drafted, _) in metrics["by_drafter"].items() if drafted}
    assert drafted == {"ngram", "suffix", "draft_model", "eagle"} and metrics["accepted_tokens"] > 0


@pytest.mark.parametrize("name", ["Liar", "Crasher", "Flooder"])
def test_a_misbehaving_drafter_changes_nothing(plain: Any, name: str) -> None:
    drafters = [{"method": f"tests.misbehaving:{name}", "replicas": 2}, NGRAM]
    done, _ = roll(config("decoupled", drafters, verifiers=1), 1.0)
    assert tokens_of(done) == plain[1.0]


def pids(rollout: Rollout, kind: str) -> list[int]:
    return [row["pid"] for row in rollout.status() if row["kind"] == kind and row["phase"] == "ready"]


class Assault:
    """Sends signals, one after the other, to actors of a kind while the stream runs; to none twice."""

    def __init__(self, kind: str, *signals: int) -> None:
        self._kind, self._signals = kind, signals
        self.hits: list[int] = []

    def __call__(self, rollout: Rollout) -> None:
        while len(self.hits) < len(self._signals):
            for pid in [pid for pid in pids(rollout, self._kind) if pid not in self.hits][:1]:
                if rollout.committed_tokens == 0:
                    continue
                os.kill(pid, self._signals[len(self.hits)])
                self.hits.append(pid)
            if rollout.committed_tokens == sum(map(len, self.expected.values())):
                return
            time.sleep(0.05)

    expected: dict[str, tuple[int, ...]] = {}


@pytest.mark.parametrize(("mode", "inline"), [("coupled", False), ("decoupled", None)])
@pytest.mark.parametrize(
    ("kind", "signals"),
    [
        ("drafter", [signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL, signal.SIGSTOP]),
        ("verifier", [signal.SIGKILL, signal.SIGSTOP]),  # and one goes on
    ],
    ids=["drafter", "verifier"],
)
def test_killed_and_stopped_actors(plain: Any, mode: str, inline: bool | None, kind: str, signals: list[int]) -> None:
    assault = Assault(kind, *signals)
    assault.expected = plain[1.0]
    done, _ = roll(config(mode, [{**NGRAM, "inline": inline}], verifiers=3), 1.0, assault)
    assert tokens_of(done) == plain[1.0]
    assert len(assault.hits) > 1, "the stream ended before two were hit"


def test_a_killed_verifier_comes_back_with_its_inline_drafters(plain: Any) -> None:
    assault = Assault("verifier", signal.SIGKILL)
    assault.expected = plain[1.0]
    with Rollout.from_config(config("coupled", [NGRAM, small()])) as rollout:
        meddler = threading.Thread(target=assault, args=(rollout,), daemon=True)
        meddler.start()
        assert tokens_of(rollout.generate(tiny_prompts(PROMPTS), SAMPLING, n=SAMPLES)) == plain[1.0]
        meddler.join(60)
        assert assault.hits, "nothing was hit while the stream ran"
        assert rollout.reissued_requests > 0
        rollout.forget_history()
        assert tokens_of(rollout.generate(tiny_prompts(PROMPTS), SAMPLING, n=SAMPLES)) == plain[1.0]
        assert {drafter_id.partition("-")[0] for drafter_id in rollout.metrics().by_drafter} == {"ngram", "draft_model"}
        rows = [row for row in rollout.status() if row["phase"] == "ready"]
        assert {row["kind"] for row in rows} == {"verifier"} and all("drafts itself" in row["note"] for row in rows)
        with pytest.raises(ConfigError, match=r"drafters\.1\.inline"):
            rollout.scale({"draft_model": 2})


def test_verifiers_that_are_held_up_for_a_while_are_not_given_up(plain: Any) -> None:
    """One after the other is stopped for less than `health_timeout_s`, while requests run on it."""
    held: list[tuple[int, int]] = []

    def hold_up(rollout: Rollout) -> None:
        while rollout.committed_tokens == 0:
            time.sleep(0.02)
        for row in [row for row in rollout.status() if row["kind"] == "verifier"]:
            os.kill(row["pid"], signal.SIGSTOP)
            time.sleep(3.0)
            os.kill(row["pid"], signal.SIGCONT)
            held.append((row["id"], rollout.committed_tokens))

    settings = config("plain", [])
    with Rollout.from_config(settings) as rollout:
        meddler = threading.Thread(target=hold_up, args=(rollout,), daemon=True)
        meddler.start()
        done = rollout.generate(tiny_prompts(PROMPTS), SAMPLING, n=SAMPLES)
        meddler.join(60)
        verifiers = [row["id"] for row in rollout.status() if row["kind"] == "verifier"]
        assert rollout.reissued_requests == 0
    assert tokens_of(done) == plain[1.0] and sorted(name for name, _ in held) == sorted(verifiers)
    assert held[0][1] < sum(map(len, plain[1.0].values())), "the stream had ended before the first one was held up"


@pytest.fixture(scope="class")
def rollout() -> Iterator[Rollout]:
    with Rollout.from_config(config("decoupled", [NGRAM], verifiers=1)) as rollout:
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
        assert "vocabulary" in bad[3] and "must stay within" in bad[5] and "no tokens" in bad[7]
        for trajectory in done:
            if trajectory.prompt_index not in bad:
                assert trajectory.token_ids == plain[1.0][f"{trajectory.prompt_index}/{trajectory.sample_index}"]

    def test_every_prompt_may_be_sampled_in_its_own_way(self, plain: Any, rollout: Rollout) -> None:
        mixed = [SamplingParams(temperature=i % 2 * 1.0, max_tokens=48 // (1 + i), seed=3) for i in range(PROMPTS)]
        with pytest.raises(InputError, match="2 entries for 1 prompts"):
            rollout.stream(tiny_prompts(1), mixed[:2])
        with pytest.raises(InputError, match="0 entries for 1 prompts"):
            rollout.stream(tiny_prompts(1), [])
        for strange in ([mixed[0], None], [mixed[0], {"seed": 1}]):
            with pytest.raises(InputError, match="must be SamplingParams"):
                rollout.stream(tiny_prompts(2), strange)
        done = tokens_of(rollout.generate(tiny_prompts(PROMPTS), mixed, n=SAMPLES))
        for place, tokens in done.items():
            params = mixed[int(place.partition("/")[0])]
            assert tokens == plain[params.temperature][place][: params.max_tokens]

    def test_a_stream_left_early_frees_the_rollout(self, plain: Any, rollout: Rollout) -> None:
        stream = rollout.stream(tiny_prompts(PROMPTS), SAMPLING, n=SAMPLES)
        next(stream)
        with pytest.raises(InputError, match="still open"):
            rollout.stream(tiny_prompts(1), SAMPLING)
        stream.close()
        assert tokens_of(rollout.generate(tiny_prompts(PROMPTS), SAMPLING, n=SAMPLES)) == plain[1.0]

    def test_scaling_while_it_runs(self, plain: Any, rollout: Rollout) -> None:
        seen: list[int] = []

        def scale() -> None:
            for count in (3, 0, 1):
                rollout.scale({"ngram": count})
                deadline = time.monotonic() + 20
                while time.monotonic() < deadline:
                    ready = [r for r in rollout.status() if r["kind"] == "drafter" and r["phase"] == "ready"]
                    if len(ready) == count:
                        break
                    time.sleep(0.2)
                seen.append(len(ready))
            with pytest.raises(ConfigError, match="ngram"):
                rollout.scale({"suffix": 1})
            with pytest.raises(ConfigError):
                rollout.scale({"ngram": -1})
            seen.append(-1)

        scaler = threading.Thread(target=scale, daemon=True)
        scaler.start()
        rounds = 0
        while scaler.is_alive() or rounds == 0:
            assert tokens_of(rollout.generate(tiny_prompts(PROMPTS), SAMPLING, n=SAMPLES)) == plain[1.0]
            rounds += 1
        assert seen == [3, 0, 1, -1]


def test_nothing_is_left_behind() -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    groups = len(ray.util.placement_group_table())
    with Rollout.from_config(config("decoupled", [NGRAM, small()])) as rollout:
        rollout.generate(tiny_prompts(2), SamplingParams(max_tokens=8, seed=1))
        pids = [row["pid"] for row in rollout.status() if row.get("pid")]
    assert pids
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    left = [g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
    assert not left, f"{len(left)} placement groups left of {groups}"
    assert before is not None


def test_start_errors_leave_nothing_running(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        Rollout.from_config(config("plain", [], target={"model": str(tmp_path)}))
    other = {**SMALL, "model": "smollm2-135m"}
    with pytest.raises(ConfigError, match=r"49152.*512"):
        Rollout.from_config(config("decoupled", [other]))
    assert not [a for a in ray.util.list_named_actors(all_namespaces=True) if "specactor" in a["name"]]
