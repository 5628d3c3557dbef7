"""One resolution of the configuration: `resolve` settles every `auto` and makes every check that needs no cluster."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from specactor_ray.cluster.address import require_listener
from specactor_ray.config.methods import acting_drafters, drafter_specs, reads_head
from specactor_ray.config.schema import Config, ModeName
from specactor_ray.core.errors import ConfigError
from specactor_ray.core.identity import TokenIdentity
from specactor_ray.models.loading import require_named_model
from specactor_ray.startup.checks import (
    check_draft_models,
    check_target,
    export_what_drafters_read,
    identity_of,
    load_config_of,
)
from specactor_ray.startup.machine import Machine, devices_of, trainer_cores
from specactor_ray.startup.memory import check_memory, settle_caches
from specactor_ray.startup.plan import settle_auto
from specactor_ray.target.sizes import reject_cache_below_one_request
from specactor_ray.target.vllm_settings import require_engine_arguments, require_room, require_vllm


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

    def max_prompt_tokens(self) -> int:
        """Longest prompt that leaves room for a whole output of `sampling.max_tokens`; ConfigError if there is none."""
        wanted, target, context = self.config.sampling.max_tokens, self.config.target, self.context
        if wanted >= context:
            whose = f"target.max_model_len is {context}" if context == target.max_model_len else ""
            whose = whose or f"{target.model} has {context}"
            problem = f"{wanted} leaves no room for a prompt: prompt and output share one context, and {whose}."
            fix = f"use less than {context}, or a higher target.max_model_len if the model allows it."
            raise ConfigError("sampling.max_tokens", problem, fix)
        return context - wanted


def resolve(config: Config, machine: Machine, trains: bool = False) -> Resolved:
    """Settle every `auto` of a valid configuration, which is not changed, and check it against this machine and its
    models; with `trains` the devices of the trainer, too. Nothing is started. What takes no second comes first, before
    torch is imported.

    Raises:
        ConfigError, InputError: A key is wrong; with the key and the fix.
        ModelLoadError: A model is missing or damaged.
        ClusterError: Nothing listens at `cluster.address`.
    """
    require_named(config, machine)
    config, choices = settle_auto(config, machine)
    require_devices(config, machine, trains)
    target = config.target
    model = load_config_of("target.model", target.model, target.trust_remote_code)
    export_what_drafters_read(config)
    context, text = check_target(config, model), model.get_text_config()
    check_draft_models(config, text.vocab_size)
    settle_caches(config, machine)
    reject_cache_below_one_request(target, config.sampling.max_tokens, text)
    check_memory(config, machine.free_bytes)
    identity = identity_of(target, model)
    notes = start_notes(config, machine, identity)
    return Resolved(config, tuple(choices), tuple(notes), identity, context, int(text.vocab_size))


def require_named(config: Config, machine: Machine) -> None:
    """Refuse missing things that a configuration names, by key: vLLM, proposers, what they need (ConfigError), a
    cluster (ClusterError), models (ModelLoadError)."""
    specs, target = drafter_specs(config).values(), config.target
    if target.backend == "vllm":
        require_vllm()
        require_engine_arguments(target.engine_arguments)
        require_room(target, max((one.window for one in specs), default=0))
    if config.cluster.address != "local" and not machine.is_connected:
        require_listener(config.cluster.address)
    require_named_model("target.model", target.model)
    for index, drafter in enumerate(config.drafters if config.mode is not ModeName.plain else ()):
        if drafter.model:
            require_named_model(f"drafters.{index}.model", drafter.model, reads_head(drafter.method))


def require_devices(config: Config, machine: Machine, trains: bool = False) -> None:
    """Refuse a layout that needs more GPUs or CPU cores than the cluster to be started here has; `trains` includes the
    trainer. The ConfigError has the needed and the existing ones."""
    if machine.hosts(config.cluster):
        _require_gpus(config, machine, trains)
        _require_cores(config, machine, trains)


def _require_gpus(config: Config, machine: Machine, trains: bool) -> None:
    target, trainer, acting = config.target, config.trainer, acting_drafters(config)
    wanted = {"target.gpus": target.replicas * target.gpus}
    wanted |= {f"drafters.{i}.gpus": d.replicas * d.gpus for i, d in enumerate(config.drafters) if d in acting}
    wanted |= {"trainer.gpus": trainer.ranks * trainer.gpus * trains}
    there = machine.gpus if config.cluster.num_gpus is None else config.cluster.num_gpus
    if (needed := sum(wanted.values())) > there:
        totals = zip(wanted, itertools.accumulate(wanted.values()), strict=True)
        key = next(key for key, total in totals if total > there)
        whose = ", ".join(f"{name} {count}" for name, count in wanted.items() if count)
        problem = f"the run needs {needed} GPU(s) in all ({whose}), and there are {there}."
        raise ConfigError(key, problem, f"use {key}=0, fewer replicas, or a bigger cluster in cluster.address.")


def _require_cores(config: Config, machine: Machine, trains: bool) -> None:
    target, cluster, trainer = config.target, config.cluster, trainer_cores(config.trainer) if trains else 0
    shares = [drafter.cores for drafter in acting_drafters(config) for _ in range(drafter.replicas)]
    verifiers, there = target.replicas * target.cores, machine.cores
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


def start_notes(config: Config, machine: Machine, identity: TokenIdentity) -> list[str]:
    """Messages before a start: about one that takes minutes, CPU cores that it leaves idle, and about the identity
    of tokens where that needs words: on GPUs, and where they agree up to near-ties."""
    target = config.target
    notes = [identity.line] if target.gpus or not identity.holds else []
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
