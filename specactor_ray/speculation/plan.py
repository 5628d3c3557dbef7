"""Which layout, draft method, mode and window are fastest: Algorithm 1 of SpecActor (arXiv 2511.16193, section 4).

What one request gains, TGS = τ / IL, is in `spec/tgs.py`; D and V are those of `costs.py`.

A *group* is a verifier on g_v devices and, if decoupled, its drafter on g_d devices of its own. G devices hold
floor(G / (g_d + g_v)) groups (fewer are made where B requests do not fill them), and a group runs
b = ceil((g_d + g_v)·B / G) of the B requests. Candidates of different layouts are compared by the tokens per second
of the whole cluster,

    tokens/s = min(B, groups · b) · TGS(b),

since devices that are left over, and requests that wait, do not show in the TGS of one request. Where group sizes
divide G, every layout runs all B requests, so this order is that of TGS, the one of the paper.

The equations are the paper's. One thing this product does is not in them and can be added (`round_trip_s`): a decoupled
verifier waits a few milliseconds for the tail of its newest commit where that pays, and is then a coupled one whose
drafter has devices of its own. See docs/design/plan.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from specactor_ray.config.schema import ModeName
from specactor_ray.errors import InputError
from specactor_ray.spec.tgs import taus
from specactor_ray.speculation.costs import CostTable
from specactor_ray.speculation.survival import Survival

_MOST_WAIT_S = 0.020
"""Longest wait of a decoupled step."""
ALL_MODES = (ModeName.plain, ModeName.coupled, ModeName.decoupled)


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """What a draft method costs."""

    table: CostTable
    free: bool = False
    """It runs on none of the planned devices (an n-gram drafter on the CPUs of a GPU machine)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What runs on which devices."""

    mode: ModeName
    method: str | None
    """None in plain mode."""
    draft_devices: int
    """g_d: devices of the drafter's own in each group; 0 unless decoupled."""
    verify_devices: int
    """g_v: devices of each verifier."""

    @property
    def layout(self) -> tuple[ModeName, str | None, int, int]:
        """These, without what else is said of it."""
        return self.mode, self.method, self.draft_devices, self.verify_devices


@dataclass(frozen=True, slots=True)
class Candidate(Layout):
    """One way to run, with its prediction."""

    window: int
    """Draft tokens; 0 in plain mode."""
    groups: int
    batch: int
    """b: requests of each group."""
    probability: float
    """p within this window; 0 in plain mode."""
    draft_s: float
    """D: seconds to draft a token for the whole batch."""
    verify_s: float
    """V: seconds of a verify step."""
    iteration_s: float
    """IL."""
    tokens_per_iteration: float
    """τ."""
    tgs: float
    """Tokens per second of one request."""
    tokens_per_s: float
    """Tokens per second of the whole cluster."""

    def words(self) -> str:
        """`decoupled ngram, 2 x (1 + 1), window 4`: groups x (verifier's devices + drafter's)."""
        own = f" + {self.draft_devices}" if self.draft_devices else ""
        method, window = (f" {self.method}", f", window {self.window}") if self.method is not None else ("", "")
        return f"{self.mode.value}{method}, {self.groups} x ({self.verify_devices}{own}){window}"


@dataclass(frozen=True, slots=True)
class Rejected(Layout):
    """Something that was not chosen."""

    kind: str
    """`does not fit`, `not measured` or `slower`."""
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What `search_plan` found."""

    devices: int
    """G."""
    requests: int
    """B: requests that run at once in the whole cluster."""
    context: float
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    """All that were evaluated."""
    rejected: tuple[Rejected, ...]
    notes: tuple[str, ...] = ()
    """Where the prediction leaves what was measured."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON: counts, choice, predictions (the best window of every layout), candidates, rejected, notes."""
        return {
            "devices": self.devices,
            "batch": self.requests,
            "context": self.context,
            "chosen": _as_json(self.chosen),
            "predictions": [_as_json(candidate) for candidate in _best_by_layout(self.candidates)],
            "candidates": [_as_json(candidate) for candidate in self.candidates],
            "rejected": [_as_json(rejected) for rejected in self.rejected],
            "notes": list(self.notes),
        }


def search_plan(
    verify: CostTable,
    drafting: Mapping[str, DraftCosts],
    acceptance: Mapping[str, Survival],
    *,
    devices: int,
    requests: int,
    context: float,
    modes: Sequence[ModeName] = ALL_MODES,
    round_trip_s: float | None = None,
) -> Plan:
    """Evaluate every layout at every measured window, and take what gives the most tokens per second of the cluster.

    Of equals, plain before coupled before decoupled, then the smaller verifier, drafter and window. With all modes
    the result is never below plain decoding, and it does not fall when an acceptance rises.

    Args:
        verify: V; its device counts are the verifier configurations.
        drafting: Draft method → D.
        acceptance: Draft method → measured acceptance; a method without is not measured.
        devices: G.
        requests: B.
        context: Tokens of prompt and output a request has on average.
        modes: Modes that may be chosen.
        round_trip_s: Decoupled verifiers wait for the newest tail where that pays; a message there and back takes so
            many seconds. None: they never wait, as in the paper.

    Raises:
        InputError: G or B is below 1, or nothing that was measured fits G devices.
    """
    if devices < 1 or requests < 1:
        raise InputError(f"{devices} devices and a batch of {requests} cannot be planned; both must be 1 or more")
    search = _Search(verify, drafting, acceptance, devices, requests, context, round_trip_s)
    candidates: list[Candidate] = []
    rejected: list[Rejected] = []
    for layout in search.layouts(modes):
        problem = search.problem(layout)
        if problem is None:
            candidates += search.evaluate(layout)
        else:
            rejected.append(Rejected(*layout.layout, *problem))
    if not candidates:
        wanted = (
            f"{' or '.join(mode.value for mode in modes)} with the profiled {min(verify.devices)} or more device(s)"
        )
        raise InputError(f"no plan: {wanted} for each verifier does not fit {devices} device(s), or was not measured")
    chosen = max(candidates, key=lambda candidate: candidate.tokens_per_s)  # the first of equals
    rejected += [
        Rejected(*candidate.layout, "slower", _slower(candidate, chosen))
        for candidate in _best_by_layout(candidates)
        if candidate.layout != chosen.layout
    ]
    notes = tuple(search.notes(chosen))
    return Plan(devices, requests, context, chosen, tuple(candidates), tuple(rejected), notes)


@dataclass(frozen=True)
class _Search:
    """Arguments as of `search_plan`."""

    verify: CostTable
    drafting: Mapping[str, DraftCosts]
    acceptance: Mapping[str, Survival]
    devices: int
    requests: int
    context: float
    round_trip_s: float | None

    def layouts(self, modes: Sequence[ModeName]) -> Iterator[Layout]:
        """All that these modes know, in the order in which equals are chosen."""
        for mode in (mode for mode in ALL_MODES if mode in modes):
            for verify_devices in self.verify.devices:
                if mode is ModeName.plain:
                    yield Layout(mode, None, 0, verify_devices)
                    continue
                for method, costs in self.drafting.items():
                    none = mode is ModeName.coupled or costs.free
                    for draft_devices in (0,) if none else range(1, verify_devices + 1):
                        yield Layout(mode, method, draft_devices, verify_devices)

    def problem(self, layout: Layout) -> tuple[str, str] | None:
        """Why it cannot be evaluated, kind and reason."""
        needed, method = layout.draft_devices + layout.verify_devices, layout.method
        if needed > self.devices:
            return "does not fit", f"needs {needed} devices, and there are {self.devices}"
        tables = [("verifying", self.verify, layout.verify_devices)]
        if method is not None:
            if method not in self.acceptance:
                return "not measured", "its acceptance was not measured"
            tables.insert(0, ("drafting", self.drafting[method].table, self._drafts_on(layout, method)))
        for what, table, count in tables:
            if count not in table.devices:
                measured = ", ".join(map(str, table.devices))
                return "not measured", f"{what}: {count} device(s) were not measured, only {measured}"
            batch, batches = self._batch_of(layout), table.batches(count)
            if len(batches) == 1 and batch != batches[0]:
                return "not measured", f"{what}: batch {batch} was not measured, only {batches[0]:g}"
        return None

    def _drafts_on(self, layout: Layout, method: str) -> int:
        """The device count at which the drafter's cost is looked up: coupled, it drafts on the verifier's devices."""
        costs = self.drafting[method]
        if costs.free:
            return costs.table.devices[0]
        return layout.verify_devices if layout.mode is ModeName.coupled else layout.draft_devices

    def _batch_of(self, layout: Layout) -> int:
        return -(-(layout.draft_devices + layout.verify_devices) * self.requests // self.devices)

    def evaluate(self, layout: Layout) -> Iterator[Candidate]:
        """At windows 1, 2, ... up to the largest that was measured; at 0 in plain mode."""
        batch, method = self._batch_of(layout), layout.method
        # No group that would have nothing to do.
        groups = min(self.devices // (layout.draft_devices + layout.verify_devices), -(-self.requests // batch))
        most = 0 if method is None else self.verify.largest_window(layout.verify_devices)
        survival, draft_s = np.ones(1), 0.0
        if method is not None:
            survival = self.acceptance[method].within(most)
            draft_s = self.drafting[method].table.seconds(self._drafts_on(layout, method), batch, self.context)
        coupled, decoupled = (tau[0].tolist() for tau in taus(survival[None]))
        for window in range(min(most, 1), most + 1):
            verify_s = self.verify.seconds(layout.verify_devices, batch, self.context, window)
            tau, iteration_s, p = 1.0, verify_s, 0.0
            if method is not None:
                p, steps = self.acceptance[method].probability(window), (coupled[window - 1], decoupled[window - 1])
                tau, iteration_s = self._step(layout.mode, *steps, window * draft_s, verify_s)
            tgs = tau / iteration_s
            speed = min(self.requests, groups * batch) * tgs
            yield Candidate(*layout.layout, window, groups, batch, p, draft_s, verify_s, iteration_s, tau, tgs, speed)

    def _step(
        self, mode: ModeName, coupled: float, decoupled: float, drafting_s: float, verify_s: float
    ) -> tuple[float, float]:
        """`(τ, IL)` of a step with drafts."""
        if mode is ModeName.coupled:
            return coupled, drafting_s + verify_s
        running_on = decoupled, max(drafting_s, verify_s)
        wait_s = math.inf if self.round_trip_s is None else drafting_s + self.round_trip_s
        waiting = coupled, wait_s + verify_s
        pays = waiting[0] / waiting[1] > running_on[0] / running_on[1]
        return waiting if wait_s <= _MOST_WAIT_S and pays else running_on

    def notes(self, chosen: Candidate) -> Iterator[str]:
        """Where this prediction leaves what was measured."""
        on = chosen.verify_devices
        for what, value, knots in (
            ("context", self.context, self.verify.contexts(on)),
            ("batch", chosen.batch, self.verify.batches(on)),
        ):
            if not knots[0] <= value <= knots[-1]:
                yield f"{what} {value:g} is outside the measured {_range(knots)}; costs are extrapolated"
        if chosen.window and chosen.window == self.verify.largest_window(on):
            yield f"window {chosen.window} is the largest that was measured; profile larger --windows too"


def _best_by_layout(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best window of every layout, fastest first."""
    best: dict[Any, Candidate] = {}
    for candidate in sorted(candidates, key=lambda candidate: -candidate.tokens_per_s):
        best.setdefault(candidate.layout, candidate)
    return list(best.values())


def _as_json(thing: Layout) -> dict[str, Any]:
    return {**asdict(thing), "mode": thing.mode.value}


def _slower(candidate: Candidate, chosen: Candidate) -> str:
    window = f" at its best window, {candidate.window}" if candidate.window else ""
    return f"{candidate.tokens_per_s:.1f} tokens/s{window}; chosen: {chosen.tokens_per_s:.1f}"


def _range(values: Sequence[float]) -> str:
    return f"{values[0]:g} to {values[-1]:g}" if len(values) > 1 else f"{values[0]:g}"
