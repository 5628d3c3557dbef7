"""One resolution of the configuration: `resolve` settles every `auto`, and checks it against devices and models."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specactor_ray.cluster.address import require_listener
from specactor_ray.config.methods import Checkpoint, DrafterSpec, acting_drafters, drafter_specs
from specactor_ray.config.rules import validate
from specactor_ray.config.schema import Config, ModeName, TargetConfig
from specactor_ray.core.errors import ConfigError, ModelLoadError
from specactor_ray.core.identity import TokenIdentity, is_mixture, token_identity, uncovered
from specactor_ray.core.progress import start_phase
from specactor_ray.models.checkpoint_files import known_number
from specactor_ray.models.loading import load_model_config, load_tokenizer, require_named_model
from specactor_ray.models.shapes import GIB, ITEM_BYTES, ROW_BYTES, context_of, token_bytes
from specactor_ray.plan.hardware import paced_costs
from specactor_ray.startup.machine import Machine, devices_of, trainer_cores, trainer_gpus
from specactor_ray.startup.memory import check_memory, plan_rollout_memory, settle_caches
from specactor_ray.startup.mode import settle
from specactor_ray.target.sizes import BLOCK_TOKENS, reject_cache_below_one_request
from specactor_ray.target.vllm_settings import require_engine_arguments, require_room, require_vllm, require_whole_heads


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration that runs as it is: without `auto` (but for a cache that only the node of its GPU can size), and
    checked. Made by `resolve` alone."""

    config: Config
    """Its own copy; do not change it."""
    choices: tuple[str, ...]
    """A line for each choice in place of `auto`."""
    notes: tuple[str, ...]
    """Messages before the start."""
    identity: TokenIdentity
    """Whether its tokens are those of plain decoding one by one."""
    context: int
    """Most tokens of prompt and output together."""
    vocabulary: int
    """Number of the target's token ids."""

    @property
    def max_prompt_tokens(self) -> int:
        return max_prompt_tokens(self.config, self.context)


def resolve(config: Config, machine: Machine, trains: bool = False, sampled: bool = True) -> Resolved:
    """Settle every `auto` of a configuration, which is not changed, and check it against this machine and its models.
    Nothing is started. What takes no second comes first, before torch is imported.

    Args:
        trains: The trainer needs devices, too.
        sampled: Requests have `sampling`, so that its outputs must fit the context; callers of the API bring their own.

    Raises:
        ConfigError, InputError: A key is wrong; with the key and the fix.
        ModelLoadError: A model is missing or damaged.
        ClusterError: Nothing listens at `cluster.address`.
    """
    validate(config)  # it may have been made in code
    known = known_number(require_named(config, machine), "max_position_embeddings")
    if sampled:
        max_prompt_tokens(config, context_within(config.target, known or 0))
    config, choices = settle(config, machine)
    if not trains:
        config.trainer.colocate, config.trainer.accelerator = False, None
    require_devices(config, machine, trains)
    target = config.target
    with start_phase("checking the models"):
        model = load_config_of("target.model", target.model, target.trust_remote_code)
        export_what_drafters_read(config)
        context, text = check_target(config, model), model.get_text_config()
        if sampled:
            max_prompt_tokens(config, context)
        check_draft_models(config, text.vocab_size)
        settle_caches(config, machine)
        reject_cache_below_one_request(target, config.sampling.max_tokens, text)
        if not trains:  # else with the memory of the trainer
            check_memory(config, machine.free_bytes, plan_rollout_memory(config))
    identity = identity_of(target, model)
    notes = start_notes(config, machine, identity)
    return Resolved(config, tuple(choices), tuple(notes), identity, context, int(text.vocab_size))


def context_within(target: TargetConfig, longest: int) -> int:
    """Most tokens of prompt and output together with a model for `longest` tokens; 0: unknown."""
    return min(target.max_model_len or 1 << 30, longest or target.max_model_len or 1 << 30)


def max_prompt_tokens(config: Config, context: int) -> int:
    """Longest prompt that leaves room for a whole output of `sampling.max_tokens`; ConfigError if there is none."""
    wanted, longest = config.sampling.max_tokens, config.target.max_model_len
    if wanted >= context:
        whose = f"target.max_model_len is {longest}" if context == longest else f"{config.target.model} has {context}"
        problem = f"{wanted} leaves no room for a prompt: prompt and output share one context, and {whose}."
        fix = f"use less than {context}, or a higher target.max_model_len if the model allows it."
        raise ConfigError("sampling.max_tokens", problem, fix)
    return context - wanted


def require_named(config: Config, machine: Machine) -> Path | None:
    """Refuse missing things that a configuration names, by key: vLLM, proposers, what they need (ConfigError), a
    cluster (ClusterError), models (ModelLoadError). Returns the folder of the target, if it is on this machine."""
    specs, target = drafter_specs(config).values(), config.target
    if target.backend == "vllm":
        require_vllm()
        require_engine_arguments(target.engine_arguments)
        require_room(target, max((one.window for one in specs), default=0))
    if config.paced.device is not None:
        paced_costs(config.paced)
    if config.cluster.address != "local" and not machine.is_connected:
        require_listener(config.cluster.address)
    folder = require_named_model("target.model", target.model)
    for spec in specs:
        if spec.model:
            require_named_model(f"{spec.key}.model", spec.model, spec.traits.checkpoint is Checkpoint.HEAD)
    return folder


def require_devices(config: Config, machine: Machine, trains: bool = False) -> None:
    """Refuse a layout that needs more GPUs or CPU cores than the cluster to be started here has; `trains` includes the
    trainer. The ConfigError has the needed and the existing ones."""
    if not machine.hosts(config.cluster) or (there := machine.devices(config.cluster)) is None:
        return
    target, trainer, needed = config.target, config.trainer, devices_of(config, trains)
    parts = [("target", target.replicas, target.gpus, float(target.cores))]
    parts += [(one.key, one.replicas, one.gpus, one.cores) for one in acting_drafters(config)]
    if trains:
        gpus = trainer_gpus(trainer) // trainer.ranks
        parts.append(("trainer", trainer.ranks, gpus, trainer_cores(trainer) / trainer.ranks))
    for kind, wanted, have in (("gpus", needed.gpus, there.gpus), ("cores", needed.cores, there.cores)):
        if kind == "cores" and config.cluster.pin_cores:  # cores that actors are bound to must exist, too
            have = min(have, machine.cores + wanted - devices_of(config).cores)
        if wanted > have:
            sizes = {key: number * (gpus if kind == "gpus" else cores) for key, number, gpus, cores in parts}
            totals = zip(sizes, itertools.accumulate(sizes.values()), strict=True)
            key = next((key for key, total in totals if total > have), "target")
            shares = ", ".join(f"{name} {size:g}" for name, size in sizes.items() if size)
            problem = f"the run needs {wanted} {kind} in all ({shares}), and there are {have}."
            fix = f"use fewer {kind} or replicas, mode=coupled, or a bigger cluster in cluster.address."
            raise ConfigError(f"{key}.{kind}", problem, fix)
    if kinds := needed.lacking(there):
        named = {"target": target.accelerator, **{one.key: one.accelerator for one in acting_drafters(config)}}
        key = next((key for key, kind in named.items() if kind in kinds), "trainer")
        problem = f"the run needs {needed.shortage(there)}: those of this machine are {machine.kind}."
        raise ConfigError(f"{key}.accelerator", problem, "leave it out, or name a bigger cluster in cluster.address.")


def start_notes(config: Config, machine: Machine, identity: TokenIdentity) -> list[str]:
    """Messages before a start: about one that takes minutes, CPU cores that it leaves idle, and about the identity
    of tokens where that needs words: on GPUs, and where they agree up to near-ties."""
    target = config.target
    notes = [identity.line] if target.gpus or not identity.holds else []
    if config.mode is ModeName.decoupled and config.drafters and not acting_drafters(config):
        reason = "since verifiers host all drafters; drafters.0.hosted=false makes some"
        notes.append(f"mode=decoupled has no draft actors, {reason}")
    if target.backend == "vllm" and target.compiled and not target.gpus:
        compiling = "vLLM compiles the model at every start, minutes on a CPU"
        notes.append(f"{compiling}; target.compiled=false starts sooner, runs slower")
    if (there := machine.devices(config.cluster)) is not None and not target.gpus:
        more = (there.cores - devices_of(config, trains=True).cores) // target.replicas
        more -= more % target.tensor_parallel
        if more > 0:
            used = f"{devices_of(config).cores} of {there.cores} CPU cores are used"
            notes.append(f"{used}; target.cores={target.cores + more} uses more")
    return notes


# ---- models: configurations are read, no weights, and no backend is imported ----


def load_config_of(key: str, name: str, trust_remote_code: bool) -> Any:
    """A model's configuration of transformers; a ModelLoadError has the key."""
    try:
        return load_model_config(name, trust_remote_code=trust_remote_code)
    except ModelLoadError as error:
        raise ModelLoadError(f"{key}: {error}") from error


def identity_of(target: TargetConfig, model: Any) -> TokenIdentity:
    """Whether a run's tokens are those of plain decoding one by one."""
    mixture = is_mixture(model.to_dict())
    return token_identity(
        "cuda" if target.gpus else "cpu", target.dtype, mixture, target.batch_invariant, target.backend
    )


def check_target(config: Config, model: Any) -> int:
    """Refuse a model that the backend cannot hold or split, with a ConfigError. Returns the most tokens of prompt and
    output together: `target.max_model_len`, or fewer if the model was made for fewer."""
    target, name = config.target, config.target.model
    if getattr(model, "is_encoder_decoder", False):
        kind = getattr(model, "model_type", "of an unknown type")
        problem = f"{name} is an encoder-decoder model ({kind}); the target must only decode."
        raise ConfigError("target.model", problem, "choose a decoder-only model.")
    text = model.get_text_config()
    layers, last = target.hidden_layers, int(text.num_hidden_layers) - 1
    if max(layers, default=0) > last:
        problem = f"{max(layers)} is no layer of {name}, which has layers 0 to {last}."
        raise ConfigError("target.hidden_layers", problem, f"use layers up to {last}.")
    if (stop := max(config.sampling.stop_token_ids, default=0)) >= text.vocab_size:
        problem = f"{stop} is no token of {name}; its largest id is {text.vocab_size - 1}."
        raise ConfigError("sampling.stop_token_ids", problem, "remove it, or end outputs by sampling.stop.")
    if target.backend == "vllm":
        require_whole_heads(target, text)
    _reject_kernels_that_depend_on_the_batch(target, model)
    return _checked_context(target, text)


def _reject_kernels_that_depend_on_the_batch(target: TargetConfig, model: Any) -> None:
    """Check `target.batch_invariant` by the model's configuration; engines check the GPU and the layers."""
    if not target.batch_invariant:
        return
    identity, facts = identity_of(target, model), model.to_dict()
    if method := target.engine_arguments.get("quantization"):
        facts["quantization_config"] = {"quant_method": method}
    problem = f"{identity.reason}." if not identity.holds else uncovered(target.backend, facts)
    if problem:
        raise ConfigError("target.batch_invariant", problem, "set target.batch_invariant=false.")


def _checked_context(target: TargetConfig, text: Any) -> int:
    """The context. vLLM scales the positions of some models (not `longrope` and `dynamic`: their context includes it or
    has no angles beyond); `hf` is limited to the context of the model."""
    rope = getattr(text, "rope_parameters", None) or {}
    scaled = rope.get("rope_type", "default") not in ("default", "longrope", "dynamic")
    longest, wanted = context_of(text), target.max_model_len
    if wanted and longest and wanted > longest and (target.backend != "vllm" or not scaled):
        problem = f"{wanted}, but {target.model} was made for {longest} tokens."
        raise ConfigError("target.max_model_len", problem, f"use {longest} or less.")
    return context_within(target, longest)


def export_what_drafters_read(config: Config) -> None:
    """Set `target.hidden_layers` to the layers that the EAGLE head reads, if there is one.

    Raises:
        ConfigError: The key is set to other layers, or not set for a user's own reader of features.
        ModelLoadError: The head cannot be found, or was made for another target.
    """
    target = config.target
    readers = [one for one in drafter_specs(config).values() if one.traits.reads_features]
    heads = [one for one in readers if one.traits.checkpoint is Checkpoint.HEAD and one.model]
    if readers and not heads and not target.hidden_layers:
        problem = f"{readers[0].key} reads the target's hidden states, and none are exported."
        raise ConfigError("target.hidden_layers", problem, "list the decoder layers it reads, such as [2, 15, 28].")
    if not heads:
        return
    from specactor_ray.draft.eagle.checkpoint import read_head_config

    head = str(heads[0].model)
    try:
        read = read_head_config(head, target.model, trust_remote_code=target.trust_remote_code)
    except ModelLoadError as error:
        raise ModelLoadError(f"{heads[0].key}.model: {error}") from error
    layers = list(read.exported_layers)
    if target.hidden_layers not in ([], layers):
        problem = f"{target.hidden_layers} is set, but the EAGLE head {head} reads {layers}."
        raise ConfigError("target.hidden_layers", problem, "leave it out.")
    target.hidden_layers = layers


def check_draft_models(config: Config, vocabulary: int) -> None:
    """Refuse draft models with another vocabulary than the target's, or a cache below a page, with a ConfigError."""
    target = config.target
    for spec in drafter_specs(config).values():
        if spec.model is None or spec.traits.checkpoint is Checkpoint.HEAD:  # heads are checked elsewhere
            continue
        draft = load_config_of(f"{spec.key}.model", spec.model, spec.trust_remote_code)
        row, tokens = 1 if spec.on_gpu else ROW_BYTES, BLOCK_TOKENS["hf"]["gpu" if spec.on_gpu else "cpu"]
        page = tokens * token_bytes(draft.get_text_config(), ITEM_BYTES[spec.dtype], row=row)
        if spec.kv_cache_gb is not None and spec.kv_cache_gb * GIB < page:
            problem = f"{spec.kv_cache_gb:g} holds no page of {spec.model}."
            least = math.ceil(page / GIB * 1e6) / 1e6
            raise ConfigError(f"{spec.key}.kv_cache_gb", problem, f"use {least:g} or more, or leave it out.")
        if draft.vocab_size != vocabulary and not (draft.vocab_size < vocabulary and _share_tokenizer(spec, target)):
            problem = f"{spec.model} has a vocabulary of {draft.vocab_size} tokens, "
            problem += f"the target {target.model} one of {vocabulary}."
            raise ConfigError(
                f"{spec.key}.model", problem, "use a draft model that was trained with the target's tokenizer"
            )


def _share_tokenizer(spec: DrafterSpec, target: TargetConfig) -> bool:
    """Whether both models have the same tokens, so that one embedding is only padded further, as in families of models
    (Qwen2.5: 151,936 rows up to 3B, 152,064 from 7B on)."""
    models = (str(spec.model), spec.trust_remote_code), (target.model, target.trust_remote_code)
    draft, ours = (load_tokenizer(name, trust_remote_code=trust).get_vocab() for name, trust in models)
    return draft == ours
