"""What of vLLM's insides the bridge and the worker rely on. Fails first, and by name, when an upgrade changes them."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import os
import pkgutil
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from specactor_ray.config.load import from_mapping
from specactor_ray.config.rules import INVARIANT_BACKENDS, REFUSED, SET_BY_KEYS
from specactor_ray.config.schema import TargetConfig
from specactor_ray.core import upstream
from specactor_ray.core.errors import ConfigError
from specactor_ray.core.upstream import VLLM
from specactor_ray.models.shapes import count_parameters
from specactor_ray.startup.machine import Machine
from specactor_ray.startup.resolve import resolve
from specactor_ray.target import sizes as of_target
from specactor_ray.target.vllm_settings import (
    LONGEST_WARM_UP,
    engine_arguments,
    require_engine_arguments,
    require_room,
)
from tests.contract import lacking
from tests.tiny import tiny_vllm_target
from tests.vllm import needs_vllm

pytestmark = [pytest.mark.vllm, needs_vllm]
PARTS = {
    # The engine's core, and its scheduler.
    "vllm.v1.engine.core.EngineCore": (
        *("__init__(vllm_config, executor_class, log_stats)", "preprocess_add_request(request)"),
        *("add_request(request, request_wave)", "abort_requests(request_ids)", "step_fn", "shutdown", "scheduler"),
        *("collective_rpc(method, kwargs)", "reset_prefix_cache(reset_running_requests)", "sleep(level)"),
        *("wake_up", "model_executor", "vllm_config"),
    ),
    "vllm.v1.engine.EngineCoreRequest": (
        *("request_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params", "arrival_time"),
        *("lora_request", "cache_salt", "data_parallel_rank"),
    ),
    "vllm.v1.engine": ("EngineCoreOutputs.outputs", "EngineCoreOutput.new_prompt_logprobs_tensors"),
    "vllm.v1.core.sched.scheduler.Scheduler": (
        *("running", "waiting", "requests", "schedule", "has_requests", "max_num_running_reqs"),
        *("max_num_scheduled_tokens", "kv_cache_config", "kv_cache_manager"),
        "update_from_output(scheduler_output, model_runner_output)",
    ),
    "vllm.v1.core.kv_cache_manager": ("KVCacheManager.get_blocks(request_id)", "KVCacheBlocks.blocks"),
    "vllm.v1.core.kv_cache_utils.KVCacheBlock": ("block_id",),
    "vllm.v1.core.sched.output.SchedulerOutput": (
        *("scheduled_spec_decode_tokens", "num_scheduled_tokens", "total_num_scheduled_tokens"),
    ),
    "vllm.v1.core.sched.request_queue.RequestQueue": ("remove_requests(requests)", "prepend_requests(requests)"),
    "vllm.v1.request.Request": (
        *("request_id", "is_prefill_chunk", "spec_token_ids", "num_computed_tokens", "num_in_flight_tokens"),
        "num_output_placeholders",
    ),
    "vllm.v1.executor.abstract.Executor": (
        *("get_class(vllm_config)", "execute_model(scheduler_output, non_block)"),
        *("sample_tokens(grammar_output, non_block)", "is_sleeping", "wake_up(tags)"),
    ),
    "vllm.engine.arg_utils.EngineArgs": ("create_engine_config", "additional_config", "worker_cls"),
    "vllm.triton_utils.dispatcher": ("sys",),
    # Workers, and weights that are loaded again.
    "vllm.v1.worker.worker_base.WorkerBase": (
        *("rank", "vllm_config", "load_model", "compile_or_warm_up_model", "execute_model", "sample_tokens"),
    ),
    "vllm.v1.worker.gpu_worker.Worker": (
        *("_make_model_runner", "model_runner", "compile_or_warm_up_model", "_maybe_get_memory_pool_context(tag)"),
        "initialize_from_config(kv_cache_config)",
    ),
    "vllm.model_executor.model_loader.reload": (
        *("layerwise.initialize_layerwise_reload(model)", "layerwise.get_layerwise_info(layer)"),
        "types.LayerReloadingInfo.loaded_weights",
    ),
    # The V2 model runner.
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": (
        *("load_model", "execute_model(scheduler_output, dummy_run)", "sample_tokens(grammar_output)"),
        *("prepare_inputs", "initialize_kv_cache", "sampler", "rejection_sampler", "req_states", "vllm_config"),
        *("device", "dtype", "num_speculative_steps", "execute_model_state", "use_aux_hidden_state_outputs"),
    ),
    "vllm.v1.worker.gpu.model_runner": (
        *("init_speculator(vllm_config, device, req_states)", "set_eagle3_aux_hidden_state_layers(model)"),
        "ModelCudaGraphManager.__init__(varlen_decode)",
    ),
    "vllm.v1.worker.gpu.sample.sampler.Sampler": (
        *("__call__(logits, input_batch)", "add_request(req_idx, sampling_params)", "req_states"),
    ),
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler": (
        "__call__(logits, input_batch, draft_logits, invalid_drafts)",
    ),
    "vllm.v1.worker.gpu.sample.output.SamplerOutput": (
        *("sampled_token_ids", "logprobs_tensors", "num_nans", "num_sampled", "num_rejected"),
    ),
    "vllm.v1.worker.gpu.input_batch.InputBatch": (
        *("req_ids", "num_reqs", "idx_mapping", "idx_mapping_np", "cu_num_logits", "cu_num_logits_np"),
        *("logits_indices", "num_draft_tokens_per_req", "num_computed_tokens_np", "num_scheduled_tokens"),
        *("positions", "input_ids", "seq_lens"),
    ),
    "vllm.v1.worker.gpu.input_batch": (
        "get_num_sampled_and_rejected(num_sampled, seq_lens, cu_num_logits, idx_mapping, prefill_len)",
    ),
    "vllm.v1.worker.gpu.states.RequestState": (
        *("draft_tokens", "prefill_len", "req_id_to_index", "max_num_reqs", "device"),
    ),
    "vllm.v1.worker.gpu.spec_decode.speculator.BaseSpeculator": (
        *("init_cudagraph_manager(cudagraph_mode)", "capture", "propose(input_batch)"),
    ),
    "vllm.v1.worker.gpu.async_utils.AsyncOutput": ("model_runner_output",),
    "vllm.v1.worker.cpu": ("model_runner.CPUModelRunner",),
    "vllm.v1.core.sched.async_scheduler": ("AsyncScheduler",),
}
"""Everything of vLLM that is used beside what is imported."""


def test_the_installed_version_has_every_part() -> None:
    assert VLLM.lacking() == "" and lacking(PARTS) == []


@pytest.mark.parametrize(
    ("file", "name", "part"),
    [
        ("v1/engine/core.py", "EngineCore", "core.EngineCore"),
        ("v1/engine/core.py", "reset_prefix_cache", "core.reset_prefix_cache"),
        ("v1/request.py", "spec_token_ids", "request.spec_token_ids"),
        ("v1/worker/gpu/model_runner.py", "prepare_inputs", "model_runner.prepare_inputs"),
        ("v1/worker/gpu_worker.py", "_make_model_runner", "gpu_worker._make_model_runner"),
        ("model_executor/model_loader/reload/layerwise.py", "get_layerwise_info", "layerwise.get_layerwise_info"),
    ],
)
def test_a_version_without_a_part_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, name: str, part: str
) -> None:
    """In vLLM's own sources, with one name changed."""
    (source,) = importlib.util.find_spec("vllm").submodule_search_locations  # type: ignore[union-attr]
    shutil.copytree(source, tmp_path / "vllm", copy_function=os.symlink, ignore=shutil.ignore_patterns("*.so", "*.pyc"))
    text = (path := tmp_path / "vllm" / file).read_text()
    path.unlink()
    path.write_text(re.sub(rf"\b{name}\b", f"other_{name}", text))
    spec = importlib.machinery.ModuleSpec("vllm", None)
    spec.submodule_search_locations = [str(tmp_path / "vllm")]
    monkeypatch.setattr(upstream.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(upstream, "_missing", upstream._missing.__wrapped__)
    config = from_mapping({"mode": "plain", "target": {"backend": "vllm"}})
    with pytest.raises(ConfigError, match=rf"^target\.backend: vllm\S* \S+ has no \S*{re.escape(part)}"):
        resolve(config, Machine.here())


def test_batch_invariance_has_a_mode_and_these_kernels_of_attention() -> None:
    """Read from the sources, which need GPUs to be imported."""
    (source,) = importlib.util.find_spec("vllm").submodule_search_locations  # type: ignore[union-attr]
    assert '"VLLM_BATCH_INVARIANT": lambda' in Path(source, "envs.py").read_text()
    assert "init_batch_invariance()" in Path(source, "v1/worker/gpu_worker.py").read_text()
    claims = r"def get_name\(\)[^\"]*\"(\w+)\"|def supports_batch_invariance\(cls\) -> bool:\s+return (True)"
    found = set()
    for path in Path(source, "v1/attention/backends").rglob("*.py"):
        names = re.findall(claims, path.read_text())
        found |= {name for name, _ in names if name} if any(claim for _, claim in names) else set()
    assert found == set(INVARIANT_BACKENDS)


_SCHEDULER, _RUNNER = "vllm.v1.core.sched", "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
WRITTEN = {
    # `replace_weights` does the same as a reload, and mends what the CPU build leaves.
    "vllm.model_executor.model_loader.reload.inplace.reload_weights": (
        *("initialize_layerwise_reload(model)", "model.load_weights(weights_iterator)"),
        "finalize_layerwise_reload(model, model_config)",
    ),
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod._setup_kernel": (
        "self.moe_kernel is not None",
    ),
    "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm": ("layer.cpu_linear = ",),
    # `Flight._launch` gives back what these add.
    f"{_SCHEDULER}.async_scheduler.AsyncScheduler._update_after_schedule": (
        *("request.num_output_placeholders += (", "request.spec_token_ids = self._spec_token_placeholders"),
    ),
    f"{_SCHEDULER}.scheduler.Scheduler._update_after_schedule": (
        *("request.num_computed_tokens += num_scheduled_token", "request.num_in_flight_tokens += num_scheduled_token"),
    ),
    "vllm.v1.engine.core.EngineCore.step_with_batch_queue": ("self.model_executor.sample_tokens(", "non_block=True"),
    "vllm.v1.executor.multiproc_executor.MultiprocExecutor.sample_tokens": ("unique_reply_rank=self.output_rank",),
    f"{_RUNNER}.sample": (
        *("sampler_output = self.sampler(logits, input_batch)", "self.rejection_sampler( logits, input_batch, "),
    ),
    f"{_RUNNER}.__init__": (
        "self.speculator = init_speculator(",
        "self.use_aux_hidden_state_outputs = ",
        "use_ngram()",
    ),
    f"{_RUNNER}.load_model": ("set_eagle3_aux_hidden_state_layers(self.model,",),
    f"{_RUNNER}.initialize_kv_cache": ("self.cudagraph_manager = ModelCudaGraphManager(",),
    f"{_RUNNER}.prepare_inputs": ("self.req_states.draft_tokens,", "self.req_states.last_sampled_tokens,"),
    "vllm.v1.worker.worker_base.WorkerBase.__init__": ("self.rank = rank",),
    "vllm.utils.ompmultiprocessing.OMPProcessManager._parse_omp_threads_bind_env": (
        *("VLLM_CPU_OMP_THREADS_BIND", 'split("|")', '"nobind"'),
    ),
}
"""Function of vLLM → what its source has."""


@pytest.mark.parametrize("name", WRITTEN)
def test_functions_are_written_as_the_engine_expects(name: str) -> None:
    source = " ".join(inspect.getsource(pkgutil.resolve_name(name)).split())
    assert all(part in source for part in WRITTEN[name])


def test_classes_are_as_the_engine_expects() -> None:
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu.model_runner import ExecuteModelState, GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase

    from specactor_ray.target.vllm_worker import KeyedWorker

    assert not hasattr(ModelRunnerOutput, "__slots__")  # what a step did travels with it
    fields = {"input_batch", "hidden_states", "aux_hidden_states", "slot_mappings_by_layer"}
    assert fields <= {*ExecuteModelState.__annotations__}
    assert list(inspect.signature(GPUModelRunner.prepare_inputs).parameters)[3] == "batch_desc"
    assert issubclass(KeyedWorker, WorkerBase)
    for name in ("init_device", "_make_model_runner", "compile_or_warm_up_model"):
        assert getattr(KeyedWorker, name) is not getattr(KeyedWorker.__mro__[1], name)


def test_engine_arguments_are_known_without_importing_vllm() -> None:
    from dataclasses import fields

    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    assert not {*SET_BY_KEYS, *REFUSED} - known
    require_engine_arguments(known)
    with pytest.raises(ConfigError, match=r"target\.engine_arguments\.block_sise: .*block_size"):
        require_engine_arguments(["quantization", "block_sise"])


def arguments_of(drafts: int, max_batch: int = 4, max_step_tokens: int = 64, **more: Any) -> dict[str, Any]:
    sizes = {"max_model_len": 128, "max_batch": max_batch, "max_step_tokens": max_step_tokens, "kv_cache_gb": 1 / 64}
    config = TargetConfig(str(tiny_vllm_target()), "vllm", dtype="float32", **sizes, **more)
    return engine_arguments(config, drafts)


@pytest.mark.parametrize("drafts", [0, 8])
@pytest.mark.parametrize("more", [{}, {"tensor_parallel": 2}, {"hidden_layers": [0, 2]}, {"compiled": False}], ids=str)
def test_engines_of_every_mode_can_be_configured(drafts: int, more: dict[str, Any]) -> None:
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(**arguments_of(drafts, engine_arguments={"block_size": 32}, **more)).create_engine_config()
    assert config.num_speculative_tokens == drafts and config.use_v2_model_runner
    assert config.cache_config.block_size == 32 and config.scheduler_config.max_num_seqs == 4
    assert config.parallel_config.world_size == more.get("tensor_parallel", 1)


def longest_of_warm_up(rows: int, window: int, tokens: int) -> int:
    """Most tokens of a request in the warm-up of vLLM, which runs on GPUs only; its runner counts here."""
    from vllm.v1.worker.gpu import warmup

    written: Counter[str] = Counter()
    config = SimpleNamespace(is_mm_encoder_only=False, num_lookahead_tokens=0)
    runner = SimpleNamespace(
        adaptive_verification=None, rejection_sampler=None, vllm_config=config, num_speculative_steps=window,
        decode_query_len=1 + window, is_pooling_model=False, is_encoder_decoder=False, max_model_len=1 << 20,
        kv_cache_config=SimpleNamespace(kv_cache_groups=[], num_blocks=1), model_state=None, is_last_pp_rank=False,
        kv_connector=SimpleNamespace(set_disabled=lambda on: None), kv_block_zeroer=None,
        scheduler_config=SimpleNamespace(max_num_seqs=rows, max_num_batched_tokens=tokens),
    )  # fmt: skip
    warmup.warmup_kernels(runner, lambda plan: written.update(plan.num_scheduled_tokens), lambda grammar: None)
    return 1 + max(written.values())


@pytest.mark.parametrize(("rows", "window"), [(1, 1), (1, 8), (2, 3), (16, 8), (128, 128)])
def test_limits_that_are_allowed_fit_the_warm_up_of_vllm(
    monkeypatch: pytest.MonkeyPatch, rows: int, window: int
) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    context, tokens = LONGEST_WARM_UP * (window + 2), max(window + 2, rows + window)
    target = TargetConfig(backend="vllm", gpus=1, max_batch=rows, max_step_tokens=tokens, max_model_len=context)
    require_room(target, window)
    assert longest_of_warm_up(rows, window, tokens) <= context
    assert rows == 1 or longest_of_warm_up(rows, window, 2 * tokens) == context
    with pytest.raises(IndexError):
        longest_of_warm_up(rows, window, window + 1)
    for name, value in (("max_step_tokens", tokens), ("max_model_len", context)):
        with pytest.raises(ConfigError, match=rf"^target\.{name}: .*{value}"):
            require_room(replace(target, **{name: value - 1}), window)
    require_room(replace(target, max_model_len=2, gpus=0), window)


def graphs_of(monkeypatch: pytest.MonkeyPatch, *, varlen: bool, given: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Graphs of vLLM on a GPU for 128 requests and 8 drafts; `varlen`: whether attention takes any lengths."""
    from vllm.config import CUDAGraphMode
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu import cudagraph_utils

    monkeypatch.setattr(type(current_platform), "check_and_update_config", classmethod(lambda cls, config: None))
    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", classmethod(lambda cls: True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    arguments = arguments_of(8, 128, 2048, engine_arguments=dict(given))
    config = EngineArgs(**{**arguments, "enable_sleep_mode": False}).create_engine_config()
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True))
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda self: None)
    mode = CUDAGraphMode.FULL_AND_PIECEWISE
    graphs = cudagraph_utils.ModelCudaGraphManager(config, torch.device("cpu"), mode, 9, varlen_decode=varlen)
    graphs._graphs_captured = True
    return graphs


def test_the_memory_plan_has_the_tables_and_graphs_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import SpeculativeConfig
    from vllm.config.attention import AttentionConfig
    from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.cudagraph_utils import _MIN_PER_GRAPH_BYTES
    from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
    from vllm.v1.worker.gpu.states import RequestState

    monkeypatch.setattr(buffer_utils, "UvaBuffer", UvaBuffer)
    target = TargetConfig(str(tiny_vllm_target()), "vllm", dtype="float32", max_model_len=128, compiled=False)
    _, text = count_parameters(target.model)
    sizes = {"max_num_reqs": target.max_batch, "vocab_size": text.vocab_size, "device": torch.device("cpu")}
    limits = {"max_model_len": 128, "max_num_batched_tokens": 512, "num_speculative_steps": 3}
    tokens = RequestState(**sizes, **limits, use_dense_all_token_ids=True).all_token_ids.gpu
    penalties = PenaltiesState(None, SimpleNamespace(**sizes))
    tables = sum(one.nbytes for one in (tokens, penalties.output_bin_counts, penalties.prompt_bin_mask))
    monkeypatch.setattr(of_target, "captured_bytes", lambda *_: 0.0)
    own = of_target.beside_the_cache(replace(target, backend="hf"))
    assert of_target.beside_the_cache(target) - own == tables
    assert AttentionConfig.flash_attn_max_num_splits_for_cuda_graph == of_target._SPLITS
    graphs = sum(map(len, graphs_of(monkeypatch, varlen=True)._capture_descs.values()))
    assert graphs * _MIN_PER_GRAPH_BYTES <= of_target._VLLM_GRAPHS
    assert SpeculativeConfig.use_ngram(SimpleNamespace(method="ngram_gpu")), "tokens of requests are on the GPU"


@pytest.mark.parametrize("given", [{}, {"max_cudagraph_capture_size": 64}], ids=["ours", "the user's"])
def test_every_step_that_decodes_runs_in_one_graph(monkeypatch: pytest.MonkeyPatch, given: dict[str, int]) -> None:
    """Plain steps, and those with drafts of mixed numbers."""
    from vllm.config import CUDAGraphMode

    graphs, most = graphs_of(monkeypatch, varlen=True, given=given), 64 if given else 1152
    assert graphs.compilation_config.cudagraph_capture_sizes[-1] == most
    for rows, positions, longest in ((1, 1, 1), (16, 16, 1), (128, 128, 1), (1, 9, 9), (16, 37, 4), (128, 1152, 9)):
        found = graphs.dispatch(rows, positions, positions // rows if positions % rows == 0 else None, 0, longest)
        expected = CUDAGraphMode.FULL if positions <= most else CUDAGraphMode.NONE
        assert found.cg_mode == expected and positions <= found.num_tokens <= max(1.125 * positions, positions + 7)
    assert graphs.dispatch(2, 40, None, 0, None).cg_mode == CUDAGraphMode.PIECEWISE, "a prompt beside a request"


def test_plain_steps_run_in_one_graph_where_mixed_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has only graphs of the most drafts of each request there."""
    from vllm.config import CUDAGraphMode

    from specactor_ray.target.vllm_worker import add_plain_steps

    graphs = graphs_of(monkeypatch, varlen=False)
    assert graphs.dispatch(16, 16, 1, 0, 1).cg_mode == CUDAGraphMode.PIECEWISE
    add_plain_steps(graphs)
    for rows in range(1, 129):
        found = graphs.dispatch(rows, rows, 1, 0, 1)
        assert found.cg_mode == CUDAGraphMode.FULL and found.num_reqs == found.num_tokens
        assert rows <= found.num_tokens <= max(1.125 * rows, rows + 7)
        whole = graphs.dispatch(rows, 9 * rows, 9, 0, 9)
        assert whole.cg_mode == CUDAGraphMode.FULL and whole.uniform_token_count == 9
    assert graphs.dispatch(16, 37, None, 0, 4).cg_mode == CUDAGraphMode.PIECEWISE, "mixed numbers"
    captured = graphs._capture_descs[CUDAGraphMode.FULL]
    assert len(set(captured)) == len(captured) and captured[0].num_tokens == 1152
    assert [one.num_tokens for one in captured] == sorted((one.num_tokens for one in captured), reverse=True)
    graphs = graphs_of(monkeypatch, varlen=True)
    before = graphs._capture_descs[CUDAGraphMode.FULL].copy()
    add_plain_steps(graphs)
    assert graphs._capture_descs[CUDAGraphMode.FULL] == before
