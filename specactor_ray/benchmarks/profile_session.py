"""A process that keeps an engine, so that its steps can be timed again and again, seconds apart."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any

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
from specactor_ray.cluster.cores import bind_to_cores
from specactor_ray.errors import SpecActorError, UserError
from specactor_ray.speculation.costs import CostPoint


class ProfileSession:
    """Times verify steps on demand.

    Args:
        share: What to measure, and on which cores.

    Raises:
        UserError: The model or the prompts cannot be used.
        SpecActorError: The process failed.
    """

    def __init__(self, share: Share) -> None:
        context = multiprocessing.get_context("spawn")
        self._channel, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(share, theirs), name="profile", daemon=True)
        self._process.start()
        theirs.close()
        self.drafting: dict[str, list[CostPoint]] = self._receive()
        """Draft method → seconds per token, measured once."""

    def __enter__(self) -> ProfileSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.join(10.0)
        self._channel.close()

    def verify(self, axes: Axes) -> Sequence[CostPoint]:
        """V over the axes, as it is now. Batches and contexts must not exceed those of the share."""
        self._channel.send(axes)
        points: list[CostPoint] = self._receive()
        return points

    def _receive(self) -> Any:
        try:
            answer = self._channel.recv()
        except EOFError:
            self._process.join(10.0)
            raise SpecActorError(f"the profiling process died with exit code {self._process.exitcode}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(share: Share, channel: Any) -> None:
    try:
        _measure_on_demand(share, channel)
    except EOFError:
        pass  # whoever asked is gone
    except UserError as error:
        channel.send(error)
    except Exception:  # noqa: BLE001 - the parent shows it
        channel.send(SpecActorError(f"measuring failed:\n{traceback.format_exc()}"))


def _measure_on_demand(share: Share, channel: Any) -> None:
    from specactor_ray.targets.registry import build_engine

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
