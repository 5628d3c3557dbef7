"""Calls to a run: `status --watch` of one that is starting, and the error of one whose controller is gone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from specactor_ray.cluster.calls import Calls, RayTransport
from specactor_ray.config.load import from_mapping
from specactor_ray.core.errors import ActorLostError, ClusterError, InputError, NoRunError
from specactor_ray.rollout import run_client
from specactor_ray.rollout.run_client import RunClient


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What looks for the run find, one after the other; the last one again and again."""
    looks: list[Any] = []

    @contextlib.contextmanager
    def look(run: str | None, address: str) -> Iterator[Any]:
        del run, address
        one = looks.pop(0) if len(looks) > 1 else looks[0]
        if isinstance(one, Exception):
            raise one
        yield one

    monkeypatch.setattr(run_client, "_attached", look)
    monkeypatch.setattr(run_client, "SYSTEM", Clock())
    return looks


def test_a_run_that_is_starting_is_awaited(found: list[Any]) -> None:
    found += [ClusterError("no cluster"), NoRunError("no run"), ("run", None, None)]
    with contextlib.ExitStack() as held:
        assert run_client._attach_soon(held, None, "auto") == ("run", None, None)


def test_a_run_that_never_starts_is_an_error_after_a_minute(found: list[Any]) -> None:
    found.append(NoRunError("no run"))
    with pytest.raises(NoRunError), contextlib.ExitStack() as held:
        run_client._attach_soon(held, None, "auto")
    assert run_client.SYSTEM.now() == pytest.approx(60.0, abs=2.0)


@pytest.mark.parametrize(
    ("error", "address"), [(InputError("several runs; name one"), "auto"), (ClusterError("nobody answers"), "host:1")]
)
def test_what_time_does_not_mend_is_an_error_at_once(found: list[Any], error: Exception, address: str) -> None:
    found.append(error)
    with pytest.raises(type(error)), contextlib.ExitStack() as held:
        run_client._attach_soon(held, None, address)
    assert run_client.SYSTEM.now() == 0.0


class LostTransport(RayTransport):
    """The actor of every call is gone."""

    def send(self, actor: Any, method: str, arguments: Sequence[Any]) -> Any:
        return object()

    def wait(self, references: Sequence[Any], timeout_s: float) -> set[Any]:
        return set(references)

    def take(self, reference: Any, what: str = "the call") -> Any:
        raise ActorLostError("its process ended")


def test_a_lost_controller_is_called_so() -> None:
    client = RunClient(from_mapping({"target": {"model": "m"}, "mode": "plain"}), "controller", Calls(LostTransport()))
    with pytest.raises(ActorLostError, match=r"the controller of the run is gone: its process ended"):
        client.status()
