"""The thread that makes and runs the loop of an actor."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from specactor_ray.actors.loops import LoopActor
from specactor_ray.actors.process import ActorHost
from specactor_ray.actors.specs import VERIFIER, ActorSpec
from specactor_ray.config.schema import Config
from specactor_ray.core.errors import ModelLoadError


class Host(ActorHost):
    def configure(self, *_arguments: Any) -> None:
        pass


class Recorder(LoopActor[Any]):
    """Its own loop."""

    def __init__(self, problem: str = "") -> None:
        super().__init__(ActorSpec("a", VERIFIER, Config()), Host())
        self.threads: list[int] = []
        self.ended, self._problem = threading.Event(), problem

    def _make_loop(self) -> Any:
        if self._problem:
            raise ModelLoadError(self._problem)
        self.threads.append(threading.get_ident())
        return self

    def run(self) -> None:
        self.threads.append(threading.get_ident())
        self.ended.wait(10.0)


def test_a_loop_is_made_once_in_the_thread_that_runs_it() -> None:
    actor = Recorder()
    with pytest.raises(RuntimeError, match="a was not started"):
        actor.forget_history()
    for _ in range(2):
        actor.start()
    actor.ended.set()
    assert len(set(actor.threads)) == 1 and actor.threads[0] != threading.get_ident()


def test_what_making_the_loop_raised_reaches_every_caller() -> None:
    actor = Recorder("no such model")
    for _ in range(2):
        with pytest.raises(ModelLoadError, match="no such model"):
            actor.start()
    actor.stop()
