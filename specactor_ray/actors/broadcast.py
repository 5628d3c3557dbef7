"""Weights from the trainer to several verifiers at once: a process group that lives for one version.

gloo carries them from host memory to host memory, NCCL between GPUs. In both cases the tensors end up in host memory,
all of them before the engine is touched, so a GPU holds one bucket of them at a time.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from specactor_ray.config.schema import Config
from specactor_ray.core.clock import SYSTEM
from specactor_ray.core.errors import ConfigError, FetchError
from specactor_ray.models.weight_buckets import WeightBucket, bucket_bytes
from specactor_ray.transport.messages import JOIN_S, SLOWEST_S, Broadcast, WeightSet, broadcast_s, transfer_s

distributed: Any = torch.distributed  # its stubs are incomplete
_NCCL_IN_PROCESS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""NCCL's threads abort a group that failed; by default they end the process."""


def uses_nccl(config: Config) -> bool:
    """Whether groups are NCCL's. It takes no two ranks on one GPU, and a split target has its GPUs in other
    processes."""
    trainer, target = config.trainer, config.target
    return bool(trainer.gpus and target.gpus) and target.tensor_parallel == 1 and not trainer.colocate


def require_broadcast(config: Config) -> None:
    """Refuse a torch that lacks what a broadcast needs, with a ConfigError."""
    needed = "nccl" if uses_nccl(config) else "gloo"
    if not (distributed.is_available() and getattr(distributed, f"is_{needed}_available")()):
        fix = f"install a torch with {needed}, or use trainer.weight_transport=object_store."
        raise ConfigError("trainer.weight_transport", f"broadcast needs {needed}, which this torch lacks.", fix)


class WeightSender:
    """The trainer's end: rank 0 of every group, and the store where its members meet.

    The store has no authentication: any process that reaches its port can take part. So it is opened at one address
    only, the loopback where the run has no other machine.
    """

    def __init__(self, actor: Any, address: str, on_gpus: bool) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, 0), family=family)
        self._offer = Broadcast(actor, address, int(listening.getsockname()[1]), on_gpus=on_gpus)
        # The store owns the socket from here on.
        self._store = distributed.TCPStore(
            address, self._offer.port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )

    def offer(self, weights: WeightSet, buckets: Sequence[WeightBucket]) -> WeightSet:
        """The version, which a group may bring, too."""
        heads = tuple(replace(bucket, data=None) for bucket in buckets)
        return replace(weights, broadcast=replace(self._offer, heads=heads))

    def send(self, weights: WeightSet, buckets: Sequence[WeightBucket]) -> None:
        """Send these buckets of a planned version. FetchError: the group failed."""
        _carry(lambda: self._store, weights, [torch.as_tensor(bucket.data) for bucket in buckets])


def receive(weights: WeightSet) -> list[WeightBucket]:
    """All buckets of a planned version. FetchError: the group failed; it is gone, and nothing of it is kept."""
    plan = weights.broadcast
    assert plan is not None and plan.rank > 0
    pinned, limit = plan.on_gpus, timedelta(seconds=JOIN_S)
    data = [torch.empty(bucket_bytes(head), dtype=torch.uint8, pin_memory=pinned) for head in plan.heads]
    _carry(lambda: distributed.TCPStore(plan.address, plan.port, timeout=limit, wait_for_workers=False), weights, data)
    return [replace(head, data=part.numpy()) for head, part in zip(plan.heads, data, strict=True)]


def _carry(open_store: Callable[[], Any], weights: WeightSet, parts: Sequence[torch.Tensor]) -> None:
    """Take part in the broadcast of these parts, of which rank 0 has the values.

    In a thread, which is given up at the limit: a client of a store waits for ever if the store's process hangs.
    """
    ended, limit_s = Future[str](), broadcast_s(weights.num_bytes)
    SYSTEM.spawn(lambda: ended.set_result(_take_part(open_store, weights, parts)), "broadcast")
    try:
        problem = SYSTEM.result(ended, limit_s)
    except TimeoutError:
        problem = f"no end within {limit_s:.0f} s"
    if problem:
        raise FetchError(problem)


def _take_part(open_store: Callable[[], Any], weights: WeightSet, parts: Sequence[torch.Tensor]) -> str:
    """Join, and receive or send all parts. Returns why it failed. The group is gone at the return: so neighbours of a
    rank that failed fail then, and not at their limit."""
    group = None
    try:
        group = _join(open_store(), weights)
        _broadcast(group, weights, parts)
    except Exception as error:  # noqa: BLE001 - whatever it is, the object store has the version
        if group is not None:
            group.abort()
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return ""


def _join(store: Any, weights: WeightSet) -> Any:
    """The group of this version, once all of its ranks are there."""
    plan, end = weights.broadcast, SYSTEM.now() + JOIN_S
    assert plan is not None
    store = distributed.PrefixStore(plan.group, store)
    store.set(str(plan.rank), "")
    store.wait([str(rank) for rank in range(plan.size)], timedelta(seconds=JOIN_S))
    left = timedelta(seconds=max(end - SYSTEM.now(), 1.0))
    store.set_timeout(left)
    if plan.on_gpus:
        with _environment(_NCCL_IN_PROCESS):
            return distributed.ProcessGroupNCCL(store, plan.rank, plan.size, left)
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout, options._devices = left, [gloo.create_device(hostname=_own_address(plan))]
    return gloo(store, plan.rank, plan.size, options)


def _broadcast(group: Any, weights: WeightSet, parts: Sequence[torch.Tensor]) -> None:
    plan, end = weights.broadcast, SYSTEM.now() + SLOWEST_S + weights.transfer_s  # limits of parts add up
    assert plan is not None
    for part in parts:
        options = distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        limit_s = min(SLOWEST_S + transfer_s(part.nbytes), max(end - SYSTEM.now(), 0.001))
        options.timeout = timedelta(seconds=limit_s)
        carried = part
        if plan.on_gpus:
            carried = part.to("cuda") if plan.rank == 0 else torch.empty_like(part, device="cuda")
        group.broadcast([carried], options).wait(timedelta(seconds=limit_s))
        if carried is not part and plan.rank > 0:
            part.copy_(carried)


def _own_address(plan: Broadcast) -> str:
    """Address of this machine from which it reaches the sender."""
    family = socket.AF_INET6 if ":" in plan.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        route.connect((plan.address, plan.port))  # sends nothing
        return str(route.getsockname()[0])


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
