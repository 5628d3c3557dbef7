"""Work in a separate process: thread pools keep their initial size, and vLLM its first model."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from specactor_ray.core.errors import SpecActorError, UserError
from specactor_ray.core.signals import blocked

W = TypeVar("W")
R = TypeVar("R")
Report = Callable[[Any], None]


class Child:
    """A fresh process for calls one after the other. It does not receive the Ctrl-C of its terminal: it ends with
    `close`. `name` is used in messages."""

    def __init__(self, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._messages, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs,), name=name, daemon=True)
        resource_tracker.ensure_running()  # its own start, at the first process, would unblock the signal again
        with blocked(signal.SIGINT):
            self._process.start()
        theirs.close()

    def call(self, function: Callable[[W, Report], R], work: W, show: Report = lambda _: None) -> R:
        """Return `function(work, report)`, run in the process; `show` is called here with its reports.

        Raises:
            UserError: `function` raised it.
            SpecActorError: `function` failed otherwise, or the process died.
        """
        try:
            self._messages.send((function, work))
            while True:
                kind, message = self._messages.recv()
                if kind == "result":
                    result: R = message
                    return result
                if kind == "error":
                    raise message
                show(message)
        except (EOFError, ConnectionError):
            self._process.join(10.0)
            problem = f"died with exit code {self._process.exitcode} (killed for memory?); nothing was written"
            raise SpecActorError(f"the process {self._process.name} {problem}") from None

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join(10.0)
        self._messages.close()


def run_in_child(measure: Callable[[W, Report], R], work: W, name: str, show: Report) -> R:
    """`Child.call` in a process of its own."""
    with contextlib.closing(Child(name)) as child:
        return child.call(measure, work, show)


def _main(messages: Connection) -> None:
    with contextlib.suppress(EOFError):  # the parent has ended
        while True:
            received = messages.recv_bytes()
            try:
                function, work = pickle.loads(received)  # a module that cannot be imported is an error of the call
                messages.send(("result", function(work, lambda report: messages.send(("report", report)))))
            except UserError as error:
                messages.send(("error", error))
            except Exception:  # noqa: BLE001 - shown by the parent
                name = multiprocessing.current_process().name
                messages.send(("error", SpecActorError(f"the process {name} failed:\n{traceback.format_exc()}")))
