"""Draft methods by name and their traits. The class of a method is imported on use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from specactor_ray.config.named import import_named, is_named
from specactor_ray.draft.proposer import Checkpoint, Proposer, Traits
from specactor_ray.errors import ConfigError, SpecActorError, clipped, clipped_text

if TYPE_CHECKING:
    from specactor_ray.config.drafter_spec import DrafterSpec
    from specactor_ray.config.schema import TargetConfig


class BuiltIn(NamedTuple):
    """A method of the package, described without importing torch or numba."""

    place: str
    """`module:Class` in `specactor_ray.draft`."""
    traits: Traits
    keys: tuple[str, ...] = ()
    """Keys of its section that no other built-in method uses."""


BUILT_IN = {
    "ngram": BuiltIn("lookup.proposer:NgramProposer", Traits(looks_up=True, keeps_history=True)),
    "suffix": BuiltIn(
        "lookup.proposer:SuffixProposer",
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
    return built_in.traits if built_in is not None else _class_of(method, key).traits


def reads_head(method: str) -> bool:
    """Whether `drafters.N.model` of the method is an EAGLE head, not a model."""
    return traits(method).checkpoint is Checkpoint.HEAD


def build_proposer(config: DrafterSpec, target: TargetConfig, device: str) -> Proposer:
    """Build the configured proposer for this target on `device` (`cpu` or `cuda`).

    Raises:
        ConfigError: There is no such method, or a user's own class cannot be made.
        ModelLoadError: Its model cannot be loaded or served.
    """
    key, method = "drafters.N.method", clipped_text(config.method)
    proposer_class = _class_of(config.method, key)
    try:
        proposer = proposer_class.from_config(config, target, device)
        if not isinstance(proposer, Proposer):
            raise TypeError(f"from_config returned {clipped(proposer)}")
    except Exception as error:
        if isinstance(error, SpecActorError) or config.method in BUILT_IN:
            raise
        problem = f"{method} cannot be made: {type(error).__name__}: {clipped(error)}."
        raise ConfigError(key, problem, "mend its from_config, or its constructor.") from error
    missing = [name for name in proposer.required if not hasattr(proposer, name)]
    if missing:
        fix = "set method and vocab_size in the class, and call super().__init__() in its constructor."
        raise ConfigError(key, f"{method} is made without {', '.join(missing)}.", fix)
    return proposer


def _class_of(method: str, key: str) -> type[Proposer]:
    """Import the class of a method: built in, or a user's own as `package.module:Class`."""
    if method not in BUILT_IN and not is_named(method):
        raise ConfigError(key, f"unknown method {method!r}; known: {', '.join(BUILT_IN)}.")
    found = import_named(f"{__package__}.{BUILT_IN[method].place}" if method in BUILT_IN else method, key)
    _check(found, clipped_text(method), key)
    proposer_class: type[Proposer] = found
    return proposer_class


def _check(found: Any, method: str, key: str) -> None:
    """Refuse incomplete proposers and traits that contradict their methods."""
    missing = [name for name, value in vars(Proposer).items() if callable(value) and not hasattr(found, name)]
    missing += sorted(getattr(found, "__abstractmethods__", ()))
    if missing or not (isinstance(found, type) and issubclass(found, Proposer)):
        lacks = f"it lacks {', '.join(missing)}" if missing else f"{clipped(found)} is not derived from it"
        fix = "derive it from specactor_ray.draft.slots.RowProposer."
        raise ConfigError(key, f"{method} is no proposer: {lacks}.", fix)
    if not isinstance(found.traits, Traits):
        problem = f"{method}.traits is {clipped(found.traits)}."
        raise ConfigError(key, problem, "use an instance of specactor_ray.draft.proposer.Traits.")
    for trait, name in (("reads_features", "add_features"), ("keeps_history", "forget_history")):
        has = getattr(found, name) is not getattr(Proposer, name)
        if has != getattr(found.traits, trait):
            problem = f"{method} {'has' if has else 'lacks'} {name}, but its traits say {trait}={not has}."
            raise ConfigError(key, problem, f"set {trait}={has} in its traits, or {'drop' if has else 'add'} {name}.")
