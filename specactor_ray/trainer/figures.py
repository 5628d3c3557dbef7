"""Figures of a training run: of a step, of an evaluation, and of the whole run from the records in its files."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, mean, stdev
from typing import TYPE_CHECKING, Any

from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.runs.rollout import Scores
from specactor_ray.transport.messages import RequestStats

if TYPE_CHECKING:
    from specactor_ray.trainer.experience import Experience

LEFT_OUT = {"skipped": "the loss or the gradient is not finite", "no_gradient": "the gradient is 0"}
"""Numbers of optimizer steps left out → why."""
PHASES = ("rollout", "update", "drafter", "sync", "evaluation", "checkpoint")
_SHOWN = 3
"""Number of outputs in the tables of trackers and of the terminal."""


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


def evaluation_figures(experience: Experience, threshold: float) -> dict[str, Any]:
    """Figures of an evaluation: the mean reward with its standard error over prompts, pass@k for a pass at `threshold`,
    lengths in own tokens, the share of outputs that are cut off, and means by reward function."""
    scores = Scores(threshold)
    for trajectory, score in zip(experience.trajectories, experience.scores, strict=True):
        if score is not None:
            scores.rewards[trajectory.prompt_index].append(score.reward)
    means = [fmean(group) for group in scores.rewards.values()]
    return {
        **{name: value for name, value in scores.figures().items() if name != "failures"},
        "standard_error": stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
        "samples": len(experience.trajectories),
        **output_figures(experience.trajectories),
        **means_by_name(experience),
        "failures": {part: dict(reasons) for part, reasons in experience.failures.items()},
    }


def evaluation_line(record: Mapping[str, Any], steps: int) -> str:
    """The figures of an evaluation for a reader."""
    error = record["standard_error"]
    reward = "-" if record["mean"] is None else f"{record['mean']:.3f}" + (f" ±{error:.3f}" if error else "")
    passed = "".join(f", {name} {value:.0%}" for name, value in record.items() if name.startswith("pass@"))
    outputs = f"length {record['length_mean']:.1f}, {record['truncated']:.0%} cut off"
    what = f"{record['samples']} samples in {record['seconds']:.1f} s"
    return f"evaluation of step {record['step']}/{steps}: reward {reward}{passed}, {outputs}, {what}"


def evaluations_of(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """First, last and best evaluation of a run, the latter by its mean reward; None if there is none."""
    scored = [one for one in records if one["mean"] is not None]
    return {
        "first_evaluation": records[0] if records else None,
        "last_evaluation": records[-1] if records else None,
        "best_evaluation": max(scored, key=lambda one: float(one["mean"]), default=None),
    }


def completion_rows(step: int, kind: str, experience: Experience, most: int | None) -> list[dict[str, Any]]:
    """The first `most` outputs as rows of `completions.jsonl`, by prompt and sample."""
    outputs = zip(experience.tasks, experience.trajectories, experience.scores, strict=True)
    return [
        {
            "step": step,
            "kind": kind,
            "task": task.index,
            "sample": one.sample_index,
            "prompt": task.prompt,
            "text": one.text,
            "answer": task.answer,
            **({"reward": None, "rewards": {}} if score is None else asdict(score)),
            "length": one.num_own_tokens,
            "finish_reason": one.finish_reason,
            "acceptance_length": output_figures([one])["acceptance_length"],
            "weight_version": one.weight_version,
        }
        for task, one, score in itertools.islice(outputs, most)
    ]


def shown_rows(rows: Sequence[Mapping[str, Any]], width: int = 0) -> list[dict[str, str]]:
    """A table of a few outputs, each of another prompt; with a `width` on one line each, of the ends of the texts."""
    most = (width - 24) // 3

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.3f}"
        text = str(value[-1].get("content") if value and isinstance(value, list) else "" if value is None else value)
        if width:
            text = text if text.isprintable() else repr(text)[1:-1]
            text = text if len(text) <= most else f"…{text[1 - most :]}"
        return text

    chosen = list({row["task"]: row for row in reversed(rows)}.values())[::-1][:_SHOWN]
    return [{name: cell(row[name]) for name in ("reward", "prompt", "text", "answer")} for row in chosen]


def output_figures(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Mean length in own tokens, share of outputs that are cut off, number of tokens, and acceptance length."""
    lengths = [one.num_own_tokens for one in trajectories]
    stats = RequestStats.total(one.stats for one in trajectories)
    return {
        "length_mean": mean(lengths or [0.0]),
        "truncated": mean([one.finish_reason == "length" for one in trajectories] or [0.0]),
        "tokens": sum(lengths),
        "acceptance_length": (sum(lengths) + stats.discarded) / max(stats.steps, 1),
    }


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
    for section, values in record.items():
        for name, value in values.items() if isinstance(values, Mapping) else ():
            if isinstance(value, int | float):
                yield f"{section}/{name}", float(value)
    for method, (drafted, accepted) in record.get("speed", {}).get("by_method", {}).items():
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
    failures: dict[str, Counter[str]] = {"reward": Counter(), "rollout": Counter()}
    for record in records:
        for method, counts in record["speed"]["by_method"].items():
            drafters[method] = [sum(pair) for pair in zip(drafters.get(method, (0, 0)), counts, strict=True)]
        for part, reasons in record["failures"].items():
            failures[part].update(reasons)
    return {
        "seconds": seconds,
        "tokens": sum(record["speed"]["tokens"] for record in records),
        "drafters": drafters,
        "failures": failures,
        "left_out": {name: sum(record["train"].get(name, 0) for record in records) for name in LEFT_OUT},
        "skipped_tasks": sum(record["train"].get("skipped_tasks", 0) for record in records),
    }
