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
    ran: Any = None
    """Futures of the forward and of vLLM's output; None until the step is launched."""
    output: Any = None


class Flight:
    """Plans, launches and reads the steps of a vLLM engine core, of which one or two are in flight. `max_drafts`: most
    draft tokens of a request in one step."""

    def __init__(self, core: Any, max_drafts: int) -> None:
        self._scheduler, self._executor, self._max_drafts = core.scheduler, core.model_executor, max_drafts
        self._positions = int(core.scheduler.max_num_scheduled_tokens)
        self._requests = int(core.scheduler.max_num_running_reqs)
        self._next: Planned | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no step is planned or in flight."""
        return self._next is None

    def decoding(self) -> list[str]:
        """Ids of the requests for which the next step samples after their prompts."""
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
            self._fill(step.plan, tails)
            self._launch(step)
        self._next = self._plan_ahead(window) if ahead else None
        output = step.output.result()
        if output is None:
            step.ran.result()  # raises what the forward raised
        on_read()
        return output, self._scheduler.update_from_output(step.plan, output)

    def close(self) -> None:
        """Wait for what is launched; a plan that is held is dropped. The engine core cannot be used afterwards."""
        step, self._next = self._next, None
        if step is not None and step.output is not None:
            step.output.result()

    def _plan(self, window: int) -> Planned:
        scheduler, room = self._scheduler, self._room(window)
        for request in scheduler.running:
            if not request.is_prefill_chunk:
                request.spec_token_ids = [-1] * room
        plan = scheduler.schedule()
        drafts, counts = plan.scheduled_spec_decode_tokens, plan.num_scheduled_tokens
        decoding = [
            one.request_id
            for one in scheduler.running
            if not one.is_prefill_chunk and counts.get(one.request_id) == 1 + len(drafts.get(one.request_id, ()))
        ]
        return Planned(plan, decoding)

    def _plan_ahead(self, window: int) -> Planned | None:
        """The step after the one that was launched last; launched as well if it takes no drafts."""
        if not self._scheduler.has_requests():
            return None
        step = self._plan(window)
        if step.plan.scheduled_spec_decode_tokens:
            return step
        self._launch(step)
        if step.plan.total_num_scheduled_tokens:
            return step
        self._scheduler.update_from_output(step.plan, step.output.result())  # it only frees requests that have ended
        return None

    def _room(self, window: int) -> int:
        """Most drafts of a request in the next step: no request may be left out of it, and while prompts can enter half
        of the positions are theirs."""
        running, waiting = self._scheduler.running, self._scheduler.waiting
        decoding = sum(not one.is_prefill_chunk for one in running)
        enter = decoding < len(running) or (len(waiting) > 0 and len(running) < self._requests)
        share = self._positions // (1 + enter)
        return max(0, min(window, self._max_drafts, share // max(decoding, 1) - 1))

    def _fill(self, plan: Any, tails: Mapping[str, Sequence[int]]) -> None:
        """Put drafts into a plan, and give back the room that they leave."""
        placed, counts, requests = (
            plan.scheduled_spec_decode_tokens,
            plan.num_scheduled_tokens,
            self._scheduler.requests,
        )
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

    def _launch(self, step: Planned) -> None:
        """Start a step on the device; nothing waits for it."""
        step.ran = self._executor.execute_model(step.plan, non_block=True)
        samples = step.plan.total_num_scheduled_tokens > 0
        step.output = self._executor.sample_tokens(None, non_block=True) if samples else step.ran
