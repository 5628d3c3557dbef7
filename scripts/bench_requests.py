#!/usr/bin/env python
"""What a request costs the driver: by `Engine.generate`, over HTTP, and streamed; a run of a small model behind it.

CPU seconds are those of the driver's process (user and system, all threads, Ray's included); clients of HTTP are a
process of their own. Usage: scripts/bench_requests.py --config local_cpu [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from specactor_ray import Rollout, SamplingParams
from specactor_ray.serve.run import listening_socket, server_of
from specactor_ray.serve.service import Service

PROMPT = list(range(5, 21))
_CONNECTIONS = 50


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default=None)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    with Rollout.from_config(options.config, options.overrides) as rollout:
        service = Service.of(rollout, "bench")
        listener = listening_socket("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = server_of(service)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            for _ in range(options.rounds):
                report(rollout, url, options.requests, options.tokens)
        finally:
            server.should_exit = True
            thread.join()


def report(rollout: Rollout, url: str, requests: int, tokens: int) -> None:
    """One round of each measurement, a line each."""
    engine, one = rollout.engine, SamplingParams(max_tokens=1, seed=1, ignore_eos=True)
    many = SamplingParams(max_tokens=tokens, seed=1, ignore_eos=True)

    async def by_turns(send: Callable[[], Awaitable[Any]]) -> None:
        async def some() -> None:
            for _ in range(requests // _CONNECTIONS):
                await send()

        await asyncio.gather(*(some() for _ in range(_CONNECTIONS)))

    async def read(sampling: SamplingParams) -> None:
        async for _ in engine.stream(PROMPT, sampling):
            pass

    def generating(sampling: SamplingParams) -> float:
        return cpu(lambda: asyncio.run(by_turns(lambda: engine.generate(PROMPT, sampling))))

    handles: list[Any] = []
    begin = time.thread_time()
    for _ in range(requests):
        handles.append(engine.submit(PROMPT, one))
    show("submit, of its own thread", time.thread_time() - begin, requests)
    for handle in handles:
        handle.result()
    show("generate, 1 token", generating(one), requests)
    whole = generating(many)
    show(f"generate, {tokens} tokens", whole, requests)
    show(f"stream, {tokens} tokens", cpu(lambda: asyncio.run(by_turns(lambda: read(many)))), requests)
    show("GET /health", cpu(lambda: clients(url, requests, None)), requests)
    body = {"prompt": PROMPT, "max_tokens": 1, "seed": 1, "ignore_eos": True}
    show("HTTP, 1 token", cpu(lambda: clients(url, requests, body)), requests)
    body["max_tokens"] = tokens
    http = cpu(lambda: clients(url, requests, body))
    show(f"HTTP, {tokens} tokens", http, requests)
    streamed = cpu(lambda: clients(url, requests, {**body, "stream": True}))
    show(f"HTTP, {tokens} tokens streamed", streamed, requests)
    print(f"  HTTP beside generate: {1e6 * (http - whole) / requests:.0f} us a request")
    print(f"  streamed beside whole: {1e6 * (streamed - http) / requests / tokens:.1f} us a token", flush=True)


def show(what: str, seconds: float, requests: int) -> None:
    print(f"{what:32} {1e6 * seconds / requests:7.0f} us a request, {requests / seconds:7.0f} requests/s of a core")


def cpu(work: Callable[[], Any]) -> float:
    """CPU seconds of this process while this runs."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def clients(url: str, requests: int, body: dict[str, Any] | None) -> None:
    """The requests over some connections, from a process of its own, which does as little as it can."""
    process = multiprocessing.get_context("spawn").Process(target=_clients, args=(url, requests, body))
    process.start()
    process.join()
    assert process.exitcode == 0


def _clients(url: str, requests: int, body: dict[str, Any] | None) -> None:
    host, port = url.removeprefix("http://").split(":")
    content = b"" if body is None else json.dumps(body).encode()
    line = "GET /health" if body is None else "POST /v1/completions"
    head = (
        f"{line} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )

    async def send(count: int) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in range(count):
            writer.write(head.encode() + content)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            if b"chunked" in answer:
                end = await reader.readuntil(b"\r\n0\r\n\r\n")
                assert b"error" not in end and b"[DONE]" in end
            else:
                await reader.readexactly(int(answer.lower().partition(b"content-length: ")[2].split(b"\r")[0]))
        writer.close()

    async def all_of_them() -> None:
        await asyncio.gather(*(send(requests // _CONNECTIONS) for _ in range(_CONNECTIONS)))

    asyncio.run(all_of_them())


if __name__ == "__main__":
    main()
