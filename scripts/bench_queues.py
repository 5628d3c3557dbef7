#!/usr/bin/env python3
"""What a message between two actors costs: latency of link → inbox over Ray, and how much a delivery carries.

A producer has news of each request every round, as a drafter has, at several paces. What comes while a delivery is
under way goes with the next. Latency is from a round's beginning to its arrival in the consumer's inbox (both clocks
are of this machine).

    python scripts/bench_queues.py --requests 1,16,64
"""

from __future__ import annotations

import argparse
import logging
import statistics
import threading
import time
from typing import Any

import numpy as np
import ray
from rich.console import Console
from rich.table import Table

from specactor_ray.cluster.calls import Calls
from specactor_ray.transport.inbox import MOST_WAITING, for_verifier
from specactor_ray.transport.link import Link
from specactor_ray.transport.messages import TailBatch

WINDOW = 8


class Consumer:
    """An inbox that notes when each batch arrived; `bases` carry the number of the round."""

    def __init__(self) -> None:
        self._inbox = for_verifier(1 << 20)
        self._arrivals: list[tuple[float, int]] = []

    def deliver(self, batch: TailBatch) -> None:
        self._inbox.put(batch)
        self._arrivals.append((time.time(), int(batch.bases.max())))

    def take(self) -> list[tuple[float, int]]:
        """Arrivals (time, round) since the last call."""
        arrivals, self._arrivals = self._arrivals, []
        assert len(self._inbox.drain()) == min(len(arrivals), MOST_WAITING), "a batch was taken for malformed"
        return arrivals


class Producer:
    """Has news at a pace, and tells it whenever the link is free."""

    def __init__(self, consumer: Any) -> None:
        self._free = threading.Event()
        self._link: Link[TailBatch] = Link(Calls().sender(consumer, "deliver"), self._free.set)

    def run(self, requests: int, rounds: int, pace_s: float) -> list[float]:
        """Times at which each round began."""
        begun, told = list[float](), -1

        def news() -> TailBatch | None:
            if told == len(begun) - 1:
                return None
            rows = np.arange(requests, dtype=np.int32)
            lengths, tokens = np.full_like(rows, WINDOW), np.tile(np.arange(WINDOW, dtype=np.int32), requests)
            bases = np.full_like(rows, len(begun) - 1)
            return TailBatch("d", rows, np.ones_like(rows), bases, lengths, tokens)

        due = time.time()
        while told < rounds - 1:
            now = time.time()
            if len(begun) < rounds and now >= due:
                begun.append(now)
                due = now + pace_s
            self._free.clear()
            if self._link.offer(news):
                told = len(begun) - 1
            else:
                self._free.wait(max(due - time.time(), 0.0) if len(begun) < rounds else 0.1)
        while not self._link.is_free:
            self._free.wait(0.1)
        return begun


def measure(requests: int, rounds: int, pace_s: float, producer: Any, consumer: Any) -> tuple[str, ...]:
    ray.get(consumer.take.remote())
    begun = ray.get(producer.run.remote(requests, rounds, pace_s))
    arrivals = ray.get(consumer.take.remote())
    latencies = sorted((when - begun[newest]) * 1e3 for when, newest in arrivals)
    return (
        str(requests),
        f"{pace_s * 1e3:g}",
        f"{statistics.median(latencies):.2f}",
        f"{latencies[int(0.95 * (len(latencies) - 1))]:.2f}",
        f"{len(arrivals) / rounds:.2f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=lambda text: [int(part) for part in text.split(",")], default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        consumer = ray.remote(Consumer).options(max_concurrency=4).remote()
        producer = ray.remote(Producer).remote(consumer)
        table = Table(title="link → inbox over Ray, newest round of each delivery")
        for column in ("requests", "pace ms", "p50 ms", "p95 ms", "deliveries/round"):
            table.add_column(column, justify="right")
        measure(1, 20, 0.001, producer, consumer)
        for requests in args.requests:
            for pace_s in (0.0005, 0.005, 0.04):
                table.add_row(*measure(requests, args.rounds, pace_s, producer, consumer))
        Console().print(table)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
