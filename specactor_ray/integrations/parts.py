"""The private parts of TRL and verl that this package uses. What its modules import is added by itself."""

from __future__ import annotations

from specactor_ray.core.upstream import Upstream

TRL = Upstream(
    "trl",
    tested=("1.16",),
    users=("integrations/trl.py",),
    parts={
        "trl.generation.vllm_generation.VLLMGeneration": (
            *("_init_vllm", "vllm_client", "accelerator", "sync_weights", "generate(prompts)"),
            "__init__(model, accelerator, processing_class, mode, logprobs, temperature, top_p, top_k, min_p, "
            "repetition_penalty, max_completion_length, structured_outputs_regex, generation_kwargs)",
        ),
        "trl.generation.vllm_client.VLLMClient": (
            *("update_named_params(metadata, named_params)", "reset_prefix_cache"),
            "generate(prompts, features, n, repetition_penalty, temperature, top_p, top_k, min_p, max_tokens, "
            "logprobs, structured_outputs_regex, generation_kwargs)",
        ),
        **dict.fromkeys(
            ("trl.GRPOTrainer", "trl.RLOOTrainer"),
            (
                *("vllm_generation", "use_vllm", "vllm_mode", "_last_loaded_step", "_is_vlm", "_tokenizer"),
                *("eos_token_ids", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
                "max_completion_length",
            ),
        ),
        **dict.fromkeys(("trl.GRPOConfig", "trl.RLOOConfig"), ("vllm_structured_outputs_regex", "generation_kwargs")),
    },
)
VERL = Upstream(
    "verl",
    tested=("0.9",),
    users=("integrations/verl*.py",),
    parts={
        "verl.workers.rollout.replica.RolloutReplica": (
            *("__init__(replica_rank, config, model_config)", "init_standalone", "init_colocated(resource_pool)"),
            *("launch_servers", "get_ray_class_with_init_args", "is_reward_model", "is_teacher_model"),
            *("rollout_mode", "workers", "servers", "_server_address", "_server_handle", "max_concurrency"),
        ),
        "verl.workers.rollout.replica": (
            *("RolloutMode.STANDALONE", "RolloutMode.HYBRID", "RolloutReplicaRegistry.register(name, loader)"),
            *(f"TokenOutput.{name}" for name in ("token_ids", "log_probs", "stop_reason", "extra_fields")),
        ),
        "verl.workers.rollout.base.BaseRollout": (
            *("__init__(config, model_config, device_mesh)", "resume(tags)", "release"),
            "update_weights(weights)",
        ),
        "verl.checkpoint_engine.base": ("CheckpointEngineRegistry.register(backend)",),
        "verl.checkpoint_engine.base.CheckpointEngine": (
            *("prepare", "build_topology", "init_process_group", "finalize", "send_weights(weights)"),
            *("receive_weights", "wire_format"),
        ),
        "verl.single_controller.ray": (
            "RayResourcePool.__init__(process_on_nodes, use_gpu, max_colocate_count)",
            "RayWorkerGroup.__init__(resource_pool, ray_cls_with_init, bin_pack)",
        ),
    },
)
