"""vLLM's installation and version, the arguments of its engine, its CUDA graphs, and what its ranks leave outside of
their processes. vLLM is not imported."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.errors import ConfigError, did_you_mean
from specactor_ray.core.leftovers import (
    SHARED_MEMORY,
    make_owned_folder,
    mapped_segments,
    note_segments,
    remove_abandoned,
)
from specactor_ray.core.upstream import VLLM
from specactor_ray.target.vllm_cpu import use_interpreter

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

KEY = "specactor"
"""Key of this package's data in vLLM's parameters: `extra_args` of a request, `additional_config` of an engine."""
_GRAPH_ARGUMENTS = {"compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "optimization_level"}
"""Arguments of vLLM's engine that determine graphs; if a user sets one of them, none is added."""
LONGEST_WARM_UP = 4
"""Tokens of the longest request of vLLM's warm-up on GPUs, in units of 2 + the most drafts of a request."""
WEIGHTS_FILE = "model.safetensors"
_RECORD, _WEIGHTS = "specactor-ranks-", "specactor-weights-"


def require_vllm() -> str:
    """The installed version of vLLM; log and summary name one that is untested. ConfigError: it is missing, or lacks a
    part that the engine uses."""
    if lacking := VLLM.lacking():
        fix = f"on GPUs {VLLM.install}, on CPUs run scripts/install-vllm-cpu; or use hf."
        raise ConfigError("target.backend", f"{lacking}.", fix)
    VLLM.note_untested(logger)
    _, version = VLLM.installed() or ("", "")
    return version


def require_engine_arguments(names: Iterable[str]) -> None:
    """Refuse names that are not arguments of the installed vLLM's engine with a ConfigError."""
    known = VLLM.fields("vllm.engine.arg_utils", "EngineArgs")
    for name in names:
        if name not in known:
            key, hint = f"target.engine_arguments.{name}", did_you_mean(name, known)
            raise ConfigError(key, f"vLLM's EngineArgs has no such field.{hint}", "see `vllm serve --help`.")


def require_room(target: TargetConfig, window: int) -> None:
    """Refuse limits too small for `window` drafts of a request, 0 for none, with a ConfigError: vLLM admits a request
    with 1 + `window` positions beside all others that run, and its warm-up on GPUs reads prompts of `window` + 2."""
    least, shortest = max(window + 2, target.max_batch + window), LONGEST_WARM_UP * (window + 2)
    if window and target.max_step_tokens < least:
        problem = f"{target.max_step_tokens} positions a step are too few for a request with {window} drafts"
        problem += f" beside {target.max_batch - 1} others." if target.max_batch > 1 else "."
        fix = f"use {least} or more, or a smaller target.max_batch or speculation.window."
        raise ConfigError("target.max_step_tokens", problem, fix)
    if window and target.gpus and (target.max_model_len or shortest) < shortest:
        problem = f"{target.max_model_len} tokens are too few: vLLM's warm-up writes {shortest} with {window} drafts."
        fix = f"use {shortest} or more, or a smaller speculation.window."
        raise ConfigError("target.max_model_len", problem, fix)


def require_whole_heads(target: TargetConfig, text: Any) -> None:
    """Check that heads divide among ranks: vLLM gives every rank whole heads; key/value heads may be copied instead."""
    from specactor_ray.models.shapes import key_value_heads

    ranks, heads, shared = target.tensor_parallel, int(text.num_attention_heads), key_value_heads(text)
    fits = [n for n in range(1, heads + 1) if heads % n == 0 and (shared % n == 0 or n % shared == 0)]
    if ranks not in fits:
        problem = f"{ranks} ranks cannot share {heads} attention heads and {shared} key/value heads evenly."
        raise ConfigError("target.tensor_parallel", problem, f"use one of {', '.join(map(str, fits))}.")


def engine_arguments(config: TargetConfig, max_drafts: int) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs` for a section `target` with a data type and a cache size. `max_drafts`: most
    draft tokens of a request in one step, 0 without speculation."""
    import torch

    from specactor_ray.core.device import device_bytes
    from specactor_ray.models.loading import locate_model
    from specactor_ray.models.shapes import GIB
    from specactor_ray.target.sizes import beside_the_cache

    source, revision = locate_model(config.model)
    cache, step_tokens = int(config.kv_cache_gb * GIB), max(config.max_step_tokens, config.max_batch)
    states = {"hidden_layers": list(config.hidden_layers), "record_margins": config.record_margins}
    arguments: dict[str, Any] = {
        "model": str(source),
        "revision": revision,
        "code_revision": revision,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len or _context_by_positions(config),
        "max_num_seqs": config.max_batch,
        "max_num_batched_tokens": step_tokens,
        "kv_cache_memory_bytes": cache,
        "trust_remote_code": config.trust_remote_code,
        "skip_tokenizer_init": True,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        **({"disable_hybrid_kv_cache_manager": True} if config.hidden_layers else {}),  # no layer drops old tokens
        "async_scheduling": True,
        "enforce_eager": not config.compiled,
        "tensor_parallel_size": config.tensor_parallel,
        "distributed_executor_backend": "uni" if config.tensor_parallel == 1 else "mp",
        "generation_config": "vllm",
        "use_tqdm_on_load": False,
        "enable_sleep_mode": torch.cuda.is_available(),  # frees nothing on CPUs
        "disable_log_stats": True,
        "worker_cls": "specactor_ray.target.vllm_worker.KeyedWorker",
        "additional_config": {KEY: states},
    }
    if config.gpus:
        # Share of memory that must be free when vLLM starts; 0.92 by default.
        arguments["gpu_memory_utilization"] = min(1.0, (beside_the_cache(config) + cache) / device_bytes())
    if max_drafts:
        # A method of the V2 runner without a model; the worker replaces its speculator.
        speculation = {"method": "ngram_gpu", "num_speculative_tokens": max_drafts}
        arguments["speculative_config"] = {**speculation, "prompt_lookup_min": 2, "prompt_lookup_max": 2}
    captured = torch.cuda.is_available() and config.compiled and max_drafts
    if captured and not _GRAPH_ARGUMENTS & config.engine_arguments.keys():
        arguments["cudagraph_capture_sizes"] = capture_sizes(min(config.max_batch * (1 + max_drafts), step_tokens))
    return {**arguments, **config.engine_arguments}


def _context_by_positions(config: TargetConfig) -> int | None:
    """The model's whole context if its positions depend on a length, as in `fix_positions`: vLLM's default is the
    original length for `longrope` (short factors), and beyond its angles for `dynamic`. None: vLLM chooses."""
    from specactor_ray.models.loading import load_model_config
    from specactor_ray.models.rotary import depends_on_length
    from specactor_ray.models.shapes import context_of

    model = load_model_config(config.model, trust_remote_code=config.trust_remote_code)
    return context_of(model.get_text_config()) if depends_on_length(model) else None


def capture_sizes(most: int) -> list[int]:
    """Numbers of positions of the captured steps, ascending up to `most`: a step is padded by an eighth at most."""
    sizes, at = [1, 2, 4], 8
    while at < most:
        sizes.append(at)
        at += max(8, 1 << (at.bit_length() - 4))
    return [*(size for size in sizes if size < most), most]


def set_environment(config: TargetConfig) -> None:
    """Set variables for this process and its ranks only. A single rank is in this process, whose threads the actor has
    bound already."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings are about intended settings
        "TQDM_DISABLE": "1",  # bars of kernels and graphs, in the logs of actors
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    if config.batch_invariant and config.gpus:
        from specactor_ray.models.batch_invariance import require_device

        require_device()
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    use_interpreter()
    usable = sorted(os.sched_getaffinity(0))[: config.cores]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = (
        "nobind" if config.tensor_parallel == 1 else _cores_of_ranks(usable, config.tensor_parallel)
    )


def _cores_of_ranks(usable: Sequence[int], ranks: int) -> str:
    """Core ids of each rank in the format of vLLM's CPU build: ranks are separated by `|`."""
    share = max(1, len(usable) // ranks)
    starts = range(0, share * ranks, share)
    return "|".join(",".join(str(usable[(start + i) % len(usable)]) for i in range(share)) for start in starts)


def remove_what_killed_ones_left() -> None:
    """Remove the shared memory of ranks, and the weights files for ranks, of processes that are gone."""
    for base in (tempfile.gettempdir(), SHARED_MEMORY):
        remove_abandoned(_RECORD, base)
        remove_abandoned(_WEIGHTS, base)


def record_shared_memory(others: set[str]) -> Path:
    """Record the shared memory that ends with this process and its ranks: all that they use except `others`, since the
    names are Python's own. Returns the folder with the record."""
    folder = make_owned_folder(_RECORD, tempfile.gettempdir())
    note_segments(folder, shared_memory() - others)
    return folder


def shared_memory() -> set[str]:
    """Shared-memory segments of Python that this process or its children use."""
    import psutil

    pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    return {name for pid in pids for name in mapped_segments(pid) if name.startswith("psm_")}


@contextlib.contextmanager
def folder_of(state_dict: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """A folder, in memory if there is room, with weights in one file; ranks in other processes read their parts."""
    from safetensors.torch import save_file

    size = sum(tensor.nbytes for tensor in state_dict.values())
    roomy = os.path.isdir(SHARED_MEMORY) and shutil.disk_usage(SHARED_MEMORY).free > 1.1 * size
    folder = make_owned_folder(_WEIGHTS, SHARED_MEMORY if roomy else tempfile.gettempdir())
    try:
        weights = {name: tensor.contiguous() for name, tensor in state_dict.items()}
        save_file(weights, folder / WEIGHTS_FILE)
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
