"""Rules between configuration keys; `schema.py` has the ranges of single keys."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Iterator

from specactor_ray.config.accelerators import within
from specactor_ray.config.fields import reject_unlisted, reject_values_not_allowed
from specactor_ray.config.methods import ALL_KEYS, BUILT_IN, is_hosted, is_named, reject_keys_against_traits
from specactor_ray.config.recipes import ADVANTAGES, LOSSES, make_recipe, smallest_group
from specactor_ray.config.schema import (
    MAX_METHODS,
    ClusterConfig,
    Config,
    DrafterConfig,
    ModeName,
    RaceName,
    TargetConfig,
)
from specactor_ray.config.training_schema import AlgorithmName, Importance, LoraConfig, TrainerBackend
from specactor_ray.core.errors import ConfigError, clipped, clipped_text

Problem = tuple[str, str, str]
"""Key, problem and fix."""
_TRAINING_SECTIONS = ("algorithm", "reward", "environment", "evaluation", "trainer", "checkpoint", "tracking")
"""Sections that a rollout does not use."""
_LOOKUPS = ("ngram", "suffix")
_SMALLEST_SHARE = 0.01
"""Smallest share of a core. Ray counts in ten-thousandths; less than a hundredth is no meaningful share."""

SET_BY_KEYS = {
    "model": "target.model",
    "dtype": "target.dtype",
    "max_model_len": "target.max_model_len",
    "max_num_seqs": "target.max_batch",
    "max_num_batched_tokens": "target.max_step_tokens",
    "kv_cache_memory_bytes": "target.kv_cache_gb",
    "gpu_memory_utilization": "target.kv_cache_gb",
    "tensor_parallel_size": "target.tensor_parallel",
    "enforce_eager": "target.compiled",
    "trust_remote_code": "target.trust_remote_code",
    "revision": "target.model (org/name@REVISION)",
    "code_revision": "target.model (org/name@REVISION)",
    "seed": "sampling.seed",
    "speculative_config": "drafters and speculation",
    "spec_method": "drafters",
    "spec_model": "drafters",
    "spec_tokens": "speculation.window",
}
"""Argument of vLLM's engine → the key that sets it."""
REFUSED = (
    *("worker_cls", "worker_extension_cls", "additional_config", "async_scheduling", "distributed_executor_backend"),
    *("pipeline_parallel_size", "data_parallel_size", "logits_processors", "watermark", "watermark_config"),
    *("scheduler_cls", "enable_lora", "enable_prefix_caching", "enable_chunked_prefill", "skip_tokenizer_init"),
    *("enable_sleep_mode", "generation_config"),
)
"""Arguments of vLLM's engine that keyed sampling or the verifier's loop sets, or does not support."""
INVARIANT_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "FLASH_ATTN_MLA", "TRITON_MLA")
"""vLLM's attention kernels that do not depend on the batch in its batch-invariant mode."""


def validate(config: Config) -> None:
    """Check a configuration of the right types. ConfigError: the first problem found, with its key and the fix."""
    reject_values_not_allowed(config)
    for index, drafter in enumerate(config.drafters):
        key = f"drafters.{index}"
        if not is_named(drafter.method):  # else a user's class, imported where it drafts
            reject_unlisted(f"{key}.method", drafter.method, (*BUILT_IN, "package.module:Class"))
        if drafter.method in BUILT_IN:
            reject_keys_against_traits(drafter, key, BUILT_IN[drafter.method].traits)
    target = config.target
    for problems in (
        _of_run_and_cluster(config.run.name, config.cluster),
        _of_target(target),
        _of_engine_arguments(target),
        _of_accelerator("target", target.accelerator, target.gpus),
        _of_drafting(config),
        _of_paced(config),
        *(_of_drafter(drafter, f"drafters.{index}") for index, drafter in enumerate(config.drafters)),
    ):
        _raise_first(problems)


NO_TASKS: Problem = (
    "data.path",
    "is not set, and training needs tasks.",
    "name a file, reasoning_gym:TASK or hf:DATASET, or begin with a shipped configuration: --config train_local_cpu.",
)


def validate_training(config: Config) -> None:
    """Check the relations that a rollout does not need. Raises as `validate`."""
    for key, shipped in (("advantages", ADVANTAGES), ("loss", LOSSES)):
        name = getattr(config.algorithm, key)
        if name is not None and not is_named(name):  # else a user's function, tried before the start
            reject_unlisted(f"algorithm.{key}", name, (*shipped, "package.module:function"))
    _raise_first(_of_training(config))
    _raise_first(_of_trainer(config))


def unused_by_rollouts(config: Config, scores: bool = False) -> list[str]:
    """At most one warning: the sections with values of their own that only training uses; a rollout that `scores` its
    outputs uses `reward`, too."""
    sections = ((name, getattr(config, name)) for name in _TRAINING_SECTIONS if not (scores and name == "reward"))
    names = [name for name, section in sections if section != type(section)()]
    return [f"without effect on a rollout: {', '.join(names)} (only training uses them)"] if names else []


def _raise_first(problems: Iterator[Problem]) -> None:
    for key, problem, fix in problems:
        raise ConfigError(key, problem, fix)


def _of_run_and_cluster(name: str | None, cluster: ClusterConfig) -> Iterator[Problem]:
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        fix = "use letters, digits, `.`, `_` and `-`, at most 100, a letter first."
        yield "run.name", f"{clipped(name)} cannot name a folder and actors.", fix
    if cluster.health_timeout_s < cluster.health_interval_s:
        problem = f"{cluster.health_timeout_s} s is shorter than one health check interval: every actor would fail."
        fix = f"use more than cluster.health_interval_s ({cluster.health_interval_s})."
        yield "cluster.health_timeout_s", problem, fix
    if cluster.address not in ("local", "auto") and (problem := why_no_address(cluster.address)):
        fix = "correct RAY_ADDRESS, its default." if cluster.address == os.environ.get("RAY_ADDRESS") else ""
        yield "cluster.address", problem, fix
    for name in ("num_cpus", "num_gpus"):
        if cluster.address != "local" and getattr(cluster, name) is not None:
            problem = "is set, but a cluster that runs already (cluster.address) has a size of its own."
            yield f"cluster.{name}", problem, "leave it out, or use cluster.address=local."


def why_no_address(address: str) -> str:
    """Problem with the form of a cluster's address; empty for `host:port`."""
    host, _, port = address.rpartition(":")
    if not re.search(r"[/@\s]", address) and host and port.isdecimal() and 0 < int(port) < 65536:
        return ""
    form = "host:port, such as 10.0.0.5:6379 (as `ray start --head` prints it, not the dashboard's and not ray://...)"
    shown = clipped(address if "://" in address else re.sub(".*@", "***@", address))
    return f"{shown} is not the address of a Ray cluster; it must be {form}, `auto` or `local`."


def _of_target(target: TargetConfig) -> Iterator[Problem]:
    ranks, layers = target.tensor_parallel, target.hidden_layers
    is_vllm = target.backend == "vllm"
    if any(layer < 0 for layer in layers) or len(set(layers)) < len(layers):
        yield (
            "target.hidden_layers",
            f"{clipped(layers)} must be different numbers, 0 or more.",
            "use decoder layers, such as [2, 15].",
        )
    if target.max_step_tokens < target.max_batch:
        problem = f"{target.max_step_tokens} positions a step cannot hold one token for each of max_batch rows."
        fix = f"use {target.max_batch} or more, or lower target.max_batch ({target.max_batch})."
        yield "target.max_step_tokens", problem, fix
    yield from _half_precision("target.dtype", target.dtype, "target", target.gpus)
    if ranks > 1 and not is_vllm:
        problem = f"{ranks}, but target.backend={target.backend} runs the model on one device."
        yield "target.tensor_parallel", problem, "use target.backend=vllm, or raise target.replicas."
    if target.gpus not in (0, ranks):
        problem = f"{target.gpus} GPUs for {ranks} rank(s) of target.tensor_parallel; every rank has one."
        split = f", target.tensor_parallel={target.gpus}" if is_vllm else ""
        yield "target.gpus", problem, f"use target.gpus={ranks}{split} or raise target.replicas."
    if not target.gpus and target.cores % ranks:
        problem = f"{target.cores} core(s) cannot be shared out evenly among {ranks} ranks (target.tensor_parallel)."
        yield "target.cores", problem, f"use a multiple of {ranks}."
    if not target.compiled and not is_vllm:
        problem = f"false, but target.backend={target.backend} has no compiled graph of the model to leave out."
        yield "target.compiled", problem, "leave it out, or use target.backend=vllm."


def _of_engine_arguments(target: TargetConfig) -> Iterator[Problem]:
    given, backend = target.engine_arguments, target.backend
    if given and backend != "vllm":
        problem = f"target.backend={backend} has no such arguments."
        yield "target.engine_arguments", problem, "leave it out, or use target.backend=vllm."
    named = str(given.get("attention_backend", INVARIANT_BACKENDS[0])).upper()
    if target.batch_invariant and target.gpus and named not in INVARIANT_BACKENDS:
        problem = f"{clipped(named)} depends on the batch, and target.batch_invariant is set."
        fix = f"use one of {', '.join(INVARIANT_BACKENDS)}, or leave it out."
        yield "target.engine_arguments.attention_backend", problem, fix
    size = given.get("block_size", 16)
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1 or size % 16):
        problem = f"{clipped(size)} is no size of a block of the cache."
        yield "target.engine_arguments.block_size", problem, "use a multiple of 16, or leave it out."
    for name in given:
        key = f"target.engine_arguments.{name}"
        if name in SET_BY_KEYS:
            yield key, "another key sets it.", f"use {SET_BY_KEYS[name]}."
        if name in REFUSED:
            yield key, "keyed sampling or the verifier's loop sets it, or does not support it.", "leave it out."


def _half_precision(key: str, dtype: str, host: str, gpus: int) -> Iterator[Problem]:
    if gpus == 0 and dtype == "float16":
        yield key, "float16 needs a GPU: on a CPU it is slow and loses range.", f"use float32, or {host}.gpus=1."


def _of_accelerator(section: str, accelerator: str | None, gpus: int) -> Iterator[Problem]:
    if accelerator is not None and not gpus:
        problem = f"{clipped(accelerator)} is a kind of GPUs, and {section}.gpus is 0."
        yield f"{section}.accelerator", problem, f"use {section}.gpus=1, or leave it out."


def _of_drafting(config: Config) -> Iterator[Problem]:
    speculation, mode = config.speculation, config.mode
    if speculation.race_below is not None and speculation.race is not RaceName.tail:
        problem = f"sets the begin of the tail, but speculation.race is {speculation.race.value!r}."
        yield "speculation.race_below", problem, "leave it out, or use speculation.race=tail."
    if mode in (ModeName.coupled, ModeName.decoupled) and not config.drafters:
        problem = f"{mode.value!r} needs at least one drafter, and `drafters` is empty."
        yield "mode", problem, "use mode=auto or mode=plain, or add one: 'drafters=[{method: ngram}]'."
    for index, drafter in enumerate(config.drafters):
        host, gpus = f"drafters.{index}", drafter.gpus
        if mode is ModeName.coupled:
            host, gpus = "target", config.target.gpus
        elif mode is ModeName.auto:  # whichever mode it becomes
            gpus += config.target.gpus
        yield from _half_precision(f"drafters.{index}.dtype", drafter.dtype, host, gpus)
    first: dict[str, int] = {}
    for index, drafter in enumerate(config.drafters):
        earlier = first.setdefault(drafter.method, index)
        if earlier != index:
            problem = f"{clipped(drafter.method)} is already element {earlier}."
            yield f"drafters.{index}.method", problem, f"keep one and raise drafters.{earlier}.replicas."
    if len(first) > MAX_METHODS:
        yield "drafters", f"{len(first)} methods; at most {MAX_METHODS} are compared.", "take some out."
    for index, drafter in enumerate(config.drafters if mode is not ModeName.plain else ()):
        if drafter.hosted and not is_hosted(drafter, mode, f"drafters.{index}"):
            problem = f"true, but verifiers run models only in mode=coupled, and mode is {mode.value!r}."
            yield f"drafters.{index}.hosted", problem, "leave it out, or use mode=coupled."


def _of_paced(config: Config) -> Iterator[Problem]:
    if config.paced.device is None:
        return
    if config.target.backend != "hf":
        yield "target.backend", f"{config.target.backend} steps cannot be paced (paced.device).", "use hf."
    for index, drafter in enumerate(config.drafters):
        if drafter.method not in (*_LOOKUPS, "draft_model"):
            fix = f"use draft_model, {' or '.join(_LOOKUPS)}."
            yield f"drafters.{index}.method", f"{drafter.method} cannot be paced (paced.device).", fix
        if drafter.gpus:
            yield f"drafters.{index}.gpus", "paced devices are emulated on CPUs (paced.device).", "use 0."
    if config.target.gpus:
        yield "target.gpus", "paced devices are emulated on CPUs (paced.device).", "use 0."


def _of_drafter(drafter: DrafterConfig, key: str) -> Iterator[Problem]:
    cores, default = drafter.cores, DrafterConfig()
    yield from _of_accelerator(key, drafter.accelerator, drafter.gpus)
    if drafter.hosted and drafter.accelerator is not None:
        problem = f"{clipped(drafter.accelerator)}, but a hosted drafter has the GPUs of its verifier."
        yield f"{key}.accelerator", problem, f"leave it out, or leave out {key}.hosted."
    if not _SMALLEST_SHARE <= cores < math.inf or (cores > 1 and cores != int(cores)):
        problem = f"{cores:g} is neither a whole number of cores nor a share of one."
        yield f"{key}.cores", problem, f"use 1, 2, ..., or {_SMALLEST_SHARE:g} up to below 1."
    used = BUILT_IN[drafter.method].keys if drafter.method in BUILT_IN else ALL_KEYS
    for name in (name for name in ALL_KEYS if name not in used):
        if (value := getattr(drafter, name)) != getattr(default, name):
            problem = f"method {drafter.method} does not use it, but {value!r} is given."
            methods = " or ".join(method for method, one in BUILT_IN.items() if name in one.keys)
            yield f"{key}.{name}", problem, f"leave it out, or set {key}.method={methods}."
    if drafter.gpus > 1:
        problem = f"{drafter.gpus} GPUs, but the model runs on one device."
        yield f"{key}.gpus", problem, f"use 1 and raise {key}.replicas."
    if drafter.min_match > drafter.max_match:
        problem = f"{drafter.min_match} is above max_match ({drafter.max_match}): nothing could ever match."
        yield f"{key}.min_match", problem, "lower min_match or raise max_match."
    online = drafter.online
    if online.batch_tokens > online.buffer_tokens:
        problem = f"{online.batch_tokens} positions a step, but only {online.buffer_tokens} are kept."
        yield f"{key}.online.batch_tokens", problem, f"raise {key}.online.buffer_tokens, or lower it."


def _of_training(config: Config) -> Iterator[Problem]:
    pattern, algorithm = config.reward.answer_pattern, config.algorithm.name
    try:
        re.compile(pattern or "")
    except (re.error, OverflowError, RecursionError) as error:
        problem = f"{clipped(pattern)} is not a regular expression ({clipped_text(str(error))})."
        yield "reward.answer_pattern", problem, "correct it (syntax: Python's re)."
    if config.data.n < smallest_group(make_recipe(config)):
        if config.data.path is None and not config.data.mixture:  # of a command without anything
            yield NO_TASKS
        problem = f"{config.data.n} sample per prompt: {algorithm.value} compares the samples of a prompt."
        yield "data.n", problem, "use 2 or more (8 is common), or algorithm.name=ppo."
    if algorithm is AlgorithmName.ppo and config.algorithm.advantages is not None:
        problem = f"{config.algorithm.advantages}, but ppo estimates advantages by its value head."
        yield "algorithm.advantages", problem, "leave it out, or use another algorithm.name, such as grpo."
    if config.algorithm.importance is Importance.off and config.algorithm.importance_cap is not None:
        problem = f"{config.algorithm.importance_cap:g} caps no weights: algorithm.importance is off."
        yield "algorithm.importance_cap", problem, "leave it out, or use algorithm.importance=token."
    for key, value, keeps_all in (("top_k", config.sampling.top_k, 0), ("top_p", config.sampling.top_p, 1.0)):
        if value != keeps_all:
            problem = f"{value:g} samples from a part of the distribution, and the update trains the whole one."
            yield f"sampling.{key}", problem, f"use {keeps_all:g}, or another sampling.temperature."
    if config.sampling.temperature == 0.0:
        problem = "0 gives the same output for every sample of a prompt, and no gradient."
        yield "sampling.temperature", problem, "use a temperature above 0, such as 1."
    evaluation = config.evaluation
    if evaluation.path is not None and evaluation.share:
        problem = "is set, and evaluation.share, too: an evaluation has one set of prompts."
        yield "evaluation.path", problem, "leave one of them out."
    if evaluation.temperature == 0.0 and evaluation.n > 1:
        problem = f"{evaluation.n} samples per prompt, which are equal at evaluation.temperature=0."
        yield "evaluation.n", problem, "use 1, or a temperature above 0."
    if config.environment.name is not None and not config.data.chat:
        problem = "an environment answers with chat messages, and data.chat is false."
        yield "environment.name", problem, "use data.chat=true, or no environment."
    if config.tracking.wandb_project and importlib.util.find_spec("wandb") is None:
        yield "tracking.wandb_project", "wandb is not installed.", "pip install wandb, or leave it out."


def _of_trainer(config: Config) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.backend is TrainerBackend.torch and trainer.ranks > 1:
        problem = f"{trainer.ranks} ranks, but trainer.backend=torch is a single process."
        yield "trainer.ranks", problem, "use trainer.backend=deepspeed, or 1 rank."
    if trainer.backend is TrainerBackend.deepspeed and importlib.util.find_spec("deepspeed") is None:
        yield "trainer.backend", "DeepSpeed is not installed.", "pip install deepspeed, or use trainer.backend=torch."
    if trainer.lora.rank is not None and importlib.util.find_spec("peft") is None:
        yield "trainer.lora.rank", "peft is not installed.", "pip install peft, or leave it out."
    if trainer.lora.rank is None and trainer.lora != LoraConfig():
        unused = "targets" if trainer.lora.targets else "alpha"
        yield f"trainer.lora.{unused}", "has no effect without trainer.lora.rank.", "set the rank, or leave it out."
    if trainer.gpus > 1:
        problem = f"{trainer.gpus} GPUs, but a rank computes on one."
        yield "trainer.gpus", problem, "use 1 and raise trainer.ranks (trainer.backend=deepspeed)."
    yield from _of_accelerator("trainer", trainer.accelerator, trainer.gpus)
    if trainer.colocate and not within(config.target.accelerator, trainer.accelerator):
        problem = f"{clipped(trainer.accelerator)}, but trainer.colocate trains on the GPUs of the verifiers."
        yield "trainer.accelerator", problem, "leave it out and set target.accelerator, or trainer.colocate=false."
    if trainer.max_staleness and trainer.offload:
        problem = (
            "verifiers give up their caches during updates, and with trainer.max_staleness they generate meanwhile."
        )
        fix = "use trainer.offload=false (and trainer.colocate=false), or trainer.max_staleness=0."
        yield "trainer.offload", problem, fix
    if trainer.colocate and (trainer.gpus, config.target.gpus) != (1, 1):
        problem = f"a rank with trainer.gpus={trainer.gpus} cannot share the GPUs of target.gpus={config.target.gpus}."
        yield "trainer.colocate", problem, "use trainer.gpus=1 and target.gpus=1, or trainer.colocate=false."
    if trainer.colocate and trainer.ranks > config.target.replicas:
        problem = f"{trainer.ranks} ranks cannot share the GPUs of {config.target.replicas} verifier(s)."
        yield "trainer.ranks", problem, f"use {config.target.replicas}, or raise target.replicas."
    if trainer.offload and trainer.gpus and trainer.backend is TrainerBackend.deepspeed and trainer.zero_stage == 3:
        problem = "3 with trainer.offload: DeepSpeed does not move the states of stage 3 from a GPU and back."
        yield "trainer.zero_stage", problem, "use 2, or trainer.offload=false."
    if trainer.warmup_steps > trainer.steps:
        problem = f"{trainer.warmup_steps} steps are more than trainer.steps ({trainer.steps})."
        yield "trainer.warmup_steps", problem, "lower it, or train longer."
