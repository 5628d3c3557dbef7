"""Refused configurations: a test has the key and what the fix must name; the sentences may change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from specactor_ray.core.errors import ConfigError


@contextmanager
def refused(key: str, *names: str) -> Iterator[pytest.ExceptionInfo[ConfigError]]:
    """What is inside raises a `ConfigError` of this key, whose text has these keys, values or names of packages."""
    with pytest.raises(ConfigError) as caught:
        yield caught
    assert caught.value.key == key, caught.value
    assert all(name in str(caught.value) for name in names), caught.value
