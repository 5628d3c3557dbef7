"""Target engine over vLLM: its scheduler, paged attention and kernels, our drafts and keyed sampling.

vLLM plans and computes; what a token is and whether a draft was right is decided by the same code as in the `hf` engine
(`verification.py`), inside vLLM's worker (`vllm_worker.py`). Stops are ours, too, so vLLM knows of none but the length.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specactor_ray.config.schema import TargetConfig
from specactor_ray.errors import InputError
from specactor_ray.modeling.loading import load_eos_token_ids, resolve_model, weight_shapes
from specactor_ray.modeling.packed_linear import check_names_and_shapes
from specactor_ray.targets.base import RowOutput, StepResult, Tail, TargetRequest
from specactor_ray.targets.requests import cut_at_stop, refuse_impossible, stop_ids
from specactor_ray.targets.states import StateExport
from specactor_ray.targets.verification import cut_tail
from specactor_ray.targets.vllm_bridge import CoreSettings, EngineCoreHandle, RowReport


@dataclass(slots=True)
class _Row:
    """A request in the engine."""

    request: TargetRequest
    core_id: str
    """Its id inside vLLM: never used twice, since vLLM forgets an id one step late."""
    stops: frozenset[int]
    committed: int
    states: StateExport = field(default_factory=StateExport)

    @property
    def context(self) -> int:
        """Prompt and output tokens."""
        return len(self.request.prompt_token_ids) + self.committed


class VllmEngine:
    """`TargetEngine` over vLLM's engine core in this process.

    Args:
        settings: What the core is made with.
        eos_token_ids: Ids that end an output unless the request ignores them.

    Raises:
        ConfigError: vLLM is missing or of an untested version.
        ModelLoadError: vLLM cannot serve the model with these settings.
    """

    def __init__(self, settings: CoreSettings, eos_token_ids: Sequence[int] = ()) -> None:
        self._core = EngineCoreHandle(settings)
        self._settings, self._eos = settings, frozenset(eos_token_ids)
        self.vocab_size, self.max_model_len = self._core.vocab_size, self._core.max_model_len
        self.weight_version = 0
        self._rows: dict[str, _Row] = {}
        self._by_core_id: dict[str, str] = {}
        self._numbers = itertools.count()

    @classmethod
    def from_config(cls, config: TargetConfig, max_drafts: int) -> VllmEngine:
        """Load the configured model.

        Args:
            config: The target's section.
            max_drafts: Most draft tokens of a request in one step.
        """
        settings = CoreSettings(
            str(resolve_model(config.model)),
            config.dtype,
            config.max_model_len,
            config.max_batch,
            config.max_step_tokens,
            int(config.kv_cache_gb * 2**30),
            max_drafts,
            tuple(config.hidden_layers),
            config.record_margins,
            config.trust_remote_code,
            config.compiled,
            config.tensor_parallel,
            config.cores,
        )
        return cls(settings, load_eos_token_ids(config.model, trust_remote_code=config.trust_remote_code))

    def add(self, request: TargetRequest) -> None:
        if request.request_id in self._rows:
            raise InputError(f"request {request.request_id} is already running")
        refuse_impossible(request, self.vocab_size, self.max_model_len)
        committed = len(request.committed_token_ids)
        core_id = f"{request.request_id}#{next(self._numbers)}"
        row = _Row(request, core_id, stop_ids(request.sampling, self._eos), committed)
        context = [*request.prompt_token_ids, *request.committed_token_ids]
        self._core.add(core_id, context, request.sampling, committed, request.sampling.max_tokens - committed)
        self._rows[request.request_id], self._by_core_id[core_id] = row, request.request_id

    def remove(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            del self._by_core_id[row.core_id]
            self._core.abort(row.core_id)

    def decoding(self) -> list[str]:
        return [request_id for request_id, row in self._rows.items() if self._core.samples_next(row.core_id)]

    def has_work(self) -> bool:
        return bool(self._rows)

    def step(self, tails: Mapping[str, Tail]) -> StepResult:
        begin = time.perf_counter()
        done = self._core.step(self._drafts(tails))
        result = StepResult(sampling_s=done.sampling_s, num_tokens=done.num_tokens)
        result.forward_s = time.perf_counter() - begin - done.sampling_s
        for core_id, report in done.rows.items():
            context = report.num_scheduled - report.num_drafted
            if context > 1:
                result.num_prefill_tokens += context
            request_id = self._by_core_id.get(core_id)
            if request_id is None:
                continue
            row = self._rows[request_id]
            if report.states is not None:
                row.states.keep(report.first, report.states, context, report.verified.num_accepted)
            if report.verified.token_ids or report.verified.problem:
                result.outputs.append(self._commit(row, report))
        return result

    def _drafts(self, tails: Mapping[str, Tail]) -> dict[str, Sequence[int]]:
        """Tails by vLLM's ids, cut so that their tokens and the one the target adds still fit."""
        decoding = self.decoding() if self._settings.max_drafts else []
        budget = self._settings.max_step_tokens - len(decoding)
        drafts: dict[str, Sequence[int]] = {}
        for request_id in decoding:
            row = self._rows[request_id]
            limits = row.request.sampling.max_tokens - row.committed - 1, self.max_model_len - row.context - 1
            room = min(*limits, self._settings.max_drafts)
            tail = cut_tail(tails.get(request_id, ()), min(room, budget), self.vocab_size)
            drafts[row.core_id] = tail
            budget -= len(tail)
        return drafts

    def _commit(self, row: _Row, report: RowReport) -> RowOutput:
        request_id, verified = row.request.request_id, report.verified
        if verified.problem:
            self.remove(request_id)
            return RowOutput(request_id, row.committed, [], [], finish_reason="error", error=verified.problem)
        output = RowOutput(
            request_id,
            row.committed,
            verified.token_ids,
            verified.logprobs,
            report.num_drafted,
            verified.num_accepted,
            verified.margins,
        )
        cut_at_stop(output, row.stops, row.request.sampling, row.context, self.max_model_len)
        if report.states is not None:
            output.hidden_start, output.hidden_states = row.states.hand_out(row.context + len(output.token_ids) - 1)
        row.committed += len(output.token_ids)
        if output.finish_reason is not None:
            self.remove(request_id)
        return output

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        shapes, tied = self._expected_weights
        shared = {name: state_dict[source] for name, source in tied.items() if source in state_dict}
        check_names_and_shapes({**shared, **state_dict}, shapes)
        self._core.load_weights(state_dict)
        self.weight_version = version

    @functools.cached_property
    def _expected_weights(self) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        """Shapes and ties, which no update changes."""
        return weight_shapes(self._settings.model, trust_remote_code=self._settings.trust_remote_code)

    def sleep(self) -> None:
        if self._rows:
            raise InputError("the engine cannot sleep while requests are running")
        self._core.sleep()

    def wake(self) -> None:
        self._core.wake()

    def close(self) -> None:
        for request_id in list(self._rows):
            self.remove(request_id)
        self._core.close()
