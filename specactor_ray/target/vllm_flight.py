"""Steps of vLLM's engine core in flight: while the device runs one, vLLM's scheduler plans the next.

A plan without room for drafts is launched at once, behind the step that runs (asynchronous scheduling). A plan with
room is held until its drafts come, which depend on the tokens of the step before; what the drafts leave of the room is
given back, so that the step has exactly their positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Planned:
    """A step that vLLM's scheduler has planned."""

    plan: Any
    """vLLM's `SchedulerOutput`."""
    decoding: list[str]
    """Ids of the requests for which it samples after their prompts."""
    waits: bool
    """Whether it has room for drafts."""
    ran: Any = None
    """Future of the forward; None until the step is launched."""
    output: Any = None
    """Future of vLLM's output; None until the step is launched."""


class Flight:
    """Plans, launches and reads the steps of a vLLM engine core, of which one or two are in flight. `max_drafts`: most
    draft tokens of a request in one step."""

    def __init__(self, core: Any, max_drafts: int) -> None:
        self._scheduler, self._executor, self._max_drafts = core.scheduler, core.model_executor, max_drafts
        self._positions = int(core.scheduler.max_num_scheduled_tokens)
        self._requests = int(core.scheduler.max_num_running_reqs)
        self._next: Planned | None = None
        self._prompts_enter = False
        """Whether the last plan has positions of prompts."""

    @property
    def is_empty(self) -> bool:
        """Whether no step is planned or in flight."""
        return self._next is None

    def decoding(self) -> list[str]:
        """Ids of the requests for which the next step samples after their prompts; none where it was to have room for
        drafts and has none, since it runs already."""
        return [] if self._next is None else self._next.decoding

    def held(self, name: str) -> int:
        """Number of positions of a request in the step that is planned and not launched."""
        step = self._next
        return 0 if step is None or step.output is not None else step.plan.num_scheduled_tokens.get(name, 0)

    def run(
        self, tails: Mapping[str, Sequence[int]], window: int, *, ahead: bool = True,
        on_read: Callable[[], None] = lambda: None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Launch the next step with these drafts, unless it runs already; plan the one after it, with room for `window`
        drafts of a request; and wait for the output of the former. `on_read`: called before vLLM frees the requests
        that end with it.

        Returns:
            vLLM's `ModelRunnerOutput` and `EngineCoreOutputs` of the step.
        """
        step = self._next or self._plan(window)
        if step.output is None:
            self._launch(step, tails)
        self._next = self._plan_ahead(window) if ahead else None
        output = step.output.result()
        if output is None:
            step.ran.result()  # raises what the forward raised
        on_read()
        outputs = self._scheduler.update_from_output(step.plan, output)
        if ahead and self._next is None:  # what is left may depend on the tokens of this step
            self._next = self._plan_ahead(window)
        return output, outputs

    def close(self) -> None:
        """Wait for what is launched; a plan that is held is dropped. The engine core cannot be used afterwards."""
        step, self._next = self._next, None
        if step is not None and step.output is not None:
            step.output.result()

    def _plan(self, window: int) -> Planned:
        scheduler = self._scheduler
        decoding = [one for one in scheduler.running if not one.is_prefill_chunk]
        placeholders = [-1] * self._room(window, len(decoding))
        for request in decoding:
            request.spec_token_ids = placeholders
        plan = scheduler.schedule()
        names = [one.request_id for one in decoding if one.request_id in plan.num_scheduled_tokens]
        self._prompts_enter = len(names) < len(plan.num_scheduled_tokens)
        return Planned(plan, names, waits=len(placeholders) > 0 and len(plan.scheduled_spec_decode_tokens) > 0)

    def _plan_ahead(self, window: int) -> Planned | None:
        """The step after the one that was launched last; launched as well if it takes no drafts."""
        if not self._scheduler.has_requests():
            return None
        step = self._plan(window)
        if step.waits:
            return step
        self._launch(step, {})
        if step.plan.total_num_scheduled_tokens:
            step.decoding = [] if window else step.decoding
            return step
        self._scheduler.update_from_output(step.plan, step.output.result())  # it only frees requests that have ended
        return None

    def _room(self, window: int, decoding: int) -> int:
        """Most drafts of a request in the next step: no request may be left out of it. While a prompt can enter, vLLM's
        smallest share of one is kept free; while some do, half of the positions."""
        running, share = len(self._scheduler.running), self._positions
        if decoding < running or (len(self._scheduler.waiting) > 0 and running < self._requests):
            share = min(share - 1 - self._max_drafts, share // (1 + self._prompts_enter))
        return max(0, min(window, self._max_drafts, share // max(decoding, 1) - 1))

    def _launch(self, step: Planned, tails: Mapping[str, Sequence[int]]) -> None:
        """Put drafts into a plan, give back the room that they leave, and start it on the device; nothing waits."""
        plan, requests = step.plan, self._scheduler.requests
        placed, counts = plan.scheduled_spec_decode_tokens, plan.num_scheduled_tokens
        for name, room in list(placed.items()):
            tail = list(tails.get(name, ()))[: len(room)]
            unused = len(room) - len(tail)
            counts[name] -= unused
            plan.total_num_scheduled_tokens -= unused
            if (request := requests.get(name)) is not None:
                request.num_computed_tokens -= unused
                request.num_in_flight_tokens -= unused
                request.num_output_placeholders -= unused
            if tail:
                placed[name] = tail
            else:
                del placed[name]
        step.ran = self._executor.execute_model(plan, non_block=True)
        samples = plan.total_num_scheduled_tokens > 0
        step.output = self._executor.sample_tokens(None, non_block=True) if samples else step.ran
