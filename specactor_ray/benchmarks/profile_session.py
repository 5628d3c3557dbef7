"""A process that keeps an engine, so that its steps can be timed again and again, seconds apart."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection

from specactor_ray.benchmarks.drafting_on_text import TextStream
from specactor_ray.benchmarks.profile_process import (
    Axes,
    Measured,
    Share,
    measure_method,
    measure_verify,
    record_outputs,
    roomy,
)
from specactor_ray.child import Child
from specactor_ray.cluster.cores import bind_to_cores
from specactor_ray.speculation.costs import CostPoint


class ProfileSession(Child):
    """Times verify steps on demand.

    Args:
        share: What to measure, and on which cores.

    Raises:
        UserError: The model or the prompts cannot be used.
        SpecActorError: The process failed.
    """

    def __init__(self, share: Share) -> None:
        super().__init__(_measure_on_demand, share, "profile")
        self.drafting: dict[str, list[CostPoint]] = self.receive()
        """Draft method → seconds per token, measured once."""

    def verify(self, axes: Axes) -> Sequence[CostPoint]:
        """V over the axes, as it is now. Batches and contexts must not exceed those of the share."""
        self.channel.send(axes)
        points: list[CostPoint] = self.receive()
        return points


def _measure_on_demand(share: Share, channel: Connection) -> None:
    from specactor_ray.target.registry import build_engine

    if share.cores:
        bind_to_cores(share.cores)
    config = roomy(share.config, share.axes)
    engine = build_engine(config.target, share.device, max(share.axes.windows))
    try:
        recorded = tuple(record_outputs(engine, config, share.prompts, share.max_requests))
        text, sampling = TextStream(recorded), recorded[0].sampling
        measured = Measured(share.devices, [], {}, {}, recorded, 1.0)
        for drafter in config.drafters:
            measure_method(drafter, share, text, measured, lambda line: None)
        channel.send(measured.drafting)
        while True:
            axes = channel.recv()
            channel.send(measure_verify(engine, text, sampling, share.devices, axes, lambda line: None))
    finally:
        engine.close()
