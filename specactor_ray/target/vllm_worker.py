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
from specactor_ray.models.ragged_model import HEAD_INPUT
from specactor_ray.models.wire import to_wire
from specactor_ray.ragged import begins
from specactor_ray.sampling.keyed import verify_arrays, warm_up
from specactor_ray.sampling.rules import Rules
from specactor_ray.target.vllm_bridge import KEY, CoreStep

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker

_PAD = -1
"""vLLM's mark for "no token" in the output of a sampler."""


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
        self._rules = Rules(32, runner.device)
        """By the engine's row; positions are those in the sequence."""
        self._row_of: dict[str, int] = {}
        """vLLM's request id → row, of the requests whose rules are written."""
        self._report = _report((), (), ())
        self._sample_tokens: Any = None

    def install(self) -> None:
        runner = self._runner
        runner.sampler, runner.rejection_sampler = self.sample, self.verify
        self._sample_tokens, runner.sample_tokens = runner.sample_tokens, self.sample_tokens

    def sample(self, logits: torch.Tensor, sampling_metadata: Any, **_: Any) -> SamplerOutput:
        """One token per request."""
        del sampling_metadata
        return self._choose(logits, np.zeros(logits.shape[0], np.int64), np.zeros(0, np.int32))

    def verify(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> SamplerOutput:
        """Per request the accepted drafts and one token more."""
        del draft_probs, sampling_metadata
        return self._choose(logits, np.array(metadata.num_draft_tokens, np.int64), metadata.draft_token_ids)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's `sample_tokens`, with a look at what the forward was made of."""
        state, batch = self._runner.execute_model_state, self._runner.input_batch
        self._report = _report((), (), ())
        if state is not None:
            ids, scheduled = batch.req_ids, state.scheduler_output.num_scheduled_tokens
            firsts = batch.num_computed_tokens_cpu[: len(ids)]
            self._report = _report(self._rows(ids), firsts, [scheduled[request_id] for request_id in ids])
            self._report.states = self._exported(state, int(self._report.counts.sum()))
        return self._sample_tokens(grammar_output)

    def take_report(self) -> CoreStep:
        """The report of the last step; the next one begins empty."""
        report, self._report = self._report, _report((), (), ())
        return report

    def _exported(self, state: Any, num_tokens: int) -> np.ndarray | None:
        if not self._layers:
            return None
        by_layer = dict(zip(self._order, state.aux_hidden_states or (), strict=True))
        by_layer[HEAD_INPUT] = state.hidden_states
        return to_wire(torch.cat([by_layer[layer][:num_tokens] for layer in self._layers], dim=-1))

    def _choose(self, logits: torch.Tensor, drafted: np.ndarray, drafts: np.ndarray | torch.Tensor) -> SamplerOutput:
        begin = time.perf_counter()
        report = self._report
        report.drafted = drafted
        # What is chosen for a request whose prompt is not in the cache yet does not count.
        report.sampled = sampled = ~self._runner.discard_request_mask.np[: len(drafted)]
        firsts = np.arange(len(drafted)) + np.cumsum(drafted) - drafted
        report.found = found = verify_arrays(
            logits,
            firsts[sampled],
            begins(drafted[sampled]),
            drafts,
            (report.firsts + report.counts - drafted)[sampled],
            report.rows[sampled],
            self._rules,
            record_margins=self._margins,
        )
        tokens = np.full((len(drafted), found.width), _PAD, np.int32)
        tokens[sampled] = found.tokens
        tokens[tokens[:, 0] == _PAD, 0] = 0  # also of a row that cannot be sampled from: the engine drops its request
        report.sampling_s = time.perf_counter() - begin
        return SamplerOutput(torch.from_numpy(tokens).to(logits.device), None)

    def _rows(self, request_ids: Sequence[str]) -> list[int]:
        """Rows of a batch. Rules are written at the first sight of a request, and when it comes back."""
        row_of = self._row_of
        if fresh := [request_id for request_id in request_ids if request_id not in row_of]:
            self._row_of = row_of = {one: row_of[one] for one in request_ids if one in row_of}
            for request_id in fresh:
                keyed = self._runner.requests[request_id].sampling_params.extra_args[KEY]
                temperature, top_k, top_p, seed = keyed["rule"]
                sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
                self._rules.write([keyed["row"]], [sampling], [-keyed["prompt"]])
                row_of[request_id] = keyed["row"]
        return [row_of[request_id] for request_id in request_ids]


def _report(rows: Sequence[int], firsts: Sequence[int] | np.ndarray, counts: Sequence[int]) -> CoreStep:
    """A step in which nothing is sampled yet."""
    columns = np.array(rows, np.int32), np.array(firsts, np.int64), np.array(counts, np.int64)
    return CoreStep(*columns, np.zeros(len(rows), np.int64), np.zeros(len(rows), np.bool_))
