"""Reward functions for tests: imported by reward processes, some of them misbehaving on purpose."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import time
import zlib
from pathlib import Path

from specactor_ray.trainer.rewards import RewardSample


def hissing(sample: RewardSample) -> float:
    """Share of the words with an "s": every output has some and lacks some, whatever the tiny model learnt first."""
    words = sample.text.replace(".", " ").split()
    return sum("s" in word for word in words) / max(len(words), 1)


def hissing_or_kills(sample: RewardSample) -> float:
    _may_kill(sample)
    return hissing(sample)


def coin_or_kills(sample: RewardSample) -> float:
    """1.0 for half of all outputs, whatever the tiny model says: half of the groups of two are alike."""
    _may_kill(sample)
    return float(zlib.crc32(str(sample.token_ids).encode()) % 2)


def _may_kill(sample: RewardSample) -> None:
    """Kill the parent process once, when a file has a number of lines. `kills` of the row has the file, the number and
    a file that marks the kill."""
    file, lines, mark = sample.metadata.get("kills", ("", 0, ""))
    if file and Path(file).exists() and len(Path(file).read_text().splitlines()) >= lines:
        with contextlib.suppress(FileExistsError):
            Path(mark).touch(exist_ok=False)
            os.kill(os.getppid(), signal.SIGKILL)


def slow_on_text(sample: RewardSample) -> float:
    """The number of characters, after a while for outputs that are no made-up ones."""
    time.sleep(0.3 * (sample.text == "text"))
    return float(len(sample.text))


def raises_on_even_length(sample: RewardSample) -> float:
    if len(sample.token_ids) % 2 == 0:
        raise RuntimeError("even")
    return 1.0


def number_or_raises(sample: RewardSample) -> float:
    """The number that the output is."""
    try:
        return float(sample.response)
    except ValueError:
        raise RuntimeError("no number") from None


def hangs(sample: RewardSample) -> float:
    """Never returns, and swallows whatever is raised meanwhile."""
    while True:
        try:
            time.sleep(0.01)
        except BaseException:  # noqa: BLE001 - that is the point
            continue


def batch_hangs(completions: list[str]) -> list[float]:
    return [hangs(RewardSample("p", text, "x")) for text in completions]


def dies(sample: RewardSample) -> float:
    """Its process is killed, as by the kernel when memory is short, until `times` files lie in the folder `marks`."""
    marks = Path(sample.metadata["marks"])
    begun = len(list(marks.glob(f"{sample.answer}-*")))
    if begun < sample.metadata["times"]:
        (marks / f"{sample.answer}-{begun}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def forks(sample: RewardSample) -> float:
    """Leaves a fork that does what the sample says: it sleeps, exits, raises, or comes back as the function does."""
    if child := os.fork():
        (Path(sample.metadata["marks"]) / str(child)).touch()
        return 1.0
    if sample.answer == "sleeps":
        time.sleep(600.0)
    if sample.answer == "exits":
        raise SystemExit(3)
    if sample.answer == "raises":
        raise RuntimeError("in the fork")
    return 0.25


def uses_processes(sample: RewardSample) -> float:
    with multiprocessing.Pool(2) as pool:
        return float(sum(pool.map(abs, [-1, -2])))


def asks_ray(sample: RewardSample) -> float:
    """Whether Ray is connected, before it is used and after."""
    import ray

    before = ray.is_initialized()
    try:
        ray.get(ray.put(1))
    except ray.exceptions.RaySystemError:
        return float(before or ray.is_initialized())
    return 2.0


def hangs_in_native_code(sample: RewardSample) -> float:
    """Leaves a fork and its own process id, and never returns; no thread of the process runs meanwhile."""
    forks(sample)
    (Path(sample.metadata["marks"]) / str(os.getpid())).touch()
    return float(bool(re.match("(a+)+$", "a" * 60 + "b")))


def holds_memory(sample: RewardSample) -> float:
    held = bytearray(b"x" * (256 << 20))
    time.sleep(60.0)
    return float(len(held))


def not_a_number(sample: RewardSample) -> float:
    return float("nan")
