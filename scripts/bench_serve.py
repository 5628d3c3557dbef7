#!/usr/bin/env python3
"""`specactor serve` beside vLLM's own server: the same model, requests and cores, by turns.

    python scripts/bench_serve.py --concurrency 1,4,16,256 --tokens 64 --rounds 3
    python scripts/bench_serve.py --servers vllm,vllm-backend,auto --prompts conf/prompts/editing.jsonl --temperature 0
    python scripts/bench_serve.py --servers hf@../before,hf  # the code of another checkout

Every round starts each server once, sends it as many streamed completions of exactly `--tokens` tokens as are open at a
time, and ends it. Shown: tokens/s; tokens of an event; milliseconds to the first event and between two events of a
stream, as they arrive at the client (percentiles over streams and gaps); and tokens/s relative to the first server of
the same round; medians over rounds. All servers use all cores of this process, and the client runs on them, too. Exit
code 1 if a request failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import aiohttp
import typer

from points import JsonFile, Point, run_script, show_points
from specactor_ray.cli.options import parse_numbers
from specactor_ray.core.errors import EXIT_FAILED, InputError, SpecActorError
from specactor_ray.models.builtin import builtin_dir
from specactor_ray.rollout.prompts import read_prompts

MODEL, PORT = "smollm2-135m", 8723
START_S, REQUEST_S = 600.0, 900.0
SERVERS: dict[str, list[str] | None] = {
    "vllm": None,
    "vllm-backend": ["mode=plain", "target.backend=vllm"],
    "hf": ["mode=plain"],
    "auto": ["mode=auto"],
    "vllm-backend-auto": ["mode=auto", "target.backend=vllm"],
}
"""Name → overrides of `specactor serve`; None is vLLM's own server."""


def command(name: str, batch: int) -> list[str]:
    """Command of a server."""
    overrides = SERVERS[name]
    if overrides is None:
        options = {"model": builtin_dir(MODEL), "served-model-name": MODEL, "dtype": "float32", "port": PORT}
        options |= {"max-model-len": 2048, "max-num-seqs": batch, "host": "127.0.0.1"}
        given = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *given]
    cores = len(os.sched_getaffinity(0))
    target = [f"target.cores={cores}", f"target.model={MODEL}", "target.dtype=float32", f"target.max_batch={batch}"]
    return [sys.executable, "-m", "specactor_ray", "serve", "--port", str(PORT), *target, *overrides]


@contextlib.contextmanager
def running(name: str, batch: int) -> Iterator[str]:
    """A server that answers; its URL. Its log is shown if it does not start. `name` may end in @ and a checkout."""
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "4"}
    kind, _, checkout = name.partition("@")
    if checkout:
        environment["PYTHONPATH"] = checkout
    where: dict[str, Any] = {"env": environment, "cwd": checkout or None, "start_new_session": True}
    url, deadline = f"http://127.0.0.1:{PORT}", time.monotonic() + START_S
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command(kind, batch), stdout=log, stderr=log, **where)
        try:
            while not is_healthy(url):
                if server.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SpecActorError(f"{name} did not start:\n{log.read()[-3000:]}")
                time.sleep(0.5)
            yield url
        finally:
            server.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # children that it has left
            server.wait()


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health") as response:
            return bool(response.status == 200)
    except OSError:
        return False


class Stream(NamedTuple):
    """One streamed completion."""

    tokens: int
    waits_s: list[float]
    """Seconds to each event with tokens, from the request or from the event before."""


async def complete(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Stream:
    """Read a streamed completion."""
    arrived, tokens, waits_s = time.monotonic(), 0, list[float]()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            event = json.loads(line[6:]) if line.startswith(b"data: {") else {"choices": []}
            if "error" in event:
                raise RuntimeError(event["error"])
            count = sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
            if count:
                now = time.monotonic()
                waits_s.append(now - arrived)
                tokens, arrived = tokens + count, now
    return Stream(tokens, waits_s)


async def load(url: str, bodies: Sequence[dict[str, Any]]) -> Point:
    """Send all requests at once, after a warm-up."""
    timeout, connector = aiohttp.ClientTimeout(total=REQUEST_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await asyncio.gather(*(complete(session, url, {**body, "max_tokens": 4}) for body in bodies))
        begin = time.monotonic()
        found = await asyncio.gather(*(complete(session, url, body) for body in bodies), return_exceptions=True)
        seconds = time.monotonic() - begin
    done = [one for one in found if not isinstance(one, BaseException)]
    for problem in (one for one in found if isinstance(one, BaseException)):
        print(f"failed: {problem}", file=sys.stderr)
    tokens = sum(one.tokens for one in done)
    return {
        "tokens/s": tokens / seconds,
        "tokens/event": tokens / max(1, sum(len(one.waits_s) for one in done)),
        **in_ms("first", [one.waits_s[0] for one in done], 50, 90),
        **in_ms("gap", [wait for one in done for wait in one.waits_s[1:]], 50, 90, 99),
        "failed": len(found) - len(done),
    }


def in_ms(what: str, seconds: Sequence[float], *percentiles: int) -> dict[str, float]:
    """Percentiles, in milliseconds."""
    ordered = sorted(seconds) or [0.0]
    return {f"{what} p{each} ms": 1e3 * ordered[len(ordered) * each // 100] for each in percentiles}


def bodies_of(path: Path, count: int, tokens: int, temperature: float) -> list[dict[str, Any]]:
    """Bodies of completion requests; each has a prompt of its own, so that no server's cache holds it whole. None has a
    seed: with seeds vLLM's CPU sampler raises in large batches (0.32, "CPU Generator does not use offset")."""
    common = {"model": MODEL, "max_tokens": tokens, "temperature": temperature, "ignore_eos": True}
    common |= {"stream": True, "return_token_ids": True}
    prompts = itertools.islice(itertools.cycle(read_prompts(path)), count)
    return [{**common, "prompt": f"Request {i}. {prompt}"} for i, prompt in enumerate(prompts)]


def main(
    servers: Annotated[
        str, typer.Option(help=f"Of {', '.join(SERVERS)}; NAME@FOLDER: of a checkout.")
    ] = "vllm,vllm-backend,hf,auto",
    concurrency: str = "1,4,16,256",
    tokens: int = 64,
    temperature: float = 1.0,
    prompts: Path = Path("conf/prompts/chat.jsonl"),
    rounds: int = 2,
    json_file: JsonFile = None,
) -> None:
    names, sizes = servers.split(","), parse_numbers("--concurrency", concurrency, int, 1)
    if unknown := [name for name in names if name.partition("@")[0] not in SERVERS]:
        raise InputError(f"--servers: {unknown[0]!r} is not one of {', '.join(SERVERS)}")
    measured: dict[tuple[int, str], list[Point]] = {(size, name): [] for size in sizes for name in names}
    for number, name in itertools.product(range(rounds), names):
        with running(name, max(sizes)) as url:
            for size in sizes:
                point = asyncio.run(load(url, bodies_of(prompts, size, tokens, temperature)))
                print(
                    f"round {number + 1}, {name}, {size} at a time: {point['tokens/s']:.1f} tokens/s", file=sys.stderr
                )
                base = point if name == names[0] else measured[size, names[0]][number]
                measured[size, name].append({**point, f"of {names[0]}": point["tokens/s"] / base["tokens/s"]})
    points = [
        {"at a time": size, "server": name} | {key: statistics.median(one[key] for one in found) for key in found[0]}
        for (size, name), found in measured.items()
    ]
    show_points("servers", points, json_file)
    raise typer.Exit(EXIT_FAILED if any(one["failed"] for found in measured.values() for one in found) else 0)


if __name__ == "__main__":
    run_script(main)
