"""Results of a rollout: finished samples with all data for training, and counters over its verifiers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.detokenizer import decoded
from specactor_ray.rollout.journal import JournalEntry
from specactor_ray.rollout.prompts import split_row
from specactor_ray.transport.messages import RequestStats
from specactor_ray.verify.metrics import StepMetrics

_NOT_SUMS = ("drafted_by_position", "accepted_by_position")
"""Counters with their own way of merging."""
_IN_ROWS = (
    *("request_id", "prompt_index", "sample_index", "prompt", "text", "finish_reason", "prompt_token_ids"),
    *("token_ids", "weight_version"),
)
_OPTIONAL = ("error", "stop_reason", "versions")
"""Fields of a trajectory's row; of these those that are set."""
_RATIOS = ("acceptance_rate", "acceptance_length", "supply", "supply_share", "speedup")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sample of one prompt. `token_ids` and `logprobs` have the same length and exclude the prompt."""

    request_id: str
    prompt_index: int
    """Index of the prompt in the order of the given prompts."""
    sample_index: int
    """Number of this sample within its prompt's group, from 0."""
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each token under softmax(logits / T), before top-k/top-p."""
    text: str
    """Decoded output without special tokens, up to a stop text."""
    finish_reason: str
    """`stop`, `length`, `abort` or `error`."""
    sampling: SamplingParams
    """Parameters of this sample; its seed is derived from the run's."""
    stats: RequestStats = field(default_factory=RequestStats)
    """Steps and drafts of its tokens, over all attempts: on several verifiers, before and after new weights. Steps that
    a lost verifier had not reported are not included; their tokens were computed again."""
    error: str = ""
    """Reason of the failure; empty otherwise."""
    margins: tuple[float, ...] | None = None
    """Perturbed top-2 margin of each token, if `target.record_margins` is on."""
    prompt: Any = None
    """The prompt as given: text, chat messages or token ids."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of the prompt's row, such as `answer` and `id`."""
    weight_version: int = 0
    """Version of the target's weights that sampled it; the newest if there were several."""
    versions: tuple[tuple[int, int], ...] = ()
    """Earlier versions, each with the number of output tokens at its end; empty if one version sampled all."""
    stop_reason: str | int | None = None
    """The stop text or the id of `sampling.stop_token_ids` that ended it; None if neither did."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    """Per position the `sampling.logprobs` most probable tokens with their log-probabilities, the most probable first,
    under the distribution of `logprobs`; None if that is 0."""
    prompt_logprobs: tuple[float, ...] | None = None
    """Log-probabilities of the prompt's tokens from the second on, with `sampling.prompt_logprobs`; None without, or if
    the request ended before they were computed. That of the first token is not defined."""
    prompt_best: tuple[tuple[int, float], ...] | None = None
    """The most probable token at each of these positions, and its log-probability."""
    loss_mask: tuple[bool, ...] = ()
    """Whether each output token was sampled by the model, with `environment.name`; the log-probabilities of the others
    are 0. Empty if all were."""
    steps: Sequence[int] = ()
    """Number of tokens of each step: right draft tokens, then one of the target, unless the output ended before it."""

    @property
    def num_own_tokens(self) -> int:
        """Number of output tokens that the model sampled."""
        return sum(self.loss_mask) if self.loss_mask else len(self.token_ids)

    @property
    def drafted(self) -> list[bool]:
        """Whether each output token was a draft token."""
        mask = [number < length - 1 for length in self.steps for number in range(length)]
        if sum(mask) < self.stats.accepted:  # a right draft token ended the output
            mask[-1] = True
        return mask[: len(self.token_ids)]

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Yield version of the weights, begin and end of each range of output tokens that one version sampled."""
        begin = 0
        for version, end in (*self.versions, (self.weight_version, len(self.token_ids))):
            if end > begin:
                yield version, begin, end
                begin = end

    def to_json(self) -> dict[str, Any]:
        """The trajectory as plain data for one line of JSONL."""
        row: dict[str, Any] = {name: getattr(self, name) for name in _IN_ROWS}
        row["logprobs"] = [round(value, 6) for value in self.logprobs]
        row["seed"], row["stats"] = self.sampling.seed, asdict(self.stats)
        row |= {name: value for name in _OPTIONAL if (value := getattr(self, name)) not in (None, "", ())}
        if self.columns:
            row["columns"] = dict(self.columns)
        if self.margins is not None:
            row["margins"] = [round(value, 6) for value in self.margins]
        if self.top_logprobs is not None:
            row["top_logprobs"] = [
                [[one, round(max(value, -9999.0), 6)] for one, value in top] for top in self.top_logprobs
            ]
        if self.prompt_logprobs is not None:
            row["prompt_logprobs"] = [round(value, 6) for value in self.prompt_logprobs]
        return row


def trajectory_of(entry: JournalEntry, tokenizer: Any, row: Any = None, error: str = "") -> Trajectory:
    """Output of a request that has ended, with text if there is a tokenizer; `row`: the prompt as given, with its
    columns, `error`: reason why it was never begun."""
    prompt, columns = split_row(row)
    finished, token_ids = entry.finished, entry.token_ids
    scores = entry.prompt_scores
    text = decoded(tokenizer, token_ids) if tokenizer else ""
    stop: str | int | None = None
    if entry.stop is not None:
        text, stop = text[: max(0, len(text) - entry.stop.cut)], entry.stop.text
    elif finished and finished.finish_reason == "stop" and token_ids:
        stop = token_ids[-1] if token_ids[-1] in entry.sampling.stop_token_ids else None
    return Trajectory(
        request_id=entry.name or entry.request_id,
        prompt_index=entry.place[0],
        sample_index=entry.place[1],
        prompt_token_ids=entry.prompt_token_ids,
        token_ids=tuple(token_ids),
        logprobs=tuple(entry.logprobs),
        text=text,
        finish_reason=finished.finish_reason if finished else "error",
        sampling=entry.sampling,
        stats=entry.stats,
        error=finished.error if finished else error,
        margins=None if entry.margins is None else tuple(entry.margins),
        prompt=prompt,
        columns=columns,
        weight_version=entry.weight_version,
        versions=tuple(entry.versions),
        stop_reason=stop,
        top_logprobs=tuple(entry.tops()) if entry.sampling.logprobs else None,
        prompt_logprobs=None if scores is None else tuple(scores[:, 0].tolist()),
        steps=entry.steps,
        prompt_best=None if scores is None else tuple((int(one), value) for one, value in scores[:, 1:].tolist()),
    )


@dataclass
class RolloutMetrics(StepMetrics):
    """Sums over all verifiers."""

    @classmethod
    def merge(cls, counters: Iterable[Mapping[str, Any]]) -> RolloutMetrics:
        """Sum the counters (`StepMetrics.to_dict`) of several verifiers."""
        total = cls()
        for one in counters:
            for counter in fields(StepMetrics):
                if counter.name not in _NOT_SUMS:
                    setattr(total, counter.name, getattr(total, counter.name) + one.get(counter.name, 0))
            total.count_positions(one.get("drafted_by_position", ()), one.get("accepted_by_position", ()))
        return total

    def since(self, before: RolloutMetrics) -> RolloutMetrics:
        """Counters since `before`; the positions of drafts are left out."""
        names = [counter.name for counter in fields(StepMetrics) if counter.name not in _NOT_SUMS]
        # The counters of a verifier that was lost meanwhile are gone.
        return RolloutMetrics(**{name: max(getattr(self, name) - getattr(before, name), 0) for name in names})

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens; 0 if nothing was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per request and step, including the bonus or recovered one, and tokens that no output keeps,
        such as those behind a stop text; 1 for plain decoding."""
        return self.committed_tokens / self.row_steps if self.row_steps else 0.0

    @property
    def supply(self) -> float:
        """Usable draft tokens per request and step, whether verified or not."""
        return self.supplied_tokens / self.row_steps if self.row_steps else 0.0

    @property
    def supply_share(self) -> float:
        """Share of request steps with at least one usable draft token."""
        return self.supplied_row_steps / self.row_steps if self.row_steps else 0.0

    @property
    def speedup(self) -> float:
        """Estimated speed of the steps to that of plain decoding (`StepMetrics.plain_s`); 0 before the first step."""
        total_s = self.forward_s + self.sampling_s + self.waiting_s + self.protocol_s
        return self.plain_s / total_s if total_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Counters and ratios as plain data."""
        return {**super().to_dict(), **{name: getattr(self, name) for name in _RATIOS}}
