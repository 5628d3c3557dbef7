"""What of vLLM's insides the bridge and the worker rely on. Fails first, and by name, when an upgrade changes them."""

from __future__ import annotations

import inspect
import re

import pytest

from specactor_ray.config.engine_arguments import REFUSED, SET_BY_KEYS
from specactor_ray.errors import ConfigError
from specactor_ray.target.vllm_bridge import CoreSettings, _engine_arguments
from specactor_ray.target.vllm_version import TESTED_VERSIONS, require_engine_arguments, require_vllm
from tests.tiny import tiny_vllm_target
from tests.vllm import needs_vllm

pytestmark = [pytest.mark.vllm, needs_vllm]


def test_the_installed_version_is_a_tested_one() -> None:
    assert require_vllm().partition("+")[0] in TESTED_VERSIONS


def test_the_engine_core_and_its_scheduler() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    assert "weights_path" in inspect.signature(GPUModelRunner.reload_weights).parameters
    for name in ("preprocess_add_request", "add_request", "abort_requests", "step", "post_step", "collective_rpc"):
        assert callable(getattr(EngineCore, name)), name
    assert "step_fn" in inspect.getsource(EngineCore.__init__)
    assert "reset_running_requests" in inspect.signature(EngineCore.reset_prefix_cache).parameters
    assert list(inspect.signature(Scheduler.update_draft_token_ids).parameters) == ["self", "draft_token_ids"]
    assert list(inspect.signature(DraftTokenIds).parameters) == ["req_ids", "draft_token_ids"]
    assert "self.running: list[Request]" in inspect.getsource(Scheduler.__init__)
    assert "num_tokens" in dir(Request) and "self.num_computed_tokens = 0" in inspect.getsource(Request.__init__)
    assert "self.driver_worker = WorkerWrapperBase(" in inspect.getsource(UniProcExecutor._init_executor)
    assert "self.worker" in inspect.getsource(WorkerWrapperBase.init_worker)
    assert "self.model_executor" in inspect.getsource(EngineCore.__init__)


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

    arguments = {"block_size": 32}
    settings = CoreSettings(str(tiny_vllm_target()), "float32", 128, 4, 64, 1 << 24, 3, engine_arguments=arguments)
    config = EngineArgs(**_engine_arguments(settings)).create_engine_config()
    assert config.cache_config.block_size == 32 and config.scheduler_config.max_num_seqs == 4


def test_the_model_runner_calls_its_samplers_as_we_are_called() -> None:
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
    for name in ("input_batch", "requests", "discard_request_mask", "use_aux_hidden_state_outputs"):
        assert f"self.{name}" in made, name


def test_workers_can_be_replaced_and_load_before_they_compile() -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    from specactor_ray.target.vllm_worker import KeyedWorker

    assert issubclass(KeyedWorker, WorkerBase)
    assert "self.rank = rank" in inspect.getsource(WorkerBase.__init__)
    for name in ("load_model", "compile_or_warm_up_model"):
        assert getattr(KeyedWorker, name) is not getattr(KeyedWorker.__mro__[1], name)


def test_ranks_are_bound_to_cores_by_an_environment_variable() -> None:
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    source = inspect.getsource(OMPProcessManager._parse_omp_threads_bind_env)
    assert "VLLM_CPU_OMP_THREADS_BIND" in source and 'split("|")' in source and '"nobind"' in source
