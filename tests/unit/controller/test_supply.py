"""The resources that a message shows are those before the run's own placement groups."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from specactor_ray.actors.specs import VERIFIER
from specactor_ray.cluster.backend import NodeSupply
from specactor_ray.config.load import from_mapping
from specactor_ray.controller.fleet import Fleet
from specactor_ray.controller.reconcile import ReplacementLimits


def test_the_supply_is_read_before_groups_are_requested(caplog: pytest.LogCaptureFixture) -> None:
    free, backend = {"CPU": 2.0}, Mock()
    backend.supply.side_effect = lambda: [NodeSupply("node", "192.0.2.1", {"CPU": 2.0}, dict(free))]
    backend.request.side_effect = lambda _name, _demand: free.update(CPU=free["CPU"] - 1.0)
    backend.resolve.return_value, backend.suffix.return_value = None, "0000"
    backend.calls.clock.now.return_value = 0.0
    config = from_mapping({"mode": "decoupled", "drafters": [{"method": "ngram", "hosted": False}]})
    fleet = Fleet(config, "run", backend, ReplacementLimits(), None)
    fleet.reconcile({VERIFIER: 1, "ngram": 1})
    assert free["CPU"] == 0.0
    backend.calls.clock.now.return_value = 5.0
    fleet.settle_pending()
    assert "not placed on the cluster yet" in caplog.text and "2 CPU, 0 GPU, free 2 CPU" in caplog.text
