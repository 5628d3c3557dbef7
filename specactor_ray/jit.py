"""Numba kernels whose on-disk cache several processes may fill at once.

Compiled code is kept by what its sources contain, not by where they are: another checkout, and what a Ray job uploads,
finds it. `$NUMBA_CACHE_DIR` replaces the folder.

Numba names compiled code by a running number and writes the index first. Two processes that compile two signatures of
one function at the same time can leave an index that gives one signature the other's machine code, and one that starts
after the source changed can load what the former source compiled to. Here one process at a time loads or compiles a
function: what several need at their start, such as verifiers, is compiled once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.sigutils import normalize_signature
from numba.types import CPointer, void

from specactor_ray.files import cache_dir, locked


class LockedCache(FunctionCache):
    """An on-disk cache of compiled code, to be used inside `held`.

    Args:
        function: The function as written.
        sources: Other modules whose change makes what was compiled stale.
    """

    def __init__(self, function: Callable[..., Any], sources: Sequence[ModuleType] = ()) -> None:
        super().__init__(function)
        files = (inspect.getfile(function), *(str(module.__file__) for module in sources))
        self._folder = _root() / f"{function.__module__}-{_digest(files)}"
        self._cache_path = str(self._folder)
        self._impl._locator = _Locator(self._folder)
        self._cache_file = IndexDataCacheFile(self._cache_path, self._impl.filename_base, "")
        self._is_held = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the cache against other processes; reentrant. The lock of numba comes first: a kernel that compiles
        another one holds it."""
        self._impl.locator.ensure_cache_path()
        path = self._folder / f"{self._impl.filename_base}.lock"
        with global_compiler_lock, contextlib.nullcontext() if self._is_held else locked(path):
            before, self._is_held = self._is_held, True
            try:
                yield
            finally:
                self._is_held = before


class _Locator:
    """What numba asks for the folder of a cache."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def ensure_cache_path(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)


@functools.cache
def _root() -> Path:
    """The folder of all caches: the first that can be written to."""
    places = [Path(place) for place in [os.environ.get("NUMBA_CACHE_DIR")] if place]
    places += [cache_dir() / "kernels", Path(tempfile.gettempdir()) / f"specactor_ray-{os.getuid()}" / "kernels"]
    for place in places:
        with contextlib.suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            if os.access(place, os.W_OK):
                return place
    raise OSError(f"none of {', '.join(map(str, places))} can be written to; set NUMBA_CACHE_DIR to a folder that can")


@functools.cache
def _digest(files: tuple[str, ...]) -> str:
    """Of what files contain."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:16]


def kernel(sources: Sequence[ModuleType] = (), **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function without the interpreter or the GIL, cached on disk.

    Keep kernels that call each other in one file: the cache notices changes of the file a function is in and of
    `sources`, not of others it calls into.

    Args:
        sources: Further modules that the function is made of.
        options: Further options of `numba.njit`.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher = njit(nogil=True, error_model="numpy", **options)(function)
        if hasattr(dispatcher, "_cache"):  # not where NUMBA_DISABLE_JIT leaves the function as it is
            dispatcher._cache = cache = LockedCache(dispatcher.py_func, sources)
            dispatcher.compile = cache.held()(dispatcher.compile)
        return dispatcher

    return compiled


class CFunction:
    """Compiled code `void (void *)`. `address` is its place, `call` takes the bytes that it is given a pointer to."""

    def __init__(self, code: CFunc) -> None:
        self._code, self.address = code, code.address
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(code.address)


def c_function(given: Any, sources: Sequence[ModuleType] = ()) -> Callable[[Callable[..., Any]], CFunction]:
    """Compile a function of one pointer for callers in C, cached on disk as a `kernel` is.

    Args:
        given: Type of what the pointer leads to.
        sources: As of `kernel`.
    """

    def compiled(function: Callable[..., Any]) -> CFunction:
        code = CFunc(function, normalize_signature(void(CPointer(given))), {}, {"nogil": True, "error_model": "numpy"})
        code._cache = cache = LockedCache(function, sources)
        with cache.held():
            code.compile()
        return CFunction(code)

    return compiled
