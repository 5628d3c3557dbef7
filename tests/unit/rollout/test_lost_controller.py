"""What a run whose controller is gone tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specactor_ray.cluster.calls import Calls, RayTransport
from specactor_ray.config.load import from_mapping
from specactor_ray.core.errors import ActorLostError
from specactor_ray.rollout.run_client import RunClient


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
