"""Environments for tests: imported by environment processes, some of them misbehaving on purpose."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from specactor_ray.rollout.prompts import Message
from specactor_ray.trainer.data import Task
from specactor_ray.trainer.environment import Calculator, Environment, Reply, Turn


class Echo(Environment):
    """Repeats what it has heard, with its seed, until it hears `bye`; each turn is worth its number. Other words make
    it hang, block, raise, die or return what is no reply."""

    def __init__(self, marks: str = "") -> None:
        self.marks, self.heard, self.seed = marks, list[str](), 0

    async def reset(self, task: Task, seed: int) -> list[Message]:
        self.seed = seed
        if task.metadata.get("reset") == "fails":
            raise RuntimeError("no board")
        return [{"role": "user", "content": f"{task.prompt} {seed % 97}"}]

    async def step(self, turn: Turn) -> Any:
        await asyncio.sleep(0)
        self.heard.append(turn.text)
        self._misbehave(turn.text)
        if turn.text in BAD_REPLIES:
            return BAD_REPLIES[turn.text]
        if turn.text == "unpicklable":
            self.lock = threading.Lock()
        if turn.text == "scored":
            return Reply(reward=turn.score(), done=True)
        if turn.text == "bye":
            return Reply(reward=float(turn.number), done=True)
        return Reply([{"role": "user", "content": f"{self.seed % 97}: {' '.join(self.heard)}"}], float(turn.number))

    def _misbehave(self, text: str) -> None:
        if text == "hangs":
            if self.marks:
                (Path(self.marks) / f"hangs-{self.seed}").touch()
            while True:
                time.sleep(0.01)
        if text == "raises":
            raise RuntimeError("no such move")
        mark = Path(self.marks) / str(self.seed)
        if text == "dies" or (text == "dies once" and not mark.exists()):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        if self.marks:
            (Path(self.marks) / f"closed-{self.seed}-{len(self.heard)}").touch()


BAD_REPLIES: dict[str, Any] = {
    "none": None,
    "text": "go on",
    "no messages": Reply(),
    "no text": Reply([{"role": "user", "content": None}]),
    "half a message": Reply([{"role": "user"}]),
    "a dict": Reply({"role": "user", "content": "x"}),  # type: ignore[arg-type]
    "as the model": Reply([{"role": "assistant", "content": "x"}]),
    "no number": Reply(done=True, reward="1.0"),  # type: ignore[arg-type]
    "not finite": Reply(done=True, reward=float("nan")),
}


class Sums(Calculator):
    """The calculator, which a sample calls once or twice, by its seed: with `3 plus 4`, which the tiny models say, or
    with a sum of its own. Each call is worth a quarter."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    async def reset(self, task: Task, seed: int) -> Any:
        self.calls = 1 + seed % 2
        return await super().reset(task, seed)

    async def step(self, turn: Turn) -> Reply:
        found = re.search(r"(\d+) plus (\d+)", turn.text)
        first, second = found.groups() if found else (turn.number, 3)
        text = f"<calc>{first} + {second}</calc>" if turn.number < self.calls else turn.text
        reply = await super().step(replace(turn, text=text))
        return replace(reply, reward=reply.reward + 0.25 * self.calls) if reply.done else reply


class Locked(Echo):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Speechless(Echo):
    """Reads no output."""

    async def step(self, turn: Turn) -> Any:
        raise KeyError(turn.text)


class NoStep:
    def reset(self) -> None: ...
