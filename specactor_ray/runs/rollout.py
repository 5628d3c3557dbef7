"""One rollout from a configuration to files: the implementation of `specactor rollout` and `jobs/rollout.py`."""

from __future__ import annotations

import contextlib
import functools
import math
import queue
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

import yaml
from rich.console import Console

from specactor_ray.config import Config, to_yaml
from specactor_ray.config.load import save_config
from specactor_ray.config.methods import draft_actors
from specactor_ray.config.rules import unused_by_rollouts
from specactor_ray.config.schema import DataConfig, ModeName, TargetConfig
from specactor_ray.core.console import say
from specactor_ray.core.errors import ConfigError, InputError, ModelLoadError
from specactor_ray.core.files import write_json
from specactor_ray.core.machine import hardware, versions
from specactor_ray.core.metrics import drafter_health
from specactor_ray.core.progress import rollout_progress, start_phase
from specactor_ray.core.signals import ignore_signals, interruption, signals_deferred, sigterm_interrupts
from specactor_ray.models.checkpoint_files import known_number, require_tokenizer
from specactor_ray.models.loading import load_tokenizer, require_named_model
from specactor_ray.plan.costs import measured_costs
from specactor_ray.rollout.prompts import (
    Encoded,
    Prompt,
    Row,
    encode_prompts,
    is_token_ids,
    read_rows,
    split_row,
    text_options,
)
from specactor_ray.runs.folder import (
    CONFIG_FILE,
    SUMMARY_FILE,
    RunOutcome,
    discard_run_folder,
    lease_new,
    results_in,
    run_dir_errors,
)
from specactor_ray.runs.trajectories import SavedRows, TrajectoryWriter, lease_interrupted, read_finished
from specactor_ray.startup.machine import Machine
from specactor_ray.startup.resolve import Resolved, resolve

if TYPE_CHECKING:
    from specactor_ray.rollout.rollout import Rollout
    from specactor_ray.rollout.trajectory import RolloutMetrics


class RowScorer(Protocol):
    """Scores rows of `trajectories.jsonl`, while others are rolled out."""

    def check(self, rows: Sequence[Any]) -> None:
        """Refuse rows of prompts that cannot be scored. Raises UserError, before anything starts."""

    def resume(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take the rows of an interrupted run, beside which functions of a batch score others of the same prompts."""

    def submit(self, row: Mapping[str, Any]) -> tuple[list[Any], Future[list[tuple[Any, str]]]] | None:
        """Take a row; one of a failed request is not scored. Returns the rows that are scored now, if any, and the
        future of their outcomes: a `Score` each, or None and the reason if there is none."""


@dataclass(slots=True)
class Scores:
    """Rewards by prompt. A sample passes with `threshold` or more."""

    threshold: float
    rewards: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    failures: Counter[str] = field(default_factory=Counter)

    def add(self, row: Mapping[str, Any]) -> None:
        """Count a row that has its `reward`, or a `reward_error`."""
        if "reward_error" in row:
            self.failures[row["reward_error"]] += 1
        if row.get("reward") is not None:
            self.rewards[row["prompt_index"]].append(row["reward"])

    def figures(self) -> dict[str, Any]:
        """Mean reward, and `pass@1`, `pass@2`, `pass@4`, ... up to the largest group, as plain data."""
        groups = [(len(one), sum(reward >= self.threshold for reward in one)) for one in self.rewards.values()]
        figures: dict[str, Any] = {
            "scored": sum(size for size, _ in groups),
            "failures": dict(self.failures),
            "mean": fmean(reward for one in self.rewards.values() for reward in one) if groups else None,
        }
        largest = max((size for size, _ in groups), default=0)
        for k in [1 << power for power in range(largest.bit_length())]:
            figures[f"pass@{k}"] = fmean(pass_at_k(size, passed, k) for size, passed in groups if size >= k)
        return figures


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Chance that one of k of these samples passes, drawn without replacement: the unbiased estimate of pass@k."""
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


@dataclass(slots=True)
class Tally:
    """Counts of the trajectories that have ended."""

    total: int
    """Number of trajectories of the run."""
    scores: Scores | None = None
    """Their rewards, if they are scored."""
    finish_reasons: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    """Reason of failure → number of times."""
    tokens: int = 0
    unscored: int = 0
    """Number of those that have no reward yet, which are in no other count."""

    def add(self, row: Mapping[str, Any]) -> None:
        """Count a trajectory in the form of `Trajectory.to_json`."""
        self.finish_reasons[row["finish_reason"]] += 1
        self.tokens += len(row["token_ids"])
        if row["finish_reason"] == "error":
            self.failures[row.get("error", "")] += 1
        if self.scores is not None:
            self.scores.add(row)

    def figures(self) -> dict[str, Any]:
        """The counts as plain data for the summary."""
        failed = self.finish_reasons["error"]
        return {
            "total": self.total,
            "finished": self.finish_reasons.total() - failed,
            "failed": failed,
            "tokens": self.tokens,
            "finish_reasons": dict(self.finish_reasons),
            "failures": dict(self.failures),
        }


def run_rollout(config: Config, console: Console, scorer: RowScorer | None = None) -> RunOutcome:
    """Roll out the prompts of `data.path` and write trajectories, with a reward each if there is a `scorer`, summary
    and configuration.

    All checks that need no cluster are made before one is used. An interruption (Ctrl-C, SIGTERM) ends in order: actors
    stop, finished trajectories are kept. Sets `run.name` if it has no value; `console` shows the progress.

    Raises:
        UserError: The configuration, the prompts or the cluster are wrong; no file is left behind.
    """
    if config.data.path is None:
        raise ConfigError("data.path", "is not set.", "name a file of prompts: data.path=prompts.jsonl")
    if config.resume not in ("auto", "never"):
        raise ConfigError("resume", f"is {config.resume!r}.", "a rollout takes auto or never.")
    model = require_named_model("target.model", config.target.model)
    rows = read_rows(config.data.path, config.data.limit, known_number(model, "vocab_size"))
    unused, prompts = unused_by_rollouts(config, scorer is not None), [split_row(row)[0] for row in rows]
    _tokenizer_for(config.target, prompts, require_tokenizer)
    with sigterm_interrupts(), contextlib.ExitStack() as held:
        found = lease_interrupted(config) if config.resume == "auto" else None
        if found is not None:
            held.callback(found[1].release)
        resolved = resolve(config, Machine.here())
        config, lines = resolved.config, resolved.choices
        if scorer is not None:
            scorer.check(rows)
        folder, lease = found or lease_new(config)
        held.callback(lease.release)
        try:
            writer = TrajectoryWriter(folder, scorer is not None)
            there = read_finished(writer, rows, config) if found else SavedRows()
            if config.resume == "auto" and found is None:
                lines = (*lines, f"run {config.run.name}: there is no earlier run to resume, so a new one begins")
            with run_dir_errors(folder):
                save_config(config, folder / CONFIG_FILE)
            with start_phase(f"run {config.run.name}: checking prompts"):
                encoded, bare = _encode(config.target, config.data, prompts, resolved.context)
            for line in (*unused, *lines, *bare, *_cut_outputs(resolved, encoded)):
                say(console, line)
            return _run(resolved, rows, encoded, folder, writer, there, console, scorer)
        except BaseException as error:
            if found is None and not (folder / SUMMARY_FILE).exists():
                lease.release()
                discard_run_folder(folder)
            if isinstance(error, KeyboardInterrupt):
                say(console, f"{interruption(error)}: ended before it began, nothing was written")
            raise


def _tokenizer_for(target: TargetConfig, prompts: Sequence[Prompt], find: Callable[[str], Any]) -> Any:
    """Result of `find` for the target; None if it fails and no prompt needs a tokenizer. ModelLoadError: `find` fails,
    and a prompt is text or messages."""
    text = next((number for number, prompt in enumerate(prompts, start=1) if not is_token_ids(prompt)), None)
    try:
        return find(target.model)
    except ModelLoadError as error:
        if text is None:
            return None
        fix = f'Or give prompt {text} and all others as {{"prompt_token_ids": [...]}}.'
        raise ModelLoadError(f"target.model: {error} {fix}") from None


def _encode(
    target: TargetConfig, data: DataConfig, prompts: Sequence[Prompt], context: int
) -> tuple[list[Encoded], list[str]]:
    """The prompts as token ids, and a line if texts are sent without a chat template. Those that cannot be encoded fail
    alone, at their turn. InputError: none can."""
    tokenizer = _tokenizer_for(
        target, prompts, functools.partial(load_tokenizer, trust_remote_code=target.trust_remote_code)
    )
    encoded = encode_prompts(tokenizer, prompts, data.chat, most=context, **text_options(data))
    if all(reason for _, reason in encoded):
        raise InputError(f"data.path: none of the {len(prompts)} prompts can run; the first one: {encoded[0][1]}")
    if data.chat and tokenizer and not tokenizer.chat_template and any(isinstance(one, str) for one in prompts):
        return encoded, [f"{target.model} has no chat template, so prompts are sent as they are (data.chat=false)"]
    return encoded, []


def _cut_outputs(resolved: Resolved, encoded: Sequence[Encoded]) -> list[str]:
    """A line if some prompts cannot run, and one if some leave less than `sampling.max_tokens` of the context."""
    most, limit, context = resolved.config.sampling.max_tokens, resolved.max_prompt_tokens, resolved.context
    long = f"tokens, and the context has {context} (target.max_model_len)"
    reasons = [reason or f"it has {len(ids)} {long}" * (len(ids) >= context) for ids, reason in encoded]
    lines = list[str]()
    if unfit := [number for number, reason in enumerate(reasons, start=1) if reason]:
        first = f"prompt {unfit[0]}: {reasons[unfit[0] - 1]}"
        lines.append(f"warning: {len(unfit)} of {len(encoded)} prompts cannot run and fail; the first is {first}")
    if cut := sum(limit < len(token_ids) < context for token_ids, _ in encoded):
        lines.append(
            f"warning: {cut} of {len(encoded)} prompts have more than {limit} tokens and so leave less than "
            f"sampling.max_tokens={most} of the context of {context} (target.max_model_len): their outputs are cut"
        )
    return lines


def _run(
    resolved: Resolved,
    rows: list[Prompt | Row],
    encoded: list[Encoded],
    folder: Path,
    writer: TrajectoryWriter,
    there: SavedRows,
    console: Console,
    scorer: RowScorer | None,
) -> RunOutcome:
    """Roll out the missing trajectories; `there` are those of an interrupted run."""
    with start_phase("loading torch and Ray"), signals_deferred():
        from specactor_ray.rollout.rollout import Rollout  # takes seconds, so only after the checks

    config, begin, started = resolved.config, time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%S%z")
    say(console, f"run {config.run.name}: mode {config.mode.value}; results go to {folder}")
    tally = Tally(len(rows) * config.data.n, None if scorer is None else Scores(config.reward.pass_threshold))
    if resumed := len(there.rows) + len(there.unscored):
        say(console, f"run {config.run.name}: resumed, {resumed} of {tally.total} trajectories are there")
    for note in resolved.notes:
        say(console, note)
    for row in there.rows:
        tally.add(row)
    with Rollout(resolved) as rollout:
        start_seconds, begin = time.monotonic() - begin, time.monotonic()
        where = f"--run {rollout.run_name} --address {rollout.address}"
        say(console, f"run {rollout.run_name}: from another terminal, specactor status {where}")
        status, error, done = "failed", "", False
        try:
            _consume(rollout, rows, encoded, writer, tally, console, there, scorer)
            ignore_signals()  # everything is there: the rest takes seconds, and must not be torn
            with results_in(folder):
                writer.flush()
            done, every = True, tally.failures.total() == tally.total
            status, error = ("failed", "every trajectory failed") if every else ("complete", "")
        except KeyboardInterrupt as interrupt:
            status, error = "interrupted", interruption(interrupt)
            ended = tally.finish_reasons.total() + tally.unscored
            saved = f"{ended} finished trajectories are saved" if ended else "nothing was finished yet"
            say(console, f"{error}: shutting down, {saved}; the same command with resume=auto continues")
            ignore_signals()
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            raise
        finally:
            summary = {
                "run": rollout.run_name,
                "status": status,
                "error": error,
                "started": started,
                "start_seconds": round(start_seconds, 3),
                "resumed": resumed,
                **_figures(rollout, tally, time.monotonic() - begin),
                "output": str((writer.path if done else writer.partial).resolve()),
            }
            with results_in(folder):
                write_json(folder / SUMMARY_FILE, summary)
                if done:
                    writer.complete()  # last: a run that is killed before it can be continued
    return RunOutcome(folder, summary)


def _consume(
    rollout: Rollout,
    rows: list[Prompt | Row],
    encoded: list[Encoded],
    writer: TrajectoryWriter,
    tally: Tally,
    console: Console,
    there: SavedRows,
    scorer: RowScorer | None,
) -> None:
    written, waiting = ({(row["prompt_index"], row["sample_index"]) for row in part} for part in there)
    unscored, scored = dict[Future[Any], list[dict[str, Any]]](), queue.SimpleQueue[Future[Any]]()
    if scorer is not None:
        scorer.resume(there.rows)

    def read() -> tuple[int, int, int, float]:
        metrics, ended = rollout.metrics(), tally.finish_reasons
        return (ended.total(), ended["error"], rollout.committed_tokens, metrics.acceptance_length)

    def keep(row: dict[str, Any]) -> None:
        with results_in(writer.partial.parent):
            writer.write(row)
        tally.add(row)

    def take(row: dict[str, Any], is_new: bool) -> None:
        if scorer is None or row["finish_reason"] == "error":
            keep(row)
        else:
            with results_in(writer.partial.parent):
                if is_new:
                    writer.write_unscored(row)
            tally.unscored += 1
        if scorer is not None and (group := scorer.submit(row)):
            unscored[group[1]] = group[0]
            group[1].add_done_callback(scored.put)

    def keep_scored() -> None:
        future = scored.get()
        for row, (score, problem) in zip(unscored.pop(future), future.result(), strict=True):
            failed = {"reward_error": problem, "reward": rollout.config.reward.failure_value}
            if (row["prompt_index"], row["sample_index"]) not in written:
                tally.unscored -= 1
                keep(row | (failed if problem else asdict(score)))

    with rollout_progress(console, "rollout", tally.total, read):
        for row in there.unscored:
            take(row, is_new=False)
        for trajectory in rollout.stream(rows, skip=written | waiting, encoded=encoded):
            take(trajectory.to_json(), is_new=True)
            while not scored.empty():
                keep_scored()
        while unscored:
            keep_scored()


def _figures(rollout: Rollout, tally: Tally, seconds: float) -> dict[str, Any]:
    tokens, metrics = rollout.committed_tokens, rollout.metrics()
    return {
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "discarded_tokens": rollout.discarded_tokens,
        "tokens_per_s": round(tokens / max(seconds, 1e-9), 3),
        "trajectories": tally.figures(),
        **({} if tally.scores is None else {"rewards": tally.scores.figures()}),
        "reissued_requests": rollout.reissued_requests,
        "metrics": metrics.to_dict(),
        "drafts": drafts_in_words(rollout.config, metrics),
        **facts_of(rollout, rollout.config),
        "hardware": {**hardware(), "cluster": _cluster_resources()},
    }


def facts_of(rollout: Rollout, config: Config) -> dict[str, Any]:
    """What the summary of any run has of its parts, as plain data."""
    actors = list[dict[str, Any]]()
    with contextlib.suppress(Exception):  # the controller does not answer
        actors = rollout.status()
    return {
        "config": yaml.safe_load(to_yaml(config)),
        "fallbacks": rollout.fallbacks(),
        "identity": rollout.resolved.identity.to_dict(),
        "costs": measured_costs(config, actors),
        "drafters": drafter_health(actors),
        "actors": actors,
        "versions": versions(),
        "hardware": hardware(),
    }


def drafts_in_words(config: Config, metrics: RolloutMetrics) -> str:
    """Whether drafts helped, by the seconds of the measured steps."""
    if config.mode is ModeName.plain or not metrics.row_steps:
        return "none, mode is plain" if config.mode is ModeName.plain else "none, nothing was generated"
    line = f"about {metrics.speedup:.2f}x of plain decoding (acceptance length {metrics.acceptance_length:.1f})"
    if metrics.suspended_steps:
        line += f"; drafting was suspended in {metrics.suspended_steps / metrics.steps:.0%} of the steps"
    return line + "; the devices of draft actors are not counted" * bool(draft_actors(config))


def _cluster_resources() -> dict[str, float]:
    """CPUs, GPUs and accelerator types of the whole cluster."""
    import ray

    resources = ray.cluster_resources()
    return {
        name: amount for name, amount in resources.items() if name in ("CPU", "GPU") or name.startswith("accelerator")
    }
