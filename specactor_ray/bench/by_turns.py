"""Verifiers that run by turns in one process, without Ray: on a shared machine all compared variants see the same
minutes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from specactor_ray.bench.comparison import Output
from specactor_ray.config.drafter_spec import drafter_spec
from specactor_ray.config.schema import DrafterConfig, SpeculationConfig, TargetConfig
from specactor_ray.draft.loop import DraftLoop
from specactor_ray.draft.proposer import build_proposer
from specactor_ray.target.registry import build_engine
from specactor_ray.transport.link import Link, direct_sender
from specactor_ray.transport.messages import Finished, Progress
from specactor_ray.verify.drafting import Drafting, HostedDrafter
from specactor_ray.verify.loop import VerifyLoop


class TurnTaker:
    """A verifier with the drafters it hosts (none: plain decoding), which runs when it is its turn.

    Args:
        speculation: Settings of drafting and verifying. Default: the configuration's default.
    """

    def __init__(
        self, drafters: Sequence[DrafterConfig], target: TargetConfig, speculation: SpeculationConfig | None = None
    ) -> None:
        engine, config = build_engine(target, "cpu", 0), speculation or SpeculationConfig()
        drafting = Drafting("verifier-0", True, config, engine.vocab_size, max_batch=target.max_batch)
        self.loop = VerifyLoop(engine, drafting, [_hosted(one, config, target) for one in drafters])
        self.seconds: list[float] = []
        """Duration of each turn."""
        self._next_event = 0

    def run(self, tokens: float) -> bool:
        """Take a turn: run until `tokens` tokens are committed in total. The last step may commit more.

        Returns:
            Whether they are committed; else all requests have ended.
        """
        begin = time.perf_counter()
        while self.loop.metrics.committed_tokens < tokens and self.loop.run_once():
            pass
        self.seconds.append(time.perf_counter() - begin)
        return self.loop.metrics.committed_tokens >= tokens

    def outputs(self) -> dict[str, Output]:
        """Request → output for requests that have ended since the last call; none may be running."""
        first, events = self.loop.poll(self._next_event, 0.0)
        self._next_event = first + len(events)
        tokens: dict[str, list[int]] = {}
        outputs = {}
        for event in events:
            if isinstance(event, Progress):
                for request_id, more, _, _ in event.rows():
                    tokens.setdefault(request_id, []).extend(more)
            elif isinstance(event, Finished):
                ended = tuple(tokens.pop(event.request_id, ()))
                outputs[event.request_id] = Output(ended, event.finish_reason, event.error)
        return outputs


def _hosted(drafter: DrafterConfig, config: SpeculationConfig, target: TargetConfig) -> HostedDrafter:
    spec = drafter_spec("drafter", drafter, config.window, target.max_batch)
    loop = DraftLoop(f"{drafter.method}-0", build_proposer(spec, target, "cpu"))
    return HostedDrafter(spec, Link(direct_sender(loop.deliver)), loop)
