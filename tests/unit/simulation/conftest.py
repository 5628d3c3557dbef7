"""What simulated actors log about faults is of no interest here, and what others log is."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator

import pytest

from specactor_ray.simulation.cluster import silence


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    silence()
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of simulations begin at once, without imports."""
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
