"""Output of a training run: a record per step, shown, kept and tracked; at the end a summary."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean, pstdev
from typing import TYPE_CHECKING, Any

from specactor_ray.config import Config
from specactor_ray.core.console import as_text, make_table
from specactor_ray.core.errors import clipped_text, counted_by_kind, in_words
from specactor_ray.core.files import write_json
from specactor_ray.core.progress import PhaseProgress
from specactor_ray.rollout.trajectory import RolloutMetrics
from specactor_ray.runs.folder import SUMMARY_FILE, RunOutcome
from specactor_ray.runs.records import COMPLETIONS_FILE, EVALUATION, EVALUATIONS_FILE, METRICS_FILE, RecordFile
from specactor_ray.runs.rollout import facts_of
from specactor_ray.runs.training import TrainingRun
from specactor_ray.trainer import figures
from specactor_ray.trainer.gap import GapRule
from specactor_ray.trainer.tracking import open_trackers
from specactor_ray.transport.messages import RequestStats

if TYPE_CHECKING:
    from specactor_ray.rollout.rollout import Rollout
    from specactor_ray.trainer.experience import Experience

logger = logging.getLogger(__name__)


class StepRecorder:
    """Records one step after the other.

    A record has `train` (training results: equal for equal seeds, regardless of drafts), `gap` (log-probabilities of
    the rollout against the trainer's), `speed`, `seconds` per phase, `timeline` (begin and end of the phases, of the
    step's outputs and of their rewards, in seconds after the step's begin), and `failures`.
    """

    _rollout: Rollout

    def __init__(self, config: Config, run: TrainingRun, show: Callable[[str], None], width: int = 140) -> None:
        """`show` shows a line of at most `width` columns to the user."""
        self._config, self._run, self._show, self._width = config, run, show, width
        self._files = [RecordFile(run.folder / name) for name in (METRICS_FILE, EVALUATIONS_FILE, COMPLETIONS_FILE)]
        self._metrics, self._evaluations, self._completions = self._files
        self._outputs: list[dict[str, Any]] = []
        """Rows of the last step in `completions.jsonl`."""
        self._done = self._step = run.state.step
        """Number of steps done, and number of the present step."""
        self._present = "starting Ray, verifiers and trainer"
        self._seconds = dict.fromkeys(figures.PHASES, 0.0)
        self._spans: dict[str, tuple[float, float]] = {}
        """Phase of the present step → begin and end."""
        self._began: float | None = None
        self._gap = GapRule(config.target.dtype, self._metrics.read())

    @contextlib.contextmanager
    def open(self, rollout: Rollout) -> Iterator[None]:
        """Record the steps of this rollout; trackers close at the end."""
        self._rollout = rollout
        self._counted = self._counters()
        """Counters of the rollout at the beginning of the step, which is the end of the step before."""
        with contextlib.ExitStack() as parts:
            self._trackers = open_trackers(self._config, self._run, parts)
            yield

    def show_progress(self, progress: PhaseProgress) -> None:
        """Show the present work, such as `step 2/30, rollout 12/32`; called by another thread."""
        present = self._present
        if present.endswith(("rollout", "evaluation")) and (counts := self._rollout.progress)[1]:
            present += f" {counts[0]}/{counts[1]}"
        progress.update(self._done, present, self._config.trainer.steps)

    def begin(self, step: int) -> None:
        """Begin a step; `step` steps are done."""
        self._step = step + 1

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the time inside for this phase of the step."""
        self._present = f"step {self._step}/{self._config.trainer.steps}, {phase}"
        if self._began is None:
            self._began, self._counted = time.perf_counter(), self._counters()
        begin = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self._seconds[phase] += end - begin
            self._spans[phase] = self._spans.get(phase, (begin, end))[0], end

    def end(self, step: int, experience: Experience, update: Mapping[str, float], sync_bytes: int) -> None:
        """Record a finished step in all outputs. Its checkpoint is written later, so that none is ahead of the records;
        its time counts for the next step. Records that the disk refuses are kept and written with the next step."""
        now = time.perf_counter()
        began = now if self._began is None else self._began
        seconds, spans = {**self._seconds, "step": now - began}, {**self._spans, **experience.spans}
        self._seconds, self._spans, self._began = dict.fromkeys(figures.PHASES, 0.0), {}, now
        # Without a sample nothing was compared or trained.
        shown = figures.LEFT_OUT if not experience.samples else update
        learnt = {name: value if name in shown else None for name, value in update.items()}
        record = {
            "step": step,
            "train": self._train_figures(step, experience, learnt),
            "gap": {"mean": learnt["logprob_gap"], "max": learnt["logprob_gap_max"], "kl": learnt["logprob_gap_kl"]},
            "speed": {**self._speed_figures(experience, seconds), "sync_bytes": sync_bytes},
            "seconds": {name: round(value, 4) for name, value in seconds.items()},
            "timeline": {name: [round(at - began, 4) for at in span] for name, span in spans.items()},
            "failures": {part: dict(reasons) for part, reasons in experience.failures.items()},
        }
        self._counted = self._counters()
        self._outputs = figures.completion_rows(step, "train", experience, self._config.tracking.completions)
        self._completions.write(*self._outputs)
        self._metrics.write(record)
        self._done = step
        self._show(figures.step_line(record, self._config.trainer.steps, self._width))
        self._warn(record, experience.first_skip)
        self._track(step, record)

    def evaluated(self, step: int, experience: Experience) -> float | None:
        """Record an evaluation of the weights after this step in all outputs; its time counts for the next step.
        Returns its mean reward, if it has one."""
        found = figures.evaluation_figures(experience, self._config.reward.pass_threshold)
        found["seconds"] = round(self._seconds["evaluation"], 4)
        record, rows = {"step": step, **found}, figures.completion_rows(step, EVALUATION, experience, None)
        if self._config.tracking.completions != 0:
            self._completions.write(*rows)
        self._evaluations.write(record)
        self._show(figures.evaluation_line(record, self._config.trainer.steps))
        self._show_outputs(rows)
        self._warn_of_failures("evaluation of step", record)
        self._track(step, {EVALUATION: found}, rows)
        if not self._config.trainer.max_staleness:  # else outputs of later steps are among what was generated
            self._counted = self._counters()
        return found["mean"]

    def _show_outputs(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            table = make_table(figures.shown_rows(rows, self._width), text=("prompt", "text", "answer"))
            self._show(as_text(table, self._width))

    def finish(self, status: str, checkpoint_failures: int, error: str = "") -> RunOutcome:
        """Write the summary, if the disk accepts it."""
        for file in self._files:
            file.write()
        if not self._config.evaluation.is_on:
            self._show_outputs(self._outputs)
            self._track(self._done, {}, self._outputs)
        evaluations = figures.evaluations_of(self._evaluations.read())
        records, best = self._metrics.read(), self._run.store.best()
        evaluations["best_checkpoint"] = None if best is None else str(best)
        summary = {
            "run": self._config.run.name,
            "status": status,
            "error": error,
            "steps": records[-1]["step"] if records else 0,
            "checkpoints": [str(path) for path in self._run.store.all()],
            "checkpoint_failures": checkpoint_failures,
            "metrics_pending": len(self._metrics.pending),
            "totals": figures.totals_of(records, self._seconds),
            "results": figures.results_of(records) | evaluations,
            **facts_of(self._rollout, self._config),
        }
        try:
            write_json(self._run.folder / SUMMARY_FILE, summary)
        except OSError as problem:
            logger.error("the summary could not be written: %s", problem)
        return RunOutcome(self._run.folder, summary)

    @property
    def problem(self) -> str:
        """Why the run must end, by what was recorded; empty while there is no reason."""
        return self._gap.problem

    def _track(self, step: int, record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] = ()) -> None:
        """Send the numbers of a record, and a table of a few of these outputs."""
        for tracker in self._trackers:
            try:
                tracker(step, dict(figures.numbers(record)), figures.shown_rows(rows))
            except Exception as error:  # noqa: BLE001 - a tracker may raise anything
                logger.error("step %d was not tracked: %s", step, in_words(error))

    def _train_figures(self, step: int, experience: Experience, update: Mapping[str, float | None]) -> dict[str, Any]:
        rewards, config = experience.rewards, self._config
        outputs = figures.output_figures(experience.trajectories)
        passed = [reward >= config.reward.pass_threshold for reward in rewards]
        if experience.turns:
            update = {"turns_mean": experience.turns / max(len(experience.trajectories), 1), **update}
        if config.trainer.max_staleness:
            update = {**figures.staleness_of(experience, step - 1), **update}
        learnt = {name: value for name, value in update.items() if not name.startswith("logprob_gap")}
        return {
            "reward_mean": mean(rewards) if rewards else None,
            "reward_std": pstdev(rewards) if rewards else None,
            "pass_rate": mean(passed) if passed else None,
            "length_mean": outputs["length_mean"],
            "truncated": outputs["truncated"],
            "samples": len(experience.samples),
            "sampled": len(experience.trajectories),
            "zero_variance_groups": experience.zero_variance_groups,
            "groups": experience.groups,
            "skipped_tasks": experience.skipped_tasks,
            **figures.means_by_name(experience),
            **learnt,
        }

    def _speed_figures(self, experience: Experience, seconds: Mapping[str, float]) -> dict[str, Any]:
        """Figures of the step's trajectories, whenever they ran: `tokens`, acceptance, `by_method`; and of the time
        since the last record: `generated_tokens` of any step, their rate, `discarded_tokens`, `supply`."""
        (before, generated, discarded), now = self._counted, self._counters()
        generated, discarded = now[1] - generated, now[2] - discarded
        is_ahead = self._config.trainer.max_staleness > 0
        during_s = seconds["step"] if is_ahead else seconds["rollout"] - experience.reward_wait_s
        outputs = figures.output_figures(experience.trajectories)
        stats = RequestStats.total(trajectory.stats for trajectory in experience.trajectories)
        return {
            "tokens": outputs["tokens"],
            "generated_tokens": generated,
            "discarded_tokens": discarded,
            "oversampled": experience.discarded_samples,
            "oversampled_tokens": experience.discarded_tokens,
            "tokens_per_s": generated / max(during_s, 1e-9),
            "acceptance_length": outputs["acceptance_length"],
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
        self._warn_of_failures("step", record)
        train = record["train"]
        if skipped := train["skipped_tasks"]:
            logger.warning(
                "step %d: tasks skipped: %d (the first: %s)", record["step"], skipped, clipped_text(first_skip, 400)
            )
        for name, reason in figures.LEFT_OUT.items():
            if train[name]:
                logger.warning("step %d: optimizer steps left out: %d (%s)", record["step"], train[name], reason)

    def _warn_of_failures(self, what: str, record: Mapping[str, Any]) -> None:
        for part, text in (("reward", "samples have no reward"), ("rollout", "outputs are missing")):
            if reasons := record["failures"][part]:
                count, causes = sum(reasons.values()), counted_by_kind(reasons)
                logger.warning("%s %d: %d %s: %s", what, record["step"], count, text, causes)
