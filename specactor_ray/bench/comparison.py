"""Comparison of rollouts of the same requests: token for token, and in speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from specactor_ray.config.schema import ModeName

if TYPE_CHECKING:
    from specactor_ray.rollout.trajectory import RolloutMetrics

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
        if place not in reference:
            found.append(_difference(place, note="the reference has no such request"))
        elif place not in outputs:
            found.append(_difference(place, note="this variant has no such request"))
        else:
            found += _compare(place, reference[place], outputs[place])
    return found


def _compare(place: Place, expected: Output, got: Output) -> list[dict[str, Any]]:
    if (expected.token_ids, expected.finish_reason) == (got.token_ids, got.finish_reason):
        return []
    pairs = zip(expected.token_ids, got.token_ids, strict=False)
    position = next((number for number, (one, other) in enumerate(pairs) if one != other), None)
    if position is not None:
        margins = [one.margins[position] if one.margins is not None else None for one in (expected, got)]
        tokens = {"token": got.token_ids[position], "reference_token": expected.token_ids[position]}
        return [_difference(place, position=position, **tokens, margin=margins[0], own_margin=margins[1])]
    if len(expected.token_ids) != len(got.token_ids):
        note = f"{len(got.token_ids)} tokens ({got.finish_reason}) in place of {len(expected.token_ids)}"
    else:
        note = f"ended by {got.finish_reason} in place of {expected.finish_reason}"
    return [_difference(place, note=f"{note} {got.error or expected.error}".strip())]


def _difference(place: Place, **found: Any) -> dict[str, Any]:
    keys = ("position", "token", "reference_token", "margin", "own_margin")
    return {"prompt_index": place[0], "sample_index": place[1], **dict.fromkeys(keys), "note": "", **found}


def figures_of(requests: int, tokens: int, seconds: float, metrics: RolloutMetrics) -> dict[str, Any]:
    """Speed, counters, and the mean step split into its parts (milliseconds of a verifier's step)."""
    steps = max(metrics.steps, 1)
    parts = ("forward", "sampling", "protocol", "waiting")
    return {
        "seconds": round(seconds, 3),
        "requests": requests,
        "tokens": tokens,
        "tokens_per_s": round(tokens / max(seconds, 1e-9), 3),
        "ms_per_step": {part: round(1e3 * getattr(metrics, f"{part}_s") / steps, 4) for part in parts},
        "metrics": metrics.to_dict(),
    }


def with_ratios(measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The results with `identical`, `ratio`, `baseline` (the fastest plain variant of its batch size and workload) and
    `last_of_group` added."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for result in measured:
        groups.setdefault((result["batch"], result["workload"]), []).append(result)
    results = []
    for group in groups.values():
        base = max((one for one in group if one["mode"] == ModeName.plain.value), key=lambda one: one["tokens_per_s"])
        for result in group:
            added = {
                "identical": None if result.get("peer") else result["requests"] - len(result["differences"]),
                "ratio": round(result["tokens_per_s"] / max(base["tokens_per_s"], 1e-9), 4),
                "baseline": result is base,
                "last_of_group": result is group[-1],
            }
            results.append({**result, **added})
    return results


def all_identical(report: Mapping[str, Any]) -> bool:
    """Whether every variant gave the tokens of plain decoding, in every request. Peers are not compared."""
    return not any(result["differences"] for result in report["results"])


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
