"""Pauses, weights and sleep of a server, the same for trainers of every dialect."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from specactor_ray.rollout.dispatch import WeightPolicy
from specactor_ray.serve.requests import Refusal

if TYPE_CHECKING:
    from specactor_ray.serve.service import Service

_LABELS = 1024
"""Number of versions whose labels are kept."""
_ABORT_S = 30.0
"""Longest wait for the ends of requests that were aborted."""


class Control:
    """Operations of trainers on a server besides generation. All coroutines run in the service's event loop."""

    def __init__(self, service: Service) -> None:
        self._service, self._rollout, self._engine = service, service.rollout, service.engine
        self.is_paused = False
        """Requests wait until `resume`."""
        self.is_asleep = False
        """Requests are refused until `wake`."""
        self._resumed = asyncio.Event()
        self._changing = asyncio.Lock()
        """Held while weights change, or verifiers go to sleep or wake."""
        self._labels: dict[int, str] = {}
        """Version of the weights → the trainer's name for it."""

    # ---- pauses ----

    async def pause(self, policy: WeightPolicy) -> None:
        """Hold new requests until `resume`. `abort` ends present requests with their committed tokens, `wait` lets
        running ones end, `keep` lets them continue after `resume`. Returns when no request runs, or at `resume`.
        Idempotent; the policy of each call applies to the requests that run at that time."""
        drained = asyncio.wrap_future(self._engine.pause(policy))
        if self.is_paused:
            self._engine.resume()  # several pauses count as one
        self.is_paused = True
        self._resumed.clear()
        if policy is WeightPolicy.ABORT:
            await self.abort()
        resumed = asyncio.ensure_future(self._resumed.wait())
        await asyncio.wait((drained, resumed), return_when=asyncio.FIRST_COMPLETED)
        resumed.cancel()
        if drained.done():
            drained.result()

    def resume(self) -> None:
        """End the pause, if there is one."""
        if self.is_paused:
            self.is_paused = False
            self._resumed.set()
            self._engine.resume()

    async def abort(self, name: str | None = None) -> int:
        """Abort the choices of the requests with this name, or of all; their clients get the committed tokens. Returns
        the number of these choices after they have ended."""
        running = self._service.running(name)
        for handle in running:
            self._engine.drop(handle)
        if running:
            await asyncio.wait([asyncio.wrap_future(handle.future) for handle in running], timeout=_ABORT_S)
        return len(running)

    # ---- weights ----

    @property
    def label(self) -> str:
        """The trainer's name for the present weights."""
        return self.label_of(self._rollout.weight_version)

    def label_of(self, version: int) -> str:
        """The trainer's name for a version; if there is none, the version number."""
        return self._labels.get(version, str(version))

    async def update(self, directory: str, policy: WeightPolicy, label: str | None = None) -> None:
        """Update the weights of all verifiers to those of a checkpoint; other requests are served meanwhile. The policy
        applies to running requests, unless they are paused."""
        async with self._changing:
            before = self._rollout.weight_version
            try:
                await asyncio.to_thread(self._rollout.update_weights, directory, policy)
            except OSError as error:
                raise Refusal(f"weights: {error.strerror or error}") from None
            finally:
                if self._rollout.weight_version != before and label:  # also if some verifiers were too late
                    self.relabel(label)

    def relabel(self, label: str) -> None:
        """Set the name of the present weights."""
        self._labels[self._rollout.weight_version] = label
        if len(self._labels) > _LABELS:
            del self._labels[min(self._labels)]

    # ---- sleep ----

    async def sleep(self, policy: WeightPolicy) -> None:
        """Free the memory of the verifiers' caches, and on GPUs of their weights. Requests are refused until `wake`;
        except with `abort`, waiting requests must end first."""
        async with self._changing:
            if self.is_asleep:
                return
            self.is_asleep, was_paused = True, self.is_paused
            try:
                await self.pause(policy)
                await asyncio.to_thread(self._rollout.sleep)
            except BaseException:
                self.is_asleep = False
                raise
            finally:
                if not was_paused:
                    self.resume()

    async def wake(self) -> None:
        """End the sleep, if there is one."""
        async with self._changing:
            if self.is_asleep:
                await asyncio.to_thread(self._rollout.wake)
                self.is_asleep = False

    def require_awake(self) -> None:
        """Raises Refusal (503) while the verifiers sleep."""
        if self.is_asleep:
            raise Refusal("the server sleeps; POST /wake_up first", 503)
