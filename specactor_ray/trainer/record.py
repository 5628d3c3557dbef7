"""Output of a training run: a record per step, shown, kept and tracked; at the end a summary."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean, pstdev
from typing import TYPE_CHECKING, Any

import yaml

from specactor_ray.config import Config, to_yaml
from specactor_ray.core.errors import InputError, clipped_text, counted_by_kind
from specactor_ray.core.files import append_json, write_json
from specactor_ray.core.machine import hardware, versions
from specactor_ray.core.metrics import drafter_health
from specactor_ray.core.progress import PhaseProgress
from specactor_ray.plan.costs import measured_costs
from specactor_ray.rollout.trajectory import RolloutMetrics
from specactor_ray.runs.checkpoint import best_of, find_damage
from specactor_ray.runs.folder import RunOutcome
from specactor_ray.runs.training import TrainingRun, read_metrics
from specactor_ray.trainer.gap import GapRule
from specactor_ray.transport.messages import RequestStats

if TYPE_CHECKING:
    from specactor_ray.rollout.rollout import Rollout
    from specactor_ray.trainer.experience import Experience

logger = logging.getLogger(__name__)

_COUNTS = ("skipped", "no_gradient")
"""Numbers of optimizer steps left out."""
PHASES = ("rollout", "update", "sync", "checkpoint")


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


class StepRecorder:
    """Records one step after the other.

    A record has `train` (training results: equal for equal seeds, regardless of drafts), `gap` (log-probabilities of
    the rollout against the trainer's), `speed`, `seconds` per phase, and `failures`.
    """

    _rollout: Rollout

    def __init__(self, config: Config, run: TrainingRun, show: Callable[[str], None], width: int = 140) -> None:
        """`show` shows a line of at most `width` columns to the user."""
        self._config, self._run, self._show, self._width = config, run, show, width
        self._pending: list[dict[str, Any]] = []
        """Records that are not in the file yet, oldest first."""
        self._parts = contextlib.ExitStack()
        self._trackers: list[Callable[[Mapping[str, Any]], None]] = []
        self._done = self._step = run.state.step
        """Number of steps done, and number of the present step."""
        self._present = "starting Ray, verifiers and trainer"
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._began: float | None = None
        self._gap = GapRule(config.target.dtype, self._recorded())

    def open(self, rollout: Rollout) -> StepRecorder:
        """Begin to record steps with this rollout; as a context manager it closes the trackers."""
        self._rollout = rollout
        self._trackers = [tracker for tracker in (self._tensorboard(), self._wandb()) if tracker is not None]
        self._counted = self._counters()
        """Counters of the rollout at the beginning of the step, which is the end of the step before."""
        return self

    def __enter__(self) -> StepRecorder:
        return self

    def __exit__(self, *error: object) -> None:
        self._parts.close()

    def show_progress(self, progress: PhaseProgress) -> None:
        """Show the present work, such as `step 2/30, rollout 12/32`; called by another thread."""
        present = self._present
        if present.endswith("rollout") and (counts := self._rollout.progress)[1]:
            present += f" {counts[0]}/{counts[1]}"
        progress.update(self._done, present, self._config.trainer.steps)

    def begin(self, step: int) -> None:
        """Begin a step; `step` steps are done."""
        self._step = step + 1
        if self._began is None:
            self._began, self._counted = time.perf_counter(), self._counters()

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the time inside for this phase of the step."""
        self._present = f"step {self._step}/{self._config.trainer.steps}, {phase}"
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - begin

    def end(self, step: int, experience: Experience, update: Mapping[str, float], sync_bytes: int) -> None:
        """Record a finished step in all outputs. Its checkpoint is written later, so that none is ahead of the records;
        its time counts for the next step. Records that the disk refuses are kept and written with the next step."""
        now = time.perf_counter()
        seconds = {**self._seconds, "step": now - (self._began or now)}
        self._seconds, self._began = dict.fromkeys(PHASES, 0.0), now
        # Without a sample nothing was compared or trained.
        learnt = {name: value if experience.samples or name in _COUNTS else None for name, value in update.items()}
        record = {
            "step": step,
            "train": self._train_figures(step, experience, learnt),
            "gap": {"mean": learnt["logprob_gap"], "max": learnt["logprob_gap_max"]},
            "speed": {**self._speed_figures(experience, seconds), "sync_bytes": sync_bytes},
            "seconds": {name: round(value, 4) for name, value in seconds.items()},
            "failures": {part: dict(reasons) for part, reasons in experience.failures.items()},
        }
        self._counted = self._counters()
        self._write(record)
        self._done = step
        self._show(step_line(record, self._config.trainer.steps, self._width))
        self._warn(record, experience.first_skip)
        for tracker in self._trackers:
            try:
                tracker(record)
            except OSError as error:
                logger.error("step %d was not tracked: %s", step, error)

    def finish(self, status: str, checkpoint_failures: int, error: str = "") -> RunOutcome:
        """Write the summary, if the disk accepts it."""
        self._write()
        records, actors = [*self._recorded(), *self._pending], list[dict[str, Any]]()
        with contextlib.suppress(Exception):  # the controller does not answer
            actors = self._rollout.status()
        summary = {
            "run": self._config.run.name,
            "status": status,
            "error": error,
            "steps": records[-1]["step"] if records else 0,
            "checkpoints": [str(path) for path in self._run.store.all()],
            "checkpoint_failures": checkpoint_failures,
            "metrics_pending": len(self._pending),
            "totals": totals_of(records, self._seconds),
            "results": {**results_of(records), "best_checkpoint": self._best_checkpoint()},
            "fallbacks": self._rollout.fallbacks(),
            "identity": self._rollout.resolved.identity.to_dict(),
            "costs": measured_costs(self._config, actors),
            "drafters": drafter_health(actors),
            "config": yaml.safe_load(to_yaml(self._config)),
            "versions": versions(),
            "hardware": hardware(),
        }
        try:
            write_json(self._run.summary_file, summary)
        except OSError as problem:
            logger.error("the summary could not be written: %s", problem)
        return RunOutcome(self._run.folder, summary)

    @property
    def problem(self) -> str:
        """Why the run must end, by what was recorded; empty while there is no reason."""
        return self._gap.problem

    def _best_checkpoint(self) -> str | None:
        found = [path for path in self._run.store.all() if find_damage(path, sums=False) is None]
        best = best_of(found) or (found[-1] if found else None)
        return None if best is None else str(best)

    def _recorded(self) -> list[dict[str, Any]]:
        """Records in the file, as far as it can be read."""
        try:
            return read_metrics(self._run.metrics_file) if self._run.metrics_file.exists() else []
        except InputError as problem:
            logger.error("%s", problem)
            return []

    def _write(self, *records: dict[str, Any]) -> None:
        """Append these records and the pending ones to the file."""
        self._pending += records
        try:
            if self._pending:
                append_json(self._run.metrics_file, *self._pending)
            self._pending.clear()
        except OSError as error:
            logger.error("%d records wait for room in %s: %s", len(self._pending), self._run.metrics_file, error)

    def _tensorboard(self) -> Callable[[Mapping[str, Any]], None] | None:
        if not self._config.tracking.tensorboard:
            return None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            logger.info("tensorboard is not installed; metrics go to the terminal and metrics.jsonl only")
            return None
        first = self._run.state.step + 1  # hides later records of an earlier attempt
        writer: Any = SummaryWriter(str(self._run.folder / "tensorboard"), purge_step=first)
        self._parts.callback(writer.close)

        def write(record: Mapping[str, Any]) -> None:
            for name, value in numbers(record):
                writer.add_scalar(name, value, record["step"])
            writer.flush()

        return write

    def _wandb(self) -> Callable[[Mapping[str, Any]], None] | None:
        project, name = self._config.tracking.wandb_project, self._config.run.name
        if not project:
            return None
        import wandb  # type: ignore[import-not-found]

        run = wandb.init(project=project, name=name, id=name, resume="allow")
        self._parts.callback(run.finish)
        return lambda record: run.log(dict(numbers(record)), step=record["step"])

    def _train_figures(self, step: int, experience: Experience, update: Mapping[str, float | None]) -> dict[str, Any]:
        rewards, config = experience.rewards, self._config
        lengths = [trajectory.num_own_tokens for trajectory in experience.trajectories]
        passed = [reward >= config.reward.pass_threshold for reward in rewards]
        truncated = [trajectory.finish_reason == "length" for trajectory in experience.trajectories]
        if experience.turns:
            update = {"turns_mean": experience.turns / max(len(experience.trajectories), 1), **update}
        if config.trainer.max_staleness:
            update = {**staleness_of(experience, step - 1), **update}
        learnt = {name: value for name, value in update.items() if not name.startswith("logprob_gap")}
        return {
            "reward_mean": mean(rewards) if rewards else None,
            "reward_std": pstdev(rewards) if rewards else None,
            "pass_rate": mean(passed) if passed else None,
            "length_mean": mean(lengths or [0.0]),
            "truncated": mean(truncated or [0.0]),
            "samples": len(experience.samples),
            "sampled": len(experience.trajectories),
            "zero_variance_groups": experience.zero_variance_groups,
            "sampling_rounds": experience.rounds,
            "skipped_tasks": experience.skipped_tasks,
            **means_by_name(experience),
            **learnt,
        }

    def _speed_figures(self, experience: Experience, seconds: Mapping[str, float]) -> dict[str, Any]:
        """Figures of the step's trajectories, whenever they ran: `tokens`, acceptance, `by_method`; and of the time
        since the last record: `generated_tokens` of any step, their rate, `discarded_tokens`, `supply`."""
        (before, generated, discarded), now = self._counted, self._counters()
        generated, discarded = now[1] - generated, now[2] - discarded
        is_ahead = self._config.trainer.max_staleness > 0
        during_s = seconds["step"] if is_ahead else seconds["rollout"] - experience.reward_wait_s
        tokens = sum(trajectory.num_own_tokens for trajectory in experience.trajectories)
        stats = RequestStats.total(trajectory.stats for trajectory in experience.trajectories)
        return {
            "tokens": tokens,
            "generated_tokens": generated,
            "discarded_tokens": discarded,
            "tokens_per_s": generated / max(during_s, 1e-9),
            "acceptance_length": (tokens + stats.discarded) / max(stats.steps, 1),
            "acceptance_rate": stats.accepted / max(stats.drafted, 1),
            "supply": now[0].since(before).supply,
            "by_method": {method: list(pair) for method, pair in stats.by_method.items()},
            "reward_wait_s": experience.reward_wait_s,
            "environment_s": experience.environment_s / max(len(experience.trajectories), 1),
            "drafter_alarms": sum(one["alarm"] for one in self._rollout.drafters()),
            "rollout_share": seconds["rollout"] / max(seconds["step"], 1e-9),
        }

    def _counters(self) -> tuple[RolloutMetrics, int, int]:
        """Counters of the verifiers; numbers of journaled tokens, and of those that no output has."""
        rollout = self._rollout
        return rollout.metrics(), rollout.committed_tokens, rollout.discarded_tokens

    def _warn(self, record: Mapping[str, Any], first_skip: str) -> None:
        self._gap.judge(record, record["step"] == self._config.trainer.steps)
        for part, text in (("reward", "samples have no reward"), ("rollout", "outputs are missing")):
            if reasons := record["failures"][part]:
                count, causes = sum(reasons.values()), counted_by_kind(reasons)
                logger.warning("step %d: %d %s: %s", record["step"], count, text, causes)
        train = record["train"]
        if skipped := train["skipped_tasks"]:
            logger.warning(
                "step %d: tasks skipped: %d (the first: %s)", record["step"], skipped, clipped_text(first_skip, 400)
            )
        for name, reason in (
            ("skipped", "the loss or the gradient is not finite"),
            ("no_gradient", "the gradient is 0"),
        ):
            if train[name]:
                logger.warning("step %d: optimizer steps left out: %d (%s)", record["step"], train[name], reason)


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
    left_out = {name: sum(record["train"].get(name, 0) for record in records) for name in _COUNTS}
    tokens = sum(record["speed"]["tokens"] for record in records)
    return {
        "seconds": seconds,
        "tokens": tokens,
        "drafters": drafters,
        "failures": failures,
        "left_out": left_out,
        "skipped_tasks": sum(record["train"].get("skipped_tasks", 0) for record in records),
    }
