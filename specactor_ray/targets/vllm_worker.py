"""What runs inside vLLM's workers: keyed sampling instead of vLLM's samplers, reports of it, and hidden states.

Only vLLM imports this module (`worker_cls`). What it uses of the model runner and is not public: `sampler` and
`rejection_sampler` (replaced), `sample_tokens` (wrapped), `input_batch`, `requests`, `discard_request_mask`,
`execute_model_state`, `use_aux_hidden_state_outputs`. See `vllm_bridge.py` for the other half.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.outputs import SamplerOutput

from specactor_ray.errors import ModelLoadError
from specactor_ray.messages import SamplingParams
from specactor_ray.modeling.ragged_model import HEAD_INPUT
from specactor_ray.modeling.wire import to_wire
from specactor_ray.sampling import warm_up
from specactor_ray.targets.verification import DraftedRow, VerifiedRow, verify
from specactor_ray.targets.vllm_bridge import KEY, CoreStep, RowReport

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker

_PAD = -1
"""vLLM's mark for "no token" in the output of a sampler."""
_THROWN_AWAY = DraftedRow((), SamplingParams(temperature=0.0), 0)
"""For a request whose prompt is not in the cache yet: what is chosen for it does not count."""


class KeyedWorker(_Worker):
    """vLLM's worker for this platform, with keyed sampling."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load, and decide what is exported before anything is compiled."""
        settings = self.vllm_config.additional_config[KEY]
        layers = tuple(settings["hidden_layers"])
        auxiliary = sorted({layer + 1 for layer in layers if layer != HEAD_INPUT})  # vLLM counts inputs of layers
        runner = self.model_runner
        runner.use_aux_hidden_state_outputs = bool(auxiliary)
        super().load_model(*args, **kwargs)
        if auxiliary:
            count = len(runner.get_model().model.layers)
            if auxiliary[-1] > count:
                raise ModelLoadError(
                    f"hidden layer {auxiliary[-1] - 1} does not exist: the model has layers 0 to {count - 1}"
                )
            runner.get_model().set_aux_hidden_state_layers(tuple(auxiliary))
        # All ranks choose the same tokens from the same logits; the first one tells.
        self._keyed = KeyedSampler(runner, layers if self.rank == 0 else (), settings["record_margins"])

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        """Warm up with vLLM's own samplers, which take rows without requests; then put ours in their place."""
        times = super().compile_or_warm_up_model(*args, **kwargs)
        self._keyed.install()
        margins = self.vllm_config.additional_config[KEY]["record_margins"]
        warm_up(self.model_runner.device, self.model_runner.dtype, record_margins=margins)
        return times

    def specactor_report(self) -> CoreStep | None:
        """What the last step did, from the first rank."""
        report = self._keyed.take_report()
        return report if self.rank == 0 else None


class KeyedSampler:
    """Stands where vLLM's sampler and rejection sampler stood.

    Args:
        runner: vLLM's model runner.
        hidden_layers: As in `RaggedModel`: decoder layers whose output states are exported, in this order.
        record_margins: Record perturbed top-2 margins.
    """

    def __init__(self, runner: Any, hidden_layers: tuple[int, ...], record_margins: bool) -> None:
        self._runner, self._layers, self._margins = runner, hidden_layers, record_margins
        self._order = sorted({layer for layer in hidden_layers if layer != HEAD_INPUT})
        self._report = CoreStep({})
        self._sample_tokens: Any = None

    def install(self) -> None:
        runner = self._runner
        runner.sampler, runner.rejection_sampler = self.sample, self.verify
        self._sample_tokens, runner.sample_tokens = runner.sample_tokens, self.sample_tokens

    def sample(self, logits: torch.Tensor, sampling_metadata: Any, **_: Any) -> SamplerOutput:
        """One token per request."""
        del sampling_metadata
        return self._choose(logits, [()] * logits.shape[0])

    def verify(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> SamplerOutput:
        """Per request the accepted drafts and one token more."""
        del draft_probs, sampling_metadata
        drafts = metadata.draft_token_ids.tolist()
        tails, begin = [], 0
        for count in metadata.num_draft_tokens:
            tails.append(tuple(drafts[begin : begin + count]))
            begin += count
        return self._choose(logits, tails)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's `sample_tokens`, with a look at what the forward was made of."""
        state, batch = self._runner.execute_model_state, self._runner.input_batch
        self._report = CoreStep({})
        if state is not None:
            scheduled = state.scheduler_output.num_scheduled_tokens
            self._report.num_tokens = sum(scheduled.values())
            states, begin = self._exported(state, self._report.num_tokens), 0
            for row, request_id in enumerate(batch.req_ids):
                report = RowReport(VerifiedRow(), 0, scheduled[request_id])
                if states is not None:
                    report.first = int(batch.num_computed_tokens_cpu[row])
                    report.states = states[begin : begin + report.num_scheduled]
                    begin += report.num_scheduled
                self._report.rows[request_id] = report
        return self._sample_tokens(grammar_output)

    def take_report(self) -> CoreStep:
        """The report of the last step; the next one begins empty."""
        report, self._report = self._report, CoreStep({})
        return report

    def _exported(self, state: Any, num_tokens: int) -> np.ndarray | None:
        if not self._layers:
            return None
        by_layer = dict(zip(self._order, state.aux_hidden_states or (), strict=True))
        by_layer[HEAD_INPUT] = state.hidden_states
        return to_wire(torch.cat([by_layer[layer][:num_tokens] for layer in self._layers], dim=-1))

    def _choose(self, logits: torch.Tensor, tails: Sequence[tuple[int, ...]]) -> SamplerOutput:
        begin = time.perf_counter()
        runner, count = self._runner, len(tails)
        request_ids = runner.input_batch.req_ids[:count]
        prefilling = runner.discard_request_mask.np[:count]
        rows = [
            _THROWN_AWAY if skip else self._row(request_id, tail)
            for request_id, tail, skip in zip(request_ids, tails, prefilling, strict=True)
        ]
        verified = verify(logits, rows, self._margins)
        tokens = np.full((count, 1 + max(map(len, tails))), _PAD, dtype=np.int32)
        for i, (request_id, result) in enumerate(zip(request_ids, verified, strict=True)):
            chosen = result.token_ids or [0]  # a row that cannot be sampled from: the engine drops its request
            tokens[i, : len(chosen)] = chosen
            if not prefilling[i]:
                report = self._report.rows[request_id]
                report.verified, report.num_drafted = result, len(tails[i])
        self._report.sampling_s += time.perf_counter() - begin
        return SamplerOutput(torch.from_numpy(tokens).to(logits.device), None)

    def _row(self, request_id: str, tail: tuple[int, ...]) -> DraftedRow:
        state = self._runner.requests[request_id]
        keyed = state.sampling_params.extra_args[KEY]
        temperature, top_k, top_p, seed = keyed["rule"]
        sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        return DraftedRow(tail, sampling, keyed["first"] + len(state.output_token_ids))
