"""What of vLLM's insides the bridge and the worker rely on. Fails first, and by name, when an upgrade changes them."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from specactor_ray.config.load import from_mapping
from specactor_ray.config.rules import INVARIANT_BACKENDS, REFUSED, SET_BY_KEYS
from specactor_ray.config.schema import TargetConfig
from specactor_ray.core import upstream
from specactor_ray.core.errors import ConfigError
from specactor_ray.rollout.preflight import refuse_early
from specactor_ray.target.vllm_parts import VLLM
from specactor_ray.target.vllm_settings import capture_sizes, engine_arguments, require_engine_arguments
from tests.tiny import tiny_vllm_target
from tests.vllm import needs_vllm

pytestmark = [pytest.mark.vllm, needs_vllm]


def test_the_installed_version_has_every_part() -> None:
    assert VLLM.lacking() == ""


@pytest.mark.parametrize(
    ("file", "name", "part"),
    [
        ("v1/engine/core.py", "step_fn", "EngineCore.step_fn"),
        ("v1/engine/core.py", "reset_running_requests", "EngineCore.reset_prefix_cache(reset_running_requests)"),
        ("v1/core/sched/scheduler.py", "running", "Scheduler.running"),
        ("v1/worker/gpu/input_batch.py", "idx_mapping_np", "InputBatch.idx_mapping_np"),
        ("v1/worker/gpu_worker.py", "_make_model_runner", "Worker._make_model_runner"),
        ("model_executor/model_loader/reload/layerwise.py", "get_layerwise_info", "get_layerwise_info"),
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
        refuse_early(config)


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


def test_the_engine_core_and_its_scheduler() -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.model_loader.reload import inplace
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request

    reload = inspect.getsource(inplace.reload_weights)  # `replace_weights` does the same
    assert "initialize_layerwise_reload(model)" in reload and "model.load_weights(weights_iterator)" in reload
    assert "finalize_layerwise_reload(model, model_config)" in reload
    assert "self.moe_kernel is not None" in inspect.getsource(UnquantizedFusedMoEMethod._setup_kernel)
    assert "layer.cpu_linear = " in inspect.getsource(dispatch_cpu_unquantized_gemm)
    for name in ("preprocess_add_request", "add_request", "abort_requests", "step", "post_step", "collective_rpc"):
        assert callable(getattr(EngineCore, name)), name
    assert "step_fn" in inspect.getsource(EngineCore.__init__)
    assert "reset_running_requests" in inspect.signature(EngineCore.reset_prefix_cache).parameters
    assert list(inspect.signature(Scheduler.update_draft_token_ids).parameters) == ["self", "draft_token_ids"]
    assert list(inspect.signature(DraftTokenIds).parameters) == ["req_ids", "draft_token_ids"]
    assert "self.running: list[Request]" in inspect.getsource(Scheduler.__init__)
    assert "num_tokens" in dir(Request) and "self.num_computed_tokens = 0" in inspect.getsource(Request.__init__)
    assert "self.model_executor" in inspect.getsource(EngineCore.__init__)
    assert "self.model_executor.sample_tokens(grammar_output)" in inspect.getsource(EngineCore.step)
    assert not hasattr(ModelRunnerOutput, "__slots__")  # what a step did travels with it
    assert "unique_reply_rank=self.output_rank" in inspect.getsource(MultiprocExecutor.sample_tokens)


def test_engine_arguments_are_known_without_importing_vllm() -> None:
    from dataclasses import fields

    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    assert not {*SET_BY_KEYS, *REFUSED} - known
    require_engine_arguments(known)
    with pytest.raises(ConfigError, match=r"target.engine_arguments.block_sise: .* Did you mean block_size\?"):
        require_engine_arguments(["quantization", "block_sise"])


def test_engine_arguments_reach_the_engine() -> None:
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(**arguments_of(3, engine_arguments={"block_size": 32})).create_engine_config()
    assert config.cache_config.block_size == 32 and config.scheduler_config.max_num_seqs == 4


def arguments_of(drafts: int, max_batch: int = 4, max_step_tokens: int = 64, **more: Any) -> dict[str, Any]:
    sizes = {"max_model_len": 128, "max_batch": max_batch, "max_step_tokens": max_step_tokens, "kv_cache_gb": 1 / 64}
    config = TargetConfig(str(tiny_vllm_target()), "vllm", dtype="float32", **sizes, **more)
    return engine_arguments(config, drafts, "specactor_ray.target.vllm.NothingProposed")


@pytest.mark.parametrize("drafts", [0, 8])
@pytest.mark.parametrize("more", [{}, {"tensor_parallel": 2}, {"hidden_layers": [0, 2]}, {"compiled": False}], ids=str)
def test_engines_of_every_mode_can_be_configured(drafts: int, more: dict[str, Any]) -> None:
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(**arguments_of(drafts, **more)).create_engine_config()
    assert config.num_speculative_tokens == drafts and not config.use_v2_model_runner
    assert config.parallel_config.world_size == more.get("tensor_parallel", 1)
    assert config.scheduler_config.async_scheduling is False


@pytest.mark.parametrize("given", [{}, {"max_cudagraph_capture_size": 64}], ids=["ours", "the user's"])
def test_graphs_on_a_gpu_are_those_that_are_asked_for(monkeypatch: pytest.MonkeyPatch, given: dict[str, int]) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "check_and_update_config", classmethod(lambda cls, config: None))
    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", classmethod(lambda cls: True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    arguments = arguments_of(8, 128, 2048, engine_arguments=given)
    graphs = EngineArgs(**{**arguments, "enable_sleep_mode": False}).create_engine_config().compilation_config
    graphs.adjust_cudagraph_sizes_for_spec_decode(9)  # as the model runner does
    assert graphs.cudagraph_mode.name == "FULL_AND_PIECEWISE", "graphs of whole steps of mixed lengths corrupt outputs"
    if given:
        assert graphs.max_cudagraph_capture_size <= 64
    else:
        assert graphs.cudagraph_capture_sizes == capture_sizes(128, 8, 2048)


def test_the_model_runner_calls_its_samplers_as_we_are_called() -> None:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import ExecuteModelState, GPUModelRunner

    source = " ".join(inspect.getsource(GPUModelRunner._sample).split())
    assert "self.sampler( logits=logits, sampling_metadata=sampling_metadata, )" in source
    call = "self.rejection_sampler( spec_decode_metadata, draft_probs, logits, sampling_metadata, )"
    assert call in source
    assert {"scheduler_output", "hidden_states", "aux_hidden_states"} <= set(ExecuteModelState._fields)
    assert {"draft_token_ids", "num_draft_tokens"} <= set(SpecDecodeMetadata.__annotations__)
    assert {"req_ids", "num_computed_tokens_cpu"} <= set(dir(InputBatch)) | set(
        re.findall(r"self\.(\w+)", inspect.getsource(InputBatch.__init__))
    )
    made = inspect.getsource(GPUModelRunner.__init__)
    names = ("input_batch", "requests", "discard_request_mask", "num_scheduled_tokens", "speculative_config")
    for name in (*names, "use_aux_hidden_state_outputs"):
        assert f"self.{name} = " in made or f"self.{name}: " in made, name
    assert "self.execute_model_state = ExecuteModelState(" in inspect.getsource(GPUModelRunner.execute_model)
    assert "self.num_scheduled_tokens.np[:num_reqs] = " in inspect.getsource(GPUModelRunner._prepare_inputs)
    assert "scheduled_spec_decode_tokens" in SchedulerOutput.__annotations__


def test_workers_can_be_replaced_and_load_before_they_compile() -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    from specactor_ray.target.vllm_worker import KeyedWorker

    assert issubclass(KeyedWorker, WorkerBase)
    assert "self.rank = rank" in inspect.getsource(WorkerBase.__init__)
    for name in ("load_model", "compile_or_warm_up_model", "execute_model", "sample_tokens"):
        assert getattr(KeyedWorker, name) is not getattr(KeyedWorker.__mro__[1], name)


def test_ranks_are_bound_to_cores_by_an_environment_variable() -> None:
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    source = inspect.getsource(OMPProcessManager._parse_omp_threads_bind_env)
    assert "VLLM_CPU_OMP_THREADS_BIND" in source and 'split("|")' in source and '"nobind"' in source
