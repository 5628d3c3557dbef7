"""The proposer: a plain class that drafts ahead of the last known commits of its requests.

It uses no Ray, no clock and no network; `draft/runner.py` calls it. A proposer that drafts for one request at a time
derives from `RowProposer` (`draft/rows.py`). Traits and the list of built-in methods are in `config/methods.py`.
Drafts never change a sampled token.
"""

from __future__ import annotations

import abc
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from specactor_ray.config.methods import BUILT_IN, NO_TRAITS, Checkpoint, class_of, traits
from specactor_ray.config.schema import AUTO
from specactor_ray.core.errors import ConfigError, SpecActorError, clipped, clipped_text
from specactor_ray.models.shapes import GIB, ITEM_BYTES, ROW_BYTES, context_of, count_parameters, token_bytes
from specactor_ray.target.sizes import UNKNOWN_CONTEXT, captured_bytes, in_blocks
from specactor_ray.transport.messages import FinishedOutput

if TYPE_CHECKING:
    from specactor_ray.config.methods import DrafterSpec
    from specactor_ray.config.schema import TargetConfig
    from specactor_ray.table.view import TableView


logger = logging.getLogger(__name__)

STEP_TOKENS = 512
"""Most positions of a model's forward; a long prompt is read in chunks of this size."""


class Failures:
    """Counts failures by the kind of error. Logs the first one of a kind with its traceback, and then the 10th, the
    100th and so on."""

    def __init__(self) -> None:
        self._counts = Counter[str]()

    def __len__(self) -> int:
        """Number of failures."""
        return self._counts.total()

    def add(self, what: str, error: BaseException) -> None:
        """Count a failure; `what`: name of the failed work in the log."""
        kind = type(error).__name__
        self._counts[kind] += 1
        count = self._counts[kind]
        if count == 1:
            logger.error("%s; further failures with %s are counted", what, kind, exc_info=error)
        elif str(count).strip("0") == "1":
            logger.warning("%s: %s; %d failures with %s so far", what, error, count, kind)


class Proposer(abc.ABC):
    """Interface of a draft method: it reads requests from a table and writes its guesses into the table.

    A request has a row of the table. The rows that a drafter gets at a call are all of its requests; a row may have
    another request than at the last call, with another `table.generation`.
    """

    method: str
    vocab_size: int | None
    """Number of tokens of the drafter's vocabulary; None: any vocabulary. `BatchProposer` answers requests with other
    tokens with empty tails."""
    traits = NO_TRAITS
    budget: int = 0
    """Set before `propose`: most rows of a forward; 0: unknown, without branches."""
    forward_s: np.ndarray
    """Set before `propose`: float64 `(budget + 1,)`, seconds of a forward with 0, 1, ... rows; empty: unknown."""
    burst: int = 1
    """Set before `propose`: most tokens that models draft for each chain."""
    drafted: int = 1
    """Set by `propose`: tokens that it drafted for each chain."""
    rows_drafted: int = 0
    """Set by `propose`: mean rows of its forwards; 0 if a row read more than a token, or a forward changed no tail."""
    unread: int = 0
    """Hidden states that it has received and not read: a verifier that hosts it keeps further ones back."""
    required: tuple[str, ...] = ("method", "vocab_size")
    """Attributes that a proposer must have."""

    def __new__(cls, *_arguments: Any, **_options: Any) -> Self:  # not `__init__`, which a derived class may not call
        made = super().__new__(cls)
        made.forward_s = np.zeros(0)
        return made

    @abc.abstractmethod
    def propose(self, view: TableView, rows: np.ndarray) -> np.ndarray:
        """Write tails for some of `rows`, int32 `(n,)`: all requests of the drafter; none after the last one has left.

        The table has the newest commits; a tail that agrees with them goes on behind them, another one is gone. Models
        lengthen tails by up to `burst` tokens each, lookups up to the room. Returns the rows that have an answer,
        int32: those whose tail changed, and those without a guess after their newest commit. A draft actor sends these
        alone, and a verifier may wait for the others. A lookup may return all `rows`; a model is called again until
        it returns none.
        """

    def reset(self) -> None:  # noqa: B027
        """Forget all requests after an error. Default: nothing."""

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:  # noqa: B027
        """Replace the weights (name → tensor). Default: nothing."""

    def add_features(  # noqa: B027
        self, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray, states: Any
    ) -> None:
        """Take hidden states of consecutive sequence positions, before the guesses of a call: int32 `(n,)` each, and a
        tensor `(sum(lengths), layers * hidden)`, row by row, of a hosted proposer on the target's device. They may
        overlap or leave gaps. `BatchProposer` calls it, with the trait `reads_features`."""

    def sleep(self) -> None:  # noqa: B027
        """Free what takes memory of a device, until `wake`; all requests have ended. Default: nothing."""

    def wake(self) -> None:  # noqa: B027
        """Allocate again what `sleep` freed. Default: nothing."""

    def learn(self, outputs: Sequence[FinishedOutput]) -> None:  # noqa: B027
        """Take finished outputs, with the trait `keeps_history`: those of the drafter's requests, whose rows are still
        open, and where it is hosted those of up to seven other verifiers. Some may be lost."""

    def forget_history(self) -> None:  # noqa: B027
        """Clear the history; open requests stay. Overridden with the trait `keeps_history`."""

    @classmethod
    def from_config(cls, config: DrafterSpec, target: TargetConfig, device: str) -> Self:
        """Build the proposer of a section of `drafters` for this target, on `device` (`cpu` or `cuda`)."""
        return cls(config)  # the constructor of a class that does not override this


def build_proposer(config: DrafterSpec, target: TargetConfig, device: str) -> Proposer:
    """Build the proposer of a settled record for this target on `device` (`cpu` or `cuda`).

    Raises:
        ConfigError: There is no such method, a user's own class cannot be made, or a value is still `auto`.
        ModelLoadError: Its model cannot be loaded or served.
    """
    key, method = "drafters.N.method", clipped_text(config.method)
    for name in ("dtype", "kv_cache_gb") if config.model else ():
        if getattr(config, name) in (AUTO, None):
            raise ConfigError(f"drafters.N.{name}", "is still auto.", "set it, or settle it by `resolve`.")
    proposer_class: type[Proposer] = class_of(config.method, key)
    try:
        proposer = proposer_class.from_config(config, target, device)
        if not isinstance(proposer, Proposer):
            raise TypeError(f"from_config returned {clipped(proposer)}")
    except Exception as error:
        if isinstance(error, SpecActorError) or config.method in BUILT_IN:
            raise
        problem = f"{method} cannot be made: {type(error).__name__}: {clipped(error)}."
        raise ConfigError(key, problem, "mend its from_config, or its constructor.") from error
    missing = [name for name in proposer.required if not hasattr(proposer, name)]
    if missing:
        fix = "set method and vocab_size in the class, and call super().__init__() in its constructor."
        raise ConfigError(key, f"{method} is made without {', '.join(missing)}.", fix)
    return proposer


def footprint(drafter: DrafterSpec, target: TargetConfig, total: float | None) -> tuple[float, float]:
    """Bytes of one drafter, 0 without a model: its cache, and weights, cache and captured steps together. The default
    cache holds `max_batch` requests of full length, at most a tenth of its GPU of `total` bytes (None: 0.5 GiB, on the
    CPU)."""
    if not drafter.model:
        return 0.0, 0.0
    if traits(drafter.method).checkpoint is Checkpoint.HEAD:
        from specactor_ray.draft.eagle.checkpoint import empty_head

        head = empty_head(drafter.model, target)
        size, text = sum(parameter.numel() for parameter in head.parameters()), head.config.text
    else:
        size, text = count_parameters(drafter.model, drafter.trust_remote_code)
    itemsize, row = ITEM_BYTES[drafter.dtype], ROW_BYTES if total is None else 1
    needed = in_blocks(context_of(text) or UNKNOWN_CONTEXT, drafter.max_batch) * token_bytes(text, itemsize, row=row)
    cache = float(min(needed, GIB / 2 if total is None else total / 10))
    if drafter.kv_cache_gb is not None:
        cache = drafter.kv_cache_gb * GIB
    if total is None:
        return cache, size * itemsize + cache
    rows = min(drafter.max_batch * (1 + drafter.branches), STEP_TOKENS)
    return cache, size * itemsize + cache + captured_bytes(text, itemsize, rows, STEP_TOKENS, rows)
