"""Requests of a simulated rollout: drawn, or recorded by a rollout of this package."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specactor_ray.core.errors import InputError
from specactor_ray.core.files import parse_json
from specactor_ray.simulation.scenario import SkillConfig, WorkloadConfig
from specactor_ray.simulation.text import RecordedText


def draw_lengths(workload: WorkloadConfig, count: int, seed: str) -> list[int]:
    """Output lengths: log-normal with the workload's median and sigma, at least 1, cut at `max_tokens`."""
    rng = random.Random(seed)
    mu = math.log(workload.median_tokens)
    return [min(max(round(rng.lognormvariate(mu, workload.sigma)), 1), workload.max_tokens) for _ in range(count)]


def draw_arrivals(workload: WorkloadConfig, seed: str) -> list[float]:
    """Seconds since midnight at which requests of a day arrive, ascending."""
    rng, found = random.Random(seed), list[float]()
    while len(found) < workload.requests:
        at = rng.random()
        rate = workload.night + (1.0 - workload.night) * (0.5 - 0.5 * math.cos(2.0 * math.pi * at)) ** 3
        if rng.random() < rate:
            found.append(at * workload.day_s)
    return sorted(found)


@dataclass(frozen=True)
class RecordedRequest:
    """One line of a `trajectories.jsonl`."""

    request_id: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    max_tokens: int
    """`max_tokens` of the recorded request; 0: unknown."""
    accuracy: Mapping[str, float]
    """Draft method → share of right draft tokens among those with only right tokens before."""


_FIX = "; name a trajectories.jsonl that a run wrote"
_MOST_TOKEN = 1 << 31


@dataclass(frozen=True)
class Recording:
    """The requests of a file."""

    requests: Sequence[RecordedRequest]
    vocab_size: int

    def text(self, skills: Sequence[SkillConfig]) -> RecordedText:
        """The outputs; `skills` replace the recorded accuracy of a method."""
        set_by_hand = {skill.method: skill.mean for skill in skills}
        accuracy = {
            (method, seed): set_by_hand.get(method, rate)
            for seed, request in enumerate(self.requests)
            for method, rate in {**request.accuracy, **set_by_hand}.items()
        }
        outputs = {seed: request.output for seed, request in enumerate(self.requests)}
        return RecordedText(outputs, accuracy, self.vocab_size)


def load_recording(path: Path, limit: int | None = None) -> Recording:
    """Read the trajectories of a rollout, at most `limit`; failed ones are left out.

    Raises:
        InputError: The file cannot be read, has no finished trajectory, or a line is invalid; the message has line and
            fix.
    """
    requests: dict[str, RecordedRequest] = {}
    lines = _read_lines(path)
    for number, line in enumerate(lines, start=1):
        if limit is not None and len(requests) >= limit:
            break
        where = f"workload.trajectories: {path}, line {number}"
        try:
            row = parse_json(line)
            request = _request(row) if row["finish_reason"] != "error" else None
        except json.JSONDecodeError as error:
            cut = "; the file was cut there: remove that line" if 1 < number == len(lines) else _FIX
            raise InputError(f"{where} is no trajectory ({type(error).__name__}: {error}){cut}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{where} is no trajectory ({type(error).__name__}: {error}){_FIX}") from None
        if request is not None:
            if request.request_id in requests:
                raise InputError(f"{where}: request {request.request_id!r} is there already; remove that line")
            requests[request.request_id] = request
    if not requests:
        raise InputError(f"workload.trajectories: {path} holds no finished trajectory; name another file")
    found = list(requests.values())
    unlimited = max(len(request.output) for request in found) + 1
    whole = [request if request.max_tokens else replace(request, max_tokens=unlimited) for request in found]
    return Recording(whole, max(max((*request.prompt, *request.output)) for request in found) + 1)


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file in UTF-8"
        raise InputError(f"workload.trajectories: {path} cannot be read ({reason}){_FIX}") from None


def _request(row: Mapping[str, Any]) -> RecordedRequest:
    stats = row["stats"]
    accuracy = {}
    for method, (drafted, accepted) in stats["by_method"].items():
        if not 0 <= accepted <= drafted:
            raise ValueError(f"{method} has {accepted} accepted of {drafted} draft tokens")
        # Tokens after a wrong one were not tested, and a step has one wrong token at most.
        tested = accepted + min(int(stats["steps"]), drafted - accepted)
        if tested:
            accuracy[method] = accepted / tested
    output = _tokens(row["token_ids"])
    if not output:
        raise ValueError("it has no output tokens")
    limit = len(output) if row["finish_reason"] == "length" else 0
    return RecordedRequest(str(row["request_id"]), _tokens(row["prompt_token_ids"]), output, limit, accuracy)


def _tokens(ids: Sequence[Any]) -> tuple[int, ...]:
    if any(type(one) is not int or not 0 <= one < _MOST_TOKEN for one in ids):
        raise ValueError("its token ids are not whole numbers of 0 or more")
    return tuple(ids)
