"""Work in a separate process: thread pools keep their initial size, and vLLM its first model."""

from __future__ import annotations

import multiprocessing
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


def run_in_child(measure: Callable[[W, Report], R], work: W, name: str, show: Report) -> R:
    """Return `measure(work, report)`, run in a fresh process; `show` is called here with its reports. The process does
    not receive the Ctrl-C of its terminal: it ends with this call. `name` is used in messages.

    Raises:
        UserError: `measure` raised it.
        SpecActorError: `measure` failed otherwise, or the process died.
    """
    context = multiprocessing.get_context("spawn")
    messages, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(measure, work, theirs), name=name, daemon=True)
    resource_tracker.ensure_running()  # its own start, at the first process, would unblock the signal again
    with blocked(signal.SIGINT):
        process.start()
    theirs.close()
    try:
        while True:
            kind, message = messages.recv()
            if kind == "result":
                result: R = message
                return result
            if kind == "error":
                raise message
            show(message)
    except EOFError:
        process.join(10.0)
        problem = f"died with exit code {process.exitcode} (killed for memory?); nothing was written"
        raise SpecActorError(f"the process {name} {problem}") from None
    finally:
        process.terminate()
        process.join(10.0)
        messages.close()


def _main(measure: Callable[[Any, Report], Any], work: Any, messages: Connection) -> None:
    try:
        messages.send(("result", measure(work, lambda report: messages.send(("report", report)))))
    except UserError as error:
        messages.send(("error", error))
    except Exception:  # noqa: BLE001 - shown by the parent
        name = multiprocessing.current_process().name
        messages.send(("error", SpecActorError(f"the process {name} failed:\n{traceback.format_exc()}")))
