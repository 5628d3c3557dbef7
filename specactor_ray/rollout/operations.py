"""Operations on the actors of a run: by its driver, or by `specactor status` and `specactor scale` of another
process."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from specactor_ray.actors.specs import ClusterView
from specactor_ray.cluster.address import cluster_of_run
from specactor_ray.cluster.calls import Calls
from specactor_ray.config.schema import ClusterConfig
from specactor_ray.core.clock import SYSTEM
from specactor_ray.core.errors import ActorLostError, CallError, InputError, SpecActorError

logger = logging.getLogger(__name__)

ASK_S = 60.0
"""Longest wait for the answer to a quick call."""
_COMMAND_S = 300.0
"""Longest wait for actors to execute a command."""
_ACT_S = 4.0
"""Longest wait for the controller to act on a new number."""
_LOOK_S = 1.0
"""Time between two calls that check whether a watched run has ended."""
_PING_S = 2.0
"""Longest wait for the counters of actors."""


def ask(calls: Calls, controller: Any, method: str, *arguments: Any, deadline_s: float = ASK_S) -> Any:
    """Call the controller and wait for the answer. ActorLostError: the controller is gone, and with it the run."""
    try:
        return calls.ask(controller, method, *arguments, deadline_s=deadline_s)
    except ActorLostError as error:
        raise ActorLostError(f"the controller of the run is gone: {error}", error.node_lost) from None


def call_all(calls: Calls, handles: Sequence[Any], method: str, *arguments: Any) -> None:
    """Call a method of all these actors and wait for the answers, except for those of lost actors."""
    started = [calls.start(handle, method, *arguments, deadline_s=_COMMAND_S) for handle in handles]
    for call in started:
        try:
            call.result()
        except ActorLostError as error:
            logger.warning("%s: %s", method, error)


def actors_status(ask: Callable[..., Any], calls: Calls) -> list[dict[str, Any]]:
    """One row per actor: id, kind, phase, placement and counters. Ready actors are called for their counters; for one
    that does not answer, those of the last health check are used. `ask` calls a method of the controller."""
    rows: list[dict[str, Any]] = ask("status")
    view: ClusterView = ask("view")
    ready = {**view.verifiers, **{one.actor_id: one.handle for one in view.drafters}}
    pings = {name: calls.start(handle, "ping", deadline_s=_PING_S, retry=False) for name, handle in ready.items()}
    for actor in rows:
        if actor["id"] in pings:
            with contextlib.suppress(SpecActorError):
                actor["counters"] = pings[actor["id"]].result()
    return rows


# The functions below are for another process of the cluster; `run`, `address` and errors as in `_attached`. They return
# the name of the run, and one row per actor.


def scale_run(run: str | None, drafters: Mapping[str, int], address: str) -> tuple[str, list[dict[str, Any]]]:
    """Set the number of draft actors of each method. Returns when the controller has begun to act. ConfigError: the run
    has no such method, or a number is negative."""
    with _attached(run, address) as (name, ask, _):
        ask("scale", dict(drafters))
        deadline = SYSTEM.now() + _ACT_S
        while True:
            rows = ask("status")
            if _has_acted(rows, drafters) or SYSTEM.now() > deadline:
                return name, rows
            SYSTEM.sleep(0.1)


def _has_acted(rows: Sequence[Mapping[str, Any]], drafters: Mapping[str, int]) -> bool:
    """Whether the wanted number of draft actors exists or is starting, and pending ones have a note with the reason."""
    for method, wanted in drafters.items():
        mine = [one for one in rows if one["method"] == method and one["phase"] != "dead"]
        if len(mine) != wanted:
            return False
        if any(one["phase"] == "pending" and not one["note"] for one in mine):
            return False
    return True


def status_of_run(run: str | None, address: str) -> tuple[str, list[dict[str, Any]]]:
    """See `actors_status`."""
    with _attached(run, address) as (name, ask, calls):
        return name, actors_status(ask, calls)


def watch_run(run: str | None, address: str, interval_s: float) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the status every `interval_s` seconds until the run ends."""
    with _attached(run, address) as (name, ask, calls):
        until = SYSTEM.now()
        with contextlib.suppress(CallError):  # the controller ends with its run
            while rows := actors_status(ask, calls):
                yield name, rows
                until += max(interval_s, SYSTEM.now() - until)
                while (left := until - SYSTEM.now()) > 0.0:
                    SYSTEM.sleep(min(left, _LOOK_S))
                    ask("view", None)  # a private cluster ends soon after its run


@contextlib.contextmanager
def _attached(run: str | None, address: str) -> Iterator[tuple[str, Callable[..., Any], Calls]]:
    """Context in which this process is connected to the cluster of a run (None: the only one) at an address (`auto`,
    `local`: that of `cluster_of_run`). Yields the name of the run, a function that calls its controller, and calls.
    ClusterError: there is no cluster, or no such run. InputError: no run is named, and there is not just one."""
    from specactor_ray.cluster.connection import connect, find_controller, list_runs

    with connect(ClusterConfig(address=cluster_of_run() if address in ("auto", "local") else address)):
        runs = [run] if run else list_runs()
        if len(runs) != 1:
            found = f"there are {', '.join(runs)}; name one" if runs else "no run is going on in this cluster"
            raise InputError(f"no run is named, and {found}")
        calls = Calls()
        yield runs[0], functools.partial(ask, calls, find_controller(runs[0])), calls
