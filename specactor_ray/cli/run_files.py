"""Results of runs, read from their folders: of trainings that ended, run, or were killed, and of rollouts."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specactor_ray.core.errors import InputError, clipped_text, did_you_mean
from specactor_ray.core.files import expanded, parse_json, read_foreign
from specactor_ray.runs.checkpoint import CheckpointStore
from specactor_ray.runs.folder import CONFIG_FILE, LOCK_FILE, PARTIAL_FILE, SUMMARY_FILE
from specactor_ray.runs.records import EVALUATIONS_FILE, METRICS_FILE
from specactor_ray.runs.training import CHECKPOINTS
from specactor_ray.trainer.figures import evaluations_of, results_of, totals_of

DAMAGE = (LookupError, TypeError, ValueError, AttributeError)
"""Errors of figures that are missing in a record, or no figures."""


@dataclass(frozen=True)
class RunFiles:
    """A run, by the files in its folder."""

    folder: Path
    summary: Mapping[str, Any]
    """Content of `summary.json`; empty while it is not there."""
    records: Sequence[Mapping[str, Any]] = ()
    """Those of `metrics.jsonl`; empty for a rollout."""
    evaluations: Sequence[Mapping[str, Any]] = ()

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def status(self) -> str:
        """That of the summary; else `running`, or that it ended without one."""
        return str(self.summary.get("status") or ("running" if _is_in_use(self.folder) else "killed"))

    @property
    def results(self) -> Mapping[str, Any]:
        """What a training came to, also if its last records could not be written."""
        found = {**results_of(self.records), **evaluations_of(self.evaluations)}
        return {**found, **self.summary.get("results", {})}

    @property
    def totals(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.summary.get("totals") or totals_of([*map(dict, self.records)], {})
        return found

    @property
    def trajectories(self) -> int:
        """Number of trajectories of a rollout that has not ended."""
        try:
            return read_foreign(self.folder / PARTIAL_FILE, "replace").count("\n")  # its last line may be cut anywhere
        except OSError as error:
            raise InputError(f"{self.folder} cannot be read: {error}. Fix: try again if the run ends now") from None

    @property
    def planned_steps(self) -> int | None:
        """`trainer.steps`, if the configuration can be read."""
        return self._config("trainer").get("steps")

    def best_checkpoint(self) -> Path | None:
        """The best one that is complete, else the newest; None without any."""
        where = self._config("checkpoint").get("dir") or self.folder / CHECKPOINTS
        return CheckpointStore(expanded(where), 1, True).best()

    def step(self, number: int | None) -> Mapping[str, Any] | None:
        """The record of a step with a timeline; default: of the slowest one, None if there is none. Raises InputError
        if this step has none."""
        timed = {one["step"]: one for one in self.records if one.get("timeline")}
        if number is None:
            return max(timed.values(), key=lambda one: float(one["seconds"]["step"]), default=None)
        if number not in timed:
            have = f"steps {min(timed)} to {max(timed)} have one" if timed else "no step has one"
            raise InputError(f"--step: {self.folder} has no timeline of step {number}; {have}")
        return timed[number]

    def _config(self, section: str) -> Mapping[str, Any]:
        try:
            found: Mapping[str, Any] = yaml.safe_load(read_foreign(self.folder / CONFIG_FILE))[section]
        except (OSError, yaml.YAMLError, *DAMAGE):
            return {}
        return found


def find_run(name: str, base: Path) -> Path:
    """The folder of a run, by its path or its name below `base`. Raises InputError if there is none, or it cannot be
    read."""
    try:
        for folder in (expanded(name), base / name):
            (folder / SUMMARY_FILE).exists()  # raises without the right to search the folder
            if folder.is_dir():
                return folder
        folders = [path for path in base.iterdir() if path.is_dir()] if base.is_dir() else []
        names = [path.name for path in sorted(folders, key=lambda path: path.stat().st_mtime)]
    except OSError as error:
        raise InputError(f"{error.filename} cannot be read ({error.strerror}). Fix: name the folder of a run") from None
    newest = f" The newest of {len(names)} runs there: {', '.join(names[-3:])}." * bool(names)
    hint = did_you_mean(name, names) or newest
    problem = f"{clipped_text(name)}: no folder of this name is here or in {base}.{hint}"
    raise InputError(f"{problem} Fix: name the folder of a run")


def read_run(folder: Path, summary: Mapping[str, Any] | None = None) -> RunFiles:
    """Read a run; `summary`: as `summary.json`, which is read by default.

    Raises:
        InputError: It is no folder of a run, no step has ended yet, or a file is damaged; the message has its line.
    """
    metrics, file = folder / METRICS_FILE, folder / SUMMARY_FILE
    if summary is None:
        (summary,) = _rows([file], lambda row: row["status"], whole=True) if file.exists() else ({},)
    if metrics.exists():
        records = list(_rows([metrics], _check_step))
        judged = list(_rows([folder / EVALUATIONS_FILE], lambda row: row["step"] + (row["mean"] or 0.0)))
        if records:
            return RunFiles(folder, summary, records, judged)
    elif "trajectories" in summary or (not summary and (folder / PARTIAL_FILE).exists()):
        return RunFiles(folder, summary)
    elif not summary and not (folder / CONFIG_FILE).exists():
        fix = f"name a folder with {METRICS_FILE} or {SUMMARY_FILE}"
        raise InputError(f"{folder} is no folder of a training or of a rollout. Fix: {fix}")
    problem = f" ({summary.get('error') or summary['status']})" if summary else ""
    raise InputError(f"{folder} has no results: no step of it has ended{problem}")


def _rows(files: Sequence[Path], check: Callable[[Any], object], whole: bool = False) -> Iterator[dict[str, Any]]:
    """Rows of the files that exist, one a line or one a file; half a line at the end of one that was killed is left
    out. Raises InputError for a row that cannot be read or that `check` fails on."""
    for file in filter(Path.exists, files):
        try:
            text = read_foreign(file, "strict" if whole else "replace")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{file} cannot be read: {error}") from None
        for number, line in enumerate([text] if whole else text.split("\n")[:-1], start=1):
            try:
                row = parse_json(line)
                check(row)
            except DAMAGE as error:
                place = f"{file}" if whole else f"{file}, line {number},"
                fix = "remove it" if whole else "remove the line, or continue the run with resume=auto, which drops it"
                raise InputError(f"{place} is damaged ({type(error).__name__}: {error}). Fix: {fix}") from None
            yield row


def _check_step(record: Mapping[str, Any]) -> None:
    """Raise an error of `DAMAGE` unless the record has the figures that are shown."""
    train, speed = record["train"], record["speed"]
    shown = train["reward_mean"], train["length_mean"], speed["acceptance_length"], speed["tokens_per_s"]
    sum(value or 0.0 for value in (record["step"], record["seconds"]["step"], *shown))
    totals_of([dict(record)], {})
    for begin, end in record.get("timeline", {}).values():
        abs(end - begin)


def _is_in_use(folder: Path) -> bool:
    """Whether a process has the lease of the run (`RunLease`)."""
    try:
        with open(folder / LOCK_FILE, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
