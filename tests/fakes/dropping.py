"""A verifier whose engine leaves one tensor of every update as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specactor_ray.actors.loops import VerifierActor
from specactor_ray.actors.process import ActorHost
from specactor_ray.actors.specs import ActorSpec
from specactor_ray.models.packed_linear import PackedLinear
from specactor_ray.target.hf import HfEngine

DROPPED = "model.layers.1.mlp.down_proj.weight"


class DroppingEngine(HfEngine):
    """Does not load `dropped`."""

    dropped = DROPPED

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        owner, _, kind = self.dropped.rpartition(".")
        module = self._model.model.get_submodule(owner)
        names = {"weight": "weight", "bias": "_bias"} if isinstance(module, PackedLinear) else {}
        kept = getattr(module, names.get(kind, kind))
        super().load_weights(version, {**state_dict, self.dropped: kept.clone()})


class _Host(ActorHost):
    def build_engine(self, spec: ActorSpec) -> HfEngine:
        return DroppingEngine.from_config(spec.config.target)


class DroppingVerifier(VerifierActor):
    """Hosts a `DroppingEngine`."""

    def __init__(self, spec: ActorSpec) -> None:
        super().__init__(spec, _Host())
