#!/usr/bin/env python3
"""What a message between two actors costs: latency, batch size and conflation of outbox → mailbox over Ray.

A producer posts one tail per request and round, as a drafter does, at several paces. Latency is from posting to
arrival in the consumer's mailbox (both clocks are of this machine).

    python scripts/bench_queues.py --requests 1,16,64
"""

from __future__ import annotations

import argparse
import logging
import statistics
import threading
import time
from typing import Any

import ray
from rich.console import Console
from rich.table import Table

from specactor_ray.cluster.calls import Calls
from specactor_ray.messages import DraftTail, ToVerifier
from specactor_ray.queues.conflation import for_verifier
from specactor_ray.queues.mailbox import Mailbox
from specactor_ray.queues.outbox import Outbox
from specactor_ray.queues.screening import verifier_screen


class Consumer:
    """A mailbox that notes when each batch arrived; `base_len` carries the number of the round."""

    def __init__(self) -> None:
        self._inbox: Mailbox[ToVerifier] = Mailbox(for_verifier(), verifier_screen(1 << 20))
        self._arrivals: list[tuple[float, int, int]] = []
        self._lock = threading.Lock()

    def deliver(self, batch: list[DraftTail]) -> None:
        now = time.time()
        self._inbox.put(batch)
        with self._lock:
            self._arrivals.append((now, len(batch), max(tail.base_len for tail in batch)))

    def take(self) -> tuple[list[tuple[float, int, int]], int]:
        """Arrivals (time, messages, newest round) since the last call, and how many messages conflated here."""
        with self._lock:
            arrivals, self._arrivals = self._arrivals, []
        conflated = self._inbox.conflated
        self._inbox.drain()
        return arrivals, conflated


class Producer:
    """Posts rounds of tails at a pace."""

    def __init__(self, consumer: Any) -> None:
        self._outbox: Outbox[ToVerifier] = Outbox(Calls().sender(consumer, "deliver"), for_verifier())

    def run(self, requests: int, rounds: int, pace_s: float) -> tuple[list[float], int]:
        """Times at which each round was posted, and the messages that conflated before leaving."""
        before = self._outbox.conflated
        posted = []
        for number in range(rounds):
            tails = [DraftTail(f"r{i}", "d", number, tuple(range(8))) for i in range(requests)]
            posted.append(time.time())
            self._outbox.post(tails)
            time.sleep(pace_s)
        while self._outbox.in_flight or len(self._outbox):
            time.sleep(0.001)
        return posted, self._outbox.conflated - before


def measure(requests: int, rounds: int, pace_s: float, producer: Any, consumer: Any) -> tuple[str, ...]:
    ray.get(consumer.take.remote())
    posted, conflated = ray.get(producer.run.remote(requests, rounds, pace_s))
    arrivals, _ = ray.get(consumer.take.remote())
    latencies = sorted((when - posted[newest]) * 1e3 for when, _, newest in arrivals)
    messages = [count for _, count, _ in arrivals]
    return (
        str(requests),
        f"{pace_s * 1e3:g}",
        f"{statistics.median(latencies):.2f}",
        f"{latencies[int(0.95 * (len(latencies) - 1))]:.2f}",
        f"{len(arrivals) / rounds:.2f}",
        f"{statistics.fmean(messages):.1f}",
        f"{conflated / (requests * rounds):.0%}",
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
        table = Table(title="outbox → mailbox over Ray, newest message of each delivery")
        for column in ("requests", "pace ms", "p50 ms", "p95 ms", "deliveries/round", "messages/delivery", "conflated"):
            table.add_column(column, justify="right")
        measure(1, 20, 0.001, producer, consumer)
        for requests in args.requests:
            for pace_s in (0.0, 0.005, 0.04):
                table.add_row(*measure(requests, args.rounds, pace_s, producer, consumer))
        Console().print(table)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
