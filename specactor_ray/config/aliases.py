"""Names of other trainers and engines for keys of this configuration, for hints."""

from __future__ import annotations

ALIASES = {
    "trainer.learning_rate": ("lr", "actor_lr"),
    "trainer.steps": ("max_steps", "num_steps", "total_training_steps", "num_train_steps", "train_steps"),
    "trainer.prompts_per_step": ("batch_size", "train_batch_size", "global_batch_size", "rollout_batch_size"),
    "trainer.micro_batch_tokens": ("micro_batch_size", "per_device_train_batch_size", "ppo_max_token_len_per_gpu"),
    "trainer.mini_batches": ("ppo_mini_batch_size", "mini_batch_size", "steps_per_generation"),
    "trainer.epochs": ("ppo_epochs", "num_iterations", "num_epochs"),
    "trainer.schedule": ("lr_scheduler_type", "lr_scheduler"),
    "trainer.warmup_steps": ("lr_warmup_steps", "warmup_ratio"),
    "trainer.max_grad_norm": ("grad_clip", "gradient_clipping"),
    "data.n": ("num_generations", "n_samples_per_prompt", "rollout_n", "group_size", "num_samples", "n"),
    "data.path": ("train_files", "dataset", "dataset_name", "prompts", "prompt_data"),
    "sampling.max_tokens": (
        *("max_new_tokens", "max_completion_length", "max_response_length", "response_length", "max_output_tokens"),
        *("max_length", "generate_max_len"),
    ),
    "target.max_model_len": ("max_seq_len", "max_seq_length", "max_context_len", "max_prompt_length", "context_length"),
    "target.max_batch": ("max_num_seqs", "max_running_requests", "per_device_eval_batch_size"),
    "target.max_step_tokens": ("max_num_batched_tokens", "chunked_prefill_size"),
    "target.kv_cache_gb": ("gpu_memory_utilization", "mem_fraction_static", "kv_cache_memory_bytes"),
    "target.tensor_parallel": ("tensor_parallel_size", "tp", "tp_size", "tensor_model_parallel_size"),
    "target.replicas": ("data_parallel_size", "dp_size", "num_engines"),
    "target.model": ("model_name", "model_name_or_path", "model_path", "pretrain"),
    "speculation.window": ("num_speculative_tokens", "speculative_num_draft_tokens"),
    "algorithm.kl_coef": ("beta", "kl_loss_coef", "init_kl_coef"),
    "algorithm.clip_low": ("epsilon", "clip_ratio", "cliprange", "eps_clip"),
    "algorithm.clip_high": ("epsilon_high", "clip_ratio_high"),
    "reward.functions": ("reward_funcs", "reward_fn", "reward_function"),
    "checkpoint.every": ("save_steps", "save_freq", "save_interval"),
    "tracking.wandb_project": ("report_to", "use_wandb", "project_name"),
    "run.dir": ("output_dir", "default_local_dir", "save_path"),
    "run.name": ("run_name", "experiment_name"),
}
"""Key → its names in TRL, verl, vLLM, SGLang and OpenRLHF."""
KEY_OF = {name: key for key, names in ALIASES.items() for name in names}
