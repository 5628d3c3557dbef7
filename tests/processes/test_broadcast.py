"""Weights by broadcast between real processes over gloo: whatever happens to a member, the others have the right bytes
in the end, from the group or from the store, and the next group needs nothing of the last one."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specactor_ray.actors import broadcast
from specactor_ray.actors.process import ActorHost
from specactor_ray.core.errors import FetchError
from specactor_ray.models.weight_buckets import WeightBucket, pack
from specactor_ray.transport import messages
from specactor_ray.transport.messages import WeightSet

PARTS = 5
JOIN_S, PART_S = 4.0, 2.0
"""Limits of these tests."""
NEVER, AT_ONCE, IN_THE_MIDDLE = PARTS, -1, 2
"""Part of the broadcast before which a fault happens; `AT_ONCE`: before the process joins."""


def buckets_of(version: int) -> list[WeightBucket]:
    """Larger than the buffers of a socket."""
    noise = torch.Generator().manual_seed(version)
    names = [f"layers.{number}" for number in range(PARTS)]
    return [pack([(name, torch.randn(1 << 20, generator=noise))], {name: torch.float32}) for name in names]


class Store:
    """In place of the object store: the buckets of every version."""

    def __init__(self) -> None:
        self.fetched = 0

    def fetch(self, references: Sequence[int], limit_s: float) -> list[WeightBucket]:
        self.fetched += 1
        return buckets_of(references[0])


def serve(pipe: Connection) -> None:
    """The process of a member. Commands: version to offer (None: receive), plan, and the part before which this process
    gets the signal."""
    store, host = Store(), ActorHost()
    host.calls = SimpleNamespace(transport=store)
    for module in (broadcast, messages):
        module.JOIN_S, module.SLOWEST_S = JOIN_S, PART_S
    sender, options, left = broadcast.WeightSender("sender", "127.0.0.1", on_gpus=False), SimpleNamespace(), [0]
    options.make = broadcast.distributed.BroadcastOptions

    def make_options() -> Any:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), fault)
        return options.make()

    broadcast.distributed.BroadcastOptions = make_options
    while True:
        offers, weights, left[0], fault = pipe.recv()
        if left[0] == AT_ONCE:
            os.kill(os.getpid(), fault)
        if offers:
            pipe.send(sender.offer(weights, buckets_of(weights.version)))
        elif weights.broadcast.rank == 0:
            try:
                pipe.send(sender.send(weights, buckets_of(weights.version)) or "")
            except FetchError as error:
                pipe.send(str(error))
        else:
            store.fetched = 0
            found, right = host.fetch_weights(weights), dict[str, torch.Tensor]()
            for bucket in buckets_of(weights.version):
                right |= host.unpack([bucket])
            equal = found.keys() == right.keys() and all(torch.equal(found[name], right[name]) for name in found)
            pipe.send((equal, store.fetched))


class Members:
    """Rank 0 and the verifiers of a run."""

    def __init__(self, number: int) -> None:
        context, self.pipes, self.processes = multiprocessing.get_context("forkserver"), [], []
        context.set_forkserver_preload([__name__])
        for _ in range(number):
            ours, theirs = context.Pipe()
            self.processes.append(context.Process(target=serve, args=(theirs,), daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(ours)

    def send(self, version: int, ranks: Sequence[int], faulty: int = 0, at: int = NEVER, fault: int = 0) -> list[Any]:
        """Send a version to these members. Returns the answers of all, the sender first; None of a lost one, and of one
        that was stopped when the others have answered."""
        if not self.pipes[0].closed:
            self.pipes[0].send((True, WeightSet(version, (version,), PARTS << 22), NEVER, 0))
            self.weights = self.pipes[0].recv()
        pipes = [self.pipes[rank] for rank in (0, *ranks)]
        group = replace(self.weights.broadcast, group=f"{version} to {ranks[0]}", size=len(pipes))
        for rank, pipe in enumerate(pipes):
            plan = replace(self.weights, version=version, broadcast=replace(group, rank=rank))
            pipe.send((False, plan, at if rank == faulty else NEVER, fault))
        return [self._answer(pipe, fault if rank == faulty else 0) for rank, pipe in enumerate(pipes)]

    def _answer(self, pipe: Connection, fault: int) -> Any:
        if fault == signal.SIGSTOP:
            return None
        try:
            return pipe.recv() if pipe.poll(60.0) else "hangs"
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members(4)
    yield made
    made.close()


BY_GROUP, FROM_STORE = (True, 0), (True, 1)


def test_all_have_a_version_by_each_broadcast(members: Members) -> None:
    assert members.send(1, (1, 2, 3)) == ["", BY_GROUP, BY_GROUP, BY_GROUP]
    assert members.send(2, (3, 1)) == ["", BY_GROUP, BY_GROUP], "with other members and ranks"
    assert members.send(2, (3, 1))[1:] == [FROM_STORE, FROM_STORE], "a repeated call takes part in no group"


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("at", [AT_ONCE, IN_THE_MIDDLE])
def test_a_verifier_that_is_lost_or_hangs_costs_the_others_a_fetch(members: Members, fault: int, at: int) -> None:
    problem, *answers = members.send(1, (1, 2, 3), faulty=2, at=at, fault=fault)
    assert problem and answers.pop(1) is None
    assert all(answer in ((FROM_STORE,) if at == AT_ONCE else (BY_GROUP, FROM_STORE)) for answer in answers)
    assert members.send(2, (1, 3)) == ["", BY_GROUP, BY_GROUP], "a new group of the same processes"


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("at", [AT_ONCE, IN_THE_MIDDLE])
def test_without_the_sender_all_fetch(members: Members, fault: int, at: int) -> None:
    assert members.send(1, (1, 2, 3), at=at, fault=fault) == [None, FROM_STORE, FROM_STORE, FROM_STORE]
