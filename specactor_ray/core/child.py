"""Work in separate processes: thread pools keep their initial size, and vLLM its first model."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Self, TypeVar

from specactor_ray.core.errors import SpecActorError, UserError
from specactor_ray.core.signals import blocked

W = TypeVar("W")
R = TypeVar("R")
Report = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Done:
    """Last message of a child, with the result of its function."""

    result: Any


class Child:
    """A fresh process that calls `run(work, channel)`, a function of a module. It does not receive the Ctrl-C of its
    terminal: its parent ends it. `name` is used in messages."""

    def __init__(self, run: Callable[[W, Connection], Any], work: W, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.channel, theirs = context.Pipe()
        """Connection to the function, in both directions."""
        self._process = context.Process(target=_main, args=(run, work, theirs), name=name, daemon=True)
        resource_tracker.ensure_running()  # its own start, at the first process, would unblock the signal again
        with blocked(signal.SIGINT):
            self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()

    def receive(self) -> Any:
        """The next message of the function; a `Done` once it has returned. Raises the function's UserError, and
        SpecActorError if it failed otherwise or the process died."""
        try:
            message = self.channel.recv()
        except EOFError:
            self._process.join(10.0)
            problem = f"died with exit code {self._process.exitcode} (killed for memory?); nothing was written"
            raise SpecActorError(f"the process {self.name} {problem}") from None
        if isinstance(message, SpecActorError):
            raise message
        return message

    def end(self) -> None:
        """End the process in any state."""
        self._process.terminate()
        self._process.join(10.0)
        self.channel.close()


def run_in_child(measure: Callable[[W, Report], R], work: W, name: str, show: Report) -> R:
    """Return `measure(work, report)`, run in a fresh process; `show` is called here with its reports. Raises as
    `Child.receive`."""
    with Child(_measure, (measure, work), name) as child:
        while not isinstance(message := child.receive(), Done):
            show(message)
    result: R = message.result
    return result


def _measure(task: tuple[Callable[[Any, Report], Any], Any], channel: Connection) -> Any:
    measure, work = task
    return measure(work, channel.send)


def _main(run: Callable[[Any, Connection], Any], work: Any, channel: Connection) -> None:
    try:
        channel.send(Done(run(work, channel)))
    except UserError as error:
        channel.send(error)
    except Exception:  # noqa: BLE001 - shown by the parent
        name = multiprocessing.current_process().name
        channel.send(SpecActorError(f"the process {name} failed:\n{traceback.format_exc()}"))
