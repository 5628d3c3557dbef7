"""Figures of a training run: of a step, of an evaluation, and of the whole run from the records in its files."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specactor_ray.trainer.experience import Experience

COUNTS = ("skipped", "no_gradient")
"""Numbers of optimizer steps left out."""
PHASES = ("rollout", "update", "drafter", "sync", "checkpoint")


def step_line(record: Mapping[str, Any], steps: int, width: int) -> str:
    """A step's most important figures that fit `width` columns; those that say nothing are left out."""
    line, figures = f"step {record['step']}/{steps}: ", list[str]()
    for text in _figures(record["train"], record["speed"], record["seconds"]):
        if len(line) + len(text) + sum(len(one) + 2 for one in figures) <= width:
            figures.append(text)
    return line + ", ".join(figures)


def _figures(train: Mapping[str, Any], speed: Mapping[str, Any], seconds: Mapping[str, float]) -> Iterator[str]:
    """Yield the figures of a step, the most important ones first."""
    reward, sampled = train["reward_mean"], max(train["sampled"], 1)
    yield "reward -" if reward is None else f"reward {reward:.3f} ±{train['reward_std'] / math.sqrt(sampled):.3f}"
    if train["pass_rate"]:
        yield f"pass {train['pass_rate']:.0%}"
    yield f"length {train['length_mean']:.1f}"
    yield f"rollout {seconds['rollout']:.1f} of {seconds['step']:.1f} s"
    yield f"acc. length {speed['acceptance_length']:.2f}"
    optional = (("kl", "kl", 4), ("entropy", "entropy", 3), ("grad", "grad_norm", 3), ("turns", "turns_mean", 1))
    for name, key, digits in optional:
        if train.get(key) is not None:
            yield f"{name} {train[key]:z.{digits}f}"
    yield f"{speed['tokens_per_s']:.0f} tokens/s"
    for method, (drafted, accepted) in speed["by_method"].items():
        if drafted:
            yield f"{accepted / drafted:.0%} of {method}'s drafts right"


def means_by_name(experience: Experience) -> dict[str, float]:
    """Mean value of each reward function, over the outputs to which it applies; if tasks have a `data_source`, mean
    reward of each source."""
    values = defaultdict[str, list[float]](list)
    for task, score in zip(experience.tasks, experience.scores, strict=True):
        if score is not None:
            for name, value in score.rewards.items():
                if value is not None:
                    values[f"reward/{name}"].append(value)
            if source := task.metadata.get("data_source"):
                values[f"reward_by_source/{source}"].append(score.reward)
    return {name: mean(found) for name, found in values.items() if found}


def staleness_of(experience: Experience, version: int) -> dict[str, float]:
    """Number of versions between the weights that sampled a token and those trained by it, mean and maximum."""
    tokens = Counter[int]()
    for trajectory in experience.trajectories:
        for old, begin, end in trajectory.spans():
            tokens[version - old] += sum(trajectory.loss_mask[begin:end]) if trajectory.loss_mask else end - begin
    mean_staleness = sum(age * own for age, own in tokens.items()) / max(tokens.total(), 1)
    return {"staleness_mean": mean_staleness, "staleness_max": max((age for age in tokens if tokens[age]), default=0)}


def numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a record with the names of their sections, such as `("train/reward_mean", 0.5)`."""
    for section in ("train", "gap", "speed", "seconds"):
        for name, value in record[section].items():
            if isinstance(value, int | float):
                yield f"{section}/{name}", float(value)
    for method, (drafted, accepted) in record["speed"].get("by_method", {}).items():
        if drafted:
            yield f"speed/acceptance_rate/{method}", accepted / drafted


def results_of(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a run came to: its first, last and best reward and the step of the best; over all steps tokens per second
    of rollout, acceptance length and rollout's share of the time. None where no step has a number."""
    rewards = {
        one["step"]: one["train"]["reward_mean"] for one in records if one["train"].get("reward_mean") is not None
    }
    best = max(rewards, key=rewards.__getitem__, default=None)

    def over_all(amount: str, rate: str) -> float | None:
        pairs = [(one["speed"][amount], one["speed"][rate]) for one in records if one["speed"].get(rate)]
        steps = sum(tokens / each for tokens, each in pairs)
        return sum(tokens for tokens, _ in pairs) / steps if steps else None

    seconds = [sum(one["seconds"].get(phase, 0.0) for one in records) for phase in ("rollout", "step")]
    return {
        "first_reward": next(iter(rewards.values()), None),
        "last_reward": next(reversed(rewards.values()), None),
        "best_reward": rewards.get(best),
        "best_step": best,
        "tokens_per_s": over_all("generated_tokens", "tokens_per_s"),
        "acceptance_length": over_all("tokens", "acceptance_length"),
        "rollout_share": seconds[0] / seconds[1] if seconds[1] else None,
    }


def totals_of(records: list[dict[str, Any]], rest: Mapping[str, float]) -> dict[str, Any]:
    """Seconds per phase, tokens, drafted and accepted tokens per method, failures, optimizer steps left out and skipped
    tasks of the whole run. `rest`: seconds per phase after the last record, such as those of the last checkpoint."""
    rest = {**rest, "step": sum(rest.values())}
    seconds = {
        phase: round(sum(record["seconds"].get(phase, 0.0) for record in records) + rest.get(phase, 0.0), 3)
        for phase in (*PHASES, "step")
    }
    drafters: dict[str, list[int]] = {}
    for record in records:
        for method, counts in record["speed"]["by_method"].items():
            drafters[method] = [sum(pair) for pair in zip(drafters.get(method, (0, 0)), counts, strict=True)]
    failures: dict[str, Counter[str]] = {"reward": Counter(), "rollout": Counter()}
    for record in records:
        for part, reasons in record["failures"].items():
            failures[part].update(reasons)
    left_out = {name: sum(record["train"].get(name, 0) for record in records) for name in COUNTS}
    tokens = sum(record["speed"]["tokens"] for record in records)
    return {
        "seconds": seconds,
        "tokens": tokens,
        "drafters": drafters,
        "failures": failures,
        "left_out": left_out,
        "skipped_tasks": sum(record["train"].get("skipped_tasks", 0) for record in records),
    }
