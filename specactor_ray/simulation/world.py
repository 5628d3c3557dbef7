"""Common data of the models of one simulation: text, durations, exceptions, and a record of their steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from specactor_ray.simulation.kernel import Kernel, Process
from specactor_ray.simulation.roofline import ForwardCost
from specactor_ray.simulation.text import HashedText, Text


@dataclass(frozen=True)
class LinearTime:
    """Fixed seconds per forward, seconds per position, and per row."""

    forward_s: float
    position_s: float = 0.0
    row_s: float = 0.0

    def seconds(self, rows: int, positions: int, context_tokens: int, prefill_tokens: int = 0) -> float:
        return self.forward_s + self.row_s * rows + self.position_s * (positions + prefill_tokens)


@dataclass(frozen=True)
class PythonTime:
    """Time of the package's Python beside forwards, by a fixed figure per row.

    `verify_row_s` is for a verify step with drafts, `plain_row_s` for one without, `draft_row_s` for a draft step.
    """

    verify_row_s: float = 0.0
    plain_row_s: float = 0.0
    draft_row_s: float = 0.0

    def verify_s(self, process: Process, rows: int, speculates: bool) -> float:
        """Seconds to charge for one verify step."""
        return rows * (self.verify_row_s if speculates else self.plain_row_s)

    def draft_s(self, process: Process, rows: int) -> float:
        """Seconds to charge for one draft step."""
        return rows * self.draft_row_s

    def begin(self, process: Process) -> None:
        """Begin the measurement of the process's time."""


class MeasuredPython(PythonTime):
    """Real time of the package's Python on this machine since the last step, of the whole process, by the kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        kernel.measure()

    def verify_s(self, process: Process, rows: int, speculates: bool) -> float:
        return self._kernel.take_spent(process)

    def draft_s(self, process: Process, rows: int) -> float:
        return self._kernel.take_spent(process)

    def begin(self, process: Process) -> None:
        self._kernel.take_spent(process)


@dataclass(frozen=True)
class Times:
    """Durations beside steps, in seconds."""

    load_s: float = 0.5
    """Seconds to load a model, for verifiers and draft actors."""
    sync_s: float = 0.5
    """Seconds to load new weights."""


@dataclass(frozen=True)
class DraftTime:
    """Durations of a draft method."""

    forward: ForwardCost
    """Cost of one forward, which drafts one token for each of its rows; for a lookup, which drafts whole tails, the
    seconds of `positions` found tokens."""
    is_lookup: bool = False
    block: int = 1
    """Tokens of each chain that a forward drafts."""
    fusion: Callable[[int], float] | None = None
    """EAGLE heads: number of committed positions → seconds to fuse their hidden states."""
    merge_s: float = math.inf
    """Additional seconds of a forward if the rows of each request read their common pages once; infinity: each row
    reads all of its pages."""

    def seconds(self, rows: int, context: int, shared: int, prefill: int) -> float:
        """Duration of a forward with the faster way of attention.

        Args:
            rows: Number of chains.
            context: Tokens of all chains.
            shared: Tokens of all chains, with common pages counted once.
            prefill: Prompt tokens in the same forward.
        """
        positions = rows * self.block
        seconds = self.forward.seconds(rows, positions, context, prefill)
        if shared < context:
            seconds = min(seconds, self.forward.seconds(rows, positions, shared, prefill) + self.merge_s)
        return seconds


class WorkRecorder:
    """Record of steps; this base class keeps nothing."""

    def span(self, actor: str, what: str, begin: float, end: float, rows: int, positions: int) -> None:
        """Record the work of an actor from `begin` to `end`, on its own clock."""

    def streams(self, actor: str, count: int, context_tokens: int) -> None:
        """Record that a drafter has `count` requests with `context_tokens` tokens in total."""


@dataclass
class World:
    """Ground truth of a simulation."""

    text: Text = field(default_factory=HashedText)
    target: ForwardCost = LinearTime(0.02, 0.0002)
    drafting: Mapping[str, DraftTime] = field(default_factory=dict)
    """Draft method → its durations; others take 4 ms per forward."""
    python: PythonTime = PythonTime()
    times: Times = Times()
    clairvoyant: bool = False
    """Whether decisions use true acceptance and cost (`clairvoyant.py`)."""
    cache_tokens: float = float("inf")
    """Tokens of each verifier's cache."""
    max_model_len: int = 100_000
    stream_bytes_per_token: float = 0.0
    """Bytes of a drafter's cache per token of its requests."""
    vocab_size: int | None = None
    """Vocabulary size of the target model; None: any token is valid."""
    record: WorkRecorder = field(default_factory=WorkRecorder)
    poison: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Seed of a request → its fault (`crash` or `wedge` of the engine), and the output position of the fault."""
    wedged: set[str] = field(default_factory=set)
    """Verifiers whose engine does not return from its next step."""
    busy: set[str] = field(default_factory=set)
    """Verifiers that are in a step."""
    corrupt: set[str] = field(default_factory=set)
    """Draft actors with wrong drafts."""
    version_of: dict[int, int] = field(default_factory=dict)
    """Seed of a request → version of its weights."""

    def draft_time(self, method: str) -> DraftTime:
        return self.drafting.get(method) or _USUAL


_USUAL = DraftTime(LinearTime(0.004))
