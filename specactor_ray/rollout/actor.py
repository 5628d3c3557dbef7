"""A rollout that any process of the cluster calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from specactor_ray.config.schema import Config
from specactor_ray.core.errors import SpecActorError
from specactor_ray.core.types import SamplingParams
from specactor_ray.models.weight_buckets import WeightLayout
from specactor_ray.rollout.control import Control
from specactor_ray.rollout.dispatch import WeightPolicy
from specactor_ray.rollout.handle import Token
from specactor_ray.rollout.prompts import Prompt
from specactor_ray.rollout.rollout import Rollout
from specactor_ray.rollout.trajectory import RolloutMetrics, Trajectory
from specactor_ray.transport.messages import WeightSet


class RolloutActor(Control):
    """A rollout as an asynchronous actor, `ray.remote(RolloutActor).remote("local_cpu")`; arguments as of
    `Rollout.from_config`. `start` must be called first. The run ends with the actor."""

    def __init__(self, config: Config | str | Path | None = None, overrides: Sequence[str] = ()) -> None:
        self._arguments = config, overrides

    async def start(self) -> str:
        """Start the rollout; returns the name of its run. Raises as `Rollout`."""
        super().__init__(await asyncio.to_thread(Rollout.from_config, *self._arguments))
        return self._rollout.run_name

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any) -> Trajectory:
        """One output; arguments and errors as in `RequestQueue.submit`. `ray.cancel` of the call aborts the request."""
        await self.ready()
        return await self._queue.generate(prompt, sampling, **options)

    async def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[list[Token]]:
        """Yield the tokens of one output as they are committed, those that arrived together as one list. As `generate`;
        a request that cannot run raises a SpecActorError."""
        await self.ready()
        handle = await self._queue.begin(prompt, sampling, **options)
        try:
            async for tokens in handle.batches():
                yield tokens
            if reason := (await handle).error:
                raise SpecActorError(reason)
        finally:
            handle.drop()

    async def abort(self, request_id: str | None = None) -> int:
        """Abort the requests with this name, or all; their callers get the committed tokens. Returns their number."""
        return len(await self.end(request_id))

    async def weight_layout(self) -> WeightLayout:
        """Layout in which another process packs weights for `update_weights`."""
        return await asyncio.to_thread(getattr, self._rollout, "weight_layout")

    async def update_weights(self, weights: WeightSet | str, policy: WeightPolicy | str = WeightPolicy.KEEP) -> int:
        """See `Control.update`; a sleep ends."""
        await self.wake()
        return await self.update(weights, policy)

    async def metrics(self) -> RolloutMetrics:
        """Counters over all verifiers."""
        return await asyncio.to_thread(self._rollout.metrics)

    async def close(self) -> None:
        """End the rollout; waiting callers get an error."""
        self.resume()
        await asyncio.to_thread(self._rollout.close)
