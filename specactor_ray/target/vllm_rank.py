"""Main function of a rank of vLLM's CPU build in a process of its own, which unpickles it before anything of vLLM: so
importing this module switches on the interpreter."""

from __future__ import annotations

import contextlib
from typing import Any

from specactor_ray.target.vllm_cpu import replaced, use_interpreter

use_interpreter()


def rank_main(*args: Any, **options: Any) -> None:
    """`WorkerProc.worker_main` of vLLM."""
    from vllm.v1.executor.multiproc_executor import WorkerProc

    WorkerProc.worker_main(*args, **options)


def ranks_with_interpreter() -> contextlib.AbstractContextManager[None]:
    """Let ranks in other processes that start meanwhile call `use_interpreter`, too."""
    from vllm.v1.executor.multiproc_executor import WorkerProc

    return replaced(WorkerProc, worker_main=rank_main)
