"""Which layout, draft method, mode and window are fastest: Algorithm 1 of SpecActor (arXiv 2511.16193, section 4).

What one request gains, TGS = τ / IL, is in `tgs.py`; D and V are those of `costs.py`.

A *group* is a verifier on g_v devices and, if decoupled, its drafter on g_d devices of its own. G devices hold
floor(G / (g_d + g_v)) groups (fewer are made where B requests do not fill them), and a group runs
b = ceil((g_d + g_v)·B / G) of the B requests. Candidates of different layouts are compared by the tokens per second
of the whole cluster,

    tokens/s = min(B, groups · b) · TGS(b),

since devices that are left over, and requests that wait, do not show in the TGS of one request. Where group sizes
divide G, every layout runs all B requests, so this order is that of TGS, the one of the paper.

The equations are the paper's, and are used as they stand unless told otherwise. Two things this product does are not
in them and can be added: `round_trip_s`, what a message to another process takes there and back, and `waits`: a
decoupled verifier waits a few milliseconds for the tail of its newest commit where that pays (`window.choose_wait_s`),
and is then a coupled one whose drafter has devices of its own. See docs/design/plan.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from specactor_ray.config.schema import ModeName
from specactor_ray.config.validate import MAX_WINDOW
from specactor_ray.errors import InputError
from specactor_ray.spec.tgs import tau_coupled, tau_decoupled
from specactor_ray.speculation.candidates import Candidate, Plan, Rejected
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


def search_plan(
    verify: CostTable,
    drafting: Mapping[str, DraftCosts],
    acceptance: Mapping[str, Survival],
    *,
    devices: int,
    requests: int,
    context: float,
    modes: Sequence[ModeName] = ALL_MODES,
    round_trip_s: float = 0.0,
    waits: bool = False,
) -> Plan:
    """Evaluate every candidate and take the one with the most tokens per second of the cluster.

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
        round_trip_s: Seconds a decoupled step that waits for drafts waits for messages beside drafting; in the paper 0.
        waits: Decoupled verifiers wait for the newest tail where that pays. In the paper they never do.

    Raises:
        InputError: G or B is below 1, or nothing that was measured fits G devices.
    """
    if devices < 1 or requests < 1:
        raise InputError(f"{devices} devices and a batch of {requests} cannot be planned; both must be 1 or more")
    search = _Search(verify, drafting, acceptance, devices, requests, context, round_trip_s, waits)
    for mode in [mode for mode in ALL_MODES if mode in modes]:
        for verify_devices in verify.devices:
            search.verifier(mode, verify_devices)
    if not search.candidates:
        wanted = (
            f"{' or '.join(mode.value for mode in modes)} with the profiled {min(verify.devices)} or more device(s)"
        )
        raise InputError(f"no plan: {wanted} for each verifier does not fit {devices} device(s), or was not measured")
    return search.plan()


class _Search:
    """Collects candidates and what was left out. Arguments as of `search_plan`."""

    def __init__(
        self,
        verify: CostTable,
        drafting: Mapping[str, DraftCosts],
        acceptance: Mapping[str, Survival],
        devices: int,
        requests: int,
        context: float,
        round_trip_s: float,
        waits: bool,
    ) -> None:
        self._verify, self._drafting, self._acceptance = verify, drafting, acceptance
        self._devices, self._requests, self._context, self._round_trip_s = devices, requests, context, round_trip_s
        self._waits = waits
        self.candidates: list[Candidate] = []
        self._rejected: list[Rejected] = []

    def verifier(self, mode: ModeName, verify_devices: int) -> None:
        """All candidates of one mode and verifier configuration."""
        if mode is ModeName.plain:
            if self._admit(mode, None, 0, verify_devices, None):
                self._evaluate(mode, None, 0, verify_devices, 0)
            return
        for method, costs in self._drafting.items():
            for draft_devices in self._draft_device_counts(mode, costs, verify_devices):
                if self._admit(mode, method, draft_devices, verify_devices, costs):
                    for window in self._windows(mode, method, draft_devices, verify_devices, costs):
                        self._evaluate(mode, method, draft_devices, verify_devices, window)

    def plan(self) -> Plan:
        chosen = self.candidates[0]
        for candidate in self.candidates:
            if candidate.tokens_per_s > chosen.tokens_per_s:
                chosen = candidate
        found = Plan(self._devices, self._requests, self._context, chosen, tuple(self.candidates), ())
        slower = [
            Rejected(*candidate.layout, "slower", _slower(candidate, chosen))
            for candidate in found.best_by_layout()
            if candidate.layout != chosen.layout
        ]
        rejected = (*self._rejected, *slower)
        return Plan(
            self._devices, self._requests, self._context, chosen, found.candidates, rejected, tuple(self._notes(chosen))
        )

    def _draft_device_counts(self, mode: ModeName, costs: DraftCosts, verify_devices: int) -> Sequence[int]:
        return (0,) if mode is ModeName.coupled or costs.free else range(1, verify_devices + 1)

    def _drafts_on(self, mode: ModeName, costs: DraftCosts, draft_devices: int, verify_devices: int) -> int:
        """The device count at which the drafter's cost is looked up: coupled, it drafts on the verifier's devices."""
        if costs.free:
            return costs.table.devices[0]
        return verify_devices if mode is ModeName.coupled else draft_devices

    def _admit(
        self, mode: ModeName, method: str | None, draft_devices: int, verify_devices: int, costs: DraftCosts | None
    ) -> bool:
        """Whether it can be evaluated; if not, why is noted."""
        needed = draft_devices + verify_devices
        reason = kind = ""
        if needed > self._devices:
            kind, reason = "does not fit", f"needs {needed} devices, and there are {self._devices}"
        elif costs is not None and method not in self._acceptance:
            kind, reason = "not measured", "its acceptance was not measured"
        else:
            tables = [(self._verify, verify_devices, "verifying")]
            if costs is not None:
                drafter = self._drafts_on(mode, costs, draft_devices, verify_devices)
                tables.append((costs.table, drafter, "drafting"))
            for table, count, what in tables:
                problem = _not_covered(table, count, self._batch_of(needed))
                if problem:
                    kind, reason = "not measured", f"{what}: {problem}"
        if kind:
            self._rejected.append(Rejected(mode, method, draft_devices, verify_devices, kind, reason))
        return not kind

    def _windows(
        self, mode: ModeName, method: str, draft_devices: int, verify_devices: int, costs: DraftCosts
    ) -> range:
        """1..w_max of Algorithm 1, cut at the largest window that was measured."""
        widest = self._verify.windows(verify_devices)[-1]
        draft_line = costs.table.line(self._drafts_on(mode, costs, draft_devices, verify_devices), self._context)
        w_max = largest_window(draft_line, self._verify.line(verify_devices, self._context, widest))
        if w_max > widest:
            reason = f"windows {widest + 1} to {w_max} were not measured (profile with larger --windows)"
            self._rejected.append(Rejected(mode, method, draft_devices, verify_devices, "not measured", reason))
        return range(1, min(w_max, widest) + 1)

    def _batch_of(self, group_devices: int) -> int:
        return -(-group_devices * self._requests // self._devices)

    def _evaluate(
        self, mode: ModeName, method: str | None, draft_devices: int, verify_devices: int, window: int
    ) -> None:
        needed = draft_devices + verify_devices
        batch = self._batch_of(needed)
        groups = min(self._devices // needed, -(-self._requests // batch))  # none that would have nothing to do
        verify_s = self._verify.seconds(verify_devices, batch, self._context, window)
        draft_s = p = 0.0
        if method is None:
            tau, iteration_s = 1.0, verify_s
        else:
            costs = self._drafting[method]
            on = self._drafts_on(mode, costs, draft_devices, verify_devices)
            draft_s = costs.table.seconds(on, batch, self._context)
            p = self._acceptance[method].probability(window)
            tau, iteration_s = self._step(mode, p, window, draft_s, verify_s)
        tgs = tau / iteration_s
        running = min(self._requests, groups * batch)
        self.candidates.append(
            Candidate(
                mode,
                method,
                draft_devices,
                verify_devices,
                window,
                groups,
                batch,
                p,
                draft_s,
                verify_s,
                iteration_s,
                tau,
                tgs,
                running * tgs,
            )
        )

    def _step(self, mode: ModeName, p: float, window: int, draft_s: float, verify_s: float) -> tuple[float, float]:
        """`(τ, IL)` of a step with drafts."""
        if mode is ModeName.coupled:
            return tau_coupled(p, window), window * draft_s + verify_s
        wait_s = window * draft_s + self._round_trip_s
        waiting = tau_coupled(p, window), wait_s + verify_s
        running_on = tau_decoupled(p, window), max(window * draft_s, verify_s)
        pays = waiting[0] / waiting[1] > running_on[0] / running_on[1]
        return waiting if self._waits and wait_s <= _MOST_WAIT_S and pays else running_on

    def _notes(self, chosen: Candidate) -> Iterator[str]:
        contexts = self._verify.contexts(chosen.verify_devices)
        if not contexts[0] <= self._context <= contexts[-1]:
            near = contexts[0] if self._context < contexts[0] else contexts[-1]
            yield f"context {self._context:g} is outside the measured {_range(contexts)}; costs are those at {near}"
        batches = self._verify.batches(chosen.verify_devices)
        if not batches[0] <= chosen.batch <= batches[-1]:
            yield f"batch {chosen.batch} is outside the measured {_range(batches)}; the fitted line goes on"


def largest_window(draft: tuple[float, float], verify: tuple[float, float]) -> int:
    """`w_max = max(ceil(V'/D'), ceil(β/α))` of Algorithm 1, at least 1 and at most the largest window there is.

    Beyond it w·D > V at every batch: a decoupled drafter could not keep up. V' and β are those of the largest
    measured window, so that a cost that grows with w does not end the search early.

    Args:
        draft: (D', α).
        verify: (V', β).
    """
    widest = 1
    for cost, per_token in zip(verify, draft, strict=True):
        if per_token > 0.0 and cost / per_token < MAX_WINDOW:
            widest = max(widest, math.ceil(cost / per_token))
        elif cost > 0.0:
            widest = MAX_WINDOW
    return widest


def _not_covered(table: CostTable, devices: int, batch: int) -> str:
    if devices not in table.devices:
        return f"{devices} device(s) were not measured, only {', '.join(map(str, table.devices))}"
    batches = table.batches(devices)
    if len(batches) == 1 and batch != batches[0]:
        return f"batch {batch} was not measured, only {batches[0]}"
    return ""


def _slower(candidate: Candidate, chosen: Candidate) -> str:
    window = f" at its best window, {candidate.window}" if candidate.window else ""
    return f"{candidate.tokens_per_s:.1f} tokens/s{window}; chosen: {chosen.tokens_per_s:.1f}"


def _range(values: Sequence[int]) -> str:
    return f"{values[0]} to {values[-1]}" if len(values) > 1 else str(values[0])
