"""Draft methods by name and their traits. The class of a method is imported on use."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from specactor_ray.config.named import import_named, is_named
from specactor_ray.core.errors import ConfigError, clipped, clipped_text


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
    """Whether it learns from finished outputs, receives their last tokens, and implements `forget_history`."""
    reads_features: bool = False
    """Whether it receives the target's hidden states of committed positions and implements `add_features`."""
    draws_noise: bool = False
    """Whether it samples, so that `drafters.N.shared_noise` changes its drafts."""
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
    """Keys of its section that no other built-in method uses."""


BUILT_IN = {
    "ngram": BuiltIn("lookup:NgramProposer", Traits(looks_up=True, keeps_history=True)),
    "suffix": BuiltIn(
        "lookup:SuffixProposer",
        Traits(looks_up=True, keeps_history=True, draws_noise=True),
        ("length_factor", "min_probability"),
    ),
    "draft_model": BuiltIn(
        "model:DraftModelProposer", Traits(draws_noise=True, branches=True, checkpoint=Checkpoint.MODEL)
    ),
    "eagle": BuiltIn(
        "eagle.proposer:EagleProposer",
        Traits(reads_features=True, draws_noise=True, branches=True, checkpoint=Checkpoint.HEAD),
    ),
}


def traits(method: str, key: str = "drafters.N.method") -> Traits:
    """Traits of a method; a user's own class is imported.

    Raises:
        ConfigError: There is no such method; the error names `key`.
    """
    built_in = BUILT_IN.get(method)
    return built_in.traits if built_in is not None else class_of(method, key).traits


def reads_head(method: str) -> bool:
    """Whether `drafters.N.model` of the method is an EAGLE head, not a model."""
    return traits(method).checkpoint is Checkpoint.HEAD


def class_of(method: str, key: str) -> Any:
    """Import the class of a method: built in, or a user's own as `package.module:Class`.

    Raises:
        ConfigError: There is no such class, it is incomplete, or its traits contradict its methods.
    """
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
        fix = "derive it from specactor_ray.draft.slots.RowProposer."
        raise ConfigError(key, f"{method} is no proposer: {lacks}.", fix)
    if not isinstance(found.traits, Traits):
        problem = f"{method}.traits is {clipped(found.traits)}."
        raise ConfigError(key, problem, "use an instance of specactor_ray.config.methods.Traits.")
    for trait, name in (("reads_features", "add_features"), ("keeps_history", "forget_history")):
        has = sum(name in vars(base) for base in bases) > 1  # the interface defines it once
        if has != getattr(found.traits, trait):
            problem = f"{method} {'has' if has else 'lacks'} {name}, but its traits say {trait}={not has}."
            raise ConfigError(key, problem, f"set {trait}={has} in its traits, or {'drop' if has else 'add'} {name}.")
