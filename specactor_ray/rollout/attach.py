"""Inspecting and changing a rollout of another process: the parts behind `specactor status` and `specactor scale`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specactor_ray.actors.specs import ClusterView, Phase
from specactor_ray.core.clock import SYSTEM
from specactor_ray.core.errors import CallError, ClusterError, NoRunError, SpecActorError

if TYPE_CHECKING:
    from specactor_ray.cluster.calls import Calls


def scale_run(run: str | None, drafters: Mapping[str, int | None], address: str) -> tuple[str, list[dict[str, Any]]]:
    """Set the number of draft actors of each method of a run.

    Args:
        run: Name of the run; None selects the only run of the cluster.
        drafters: Method → number of draft actors; None selects the number automatically, by what pays.
        address: `host:port` of the cluster; `auto`: RAY_ADDRESS, else the only cluster on this machine with such a run.

    Returns:
        Name of the run, and one row per actor, as the controller has them once it has begun to act on the request.

    Raises:
        ClusterError: There is no such cluster.
        InputError: There is no such run.
        ConfigError: The run has no such method, or a number is negative.
    """
    with _attached(run, address) as (name, ask, _):
        ask("scale", dict(drafters))
        deadline = SYSTEM.now() + _ACT_S
        while True:
            rows = ask("status")
            if _has_acted(rows, drafters) or SYSTEM.now() > deadline:
                return name, rows
            SYSTEM.sleep(0.1)


def _has_acted(rows: Sequence[Mapping[str, Any]], drafters: Mapping[str, int | None]) -> bool:
    """Whether the wanted number of draft actors exists or is starting, and pending ones have a note with the reason."""
    for method, wanted in drafters.items():
        mine = [row for row in rows if row["method"] == method]
        mine = [row for row in mine if row["phase"] not in ("draining", "dead")]
        if wanted is not None and len(mine) != wanted:
            return False
        if any(row["phase"] == "pending" and not row["note"] for row in mine):
            return False
    return True


def status_of_run(run: str | None, address: str) -> tuple[str, list[dict[str, Any]]]:
    """Name of the run, and one row per actor; see `actors_status`.

    Raises:
        ClusterError: There is no such cluster.
        InputError: There is no such run.
    """
    with _attached(run, address) as (name, ask, calls):
        return name, actors_status(ask, calls)


def watch_run(run: str | None, address: str, interval_s: float) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the result of `status_of_run` every `interval_s` seconds until the run ends. Waits a minute for its start.

    Raises:
        ClusterError: There is no such cluster.
        InputError: There is no such run.
    """
    with contextlib.ExitStack() as held:
        name, ask, calls = held.enter_context(_attached_soon(run, address))
        until = SYSTEM.now()
        with contextlib.suppress(CallError):  # the controller ends with its run
            while rows := actors_status(ask, calls):
                yield name, rows
                until += max(interval_s, SYSTEM.now() - until)
                while (left := until - SYSTEM.now()) > 0.0:
                    SYSTEM.sleep(min(left, _LOOK_S))
                    ask("view", None)  # a private cluster ends soon after its run


@contextlib.contextmanager
def _attached_soon(run: str | None, address: str) -> Iterator[tuple[str, Callable[..., Any], Calls]]:
    """`_attached`; without an address, waits for a run that may be starting."""
    deadline = SYSTEM.now() + _BEGIN_S
    with contextlib.ExitStack() as held:
        while True:
            try:
                attached = held.enter_context(_attached(run, address))
                break
            except (ClusterError, NoRunError):
                if address != "auto" or SYSTEM.now() > deadline:
                    raise
                SYSTEM.sleep(_LOOK_S)
        yield attached


def actors_status(ask: Callable[..., Any], calls: Calls) -> list[dict[str, Any]]:
    """One row per actor: id, kind, phase, placement and counters. Ready actors are called for their counters; for one
    that does not answer, those of the last health check are used.

    Args:
        ask: Calls a method of the controller and returns the answer.
    """
    rows: list[dict[str, Any]] = ask("status")
    view: ClusterView = ask("view")
    ready = {**view.verifiers, **{one.actor_id: one.handle for one in view.drafters if one.phase is Phase.READY}}
    pings = {name: calls.start(handle, "ping", deadline_s=_PING_S, retry=False) for name, handle in ready.items()}
    for row in rows:
        if row["id"] in pings:
            with contextlib.suppress(SpecActorError):
                row["counters"] = pings[row["id"]].result()
    return rows


_BEGIN_S = 60.0
"""Longest wait for the start of a run to watch."""
_ACT_S = 4.0
"""Longest wait for the controller to act on a new number."""
_ASK_S = 60.0
_LOOK_S = 1.0
"""Time between two calls that check whether a run has ended."""
_PING_S = 2.0
"""Longest wait for the counters of actors."""


@contextlib.contextmanager
def _attached(run: str | None, address: str) -> Iterator[tuple[str, Callable[..., Any], Calls]]:
    """Name of the run, function that calls its controller, and calls."""
    from specactor_ray.cluster.calls import Calls
    from specactor_ray.cluster.connection import join_run

    connection, name, controller = join_run(run, address)
    with connection:
        calls = Calls()
        yield name, functools.partial(calls.ask, controller, deadline_s=_ASK_S), calls
