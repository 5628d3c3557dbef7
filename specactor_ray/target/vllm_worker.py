"""Part of the `vllm` engine in vLLM's workers (`worker_cls`): keyed sampling in place of vLLM's samplers, drafts in
place of its speculator, and the reports. Only vLLM imports this module.

Nothing here waits for the device between the launch of a forward and the read of its report.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from vllm.platforms import current_platform
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadataBuilder
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu import model_runner as v2
from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from specactor_ray.core.errors import ModelLoadError
from specactor_ray.core.types import SamplingParams
from specactor_ray.models.ragged_model import HEAD_INPUT
from specactor_ray.models.weight_buckets import to_wire
from specactor_ray.sampling.keyed import verify_on_device, warm_up
from specactor_ray.sampling.probable import ranked
from specactor_ray.sampling.rules import Rules
from specactor_ray.target.vllm import CoreStep, states_group
from specactor_ray.target.vllm_cpu import replaced
from specactor_ray.target.vllm_settings import KEY, WEIGHTS_FILE
from specactor_ray.target.vllm_weights import replace_weights

if current_platform.is_cpu():
    from vllm.v1.worker.cpu import model_runner as platform
    from vllm.v1.worker.cpu.model_runner import CPUModelRunner as _Runner
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as _Runner
    from vllm.v1.worker.gpu_worker import Worker as _Worker


class KeyedWorker(_Worker):
    """vLLM's worker for this platform, with keyed sampling."""

    def init_device(self) -> None:
        if not current_platform.is_cpu():
            super().init_device()
            return
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()  # Linux permits tiles on request; oneDNN, kept off them (`models`), makes none
        with replaced(platform, CPUModelRunner=KeyedRunner):
            super().init_device()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Initialize the cache, and hidden states beside it, which leave a GPU with it when the engine sleeps."""
        super().initialize_from_config(kv_cache_config)
        if self.rank == 0:
            with self._maybe_get_memory_pool_context(tag="kv_cache"):
                self.model_runner.keep_states()

    def states(self, slots: np.ndarray) -> Any:
        """Hidden states at slots of the cache, int64 `(n,)`; None in ranks without."""
        if self.rank:
            return None
        states = self.model_runner.states_at(slots)
        return states if self.parallel_config.world_size == 1 else to_wire(states)

    def _make_model_runner(self) -> Any:
        return KeyedRunner(self.vllm_config, self.device)

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        """Warm up with vLLM's own samplers, which accept rows without requests; then replace them."""
        times = super().compile_or_warm_up_model(*args, **kwargs)
        self.model_runner.install(reports=self.rank == 0)
        return times

    def use_graphs(self, on: bool) -> None:
        """Run steps in CUDA graphs, or without."""
        self.model_runner.cudagraph_manager._graphs_captured = on

    def drop_full_graphs(self) -> None:
        """Drop the graphs of whole steps; those of parts of a layer remain."""
        manager = self.model_runner.cudagraph_manager
        for descriptions in manager._candidates.values():
            descriptions[:] = [one for one in descriptions if one.cg_mode != v2.CUDAGraphMode.FULL]
        manager.graphs.clear()

    def whole_graphs(self) -> tuple[set[int | None], str]:
        """Positions of every request in the steps that have whole graphs, None for any numbers; and the attention
        backend that has none of these, if there is one."""
        whole = self.model_runner.cudagraph_manager._capture_descs.get(v2.CUDAGraphMode.FULL, ())
        return {one.uniform_token_count for one in whole}, self.model_runner.without_varlen

    def replace_weights(self, weights: Mapping[str, torch.Tensor] | None = None, folder: str | None = None) -> None:
        """Load all weights by the names of a checkpoint's files, given or in a file of `folder_of`."""
        if weights is None:
            weights = load_file(Path(str(folder), WEIGHTS_FILE))
        replace_weights(self.model_runner.get_model(), self.vllm_config, weights.items())


class NothingProposed(BaseSpeculator):
    """A speculator that only makes vLLM reserve room: drafts come with the plan of a step."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, config: Any, device: torch.device, req_states: Any) -> None:
        del req_states
        shape = config.scheduler_config.max_num_seqs, config.num_speculative_tokens
        self._none = torch.zeros(shape, dtype=torch.int64, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        del cudagraph_mode

    def capture(self) -> None:
        pass

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        del args, kwargs
        return self._none[: input_batch.num_reqs]


def add_plain_steps(graphs: v2.ModelCudaGraphManager) -> None:
    """Add graphs of steps without drafts, where vLLM's graphs of whole steps are for the most drafts of each request
    only."""
    whole = graphs._capture_descs.get(full := v2.CUDAGraphMode.FULL, [])
    if {one.uniform_token_count for one in whole} - {1, None}:
        begin, sizes = 0, graphs.compilation_config.cudagraph_capture_sizes
        for rows in sorted({min(size, graphs.max_num_reqs) for size in sizes}):
            whole.append(one := v2.BatchExecutionDescriptor(full, rows, rows, uniform_token_count=1))
            for positions in range(begin, rows + 1):
                graphs._candidates.setdefault((positions, 0), []).insert(0, one)
            begin = rows + 1
        whole.sort(key=lambda one: one.num_tokens, reverse=True)  # captured in this order


class KeyedRunner(_Runner):
    """vLLM's V2 model runner for this platform: keeps hidden states, takes drafts from the plan of a step, and
    attaches a report to its output."""

    def __init__(self, *args: Any) -> None:
        with replaced(v2, init_speculator=NothingProposed):
            super().__init__(*args)
        settings = self.vllm_config.additional_config[KEY]
        self._layers, self._margins = tuple(settings["hidden_layers"]), bool(settings["record_margins"])
        # vLLM numbers the inputs of layers.
        self._auxiliary = tuple(sorted({layer + 1 for layer in self._layers if layer != HEAD_INPUT}))
        self.use_aux_hidden_state_outputs = bool(self._auxiliary)
        self._drafts: Mapping[str, list[int]] = {}
        self._reports = False
        self.without_varlen = ""

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Initialize the cache, and graphs of whole steps for any number of drafts of a request, else for none and for
        all of them."""
        made = v2.ModelCudaGraphManager

        def manager(*args: Any, **options: Any) -> Any:
            limits = self.attn_groups, self.vllm_config, self.decode_query_len
            self.without_varlen, _ = get_varlen_cudagraph_unsupported_backend(*limits) or ("", None)
            varlen = self.num_speculative_steps > 0 and not self.without_varlen
            graphs = made(*args, **{**options, "varlen_decode": varlen})
            builders = (group.get_metadata_builder(0) for groups in self.attn_groups for group in groups)
            if not any(isinstance(one, BaseMambaAttentionMetadataBuilder) for one in builders):
                add_plain_steps(graphs)  # Mamba's captures must have the most drafts
            return graphs

        with replaced(v2, ModelCudaGraphManager=manager):
            super().initialize_kv_cache(*args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and set the exported states before the compilation."""
        with replaced(v2, set_eagle3_aux_hidden_state_layers=lambda model, *_: self._export(model)):
            super().load_model(*args, **kwargs)

    def _export(self, model: Any) -> None:
        count = len(model.model.layers)
        if self._auxiliary[-1] > count:
            raise ModelLoadError(
                f"hidden layer {self._auxiliary[-1] - 1} does not exist: the model has layers 0 to {count - 1}"
            )
        model.set_aux_hidden_state_layers(self._auxiliary)

    def install(self, *, reports: bool) -> None:
        """Replace vLLM's samplers; `reports`: whether outputs get reports, those of the first rank."""
        self._reports = reports
        replaced: Any = self.__dict__["sampler"], self.__dict__["rejection_sampler"]
        self.sampler = KeyedSampler(replaced[0], self._margins)
        self.rejection_sampler = self.sampler if replaced[1] is not None else None
        hidden = torch.zeros(2, self.model_config.get_hidden_size(), dtype=self.dtype, device=self.device)
        with torch.inference_mode():
            warm_up(ranks=1 + self._margins, logits=self.model.compute_logits(hidden))

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._drafts = {} if kwargs.get("dummy_run") else scheduler_output.scheduled_spec_decode_tokens
        return super().execute_model(scheduler_output, *args, **kwargs)

    def prepare_inputs(self, *args: Any) -> Any:
        """Copy the drafts of the plan to the device, after new requests have their slots."""
        if self._drafts:
            states = self.req_states
            slots = np.array([states.req_id_to_index[name] for name in self._drafts], np.int64)
            drafts = np.zeros((len(slots), states.draft_tokens.shape[1]), np.int64)
            for i, tail in enumerate(self._drafts.values()):
                drafts[i, : len(tail)] = tail
            on_device = (async_tensor_h2d(part, device=self.device) for part in (slots, drafts))
            states.draft_tokens.index_copy_(0, *on_device)
        batch, graph = super().prepare_inputs(*args), args[2]
        if graph.max_query_len is not None:  # that of the capture, of which attention's schedule depends
            batch.max_query_len = graph.max_query_len
        return batch

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's output; that of the first rank has the step's report."""
        state = self.execute_model_state
        output = super().sample_tokens(grammar_output)
        if not self._reports or output is None:
            return output
        if self._layers:
            self._store_states(state)
        return _Output(output, self.sampler.step, self.output_copy_stream)

    def keep_states(self) -> None:
        """Allocate hidden states for all slots of the cache, `(slots, layers * hidden)`."""
        group, block = states_group(self.kv_cache_config)
        size = len(self._layers) * self.model_config.get_hidden_size()
        slots = self.kv_cache_config.num_blocks * block if size else 0
        self._states = torch.zeros((slots, size), dtype=self.dtype, device=self.device)
        self._cached_layer = self.kv_cache_config.kv_cache_groups[group].layer_names[0] if size else ""

    def states_at(self, slots: np.ndarray) -> torch.Tensor:
        """Copies of the hidden states at slots of the cache, int64 `(n,)`, behind all launched steps."""
        return self._states.index_select(0, async_tensor_h2d(slots, device=self.device))

    def _store_states(self, state: Any) -> None:
        """Store the hidden states of a step at the slots of its keys and values."""
        order = sorted({layer for layer in self._layers if layer != HEAD_INPUT})
        by_layer = dict(zip(order, state.aux_hidden_states or (), strict=True))
        by_layer[HEAD_INPUT] = state.hidden_states
        count = int(state.input_batch.num_scheduled_tokens.sum())
        states = torch.cat([by_layer[layer][:count] for layer in self._layers], dim=-1)
        self._states.index_copy_(0, state.slot_mappings_by_layer[self._cached_layer][:count], states)


class KeyedSampler(Sampler):
    """Replaces vLLM's sampler and rejection sampler; vLLM calls both with the logits and its batch."""

    def __init__(self, replaced: Sampler, record_margins: bool) -> None:
        self.__dict__.update(vars(replaced))
        self._margins = record_margins
        self._rules = Rules(self.req_states.max_num_reqs, self.req_states.device)
        """Sampling rules by vLLM's slot; positions are those in the sequence."""
        self.step: dict[str, Any] = {}
        """Fields of the last step's report; tensors are on the device."""

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        super().add_request(req_idx, sampling_params)
        keyed = (sampling_params.extra_args or {}).get(KEY)
        if keyed is not None:
            temperature, top_k, top_p, seed, tops = keyed["rule"]
            sampling = SamplingParams(temperature, top_k, top_p, seed=seed, logprobs=tops)
            self._rules.write([req_idx], [sampling], [keyed["base"]])

    def __call__(self, logits: torch.Tensor, input_batch: Any, *_: Any) -> SamplerOutput:
        """Sample for each request the accepted drafts and one more token."""
        batch, n, device, cu = input_batch, input_batch.num_reqs, logits.device, input_batch.cu_num_logits
        given = batch.num_draft_tokens_per_req
        drafted = np.zeros(n, np.int64) if given is None else given.astype(np.int64)
        inputs = batch.input_ids[batch.logits_indices]
        if drafted.any():  # the input of logits row j + 1 is draft j
            follows = np.ones(len(logits), bool)
            follows[batch.cu_num_logits_np[:-1]] = False
            tails = inputs[async_tensor_h2d(np.flatnonzero(follows), device=device)]
        else:
            tails = inputs[:0]
        starts, tail_offsets = cu[:-1].long(), (cu - torch.arange(n + 1, dtype=cu.dtype, device=device)).long()
        positions, longest = batch.positions[batch.logits_indices[starts]] + 1, int(drafted.max(initial=0))
        rows = logits, starts, tail_offsets, tails, longest, positions
        packed = verify_on_device(*rows, self._rules, 1 + self._margins, batch.idx_mapping, wait=True)
        prefill_len = self.req_states.prefill_len
        counts = packed[:, 0].clamp(min=1).int()
        number, rejected = get_num_sampled_and_rejected(counts, batch.seq_lens, cu, batch.idx_mapping, prefill_len.gpu)
        counted = batch.num_scheduled_tokens.astype(np.int64)
        self.step = {
            "names": list(batch.req_ids),
            "counts": counted,
            "drafted": drafted,
            "sampled": batch.num_computed_tokens_np + counted >= prefill_len.np[batch.idx_mapping_np],
            "packed": packed,
            "tops": self._tops(logits, packed, drafted, batch.idx_mapping_np),
        }
        return SamplerOutput(packed[:, 2 : 3 + longest].clamp(min=0), None, None, number, rejected)

    def _tops(self, logits: torch.Tensor, packed: torch.Tensor, drafted: np.ndarray, slots: np.ndarray) -> Any:
        """The most probable tokens of all rows of the logits, if a request asks for them; see `ranked`."""
        if not self._rules.any_tops or not (most := int(self._rules.tops[slots].max(initial=0))):
            return None
        column = np.arange(1 + int(drafted.max(initial=0)))
        index = np.flatnonzero(np.pad(column <= drafted[:, None], ((0, 0), (2, packed.shape[1] - 2 - len(column)))))
        sampled = packed.reshape(-1)[async_tensor_h2d(index, device=logits.device)].clamp(min=0)
        return ranked(logits, sampled, most)


class _Output(AsyncModelRunnerOutput):
    """vLLM's output with the report of its step, which is on its way to the host."""

    def __init__(self, output: Any, fields: dict[str, Any], stream: Any) -> None:
        self._output, self._fields, self._event = output, fields, None
        self._copies = [fields["packed"], *(fields["tops"] or ())]
        if fields["packed"].is_cuda:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._copies = [one.to("cpu", non_blocking=True) for one in self._copies]
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record(stream)

    def get_output(self) -> Any:
        output = self._output.get_output()
        if self._event is not None:
            self._event.synchronize()
        packed, *tops = map(torch.Tensor.numpy, self._copies)
        setattr(output, KEY, CoreStep(**{**self._fields, "packed": packed, "tops": tuple(tops) or None}))
        return output

    def get_kv_connector_output(self) -> Any:
        """vLLM's own; called since 0.33."""
        return self._output.get_kv_connector_output()
