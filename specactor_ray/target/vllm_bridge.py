"""vLLM's engine core in this process.

Only this module and `vllm_worker.py`, its counterpart in vLLM's workers, import vLLM and use its non-public parts, in
the versions of `vllm_settings.TESTED_VERSIONS`. This module uses `EngineCore`, stepped directly; `running` and
`update_draft_token_ids` of its scheduler; `sample_tokens` of its executor. `tests/vllm/test_contract.py` names the part
when one of them changes. `docs/design/vllm.md` gives the reasons.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.environment import fall_back
from specactor_ray.core.errors import ConfigError, ModelLoadError, clipped
from specactor_ray.core.leftovers import make_owned_folder, mapped_segments, note_segments, remove_abandoned
from specactor_ray.core.ragged import begins
from specactor_ray.core.types import SamplingParams, TopTokens
from specactor_ray.sampling.keyed import Found
from specactor_ray.target.vllm_settings import KEY, engine_arguments, require_vllm, set_environment

logger = logging.getLogger(__name__)

_IN_MEMORY = "/dev/shm"
_RECORD, _WEIGHTS = "specactor-ranks-", "specactor-weights-"


@dataclass(slots=True)
class CoreStep:
    """The sampler's report of one step: the `n` rows of its batch, those that only prefilled included."""

    rows: np.ndarray
    """int32 `(n,)`: rows of the batch. int64 `(n,)`: sequence position of each row's first position in the forward;
    number of its positions there; number of draft tokens among these. bool `(n,)`: whether it sampled."""
    firsts: np.ndarray
    counts: np.ndarray
    drafted: np.ndarray
    sampled: np.ndarray
    found: Found
    """Tokens that the sampled rows may commit."""
    states: np.ndarray | None = None
    """`(sum(counts), layers * hidden)`: hidden states, if exported."""
    tops: TopTokens | None = None
    """The most probable tokens at the positions of `found`."""
    sampling_s: float = 0.0
    prompt_logprobs: dict[int, np.ndarray] = field(default_factory=dict)
    """Row whose prompt is complete → requested log-probabilities of its tokens from the second on; set in the engine's
    process."""


_NONE = np.zeros(0, np.int64)
_NOTHING = CoreStep(_NONE, _NONE, _NONE, _NONE, _NONE > 0, Found(np.empty((0, 5), np.int64)))
"""A step that sampled nothing."""


class EngineCoreHandle:
    """vLLM's engine core, in this process. Arguments: see `engine_arguments`.

    Raises:
        ConfigError: vLLM is missing, has an untested version, or refuses a value of `target.engine_arguments`.
        ModelLoadError: vLLM does not support the model with these settings.
    """

    def __init__(self, config: TargetConfig, max_drafts: int) -> None:
        require_vllm()
        set_environment(config)
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
        if config.gpus:
            fall_back(logger, "vLLM runs its V1 model runner, which takes drafts from the host; V2 does not yet")
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        remove_what_killed_ones_left()
        others = _shared_memory()
        arguments = engine_arguments(config, max_drafts, f"{__name__}.{NothingProposed.__name__}")
        try:
            settings = EngineArgs(**arguments).create_engine_config()
            with kernel_scan_without_llvmlite():
                self._core = EngineCore(settings, Executor.get_class(settings), log_stats=False)
        except (ValueError, RuntimeError) as error:  # vLLM's checks of the model and its settings raise both
            _name_argument(error, config.engine_arguments)
            fix = " Fix: raise target.kv_cache_gb (what vLLM calls its cache memory), or lower target.max_model_len."
            reason = " ".join(str(error).split())[:400] or type(error).__name__
            hint = fix if "cache" in str(error).lower() else ""
            raise ModelLoadError(f"vllm cannot serve {config.model}: {reason}{hint}") from error
        self._scheduler: Any = self._core.scheduler
        self._ranks = config.tensor_parallel
        self._done: CoreStep | None = None
        self._watch(self._core.model_executor)
        self._ids: dict[int, str] = {}
        """Row → its request's id in vLLM, which is never used twice, since vLLM drops an id one step late."""
        self._row_of: dict[str, int] = {}
        self._numbers = itertools.count()
        self._drafted = False
        """Whether the last step had drafts."""
        self._record = record_shared_memory(others) if self._ranks > 1 else None
        self.vocab_size = int(settings.model_config.get_vocab_size())
        self.max_model_len = int(settings.model_config.max_model_len)

    def _watch(self, executor: Any) -> None:
        """Read the data that the worker attaches to vLLM's outputs."""
        sample_tokens = executor.sample_tokens

        def sample(*args: Any, **options: Any) -> Any:
            output = sample_tokens(*args, **options)
            self._done = getattr(output, KEY, None)
            return output

        executor.sample_tokens = sample

    def add(self, row: int, token_ids: Sequence[int], sampling: SamplingParams, prompt: int, max_tokens: int) -> None:
        """Queue a request in a free row. `token_ids`: prompt and tokens committed earlier, of which `prompt` are of the
        prompt; `max_tokens`: most tokens that it may still generate."""
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.v1.engine import EngineCoreRequest

        rule = [sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed, sampling.logprobs]
        keyed = {"row": row, "base": sampling.first_position - prompt, "rule": rule}
        params = VllmSamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={KEY: keyed},
            prompt_logprobs=0 if sampling.prompt_logprobs else None,
        )
        self._ids[row] = core_id = f"{row}#{next(self._numbers)}"
        self._row_of[core_id] = row
        request = EngineCoreRequest(
            request_id=core_id,
            prompt_token_ids=list(token_ids),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        queued, wave = self._core.preprocess_add_request(request)
        self._core.add_request(queued, wave)

    def abort(self, row: int) -> None:
        """Drop the request of a row."""
        core_id = self._ids.pop(row)
        del self._row_of[core_id]
        self._core.abort_requests([core_id])

    def decoding(self) -> np.ndarray:
        """Running rows, int32, that have all but their newest token in the cache."""
        row_of, running = self._row_of, self._scheduler.running
        rows = [row_of[one.request_id] for one in running if one.num_tokens - one.num_computed_tokens == 1]
        return np.array(rows, np.int32)

    def step(self, rows: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> CoreStep:
        """Run one step with exactly these drafts for all decoding rows; `lengths`: draft tokens of each row."""
        from vllm.v1.outputs import DraftTokenIds

        if len(tokens) or self._drafted:  # drops the last drafts of requests that were not scheduled with them
            flat, ends = tokens.tolist(), begins(lengths).tolist()
            ids = [self._ids[row] for row in rows.tolist()]
            lists = [flat[begin:end] for begin, end in itertools.pairwise(ends)]
            self._scheduler.update_draft_token_ids(DraftTokenIds(ids, lists))
        self._drafted = len(tokens) > 0
        self._done = None
        groups, _ = self._core.step_fn()  # without `post_step`, which would call the proposer
        if self._done is None:
            return _NOTHING
        for one in [one for group in groups.values() for one in group.outputs]:
            if one.new_prompt_logprobs_tensors is not None:
                scores = one.new_prompt_logprobs_tensors.logprobs[:, 0]
                self._done.prompt_logprobs[self._row_of[one.request_id]] = scores.numpy()
        return self._done

    def load_weights(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights (Hugging Face names), and drop results of the old ones."""
        if self._ranks == 1:
            self._core.collective_rpc("reload_weights", kwargs={"weights_iterator": list(state_dict.items())})
        else:
            with _folder_of(state_dict) as folder:
                self._core.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        self._core.reset_prefix_cache(reset_running_requests=True)

    def reset_prefix_cache(self) -> None:
        self._core.reset_prefix_cache()

    def sleep(self) -> None:
        self._core.sleep(level=1)

    def wake(self) -> None:
        self._core.wake_up()

    def close(self) -> None:
        self._core.shutdown()
        if self._record is not None:
            shutil.rmtree(self._record, ignore_errors=True)


class NothingProposed:
    """A proposer that only makes vLLM reserve room for drafts; `step` passes the drafts to the scheduler."""

    def __init__(self, vllm_config: Any) -> None:
        del vllm_config

    def load_model(self, *args: Any) -> None:
        del args

    def propose(self, sampled_token_ids: Sequence[Any], *args: Any, **kwargs: Any) -> list[list[int]]:
        del args, kwargs
        return [[] for _ in sampled_token_ids]


def remove_what_killed_ones_left() -> None:
    """Remove the shared memory of ranks, and the weights files for ranks, of processes that are gone."""
    for base in (tempfile.gettempdir(), _IN_MEMORY):
        remove_abandoned(_RECORD, base)
        remove_abandoned(_WEIGHTS, base)


def record_shared_memory(others: set[str]) -> Path:
    """Record the shared memory that ends with this process and its ranks: all that they use except `others`, since the
    names are Python's own. Returns the folder with the record."""
    folder = make_owned_folder(_RECORD, tempfile.gettempdir())
    note_segments(folder, _shared_memory() - others)
    return folder


def _shared_memory() -> set[str]:
    """Shared-memory segments of Python that this process or its children use."""
    pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    return {name for pid in pids for name in mapped_segments(pid) if name.startswith("psm_")}


@contextlib.contextmanager
def _folder_of(state_dict: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """The folder of a checkpoint, in memory if there is room; ranks in other processes read their parts of it."""
    from safetensors.torch import save_file

    size = sum(tensor.nbytes for tensor in state_dict.values())
    roomy = os.path.isdir(_IN_MEMORY) and shutil.disk_usage(_IN_MEMORY).free > 1.1 * size
    folder = make_owned_folder(_WEIGHTS, _IN_MEMORY if roomy else tempfile.gettempdir())
    try:
        (folder / "model").mkdir()
        weights = {name: tensor.contiguous() for name, tensor in state_dict.items()}
        save_file(weights, folder / "model" / "model.safetensors")
        yield str(folder / "model")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _name_argument(error: Exception, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError where vLLM's error is about a value of `target.engine_arguments`."""
    from pydantic import ValidationError

    for problem in error.errors() if isinstance(error, ValidationError) else ():
        name = str(problem["loc"][-1]) if problem["loc"] else ""
        if name in arguments:
            what = f"{clipped(arguments[name])} is refused by vLLM: {problem['msg']}."
            fix = "use a value that vLLM takes, or leave it out."
            raise ConfigError(f"target.engine_arguments.{name}", what, fix) from error


@contextlib.contextmanager
def kernel_scan_without_llvmlite() -> Iterator[None]:
    """Hide llvmlite (numba) from vLLM's CPU build, which searches all modules for kernels to replace and fails at one
    of llvmlite's objects."""
    from vllm.triton_utils import dispatcher

    def others() -> dict[str, Any]:
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] != "llvmlite"}

    class Modules:
        """Replaces `sys` in that search."""

        modules = property(lambda self: others())

    real, dispatcher.sys = dispatcher.sys, Modules()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about attributes of torch that the search reads
            yield
    finally:
        dispatcher.sys = real
