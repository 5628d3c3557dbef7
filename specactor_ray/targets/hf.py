"""Target engine over a transformers model: continuous batching, chunked prefill, packed verification.

A step is `admit → plan → forward → verify → commit`. The plan gives every admitted request its pending tokens
(the part of prompt and output that is not in the cache yet; one token while decoding) and, once those fit, its
draft tail. All of it goes through the model as one packed sequence.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specactor_ray.config.schema import TargetConfig
from specactor_ray.errors import InputError
from specactor_ray.modeling.ragged_cache import CacheRow
from specactor_ray.modeling.ragged_model import RaggedModel, RowChunk
from specactor_ray.modeling.wire import to_wire
from specactor_ray.sampling import warm_up
from specactor_ray.targets.base import RowOutput, StepResult, Tail, TargetRequest
from specactor_ray.targets.requests import cut_at_stop, refuse_impossible, stop_ids
from specactor_ray.targets.states import StateExport
from specactor_ray.targets.verification import DraftedRow, VerifiedRow, cut_tail, verify

_FIRST_RESERVATION = 128
"""Output tokens for which cache is reserved when a request is admitted; it grows from there."""


@dataclass(slots=True)
class _Row:
    """A request in the engine. `context` is prompt + committed output; `cache` is None while it waits."""

    request: TargetRequest
    context: list[int]
    stop_ids: frozenset[int]
    cache: CacheRow | None = None
    states: StateExport = field(default_factory=StateExport)

    @property
    def committed(self) -> int:
        return len(self.context) - len(self.request.prompt_token_ids)

    @property
    def pending(self) -> int:
        """Context tokens that are not in the cache yet; at least 1."""
        return len(self.context) - (self.cache.length if self.cache else 0)


@dataclass(slots=True)
class _Planned:
    """What a row feeds into this step's forward: context tokens, then draft tokens."""

    row: _Row
    cache: CacheRow
    num_context: int
    tail: Tail = ()
    samples: bool = False
    """Its pending tokens are all in, so this step samples for it."""

    def chunk(self) -> RowChunk:
        begin = self.cache.length
        context, num_logits = self.row.context[begin : begin + self.num_context], 1 + len(self.tail)
        return RowChunk(self.cache, [*context, *self.tail], num_logits if self.samples else 0)

    def drafted(self) -> DraftedRow:
        return DraftedRow(self.tail, self.row.request.sampling, self.row.committed)


class HfEngine:
    """`TargetEngine` over a `RaggedModel`.

    Args:
        model: The model with its cache; the engine owns it from now on.
        eos_token_ids: Ids that end an output unless the request ignores them.
        max_model_len: Most prompt + output tokens of a request; None takes the model's own limit.
        max_batch: Most requests admitted at once.
        max_step_tokens: Most positions in one forward, at least `max_batch`.
        record_margins: Record perturbed top-2 margins.
    """

    def __init__(
        self,
        model: RaggedModel,
        eos_token_ids: Sequence[int] = (),
        max_model_len: int | None = None,
        max_batch: int = 16,
        max_step_tokens: int = 512,
        record_margins: bool = False,
    ) -> None:
        self._model = model
        self._eos = frozenset(eos_token_ids)
        self.vocab_size = model.vocab_size
        self.max_model_len = min(max_model_len or model.max_positions, model.max_positions, model.cache.slots)
        self.max_batch, self.max_step_tokens = max_batch, max(max_step_tokens, max_batch)
        self.record_margins = record_margins
        self.weight_version = 0
        self.preemptions = 0
        self._asleep = False
        self._rows: dict[str, _Row] = {}
        self._running: list[_Row] = []
        self._waiting: deque[_Row] = deque()
        warm_up(model.device, model.dtype, record_margins=record_margins)

    @classmethod
    def from_config(cls, config: TargetConfig, device: str = "cpu") -> HfEngine:
        """Load the configured model. Raises ModelLoadError."""
        from specactor_ray.modeling.loading import eos_token_ids, load_model

        loaded = load_model(config.model, dtype=config.dtype, device=device, trust_remote_code=config.trust_remote_code)
        eos = eos_token_ids(loaded.generation_config, loaded.config)
        ragged = RaggedModel(loaded, int(config.kv_cache_gb * 2**30), config.hidden_layers)
        return cls(ragged, eos, config.max_model_len, config.max_batch, config.max_step_tokens, config.record_margins)

    # ---- requests ----

    def add(self, request: TargetRequest) -> None:
        if request.request_id in self._rows:
            raise InputError(f"request {request.request_id} is already running")
        refuse_impossible(request, self.vocab_size, self.max_model_len)
        stops = stop_ids(request.sampling, self._eos)
        row = _Row(request, [*request.prompt_token_ids, *request.committed_token_ids], stops)
        self._rows[request.request_id] = row
        self._waiting.append(row)

    def remove(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is None:
            return
        if row.cache is not None:
            row.cache.free()
            self._running.remove(row)
        else:
            self._waiting.remove(row)

    def decoding(self) -> list[str]:
        return [row.request.request_id for row in self._running if row.pending == 1]

    def has_work(self) -> bool:
        return bool(self._rows)

    def close(self) -> None:
        for request_id in list(self._rows):
            self.remove(request_id)
        del self._model

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        self._model.load_weights(state_dict)
        self.weight_version = version
        for row in self._running:
            if row.cache is not None:
                row.cache.truncate(0)

    def sleep(self) -> None:
        if self._rows:
            raise InputError("the engine cannot sleep while requests are running")
        self._asleep = True
        self._model.sleep()

    def wake(self) -> None:
        if self._asleep:
            self._model.wake()
            self._asleep = False

    # ---- the step ----

    def step(self, tails: Mapping[str, Tail]) -> StepResult:
        self._admit()
        plan = self._plan(tails)
        result = StepResult()
        if not plan:
            return result
        begin = time.perf_counter()
        output = self._model.forward([planned.chunk() for planned in plan])
        result.forward_s = time.perf_counter() - begin
        begin = time.perf_counter()
        sampling = [planned for planned in plan if planned.samples]
        verified = verify(output.logits, [planned.drafted() for planned in sampling], self.record_margins)
        result.sampling_s = time.perf_counter() - begin
        result.num_tokens = sum(planned.num_context + len(planned.tail) for planned in plan)
        result.num_prefill_tokens = sum(planned.num_context for planned in plan if planned.num_context > 1)
        if output.hidden_states is not None:
            _keep_states(plan, verified, to_wire(output.hidden_states))
        for planned, row_verified in zip(sampling, verified, strict=True):
            result.outputs.append(self._commit(planned, row_verified))
        return result

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.max_batch:
            row = self._waiting[0]
            remaining = row.request.sampling.max_tokens - row.committed
            wanted = min(len(row.context) + min(remaining, _FIRST_RESERVATION), self.max_model_len)
            cache = self._model.cache.open(wanted)
            if cache is None:
                break
            row.cache = cache
            self._running.append(self._waiting.popleft())

    def _plan(self, tails: Mapping[str, Tail]) -> list[_Planned]:
        """Decoding rows first, with one token each; then their tails; prefill chunks fill what is left."""
        decoding = [row for row in self._running if row.pending == 1]
        budget = self.max_step_tokens - len(decoding)
        plan: list[_Planned] = []
        for row in decoding:
            tail = self._usable_tail(row, tails, budget)
            planned = self._reserve(row, 1, tail)
            if planned is not None:
                plan.append(planned)
                budget -= len(planned.tail)
        for row in [row for row in self._running if row.pending > 1]:
            if budget <= 0:
                break
            planned = self._reserve(row, min(row.pending, budget), ())
            if planned is not None:
                plan.append(planned)
                budget -= planned.num_context
        return [planned for planned in plan if planned.row.cache is not None]

    def _usable_tail(self, row: _Row, tails: Mapping[str, Tail], budget: int) -> Tail:
        """The tail, cut so that its tokens and the one the target adds still fit max_tokens and the context."""
        room = min(row.request.sampling.max_tokens - row.committed - 1, self.max_model_len - len(row.context) - 1)
        return cut_tail(tails.get(row.request.request_id, ()), min(room, budget), self.vocab_size)

    def _reserve(self, row: _Row, num_context: int, tail: Tail) -> _Planned | None:
        """Make room in the cache: drop the tail, then preempt the newest requests, before giving up the step."""
        cache = row.cache
        if cache is None:  # preempted earlier in this very plan
            return None
        if not cache.reserve(cache.length + num_context + len(tail)):
            tail = ()
            while not cache.reserve(cache.length + num_context):
                if not self._preempt_newest(row):
                    return None
        return _Planned(row, cache, num_context, tail, samples=num_context == row.pending)

    def _preempt_newest(self, keep: _Row) -> bool:
        """Send the newest running request back to the queue; its committed tokens stay, its cache is recomputed.

        Keyed sampling makes the continuation the same. Returns False when `keep` itself had to go.
        """
        row = self._running.pop()
        if row.cache is not None:
            row.cache.free()
        row.cache = None
        self._waiting.appendleft(row)
        self.preemptions += 1
        return row is not keep

    def _commit(self, planned: _Planned, verified: VerifiedRow) -> RowOutput:
        row, cache = planned.row, planned.cache
        if verified.problem:
            return self._fail(row, verified.problem)
        output = RowOutput(
            request_id=row.request.request_id,
            start=row.committed,
            token_ids=verified.token_ids,
            logprobs=verified.logprobs,
            num_drafted=len(planned.tail),
            num_accepted=verified.num_accepted,
            margins=verified.margins,
        )
        cut_at_stop(output, row.stop_ids, row.request.sampling, len(row.context), self.max_model_len)
        if self._model.exports_states:
            end = len(row.context) + len(output.token_ids) - 1
            output.hidden_start, output.hidden_states = row.states.hand_out(end)
        cache.truncate(len(row.context) + verified.num_accepted)
        row.context.extend(output.token_ids)
        if output.finish_reason is not None:
            self.remove(output.request_id)
        return output

    def _fail(self, row: _Row, error: str) -> RowOutput:
        """Logits that cannot be sampled from end this request alone."""
        self.remove(row.request.request_id)
        return RowOutput(row.request.request_id, row.committed, [], [], finish_reason="error", error=error)


def _keep_states(plan: Sequence[_Planned], verified: Sequence[VerifiedRow], states: np.ndarray) -> None:
    """Each row takes over the states of its positions in this forward; `states` are in the order of the plan."""
    begin, results = 0, iter(verified)
    for planned in plan:
        end = begin + planned.num_context + len(planned.tail)
        accepted = next(results).num_accepted if planned.samples else 0
        first = planned.cache.length - (end - begin)  # the forward has lengthened the cache
        planned.row.states.keep(first, states[begin:end], planned.num_context, accepted)
        begin = end
