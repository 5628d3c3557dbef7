"""Interface of target engines, which run requests on the target model.

One `step` runs one forward over prefill chunks and over the draft tails of all running rows, and appends to each row
of the table the longest draft prefix that equals the target's samples plus one token of the target. Engines use no Ray.
Every engine passes `tests/unit/engine_conformance.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from specactor_ray.core.types import TopTokens
from specactor_ray.table.requests import Finish
from specactor_ray.transport.messages import States

if TYPE_CHECKING:
    from specactor_ray.table.table import RequestTable

STATES_UNDER_WAY = 4096
"""Most positions with hidden states that are under way to a drafter, or wait in a hosted one."""


class Drafts(NamedTuple):
    """Draft tokens of `n` rows for their output positions from the committed length on."""

    rows: np.ndarray
    """int32 `(n,)`: numbers of the rows, each once."""
    lengths: np.ndarray
    """int32 `(n,)`: number of draft tokens of each row."""
    tokens: np.ndarray
    """int32 `(sum(lengths),)`: draft tokens of all rows, row by row."""

    @classmethod
    def of(cls, tails: Mapping[int, Sequence[int]]) -> Drafts:
        """The drafts of a mapping row → tokens."""
        lengths = np.fromiter(map(len, tails.values()), np.int32, len(tails))
        tokens = np.array([token for tail in tails.values() for token in tail], np.int32)
        return cls(np.fromiter(tails, np.int32, len(tails)), lengths, tokens)


NO_DRAFTS = Drafts.of({})
_no_integers = functools.partial(np.zeros, 0, np.int32)
_no_floats = functools.partial(np.zeros, 0, np.float32)


@dataclass(slots=True)
class StepResult:
    """Tokens and costs of one engine step for `n` rows. Rows that were only prefilled are not included."""

    rows: np.ndarray = field(default_factory=_no_integers)
    """int32 `(n,)`: numbers of the rows, each once."""
    starts: np.ndarray = field(default_factory=_no_integers)
    """int32 `(n,)`: output position of each row's first token."""
    lengths: np.ndarray = field(default_factory=_no_integers)
    """int32 `(n,)`: number of committed tokens, 0 for a row that ends with an error."""
    tokens: np.ndarray = field(default_factory=_no_integers)
    """int32 `(sum(lengths),)`: for each row accepted draft tokens, then one recovered (first mismatch) or bonus (all
    matched) token; cut at a stop."""
    logprobs: np.ndarray = field(default_factory=_no_floats)
    """float32, as `tokens`: log-probabilities under softmax(logits / T), before top-k/top-p (T = 1 at temperature
    0)."""
    margins: np.ndarray | None = None
    """float32, as `tokens`: perturbed top-2 margins, if the engine records them."""
    drafted: np.ndarray = field(default_factory=_no_integers)
    """int32 `(n,)`: number of verified draft tokens, up to an accepted one that ends the output."""
    accepted: np.ndarray = field(default_factory=_no_integers)
    """int32 `(n,)`: number of these that equal the target's samples."""
    finish: np.ndarray = field(default_factory=_no_integers)
    """uint8 `(n,)`: `Finish` of each row. Rows that are not running have left the engine."""
    errors: dict[int, str] = field(default_factory=dict)
    """Row that ends with an error → reason."""
    states: States | None = None
    """With `TargetEngine.exports`: the target's states of positions that became final, on the engine's device. Every
    position of a request occurs once, in order, up to the one that predicted its newest token."""
    tops: TopTokens | None = None
    """The most probable tokens at the positions of `tokens`, for requests with `SamplingParams.logprobs`."""
    prompt_logprobs: dict[int, np.ndarray] = field(default_factory=dict)
    """Row whose prompt this step completed → `PromptScores.scores`, for requests with
    `SamplingParams.prompt_logprobs`."""
    forward_s: float = 0.0
    sampling_s: float = 0.0
    num_tokens: int = 0
    """Number of positions in the forward (prefill and verify)."""
    num_prefill_tokens: int = 0

    def outputs(self) -> Iterator[tuple[int, list[int], Finish]]:
        """Row, tokens and end of the output, row by row."""
        parts = np.split(self.tokens, np.cumsum(self.lengths)[:-1])
        for row, tokens, finish in zip(self.rows.tolist(), parts, self.finish.tolist(), strict=False):
            yield row, tokens.tolist(), Finish(finish)


class TargetEngine(Protocol):
    """Interface of a target backend. Not thread-safe: one thread calls it."""

    vocab_size: int
    max_model_len: int
    """Most prompt + output tokens of one request."""
    table: RequestTable
    """Its requests. The owner of the engine opens rows, and closes them when they have ended or were removed."""
    weight_version: int
    exports: bool
    """Whether results have `StepResult.states`. Verifiers, which call `states` where drafters need some, set False."""

    def add(self, row: int) -> None:
        """Queue an open request of the table. InputError: the engine cannot run it; nothing was queued."""

    def remove(self, row: int) -> None:
        """Drop a request, running or waiting, and free its cache. Rows that the engine does not have are ignored."""

    def decoding(self) -> np.ndarray:
        """int32 `(n,)`: rows of the admitted requests for which the next step samples, so that a tail is useful."""

    def has_work(self) -> bool:
        """Whether any request is running or waiting."""

    def step(self, drafts: Drafts = NO_DRAFTS, window: int = 0) -> StepResult:
        """Run one forward. Drafts may have any length, including 0; drafts of rows that are not decoding are ignored.

        `window`: most draft tokens of a row in the next call. An engine that keeps a step in flight plans the next one
        meanwhile: with 0 it runs without a wait for drafts, and those of the next call are ignored.
        """

    def states(self, rows: np.ndarray, starts: np.ndarray, most: int) -> States:
        """Hidden states (`target.hidden_layers`) of requests from positions `starts` on, int32 `(n,)` each: those that
        are final and in memory, up to the one that predicted the newest token. At most `most` in all, those of the rows
        with the fewest first. After a preemption they are missing until they are computed again."""

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        """Replace the weights (Hugging Face names → tensors) and drop caches of the old ones. InputError: a name or
        shape does not fit; nothing was changed."""

    def prompt_logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 `(n - 1,)`: log-probabilities of `token_ids[1:]`, int32 `(n,)`, each after all tokens before it, with
        the present weights. Requests are not stepped, and nothing stays in the cache. InputError: no room for them."""

    def reset_prefix_cache(self) -> None:
        """Drop the contexts of ended requests; for benchmarks."""

    def sleep(self, keep_weights: bool = True) -> None:
        """Free the memory of the cache, and on GPUs that of the weights, until `wake`, for trainers that share the
        device. Without `keep_weights` they may be lost: new ones must come before `wake`. InputError: requests run."""

    def wake(self) -> None:
        """Allocate the memory again. Idempotent. WeightsError: the weights were not kept, and no new ones came."""

    def close(self) -> None:
        """Free memory and end helper processes. The engine cannot be used afterwards."""
