"""`python -m tests.faults.soak`: a server under load for a while, whose draft actors are killed every minute.

Clients send the same requests again and again: whole, streamed, with sessions, as trainers do; some leave in the
middle, some continue an output that was cut off. Every few seconds the weights are replaced by equal ones. No request
may fail, each must give the tokens that it gave first, and memory must not grow. A line a minute; exit code 1 if that
does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from typing import Any

import httpx
import psutil
import ray

from specactor_ray import Rollout
from specactor_ray.config.load import from_mapping
from specactor_ray.core.console import make_console, say
from specactor_ray.serve.run import serving
from specactor_ray.serve.service import Service
from tests.tiny import tiny_draft, tiny_prompts, tiny_target

SETTINGS: dict[str, Any] = {
    "mode": "decoupled",
    "target": {"model": str(tiny_target()), "dtype": "float32", "max_batch": 8, "kv_cache_gb": 0.05, "replicas": 2},
    "drafters": [
        {"method": "draft_model", "model": str(tiny_draft()), "replicas": 1, "cores": 0.5},
        {"method": "ngram", "hosted": False, "replicas": 1, "cores": 0.5},
    ],
    "speculation": {"draft_wait_s": 0.0},
    "cluster": {"pin_cores": False},
}
CLIENTS, REQUESTS = 24, 60
KINDS = {"whole": 4, "stream": 4, "leave": 1, "proceed": 2, "trainer": 2}
"""How clients send requests, and how often."""
_PUSH_S = 15.0
"""Between two versions of the weights."""
_MOST_GROWTH = 1.15
"""Memory of the driver at the end, over that after a fifth of the time."""


class Load:
    """Clients that send requests until they are stopped."""

    def __init__(self, url: str, seed: int) -> None:
        self.counts, self.failures, self.stopped = Counter[str](), list[str](), False
        self._client = httpx.AsyncClient(base_url=url, timeout=300.0, limits=httpx.Limits(max_connections=None))
        self._rng, self._truth = random.Random(seed), dict[int, Any]()
        self._prompts = tiny_prompts(REQUESTS)

    async def run(self) -> None:
        async with self._client:
            await asyncio.gather(self._push_weights(), *(self._work() for _ in range(CLIENTS)))

    async def _work(self) -> None:
        while not self.stopped:
            number = self._rng.randrange(REQUESTS)
            kind = self._rng.choices(list(KINDS), list(KINDS.values()))[0]
            with self._counted(kind, number):
                await getattr(self, f"_{kind}")(number)

    async def _push_weights(self) -> None:
        while not self.stopped:
            with self._counted("weights", 0):
                await self._post("/update_weights", {"weight_dir": str(tiny_target())})
            await asyncio.sleep(_PUSH_S)

    @contextlib.contextmanager
    def _counted(self, kind: str, number: int) -> Any:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - counted, and shown
            self.failures.append(f"{kind} {number}: {type(error).__name__}: {error}")
        self.counts[kind] += 1

    def _body(self, number: int) -> dict[str, Any]:
        sampling = {"max_tokens": 20 + number, "seed": number, "temperature": float(number % 2)}
        session = f"session-{number % 7}"
        return {"prompt": self._prompts[number], "return_token_ids": True, "session": session, **sampling}

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        return (await self._client.post(path, json=body)).raise_for_status().json()

    async def _ids(self, number: int) -> list[int]:
        ids: list[int] = (await self._post("/tokenize", {"prompt": self._prompts[number]}))["tokens"]
        return ids

    def _check(self, number: int, tokens: list[int]) -> None:
        if self._truth.setdefault(number, tokens) != tokens:
            raise AssertionError(f"other tokens than the first time: {tokens} and {self._truth[number]}")

    async def _whole(self, number: int) -> None:
        answer = await self._post("/v1/completions", self._body(number))
        self._check(number, answer["choices"][0]["token_ids"])

    async def _stream(self, number: int, most: int | None = None) -> None:
        tokens, body = list[int](), {**self._body(number), "stream": True}
        async with self._client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    tokens += choice["token_ids"] or ()
                    if most is not None and len(tokens) >= most:
                        return  # the client leaves
        self._check(number, tokens)

    async def _leave(self, number: int) -> None:
        await self._stream(number, most=3)

    async def _proceed(self, number: int) -> None:
        """Cut an output off, and send prompt and output as a new prompt."""
        body = {**self._body(number), "prompt": await self._ids(number)}
        (cut,) = (await self._post("/v1/completions", {**body, "max_tokens": 7}))["choices"]
        tokens = cut["token_ids"]
        if cut["finish_reason"] == "length":
            more = {"prompt": [*body["prompt"], *tokens], "first_position": len(tokens), "max_tokens": 13 + number}
            tokens += (await self._post("/v1/completions", {**body, **more}))["choices"][0]["token_ids"]
        self._check(number, tokens)

    async def _trainer(self, number: int) -> None:
        params = {name: self._body(number)[name] for name in ("max_tokens", "seed", "temperature")}
        body = {"token_ids": await self._ids(number), "sampling_params": params}
        answer = await self._post("/inference/v1/generate", body)
        self._check(number, answer["choices"][0]["token_ids"])


def kill_drafter(rollout: Rollout, rng: random.Random) -> str:
    """Kill the process of one draft actor; its id."""
    rows = [row for row in rollout.status() if row["kind"] == "drafter" and row["phase"] == "ready"]
    if not rows:
        return "none is ready"
    row = rng.choice(rows)
    with contextlib.suppress(ProcessLookupError):
        os.kill(row["pid"], signal.SIGKILL)
    return str(row["id"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ray.init(address="local", num_cpus=6, include_dashboard=False, namespace="specactor", logging_level="ERROR")
    memory, console = list[float](), make_console()
    with Rollout(from_mapping(SETTINGS)) as rollout, serving(Service(rollout, "tiny")) as url:
        load = Load(url, options.seed)
        clients = threading.Thread(target=lambda: asyncio.run(load.run()), daemon=True)
        clients.start()
        begin, rng, driver = time.monotonic(), random.Random(options.seed), psutil.Process()
        while time.monotonic() - begin < 60.0 * options.minutes:
            time.sleep(min(60.0, max(1.0, 20.0 * options.minutes)))
            memory.append(driver.memory_info().rss / 2**20)
            minutes, killed = (time.monotonic() - begin) / 60.0, kill_drafter(rollout, rng)
            done = f"{load.counts.total()} requests {dict(load.counts)}, {len(load.failures)} failed"
            drafted = f"{rollout.metrics().drafted_tokens} drafted"
            say(console, f"{minutes:5.1f} min: {done}, driver {memory[-1]:.0f} MiB, {drafted}; killed {killed}")
        load.stopped = True
        clients.join(300.0)
        left = clients.is_alive()
    ray.shutdown()
    for failure in load.failures[:20]:
        say(console, f"failed: {failure}")
    early, late = memory[len(memory) // 5], max(memory[-2:])
    grew = late > _MOST_GROWTH * early
    say(console, f"memory of the driver: {early:.0f} MiB after a fifth, {late:.0f} at the end")
    return int(bool(load.failures) or left or grew)


if __name__ == "__main__":
    sys.exit(main())
