"""Figures of `specactor bench train`: seconds in pairs, and drafts of each rollout, by step and by part of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specactor_ray.bench.verdict import Round, verdict
from specactor_ray.transport.messages import RequestStats

PLAIN, DRAFTED = "plain", "drafted"
"""Names of the plain rollout, and of the one with the drafts of the configuration."""


@dataclass
class DraftCounts:
    """Counters of the drafts of one rollout of a step."""

    stats: RequestStats = field(default_factory=RequestStats)
    """Counters of the outputs."""
    judged: dict[str, list[int]] = field(default_factory=dict)
    """Draft method → draft tokens that followed right ones, and those of them that were right."""
    supplied: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Requests with a draft, summed over steps, and all requests in steps in which drafts were not suspended."""
    best_length: float = 1.0
    """Largest acceptance length of an output."""


@dataclass
class StepPair:
    """One step and its rollouts: `plain`, which some steps lack, `drafted`, and further ones by their names."""

    step: int
    """Number of the step, from 1."""
    epoch: float
    """Share of the tasks that were taken before the step; above 1 they were seen before."""
    tokens: int
    rollout_s: dict[str, float] = field(default_factory=dict)
    sync_s: dict[str, float] = field(default_factory=dict)
    """Seconds of handing over the step's weights, without their export."""
    drafts: dict[str, DraftCounts] = field(default_factory=dict)
    """Counters of the drafts of each rollout but the plain one."""
    longest: int = 0
    """Tokens of the longest output."""
    differences: list[dict[str, Any]] = field(default_factory=list)
    """Outputs that differ from those of another rollout of the step."""


def figures_of(pairs: Sequence[StepPair], records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The steps that both the pairs and the records of `metrics.jsonl` have, as plain data.

    `plain_s` and `drafted_s` are seconds of the rollout, `shared_s` those of update and export of the weights, which
    are the same work for both; `plain_step_s` and `drafted_step_s` are whole steps: rollout, shared work, hand-over of
    the weights, and with drafts the training of the drafter. Those of plain decoding are None in a step without it.
    `also` has the further rollouts by their names."""
    by_step = {record["step"]: record for record in records}
    steps = []
    for pair in pairs:
        if (record := by_step.get(pair.step)) is None or not pair.sync_s.keys() >= pair.rollout_s.keys():
            continue
        seconds = record["seconds"]
        shared = seconds["update"] + max(seconds["sync"] - sum(pair.sync_s.values()), 0.0)
        whole = {way: rollout_s + pair.sync_s[way] + shared for way, rollout_s in pair.rollout_s.items()}
        steps.append(
            {
                "step": pair.step,
                "epoch": pair.epoch,
                "tokens": pair.tokens,
                "longest": pair.longest,
                "reward": record["train"]["reward_mean"],
                "plain_s": pair.rollout_s.get(PLAIN),
                "drafted_s": pair.rollout_s[DRAFTED],
                "shared_s": shared,
                "plain_step_s": whole.get(PLAIN),
                "drafted_step_s": whole[DRAFTED] + seconds.get("drafter", 0.0),
                **_drafts_of(pair, DRAFTED),
                "also": {
                    way: {"seconds": pair.rollout_s[way], **_drafts_of(pair, way)}
                    for way in pair.drafts
                    if way != DRAFTED
                },
                "differences": pair.differences,
            }
        )
    return steps


def _drafts_of(pair: StepPair, way: str) -> dict[str, Any]:
    drafts = pair.drafts[way]
    return {
        "acceptance_length": (pair.tokens + drafts.stats.discarded) / max(drafts.stats.steps, 1),
        "by_method": {method: list(counts) for method, counts in drafts.stats.by_method.items()},
        "judged": drafts.judged,
        "supplied": drafts.supplied,
        "best_length": drafts.best_length,
    }


def thirds(count: int) -> list[int]:
    """The third, from 0, of each of `count` steps."""
    return [3 * number // count for number in range(count)]


def parts_of(steps: Sequence[Mapping[str, Any]], parts: Sequence[int]) -> list[dict[str, Any]]:
    """Sums and ratios over the steps of each part; `parts` has the part of each step. `rollout` and `step` are verdicts
    on the pairs of its steps (see `verdict`), None without one; `also` has the figures of the further rollouts."""
    return [
        {"part": part, **_part_of([one for one, place in zip(steps, parts, strict=True) if place == part])}
        for part in dict.fromkeys(parts)
    ]


def _part_of(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    drafts = _summed_drafts([(one["tokens"], one) for one in steps])
    paired = [one for one in steps if one["plain_s"] is not None]
    timed = paired or steps
    most, plain_s = drafts["best_length"], sum(one["plain_s"] for one in paired)
    also = {}
    for way in steps[0]["also"]:
        also[way] = _summed_drafts([(one["tokens"], one["also"][way]) for one in steps])
        seconds = [(one["plain_s"], one["also"][way]["seconds"]) for one in paired]
        also[way]["rollout"] = _ratio(seconds, also[way]["best_length"], f"rollout, {way}")
    whole = [(one["plain_step_s"], one["drafted_step_s"]) for one in paired]
    rewards = [one["reward"] for one in steps if one["reward"] is not None]
    return {
        "steps": [steps[0]["step"], steps[-1]["step"]],
        "pairs": len(paired),
        "tokens": sum(one["tokens"] for one in steps),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "plain_tokens_per_s": sum(one["tokens"] for one in paired) / plain_s if paired else None,
        "drafted_tokens_per_s": sum(one["tokens"] for one in timed) / sum(one["drafted_s"] for one in timed),
        "rollout_share": plain_s / sum(one["plain_step_s"] for one in paired) if paired else None,
        **drafts,
        "rollout": _ratio([(one["plain_s"], one["drafted_s"]) for one in paired], most, "rollout"),
        "step": _ratio(whole, most, "whole steps"),
        "also": also,
    }


def _summed_drafts(steps: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Figures of drafts over steps, each with its number of tokens."""
    row_steps = sum(tokens / one["acceptance_length"] for tokens, one in steps if tokens)
    return {
        "acceptance_length": sum(tokens for tokens, _ in steps) / (row_steps or 1.0),
        "by_method": _summed([one["by_method"] for _, one in steps]),
        "judged": _summed([one["judged"] for _, one in steps]),
        "supplied": [sum(pair) for pair in zip(*(one["supplied"] for _, one in steps), strict=True)],
        "best_length": max(one["best_length"] for _, one in steps),
    }


def _ratio(seconds: Sequence[tuple[float, float]], most: float, subject: str) -> dict[str, Any] | None:
    """The verdict on pairs of plain and drafted seconds; they are of the same tokens, so their speeds are
    reciprocals."""
    rounds = [Round(1.0 / plain, 1.0 / drafted) for plain, drafted in seconds]
    return verdict(rounds, subject, most) if rounds else None


def _summed(counts: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """Sums of two counts by draft method."""
    methods = dict.fromkeys(method for one in counts for method in one)
    return {method: [sum(one.get(method, (0, 0))[at] for one in counts) for at in (0, 1)] for method in methods}


def right_share(figures: Mapping[str, Any]) -> float | None:
    """Share of right draft tokens among those after right ones, of all methods of a rollout; None without any."""
    tried, right = (sum(counts[at] for counts in figures["judged"].values()) for at in (0, 1))
    return right / tried if tried else None


def supply_share(figures: Mapping[str, Any]) -> float | None:
    """Share of the requests of a step that had a draft, over the steps of a rollout; None without any step."""
    supplied, requests = figures["supplied"]
    return supplied / requests if requests else None
