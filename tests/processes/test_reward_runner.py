"""Rewards in processes of their own: what raises, hangs, forks or dies costs one sample, never the run."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from specactor_ray.config.training_schema import RewardConfig, RewardFunctionConfig
from specactor_ray.core.clock import SYSTEM
from specactor_ray.core.leftovers import start_ticks
from specactor_ray.trainer import workers
from specactor_ray.trainer.rewards import RewardPool, RewardSample
from specactor_ray.trainer.workers import Outcome
from tests.fakes.reward_functions import raises_on_even_length

PATIENCE_S = 60.0


def samples(count: int) -> list[RewardSample]:
    return [RewardSample("p", "x", "x", token_ids=tuple(range(i + 1)), max_tokens=count) for i in range(count)]


def config(name: str, **values: float | None) -> RewardConfig:
    where = "" if name == "length" else "tests.fakes.reward_functions:"
    functions = [RewardFunctionConfig(where + name)]
    return RewardConfig(**{"functions": functions, "timeout_s": PATIENCE_S, **values})  # type: ignore[arg-type]


def score(name: str, what: list[RewardSample], **values: float | None) -> list[Outcome]:
    section = config(name, **values)
    with RewardPool(section, section.workers) as pool:
        groups = [what] if pool.takes_batch else [[one] for one in what]
        outcomes = [SYSTEM.result(future, math.inf) for future in [pool.score(group) for group in groups]]
    return [(score and score.reward, problem) for group in outcomes for score, problem in group]


def await_that(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def are_gone(marks: Path) -> bool:
    """Processes that left their number in a folder."""
    return all(start_ticks(int(mark.name)) is None for mark in marks.iterdir())


def test_several_processes_score_at_once() -> None:
    assert score("length", samples(20), workers=3) == [((i + 1) / 20, "") for i in range(20)]


EVEN = raises_on_even_length.__code__.co_firstlineno + 2
TOO_LONG = "took longer than reward.timeout_s (0.2 s)"


@pytest.mark.parametrize(
    ("function", "outcomes"),
    [
        ("raises_on_even_length", [(1.0, ""), (None, f"RuntimeError: even (reward_functions.py, line {EVEN})")]),
        ("hangs", [(None, TOO_LONG)] * 2),
        ("batch_hangs", [(None, "took longer than reward.timeout_s (0.2 s x 4)")] * 2),
        ("uses_processes", [(3.0, "")] * 2),
        ("asks_ray", [(0.0, "")] * 2),
    ],
)
def test_what_fails_costs_its_own_sample_only(
    function: str, outcomes: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # which a function does not get
    timeout_s = 0.2 if "hangs" in function else PATIENCE_S
    assert score(function, samples(4), timeout_s=timeout_s) == 2 * outcomes


def test_a_process_that_dies_is_replaced_a_few_times(tmp_path: Path) -> None:
    """The first sample's process dies once, the second's always."""
    metadata = [{"marks": str(tmp_path), "times": times} for times in (1, 99)]
    dying = [RewardSample("p", "x", str(i), metadata=entry) for i, entry in enumerate(metadata)]
    assert score("dies", dying) == [(1.0, ""), (None, "its process died 3 times")]
    assert len(list(tmp_path.glob("1-*"))) == 3


def test_forks_of_a_function_harm_nothing_and_end_with_their_process(tmp_path: Path) -> None:
    forking = [
        RewardSample("p", "x", what, metadata={"marks": str(tmp_path)})
        for what in ("sleeps", "exits", "raises", "comes back")
    ]
    assert score("forks", 2 * forking) == [(1.0, "")] * 8
    assert len(list(tmp_path.iterdir())) == 8
    await_that(lambda: are_gone(tmp_path))


def test_a_process_that_holds_more_memory_than_is_left_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_LARGE_BYTES", 200 << 20)
    monkeypatch.setattr(workers, "available_bytes", lambda: 100 << 20)
    assert score("holds_memory", samples(1)) == [(None, "its process died 3 times")]
    assert score("length", samples(2)) == [(0.5, ""), (1.0, "")]


DRIVER = """
import sys
from tests.processes.test_reward_runner import RewardSample, score
score("hangs_in_native_code", [RewardSample("p", "x", "sleeps", metadata={"marks": sys.argv[1]})])
"""


def test_processes_end_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    """Even in the middle of native code, their forks too."""
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)])
    try:
        await_that(lambda: len(list(tmp_path.iterdir())) == 2)
        assert not are_gone(tmp_path)
    finally:
        driver.kill()
        driver.wait()
    await_that(lambda: are_gone(tmp_path))


def test_an_interruption_does_not_wait_for_functions(tmp_path: Path) -> None:
    def interrupt() -> None:
        await_that(lambda: len(list(tmp_path.iterdir())) == 2)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # wakes no wait of the main thread

    hanging = RewardSample("p", "x", "sleeps", metadata={"marks": str(tmp_path)})
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        score("hangs_in_native_code", [hanging] * 2, timeout_s=3600.0, workers=1)
    thread.join()
    await_that(lambda: are_gone(tmp_path))
