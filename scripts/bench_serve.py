#!/usr/bin/env python
"""`specactor serve` beside vLLM's own server: the same model, requests and cores, by turns.

    python scripts/bench_serve.py --concurrency 16,256 --tokens 64 --rounds 2
    python scripts/bench_serve.py --servers vllm,vllm-backend,auto --prompts conf/prompts/editing.jsonl --temperature 0

Every round starts each server once, sends it `--requests` streamed completions of exactly `--tokens` tokens with
`--concurrency` of them open at a time, and ends it. Printed: tokens/s, milliseconds to the first token and between
tokens (median and 99th percentile over requests and tokens), and tokens/s relative to the first server of the same
round. All servers use all cores of this process, and the client runs on them, too. Exit code 1 if a request failed.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp
import psutil

from specactor_ray.core.console import make_console, make_table
from specactor_ray.models.builtin import builtin_dir
from specactor_ray.rollout.prompts import read_prompts

MODEL = "smollm2-135m"
START_S, REQUEST_S = 600.0, 900.0
SERVERS = {
    "vllm": None,
    "vllm-backend": ["mode=plain", "target.backend=vllm"],
    "hf": ["mode=plain"],
    "auto": ["mode=auto"],
    "vllm-backend-auto": ["mode=auto", "target.backend=vllm"],
}
"""Name → overrides of `specactor serve`; None is vLLM's own server."""


class Answer(NamedTuple):
    """A streamed completion."""

    first_s: float
    gaps_s: list[float]
    """Of each token after the first; tokens that arrive together share the time since the arrival before."""
    tokens: int


class Measured(NamedTuple):
    tokens_per_s: float
    first_ms: tuple[float, float]
    gap_ms: tuple[float, float]
    failed: int


def command(name: str, port: int, batch: int) -> list[str]:
    """How a server is started."""
    overrides = SERVERS[name]
    if overrides is None:
        options = ["--served-model-name", MODEL, "--dtype", "float32", "--max-model-len", "2048"]
        options += ["--max-num-seqs", str(batch), "--host", "127.0.0.1", "--port", str(port)]
        return [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(builtin_dir(MODEL)),
            *options,
        ]
    cores = len(os.sched_getaffinity(0))
    given = [
        f"target.cores={cores}",
        f"target.model={MODEL}",
        "target.dtype=float32",
        f"target.max_batch={batch}",
        *overrides,
    ]
    return [sys.executable, "-m", "specactor_ray", "serve", "--port", str(port), *given]


@contextlib.contextmanager
def running(name: str, port: int, batch: int) -> Iterator[str]:
    """A server that answers; its URL. Its log is shown if it does not start."""
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "4"}
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            command(name, port, batch), stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            if not asyncio.run(answers(url, server)):
                log.seek(0)
                sys.exit(f"{name} did not start:\n{log.read()[-3000:]}")
            yield url
        except BaseException:
            log.seek(0)
            print(f"{name}:\n{log.read()[-3000:]}", file=sys.stderr)
            raise
        finally:
            children = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
            server.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(60)
            for process in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            server.kill()
            server.wait()


async def answers(url: str, server: subprocess.Popen[bytes]) -> bool:
    """Wait until the server is healthy; False if it has ended, or takes too long."""
    begin = time.monotonic()
    async with aiohttp.ClientSession() as session:
        while server.poll() is None and time.monotonic() - begin < START_S:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return True
            await asyncio.sleep(0.5)
    return False


async def complete(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> Answer:
    """One streamed completion."""
    begin = arrived = time.monotonic()
    first_s, gaps = 0.0, list[float]()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"])
            count = sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
            if not count:
                continue
            now = time.monotonic()
            if not first_s:
                first_s, count = now - begin, count - 1
                gaps += [0.0] * count
            else:
                gaps += [(now - arrived) / count] * count
            arrived = now
    return Answer(first_s, gaps, 1 + len(gaps))


async def load(url: str, bodies: Sequence[dict[str, object]], concurrency: int) -> Measured:
    """Send all requests, so many at a time."""
    waiting, done, failed = iter(bodies), list[Answer](), 0
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    connector = aiohttp.TCPConnector(limit=0)

    async def work(session: aiohttp.ClientSession) -> None:
        nonlocal failed
        for body in waiting:
            try:
                done.append(await complete(session, url, body))
            except (aiohttp.ClientError, RuntimeError, TimeoutError) as error:
                print(f"failed: {error}", file=sys.stderr)
                failed += 1

    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await asyncio.gather(*(complete(session, url, {**body, "max_tokens": 4}) for body in bodies))  # warm up
        begin = time.monotonic()
        await asyncio.gather(*(work(session) for _ in range(concurrency)))
        seconds = time.monotonic() - begin
    firsts, gaps = [one.first_s for one in done], [gap for one in done for gap in one.gaps_s]
    return Measured(sum(one.tokens for one in done) / seconds, in_ms(firsts), in_ms(gaps), failed)


def in_ms(seconds: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile, in milliseconds."""
    ordered = sorted(seconds) or [0.0]
    return 1e3 * statistics.median(ordered), 1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def requests(path: Path, count: int, tokens: int, temperature: float) -> list[dict[str, object]]:
    """Bodies of completion requests; each has a prompt of its own, so that no server's cache holds it whole. None has a
    seed: with seeds vLLM's CPU sampler raises in large batches (0.32, "CPU Generator does not use offset")."""
    prompts = itertools.cycle(str(prompt) for prompt in read_prompts(path))
    common = {"model": MODEL, "max_tokens": tokens, "temperature": temperature, "ignore_eos": True}
    more = {"stream": True, "return_token_ids": True}
    return [
        {**common, **more, "prompt": f"Request {i}. {prompt}"}
        for i, prompt in enumerate(itertools.islice(prompts, count))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default="vllm,vllm-backend,hf,auto", help=f"of {', '.join(SERVERS)}")
    parser.add_argument("--concurrency", default="16,256")
    parser.add_argument("--requests", type=int, help="default: as many as are open at a time")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--prompts", type=Path, default=Path("conf/prompts/chat.jsonl"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--port", type=int, default=8723)
    options = parser.parse_args()
    names = options.servers.split(",")
    if unknown := [name for name in names if name not in SERVERS]:
        parser.error(f"--servers: {unknown[0]!r} is not one of {', '.join(SERVERS)}")
    sizes = [int(size) for size in options.concurrency.split(",")]
    rounds: dict[tuple[int, str], list[Measured]] = {}
    for turn, name in itertools.product(range(options.rounds), names):
        with running(name, options.port, max(sizes)) as url:
            for size in sizes:
                count = options.requests or size
                bodies = requests(options.prompts, count, options.tokens, options.temperature)
                found = asyncio.run(load(url, bodies, size))
                rounds.setdefault((size, name), []).append(found)
                print(f"round {turn + 1}, {name}, {size} at a time: {found.tokens_per_s:.1f} tokens/s", file=sys.stderr)
    rows = []
    for (size, name), measured in sorted(rounds.items(), key=lambda item: (item[0][0], names.index(item[0][1]))):
        base = rounds[size, names[0]]
        ratio = statistics.median(
            one.tokens_per_s / other.tokens_per_s for one, other in zip(measured, base, strict=True)
        )
        middle = [
            statistics.median(column)
            for column in zip(*((one.tokens_per_s, *one.first_ms, *one.gap_ms) for one in measured), strict=True)
        ]
        rows.append((str(size), name, *(f"{value:.1f}" for value in middle), f"{ratio:.2f}"))
    columns = ("at a time", "server", "tokens/s", "first p50 ms", "p99", "between p50 ms", "p99", f"of {names[0]}")
    make_console().print(make_table(columns, rows, text=("server",)))
    return int(any(one.failed for measured in rounds.values() for one in measured))


if __name__ == "__main__":
    sys.exit(main())
