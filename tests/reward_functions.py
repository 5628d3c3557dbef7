"""Reward functions for tests: imported by reward processes, some of them misbehaving on purpose."""

from __future__ import annotations

import time

from specactor_ray.training.rewards import RewardSample


def sleepy(sample: RewardSample) -> float:
    """Share of the words that are "sleeps": easy to raise, and the tiny models say it now and then."""
    words = sample.text.replace(".", " ").split()
    return words.count("sleeps") / max(len(words), 1)


def raises_on_even_length(sample: RewardSample) -> float:
    if len(sample.token_ids) % 2 == 0:
        raise RuntimeError("even")
    return 1.0


def hangs(sample: RewardSample) -> float:
    """Never returns, but Python code runs, so an alarm gets through."""
    while True:
        time.sleep(0.01)


def hangs_hard(sample: RewardSample) -> float:
    """Never returns and swallows the alarm."""
    while True:
        try:
            time.sleep(0.01)
        except BaseException:  # noqa: BLE001 - that is the point
            continue


def not_a_number(sample: RewardSample) -> float:
    return float("nan")
