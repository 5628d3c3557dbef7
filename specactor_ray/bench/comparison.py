"""Comparison of two rollouts of the same requests: token for token, and in speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

Place = tuple[int, int]
"""Prompt index and sample index, which identify a request in two rollouts."""


@dataclass(frozen=True, slots=True)
class Output:
    """Output of one request."""

    token_ids: tuple[int, ...]
    finish_reason: str
    error: str = ""
    margins: tuple[float, ...] | None = None


def differences(reference: Mapping[Place, Output], outputs: Mapping[Place, Output]) -> list[dict[str, Any]]:
    """Every request whose tokens or end differ from the reference's, with the first position that does.

    A request that is missing or ended otherwise (for example with an error) has `position` None and a `note`.
    """
    found = []
    for place in sorted(reference.keys() | outputs.keys()):
        expected, got = reference.get(place), outputs.get(place)
        if expected is None or got is None:
            missing = "the reference" if expected is None else "this variant"
            found.append(_entry(place, note=f"{missing} has no such request"))
        elif expected.token_ids != got.token_ids:
            found.append(_first_difference(place, expected, got))
        elif expected.finish_reason != got.finish_reason:
            note = f"ended by {got.finish_reason} in place of {expected.finish_reason} {got.error or expected.error}"
            found.append(_entry(place, note=note.strip()))
    return found


def _first_difference(place: Place, expected: Output, got: Output) -> dict[str, Any]:
    pairs = zip(expected.token_ids, got.token_ids, strict=False)
    position = next((number for number, (one, other) in enumerate(pairs) if one != other), None)
    if position is None:
        note = f"{len(got.token_ids)} tokens ({got.finish_reason}) in place of {len(expected.token_ids)}"
        return _entry(place, note=f"{note} {got.error or expected.error}".strip())
    return _entry(
        place,
        position=position,
        token=got.token_ids[position],
        reference_token=expected.token_ids[position],
        margin=_at(expected.margins, position),
        own_margin=_at(got.margins, position),
    )


def _at(values: Sequence[float] | None, position: int) -> float | None:
    return None if values is None or position >= len(values) else values[position]


def _entry(place: Place, **found: Any) -> dict[str, Any]:
    keys = ("position", "token", "reference_token", "margin", "own_margin")
    return {"prompt_index": place[0], "sample_index": place[1], **dict.fromkeys(keys), "note": "", **found}


def ratio_with_error(plain: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Ratio of the other's speed to that of `plain` over pairs of turns with the same work, and its standard error,
    infinite for a single pair.
    """
    mean_s = fmean(other)
    ratio = fmean(plain) / mean_s
    if len(other) < 2:
        return ratio, math.inf
    spread = stdev(ours * ratio - theirs for ours, theirs in zip(other, plain, strict=True))
    return ratio, spread / mean_s / math.sqrt(len(other))
