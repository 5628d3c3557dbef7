"""`vllm.LLM` as vLLM ships it, for comparisons."""

from __future__ import annotations

import os
from typing import Any

from specactor_ray.config.schema import TargetConfig

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
}


def stock_llm(config: TargetConfig, **arguments: Any) -> Any:
    """`vllm.LLM` with the settings of a section `target`, or with `arguments` in their place, and its engine core in
    this process. Choices that the product's engine has made in the environment are dropped."""
    os.environ |= _ENVIRONMENT
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "TRITON_INTERPRET"):
        os.environ.pop(name, None)
    from vllm import LLM

    from specactor_ray.target.vllm_cpu import kernel_scan_without_llvmlite

    settings = {
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_batch,
        "max_num_batched_tokens": config.max_step_tokens,
        "enforce_eager": not config.compiled,
        "generation_config": "vllm",
        "use_tqdm_on_load": False,
    }
    with kernel_scan_without_llvmlite():
        return LLM(**settings | arguments | config.engine_arguments)
