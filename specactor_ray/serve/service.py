"""Shared parts of all dialects: rollout, tokenizer, seeds, limits, metrics, aborts of requests that clients leave."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import Depends, Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from specactor_ray.core.errors import InputError, SpecActorError
from specactor_ray.core.metrics import METRICS
from specactor_ray.rollout.control import Control
from specactor_ray.rollout.handle import Handle
from specactor_ray.rollout.prompts import encode_prompt, is_token_ids
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.sampling.dialect import Dialect
from specactor_ray.sampling.seeds import derive_seed, sample_of
from specactor_ray.serve.requests import MOST_CHOICES, OPENAI, Refusal, Wanted, wanted_of
from specactor_ray.serve.vocabulary import Vocabulary
from specactor_ray.table.requests import TargetRequest, refuse_impossible

if TYPE_CHECKING:
    from specactor_ray.actors.specs import ClusterView
    from specactor_ray.rollout.rollout import Rollout

Encoded = TypeVar("Encoded")
_SEEDS = 2**63
"""Prompt index in the seed derivation for requests without a seed; no stream has as many prompts."""
_LONG_TEXT = 4096
"""Characters from which on a prompt is encoded in another thread."""
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Buckets of the times in the metrics."""
_VIEW_S = 5.0
"""Longest wait for the controller's view."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of clients' requests."""

    max_body_bytes: int = 16 << 20
    max_connections: int = 4096
    """Requests at a time; connections that wait for a request are closed when others need their room."""
    head_s: float = 10.0
    """Seconds for the head of a request; before the first one from the connection on."""
    body_s: float = 120.0
    """Seconds for the body of a request."""
    reader_s: float = 120.0
    """Seconds for which a client may read nothing of an answer that waits for it."""
    close_s: float = 5.0
    """Seconds in which a connection that is closed must have sent its last bytes."""
    drain_s: float = 10.0
    """Seconds that running requests may continue when the server ends."""


class ServerMetrics:
    """Prometheus metrics of the server, in a separate registry: Ray has one in the same process. Those of the run are
    read when `text` is called."""

    def __init__(self, service: Service) -> None:
        self._service, self._registry = service, CollectorRegistry()
        histogram = partial(Histogram, registry=self._registry, buckets=_SECONDS)
        self._requests = Counter("specactor_requests", "HTTP requests.", ["path", "status"], registry=self._registry)
        self._first = histogram(
            "specactor_time_to_first_token_seconds", "Time to first token of streamed requests, in seconds."
        )
        self._between = histogram(
            "specactor_time_between_tokens_seconds",
            "Time per token after the first of streamed requests; tokens that come together share it.",
        )
        self._duration = histogram("specactor_request_seconds", "From request to answer.", ["path"])
        paused = Gauge("specactor_paused", "Whether the server is paused.", registry=self._registry)
        paused.set_function(lambda: service.control.is_paused)
        self._registry.register(self)  # type: ignore[arg-type]

    def arrived(self, seconds: float, tokens: int, first: bool) -> None:
        """Record tokens of a stream that arrived together, `seconds` after the request or the previous tokens."""
        if first:
            self._first.observe(seconds)
        else:
            for _ in range(tokens):
                self._between.observe(seconds / tokens)

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Record an answered HTTP request; `path` is a route, so that the number of labels is bounded."""
        self._requests.labels(path, str(status)).inc()
        self._duration.labels(path).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Metrics of the run (`core.metrics`); called by Prometheus."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for row in self._service.rollout.metric_rows():
            if row.name not in families:
                family = CounterMetricFamily if row.is_counter else GaugeMetricFamily
                families[row.name] = family(row.name, METRICS[row.name].help, labels=list(row.labels))
            families[row.name].add_metric(list(row.labels.values()), row.value)
        yield from families.values()

    async def text(self) -> bytes:
        """All metrics in Prometheus's text form."""
        return await asyncio.to_thread(generate_latest, self._registry)


class Service:
    """Requests of HTTP clients on a rollout that serves its model under a name. All coroutines belong to one event
    loop."""

    def __init__(self, rollout: Rollout, model: str, limits: Limits | None = None) -> None:
        self.rollout, self.queue, self.model = rollout, rollout.queue, model
        self.tokenizer = rollout.queue.tokenizer
        self.vocabulary = Vocabulary(self.tokenizer)
        """Names and bytes of token ids."""
        self.limits = limits or Limits()
        self.context, self.num_ids = rollout.resolved.context, rollout.resolved.vocabulary
        """Most tokens of prompt and output together, and number of token ids."""
        self.created = int(time.time())
        """Start time of the server, in Unix seconds."""
        self.metrics = ServerMetrics(self)
        self.control = Control(rollout)
        self._numbers = itertools.count()
        self._is_cut_off = False
        self._viewing: asyncio.Future[ClusterView] | None = None

    @property
    def load(self) -> tuple[int, int]:
        """Numbers of running and of waiting requests."""
        total = len(self.queue.running())
        waiting = min(total, self.queue.dispatcher.backlog.single)
        return total - waiting, waiting

    # ---- fields of requests ----

    def wanted(self, given: Mapping[str, Any], dialect: Dialect = OPENAI) -> Wanted:
        """Sampling options from the fields of a request. The configuration supplies missing values, the run's sequence
        a missing seed. Raises as `wanted_of`."""
        seed = derive_seed(self.queue.sampling.seed, _SEEDS, next(self._numbers))
        return wanted_of(given, self.queue.sampling, seed, dialect)

    def require_model(self, name: str | None) -> None:
        """Raises Refusal (404) for another model's name."""
        if name is not None and name != self.model:
            raise Refusal(f"the model {name[:200]!r} is not served here; {self.model!r} is", 404, "model")

    async def prompts(self, given: Any, field: str, **options: bool | None) -> list[tuple[int, ...]]:
        """The prompts of a request, text or token ids or a list of either, as token ids. `options` are those of
        `encode_prompt` that the request sets."""
        each = given if isinstance(given, list) and not is_token_ids(given) else [given]
        if len(each) > MOST_CHOICES:
            raise Refusal(f"the request has {len(each)} prompts; at most {MOST_CHOICES} are allowed", param=field)
        for one in each:
            is_ids = isinstance(one, list) and set(map(type, one)) <= {int}
            if not (isinstance(one, str) or is_ids) or not one:
                raise Refusal(f"{field} must be text, token ids, or a list of these, none empty", param=field)
        known: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        encode = partial(encode_prompt, self.tokenizer, chat=False, most=self.context, **known)
        is_long = sum(len(one) for one in each if isinstance(one, str)) > _LONG_TEXT
        return await self.encoded(lambda: list(map(encode, each)), field, is_long)

    async def encoded(self, encode: Callable[[], Encoded], field: str, is_long: bool = True) -> Encoded:
        """Result of a tokenizer call; in another thread if it may take long."""
        try:
            return await asyncio.to_thread(encode) if is_long else encode()
        except SpecActorError as error:
            raise Refusal(str(error), param=field) from None

    # ---- requests ----

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        wanted: Wanted,
        *,
        name: str = "",
        session: str | None = None,
        priority: int = 0,
    ) -> list[Handle]:
        """Begin `wanted.n` choices of each prompt, prompt by prompt; the caller must always `drop` them at the end.

        A single choice has the seed of the request; others have seeds as `Rollout.generate` derives those of samples.
        `name` is that of the request, for `Control.abort`; session and priority are as in `RequestQueue.submit`.
        """
        if self.control.is_asleep:
            raise Refusal("engine_paused: the server sleeps; POST /wake_up first", 503)
        if self.control.is_rejecting:
            raise Refusal("engine_paused: POST /resume first, or repeat the request later", 503)
        self._require_not_cut_off()
        if len(prompts) * wanted.n > MOST_CHOICES:
            raise Refusal(f"the request has {len(prompts) * wanted.n} choices; at most {MOST_CHOICES} are allowed")
        try:
            for prompt in prompts:
                refuse_impossible(TargetRequest("", tuple(prompt), wanted.sampling), self.num_ids, self.context)
        except InputError as error:
            raise Refusal(str(error), param="prompt") from None
        handles: list[Handle] = []
        sampling = wanted.sampling
        try:
            for number, sample in itertools.product(range(len(prompts)), range(wanted.n)):
                if len(prompts) * wanted.n > 1 or wanted.first_prompt is not None:
                    sampling = sample_of(wanted.sampling, (wanted.first_prompt or 0) + number, sample)
                prompt = list(prompts[number])
                handles.append(self.queue.submit(prompt, sampling, request_id=name, session=session, priority=priority))
        except SpecActorError:
            self.drop(handles)
            raise
        return handles

    def drop(self, handles: Sequence[Handle]) -> None:
        """Abort those choices that have not ended."""
        for handle in handles:
            handle.drop()

    async def outputs(self, request: Request, handles: Sequence[Handle]) -> list[Trajectory]:
        """The outputs of all choices, which are aborted when the client leaves or one of them failed."""
        working = asyncio.ensure_future(self._outputs(handles))
        leaving = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise Refusal("the client has left", 499)
            return working.result()
        finally:
            leaving.cancel()
            working.cancel()
            self.drop(handles)

    async def _outputs(self, handles: Sequence[Handle]) -> list[Trajectory]:
        return [self.checked(await handle) for handle in handles]

    def checked(self, output: Trajectory) -> Trajectory:
        """Return an output that has ended, unless it failed."""
        if output.finish_reason == "error":
            raise Refusal(output.error, 500 if output.token_ids else 400)
        if output.finish_reason == "abort":
            self._require_not_cut_off()
        return output

    def cut_off(self) -> None:
        """Abort all requests, and refuse others: the server ends."""
        self._is_cut_off = True
        self.control.resume()
        self.drop(self.queue.running())

    async def view(self) -> ClusterView:
        """The controller's view; it is asked once for all callers at a time. Raises Refusal (503) without an answer."""
        if self._viewing is None or self._viewing.done():
            self._viewing = asyncio.ensure_future(asyncio.to_thread(self.rollout.view))
        try:
            return await asyncio.wait_for(asyncio.shield(self._viewing), _VIEW_S)
        except (TimeoutError, SpecActorError) as error:
            raise Refusal(str(error) or f"the controller did not answer within {_VIEW_S:g} s", 503) from None

    def _require_not_cut_off(self) -> None:
        if self._is_cut_off:
            raise Refusal("the server ends; the request was cut off", 503)


async def _left(request: Request) -> None:
    """Return when the client has left; the body of the request must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Serving = Annotated[Service, Depends(_service_of)]
"""Parameter of an endpoint: the service of the application."""
