"""A request queue that gives out scripted tokens, in parts of sizes that a test sets; a service on it, its clients."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np

from specactor_ray.config.schema import Config, TargetConfig
from specactor_ray.core.clock import SYSTEM
from specactor_ray.core.errors import OverloadedError, SpecActorError
from specactor_ray.core.metrics import row
from specactor_ray.core.types import SamplingParams
from specactor_ray.models.loading import load_tokenizer
from specactor_ray.rollout.detokenizer import Stop, StopFinder
from specactor_ray.rollout.dispatch_thread import wake
from specactor_ray.rollout.handle import Handle
from specactor_ray.rollout.trajectory import RolloutMetrics, Trajectory
from specactor_ray.serve.app import make_app
from specactor_ray.serve.service import Limits, Service
from specactor_ray.startup.machine import Machine
from specactor_ray.startup.resolve import Resolved, resolve
from tests.tiny import tiny_target

Script = Callable[[tuple[int, ...], SamplingParams], Sequence[int]]


def counting(prompt: tuple[int, ...], sampling: SamplingParams) -> Sequence[int]:
    """A hundred tokens that depend on the seed."""
    return [10 + (sampling.seed + at) % 300 for at in range(100)]


@functools.cache
def tokenizer() -> Any:
    """The tiny model's."""
    return load_tokenizer(str(tiny_target()))


class ScriptedQueue:
    """Attributes:
    submitted: Prompt, sampling and options of each request.
    part: Tokens that come together.
    held: While this is set, nothing comes.
    """

    def __init__(self, script: Script = counting, part: int = 3, max_waiting: int = 10**6) -> None:
        self.clock, self.tokenizer = SYSTEM, tokenizer()
        self.sampling, self.chat = SamplingParams(max_tokens=16, seed=5), True
        self.script, self.part, self.max_waiting, self.held = script, part, max_waiting, False
        self.submitted: list[tuple[tuple[int, ...], SamplingParams, dict[str, Any]]] = []
        self.open: dict[str, Handle] = {}
        self.beginning = set[object]()
        self.tasks: set[asyncio.Task[None]] = set()
        self.failure: SpecActorError | None = None
        self.error, self.finish_reason = "", "length"
        self.dispatcher = SimpleNamespace(backlog=SimpleNamespace(single=0))

    def submit(self, prompt: Any, sampling: SamplingParams | None = None, **options: Any) -> Handle:
        assert sampling is not None
        if len(self.open) >= self.max_waiting:
            raise OverloadedError("too many requests wait already")
        self.submitted.append((tuple(prompt), sampling, options))
        thread: Any = self
        key = f"request-{len(self.submitted)}"
        handle = self.open[key] = Handle(thread, lambda output: output, key, options.get("request_id"))
        task = asyncio.get_running_loop().create_task(self._run(handle, tuple(prompt), sampling))
        self.tasks.add(task)
        return handle

    def running(self, request_id: str | None = None) -> list[Handle]:
        return [handle for handle in self.open.values() if request_id in (None, handle.request_id)]

    def drop(self, key: str) -> None:
        self.open.pop(key, None)

    def watch(self, key: str, push: Any) -> None:
        pass

    async def _run(self, handle: Handle, prompt: tuple[int, ...], sampling: SamplingParams) -> None:
        tokens, at = list(self.script(prompt, sampling))[: sampling.max_tokens], 0
        stop: Stop | None = None
        if sampling.stop and (stop := StopFinder(self.tokenizer, sampling).find(np.array(tokens))):
            tokens = tokens[: stop.num_tokens]
        pairs = [(token, -0.5) for token in tokens]
        while handle.key in self.open and at < len(tokens):
            await asyncio.sleep(0)
            if not self.held:
                at = min(at + self.part, len(tokens))
                there: Any = SimpleNamespace(num_tokens=at, tokens_from=lambda begin, end=at: pairs[begin:end])
                wake(handle.push(there))
        reason = "abort" if handle.key not in self.open else "stop" if stop else self.finish_reason
        self.open.pop(handle.key, None)
        text = self.tokenizer.decode(tokens[:at], skip_special_tokens=True)
        text, name = (text[: len(text) - stop.cut], stop.text) if stop else (text, None)
        ids, logprobs = tuple(tokens[:at]), (-0.5,) * at
        output = Trajectory("", 0, 0, prompt, ids, logprobs, text, reason, sampling, stop_reason=name)
        if self.error:
            output = Trajectory("", 0, 0, prompt, (), (), "", "error", sampling, error=self.error)
        handle.end(self.failure or output)


@functools.cache
def resolved_tiny() -> Resolved:
    """The configuration of the tiny target with defaults elsewhere."""
    return resolve(Config(target=TargetConfig(model=str(tiny_target()))), Machine(1))


def make_service(queue: ScriptedQueue, limits: Limits | None = None) -> Service:
    rollout: Any = SimpleNamespace(
        queue=queue,
        config=resolved_tiny().config,
        resolved=resolved_tiny(),
        weight_version=0,
        committed_tokens=0,
        metrics=RolloutMetrics,
        metric_rows=lambda: [row("specactor_weight_version", 0, actor="driver")],
    )
    return Service(rollout, "tiny", limits)


@functools.cache
def usual_app() -> Any:
    """The application without a token and with the usual limits; making one takes longer than most requests."""
    return make_app(make_service(ScriptedQueue()))


def on(service: Service, work: Callable[[httpx.AsyncClient], Awaitable[Any]], token: str | None = None) -> Any:
    """Result of `work`, which gets a client of the whole application, without a network."""
    app = usual_app() if token is None and service.limits == Limits() else make_app(service, token)
    app.state.service = service

    async def body() -> Any:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await work(client)

    return asyncio.run(body())


def post(path: str, body: Any, engine: ScriptedQueue | None = None, **options: Any) -> httpx.Response:
    """Answer of a new service to one request, with a JSON body or with these bytes."""
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    return on(make_service(engine or ScriptedQueue()), lambda client: client.post(path, **sent, **options))


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Events of a stream, without the last line."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]" and answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line) for line in lines[:-1]]
