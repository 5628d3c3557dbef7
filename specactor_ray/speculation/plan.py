"""Which layout, draft method, mode and window are fastest: Algorithm 1 of SpecActor (arXiv 2511.16193, section 4).

What one request gains, TGS = τ / IL, is in `spec/tgs.py`; D and V are those of `costs.py`.

A *group* is a verifier on g_v devices and, if decoupled, its drafter on g_d devices of its own. G devices hold
floor(G / (g_d + g_v)) groups (fewer are made where B requests do not fill them), and a group runs
b = ceil((g_d + g_v)·B / G) of the B requests. Candidates of different layouts are compared by the tokens per second
of the whole cluster,

    tokens/s = min(B, groups · b) · TGS(b),

since devices that are left over, and requests that wait, do not show in the TGS of one request. Where group sizes
divide G, every layout runs all B requests, so this order is that of TGS, the one of the paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specactor_ray.config.schema import ModeName
from specactor_ray.errors import InputError
from specactor_ray.spec.tgs import iterations, share_right
from specactor_ray.speculation.costs import GridCost

ALL_MODES = (ModeName.plain, ModeName.coupled, ModeName.decoupled)


@dataclass(frozen=True, slots=True)
class Method:
    """What was measured of a draft method."""

    costs: Mapping[int, GridCost]
    """Device count → D."""
    survival: np.ndarray
    """`(depth + 1,)` S_0 = 1, S_1, ...: the share of steps at which the first i draft tokens were there and right."""
    free: bool = False
    """It runs on none of the planned devices (an n-gram drafter on the CPUs of a GPU machine)."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout at its best window, with its prediction."""

    mode: ModeName
    method: str | None
    """None in plain mode."""
    draft_devices: int
    """g_d: devices of the drafter's own in each group; 0 unless decoupled."""
    verify_devices: int
    """g_v: devices of each verifier."""
    groups: int
    batch: int
    """b: requests of each group."""
    window: int
    """Draft tokens; 0 in plain mode."""
    probability: float
    """p within this window; 0 in plain mode."""
    draft_s: float
    """D: seconds to draft a token for the whole batch."""
    verify_s: float
    """V: seconds of a verify step."""
    tokens_per_iteration: float
    """τ."""
    tgs: float
    """Tokens per second of one request."""
    tokens_per_s: float
    """Tokens per second of the whole cluster."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What `search_plan` found."""

    devices: int
    """G."""
    batch: int
    """B: requests that run at once in the whole cluster."""
    context: float
    """Tokens of prompt and output that a request has on average."""
    predictions: tuple[Candidate, ...]
    """Every layout that can be predicted, fastest first."""
    rejected: tuple[str, ...]
    """What cannot be predicted, and why."""
    notes: tuple[str, ...]
    """Where the prediction of the choice leaves what was measured."""

    @property
    def chosen(self) -> Candidate:
        return self.predictions[0]

    def words(self) -> str:
        """The choice in one line, with the speed of the best of every mode."""
        chosen, best = self.chosen, dict[str, float]()
        for candidate in self.predictions:
            best.setdefault(candidate.mode.value, candidate.tokens_per_s)
        layout = _words(chosen.mode, chosen.method, chosen.groups, chosen.verify_devices, chosen.draft_devices)
        speeds = ", ".join(f"{mode} {speed:.1f}" for mode, speed in best.items())
        return f"{layout}, window {chosen.window}, batch {chosen.batch}; predicted tokens/s: {speeds}"


def search_plan(
    verify: Mapping[int, GridCost],
    methods: Mapping[str, Method],
    *,
    devices: int,
    requests: int,
    context: float,
    modes: Sequence[ModeName] = ALL_MODES,
) -> Plan:
    """Algorithm 1: predict every layout at every measured window, and take what gives the most tokens per second.

    Of equals, plain before coupled before decoupled, then the smaller verifier, drafter and window. With all modes
    the result is never below plain decoding, and it does not fall when an acceptance rises.

    Args:
        verify: Device count → V; these counts are the verifier configurations.
        methods: Draft methods by name.
        devices: G.
        requests: B.
        context: Tokens of prompt and output that a request has on average.
        modes: Modes that may be chosen.

    Raises:
        InputError: Nothing that was measured fits G devices.
    """
    predictions: list[Candidate] = []
    rejected: list[str] = []
    for mode, name, g_d, g_v in _layouts(verify, methods, modes):
        size, costs = g_d + g_v, verify[g_v]
        batches, positions, _ = costs.knots
        batch = -(-size * requests // devices)
        layout = _words(mode, name, 1, g_v, g_d)
        if size > devices:
            rejected.append(f"{layout}: needs {size} devices, and there are {devices}")
            continue
        if len(batches) == 1 and batch != batches[0]:
            rejected.append(f"{layout}: batch {batch} was not measured, only {batches[0]:g}")
            continue
        survival, draft_s = np.ones(1), 0.0
        if name is not None:
            method = methods[name]
            survival = method.survival[: int(positions[-1])]
            draft_s = method.costs[g_d or g_v].step(batch, context)  # coupled: it drafts on the verifier's devices
        verify_s = np.array([costs.step(batch, context, window) for window in range(len(survival))])
        window, tau, iteration_s = _best_window(mode, survival, draft_s, verify_s)
        groups = min(devices // size, -(-requests // batch))  # no group that would have nothing to do
        predictions.append(
            Candidate(
                mode=mode,
                method=name,
                draft_devices=g_d,
                verify_devices=g_v,
                groups=groups,
                batch=batch,
                window=window,
                probability=share_right(survival[: window + 1]) if window else 0.0,
                draft_s=draft_s,
                verify_s=float(verify_s[window]),
                tokens_per_iteration=tau,
                tgs=tau / iteration_s,
                tokens_per_s=min(requests, groups * batch) * tau / iteration_s,
            )
        )
    if not predictions:
        wanted = " or ".join(mode.value for mode in modes)
        raise InputError(f"no plan: {wanted} as profiled does not fit {devices} device(s), or was not measured")
    predictions.sort(key=lambda candidate: -candidate.tokens_per_s)  # equals stay in their order
    notes = tuple(_notes(predictions[0], verify[predictions[0].verify_devices], context))
    return Plan(devices, requests, context, tuple(predictions), tuple(rejected), notes)


def _layouts(
    verify: Mapping[int, GridCost], methods: Mapping[str, Method], modes: Sequence[ModeName]
) -> Iterator[tuple[ModeName, str | None, int, int]]:
    """Mode, method, g_d (g_v at most) and g_v of all that was measured, in the order in which equals are chosen."""
    for mode in (mode for mode in ALL_MODES if mode in modes):
        for g_v in verify:
            if mode is ModeName.plain:
                yield mode, None, 0, g_v
                continue
            for name, method in methods.items():
                none = mode is ModeName.coupled or method.free
                for g_d in (0,) if none else range(1, g_v + 1):
                    if (g_d or g_v) in method.costs:
                        yield mode, name, g_d, g_v


def _best_window(
    mode: ModeName, survival: np.ndarray, draft_s: float, verify_s: np.ndarray
) -> tuple[int, float, float]:
    """The window w of the best TGS, with its τ and IL; `survival` and `verify_s` are S_w and V(w) for w = 0, 1, ..."""
    if mode is ModeName.plain:
        return 0, 1.0, float(verify_s[0])
    coupled, decoupled = iterations(survival[None], draft_s, verify_s)
    tau, iteration_s = coupled if mode is ModeName.coupled else decoupled
    best = int(np.argmax(tau / iteration_s))
    return best + 1, float(tau[0, best]), float(iteration_s[best])


def _notes(chosen: Candidate, verify: GridCost, context: float) -> Iterator[str]:
    batches, positions, contexts = verify.knots
    for what, value, knots in (("context", context, contexts), ("batch", chosen.batch, batches)):
        if not knots[0] <= value <= knots[-1]:
            yield f"{what} {value:g} is outside the measured {knots[0]:g} to {knots[-1]:g}; costs are extrapolated"
    if chosen.window and chosen.window + 1 == positions[-1]:
        yield f"window {chosen.window} is the largest that was measured; profile larger --windows too"


def _words(mode: ModeName, method: str | None, groups: int, verify_devices: int, draft_devices: int) -> str:
    """`decoupled ngram, 2 x (1 + 1)`: groups x (verifier's devices + drafter's)."""
    own = f" + {draft_devices}" if draft_devices else ""
    return f"{mode.value}{f' {method}' if method else ''}, {groups} x ({verify_devices}{own})"
