"""Calls to the controller and the verifiers of a run: by its driver, or by `specactor status` and `specactor scale` of
another process. Independent of models."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from specactor_ray.actors.specs import ClusterView
from specactor_ray.cluster.calls import Calls
from specactor_ray.config.methods import inline_drafters, traits
from specactor_ray.config.schema import Config
from specactor_ray.core.clock import SYSTEM
from specactor_ray.core.errors import ActorLostError, CallError, InputError, SpecActorError
from specactor_ray.core.metrics import DRIVER, Row, row, verifier_rows
from specactor_ray.rollout.dispatch import Dispatcher, WeightPolicy, policy_of
from specactor_ray.rollout.engine import CLOSED, Engine
from specactor_ray.rollout.journal import JournalEntry
from specactor_ray.rollout.trajectory import RolloutMetrics
from specactor_ray.transport.messages import WeightSet

logger = logging.getLogger(__name__)

_ASK_S = 60.0
"""Longest wait for the answer to a quick call."""
_COMMAND_S = 300.0
"""Longest wait for verifiers to execute a command."""
SHUTDOWN_S = 60.0
_ACT_S = 4.0
"""Longest wait for the controller to act on a new number."""
_LOOK_S = 1.0
"""Time between two calls that check whether a watched run has ended."""
_PING_S = 2.0
"""Longest wait for the counters of actors."""


class RunClient:
    """The requests of a run, and operations between them. `config` is that of the controller."""

    def __init__(self, config: Config, controller: Any, calls: Calls) -> None:
        cluster = config.cluster
        self._controller, self._calls = controller, calls
        self._sync_timeout_s = cluster.start_timeout_s
        self.dispatcher = Dispatcher(
            controller,
            calls,
            outstanding_per_verifier=2 * config.target.max_batch,
            no_verifier_timeout_s=cluster.start_timeout_s + cluster.placement_timeout_s,
            shares_outputs=any(traits(one.method).keeps_history for one in inline_drafters(config)),
        )
        self.engine = Engine(self.dispatcher, calls.clock, self.wake_if_asleep, lambda: self._asleep)
        """Engine for single requests, at any time and from any thread."""
        self._asleep = False
        """Whether verifiers received `sleep`."""
        self.weight_version = 0
        """Version of the policy's weights for new requests."""
        self._syncs, self._sync_s = 0, 0.0
        """Number of updates of the policy's weights, and their seconds in total."""

    @property
    def closed(self) -> bool:
        """Whether no further request is accepted."""
        return self.engine.closed

    def run(self, entries: Sequence[JournalEntry]) -> Generator[JournalEntry, None, None]:
        """Yield each entry when it has ended; see `Engine.run`."""
        with self.engine.opening_stream() as number:
            yield from self.engine.run(entries, number)

    def update_weights(self, weights: WeightSet, policy: WeightPolicy | str | None = None) -> int:
        """See `Rollout.update_weights`."""
        self.require_open()
        if policy is None:
            self.require_no_stream("weights cannot change")
        policy = policy_of(policy or WeightPolicy.WAIT)
        if weights.version < self.weight_version:
            raise InputError(f"weights of version {weights.version} come after version {self.weight_version}")
        # From this call on the controller may be updating actors, even if its answer is late.
        self.weight_version = weights.version
        limit_s, begin = self._sync_timeout_s, self._calls.clock.now()
        with self.engine.between_versions(weights.version, policy):
            self.ask("set_weights", weights, limit_s, deadline_s=limit_s + _ASK_S)
        self._syncs, self._sync_s = self._syncs + 1, self._sync_s + self._calls.clock.now() - begin
        return weights.version

    def update_drafter(self, weights: WeightSet) -> None:
        """Send a newer version of a draft method's weights, which the trainer trains, to its drafters. Returns before
        they arrive: no token depends on the time of arrival."""
        self.ask("offer_weights", weights)

    def call_verifiers(self, method: str) -> None:
        """Call a method of every verifier that is not lost; a replacement of a lost one starts in a fresh state.

        Raises:
            InputError: A stream is open, or requests run.
            SpecActorError: A live verifier did not do it.
        """
        self.require_no_stream(method)
        if self.engine.running():
            raise InputError(f"{method} while requests run; abort them or await their ends first")
        self.engine.settle()
        self._command(method)

    def sleep(self) -> None:
        """Free the memory of the verifiers' caches until the next stream (or `wake`)."""
        self.call_verifiers("sleep")

    def wake(self) -> None:
        """Allocate the memory of the verifiers again."""
        self.call_verifiers("wake")

    def wake_if_asleep(self) -> None:
        """Wake the verifiers before requests begin."""
        if self._asleep:
            self._command("wake")

    def reset_metrics(self) -> None:
        """Set the verifiers' counters to zero (after a warm-up)."""
        self.call_verifiers("reset_metrics")
        self.engine.forget_counters()

    def forget_history(self) -> None:
        """Remove earlier outputs from the drafters' histories, as at their start; for benchmarks."""
        view = self.view()
        drafters = [endpoint.handle for endpoint in view.drafters]
        self._call_all("forget_history", [*drafters, *view.verifiers.values()])

    def metrics(self) -> RolloutMetrics:
        """Counters over all verifiers since the start or the last `reset_metrics`."""
        # A copy: progress is shown from another thread, while verifiers may join.
        return RolloutMetrics.merge(self.dispatcher.verifiers.counters.copy().values())

    def metric_rows(self, verifiers: bool = True) -> Iterator[Row]:
        """Metrics of the driver, and the latest reported ones of the verifiers; for any thread, without a call."""
        journal, dispatcher = self.dispatcher.journal, self.dispatcher
        yield row("specactor_requests_in_flight", in_flight := journal.owned)
        yield row("specactor_requests_waiting", max(len(journal.entries) - in_flight, 0))
        yield row("specactor_requests_reissued_total", dispatcher.reissues)
        yield row("specactor_journaled_tokens_total", journal.committed_tokens)
        yield row("specactor_discarded_tokens_total", journal.discarded_tokens)
        yield row("specactor_weight_version", self.weight_version, actor=DRIVER)
        yield row("specactor_weight_syncs_total", self._syncs)
        yield row("specactor_weight_sync_seconds_total", self._sync_s)
        serving = list(dispatcher.verifiers.links) if verifiers else []
        for verifier_id in serving:
            if (counters := dispatcher.verifiers.counters.get(verifier_id)) is not None:
                yield from verifier_rows(verifier_id, counters)

    def view(self) -> ClusterView:
        view: ClusterView = self.ask("view")
        return view

    def status(self) -> list[dict[str, Any]]:
        """See `actors_status`."""
        return actors_status(self.ask, self._calls)

    def scale(self, drafters: Mapping[str, int]) -> None:
        """Set the number of draft actors of each method, during the rollout. A ConfigError names a wrong method or
        number."""
        self.ask("scale", dict(drafters))

    def shutdown(self) -> None:
        """End all actors of the run; raises SpecActorError if the controller did not shut down in order."""
        self.engine.close()
        self._ask("shutdown", deadline_s=SHUTDOWN_S)

    def ask(self, method: str, *arguments: Any, deadline_s: float = _ASK_S) -> Any:
        """Call the controller and wait for the answer."""
        self.require_open()
        return self._ask(method, *arguments, deadline_s=deadline_s)

    def _ask(self, method: str, *arguments: Any, deadline_s: float) -> Any:
        try:
            return self._calls.ask(self._controller, method, *arguments, deadline_s=deadline_s)
        except ActorLostError as error:
            raise ActorLostError(f"the controller of the run is gone: {error}", error.node_lost) from None

    def require_open(self) -> None:
        if self.closed:
            raise InputError(CLOSED)

    def require_no_stream(self, what: str) -> None:
        if self.engine.open_streams:
            raise InputError(f"{what} while a stream is open; exhaust or close it first")

    def _command(self, method: str) -> None:
        self._asleep = self._asleep or method == "sleep"
        self._call_all(method, list(self.view().verifiers.values()))
        self._asleep = self._asleep and method != "wake"

    def _call_all(self, method: str, handles: Sequence[Any]) -> None:
        calls = [self._calls.start(handle, method, deadline_s=_COMMAND_S) for handle in handles]
        for call in calls:
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


# The functions below are for another process of the cluster; `run`, `address` and errors as in `join_run`. They return
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
    """Name of the run, function that calls its controller, and calls."""
    from specactor_ray.cluster.connection import join_run

    connection, name, controller = join_run(run, address)
    with connection:
        calls = Calls()
        yield name, functools.partial(calls.ask, controller, deadline_s=_ASK_S), calls
