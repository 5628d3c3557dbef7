"""Contradictions between keys, and the ranges of `schema.py`. Each function rejects one problem."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from specactor_ray.config.drafting import is_hosted
from specactor_ray.config.engine_arguments import reject_engine_arguments
from specactor_ray.config.methods import BUILT_IN, Checkpoint, Traits
from specactor_ray.config.named import is_named
from specactor_ray.config.online import OnlineWhere, reject_batch_above_buffer, reject_two_sources_of_weights
from specactor_ray.config.ranges import reject_unlisted, reject_values_not_allowed
from specactor_ray.config.schema import MAX_METHODS, Config, DrafterConfig, ModeName, PlanPolicy, RaceName
from specactor_ray.core.errors import ConfigError, clipped

TRAINING_SECTIONS = ("algorithm", "reward", "environment", "trainer", "checkpoint", "tracking")
"""Sections that `validate_training` checks."""
SMALLEST_SHARE = 0.01
"""Smallest share of a core. Ray counts in ten-thousandths; less than a hundredth is no meaningful share."""
LARGEST = 1.0e9
"""Largest number that need not be whole: seconds, gigabytes, weights."""
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")
"""NUL and surrogates: characters that UTF-8 or files cannot represent."""
_FREE_NUMBERS = ("sampling.", "data.options.", "environment.options.", "target.engine_arguments.")
"""Keys with other bounds: those of `SamplingParams`, and of the libraries that read the others."""


def validate(config: Config) -> None:
    """Check a configuration of the right types.

    Raises:
        ConfigError: The first problem found, with its key and the fix.
    """
    for check in CHECKS:
        check(config)
    for index, drafter in enumerate(config.drafters):
        for check_one in DRAFTER_CHECKS:
            check_one(drafter, f"drafters.{index}")


def reject_values_that_nothing_holds(config: Config) -> None:
    """Reject texts that files and terminals cannot represent, and numbers too large for arrays, timers and Ray."""
    for key, value in _leaves(config, ""):
        if isinstance(value, str) and _UNWRITABLE.search(value):
            problem = f"{clipped(value)} holds a NUL or is not valid UTF-8."
            raise ConfigError(key, problem, "write it in UTF-8, without \\0.")
        if isinstance(value, int):
            bits = 64 if key.startswith(_FREE_NUMBERS) else 31
            if abs(value) >= 2**bits:
                raise ConfigError(key, f"{clipped(value)} is too large.", f"use a number below 2**{bits}.")
        elif isinstance(value, float) and not key.startswith(_FREE_NUMBERS) and not abs(value) <= LARGEST:
            raise ConfigError(key, f"{value!r} is out of range.", f"use a finite number, at most {LARGEST:g}.")


def reject_values_outside_their_ranges(config: Config) -> None:
    reject_values_not_allowed(config, "", left_out=TRAINING_SECTIONS)


def reject_run_name_unfit_for_a_folder(config: Config) -> None:
    name = config.run.name
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        problem = f"{clipped(name)} cannot name a folder and actors."
        raise ConfigError("run.name", problem, "use letters, digits, `.`, `_` and `-`, at most 100, a letter first.")


def reject_output_over_input(config: Config) -> None:
    if config.data.path is not None and config.data.path == config.data.output:
        problem = f"{clipped(config.data.output)} is also data.path; the prompts would be overwritten."
        raise ConfigError("data.output", problem, "name another file.")


def reject_step_smaller_than_batch(config: Config) -> None:
    target = config.target
    if target.max_step_tokens < target.max_batch:
        problem = f"{target.max_step_tokens} positions a step cannot hold one token for each of max_batch rows."
        fix = f"use {target.max_batch} or more, or lower target.max_batch ({target.max_batch})."
        raise ConfigError("target.max_step_tokens", problem, fix)


def reject_health_timeout_below_interval(config: Config) -> None:
    cluster = config.cluster
    if cluster.health_timeout_s < cluster.health_interval_s:
        problem = f"{cluster.health_timeout_s} s is shorter than one health check interval: every actor would fail."
        fix = f"use more than cluster.health_interval_s ({cluster.health_interval_s})."
        raise ConfigError("cluster.health_timeout_s", problem, fix)


def reject_address_of_no_cluster(config: Config) -> None:
    address = config.cluster.address
    if address not in ("local", "auto") and (problem := why_no_address(address)):
        raise ConfigError("cluster.address", problem)


def why_no_address(address: str) -> str:
    """Problem with the form of a cluster's address; empty for `host:port`."""
    host, _, port = address.rpartition(":")
    if not re.search(r"[/@\s]", address) and host and port.isdecimal() and 0 < int(port) < 65536:
        return ""
    form = "host:port, such as 10.0.0.5:6379 (as `ray start --head` prints it, not the dashboard's and not ray://...)"
    shown = clipped(address if "://" in address else re.sub(".*@", "***@", address))
    return f"{shown} is not the address of a Ray cluster; it must be {form}, `auto` or `local`."


def reject_size_of_a_foreign_cluster(config: Config) -> None:
    for name in ("num_cpus", "num_gpus"):
        if config.cluster.address != "local" and getattr(config.cluster, name) is not None:
            problem = "is set, but a cluster that runs already (cluster.address) has a size of its own."
            raise ConfigError(f"cluster.{name}", problem, "leave it out, or use cluster.address=local.")


def reject_device_the_target_cannot_use(config: Config) -> None:
    _reject_half_precision_on_a_cpu("target.dtype", config.target.dtype, "target", config.target.gpus)


def reject_ranks_the_backend_has_not(config: Config) -> None:
    target, ranks = config.target, config.target.tensor_parallel
    if ranks > 1 and target.backend != "vllm":
        problem = f"{ranks}, but target.backend={target.backend} runs the model on one device."
        raise ConfigError("target.tensor_parallel", problem, "use target.backend=vllm, or raise target.replicas.")
    if ranks > 1 and config.plan is PlanPolicy.auto:
        problem = f"{ranks} ranks, but plan=auto chooses a verifier's cores, and a profile is of one rank."
        raise ConfigError("target.tensor_parallel", problem, "use plan=fixed.")


def reject_devices_that_do_not_fit_the_ranks(config: Config) -> None:
    target, ranks = config.target, config.target.tensor_parallel
    if target.gpus not in (0, ranks):
        fixes = [f"use target.gpus={ranks}", "raise target.replicas"]
        if target.backend == "vllm":
            fixes.insert(1, f"target.tensor_parallel={target.gpus}")
        problem = f"{target.gpus} GPUs for {ranks} rank(s) of target.tensor_parallel; every rank has one."
        raise ConfigError("target.gpus", problem, f"{', '.join(fixes[:-1])} or {fixes[-1]}.")
    if not target.gpus and target.cores % ranks:
        problem = f"{target.cores} core(s) cannot be shared out evenly among {ranks} ranks (target.tensor_parallel)."
        raise ConfigError("target.cores", problem, f"use a multiple of {ranks}.")


def reject_race_threshold_without_a_tail(config: Config) -> None:
    speculation = config.speculation
    if speculation.race_below is not None and speculation.race is not RaceName.tail:
        problem = f"says when the tail begins, but speculation.race is {speculation.race.value!r}."
        raise ConfigError("speculation.race_below", problem, "leave it out, or use speculation.race=tail.")


def reject_bad_hidden_layers(config: Config) -> None:
    layers = config.target.hidden_layers
    if any(layer < 0 for layer in layers) or len(set(layers)) < len(layers):
        raise ConfigError("target.hidden_layers", f"{clipped(layers)} must be different numbers, 0 or more.")


def reject_speculation_without_drafters(config: Config) -> None:
    if config.mode in (ModeName.coupled, ModeName.decoupled) and not config.drafters:
        problem = f"{config.mode.value!r} needs at least one drafter, and `drafters` is empty."
        raise ConfigError("mode", problem, "use mode=auto or mode=plain, or add one: 'drafters=[{method: ngram}]'.")


def reject_half_precision_of_drafters_on_a_cpu(config: Config) -> None:
    for index, drafter in enumerate(config.drafters):
        host, gpus = f"drafters.{index}", drafter.gpus
        if config.mode is ModeName.coupled or drafter.hosted:
            host, gpus = "target", config.target.gpus
        elif config.mode is ModeName.auto:  # whichever mode it becomes
            gpus += config.target.gpus
        _reject_half_precision_on_a_cpu(f"drafters.{index}.dtype", drafter.dtype, host, gpus)


def reject_compiled_off_for_others(config: Config) -> None:
    if not config.target.compiled and config.target.backend != "vllm":
        problem = f"false, but target.backend={config.target.backend} has no compiled graph of the model to leave out."
        raise ConfigError("target.compiled", problem, "leave it out, or use target.backend=vllm.")


def reject_plan_without_profile(config: Config) -> None:
    if config.plan is PlanPolicy.auto and config.profile is None:
        fix = "name the file: profile=profile.json. Make one: specactor profile --output profile.json"
        raise ConfigError("plan", "'auto' needs a profile of this machine.", fix)


def reject_method_twice(config: Config) -> None:
    first: dict[str, int] = {}
    for index, drafter in enumerate(config.drafters):
        earlier = first.setdefault(drafter.method, index)
        if earlier != index:
            fix = f"keep one and raise drafters.{earlier}.replicas."
            raise ConfigError(
                f"drafters.{index}.method", f"{clipped(drafter.method)} is already element {earlier}.", fix
            )
    if len(first) > MAX_METHODS:
        raise ConfigError("drafters", f"{len(first)} methods; at most {MAX_METHODS} are compared.", "take some out.")


def reject_unknown_method(drafter: DrafterConfig, key: str) -> None:
    if not is_named(drafter.method):  # else a user's class, imported where it drafts
        reject_unlisted(f"{key}.method", drafter.method, (*BUILT_IN, "package.module:Class"))


def reject_drafter_values_outside_their_ranges(drafter: DrafterConfig, key: str) -> None:
    reject_values_not_allowed(drafter, f"{key}.")


def reject_drafter_cores_between_whole_numbers(drafter: DrafterConfig, key: str) -> None:
    cores = drafter.cores
    if not SMALLEST_SHARE <= cores < math.inf or (cores > 1 and cores != int(cores)):
        problem = f"{cores:g} is neither a whole number of cores nor a share of one."
        raise ConfigError(f"{key}.cores", problem, f"use 1, 2, ..., or {SMALLEST_SHARE:g} up to below 1.")


def reject_keys_against_a_built_in_method(drafter: DrafterConfig, key: str) -> None:
    if drafter.method in BUILT_IN:
        reject_keys_against_traits(drafter, key, BUILT_IN[drafter.method].traits)


def reject_keys_against_traits(drafter: DrafterConfig, key: str, traits: Traits) -> None:
    """Reject keys that the method does not use. Also called for a user's own class, once that is imported."""
    method, checkpoint = f"method {drafter.method}", traits.checkpoint
    if checkpoint is not Checkpoint.NONE and not (drafter.model or "").strip():
        raise ConfigError(f"{key}.model", f"{method} needs a model.", f"name {checkpoint.value}.")
    if traits.looks_up and checkpoint is Checkpoint.NONE and drafter.model is not None:
        problem = f"{method} uses no model, but {clipped(drafter.model)} is given."
        raise ConfigError(f"{key}.model", problem, f"leave it out, or set {key}.method=draft_model.")
    if not traits.draws_noise and not drafter.shared_noise:
        problem = f"{method} draws no noise, so there is none to share or not."
        raise ConfigError(f"{key}.shared_noise", problem, "leave it out.")
    if traits.looks_up and drafter.gpus:
        raise ConfigError(f"{key}.gpus", f"{method} runs on the CPU and would leave the GPU idle.", "use 0.")
    if drafter.online.where is not OnlineWhere.off and checkpoint is not Checkpoint.HEAD:
        problem = f"{drafter.online.where.value!r}, but only the method eagle learns online, not {drafter.method}."
        raise ConfigError(f"{key}.online.where", problem, "use off.")


def reject_keys_of_other_methods(drafter: DrafterConfig, key: str) -> None:
    default = DrafterConfig()
    for method, built_in in BUILT_IN.items():
        for name in built_in.keys if drafter.method in BUILT_IN and drafter.method != method else ():
            value = getattr(drafter, name)
            if value != getattr(default, name):
                problem = f"method {drafter.method} does not use it, but {value!r} is given."
                raise ConfigError(f"{key}.{name}", problem, f"leave it out, or set {key}.method={method}.")


def reject_device_the_drafter_cannot_use(drafter: DrafterConfig, key: str) -> None:
    if drafter.gpus > 1:
        problem = f"{drafter.gpus} GPUs, but the model runs on one device."
        raise ConfigError(f"{key}.gpus", problem, f"use 1 and raise {key}.replicas.")


def reject_elastic_bounds_that_nothing_meets(drafter: DrafterConfig, key: str) -> None:
    least, most = drafter.min_replicas, drafter.max_replicas
    if most is None:
        if least:
            problem = f"{least}, but without max_replicas the number of draft actors is not changed."
            raise ConfigError(f"{key}.min_replicas", problem, f"set {key}.max_replicas, or leave it out.")
        return
    if not least <= drafter.replicas <= most:
        problem = f"{drafter.replicas} is not between min_replicas ({least}) and max_replicas ({most})."
        raise ConfigError(f"{key}.replicas", problem, "start with a number between them.")


def reject_elastic_method_without_draft_actors(config: Config) -> None:
    if config.mode is ModeName.plain:
        return
    for index, drafter in enumerate(config.drafters):
        if drafter.max_replicas is not None and is_hosted(drafter, config.mode, f"drafters.{index}"):
            problem = f"verifiers draft by {drafter.method} themselves, so it has no draft actors to scale."
            fix = f"leave it out, or use mode=decoupled and drafters.{index}.hosted=false."
            raise ConfigError(f"drafters.{index}.max_replicas", problem, fix)


def reject_match_range_upside_down(drafter: DrafterConfig, key: str) -> None:
    if drafter.min_match > drafter.max_match:
        problem = f"{drafter.min_match} is above max_match ({drafter.max_match}): nothing could ever match."
        raise ConfigError(f"{key}.min_match", problem, "lower min_match or raise max_match.")


CHECKS: tuple[Callable[[Config], None], ...] = (
    reject_values_that_nothing_holds,
    reject_values_outside_their_ranges,
    reject_run_name_unfit_for_a_folder,
    reject_bad_hidden_layers,
    reject_step_smaller_than_batch,
    reject_health_timeout_below_interval,
    reject_address_of_no_cluster,
    reject_size_of_a_foreign_cluster,
    reject_device_the_target_cannot_use,
    reject_ranks_the_backend_has_not,
    reject_devices_that_do_not_fit_the_ranks,
    reject_output_over_input,
    reject_race_threshold_without_a_tail,
    reject_speculation_without_drafters,
    reject_half_precision_of_drafters_on_a_cpu,
    reject_compiled_off_for_others,
    reject_engine_arguments,
    reject_method_twice,
    reject_elastic_method_without_draft_actors,
    reject_plan_without_profile,
)

DRAFTER_CHECKS: tuple[Callable[[DrafterConfig, str], None], ...] = (
    reject_unknown_method,
    reject_drafter_values_outside_their_ranges,
    reject_drafter_cores_between_whole_numbers,
    reject_keys_against_a_built_in_method,
    reject_keys_of_other_methods,
    reject_device_the_drafter_cannot_use,
    reject_match_range_upside_down,
    reject_elastic_bounds_that_nothing_meets,
    reject_batch_above_buffer,
    reject_two_sources_of_weights,
)


def _leaves(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Key and value of everything below a section, including the user's own keys."""
    if is_dataclass(node):
        items: Any = ((field.name, getattr(node, field.name)) for field in fields(node))
    elif isinstance(node, dict):
        yield from ((key, name) for name in node)
        items = node.items()
    elif isinstance(node, list | tuple):
        items = enumerate(node)
    else:
        yield key, node
        return
    for name, value in items:
        yield from _leaves(value, f"{key}.{name}" if key else name)


def _reject_half_precision_on_a_cpu(key: str, dtype: str, host: str, gpus: int) -> None:
    if gpus == 0 and dtype == "float16":
        problem = "float16 needs a GPU: on a CPU it is slow and loses range."
        raise ConfigError(key, problem, f"use float32, or {host}.gpus=1.")
