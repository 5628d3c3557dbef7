"""Numba kernels with an on-disk cache that several processes may fill at once.

Compiled code is cached by the content of its sources, not by their path: another checkout, and the code that a Ray job
uploads, uses it. `$NUMBA_CACHE_DIR` replaces the folder.

One process at a time loads or compiles a function. Otherwise two processes that compile two signatures of it can leave
an index that gives one signature the other's machine code, since Numba names compiled code by a running number and
writes the index first. So code that several processes need at their start, such as verifiers, is compiled once.
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
from types import ModuleType, SimpleNamespace
from typing import Any

from filelock import FileLock
from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.sigutils import normalize_signature
from numba.types import CPointer, void

from specactor_ray.core.files import cache_dir

_caches: set[Path] = set()
"""Folders for the compiled code of the modules that this process has imported."""


class LockedCache(FunctionCache):  # type: ignore[misc]  # numba has no types
    """An on-disk cache of compiled code, for use inside `held`; a change of `sources` invalidates the code."""

    def __init__(self, function: Callable[..., Any], sources: Sequence[ModuleType] = ()) -> None:
        super().__init__(function)
        files = (inspect.getfile(function), *(str(module.__file__) for module in sources))
        self._folder = _root() / f"{function.__module__}-{_digest(files)}"
        self._cache_path = str(self._folder)
        _caches.add(self._folder)
        make_folder = functools.partial(self._folder.mkdir, parents=True, exist_ok=True)
        self._impl._locator = SimpleNamespace(ensure_cache_path=make_folder)
        self._cache_file = IndexDataCacheFile(self._cache_path, self._impl.filename_base, "")
        self._is_held = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock of the cache against other processes; reentrant. Numba's lock must be taken first: a kernel
        that compiles another one holds it."""
        self._impl.locator.ensure_cache_path()
        path = self._folder / f"{self._impl.filename_base}.lock"
        with global_compiler_lock, contextlib.nullcontext() if self._is_held else FileLock(path):
            before, self._is_held = self._is_held, True
            try:
                yield
            finally:
                self._is_held = before


def is_cold() -> bool:
    """Whether none of the imported modules' kernels has been compiled on this machine."""
    return not any(folder.exists() for folder in _caches)


@functools.cache
def _root() -> Path:
    """The folder of all caches: the first writable one."""
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
    """Digest of the content of files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:16]


def kernel(sources: Sequence[ModuleType] = (), **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function without the interpreter or the GIL, by `numba.njit` with `options`, cached on disk.

    Keep kernels that call each other in one file: the cache detects changes of the function's file and of the modules
    in `sources`, not of other files with functions that it calls.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher = njit(nogil=True, error_model="numpy", **options)(function)
        if hasattr(dispatcher, "_cache"):  # it has none with NUMBA_DISABLE_JIT
            dispatcher._cache = cache = LockedCache(dispatcher.py_func, sources)
            dispatcher.compile = cache.held()(dispatcher.compile)
        return dispatcher

    return compiled


class CFunction:
    """Compiled code `void (void *)`. `address` is its address, `call` takes the bytes to which it gets a pointer."""

    def __init__(self, code: CFunc) -> None:
        self._code, self.address = code, code.address
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(code.address)


def c_function(given: Any, sources: Sequence[ModuleType] = ()) -> Callable[[Callable[..., Any]], CFunction]:
    """Compile a function of one pointer to `given` for callers in C, cached on disk like a `kernel`."""

    def compiled(function: Callable[..., Any]) -> CFunction:
        code = CFunc(function, normalize_signature(void(CPointer(given))), {}, {"nogil": True, "error_model": "numpy"})
        code._cache = cache = LockedCache(function, sources)
        with cache.held():
            code.compile()
        return CFunction(code)

    return compiled
