"""Tasks to train on: their sources, their order, and the selection of those that fit the model."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specactor_ray.config.methods import import_named
from specactor_ray.config.rules import NO_TASKS
from specactor_ray.config.schema import DataConfig
from specactor_ray.core.errors import ConfigError, InputError, UserError, clipped, clipped_text, in_words, place_of
from specactor_ray.rollout.prompts import JSON_LINES, Prompt, read_jsonl, read_text

GENERATED_SIZE = 100_000
"""Number of tasks of a generated source without `data.limit`; each is made when it is read."""
_BLANK_LETTERS = "\u115f\u1160\u2800\u3164\uffa0"
"""Fillers of Hangul and the empty Braille pattern: letters and a symbol without a glyph."""
_GYM, _HUB = "reasoning_gym:", "hf:"
SOURCE = "data_source"
"""Key of a task's metadata with the name of its source, as in verl."""
_LONGEST_PATTERN = 10_000
_GENERATED, _TRIED, _ENCODED = 256, 1000, 64
"""Numbers of prompts by which the longest one is found: made by a generated source; looked at, of those that seem
longest; found to fit the model."""


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt, with the input of its reward."""

    index: int
    """Position in the source."""
    prompt: Prompt
    answer: str | None = None
    """The reference answer, if there is one."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The row's keys, but for its prompt."""
    place: str = ""
    """Place of the row, for messages."""


def open_source(config: DataConfig, seed: int) -> Source:
    """Open the source that `data.path` names: a file, `reasoning_gym:TASK` or `hf:DATASET`; or the mixture. Raises
    ConfigError if a package it needs is not installed or there is no such task, InputError if a file is missing, empty
    or malformed."""
    path = config.path
    if config.mixture:
        return MixedSource(config, seed)
    if path is None:
        raise ConfigError(*NO_TASKS)
    if path.startswith(_GYM):
        return GymSource(path.removeprefix(_GYM), config, seed)
    suffix = Path(path).suffix.lower()
    if path.startswith(_HUB) or suffix == ".parquet":
        return TableSource(_load_table(path, config), path, config)
    if suffix in JSON_LINES:
        rows = list(read_jsonl(path))
        return TableSource([row for _, row in rows], path, config, [number for number, _ in rows])
    return TableSource([{config.prompt_key: line} for line in read_text(path)], path, config)


class TableSource:
    """Rows with a prompt (text, or a list of chat messages), an optional answer, and other keys; read on access. The
    prompts and answers of all rows are checked at once, in any format. `lines` has the line number of every row, for
    messages."""

    def __init__(self, rows: Any, where: str, config: DataConfig, lines: Sequence[int] | None = None) -> None:
        self._where, self._config, self._lines = where, config, lines
        self._numbers: Sequence[int] = lines or range(len(rows))
        self._rows = rows if config.map is None else self._mapped(rows, config.map)
        self._size = min(len(self._rows), config.limit or len(self._rows))
        if self._size == 0 and len(rows):
            raise InputError(f"data.map: {config.map} leaves out all {len(rows)} rows of {where}. Fix: return some")
        if self._size == 0:
            raise InputError(f"data.path: {where} has no tasks. Fix: write one JSON object with a prompt per line")
        columns = getattr(rows, "features", {})  # of a table; its floats may have 32 or 16 bits
        narrow = str(getattr(columns.get(config.answer_key), "dtype", ""))
        self._float = np.dtype(narrow if narrow in ("float32", "float16") else "float64").type
        self.without_answer = ""
        """Place of the first row without a reference answer, of generated tasks `data.path`; empty if there is none."""
        self._task(0, self._rows[0])  # names all keys of the row, if that of the prompt is missing
        for index, row in enumerate(self._checked_columns()):
            task = self._task(index, row)
            if not self.without_answer and not has_reference(task.answer):
                self.without_answer = task.place

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Task:
        return self._task(index, self._rows[index])

    def _mapped(self, rows: Any, name: str) -> list[Mapping[str, Any]]:
        """The rows that the user's function makes of these, as many as are used."""
        function, mapped, numbers = import_named(name, "data.map"), list[Mapping[str, Any]](), list[int]()
        for index, row in enumerate(rows):
            try:
                found = function(dict(row))
            except Exception as error:
                raise InputError(f"{self._place(index)}: {name} (data.map) failed: {in_words(error)}") from error
            if not isinstance(found, Mapping | None):
                what = f"{name}{place_of(function)} (data.map) returned {clipped(found)}"
                raise InputError(f"{self._place(index)}: {what}. Fix: return a dict, or None to leave the row out")
            if found is not None:
                mapped.append(found)
                numbers.append(self._numbers[index])
            if len(mapped) == self._config.limit:
                break
        self._numbers = numbers
        return mapped

    def _checked_columns(self) -> Iterator[Any]:
        """The rows; those of a table without its other columns, of which one row may hold an image."""
        if isinstance(self._rows, list):
            yield from self._rows[: self._size]
            return
        keys = (self._config.prompt_key, "messages", self._config.answer_key)
        names = [name for name in self._rows.column_names if name in keys]
        for batch in self._rows.select(range(self._size)).select_columns(names).iter(1000):
            yield from (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))

    def _task(self, index: int, row: Any) -> Task:
        config, where = self._config, self._place(index)
        if not isinstance(row, Mapping):
            raise InputError(f"{where}: expected an object with {config.prompt_key!r} or 'messages'")
        key = config.prompt_key if config.prompt_key in row else "messages"
        if self._lines and key != "messages" and "messages" in row:
            raise InputError(f"{where}: the line has {key!r} and 'messages', and a prompt is one of them; remove one")
        if key not in row:
            keys = ", ".join(sorted(row)) or "none"
            raise InputError(f"{where}: no key {config.prompt_key!r} (data.prompt_key); its keys are {keys}")
        prompt = row[key]
        if not prompt or not isinstance(prompt, str | list):
            raise InputError(f"{where}: {key!r} must be a non-empty text or a list of chat messages")
        rest = {name: value for name, value in row.items() if name != key}
        answer = answer_text(row.get(config.answer_key), where, config.answer_key, self._float)
        return Task(index, with_system_prompt(prompt, config), answer, rest, where)

    def _place(self, index: int) -> str:
        return f"{self._where}, {'line' if self._lines else 'row'} {self._numbers[index]}"


def has_reference(answer: str | None) -> bool:
    """Whether there is an answer to compare with: an empty one would reward empty outputs."""
    return answer is not None and not is_blank(answer)


def is_blank(text: str) -> bool:
    """Whether the text has only white space, marks and characters without a glyph, such as U+200B."""
    return not any(unicodedata.category(one)[0] in "LNPS" and one not in _BLANK_LETTERS for one in text)


def answer_text(value: Any, where: str, key: str, number: type[np.floating] = np.float64) -> str | None:
    """A reference answer as text: a text, or a number in the fewest digits that identify it among the floats of this
    type, without exponent, such as `1` for 1.0. Raises InputError for other types, infinity and NaN."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return np.format_float_positional(number(value + 0.0), trim="-")  # + 0.0 takes the sign of -0.0
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(
            f"{where}: {key!r} is {clipped(value)}, and an answer is a text or a number. Fix: write it as the text "
            "that outputs are compared with, or under another key, which a reward function finds in sample.metadata"
        )
    return str(value)


class GymSource:
    """Procedurally generated tasks of the `reasoning-gym` package, such as `chain_sum`, with their own parameters in
    `data.options`; task `i` is a function of (seed, i)."""

    def __init__(self, task: str, config: DataConfig, seed: int) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError:
            fix = "pip install reasoning-gym."
            raise ConfigError("data.path", "generated tasks need the package reasoning-gym.", fix) from None
        if task not in DATASETS:
            known = ", ".join(sorted(DATASETS))
            raise ConfigError("data.path", f"reasoning-gym has no task {task!r}.", f"use one of {known}.")
        self._config = config
        self._size = config.limit or GENERATED_SIZE
        try:
            self._tasks = reasoning_gym.create_dataset(task, seed=seed, size=self._size, **(config.options or {}))
        except (TypeError, ValueError, AssertionError) as error:
            known = ", ".join(one.name for one in fields(DATASETS[task][1]) if one.name not in ("seed", "size"))
            problem = f"{task} refuses them: {clipped_text(str(error))}."
            raise ConfigError("data.options", problem, f"its options are {known}; or leave them out.") from None
        self.without_answer = "" if has_reference(self[0].answer) else str(config.path)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Task:
        entry = self._tasks[index]
        prompt = with_system_prompt(entry["question"], self._config)
        answer = None if entry["answer"] is None else str(entry["answer"])
        return Task(index, prompt, answer, {"entry": dict(entry)}, f"{self._config.path}, task {index}")


def fair_order(counts: Sequence[int]) -> npt.NDArray[np.int64]:
    """An order of `counts[i]` numbers i in which each is less than one place ahead of or behind its share, in any
    beginning: of those whose next one is due, the one with the earliest end of its time (Tijdeman 1980, The chairman
    assignment problem)."""
    order, total, done = list[int](), sum(counts), [0] * len(counts)
    for place in range(total):
        due = [one for one, count in enumerate(counts) if done[one] * total < (place + 1) * count]
        order.append(min(due, key=lambda one: -(-(done[one] + 1) * total // counts[one])))
        done[order[-1]] += 1
    return np.array(order, dtype=np.int64)


class MixedSource:
    """The sources of `data.mixture`, one behind the other; a `TaskStream` takes turns by `pattern`. Raises ConfigError
    if the weights cannot be met exactly."""

    def __init__(self, config: DataConfig, seed: int) -> None:
        self.sources = list[Source]()
        if config.path is not None or not all(one.path for one in config.mixture):
            fix = "name the path of each source under data.mixture, and none under data.path."
            raise ConfigError("data.mixture", "tasks come either from it or from data.path.", fix)
        weights = [Fraction(str(one.weight)) for one in config.mixture]
        scale = math.lcm(*(weight.denominator for weight in weights))
        counts = [int(weight * scale) for weight in weights]
        counts = [count // math.gcd(*counts) for count in counts]
        if sum(counts) > _LONGEST_PATTERN:
            problem = f"an order with weights as {':'.join(map(str, counts))} repeats after {sum(counts)} tasks only."
            raise ConfigError("data.mixture", problem, f"use weights such as 2 and 3, up to {_LONGEST_PATTERN} in sum.")
        self.pattern = fair_order(counts)
        """Source of each task, in an order that repeats."""
        others = ("weight", "name")
        for number, one in enumerate(config.mixture):
            own = {key: value for key, value in asdict(one).items() if value is not None and key not in others}
            try:
                self.sources.append(open_source(replace(config, mixture=[], **own), seed))
            except UserError as error:
                raise ConfigError(f"data.mixture.{number}", str(error)) from None
        self._names = [(one.name, one.path) for one in config.mixture]
        self.sizes = [len(source) for source in self.sources]
        self.without_answer: str = next((one.without_answer for one in self.sources if one.without_answer), "")

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, index: int) -> Task:
        part, place = 0, index
        while place >= self.sizes[part]:
            part, place = part + 1, place - self.sizes[part]
        task, (name, path) = self.sources[part][place], self._names[part]
        return replace(task, index=index, metadata={SOURCE: path, **task.metadata, **({SOURCE: name} if name else {})})


def some_prompts(source: Source, most: int) -> Iterator[Prompt]:
    """All prompts of tables, and `most` of each generated source."""
    for part in source.sources if isinstance(source, MixedSource) else [source]:
        step = 1 if isinstance(part, TableSource) else max(1, len(part) // most)
        yield from (part[index].prompt for index in range(0, len(part), step))


def _seeming_length(prompt: Prompt) -> float:
    """About the number of tokens: of other characters than letters and spaces each is one, as of Chinese and digits."""
    if not isinstance(prompt, str):
        prompt = json.dumps(prompt, ensure_ascii=False, default=str)
    return len(re.sub(r"[A-Za-z\s]", "", prompt)) + len(prompt) / 4


def with_system_prompt(prompt: Prompt, config: DataConfig) -> Prompt:
    """The prompt with `data.system_prompt` before it: as a separate message, or as text if `chat` is off."""
    if not config.system_prompt:
        return prompt
    if not config.chat and isinstance(prompt, str):
        return f"{config.system_prompt}\n{prompt}"
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [{"role": "system", "content": config.system_prompt}, *messages]  # type: ignore[list-item]


def _load_table(path: str, config: DataConfig) -> Any:
    try:
        import datasets
    except ImportError:
        fix = "pip install datasets."
        raise ConfigError("data.path", "parquet files and hub datasets need the package datasets.", fix) from None
    try:
        if path.startswith(_HUB):
            return datasets.load_dataset(path.removeprefix(_HUB), split=config.split, **(config.options or {}))
        return datasets.load_dataset("parquet", data_files=path, split="train")
    except Exception as error:  # the package raises any type, from network errors to bad splits
        raise InputError(f"data.path: {path} cannot be loaded ({type(error).__name__}: {error})") from error


Source = TableSource | GymSource | MixedSource


class TaskStream:
    """Tasks in order, without those that do not fit the model and those that are held out. With `shuffle` every epoch
    has its own permutation, a function of (seed, epoch). A mixture has epochs of each source; skipped tasks count for
    their source's weight. `count_tokens` raises InputError for a prompt that cannot be encoded."""

    def __init__(
        self,
        source: Source,
        seed: int,
        count_tokens: Callable[[Prompt], int],
        max_prompt_tokens: int,
        shuffle: bool = True,
        is_held_out: Callable[[Task], bool] = lambda task: False,
    ) -> None:
        self.source, self.size = source, len(source)
        self.position = 0
        """Number of tasks taken so far; with `skipped` the only state to save."""
        self.skipped = 0
        """Number of tasks skipped because their prompt is too long or cannot be encoded."""
        self.held_out: list[Task] = []
        """Tasks to evaluate on."""
        self.first_skip = ""
        """Place and reason of the first task skipped since this was emptied."""
        self.is_held_out, self._seed, self._shuffle = is_held_out, seed, shuffle
        self._count_tokens, self._max = count_tokens, max_prompt_tokens
        self._sizes, self._pattern = [self.size], np.zeros(1, dtype=np.int64)
        if isinstance(source, MixedSource):
            self._sizes, self._pattern = source.sizes, source.pattern
        self._orders: dict[int, tuple[int, Any]] = {}
        """Epoch of each source, and the order of its tasks."""
        self._passed_in_a_row = [0] * len(self._sizes)

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks. Raises InputError if every task of the source was skipped."""
        tasks: list[Task] = []
        while len(tasks) < count:
            part, index = self._next()
            task = self.source[index]
            held_out = self.is_held_out(task)
            if reason := f"{_place(task)}, is held out (evaluation.share)" if held_out else self.why_not(task):
                self._pass_over(part, reason, held_out)
            else:
                self._passed_in_a_row[part] = 0
                tasks.append(task)
        return tasks

    def _pass_over(self, part: int, reason: str, held_out: bool) -> None:
        if not held_out:
            self.skipped += 1
            self.first_skip = self.first_skip or reason
        self._passed_in_a_row[part] += 1
        if self._passed_in_a_row[part] == 2 * self._sizes[part]:  # the orders of two epochs: one of them is whole
            raise unusable("data", self._sizes[part], reason)

    def _next(self) -> tuple[int, int]:
        """Number of the source of the next task, and its index in the whole."""
        rounds, rest = divmod(self.position, len(self._pattern))
        part = int(self._pattern[rest])
        taken = rounds * np.count_nonzero(self._pattern == part) + np.count_nonzero(self._pattern[:rest] == part)
        epoch, offset = divmod(int(taken), self._sizes[part])
        if self._orders.get(part, (-1,))[0] != epoch:
            size, rng = self._sizes[part], np.random.default_rng([self._seed, epoch, part])
            self._orders[part] = (epoch, rng.permutation(size) if self._shuffle else np.arange(size))
        self.position += 1
        return part, sum(self._sizes[:part]) + int(self._orders[part][1][offset])

    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that fits the model: as far as the prompts that seem longest have it."""
        seeming = heapq.nlargest(_TRIED, some_prompts(self.source, _GENERATED), key=_seeming_length)
        counts = (self._count_tokens(prompt) for prompt in seeming if not self.why_not(Task(0, prompt)))
        return max(itertools.islice(counts, _ENCODED), default=self._max)

    def why_not(self, task: Task) -> str:
        """Why a task cannot be used, with its place; empty if it can."""
        try:
            tokens = self._count_tokens(task.prompt)
        except InputError as error:
            return f"{_place(task)}, cannot be encoded: {error}"
        return f"{_place(task)}, has {tokens} tokens, and {self._max} is the limit" if tokens > self._max else ""


def _place(task: Task) -> str:
    return task.place or f"row {task.index}"


def unusable(key: str, size: int, reason: str) -> InputError:
    """The error that none of these prompts can be used, with the place and the reason of one."""
    return InputError(
        f"{key}: none of the {size} prompts can be used; one of them, {reason}. Fix: prompts that the model's chat "
        "template can encode, and that fit target.max_model_len beside sampling.max_tokens"
    )
