"""Pauses, weights and sleep of a server, the same for trainers of every dialect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specactor_ray.core.errors import SpecActorError
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.dispatch import WeightPolicy
from specactor_ray.serve.requests import Refusal
from specactor_ray.transport.messages import WeightSet

if TYPE_CHECKING:
    from specactor_ray.serve.service import Service

_LABELS = 1024
"""Number of versions whose labels are kept."""
_ABORT_S = 30.0
"""Longest wait for the ends of requests that were aborted."""
_LIVE_S = 20.0
"""Seconds without progress after which an engine is not live."""
_LOOK_S = 0.1


class Control:
    """Operations of trainers on a server besides generation. All coroutines run in the service's event loop.

    Args:
        service: Service whose requests are held and whose weights change.
    """

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
        self._staging = False
        self._staged: WeightSet | None = None
        """An update in two steps has begun, and its weights."""
        self._probe: asyncio.Task[bool] | None = None

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

    async def update(self, weights: WeightSet | str, policy: WeightPolicy, label: str | None = None) -> None:
        """Update the weights of all verifiers; other requests are served meanwhile.

        Args:
            weights: Directory of a checkpoint, or weights that were checked.
            policy: Policy for running requests, unless they are paused.
            label: The trainer's name for the weights.
        """
        async with self._changing:
            self._require_no_step_back(label)
            rollout, before = self._rollout, self._rollout.weight_version
            if isinstance(weights, WeightSet):
                weights = replace(weights, version=before + 1)
            try:
                await _loaded(rollout.update_weights, weights, policy)
            finally:
                if rollout.weight_version != before and label:  # also if some verifiers did not take them in time
                    self.relabel(label)

    def start_update(self) -> None:
        """Begin an update in two steps: `stage_or_update`, then `finish_update`."""
        self._staging, self._staged = True, None

    async def stage_or_update(self, directory: str) -> None:
        """Check and hold the weights of a checkpoint until `finish_update`; without `start_update` use them now."""
        if self._staging:
            self._staged = await _loaded(self._rollout.prepare_weights, directory)
        else:
            await self.update(directory, WeightPolicy.KEEP)

    async def finish_update(self, label: str | None) -> None:
        """Use the weights of `stage_or_update`; running requests continue with them. Raises as `update`."""
        staged, was_staging = self._staged, self._staging
        self._staging, self._staged = False, None
        if staged is None:
            problem = "/update_weights brought no weights" if was_staging else "no update was started"
            raise Refusal(f"{problem}; POST /start_weight_update, /update_weights, then /finish_weight_update")
        await self.update(staged, WeightPolicy.KEEP, label)

    def relabel(self, label: str) -> None:
        """Set the name of the present weights; an older name is allowed, for a trainer that starts again."""
        self._labels[self._rollout.weight_version] = label
        if len(self._labels) > _LABELS:
            del self._labels[min(self._labels)]

    def _require_no_step_back(self, label: str | None) -> None:
        old = self._labels.get(self._rollout.weight_version, "")  # weights without a label have no order
        if label is not None and label.isdecimal() and old.isdecimal() and int(label) < int(old):
            raise Refusal(
                f"weight_version {label} comes after {old}, and versions do not go back. Fix: count on, or set the "
                "present one first: POST /update_weight_version",
                param="weight_version",
            )

    # ---- sleep ----

    async def sleep(self, policy: WeightPolicy) -> None:
        """Free the memory of the verifiers' caches, and on GPUs of their weights. Requests are refused until `wake`.

        Args:
            policy: Policy for running requests; except with `abort`, waiting requests must end first.
        """
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

    # ---- health ----

    async def require_live(self) -> None:
        """Raises Refusal (503) unless the engine commits a token, of any request or of a probe request, or requests are
        held. Concurrent callers share one probe request."""
        if self.is_paused or self.is_asleep:
            return
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self._generates())
        if not await asyncio.shield(self._probe):
            raise Refusal("the engine does not answer", 503)

    async def _generates(self) -> bool:
        committed = self._rollout.committed_tokens
        try:
            handle = self._engine.submit([0], SamplingParams(max_tokens=1), priority=-(2**31))
        except SpecActorError:
            return False
        try:
            for _ in range(round(_LIVE_S / _LOOK_S)):
                if handle.done():
                    return not (await handle).error
                if self._rollout.committed_tokens > committed or self.is_paused:
                    return True
                await asyncio.sleep(_LOOK_S)
        except SpecActorError:
            return False
        finally:
            self._engine.drop(handle)
        return False


async def _loaded(load: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return await asyncio.to_thread(load, *arguments)
    except OSError as error:
        raise Refusal(f"weights: {error.strerror or error}") from None
