"""Strict loading: defaults < YAML file < dotlist overrides, then type and range checks.

The user's settings are gathered in one plain tree (dicts and lists), in which OmegaConf resolves `${...}` references.
It is then converted to the dataclasses of `schema.py` key by key, so that every message has the full key as it was
written, including list indices.
"""

from __future__ import annotations

import contextlib
import io
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specactor_ray.config.fields import (
    choices,
    default_of,
    describe,
    field_types,
    list_element,
    reject_values_not_allowed,
    takes_auto,
    type_in_words,
    without_none,
)
from specactor_ray.config.references import resolved, value_at, without_values
from specactor_ray.config.rules import validate
from specactor_ray.config.schema import AUTO, Config
from specactor_ray.core.errors import ConfigError, RangeError, clipped, clipped_text, did_you_mean
from specactor_ray.core.files import write_text

SHIPPED = Path(__file__).parents[1] / "conf"
"""Configurations and prompts of the package; in a checkout they are the files of `conf/`."""
Tree = dict[str, Any]
S = TypeVar("S")
_FROM_ENVIRONMENT = "_from_environment"
"""Attribute of a loaded configuration, and of copies of it: path of each key with a value from the environment →
(its `${...}` text, its value)."""
_NULL = "tag:yaml.org,2002:null"
_UNREADABLE = (
    yaml.YAMLError, OmegaConfBaseException, ArithmeticError, AttributeError, LookupError, RecursionError, ValueError
)  # fmt: skip
"""Errors of PyYAML and OmegaConf for invalid texts, such as a tag that does not fit its value."""


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Load and check the configuration: the defaults, changed by the file, changed by the overrides.

    Args:
        path: A YAML file, or the name of a shipped configuration (`local_cpu`); None means the defaults.
        overrides: `key=value` items, the value in YAML: `target.max_batch=8`, `drafters.0.replicas=2`,
            `drafters=[{method: ngram}]`. The last one of a key wins. A list replaces the existing one; a mapping for a
            section (`target={cores: 2}`) changes its keys and keeps the others.

    Raises:
        ConfigError: A file cannot be read, a key is unknown, a value is of the wrong type or out of range, or
            values contradict each other.
    """
    if path is not None and not isinstance(path, str | Path):
        fix = "name a YAML file or a shipped configuration; `specactor_ray.config.load.from_mapping` takes a dict."
        raise ConfigError("config", f"{clipped(path)} is no name.", fix)
    return from_mapping(_read_yaml(Path(path), Config) if path is not None else {}, overrides)


def from_mapping(settings: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Like `load_config`, from nested dicts and lists in place of a file. `settings` is not changed."""
    config, read = _loaded(settings, overrides, Config)
    setattr(config, _FROM_ENVIRONMENT, {path: (text, value_at(config, path)) for path, text in read.items()})
    return config


def load_as(schema: type[S], source: Path | Mapping[str, Any], overrides: Sequence[str] = (), folder: str = "") -> S:
    """Like `load_config`, for another schema: a dataclass of such sections. Relations between keys are not checked.
    Shipped files of this schema are in `folder` of `conf`."""
    settings = _read_yaml(source, schema, folder) if isinstance(source, Path) else source
    return _loaded(settings, overrides, schema)[0]


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML, including defaults; `load_config` of it gives an equal configuration.

    Values from the environment (`${oc.env:TOKEN}`) are written as references, since they may be secrets.
    """
    tree = _literal(_plain(config))
    for path, (reference, value) in getattr(config, _FROM_ENVIRONMENT, {}).items():
        with contextlib.suppress(AttributeError, IndexError, KeyError, TypeError):
            if value_at(config, path) == value:
                value_at(tree, path[:-1])[path[-1]] = reference
    return OmegaConf.to_yaml(tree)


def save_config(config: Config, path: str | Path) -> None:
    """Write `to_yaml(config)` atomically: the file is either complete or unchanged."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, to_yaml(config))


# ---- files ----


def find_file(name: str | Path, folder: str = "") -> Path:
    """The file with this name; if it does not exist, the shipped one: `local_cpu` in `folder` of `conf`, or
    `conf/prompts/demo.jsonl`."""
    path = Path(name)
    if path.exists() or path.is_absolute() or ".." in path.parts:
        return path
    if path.parts[:1] == ("conf",):
        shipped = SHIPPED.joinpath(*path.parts[1:])
    else:
        shipped = SHIPPED / folder / f"{path}.yaml"
    return shipped if shipped.is_file() else path


def shipped_names(folder: str = "") -> list[str]:
    """Names of the shipped configurations of runs, or of the files in another folder of `conf`."""
    return sorted(path.stem for path in (SHIPPED / folder).glob("*.yaml") if path.stem != "runtime_env")


def _read_yaml(path: Path, schema: type, folder: str = "") -> Tree:
    where = str(path)
    try:
        text = find_file(path, folder).read_text(encoding="utf-8")
        container: Any = OmegaConf.load(io.StringIO(_with_quotes(text, schema)))
    except ConfigError:
        raise
    except FileNotFoundError:
        fix = f"name a file, or one shipped with the package: {', '.join(shipped_names(folder))}."
        raise ConfigError(where, "there is no such file.", fix) from None
    except OSError as error:
        if error.errno is not None:
            raise ConfigError(where, f"cannot be read: {error.strerror}.", "name a YAML file.") from None
        container = None  # OmegaConf reads a file with a single number as such
    except _UNREADABLE as error:
        raise ConfigError(where, f"not valid YAML: {yaml_problem(error)}.", "correct the file.") from None
    if not OmegaConf.is_dict(container):
        example = Path("conf", folder, f"{shipped_names(folder)[-1]}.yaml")
        raise ConfigError(where, "the file holds no `key: value` pairs.", f"see {example} for an example.")
    tree: Tree = _plain(container)
    return tree


def yaml_problem(error: Exception) -> str:
    """`line 3, column 7: found duplicate key mode`, without the parser's multi-line report."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = str(getattr(error, "problem", None) or error).splitlines()[0].partition(";")[0].rstrip(".")
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else clipped_text(problem)


def _with_quotes(text: str, schema: Any, key: str = "") -> str:
    """YAML with quotes around what a key for text has: there `No`, `0123` and `1.10` stay as they are written. Raises
    ConfigError for such a key with a comment in place of its value, as in `answer_pattern: #### (.*)`."""
    try:
        spans = sorted(set(_unquoted(text, yaml.compose(text, yaml.SafeLoader), schema, key)), reverse=True)
    except yaml.YAMLError:
        return text  # OmegaConf raises it again
    for begin, end in spans:
        text = f"{text[:begin]}{_quoted(text[begin:end])}{text[end:]}"
    return text


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _unquoted(text: str, node: Any, annotation: Any, key: str) -> Iterator[tuple[int, int]]:
    """Begin and end of each plain value of keys for text in a YAML node of this annotation."""
    kind, _ = without_none(annotation)
    element, is_section = list_element(kind), is_dataclass(kind)
    if isinstance(node, yaml.MappingNode) and is_section:
        for name, value in node.value:
            yield from _unquoted(text, value, field_types(kind).get(name.value), f"{key}.{name.value}".lstrip("."))
    elif isinstance(node, yaml.SequenceNode) and element is not None:
        for index, value in enumerate(node.value):
            yield from _unquoted(text, value, element, f"{key}.{index}")
    elif isinstance(node, yaml.ScalarNode) and kind is str:
        begin, end = node.start_mark.index, node.end_mark.index
        if begin == end and re.match(r"[ \t]*#\S", text[end:]):
            raise ConfigError(key, "has no value, since # begins a comment.", "quote the value.")
        if node.tag != _NULL and text[begin:end] == node.value:
            yield begin, end


# ---- trees ----


def _plain(value: Any) -> Any:
    """Plain dicts with text keys and lists, in which `${...}` references are kept."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return value.name if isinstance(value, Enum) else value


def _literal(value: Any) -> Any:
    """Plain values in which OmegaConf reads no text as a reference."""
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _loaded(settings: Mapping[str, Any], overrides: Sequence[str], schema: type[S]) -> tuple[S, dict[Any, str]]:
    """The settings as a dataclass; path → text of the references that read the environment."""
    if isinstance(overrides, str | Mapping) or not all(isinstance(item, str) for item in overrides):
        raise ConfigError("overrides", f"{clipped(overrides)} is no list of texts.", "write ['KEY=VALUE', ...].")
    tree = _plain(settings)
    for item in overrides:
        _apply_override(tree, item, schema)
    found, read = resolved(tree, lambda: _merged(_plain(schema()), tree))
    try:
        config = _section(schema, found, "", schema)
        validate(config) if isinstance(config, Config) else reject_values_not_allowed(config)
    except ConfigError as error:
        raise without_values(error, tree) from None
    return config, read


# ---- overrides ----


def _apply_override(tree: Tree, item: str, schema: type) -> None:
    """Set one `key=value` in the tree; mappings are merged into the existing section."""
    key, separator, text = item.partition("=")
    key = re.sub(r"\[(\d+)\]", r".\1", key.strip())
    if not separator:
        raise ConfigError(item, "an override without `=`.", "write KEY=VALUE, or --config NAME for a configuration.")
    if not all(key.split(".")):
        raise ConfigError(item, "an override without a key.", "write SECTION.KEY=VALUE.")
    node, slot, annotation = _place(tree, key.split("."), schema)
    old, value = node[slot], _override_value(key, text, annotation)
    if old and value is None and is_dataclass(annotation):
        problem = "an override without a value would drop all that is set in this section."
        raise ConfigError(key, problem, f"write {key}.KEY=VALUE, or '{key}={{KEY: VALUE}}', which keeps other keys.")
    node[slot] = _merged(old, value)


def _override_value(key: str, text: str, annotation: Any) -> Any:
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        begin, end = (0, 0) if node is None else (node.start_mark.index, node.end_mark.index)
        if text[end:].lstrip().startswith("#"):
            if without_none(annotation)[0] is not str or (node is not None and text[begin:end] != node.value):
                raise ConfigError(key, f"{clipped(text)} ends in a comment.", "quote the value: # begins a comment.")
            text = _quoted(text.strip())
        container = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={_with_quotes(text, annotation, key)}"]))
    except ConfigError:
        raise
    except _UNREADABLE as error:
        problem = f"{clipped(text)} is not valid YAML ({yaml_problem(error)})."
        raise ConfigError(key, problem, f"quote the value, and the whole item for the shell: \"{key}='...'\"") from None
    return _plain(container)["value"]


def _merged(old: Any, new: Any) -> Any:
    """The new value; of two mappings, the old one with the keys of the new one."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}


def _place(tree: Tree, parts: list[str], schema: Any) -> tuple[Any, Any, Any]:
    """The dict or list that holds the last part of a key, that part as its key or index, and its annotation. Sections
    that the user has not written are created; list elements are not."""
    node: Any = tree
    annotation, slot = schema, None
    for number, part in enumerate(parts, 1):
        slot, here = part, ".".join(parts[: number - 1])
        section = is_dataclass(annotation)
        annotation = field_types(annotation).get(part) if section else list_element(annotation)
        if isinstance(node, list):
            slot = _index(node, here, part)
        elif not isinstance(node, dict):
            problem = f"{here} is set to {clipped(node)}, which has no keys."
            raise ConfigError(".".join(parts), problem, "override the section as a whole, or correct the file.")
        elif node.get(part) is None:
            is_list = list_element(annotation) is not None
            node[part] = None if number == len(parts) else [] if is_list else {}  # the default of every list is empty
        if number < len(parts):
            node = node[slot]
    return node, slot, annotation


def _index(values: list[Any], key: str, part: str) -> Any:
    if part.isdecimal() and int(part) < len(values):
        return int(part)
    have = "it is empty" if not values else f"it has the elements 0 to {len(values) - 1}"
    problem = f"there is no element {clipped(part)} in the list {key}: {have}."
    example = "{method: ngram}" if key == "drafters" else "..."
    fix = f"give the whole list, for example '{key}=[{example}]'."
    if values and not part.isdecimal():
        fix = f"write {key}.0.{part} for its first element."
    raise ConfigError(f"{key}.{part}", problem, fix)


# ---- types ----


def _section(section: Any, tree: Any, prefix: str, schema: Any, default: Any = None) -> Any:
    """The section that a tree describes; other values are those of `default`, or of the class."""
    if not isinstance(tree, dict):
        fix = f"write it as {type_in_words(section)}."
        raise ConfigError(prefix.rstrip("."), f"{clipped(tree)} is not a section.", fix)
    types = field_types(section)
    for name in tree:
        if name not in types:
            raise _unknown_key(name, list(types), prefix, schema)
    values = {} if default is None else {one.name: getattr(default, one.name) for one in fields(section)}
    for one in fields(section):
        kind, key, given = types[one.name], prefix + one.name, tree.get(one.name)
        if is_dataclass(kind):
            factory: Any = one.default_factory
            mine = None if factory is kind else default_of(one)
            values[one.name] = _section(kind, {} if given is None else given, f"{key}.", schema, mine)
        elif one.name in tree:
            values[one.name] = _value(kind, given, key, schema, takes_auto(one))
    try:
        return section(**values)
    except RangeError as error:  # raised by `SamplingParams`
        raise ConfigError(error.key, f"{error.value} is not allowed.", f"it must {error.allowed}.") from None


def _value(annotation: Any, value: Any, key: str, schema: Any, auto: bool) -> Any:
    element = list_element(annotation)
    if is_dataclass(element):
        if not isinstance(value, list):
            example = f"{key}: [{{{fields(element)[0].name}: ...}}]"
            raise ConfigError(key, f"{clipped(value)} is not a list.", f"write a list of sections: {example}")
        return [_section(element, item, f"{key}.{index}.", schema) for index, item in enumerate(value)]
    try:
        return _converted(annotation, value, auto)
    except (KeyError, OverflowError, TypeError, ValueError):
        fix, near = f"{key} is {type_in_words(annotation, auto)}.", did_you_mean(str(value), choices(annotation))
        raise ConfigError(key, f"{clipped(value)} is of the wrong type or not allowed.{near}", fix) from None


def _converted(annotation: Any, value: Any, auto: bool = True) -> Any:
    """The value as the annotation has it. Raises KeyError, OverflowError, TypeError or ValueError for another one."""
    kind, optional = without_none(annotation)
    element = list_element(kind)
    if optional and (value is None or (auto and value == AUTO and kind in (int, float))):
        return None
    if element is not None and isinstance(value, list):
        return [_converted(element, item) for item in value]
    if kind is bool:
        return _TRUTH[value.lower() if isinstance(value, str) else value]
    if choices(kind):
        word = ("off", "on")[value] if isinstance(value, bool) else value  # YAML reads an unquoted `off` as false
        return kind[word]
    allowed = {int: (int, str), float: (int, float, str), str: (str, int, float)}.get(kind)
    if allowed is not None and type(value) in allowed:
        return kind(value)
    if kind is Any or (typing.get_origin(kind) is dict and isinstance(value, dict)):
        return value
    raise TypeError


_TRUTH = {0: False, 1: True, "true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
"""Forms of a truth value; 0 and 1 equal false and true."""


def _unknown_key(name: str, valid: list[str], prefix: str, schema: type) -> ConfigError:
    section = f"section {prefix.rstrip('.')}" if prefix else "top level"
    elsewhere = [one.key for one in describe(schema) if one.key.endswith(f".{name}")]
    hint = f" Did you mean {' or '.join(elsewhere[:3])}?" if elsewhere else did_you_mean(name, valid, prefix)
    return ConfigError(prefix + name, f"unknown key.{hint}", f"the keys of the {section} are {', '.join(valid)}.")
