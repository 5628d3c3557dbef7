"""Trainer ranks in processes forked from one that has imported everything: a rank starts in milliseconds, not seconds.

The ranks are `TrainerActor`s and who calls them is `TrainerRanks`, as in production; pipes stand in for Ray.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

from specactor_ray.cluster.calls import Calls
from specactor_ray.config.schema import Config
from specactor_ray.core.errors import ActorLostError, RemoteError, SpecActorError
from specactor_ray.trainer.trainer_ranks import TrainerRanks
from tests.fakes.hand_transport import LocalObjects
from tests.ports import free_port

HEARTBEAT = "heartbeat"
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.fakes.forked_rank"])


class ForkedRank:
    """One rank's process, with a pipe for its work and one for its heartbeat."""

    def __init__(self, prepare: Callable[[], None] | None = None) -> None:
        self.work, work = _forks.Pipe()
        self.heartbeat, heartbeat = _forks.Pipe()
        self.process = _forks.Process(target=serve_rank, args=(work, heartbeat, prepare), daemon=True)
        self.process.start()
        work.close()
        heartbeat.close()

    def end(self) -> None:
        self.process.kill()
        self.process.join()


@dataclass(eq=False)
class Sent:
    """The answer to a call."""

    pipe: Connection
    number: int
    answers: dict[tuple[Connection, int], Any]

    def result(self, what: str) -> Any:
        if (self.pipe, self.number) not in self.answers:
            raise ActorLostError(f"{what}: its process ended")
        answer = self.answers.pop((self.pipe, self.number))
        if isinstance(answer, SpecActorError):
            raise answer
        return answer


class PipeTransport(LocalObjects):
    """A `Transport` over pipes. What is put into its store is sent along with every call that has it."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._answers: dict[tuple[Connection, int], Any] = {}
        self._lost: set[Connection] = set()

    def send(self, actor: ForkedRank, method: str, arguments: Sequence[Any]) -> Sent:
        sent = Sent(actor.heartbeat if method == HEARTBEAT else actor.work, next(self._numbers), self._answers)
        try:
            sent.pipe.send_bytes(pickle.dumps((sent.number, method, tuple(arguments))))
        except OSError:
            self._lost.add(sent.pipe)
        return sent

    def wait(self, answers: Sequence[Sent], timeout_s: float) -> set[Sent]:
        if not (done := self._done(answers)):
            wait_for([sent.pipe for sent in answers], None if timeout_s == float("inf") else timeout_s)
            done = self._done(answers)
        return done

    def _done(self, answers: Sequence[Sent]) -> set[Sent]:
        for sent in answers:
            try:
                while sent.pipe not in self._lost and sent.pipe.poll():
                    number, answer = pickle.loads(sent.pipe.recv_bytes())
                    self._answers[sent.pipe, number] = answer
            except (EOFError, OSError):
                self._lost.add(sent.pipe)
        return {sent for sent in answers if (sent.pipe, sent.number) in self._answers or sent.pipe in self._lost}


def serve_rank(work: Connection, heartbeat: Connection, prepare: Callable[[], None] | None) -> None:
    """What the process of a rank does: carries out one call after the other, and answers heartbeats meanwhile."""
    from specactor_ray.actors.trainer import TrainerActor

    if prepare is not None:
        prepare()
    actor = TrainerActor("WARNING", Calls(PipeTransport()))

    def serve(pipe: Connection) -> None:
        while True:
            number, method, arguments = pickle.loads(pipe.recv_bytes())
            try:
                answer: Any = getattr(actor, method)(*arguments)
            except SpecActorError as error:
                answer = error
            except Exception as error:  # noqa: BLE001 - an actor survives it too
                answer = RemoteError(f"{method}: {type(error).__name__}: {error}")
            pipe.send_bytes(pickle.dumps((number, answer)))

    threading.Thread(target=serve, args=(heartbeat,), daemon=True).start()
    try:
        serve(work)
    except (EOFError, OSError):
        os._exit(0)  # whoever called is gone


class ForkedRanks(TrainerRanks):
    """The ranks of a configuration, as `trainer_group` starts them. `prepare` is called first in each process."""

    def __init__(
        self, config: Config, checkpoint: Path | None = None, prepare: Callable[[], None] | None = None
    ) -> None:
        self.processes = [ForkedRank(prepare) for _ in range(config.trainer.ranks)]
        super().__init__(self.processes, Calls(PipeTransport()), config.trainer.stall_timeout_s)
        try:
            self.start(config, checkpoint, "127.0.0.1", free_port(), threads=1)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> ForkedRanks:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.end()


def run_forked(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in a forked process of its own; what it raises fails the test."""
    result, answer = _forks.Pipe(duplex=False)
    process = _forks.Process(target=_answer, args=(answer, function, arguments), daemon=True)
    process.start()
    answer.close()
    try:
        problem = result.recv() if result.poll(250) else "no answer"
    except EOFError:
        problem = "the process ended"
    process.kill()
    process.join()
    assert not problem, problem


def _answer(answer: Connection, function: Callable[..., None], arguments: Sequence[Any]) -> None:
    try:
        function(*arguments)
        answer.send("")
    except BaseException:  # noqa: BLE001 - a failed assertion among others
        answer.send(traceback.format_exc())
