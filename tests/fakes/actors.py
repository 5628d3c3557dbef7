"""Actors with the interface of the real ones and no model: real processes that can be told to misbehave."""

from __future__ import annotations

import os
from typing import Any

from specactor_ray.core.errors import ModelLoadError


class FakeActor:
    """Records what it is told. Its model's name says how it starts: `broken` raises, `crash` ends the process."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self._told: list[str] = []

    def start(self) -> dict[str, Any]:
        spec = self.spec
        model = spec.drafters[spec.key].model if spec.key in spec.drafters else spec.config.target.model
        if model == "broken":
            raise ModelLoadError("no such weights: broken")
        if model == "crash":
            os._exit(1)
        return {"pid": os.getpid(), "vocab_size": None}

    def ping(self) -> dict[str, Any]:
        return {}

    def told(self) -> list[str]:
        """Ids of the peers it was told last."""
        return self._told

    def stop(self) -> None: ...


class FakeVerifier(FakeActor):
    def set_drafters(self, _version: int, endpoints: list[Any]) -> None:
        self._told = [endpoint.actor_id for endpoint in endpoints]


class FakeDrafter(FakeActor):
    def set_verifiers(self, _version: int, handles: dict[str, Any]) -> None:
        self._told = list(handles)
