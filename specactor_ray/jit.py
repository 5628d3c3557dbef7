"""Numba kernels whose on-disk cache several processes may fill at once.

Numba names compiled code by a running number and writes the index first. Two processes that compile two signatures of
one function at the same time can leave an index that gives one signature the other's machine code, and one that starts
after the source changed can load what the former source compiled to. Here each access holds a lock of the function's
own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache

from specactor_ray.files import locked


class LockedCache(FunctionCache):
    """An on-disk cache of compiled code that one process reads or writes at a time."""

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self._impl.locator.ensure_cache_path()
        with locked(Path(self.cache_path) / f"{self._impl.filename_base}.lock"):
            yield

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with self._lock():
            return super().load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        with self._lock():
            super().save_overload(sig, data)


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function without the interpreter or the GIL, cached on disk.

    Keep kernels that call each other in one file: the cache notices changes of the file a function is in, not of those
    it calls into.

    Args:
        options: Further options of `numba.njit`.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher = njit(nogil=True, error_model="numpy", **options)(function)
        if hasattr(dispatcher, "_cache"):  # not where NUMBA_DISABLE_JIT leaves the function as it is
            dispatcher._cache = LockedCache(dispatcher.py_func)
        return dispatcher

    return compiled
