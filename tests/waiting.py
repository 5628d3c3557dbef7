"""Waiting for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], what: str, limit_s: float = 120.0) -> Any:
    """The first true value of the condition."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(0.1)
    return value
