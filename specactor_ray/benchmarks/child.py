"""Measuring in a process of its own: thread pools keep the size they started with, and vLLM its first model."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from specactor_ray.errors import SpecActorError, UserError

W = TypeVar("W")
R = TypeVar("R")
Report = Callable[[Any], None]


def run_in_child(measure: Callable[[W, Report], R], work: W, name: str, show: Report) -> R:
    """Run a function of a module in a fresh process.

    Args:
        measure: Called as `measure(work, report)` there; whatever it reports is shown here.
        work: Its argument; it travels there.
        name: Of the process, for messages.
        show: Takes the reports.

    Returns:
        What it returned.

    Raises:
        UserError: It raised one.
        SpecActorError: It failed otherwise, or the process died.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(measure, work, theirs), name=name, daemon=True)
    with _interrupts_blocked():
        process.start()
    theirs.close()
    try:
        while True:
            kind, content = ours.recv()
            if kind == "progress":
                show(content)
            elif kind == "error":
                raise content
            else:
                result: R = content
                return result
    except EOFError:
        process.join(10.0)
        raise SpecActorError(
            f"the process {name} died with exit code {process.exitcode} (killed for memory?); nothing was written"
        ) from None
    finally:
        process.terminate()
        process.join(10.0)
        ours.close()


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """A process that is started inside does not see the Ctrl-C of its terminal: its parent ends it."""
    resource_tracker.ensure_running()  # its own start, at the first process, would unblock the signal again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _main(measure: Callable[[Any, Report], Any], work: Any, channel: Any) -> None:
    try:
        channel.send(("done", measure(work, lambda what: channel.send(("progress", what)))))
    except UserError as error:
        channel.send(("error", error))
    except Exception:  # noqa: BLE001 - the parent shows it
        channel.send(("error", SpecActorError(f"measuring failed:\n{traceback.format_exc()}")))
