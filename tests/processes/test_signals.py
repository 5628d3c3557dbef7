"""Interruptions wait for what they must not tear."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from gpu_check.child import Report, run_in_child
from specactor_ray.cli.live import status
from specactor_ray.cluster import connection
from specactor_ray.config.schema import ClusterConfig
from specactor_ray.core.signals import Terminated, ignore_signals, interruption, signals_deferred, sigterm_interrupts
from tests.tiny import tiny_target

REPOSITORY = Path(__file__).resolve().parents[2]
LINE = "interrupted; stopping ...\n"


@pytest.fixture(autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """As in a terminal; whoever runs the tests in the background may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "words"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
def test_a_signal_inside_shows_a_line_at_once_and_is_raised_at_the_end(
    number: signal.Signals, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    done = []

    @signals_deferred()
    def work() -> None:
        os.kill(os.getpid(), number)
        done.append(capfd.readouterr().err)

    with sigterm_interrupts():
        with pytest.raises(KeyboardInterrupt) as caught:
            work()
        assert interruption(caught.value) == words
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert done == [LINE] and not capfd.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt, Terminated])
def test_ctrl_c_is_the_end_of_a_watched_status_and_sigterm_is_not(
    error: type[KeyboardInterrupt], monkeypatch: pytest.MonkeyPatch
) -> None:
    def watch(*_: object) -> Iterator[object]:
        raise error

    monkeypatch.setattr("specactor_ray.rollout.operations.watch_run", watch)
    with pytest.raises(Terminated) if error is Terminated else nullcontext():
        status(watch=True)


def test_after_an_interruption_further_signals_change_nothing_until_the_end() -> None:
    with sigterm_interrupts():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        ignore_signals()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_does_not_tear_the_end_of_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def leave() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        done.append("all of it")

    monkeypatch.setattr(connection, "_join", lambda _config, held: held.callback(leave))
    monkeypatch.setattr(connection.ray, "get_runtime_context", Mock())
    there = ClusterConfig(address="127.0.0.1:1")
    with sigterm_interrupts(), pytest.raises(KeyboardInterrupt), connection.connect(there):
        pass
    assert done


def test_without_a_handler_in_python_sigterm_is_left_alone() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray leaves a handler of its own behind
    try:
        with signals_deferred():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_error_inside_is_not_hidden_by_a_signal() -> None:
    @signals_deferred()
    def work() -> float:
        os.kill(os.getpid(), signal.SIGTERM)
        return 1 / 0

    with sigterm_interrupts(), pytest.raises(ZeroDivisionError):
        work()


SENDER = """
import os, signal, sys

class Sender:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Sender())
"""
PROGRAM = """
from specactor_ray.models import loading
from specactor_ray.core.signals import Terminated, sigterm_interrupts

with sigterm_interrupts():
    try:
        loading.load_tokenizer({folder!r})
    except Terminated:
        sys.exit(0 if "torch._dynamo.convert_frame" in sys.modules else "an import was torn")
sys.exit("SIGTERM had no effect")
"""


def test_sigterm_never_tears_the_import_of_a_compiled_module() -> None:
    # triton, compiled with nanobind, is loaded within
    sender = SENDER.format(module="torch._dynamo", number=int(signal.SIGTERM))
    program = sender + PROGRAM.format(folder=str(tiny_target()))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "number"), [("typer", signal.SIGTERM), ("specactor_ray.trainer.run", signal.SIGINT)]
)
def test_a_signal_while_a_command_loads_ends_it_in_order(tmp_path: Path, module: str, number: signal.Signals) -> None:
    (tmp_path / "sitecustomize.py").write_text(SENDER.format(module=module, number=int(number)))
    done = subprocess.run(
        [sys.executable, "-m", "specactor_ray", "train", "data.path=none.jsonl"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", LINE)


def sees_interrupts(_work: None, _report: Report) -> bool:
    return signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_ctrl_c_is_the_parents_not_that_of_a_measuring_process() -> None:
    assert not run_in_child(sees_interrupts, None, "probe", lambda _: None)
    assert sees_interrupts(None, lambda _: None)
