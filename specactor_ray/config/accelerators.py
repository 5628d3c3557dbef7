"""Kinds of accelerators: the form of the keys `accelerator`, and the nodes that a value allows.

A value is one of Ray's accelerator types (`H100`), or a label of nodes with a condition (`market-type=spot`); commas
stand between several of them. Conditions have Ray's operators: `H100`, `!H100`, `in(L4, A10G)`, `!in(L4, A10G)`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from specactor_ray.config.fields import checked
from specactor_ray.core.errors import ConfigError, clipped

KIND_LABEL = "ray.io/accelerator-type"
"""Label that Ray gives to nodes with accelerators."""
_NAME = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_CONDITION = re.compile(rf"(!?)(?:in\(({_NAME}(?:, ?{_NAME})*)\)|({_NAME}))")
_OLD = {"K80", "P4", "P100", "V100", "T4"}
_LABEL = re.compile(rf"(?:[a-zA-Z0-9.-]{{1,253}}/)?{_NAME}")
_FIX = "use an accelerator type such as H100, in(L4, A10G) or !T4, or a label of nodes such as market-type=spot."


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
    own = [(label, condition) for label, condition in _terms(accelerator or "") if label == KIND_LABEL and condition]
    return all(allows(condition, {KIND_LABEL: kind} if kind else {}) for _, condition in own)


def has_bfloat16(accelerator: str) -> bool:
    """Whether all kinds that the value names compute in bfloat16 (NVIDIA: from Ampere on)."""
    kinds = (condition for label, condition in _terms(accelerator) if label == KIND_LABEL)
    return not any(_OLD & set(re.findall(_NAME, condition)) for condition in kinds if not condition.startswith("!"))


def of_kind(accelerator: str | None, kind: str) -> str:
    """The value with this single kind, and its conditions on other labels."""
    others = [f"{label}={one}" for label, one in _terms(accelerator or "") if label != KIND_LABEL]
    return ", ".join([kind, *others])


def _terms(value: str) -> list[tuple[str, str]]:
    """Label and condition of each part of a value."""
    parts = [part.strip() for part in re.split(r",(?![^(]*\))", value)]
    pairs = [part.partition("=") for part in parts]
    return [(label.strip(), one.strip()) if mark else (KIND_LABEL, label) for label, mark, one in pairs]
