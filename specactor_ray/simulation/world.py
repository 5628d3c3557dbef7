"""Shared by the models of one simulation: text, durations, exceptions, and a record of their steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from specactor_ray.simulation.kernel import Kernel, Process
from specactor_ray.simulation.roofline import StepCost
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
    """What our own Python takes, beside forwards: a set figure per row.

    `verify_row_s` of a verify step where drafts are used, `plain_row_s` where they are not, `draft_row_s` of a draft
    step.
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
        """Begin to count the process's time."""


class MeasuredPython(PythonTime):
    """What our own Python really took on this machine since the last step, for the whole process, by the kernel."""

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
    """Loading a model, of verifiers and draft actors."""
    sync_s: float = 0.5
    """Taking over new weights."""


@dataclass(frozen=True)
class DraftTime:
    """How long a draft method takes."""

    forward: StepCost
    """Of one forward, which drafts one token for each of its rows; of a lookup, which drafts whole tails, the seconds
    of `positions` tokens found."""
    is_lookup: bool = False
    block: int = 1
    """Tokens of each chain that a forward drafts."""
    fusion: Callable[[int], float] | None = None
    """EAGLE heads: number of committed positions → seconds to fuse their hidden states."""
    merge_s: float = math.inf
    """Seconds that a forward takes longer where the rows of each request read their common pages once; infinity: each
    row reads all of its pages."""

    def seconds(self, rows: int, context: int, shared: int, prefill: int) -> float:
        """Duration of a forward, whichever way of attending is faster.

        Args:
            rows: Chains.
            context: Tokens of all chains.
            shared: The same with common pages counted once.
            prefill: Prompt tokens in the same forward.
        """
        positions = rows * self.block
        seconds = self.forward.seconds(rows, positions, context, prefill)
        if shared < context:
            seconds = min(seconds, self.forward.seconds(rows, positions, shared, prefill) + self.merge_s)
        return seconds


class Record:
    """A record of steps. This one keeps nothing."""

    def span(self, actor: str, what: str, begin: float, end: float, rows: int, positions: int) -> None:
        """An actor worked from `begin` to `end`, by its own clock."""

    def streams(self, actor: str, count: int, context_tokens: int) -> None:
        """A drafter follows `count` requests, which have `context_tokens` tokens together."""


@dataclass
class World:
    """Ground truth of a simulation."""

    text: Text = field(default_factory=HashedText)
    target: StepCost = LinearTime(0.02, 0.0002)
    drafting: Mapping[str, DraftTime] = field(default_factory=dict)
    """Draft method → how long it takes; others take 4 ms a forward."""
    python: PythonTime = PythonTime()
    times: Times = Times()
    clairvoyant: bool = False
    """Use true acceptance and cost for decisions (`clairvoyant.py`)."""
    cache_tokens: float = float("inf")
    """Of each verifier."""
    max_model_len: int = 100_000
    stream_bytes_per_token: float = 0.0
    """Bytes of a drafter's cache per token of a request that it follows."""
    vocab_size: int | None = None
    """Of the target model; None: any token is in it."""
    record: Record = field(default_factory=Record)
    poison: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Seed of a request → how it breaks its engine (`crash` or `wedge`) and at which output position."""
    wedged: set[str] = field(default_factory=set)
    """Verifiers whose engine does not come back from its next step."""
    busy: set[str] = field(default_factory=set)
    """Verifiers that are in a step."""
    corrupt: set[str] = field(default_factory=set)
    """Draft actors that draft nonsense."""
    version_of: dict[int, int] = field(default_factory=dict)
    """Seed of a request → version of the weights it runs with."""

    def draft_time(self, method: str) -> DraftTime:
        return self.drafting.get(method) or _USUAL


_USUAL = DraftTime(LinearTime(0.004))
