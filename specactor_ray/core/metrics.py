"""Metrics of a run: names, units and help texts, and their values from existing counters.

Actors and the driver export them through Ray (`cluster/metrics.py`);
`RequestQueue.metric_rows` has those of the driver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One value of a metric in `METRICS`."""

    name: str
    labels: Mapping[str, str]
    value: float

    @property
    def is_counter(self) -> bool:
        """Whether the value is a total; else a gauge."""
        return self.name.endswith("_total")


class Metric(NamedTuple):
    """Definition of a metric."""

    help: str
    labels: tuple[str, ...] = ()


_ACTOR, _METHOD = ("actor",), ("actor", "method")
METRICS: Mapping[str, Metric] = {
    # verifiers
    "specactor_running_requests": Metric("Requests that run or wait at a verifier.", _ACTOR),
    "specactor_steps_total": Metric("Steps of a verifier.", _ACTOR),
    "specactor_suspended_steps_total": Metric("Steps without drafts, because drafts did not pay.", _ACTOR),
    "specactor_step_seconds_total": Metric(
        "Seconds of steps, by part: forward, sampling, waiting (for drafts), protocol.", ("actor", "part")
    ),
    "specactor_plain_seconds": Metric(
        "Estimated seconds of plain decoding for the tokens so far; beyond step_seconds, what drafts saved.", _ACTOR
    ),
    "specactor_row_steps_total": Metric("Requests in a step, summed over steps.", _ACTOR),
    "specactor_committed_tokens_total": Metric(
        "Committed tokens; divided by row_steps, the acceptance length: tokens of a request in a step, those that no "
        "output keeps included.",
        _ACTOR,
    ),
    "specactor_supplied_tokens_total": Metric(
        "Usable draft tokens, summed over requests and steps; divided by row_steps, the supply.", _ACTOR
    ),
    "specactor_supplied_row_steps_total": Metric(
        "Requests with a usable draft tail, summed over steps; divided by row_steps, the share of requests with a "
        "draft.",
        _ACTOR,
    ),
    "specactor_drafted_tokens_total": Metric("Draft tokens that were verified.", _ACTOR),
    "specactor_accepted_tokens_total": Metric("Draft tokens that were verified and right.", _ACTOR),
    # drafters: draft actors, and those that verifiers host
    "specactor_drafter_tried_tokens_total": Metric("Draft tokens of a drafter that commits judged.", _METHOD),
    "specactor_drafter_right_tokens_total": Metric(
        "Those that were right; divided by tried_tokens, the acceptance of a draft method.", _METHOD
    ),
    "specactor_drafter_alarm": Metric("1 while none of a drafter's last 200 draft tokens or more was right.", _METHOD),
    "specactor_drafter_weight_version": Metric("Version of a drafter's weights.", _METHOD),
    "specactor_drafter_open_requests": Metric("Requests that a drafter drafts for.", _METHOD),
    "specactor_drafter_token_seconds": Metric(
        "Seconds to draft one token for all open requests of a drafter.", _METHOD
    ),
    # all actors
    "specactor_step_age_seconds": Metric("Seconds since the step under way began; 0 between two steps.", _ACTOR),
    # the controller
    "specactor_actors": Metric(
        "Actors by kind, draft method and phase: pending, starting, ready, dead.", ("kind", "method", "phase")
    ),
    "specactor_drafters_wanted": Metric("Draft actors that the controller works towards.", ("method",)),
    # the driver
    "specactor_requests_in_flight": Metric("Requests that a verifier has."),
    "specactor_requests_waiting": Metric("Requests that no verifier has."),
    "specactor_requests_reissued_total": Metric("Requests issued again, as their verifier was gone or had none of it."),
    "specactor_journaled_tokens_total": Metric("Output tokens that the driver has."),
    "specactor_discarded_tokens_total": Metric(
        "Tokens reported to the driver that no output has: behind a stop text or an abort, or computed twice."
    ),
    "specactor_weight_version": Metric(
        "Version of the policy's weights: those a verifier has, those the driver's new requests run with.", _ACTOR
    ),
    "specactor_weight_syncs_total": Metric("Updates of the policy's weights."),
    "specactor_weight_sync_seconds_total": Metric("Seconds of these updates, the wait for running requests included."),
}
"""Every metric of this package."""
DRIVER = "driver"
"""Value of `actor` for the driver."""


def row(name: str, value: float, **labels: str) -> Row:
    """A value of a metric in `METRICS`."""
    return Row(name, labels, float(value))


def verifier_rows(actor_id: str, counters: Mapping[str, Any]) -> Iterator[Row]:
    """Metrics of a verifier and of its hosted drafters; `counters` is `VerifyLoop.snapshot`."""
    actor = _seat(actor_id)
    tokens = ("committed_tokens", "drafted_tokens", "accepted_tokens")
    for name in ("steps", "suspended_steps", "row_steps", "supplied_tokens", "supplied_row_steps", *tokens):
        yield row(f"specactor_{name}_total", counters[name], actor=actor)
    for part in ("forward", "sampling", "waiting", "protocol"):
        yield row("specactor_step_seconds_total", counters[f"{part}_s"], actor=actor, part=part)
    yield row("specactor_plain_seconds", counters["plain_s"], actor=actor)
    yield row("specactor_running_requests", counters["running"], actor=actor)
    yield row("specactor_weight_version", counters["weight_version"], actor=actor)
    yield row("specactor_step_age_seconds", counters["busy_s"], actor=actor)
    for hosted in counters["hosted"].values():
        yield from _drafting_rows(actor, hosted)


def drafter_rows(actor_id: str, counters: Mapping[str, Any]) -> Iterator[Row]:
    """Metrics of a draft actor; `counters` is `DraftLoop.snapshot`."""
    yield row("specactor_step_age_seconds", counters["busy_s"], actor=_seat(actor_id))
    yield from _drafting_rows(_seat(actor_id), counters)


def _drafting_rows(actor: str, counters: Mapping[str, Any]) -> Iterator[Row]:
    health = counters["health"]
    labels = {"actor": actor, "method": health["method"]}
    yield row("specactor_drafter_tried_tokens_total", health["tried"], **labels)
    yield row("specactor_drafter_right_tokens_total", health["right"], **labels)
    yield row("specactor_drafter_alarm", health["alarm"], **labels)
    yield row("specactor_drafter_weight_version", health["version"], **labels)
    yield row("specactor_drafter_open_requests", counters["open_requests"], **labels)
    yield row("specactor_drafter_token_seconds", counters["token_s"], **labels)


def controller_rows(
    status: Iterable[Mapping[str, Any]], wanted: Mapping[str, int], phases: Iterable[str]
) -> Iterator[Row]:
    """Metrics of the controller, of every phase also without an actor. `status`: a row per actor; `wanted`: method →
    number of draft actors."""
    counts = Counter((one["kind"], one["method"], one["phase"]) for one in status)
    for kind, method in (("verifier", ""), *(("drafter", method) for method in wanted)):
        for phase in phases:
            yield row("specactor_actors", counts[kind, method, phase], kind=kind, method=method, phase=str(phase))
    for method, number in wanted.items():
        yield row("specactor_drafters_wanted", number, method=method)


def _seat(actor_id: str) -> str:
    """`verifier-0` for `verifier-0#3f2a`: a replacement continues the series of its seat."""
    return actor_id.partition("#")[0]


def drafter_health(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Id, `Health.to_dict`, `failures` and `malformed` messages of each drafter in rows of the status, including those
    inside verifiers."""
    counters = [(row.get("id"), row.get("counters") or {}) for row in rows]
    malformed = Counter[str]()
    for _, mine in counters:
        malformed.update(mine.get("malformed", {}))
    drafters = ({actor_id: mine, **mine.get("hosted", {})} for actor_id, mine in counters)
    return [
        {"id": name, **one["health"], "failures": one.get("failures", 0), "malformed": malformed[name]}
        for group in drafters
        for name, one in group.items()
        if "health" in one
    ]
