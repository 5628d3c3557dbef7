"""What a plan chooses from, and what it says: candidates with their predictions, and what was rejected and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from specactor_ray.config.schema import ModeName


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run, with its prediction."""

    mode: ModeName
    method: str | None
    """None in plain mode."""
    draft_devices: int
    """g_d: devices of the drafter's own in each group; 0 unless decoupled."""
    verify_devices: int
    """g_v: devices of each verifier."""
    window: int
    """Draft tokens; 0 in plain mode."""
    groups: int
    batch: int
    """b: requests of each group."""
    probability: float
    """p at this window; 0 in plain mode."""
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

    @property
    def layout(self) -> tuple[ModeName, str | None, int, int]:
        """All but the window."""
        return self.mode, self.method, self.draft_devices, self.verify_devices

    def words(self) -> str:
        """`decoupled ngram, 2 x (1 + 1), window 4`: groups x (verifier's devices + drafter's)."""
        own = f" + {self.draft_devices}" if self.draft_devices else ""
        size = f"{self.groups} x ({self.verify_devices}{own})"
        return (
            f"plain, {size}"
            if self.method is None
            else f"{self.mode.value} {self.method}, {size}, window {self.window}"
        )


@dataclass(frozen=True, slots=True)
class Rejected:
    """Something that was not chosen."""

    mode: ModeName
    method: str | None
    draft_devices: int
    verify_devices: int
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
    notes: tuple[str, ...] = field(default=())
    """Where the prediction leaves what was measured."""

    def best_by_layout(self) -> list[Candidate]:
        """The best window of every (mode, method, g_d, g_v), fastest first."""
        best: dict[Any, Candidate] = {}
        for candidate in self.candidates:
            known = best.get(candidate.layout)
            if known is None or candidate.tokens_per_s > known.tokens_per_s:
                best[candidate.layout] = candidate
        return sorted(best.values(), key=lambda candidate: -candidate.tokens_per_s)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: counts, choice, predictions (the best window of every layout), candidates, rejected, notes."""
        return {
            "devices": self.devices,
            "batch": self.requests,
            "context": self.context,
            "chosen": _as_json(self.chosen),
            "predictions": [_as_json(candidate) for candidate in self.best_by_layout()],
            "candidates": [_as_json(candidate) for candidate in self.candidates],
            "rejected": [_as_json(rejected) for rejected in self.rejected],
            "notes": list(self.notes),
        }


def _as_json(thing: Candidate | Rejected) -> dict[str, Any]:
    return {**asdict(thing), "mode": thing.mode.value}
