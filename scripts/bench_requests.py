#!/usr/bin/env python3
"""What a request costs the driver: by `RequestQueue.generate`, over HTTP, and streamed, with a run of a small model
behind it.

CPU seconds are those of the driver's process (user and system, all threads, Ray's included); clients of HTTP are a
process of their own.

    python scripts/bench_requests.py local_cpu [KEY=VALUE ...]
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import aiohttp
import typer

from points import JsonFile, Point, run_script, show_points
from specactor_ray import Rollout, SamplingParams
from specactor_ray.serve.run import serving
from specactor_ray.serve.service import Service

PROMPT = list(range(5, 21))
_CONNECTIONS = 50


def main(
    config: Annotated[str, typer.Argument(help="A file or a shipped configuration.")] = "local_cpu",
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    requests: Annotated[int, typer.Option(min=1)] = 1000,
    tokens: Annotated[int, typer.Option(min=1)] = 16,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    json_file: JsonFile = None,
) -> None:
    with Rollout.from_config(config, overrides or ()) as rollout, serving(Service(rollout, "policy")) as url:
        points = [
            {"round": number, **point}
            for number in range(1, rounds + 1)
            for point in measure(rollout, url, requests, tokens)
        ]
    show_points(f"{requests} requests", points, json_file)


def measure(rollout: Rollout, url: str, requests: int, tokens: int) -> list[Point]:
    """One round of each measurement."""
    queue, points = rollout.queue, list[Point]()
    one, many = (SamplingParams(max_tokens=count, seed=1, ignore_eos=True) for count in (1, tokens))

    def add(what: str, seconds: float) -> None:
        points.append({"what": what, "us / request": 1e6 * seconds / requests, "requests/s": requests / seconds})

    def add_cpu(what: str, work: Callable[[], Any]) -> None:
        begin = time.process_time()
        work()
        add(what, time.process_time() - begin)

    async def side_by_side(send: Callable[[], Awaitable[Any]]) -> None:
        async def some(first: int) -> None:
            for _ in range(first, requests, _CONNECTIONS):
                await send()

        await asyncio.gather(*map(some, range(_CONNECTIONS)))

    async def read(sampling: SamplingParams) -> None:
        async for _ in queue.submit(PROMPT, sampling).batches():
            pass

    begin = time.thread_time()
    handles = [queue.submit(PROMPT, one) for _ in range(requests)]
    add("submit, of its own thread", time.thread_time() - begin)
    for handle in handles:
        handle.result()
    for sampling in (one, many):
        send = lambda sampling=sampling: queue.generate(PROMPT, sampling)  # noqa: E731
        add_cpu(f"generate, {sampling.max_tokens} token(s)", lambda send=send: asyncio.run(side_by_side(send)))
    add_cpu(f"stream, {tokens} tokens", lambda: asyncio.run(side_by_side(lambda: read(many))))
    body = {"prompt": PROMPT, "max_tokens": tokens, "seed": 1, "ignore_eos": True}
    bodies = {
        "GET /health": None,
        "HTTP, 1 token": {**body, "max_tokens": 1},
        f"HTTP, {tokens} tokens": body,
        f"HTTP, {tokens} tokens streamed": {**body, "stream": True},
    }
    for what, content in bodies.items():
        add_cpu(what, lambda content=content: send_from_a_process(url, requests, content))
    return points


def send_from_a_process(url: str, requests: int, body: dict[str, Any] | None) -> None:
    """The requests over some connections, from a process of its own."""
    process = multiprocessing.get_context("spawn").Process(target=_send, args=(url, requests, body))
    process.start()
    process.join()
    assert process.exitcode == 0


def _send(url: str, requests: int, body: dict[str, Any] | None) -> None:
    async def send_all() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=_CONNECTIONS)) as session:
            path, method = ("/health", session.get) if body is None else ("/v1/completions", session.post)

            async def send() -> None:
                async with method(url + path, json=body) as response:
                    answer = await response.text()
                    assert response.status == 200 and '"error"' not in answer, answer

            await asyncio.gather(*(send() for _ in range(requests)))

    asyncio.run(send_all())


if __name__ == "__main__":
    run_script(main)
