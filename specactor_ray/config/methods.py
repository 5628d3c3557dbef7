"""Draft methods: their traits, their placement inside verifiers or in draft actors, and the record of each.

The class of a method is imported on use; a user's own one is named as `package.module:Class`.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from specactor_ray.config.schema import MAX_BRANCHES, VERIFIERS_PER_GROUP, Config, DrafterConfig, ModeName
from specactor_ray.config.training_schema import OnlineWhere
from specactor_ray.core.errors import ConfigError, clipped, clipped_text, in_words

WINDOW = 8
"""Draft window if `speculation.window` is `auto` and there are no branches."""
_BRANCHING_WINDOW = 16
"""The same with branches."""


class Checkpoint(Enum):
    """Kinds of checkpoints for `drafters.N.model`."""

    NONE = "nothing"
    MODEL = "a local directory or a Hugging Face id of the same vocabulary"
    HEAD = "the directory of a head that was trained for this target"
    """An EAGLE head, which can be taught online."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a proposer that its callers use."""

    looks_up: bool = False
    """Whether it fills whole windows in microseconds: it follows every request for which it has room, and its seconds
    per token are not measured."""
    keeps_history: bool = False
    """Whether it learns from finished outputs: it receives every output to its end, takes those of other verifiers in
    `learn`, and implements `forget_history`."""
    reads_features: bool = False
    """Whether it receives the target's hidden states of committed positions and implements `add_features`."""
    branches: bool = False
    """Whether it drafts branches beside its tails, up to `speculation.branches` per request."""
    checkpoint: Checkpoint = Checkpoint.NONE


NO_TRAITS = Traits()


class BuiltIn(NamedTuple):
    """A method of the package, described without importing torch or numba."""

    place: str
    """`module:Class` in `specactor_ray.draft`."""
    traits: Traits
    keys: tuple[str, ...] = ()
    """Keys of its section that some other built-in methods do not use."""


_MATCHES = ("min_match", "max_match", "history_tokens")
BUILT_IN = {
    "ngram": BuiltIn("lookup:NgramProposer", Traits(looks_up=True, keeps_history=True), _MATCHES),
    "suffix": BuiltIn("lookup:SuffixProposer", Traits(looks_up=True, keeps_history=True), _MATCHES),
    "draft_model": BuiltIn("model:DraftModelProposer", Traits(branches=True, checkpoint=Checkpoint.MODEL)),
    "eagle": BuiltIn(
        "eagle.proposer:EagleProposer",
        Traits(reads_features=True, branches=True, checkpoint=Checkpoint.HEAD),
    ),
}

# ---- classes ----


def is_named(name: str) -> bool:
    """Whether the name has the form `package.module:name`."""
    return re.fullmatch(r"[\w.]+:\w+", name) is not None


def import_named(name: str, key: str) -> Any:
    """Import the object that `package.module:name`, the value of `key`, names. Any error of the module raises
    ConfigError."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:
        problem = f"{clipped_text(name)} cannot be imported ({clipped_text(in_words(error), 400)})."
        raise ConfigError(key, problem, "check the name, and that the module is on PYTHONPATH and imports.") from error


ALL_KEYS = tuple(dict.fromkeys(name for method in BUILT_IN.values() for name in method.keys))


def traits(method: str, key: str = "drafters.N.method") -> Traits:
    """Traits of a method; a user's own class is imported. Raises as `class_of`."""
    built_in = BUILT_IN.get(method)
    return built_in.traits if built_in is not None else class_of(method, key).traits


def class_of(method: str, key: str) -> Any:
    """Import the class of a method. Raises ConfigError, with `key`, if there is no such class, it is incomplete, or its
    traits contradict its methods."""
    if method not in BUILT_IN and not is_named(method):
        raise ConfigError(key, f"unknown method {method!r}; known: {', '.join(BUILT_IN)}.")
    found = import_named(f"specactor_ray.draft.{BUILT_IN[method].place}" if method in BUILT_IN else method, key)
    _check(found, clipped_text(method), key)
    return found


def _check(found: Any, method: str, key: str) -> None:
    """Refuse incomplete proposers and traits that contradict their methods."""
    bases = found.__mro__ if isinstance(found, type) else ()
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing or not any(base.__module__ == "specactor_ray.draft.proposer" for base in bases):
        lacks = f"it lacks {', '.join(missing)}" if missing else f"{clipped(found)} is not derived from it"
        fix = "derive it from specactor_ray.draft.rows.RowProposer."
        raise ConfigError(key, f"{method} is no proposer: {lacks}.", fix)
    if not isinstance(found.traits, Traits):
        problem = f"{method}.traits is {clipped(found.traits)}."
        raise ConfigError(key, problem, "use an instance of specactor_ray.config.methods.Traits.")
    for trait, name in (("reads_features", "add_features"), ("keeps_history", "forget_history")):
        has = sum(name in vars(base) for base in bases) > 1  # the interface defines it once
        if has != getattr(found.traits, trait):
            problem = f"{method} {'has' if has else 'lacks'} {name}, but its traits say {trait}={not has}."
            raise ConfigError(key, problem, f"set {trait}={has} in its traits, or {'drop' if has else 'add'} {name}.")


# ---- placement ----


def is_hosted(drafter: DrafterConfig, mode: ModeName, key: str = "drafters.N") -> bool:
    """Whether the method of this section, at `key`, drafts inside the verifiers; else it has draft actors. `auto` is
    read as `decoupled`. Raises as `class_of`."""
    if mode is ModeName.coupled or drafter.hosted is False:
        return mode is ModeName.coupled
    return traits(drafter.method, f"{key}.method").looks_up


def hosted_drafters(config: Config) -> list[DrafterSpec]:
    """The methods that draft inside every verifier, in the order of the configuration. Raises as `drafter_specs`."""
    return [one for one in drafter_specs(config).values() if one.replicas and one.hosted]


def acting_drafters(config: Config) -> list[DrafterSpec]:
    """The methods with draft actors, including those with none now. Raises as `drafter_specs`."""
    return [one for one in drafter_specs(config).values() if not one.hosted]


def draft_actors(config: Config) -> dict[str, int]:
    """Method → number of draft actors at the start."""
    return {one.method: one.replicas for one in acting_drafters(config)}


def online_drafter(config: Config) -> DrafterConfig | None:
    """The drafter that the trainer trains, if there is one and it is in use."""
    if config.mode is ModeName.plain:
        return None
    return next((drafter for drafter in config.drafters if drafter.online.where is OnlineWhere.trainer), None)


# ---- records ----


@dataclass
class DrafterSpec(DrafterConfig):
    """The record of a draft method, as used by actors, links and seats: its section with all derived values."""

    key: str = ""
    """Key of its section."""
    hosted: bool = False
    """Whether it drafts inside the verifiers; else it has draft actors."""
    on_gpu: bool = False
    """Whether it computes on a GPU."""
    window: int = WINDOW
    """Draft window: that of the section, else the common one, else that of `auto`."""
    max_batch: int = 16
    """Most requests drafted for at once: that of the section, else all that its verifiers run at once."""
    branches: int = 0
    """Most branches of a request; 0 if its proposers cannot branch, or nothing is verified while they draft."""
    traits: Traits = NO_TRAITS
    """Properties of its proposers."""


def drafter_specs(config: Config) -> dict[str, DrafterSpec]:
    """Method → its record, in the order of the configuration; empty in mode `plain`. Raises ConfigError if a user's
    class cannot be imported or contradicts its section."""
    target, speculation, specs = config.target, config.speculation, dict[str, DrafterSpec]()
    for number, one in enumerate(config.drafters if config.mode is not ModeName.plain else ()):
        key = f"drafters.{number}"
        hosted, found = is_hosted(one, config.mode, key), traits(one.method, f"{key}.method")
        reject_keys_against_traits(one, key, found)
        branches, batch = speculation.branches, target.max_batch
        if hosted or not found.branches:
            branches = 0
        elif branches is None:
            branches = MAX_BRANCHES
        derived = {
            "key": key,
            "hosted": hosted,
            "on_gpu": (target.gpus if hosted else one.gpus) > 0,
            "window": one.window or speculation.window or (_BRANCHING_WINDOW if branches else WINDOW),
            "branches": branches,
            "max_batch": one.max_batch or (batch if hosted else batch * min(target.replicas, VERIFIERS_PER_GROUP)),
            "traits": found,
        }
        specs[one.method] = DrafterSpec(**{**vars(one), **derived})
    return specs


def unused_branches(config: Config) -> str:
    """A warning if `speculation.branches` is set and no drafter branches, else empty. Raises as `drafter_specs`."""
    specs = drafter_specs(config).values()
    if not config.speculation.branches or not specs or any(spec.branches for spec in specs):
        return ""
    why = "hosted drafters" if config.mode is ModeName.coupled else "these draft methods"
    return f"speculation.branches={config.speculation.branches} has no effect: {why} draft one chain"


def reject_keys_against_traits(drafter: DrafterConfig, key: str, traits: Traits) -> None:
    """Raises ConfigError for a key of the section that its method does not use, or lacks."""
    method, checkpoint = f"method {drafter.method}", traits.checkpoint
    if checkpoint is not Checkpoint.NONE and not (drafter.model or "").strip():
        raise ConfigError(f"{key}.model", f"{method} needs a model.", f"name {checkpoint.value}.")
    if traits.looks_up and checkpoint is Checkpoint.NONE and drafter.model is not None:
        problem = f"{method} uses no model, but {clipped(drafter.model)} is given."
        raise ConfigError(f"{key}.model", problem, f"leave it out, or set {key}.method=draft_model.")
    if traits.looks_up and drafter.gpus:
        raise ConfigError(f"{key}.gpus", f"{method} runs on the CPU and would leave the GPU idle.", "use 0.")
    if drafter.online.where is not OnlineWhere.off and checkpoint is not Checkpoint.HEAD:
        problem = f"{drafter.online.where.value!r}, but only the method eagle learns online, not {drafter.method}."
        raise ConfigError(f"{key}.online.where", problem, "use off.")


def scale_refusal(config: Config, method: str, number: int) -> ConfigError | None:
    """Why a run of this configuration cannot have `number` draft actors of `method`; None when it can."""
    known = [drafter.method for drafter in config.drafters]
    if config.mode is not ModeName.decoupled:
        problem = f"{config.mode.value!r} has no draft actors to scale."
        return ConfigError("mode", problem, "start the run with mode=decoupled.")
    if method not in known:
        fix = f"use one of {', '.join(known)}."
        return ConfigError("drafters", f"method {method!r} is not configured for this run.", fix)
    if method not in draft_actors(config):
        key = f"drafters.{known.index(method)}.hosted"
        problem = f"verifiers draft by {method} themselves, so it has no draft actors to scale."
        return ConfigError(key, problem, f"start the run with {key}=false.")
    if not isinstance(number, int) or number < 0:
        return ConfigError(f"drafters.{method}", f"{number!r} is not a number of draft actors.", "use 0 or more.")
    return None
