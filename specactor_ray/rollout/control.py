"""Pauses, aborts, weights and sleep of a rollout, the same for every server of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specactor_ray.core.errors import InputError
from specactor_ray.rollout.dispatch import WeightPolicy, policy_of
from specactor_ray.rollout.handle import Handle
from specactor_ray.transport.messages import WeightSet

if TYPE_CHECKING:
    from specactor_ray.rollout.rollout import Rollout

_LABELS = 1024
"""Number of versions that keep their labels."""
_POLL_S = 0.01
_ABORT_S = 30.0
"""Longest wait for the ends of requests that were aborted."""


class Control:
    """Operations of trainers on a rollout besides generation. All coroutines run in one event loop."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout, self._queue = rollout, rollout.queue
        self.is_asleep = False
        """The verifiers have no memory until `wake`."""
        self.is_rejecting = False
        """A pause rejects new requests; otherwise they wait."""
        self.labels: dict[int, Any] = {}
        """Version of the weights → the trainer's name for it."""
        self._paused, self._resumed = asyncio.Event(), asyncio.Event()
        self._changing = asyncio.Lock()
        """Held while weights change, or verifiers go to sleep or wake."""

    # ---- pauses ----

    @property
    def is_paused(self) -> bool:
        """Whether requests wait until `resume`."""
        return self._paused.is_set()

    async def pause(self, policy: WeightPolicy | str = WeightPolicy.ABORT, rejects: bool = False) -> None:
        """Hold new requests until `resume`; servers reject them instead if `rejects`. `abort` ends present ones with
        their committed tokens, `wait` lets running ones end, `keep` lets them continue after `resume`. Returns when no
        request runs, or at `resume`. Idempotent; the policy of each call applies to the requests that run at that time,
        and the last one decides about new requests."""
        policy = policy_of(policy)
        drained = asyncio.wrap_future(self._queue.pause(policy))
        if self.is_paused:
            self._queue.resume()  # several pauses count as one
        self.is_rejecting = rejects
        self._paused.set()
        self._resumed.clear()
        if policy is WeightPolicy.ABORT:
            await self.end()
        await _either(drained, self._resumed)

    def resume(self) -> None:
        """End the pause, if there is one."""
        if self.is_paused:
            self.is_rejecting = False
            self._paused.clear()
            self._resumed.set()
            self._queue.resume()

    async def ready(self) -> None:
        """Wait for the end of a pause, then end a sleep."""
        while self.is_paused or self.is_asleep:
            if self.is_paused:
                await self._resumed.wait()
            await self.wake()

    async def end(self, request_id: str | None = None) -> list[Handle]:
        """Abort the requests with this name, or all; returns them when they have ended with their committed tokens."""
        running = self._queue.running(request_id)
        for handle in running:
            handle.drop()
        await _ended(running, _ABORT_S)
        return running

    # ---- weights ----

    @property
    def label(self) -> str:
        """The trainer's name for the present weights."""
        return self.label_of(self._rollout.weight_version)

    def label_of(self, version: int) -> str:
        """The trainer's name for a version; if there is none, the version number."""
        return str(self.labels.get(version, version))

    async def update(self, weights: WeightSet | str, policy: WeightPolicy | str, label: Any = None) -> int:
        """Update the weights of all verifiers to those of a checkpoint's directory, or to a `WeightSet` with any
        version; returns their version. The policy applies to running requests, unless they are paused.

        Raises:
            InputError: The directory cannot be read, or a tensor does not fit.
        """
        async with self._changing:
            before = self._rollout.weight_version
            if isinstance(weights, WeightSet):
                weights = replace(weights, version=before + 1)
            try:
                return await asyncio.to_thread(self._rollout.update_weights, weights, policy)
            except OSError as error:
                raise InputError(f"weights: {error.strerror or error}") from None
            finally:
                if self._rollout.weight_version != before and label is not None:  # also if some verifiers were too late
                    self.relabel(label)

    def relabel(self, label: Any) -> None:
        """Set the name of the present weights."""
        self.labels[self._rollout.weight_version] = label
        if len(self.labels) > _LABELS:
            del self.labels[min(self.labels)]

    # ---- sleep ----

    async def sleep(self, policy: WeightPolicy | str = WeightPolicy.WAIT) -> None:
        """Free the memory of the verifiers' caches, and on GPUs of their weights, until `wake`. `abort` ends all
        requests, `wait` lets them end. Raises InputError if some remain, held by a pause or by `keep`."""
        policy = policy_of(policy)
        async with self._changing:
            if self.is_asleep:
                return
            self.is_asleep = True  # requests wait in `ready` from now on
            try:
                while self._queue.beginning:
                    await asyncio.sleep(_POLL_S)
                if policy is WeightPolicy.WAIT:
                    ended = asyncio.ensure_future(_ended(self._queue.running()))
                    await _either(ended, self._paused)
                    ended.cancel()
                await self._fall_asleep(policy)
            except BaseException:
                self.is_asleep = False
                raise

    async def _fall_asleep(self, policy: WeightPolicy) -> None:
        drained = asyncio.wrap_future(self._queue.pause(policy))  # beside a pause of the trainer
        try:
            if policy is WeightPolicy.ABORT:
                await self.end()
            await drained
            await asyncio.to_thread(self._rollout.sleep)
        finally:
            self._queue.resume()

    async def wake(self) -> None:
        """End the sleep, if there is one."""
        async with self._changing:
            if self.is_asleep:
                await asyncio.to_thread(self._queue.wake_verifiers)
                self.is_asleep = False


async def _ended(handles: Sequence[Handle], timeout_s: float | None = None) -> None:
    if handles:
        await asyncio.wait([asyncio.wrap_future(handle.future) for handle in handles], timeout=timeout_s)


async def _either(future: asyncio.Future[None], event: asyncio.Event) -> None:
    """Wait for the first of both; raises the error of the future."""
    occurred = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((future, occurred), return_when=asyncio.FIRST_COMPLETED)
    finally:
        occurred.cancel()
    if future.done():
        future.result()
