"""Search of the fastest layout, draft method, mode and window: Algorithm 1 of SpecActor (arXiv 2511.16193, section 4).

D and V are those of `costs.py`. With `S_i` the chance that the first `i` draft tokens are all right (`p^i` in the
paper), a window of `w` tokens, `D` seconds per drafted token and `V(w)` seconds to verify `w + 1` positions of each
request, one iteration commits τ tokens of a request in IL seconds, and TGS = τ / IL:

    plain      IL = V(0)                                        τ = 1
    coupled    IL = w·D + V(w)                                  τ = Σ_{i=0}^{w} S_i
    decoupled  IL = max((1-π)·V(0) + π·V(w), (w+1)·D)           τ = 1 + π Σ_{i=1}^{w} S_i,   π = 1 / (2 - S_{w+1})

The coupled equation is the paper's. A decoupled step here does not wait (`run_ahead`; the paper's does): after a
refuted tail comes one step without a tail, so π is the share of steps with one, and one forward more than the tail has
tokens was under way for the refuted tail. The ladder ranks methods by these; the plan predicts decoupled drafting by
`run_ahead` itself.

G devices hold n_v verifiers of g_v devices and, if decoupled, n_d drafters of g_d devices, n_v at most. Each verifier
runs B / n_v of the B requests (b: rounded up), each drafter drafts for B / n_d. In the paper n_d = n_v, and where
g_v + g_d divides G this is its b. All B requests run, so layouts are compared by B · TGS, the tokens per second of the
whole cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from specactor_ray.config.accelerators import allows_kind
from specactor_ray.config.methods import DrafterSpec
from specactor_ray.config.schema import ModeName
from specactor_ray.core.errors import InputError
from specactor_ray.plan.costs import Costs, DraftCosts, StepTimes, kind_in_words

ALL_MODES = (ModeName.plain, ModeName.coupled, ModeName.decoupled)
_VERIFIED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Tried values of the most draft tokens of a row in a decoupled step."""
_BRANCHES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Tried numbers of branches of a row in a draft forward."""
_NEARLY = 0.99
"""Ratio of speeds above which two layouts count as equal; the one with the fewest drafters is taken then."""
_ROUNDS = 3
"""Rounds of the fixed point: the duration of a step depends on its positions, and these on the tokens drafted in it."""
TINY_S = 1e-9
RIGHT_BEHIND_WRONG = (0.4, 0.18, 0.12, 0.1)
"""Chance that the second, third, ... candidate of a draw is right where those before it are wrong: SmolLM2 as a drafter
that samples with the target's noise has 0.36-0.48, 0.13-0.23, 0.10-0.16 and 0.06-0.15."""
_RARELY = 1e-6
"""Chance of a new request in a step, so that rows begin without a tail also if no tail ever ends without one."""
_BEHIND_WRONG = np.array(RIGHT_BEHIND_WRONG)
_RIGHT = _BEHIND_WRONG * np.cumprod(np.append(1.0, 1.0 - _BEHIND_WRONG[:-1]))
"""`(4,)`: chance that the second, third, ... candidate is right where the first is wrong."""


@dataclass(frozen=True, slots=True)
class Method:
    """Measurements of a draft method."""

    costs: Mapping[int, StepTimes]
    """Device count → D, on the verifiers' kind of devices."""
    survival: np.ndarray
    """`(window + 1,)` S_0 = 1, S_1, ...: chance that the first i tokens of a tail are right."""
    free: bool = False
    """Whether it uses none of the planned devices (an n-gram drafter on the CPUs of a GPU machine)."""
    supply: float = 1.0
    """Share of requests that have a tail in a step; the others decode plainly in it."""
    branches: int = 0
    """Most branches of a request. A forward over them costs the rows of all."""
    own: Mapping[int, StepTimes] | None = None
    """D on the devices of draft actors; None: as `costs`."""
    kind: str = ""
    """Kind of these devices; empty if it is not known."""
    devices: int | None = None
    """Number of these devices beside those of verifiers; None: draft actors share the verifiers'."""

    def draft_costs(self, mode: ModeName) -> Mapping[int, StepTimes]:
        """Device count → D, where the method drafts in this mode."""
        return self.costs if mode is ModeName.coupled or self.own is None else self.own


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout at its best window, with its prediction."""

    mode: ModeName
    method: str | None
    """None in plain mode."""
    draft_devices: int
    """g_d, and number of drafters n_d: 0 where drafters have no devices of their own."""
    verify_devices: int
    """g_v, and number of verifiers n_v."""
    drafters: int
    verifiers: int
    batch: int
    """b: requests that each verifier runs at once, at most."""
    window: int
    """Draft tokens; 0 in plain mode."""
    tokens_per_s: float
    """Tokens per second of the whole cluster."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of `search_plan`."""

    devices: int
    """G, without drafters' devices of another kind."""
    batch: int
    """B: requests of the whole cluster."""
    predictions: tuple[Candidate, ...]
    """Every layout that can be predicted, fastest first."""
    rejected: tuple[str, ...]
    """Layouts that cannot be predicted, each with the reason."""
    notes: tuple[str, ...]
    """Where the prediction of the choice leaves the measured range."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """`target` or draft method → kind of GPUs that it was measured on, and is planned for."""

    @property
    def chosen(self) -> Candidate:
        return self.predictions[0]

    def lines(self) -> list[str]:
        """The notes, and the choice."""
        return [*self.notes, f"plan: {self.words()}"]

    def words(self) -> str:
        """The choice in one line, with the speed of the best of every mode."""
        chosen, best = self.chosen, dict[str, float]()
        for candidate in self.predictions:
            best.setdefault(candidate.mode.value, candidate.tokens_per_s)
        layout = _words(
            chosen.mode, chosen.method, chosen.verifiers, chosen.verify_devices, chosen.drafters, chosen.draft_devices
        )
        speeds = ", ".join(f"{mode} {speed:.1f}" for mode, speed in best.items())
        return f"{layout}, window {chosen.window}, batch {chosen.batch}; predicted tokens/s: {speeds}"


def usable_methods(
    costs: Costs, specs: Mapping[str, DrafterSpec], on_gpus: bool
) -> tuple[dict[str, Method], list[str]]:
    """Configured methods that were measured, and the others with the reason. `on_gpus`: devices are GPUs."""
    usable: dict[str, Method] = {}
    unusable: list[str] = []
    for method, spec in specs.items():
        found, is_lookup = costs.drafters.get(method), spec.traits.looks_up
        kind, elsewhere = _draft_kind(found, costs.kind, spec.accelerator) if found is not None else ("", "")
        if found is None or method not in costs.acceptance:
            reason = "that run did not try it"
        elif found.model != spec.model:
            reason = f"that run tried it with model {found.model}"
        elif not (found.kinds or is_lookup):
            reason = "that run has no time of its drafts"
        elif elsewhere and not is_lookup and costs.kind not in found.kinds:
            reason = elsewhere
        else:
            seconds, own = found.kinds.get(costs.kind, {}), {} if elsewhere else found.kinds.get(kind, {})
            if is_lookup:
                seconds = own = dict.fromkeys((1, *costs.verify), StepTimes())
            survival = geometric(np.array([costs.acceptance[method]]), spec.window)[0]
            supply = costs.supply if is_lookup else 1.0  # a model has a guess at any time
            usable[method] = Method(seconds, survival, is_lookup and on_gpus, supply, spec.branches, own, kind)
            continue
        unusable.append(f"{method} is left out: {reason}")
    return usable, unusable


def _draft_kind(found: DraftCosts, target: str, accelerator: str | None) -> tuple[str, str]:
    """Kind of devices on which draft actors were measured and may run, the target's if that is one; else the reason
    why there is none."""
    fitting = [kind for kind in found.kinds if allows_kind(accelerator, kind)]
    if target in fitting or len(fitting) == 1:
        return target if target in fitting else fitting[0], ""
    measured = ", ".join(map(kind_in_words, found.kinds))
    return "", f"that run tried it on {measured}, and its accelerator is {accelerator or 'not set'}"


def search_plan(
    verify: Mapping[int, StepTimes],
    methods: Mapping[str, Method],
    *,
    devices: int,
    requests: int,
    modes: Sequence[ModeName] = ALL_MODES,
) -> Plan:
    """Algorithm 1: predict every layout with every number of drafters and window, and take the one with the most tokens
    per second.

    Among equals, plain comes before coupled before decoupled, then the smaller verifier, drafter and window. With all
    modes the result is never below plain decoding.

    Args:
        verify: Device count → V; these counts are the verifier configurations.
        devices, requests: G and B.

    Raises:
        InputError: No measured layout fits G devices.
    """
    predictions: list[Candidate] = []
    rejected: list[str] = []
    for mode, name, g_d, g_v in _layouts(verify, methods, modes):
        method, costs, layout = methods.get(name or ""), verify[g_v], _words(mode, name, 1, g_v, min(g_d, 1), g_d)
        own, found = method.devices if method is not None and g_d else None, list[Candidate]()
        if g_v + g_d * (own is None) > devices:
            rejected.append(f"{layout}: needs {g_v + g_d * (own is None)} devices, and there are {devices}")
            continue
        if own is not None and g_d > own:
            rejected.append(f"{layout}: needs {g_d} devices for its drafters, and there are {own}")
            continue
        for n_v, n_d in _counts(devices, requests, g_v, g_d, own):
            window, tgs = _best_step(mode, costs, method, g_d or g_v, requests / n_v, requests / (n_d or n_v))
            found.append(Candidate(mode, name, g_d, g_v, n_d, n_v, -(-requests // n_v), window, requests * tgs))
        least = _NEARLY * max((candidate.tokens_per_s for candidate in found), default=0.0)
        predictions += [candidate for candidate in found if candidate.tokens_per_s >= least][:1]
    if not predictions:
        wanted = " or ".join(mode.value for mode in modes)
        raise InputError(f"no plan: {wanted} as measured does not fit {devices} device(s), or was not measured")
    predictions.sort(key=lambda candidate: -candidate.tokens_per_s)  # equals stay in their order
    notes = tuple(_notes(predictions[0], verify[predictions[0].verify_devices]))
    return Plan(devices, requests, tuple(predictions), tuple(rejected), notes)


def _layouts(
    verify: Mapping[int, StepTimes], methods: Mapping[str, Method], modes: Sequence[ModeName]
) -> Iterator[tuple[ModeName, str | None, int, int]]:
    """Mode, method, g_d (g_v at most) and g_v of all measured layouts, in the order in which equals are chosen."""
    for mode in (mode for mode in ALL_MODES if mode in modes):
        for g_v in verify:
            if mode is ModeName.plain:
                yield mode, None, 0, g_v
                continue
            for name, method in methods.items():
                none = mode is ModeName.coupled or method.free
                for g_d in (0,) if none else range(1, g_v + 1):
                    if (g_d or g_v) in method.draft_costs(mode):
                        yield mode, name, g_d, g_v


def _counts(devices: int, requests: int, g_v: int, g_d: int, own: int | None) -> Iterator[tuple[int, int]]:
    """n_v and n_d that fill the devices, the fewest drafters first; every verifier has requests. `own`: devices of
    drafters alone."""
    if not g_d or own is not None:
        n_v = min(devices // g_v, requests)
        yield from ((n_v, n_d) for n_d in range(1, min(n_v, (own or 0) // g_d) + 1)) if g_d else [(n_v, 0)]
        return
    for n_v in range((devices - g_d) // g_v, devices // (g_v + g_d) - 1, -1):
        n_v = min(n_v, requests)
        yield n_v, min(n_v, (devices - n_v * g_v) // g_d)


def _best_step(
    mode: ModeName, costs: StepTimes, method: Method | None, devices: int, batch: float, rows: float
) -> tuple[int, float]:
    """The best window, and its TGS. `devices`: of a drafter; `batch`, `rows`: requests of a verifier, a drafter."""
    if method is None:
        return 0, 1.0 / costs.seconds(batch)
    drafting, windows = method.draft_costs(mode)[devices], range(len(method.survival))
    if mode is ModeName.coupled:
        verify = np.array([costs.seconds(batch * (1.0 + method.supply * window)) for window in windows])
        survival = method.survival * np.append(1.0, np.full(windows[-1], method.supply))
        rates = coupled_rates(survival[None], drafting.seconds(rows), verify)[0]
        return int(rates.argmax()) + 1, float(rates.max())
    return windows[-1], best_ahead(costs, drafting, method, batch, rows)


def best_ahead(costs: StepTimes, drafting: StepTimes, method: Method, batch: float, rows: float) -> float:
    """TGS of a decoupled step with the best numbers of branches and verified tokens. `costs` and `drafting` are V and
    D; `batch` and `rows` requests of a verifier and of a drafter."""
    window, best = len(method.survival) - 1, 0.0
    for branches in (count for count in _BRANCHES if count <= method.branches):
        draft_s, rate = drafting.seconds(rows * (1.0 + branches)), 0.0
        for most in (*(count for count in _VERIFIED if count < window), window):
            verified = most / 2.0
            for _ in range(_ROUNDS):
                verify_s = costs.seconds(batch * (1.0 + method.supply * verified))
                forwards = min(verify_s / max(draft_s, TINY_S), window)
                tau, verified = run_ahead(method.survival, forwards, most, branches * forwards)
            tgs = (1.0 + method.supply * (tau - 1.0)) / verify_s
            if tgs <= rate:
                break
            rate = tgs
        best = max(best, rate)
    return best


def _notes(chosen: Candidate, verify: StepTimes) -> Iterator[str]:
    fewest, most = verify.range
    largest = chosen.batch * (chosen.window + 1 if chosen.mode is ModeName.coupled else 1)
    if not fewest <= largest <= most:
        measured = f"steps were measured over {fewest:g} to {most:g} positions"
        yield f"{measured}, and those of the plan have up to {largest}: their cost is extrapolated"


def _words(mode: ModeName, method: str | None, n_v: int, g_v: int, n_d: int, g_d: int) -> str:
    """`decoupled draft_model, 3 x 4 + 2 x 1`: verifiers x devices of each + drafters x devices of each."""
    own = f" + {n_d} x {g_d}" if n_d else ""
    return f"{mode.value}{f' {method}' if method else ''}, {n_v} x {g_v}{own}"


# ---- equations ----


def geometric(probability: np.ndarray, window: int) -> np.ndarray:
    """`(n, window + 1)`: S_0, S_1, ... of drafts with tokens that are all right with the same probability, `(n,)`."""
    powers: np.ndarray = np.clip(probability, 0.0, 1.0)[:, None] ** np.arange(window + 1)
    return powers


def coupled_rates(survival: np.ndarray, draft_s: float, verify_s: np.ndarray) -> np.ndarray:
    """`(n, w)` TGS of coupled iterations at windows 1, 2, ..., w. `survival`: `(n, w + 1)` S_i; `draft_s`, `verify_s`:
    D, and `(w + 1,)` V(0), V(1), ..."""
    seconds = np.arange(1, len(verify_s)) * draft_s + verify_s[1:]
    rates: np.ndarray = survival.cumsum(axis=1)[:, 1:] / np.maximum(seconds, TINY_S)
    return rates


def decoupled_rates(survival: np.ndarray, draft_s: float, verify_s: np.ndarray) -> np.ndarray:
    """The same for decoupled iterations, with one S_i more, `(n, w + 2)`."""
    share, forwards = 1.0 / (2.0 - survival[:, 2:]), np.arange(2, len(verify_s) + 1)
    tau = 1.0 + share * (survival.cumsum(axis=1)[:, 1:-1] - 1.0)
    seconds = np.maximum(verify_s[0] + share * (verify_s[1:] - verify_s[0]), forwards * draft_s)
    rates: np.ndarray = tau / np.maximum(seconds, TINY_S)
    return rates


def run_ahead(survival: np.ndarray, forwards: float, most: int, spare: float) -> tuple[float, float]:
    """τ of a decoupled step of a verifier that does not wait, and the draft tokens that it verifies, both per row.

    The state of a row is the length of its tail, `window` tokens at most. A step verifies up to `most` of them; the
    drafter lengthens the tail by `forwards` tokens meanwhile, and drafts the `spare` most likely needed tokens of
    branches. A tail that was right so far continues after the committed tokens; if it was refuted, a branch that begins
    with the right candidate takes its place, and without such a branch the next step of the row is plain. The results
    are means over the stationary distribution of the states.
    """
    window = len(survival) - 1
    missed, branches = survival[:-1] - survival[1:], _branch_lengths(survival, forwards, spare)
    states = np.arange(window + 1)
    grown = np.maximum(forwards - (states == 0), 0.0)  # the forward under way drafts for the refuted chain
    verified, tails = np.minimum(states, most), np.minimum(states + grown, window)
    # By state and number of right tokens before the first wrong one: the chance, and the rest of the tail.
    right = states[:window]
    reached = (right <= verified[:, None]) & (right < tails[:, None])
    missing, left = np.where(reached, missed, 0.0), np.clip(tails[:, None] - right - 1.0, 0.0, None)
    rescued = np.minimum(branches[None], left[..., None])  # (states, right tokens, candidates)
    found = missing[..., None] * _RIGHT * (rescued > 0.0)
    moves = np.zeros((window + 1, window + 2))
    _spread(moves, np.broadcast_to(states[:, None, None], found.shape), rescued, found)
    unrefuted = survival[np.minimum(verified + 1, window)] * (tails >= verified + 1)
    _spread(moves, states, np.clip(tails - verified - 1.0, 0.0, None), unrefuted)
    moves = moves[:, :-1] * (1.0 - _RARELY)
    moves[:, 0] += 1.0 - moves.sum(axis=1)  # the rest has no tail
    equations = moves.T - np.eye(window + 1)
    equations[-1] = 1.0
    shares = np.linalg.solve(equations, np.append(np.zeros(window), 1.0))
    accepted = np.append(0.0, np.cumsum(survival[1:]))[verified]
    return 1.0 + float(shares @ accepted), float(shares @ verified)


def _branch_lengths(survival: np.ndarray, forwards: float, spare: float) -> np.ndarray:
    """`(window, 4)`: tokens of the branch that begins with each candidate at each position of a main chain, without
    that candidate, which the verifier commits itself."""
    window = len(survival) - 1
    depth = int(min(max(forwards, 1.0), window))
    onward = survival[1] ** np.arange(depth)
    needed = ((survival[:-1] - survival[1:])[:, None] * _RIGHT)[..., None] * onward
    beyond = np.arange(window)[:, None] + np.arange(depth) >= window
    needed = np.where(beyond[:, None, :], 0.0, needed)
    drafted = np.zeros(needed.size, np.bool_)
    drafted[np.argsort(-needed, axis=None, kind="stable")[: int(spare)]] = True
    drafted &= needed.ravel() > 0.0
    lengths: np.ndarray = np.maximum(drafted.reshape(needed.shape).sum(axis=2) - 1.0, 0.0)
    return lengths


def _spread(moves: np.ndarray, states: np.ndarray, lengths: np.ndarray, chances: np.ndarray) -> None:
    """Add transitions from states to lengths of tails; a length between two whole ones is divided between them."""
    whole = lengths.astype(np.int64)
    part = lengths - whole
    np.add.at(moves, (states, whole), chances * (1.0 - part))
    np.add.at(moves, (states, whole + 1), chances * part)
