"""Kinds of accelerators: the form of the keys `accelerator`, and the nodes that a value allows.

A value is one of Ray's accelerator types (`H100`), or a label of nodes with a condition (`market-type=spot`); commas
stand between several of them. Conditions have Ray's operators: `H100`, `!H100`, `in(L4, A10G)`, `!in(L4, A10G)`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from specactor_ray.config.fields import checked
from specactor_ray.core.errors import ConfigError, clipped

KIND_LABEL = "ray.io/accelerator-type"
"""Label that Ray gives to nodes with accelerators."""
_NAME = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_CONDITION = re.compile(rf"(!?)(?:in\(({_NAME}(?:, ?{_NAME})*)\)|({_NAME}))")
_OLD = {"K80", "P4", "P100", "V100", "T4"}
_PART = _NAME.replace(".", "")
_LABEL = re.compile(rf"(?:(?=[^/]{{1,253}}/){_PART}(?:\.{_PART})*/)?{_NAME}")
_FIX = "use an accelerator type such as H100, 'in(L4, A10G)' or '!T4' (YAML needs the quotes), or a label of nodes "
_FIX += "such as market-type=spot."


def accelerator_type() -> Any:
    """A field with a kind of accelerators, or null."""
    return checked(_check)


def _check(key: str, value: str) -> None:
    labels = list[str]()
    for label, condition in _terms(value):
        if not _LABEL.fullmatch(label) or not _CONDITION.fullmatch(condition):
            raise ConfigError(key, f"{clipped(value)} names no kind of accelerator.", _FIX)
        labels.append(label)
    if len(set(labels)) < len(labels):
        problem = f"{clipped(value)} has two conditions on one label, and nodes must meet both."
        raise ConfigError(key, problem, "use one of the form in(L4, A10G), which either meets.")


def label_selector(accelerator: str | None) -> dict[str, str]:
    """Label → condition, in the form of Ray's label selectors; empty for None. A single type becomes `in(TYPE)`: with
    GB200 and GB300 as plain values Ray refuses bundles of other types in the same placement group."""
    found = dict(_terms(accelerator)) if accelerator else {}
    return {label: f"in({one})" if re.fullmatch(_NAME, one) else one for label, one in found.items()}


def allows(accelerator: str | None, labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels may have the actor. A node without a label meets its negated conditions only."""
    for label, condition in _terms(accelerator) if accelerator else ():
        match = _CONDITION.fullmatch(condition)
        if match is None:
            return False
        values = re.split(", ?", match[2] or match[3])
        if (labels.get(label) in values) == bool(match[1]):
            return False
    return True


def allows_kind(accelerator: str | None, kind: str) -> bool:
    """Whether GPUs of this kind may do, whatever other labels their nodes must have. An unknown kind is empty."""
    own = label_selector(accelerator).get(KIND_LABEL)
    return allows(own, {KIND_LABEL: kind} if kind else {})


def within(accelerator: str | None, other: str | None) -> bool:
    """Whether all nodes that the first value allows are allowed by the other one, too."""
    ours = label_selector(accelerator)
    return all(
        ours.get(label) == condition
        or (
            (values := _named(ours.get(label, "")))
            and all(allows(f"{label}={condition}", {label: value}) for value in values)
        )
        for label, condition in label_selector(other).items()
    )


def sets_of(values: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """All sets of these values, small ones first: the GPUs that one of a set allows must be as many as all of it
    need."""
    distinct = list(dict.fromkeys(values))
    return itertools.chain.from_iterable(itertools.combinations(distinct, size + 1) for size in range(len(distinct)))


def has_bfloat16(accelerator: str | None, kind: str = "") -> bool:
    """Whether all kinds that the value names, or else this one, compute in bfloat16 (NVIDIA: from Ampere on)."""
    return not _OLD & set(_named(label_selector(accelerator).get(KIND_LABEL, "")) or [kind])


def of_kind(accelerator: str | None, kind: str) -> str:
    """The value with this single kind, and its conditions on other labels."""
    others = [f"{label}={one}" for label, one in _terms(accelerator or "") if label != KIND_LABEL]
    return ", ".join([kind, *others])


def _named(condition: str) -> list[str]:
    """Values that a condition of `label_selector` asks for; none if it is negated."""
    return re.findall(_NAME, condition[3:]) if condition.startswith("in(") else []


def _terms(value: str) -> list[tuple[str, str]]:
    """Label and condition of each part of a value."""
    parts = [part.strip() for part in re.split(r",(?![^(]*\))", value)]
    pairs = [part.partition("=") for part in parts]
    return [(label.strip(), one.strip()) if mark else (KIND_LABEL, label) for label, mark, one in pairs]
