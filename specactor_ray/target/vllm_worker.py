"""Part of the `vllm` engine in vLLM's workers (`worker_cls`): keyed sampling in place of vLLM's samplers, its reports,
and hidden states. Only vLLM imports this module.

It uses these non-public parts of the model runner: `sampler` and `rejection_sampler` (replaced), `speculative_config`,
`input_batch`, `requests`, `num_scheduled_tokens`, `discard_request_mask`, `execute_model_state`,
`use_aux_hidden_state_outputs`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from vllm.platforms import current_platform
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.sampler import Sampler

from specactor_ray.core.errors import ModelLoadError
from specactor_ray.core.ragged import begins
from specactor_ray.core.types import SamplingParams
from specactor_ray.models.ragged_model import HEAD_INPUT
from specactor_ray.models.weight_buckets import to_wire
from specactor_ray.sampling.keyed import verify_arrays, warm_up
from specactor_ray.sampling.probable import most_probable
from specactor_ray.sampling.rules import Rules
from specactor_ray.target.vllm import CoreStep
from specactor_ray.target.vllm_settings import KEY, WEIGHTS_FILE
from specactor_ray.target.vllm_weights import replace_weights

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker

_PAD = -1
"""vLLM's value for "no token" in the output of a sampler."""
_NO_DRAFTS = np.zeros(0, np.int32)


class KeyedWorker(_Worker):
    """vLLM's worker for this platform, with keyed sampling."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and set the exported states before the compilation."""
        if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()  # Linux permits tiles on request; oneDNN, kept off them (`models`), makes none
        settings = self.vllm_config.additional_config[KEY]
        layers = tuple(settings["hidden_layers"])
        auxiliary = sorted({layer + 1 for layer in layers if layer != HEAD_INPUT})  # vLLM numbers inputs of layers
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
        # All ranks choose the same tokens from the same logits; the first rank reports.
        self._keyed = KeyedSampler(runner, layers if self.rank == 0 else (), settings["record_margins"])

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        """Warm up with vLLM's own samplers, which accept rows without requests; then replace them."""
        times = super().compile_or_warm_up_model(*args, **kwargs)
        self._keyed.install()
        margins = self.vllm_config.additional_config[KEY]["record_margins"]
        warm_up(self.model_runner.device, self.model_runner.dtype, 1 + margins)
        return times

    def replace_weights(self, weights: Mapping[str, torch.Tensor] | None = None, folder: str | None = None) -> None:
        """Load all weights by the names of a checkpoint's files, given or in a file of `folder_of`."""
        if weights is None:
            weights = load_file(Path(str(folder), WEIGHTS_FILE))
        replace_weights(self.model_runner.get_model(), self.vllm_config, weights.items())

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the model. A step without drafts runs as without speculation, unless layers keep a state per draft."""
        drafts = scheduler_output.scheduled_spec_decode_tokens or self.vllm_config.model_config.is_hybrid
        self.model_runner.speculative_config = self.vllm_config.speculative_config if drafts else None
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's output; that of the first rank has the step's report."""
        self._keyed.begin(self.model_runner.execute_model_state)
        output = super().sample_tokens(grammar_output)
        if self.rank == 0:
            setattr(output, KEY, self._keyed.step)
        return output


class _Sampler(Sampler):
    """Replaces vLLM's sampler; the log-probabilities of prompts are vLLM's own."""

    def __init__(self, sample: Callable[..., SamplerOutput]) -> None:
        super().__init__()
        self._sample = sample

    def forward(self, *args: Any, **kwargs: Any) -> SamplerOutput:
        return self._sample(*args, **kwargs)


class KeyedSampler:
    """Replaces vLLM's sampler and rejection sampler of its model `runner`. `hidden_layers`: as in `RaggedModel`, those
    whose output states are exported, in this order."""

    def __init__(self, runner: Any, hidden_layers: tuple[int, ...], record_margins: bool) -> None:
        self._runner, self._layers, self._margins = runner, hidden_layers, record_margins
        self._order = sorted({layer for layer in hidden_layers if layer != HEAD_INPUT})
        self._rules = Rules(32, runner.device)
        """Sampling rules by the engine's row; positions are those in the sequence."""
        self._ids: list[str] = []
        """vLLM's request ids of the last batch."""
        self._rows = np.zeros(0, np.int32)
        """int32: rows of the last batch."""
        self._state: Any = None
        self.step: CoreStep | None = None
        """Report of the last step; None if it sampled nothing."""

    def install(self) -> None:
        self._runner.sampler, self._runner.rejection_sampler = _Sampler(self.sample), self.verify

    def begin(self, state: Any) -> None:
        """Begin the sampling of a step; `state` is the runner's `execute_model_state`, which vLLM drops before."""
        self._state, self.step = state if self._layers else None, None

    def sample(self, logits: torch.Tensor, sampling_metadata: Any, **_: Any) -> SamplerOutput:
        """Sample one token per request."""
        del sampling_metadata
        return self._choose(logits, np.zeros(logits.shape[0], np.int64), _NO_DRAFTS)

    def verify(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> SamplerOutput:
        """Sample for each request the accepted drafts and one more token."""
        del draft_probs, sampling_metadata
        return self._choose(logits, np.array(metadata.num_draft_tokens, np.int64), metadata.draft_token_ids)

    def _exported(self, num_tokens: int) -> np.ndarray | None:
        state, self._state = self._state, None
        if state is None:
            return None
        by_layer = dict(zip(self._order, state.aux_hidden_states or (), strict=True))
        by_layer[HEAD_INPUT] = state.hidden_states
        return to_wire(torch.cat([by_layer[layer][:num_tokens] for layer in self._layers], dim=-1))

    def _choose(self, logits: torch.Tensor, drafted: np.ndarray, drafts: np.ndarray | torch.Tensor) -> SamplerOutput:
        begin = time.perf_counter()
        runner, n = self._runner, len(drafted)
        rows = self._rows_of(runner.input_batch.req_ids)
        firsts = runner.input_batch.num_computed_tokens_cpu[:n].astype(np.int64)
        counts = runner.num_scheduled_tokens.np[:n].astype(np.int64)
        # Tokens for a request whose prompt is not in the cache yet do not count.
        sampled = ~runner.discard_request_mask.np[:n]
        tails = begins(drafted)
        offsets, positions = np.arange(n) + tails[:-1], firsts + counts - drafted
        chosen = (offsets, tails, positions, rows)
        if not sampled.all():
            chosen = (offsets[sampled], begins(drafted[sampled]), positions[sampled], rows[sampled])
        offsets, tails, positions, slots = chosen
        found = verify_arrays(logits, offsets, tails, drafts, positions, slots, self._rules, 1 + self._margins)
        tops = most_probable(logits, offsets, found, slots, self._rules)
        tokens = np.full((n, found.width), _PAD, np.int32)
        tokens[sampled] = found.tokens
        tokens[tokens[:, 0] == _PAD, 0] = 0  # also in a row that cannot be sampled from: the engine drops its request
        spent_s = time.perf_counter() - begin
        states = self._exported(int(counts.sum()))
        self.step = CoreStep(rows, firsts, counts, drafted, sampled, found, states, tops, spent_s)
        return SamplerOutput(torch.from_numpy(tokens), None)  # on the host, where vLLM reads it

    def _rows_of(self, request_ids: list[str]) -> np.ndarray:
        """Rows of a batch, int32. Rules are written when a request enters the batch for the first time or again."""
        if request_ids == self._ids:
            return self._rows
        known = dict(zip(self._ids, self._rows.tolist(), strict=True))
        for request_id in request_ids:
            if request_id not in known:
                keyed = self._runner.requests[request_id].sampling_params.extra_args[KEY]
                temperature, top_k, top_p, seed, tops = keyed["rule"]
                sampling = SamplingParams(temperature, top_k, top_p, seed=seed, logprobs=tops)
                self._rules.write([keyed["row"]], [sampling], [keyed["base"]])
                known[request_id] = keyed["row"]
        self._ids = list(request_ids)
        self._rows = np.array([known[request_id] for request_id in request_ids], np.int32)
        return self._rows
