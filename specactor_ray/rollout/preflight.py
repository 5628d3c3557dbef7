"""Checks before any actor starts. `refuse_early` imports neither Ray nor torch; the others read models' configurations.
No check imports a backend."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from specactor_ray.cluster.address import is_connected, require_listener
from specactor_ray.config.methods import Checkpoint, acting_drafters, drafter_specs, is_hosted, reads_head
from specactor_ray.config.schema import Config, ModeName
from specactor_ray.core.errors import ConfigError, ModelLoadError
from specactor_ray.core.identity import TokenIdentity, is_mixture, token_identity, uncovered
from specactor_ray.core.machine import count_gpus, fitting_dtype
from specactor_ray.models.cache_size import (
    BLOCK_TOKENS,
    GIB,
    ROW_BYTES,
    cached_token_bytes,
    context_of,
    key_value_heads,
    token_bytes,
)
from specactor_ray.models.checkpoint_files import describes_head, read_config, require_head
from specactor_ray.models.loading import load_model_config, load_tokenizer, require_model
from specactor_ray.rollout.memory import require_memory, with_cache
from specactor_ray.rollout.planning import devices_of, existing_devices, resolve, trainer_cores
from specactor_ray.target.vllm_settings import require_engine_arguments, require_room, require_vllm

logger = logging.getLogger(__name__)


def refuse_early(config: Config, trains: bool = False) -> tuple[Config, list[str]]:
    """Make all checks that need neither Ray nor torch, and resolve `mode: auto` (see `resolve`). A UserError has the
    key and the fix."""
    require_named(config)
    config, lines = resolve(config)
    require_devices(config, trains)
    return config, lines


def prepare(config: Config) -> tuple[Config, Any]:
    """Make all checks of a rollout. Returns the configuration to run, without `auto`, with the size of the cache and
    the layers that drafters read; and the target's tokenizer, see `check_drafters_fit_target`."""
    require_parts(config)
    check_target(config)
    config, lines = resolve(config)
    require_devices(config)
    for line in lines:
        logger.info("%s", line)
    config = export_what_drafters_read(config)
    tokenizer = check_drafters_fit_target(config)
    config = with_cache(config)
    check_target(config)  # the default cache, sized by free memory here, may hold no request
    require_memory(config)
    return config, tokenizer


def require_named(config: Config) -> None:
    """Refuse missing things that a configuration names, by key: models (ModelLoadError), vLLM, proposers, a context
    that is long enough (ConfigError), a cluster (ClusterError)."""
    require_parts(config)
    folder = require_named_model("target.model", config.target.model)
    for index, drafter in enumerate(config.drafters if config.mode is not ModeName.plain else ()):
        if drafter.model:
            require_named_model(f"drafters.{index}.model", drafter.model, reads_head(drafter.method))
    if folder is not None:
        facts = read_config(folder)
        _reject_encoder_decoder(config, SimpleNamespace(**facts))
        nested = facts.get("text_config")
        text = SimpleNamespace(**(nested if isinstance(nested, dict) else facts))
        if config.target.backend != "vllm":
            _reject_context_beyond_the_models(config, text)
        max_prompt_tokens(config, text)


def require_parts(config: Config) -> None:
    """`require_named` without models."""
    specs = drafter_specs(config).values()
    if config.target.backend == "vllm":
        require_vllm()
        require_engine_arguments(config.target.engine_arguments)
        require_room(config.target, max((one.window for one in specs), default=0))
    if config.cluster.address != "local" and not is_connected():
        require_listener(config.cluster.address)


def require_named_model(key: str, name: str, is_head: bool = False) -> Path | None:
    """Folder of the `config.json` of a model that a key or option names, if it is on this machine. A ModelLoadError if
    it cannot be found, or is a head, or the head is a model."""
    try:
        folder = require_head(Path(name).expanduser()) if is_head else require_model(name)
        if folder is not None and not is_head and describes_head(folder):
            fix = "name the directory of a model; for a head of a drafter, use method: eagle."
            raise ModelLoadError(f"{name!r} holds an EAGLE head, which is no model. Fix: {fix}")
        return folder
    except ModelLoadError as error:
        raise ModelLoadError(f"{key}: {error}") from None


def known_vocabulary(config: Config) -> int | None:
    """Number of the target's token ids, if its `config.json` is on this machine and has it."""
    size = None
    with contextlib.suppress(ModelLoadError):  # reported by `require_named`
        if (folder := require_model(config.target.model)) is not None:
            facts = read_config(folder)
            nested = facts.get("text_config")
            size = (nested if isinstance(nested, dict) else facts).get("vocab_size")
    return size if isinstance(size, int) else None


def require_devices(config: Config, trains: bool = False) -> None:
    """Refuse a layout that needs more GPUs or CPU cores than the cluster to be started here has; `trains` includes the
    trainer. `mode: auto` must be resolved before. The ConfigError has the needed and the existing ones."""
    if config.cluster.address == "local" and not is_connected():
        _require_gpus(config, trains)
        _require_cores(config, trains)


def _require_gpus(config: Config, trains: bool) -> None:
    target, trainer = config.target, config.trainer
    wanted = {"target.gpus": target.replicas * target.gpus}
    acting = acting_drafters(config)
    wanted |= {f"drafters.{i}.gpus": d.replicas * d.gpus for i, d in enumerate(config.drafters) if d in acting}
    wanted |= {"trainer.gpus": trainer.ranks * trainer.gpus * trains}
    needed = sum(wanted.values())
    if not needed:
        return
    there = count_gpus() if config.cluster.num_gpus is None else config.cluster.num_gpus
    if needed > there:
        totals = zip(wanted, itertools.accumulate(wanted.values()), strict=True)
        key = next(key for key, total in totals if total > there)
        whose = ", ".join(f"{name} {count}" for name, count in wanted.items() if count)
        problem = f"the run needs {needed} GPU(s) in all ({whose}), and there are {there}."
        raise ConfigError(key, problem, f"use {key}=0, fewer replicas, or a bigger cluster in cluster.address.")


def _require_cores(config: Config, trains: bool) -> None:
    target, cluster, trainer = config.target, config.cluster, trainer_cores(config) if trains else 0
    shares = [drafter.cores for drafter in acting_drafters(config) for _ in range(drafter.replicas)]
    verifiers, there = target.replicas * target.cores, len(os.sched_getaffinity(0))
    counted = cluster.num_cpus or there  # cores that Ray counts; cores that actors are bound to must exist, too
    pinned = devices_of(config).cores if cluster.pin_cores else 0
    needed = verifiers + sum(shares) + trainer
    if pinned <= there and needed <= counted:
        return
    whose = f"{target.replicas} verifier(s) with {target.cores} each"
    whose += f", {len(shares)} draft actor(s) with {sum(shares):g} in all" if shares else ""
    whose += f", the trainer with {trainer}" if trainer else ""
    have = str(there) if counted == there else f"{there}, and cluster.num_cpus={counted}"
    problem = f"the run needs {max(pinned, needed):g} CPU cores ({whose}), and there are {have}."
    fix = "fewer cores or replicas (target.*, drafters.N.*), draft actors that share a core (drafters.N.cores=0.25), "
    key = "drafters" if shares and verifiers <= min(there, counted) else "target.cores"
    raise ConfigError(key, problem, fix + "mode=coupled, or a bigger cluster in cluster.address.")


def check_target(config: Config) -> None:
    """Refuse a missing model (ModelLoadError), or one that the backend cannot hold or split (ConfigError)."""
    model = load_target_config(config)
    _reject_encoder_decoder(config, model)
    text = model.get_text_config()
    _reject_context_beyond_the_models(config, text)
    layers, last = config.target.hidden_layers, int(text.num_hidden_layers) - 1
    if max(layers, default=0) > last:
        problem = f"{max(layers)} is no layer of {config.target.model}, which has layers 0 to {last}."
        raise ConfigError("target.hidden_layers", problem, f"use layers up to {last}.")
    if (stop := max(config.sampling.stop_token_ids, default=0)) >= text.vocab_size:
        problem = f"{stop} is no token of {config.target.model}; its largest id is {text.vocab_size - 1}."
        raise ConfigError("sampling.stop_token_ids", problem, "remove it, or end outputs by sampling.stop.")
    if config.target.backend == "vllm":
        _reject_heads_that_cannot_be_split(config, text)
    _reject_cache_below_one_request(config, text)
    _reject_kernels_that_depend_on_the_batch(config, model)


def load_target_config(config: Config) -> Any:
    """The target's model configuration of transformers; a ModelLoadError has the key."""
    return _load_config("target.model", config.target.model, config.target.trust_remote_code)


def _load_config(key: str, name: str, trust_remote_code: bool) -> Any:
    try:
        return load_model_config(name, trust_remote_code=trust_remote_code)
    except ModelLoadError as error:
        raise ModelLoadError(f"{key}: {error}") from error


def max_prompt_tokens(config: Config, text: Any = None) -> int:
    """Longest prompt that leaves room for a whole output of `sampling.max_tokens`; ConfigError if there is none."""
    wanted, longest, context = config.sampling.max_tokens, config.target.max_model_len, context_tokens(config, text)
    if wanted >= context:
        whose = f"target.max_model_len is {longest}" if context == longest else f"{config.target.model} has {context}"
        problem = f"{wanted} leaves no room for a prompt: prompt and output share one context, and {whose}."
        fix = f"use less than {context}, or a higher target.max_model_len if the model allows it."
        raise ConfigError("sampling.max_tokens", problem, fix)
    return context - wanted


def context_tokens(config: Config, text: Any = None) -> int:
    """Most tokens of prompt and output together: `target.max_model_len`, or fewer if the model was made for fewer. The
    target's text configuration is read if it is not given."""
    longest = config.target.max_model_len or 1 << 30
    return min(longest, context_of(text or load_target_config(config).get_text_config()) or longest)


def identity_of(config: Config) -> TokenIdentity:
    """Whether a run's tokens are those of plain decoding one by one. The environment is this process's."""
    target, mixture = config.target, False
    dtype = fitting_dtype(target.dtype, target.gpus > 0, target.backend)
    with contextlib.suppress(ModelLoadError):  # a model that is loaded later
        if (folder := require_model(target.model)) is not None:
            mixture = is_mixture(read_config(folder))
    device = "cuda" if target.gpus else "cpu"
    return token_identity(device, dtype, mixture, target.batch_invariant, target.backend)


def start_notes(config: Config) -> list[str]:
    """Messages before a start: about one that takes minutes, CPU cores that it leaves idle, and about the identity
    of tokens where that needs words: on GPUs, and where they agree up to near-ties."""
    target, identity = config.target, identity_of(config)
    notes = [identity.line] if target.gpus or not identity.holds else []
    if target.backend == "vllm" and target.compiled and not target.gpus:
        compiling = "vLLM compiles the model at every start, minutes on a CPU"
        notes.append(f"{compiling}; target.compiled=false starts sooner, runs slower")
    there, used = existing_devices(config), devices_of(config).cores
    if there is not None and not target.gpus:
        more = (there.cores - devices_of(config, trains=True).cores) // target.replicas
        more -= more % target.tensor_parallel
        if more > 0:
            notes.append(f"{used} of {there.cores} CPU cores are used; target.cores={target.cores + more} uses more")
    return notes


def _reject_encoder_decoder(config: Config, model: Any) -> None:
    if getattr(model, "is_encoder_decoder", False):
        kind = getattr(model, "model_type", "of an unknown type")
        problem = f"{config.target.model} is an encoder-decoder model ({kind}); the target must only decode."
        raise ConfigError("target.model", problem, "choose a decoder-only model.")


def _reject_heads_that_cannot_be_split(config: Config, text: Any) -> None:
    """Check that heads divide among ranks: vLLM gives every rank whole heads; key/value heads may be copied instead."""
    ranks, heads = config.target.tensor_parallel, int(text.num_attention_heads)
    shared = key_value_heads(text)
    fits = [n for n in range(1, heads + 1) if heads % n == 0 and (shared % n == 0 or n % shared == 0)]
    if ranks not in fits:
        problem = f"{ranks} ranks cannot share {heads} attention heads and {shared} key/value heads evenly."
        raise ConfigError("target.tensor_parallel", problem, f"use one of {', '.join(map(str, fits))}.")


def _reject_kernels_that_depend_on_the_batch(config: Config, model: Any) -> None:
    """Check `target.batch_invariant` by the model's configuration; engines check the GPU and the layers."""
    target, facts = config.target, model.to_dict()
    if not target.batch_invariant:
        return
    if method := target.engine_arguments.get("quantization"):
        facts["quantization_config"] = {"quant_method": method}
    identity = identity_of(config)
    problem = f"{identity.reason}." if not identity.holds else uncovered(target.backend, facts)
    if problem:
        raise ConfigError("target.batch_invariant", problem, "set target.batch_invariant=false.")


def _reject_context_beyond_the_models(config: Config, text: Any) -> None:
    """Check the context: vLLM scales the positions of some models (not `longrope` and `dynamic`: their context includes
    it or has no angles beyond); `hf` is limited to the context of the model."""
    rope = getattr(text, "rope_parameters", None) or {}
    scaled = rope.get("rope_type", "default") not in ("default", "longrope", "dynamic")
    fixed = config.target.backend != "vllm" or not scaled
    longest, wanted = context_of(text), config.target.max_model_len
    if wanted and longest and wanted > longest and fixed:
        problem = f"{wanted}, but {config.target.model} was made for {longest} tokens."
        raise ConfigError("target.max_model_len", problem, f"use {longest} or less.")


def _reject_cache_below_one_request(config: Config, text: Any) -> None:
    """Check that the cache holds a request: vLLM does not start if a request of `max_model_len` could not be finished
    in it; `hf` accepts shorter prompts, but a prompt of one token must have room for its output."""
    target, on_vllm = config.target, config.target.backend == "vllm"
    length = target.max_model_len or context_of(text)
    if not on_vllm:
        length = min(length or 1 << 30, 1 + config.sampling.max_tokens)
    plain = not getattr(text, "sliding_window", None) and not getattr(text, "kv_lora_rank", None)
    if (
        target.kv_cache_gb is None
        or not length
        or not plain
        or set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    ):
        return  # other layers keep less, by an amount that only the engine has
    per_token = cached_token_bytes(target, text)
    block = BLOCK_TOKENS[target.backend]["gpu" if target.gpus else "cpu"]
    blocks = int(target.kv_cache_gb * GIB / per_token) // block - on_vllm  # vLLM keeps one empty
    if blocks * block < length:
        needed = (-(-length // block) + on_vllm) * block * per_token / GIB
        problem = (
            f"{target.kv_cache_gb:g} holds {max(blocks, 0) * block} tokens of {target.model} in blocks of {block}, and "
            f"a request may have {length}."
        )
        fix = f"use {math.ceil(needed * 1000) / 1000:g} or more"
        if (held := blocks * block) > config.sampling.max_tokens:
            fix += f", or target.max_model_len={held}"
        elif held > 1:  # a shorter context alone would be refused for its outputs
            fix += f", or sampling.max_tokens={held - 1}" + f" and target.max_model_len={held}" * on_vllm
        fix += "."
        raise ConfigError("target.kv_cache_gb", problem, fix)


def export_what_drafters_read(config: Config) -> Config:
    """The configuration with `target.hidden_layers` set to the layers that its EAGLE head reads, if there is one.

    Raises:
        ConfigError: The key is set to other layers, or not set for a user's own reader of features.
        ModelLoadError: The head cannot be found, or was made for another target.
    """
    readers = [(i, d) for i, d in enumerate(drafter_specs(config).values()) if d.traits.reads_features]
    heads = [(i, d.model) for i, d in readers if d.traits.checkpoint is Checkpoint.HEAD and d.model]
    if readers and not heads and not config.target.hidden_layers:
        problem = f"drafters.{readers[0][0]} reads the target's hidden states, and none are exported."
        raise ConfigError("target.hidden_layers", problem, "list the decoder layers it reads, such as [2, 15, 28].")
    if not heads:
        return config
    from specactor_ray.draft.eagle.checkpoint import read_head_config

    index, head = heads[0]
    trust = config.target.trust_remote_code
    try:
        layers = list(read_head_config(head, config.target.model, trust_remote_code=trust).exported_layers)
    except ModelLoadError as error:
        raise ModelLoadError(f"drafters.{index}.model: {error}") from error
    if config.target.hidden_layers not in ([], layers):
        problem = f"{config.target.hidden_layers} is set, but the EAGLE head {head} reads {layers}."
        raise ConfigError("target.hidden_layers", problem, "leave it out.")
    resolved = copy.deepcopy(config)
    resolved.target.hidden_layers = layers
    return resolved


def _reject_cache_below_a_page(config: Config, index: int, text: Any) -> None:
    from specactor_ray.models.loading import parse_dtype

    drafter = config.drafters[index]
    if drafter.kv_cache_gb is None:
        return
    on_gpu = (config.target.gpus if is_hosted(drafter, config.mode) else drafter.gpus) > 0
    itemsize = parse_dtype(fitting_dtype(drafter.dtype, on_gpu), on_gpu).itemsize
    page = BLOCK_TOKENS["hf"]["gpu" if on_gpu else "cpu"] * token_bytes(text, itemsize, row=1 if on_gpu else ROW_BYTES)
    if drafter.kv_cache_gb * GIB < page:
        problem = f"{drafter.kv_cache_gb:g} holds no page of {drafter.model}."
        least = math.ceil(page / GIB * 1e6) / 1e6
        raise ConfigError(f"drafters.{index}.kv_cache_gb", problem, f"use {least:g} or more, or leave it out.")


def check_drafters_fit_target(config: Config) -> Any:
    """Refuse drafters with another vocabulary than the target's, with a ConfigError. Returns the target's tokenizer,
    or None if the model directory has none (prompts must be token ids then)."""
    target = load_target_config(config)
    if config.mode is not ModeName.plain:
        for index, drafter in enumerate(config.drafters):
            if drafter.model is None or reads_head(drafter.method):  # heads are checked elsewhere
                continue
            draft = _load_config(f"drafters.{index}.model", drafter.model, drafter.trust_remote_code)
            _reject_cache_below_a_page(config, index, draft.get_text_config())
            if draft.vocab_size != target.vocab_size:
                raise ConfigError(
                    f"drafters.{index}.model",
                    f"{drafter.model} has a vocabulary of {draft.vocab_size} tokens, "
                    f"the target {config.target.model} one of {target.vocab_size}.",
                    "use a draft model that was trained with the target's tokenizer",
                )
    try:
        return load_tokenizer(config.target.model, trust_remote_code=config.target.trust_remote_code)
    except ModelLoadError as error:
        logger.warning("%s Prompts must be lists of token ids.", error)
        return None
