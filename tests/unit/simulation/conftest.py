"""What simulated actors log about faults is of no interest here, and what others log is."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from specactor_ray.simulation.cluster import silence


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    silence()
    yield
    logging.disable(logging.NOTSET)
