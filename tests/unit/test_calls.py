"""What a failed call tells: an error of this package, in the words of whoever raised it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from specactor_ray.cluster.calls import Calls, RayTransport, translate_ray_error
from specactor_ray.config.load import from_mapping
from specactor_ray.errors import ActorLostError, ModelLoadError, RemoteError
from specactor_ray.rollout.run_client import RunClient


def test_an_error_that_an_actor_raised_comes_as_it_was_without_a_traceback() -> None:
    raised = RayTaskError("start", "Traceback (most recent call last)", ModelLoadError("no such weights"))
    told = translate_ray_error(raised.as_instanceof_cause(), "start")
    assert type(told) is ModelLoadError and str(told) == "no such weights"


def test_any_other_error_names_what_was_asked_and_its_kind() -> None:
    raised = RayTaskError("start", "Traceback (most recent call last)", KeyError("x"))
    told = translate_ray_error(raised.as_instanceof_cause(), "start")
    assert type(told) is RemoteError and str(told).startswith("start: KeyError")


class LostTransport(RayTransport):
    """The actor of every call is gone."""

    def send(self, actor: Any, method: str, arguments: Sequence[Any]) -> Any:
        return object()

    def wait(self, references: Sequence[Any], timeout_s: float) -> set[Any]:
        return set(references)

    def take(self, reference: Any) -> Any:
        raise ActorLostError("its process ended")


def test_a_lost_controller_is_called_so() -> None:
    client = RunClient(from_mapping({"target": {"model": "m"}, "mode": "plain"}), "controller", Calls(LostTransport()))
    with pytest.raises(ActorLostError, match=r"the controller of the run is gone: its process ended"):
        client.status()
