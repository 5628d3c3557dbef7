"""Target engine over vLLM: vLLM's scheduler, paged attention and kernels; this package's drafts, keyed sampling
(`vllm_worker.py`) and stops (`rows.py`). vLLM ends outputs at their length only.

Only this module and its counterparts in vLLM's workers, `vllm_worker.py` and `vllm_weights.py`, import vLLM and use
its non-public parts: this module steps `EngineCore` directly. `vllm_parts.py` names them; a version of vLLM that lacks
one is refused. `docs/design/vllm.md` gives the reasons.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.environment import fall_back
from specactor_ray.core.errors import ConfigError, InputError, ModelLoadError, WeightsError, clipped
from specactor_ray.core.ragged import begins, places
from specactor_ray.core.types import SamplingParams, TopTokens
from specactor_ray.models.loading import load_eos_token_ids, wrong_value_errors
from specactor_ray.models.weight_buckets import from_wire
from specactor_ray.models.weight_format import WeightFormat
from specactor_ray.sampling.keyed import Found
from specactor_ray.target.base import NO_DRAFTS, Drafts, Finish, StepResult, TargetRequest
from specactor_ray.target.rows import EngineRows
from specactor_ray.target.vllm_settings import (
    KEY,
    engine_arguments,
    folder_of,
    record_shared_memory,
    remove_what_killed_ones_left,
    require_vllm,
    set_environment,
    shared_memory,
)
from specactor_ray.transport.messages import States

logger = logging.getLogger(__name__)


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


class VllmEngine:
    """`TargetEngine` over vLLM's engine core in this process. Arguments: see `engine_arguments`.

    Raises:
        ConfigError: of `require_vllm`, or vLLM refuses a value of `target.engine_arguments`.
        ModelLoadError: vLLM does not support the model with these settings.
    """

    def __init__(self, config: TargetConfig, max_drafts: int) -> None:
        require_vllm()
        set_environment(config)
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
        if config.gpus:
            fall_back(logger, "vLLM runs its V1 model runner, which takes drafts from the host; V2 is not used yet")
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        remove_what_killed_ones_left()
        others = shared_memory()
        arguments = engine_arguments(config, max_drafts, f"{__name__}.{NothingProposed.__name__}")
        try:
            settings = EngineArgs(**arguments).create_engine_config()
            with kernel_scan_without_llvmlite():
                self._core = EngineCore(settings, Executor.get_class(settings), log_stats=False)
        except wrong_value_errors() as error:  # vLLM's checks of the model and its settings
            _name_argument(error, config.engine_arguments)
            fix = " Fix: raise target.kv_cache_gb (what vLLM calls its cache memory), or lower target.max_model_len."
            reason = _reason_of(error)
            hint = fix if "cache" in str(error).lower() else ""
            raise ModelLoadError(f"vllm cannot serve {config.model}: {reason}{hint}") from error
        self._config, self._max_drafts = config, max_drafts
        self._done: CoreStep | None = None
        self._watch(self._core.model_executor)
        self._ids: dict[int, str] = {}
        """Row → its request's id in vLLM, which is never used twice, since vLLM drops an id one step late."""
        self._row_of: dict[str, int] = {}
        self._numbers = itertools.count()
        self._drafted = False
        """Whether the last step had drafts."""
        self._decoding: np.ndarray | None = None
        """Rows that decode; None after a change."""
        self._record = record_shared_memory(others) if config.tensor_parallel > 1 else None
        self.vocab_size = int(settings.model_config.get_vocab_size())
        self.max_model_len = int(settings.model_config.max_model_len)
        self.weight_version, self.exports = 0, True
        eos = load_eos_token_ids(config.model, trust_remote_code=config.trust_remote_code)
        self._rows = EngineRows(self.vocab_size, self.max_model_len, eos)

    def _watch(self, executor: Any) -> None:
        """Read the data that the worker attaches to vLLM's outputs."""
        sample_tokens = executor.sample_tokens

        def sample(*args: Any, **options: Any) -> Any:
            output = sample_tokens(*args, **options)
            self._done = getattr(output, KEY, None)
            return output

        executor.sample_tokens = sample

    def add(self, row: int, request: TargetRequest) -> Finish | None:
        if (finish := self._rows.open(row, request)) is not None:
            return finish
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.v1.engine import EngineCoreRequest

        sampling = request.sampling
        rule = [sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed, sampling.logprobs]
        keyed = {"row": row, "base": sampling.first_position - len(request.prompt_token_ids), "rule": rule}
        params = VllmSamplingParams(
            temperature=0.0,
            max_tokens=sampling.max_tokens - len(request.committed_token_ids),
            ignore_eos=True,
            detokenize=False,
            extra_args={KEY: keyed},
            prompt_logprobs=1 if sampling.prompt_logprobs else None,
        )
        self._ids[row] = core_id = f"{row}#{next(self._numbers)}"
        self._row_of[core_id] = row
        queued = EngineCoreRequest(
            request_id=core_id,
            prompt_token_ids=[*request.prompt_token_ids, *request.committed_token_ids],
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self._core.add_request(*self._core.preprocess_add_request(queued))
        return None

    def remove(self, row: int) -> None:
        if self._rows.close(row):
            core_id = self._ids.pop(row)
            del self._row_of[core_id]
            self._core.abort_requests([core_id])
            self._decoding = None

    def decoding(self) -> np.ndarray:
        if self._decoding is None:
            running = [one for one in self._core.scheduler.running if one.num_tokens - one.num_computed_tokens == 1]
            self._decoding = np.array([self._row_of[one.request_id] for one in running], np.int32)
        return self._decoding

    def has_work(self) -> bool:
        return bool(self._rows.requests)

    def step(self, drafts: Drafts = NO_DRAFTS) -> StepResult:
        begin = time.perf_counter()
        rows = self.decoding()
        firsts, lengths = self._rows.cut(rows, drafts, self._max_drafts, self._config.max_step_tokens - len(rows))
        self._decoding = None
        done = self._step(rows, lengths, drafts.tokens[places(firsts, lengths)])
        forward_s = time.perf_counter() - begin - done.sampling_s
        margins, sampled = self._config.record_margins, done.sampled
        result = self._rows.commit(done.rows[sampled], done.drafted[sampled], done.found, margins, done.tops)
        if done.states is not None:
            result.states = self._rows.export(from_wire(done.states), done.rows, done.firsts, done.counts)
        for row, scores in done.prompt_logprobs.items():  # vLLM treats tokens committed earlier as prompt
            result.prompt_logprobs[row] = scores[: self._rows.prompt[row] - 1]
        for row in result.rows[result.finish != Finish.RUNNING].tolist():
            self.remove(row)
        context = done.counts - done.drafted
        result.forward_s, result.sampling_s = forward_s, done.sampling_s
        result.num_tokens, result.num_prefill_tokens = int(done.counts.sum()), int(context[context > 1].sum())
        return result

    def _step(self, rows: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> CoreStep:
        """Run one step with exactly these drafts for all decoding rows; `lengths`: draft tokens of each row."""
        from vllm.v1.outputs import DraftTokenIds

        if len(tokens) or self._drafted:  # drops the last drafts of requests that were not scheduled with them
            flat, ends = tokens.tolist(), begins(lengths).tolist()
            ids = [self._ids[row] for row in rows.tolist()]
            lists = [flat[begin:end] for begin, end in itertools.pairwise(ends)]
            self._core.scheduler.update_draft_token_ids(DraftTokenIds(ids, lists))
        self._drafted = len(tokens) > 0
        self._done = None
        groups, _ = self._core.step_fn()  # without `post_step`, which would call the proposer
        if self._done is None:
            return _NOTHING
        for one in [one for group in groups.values() for one in group.outputs]:
            if one.new_prompt_logprobs_tensors is not None:
                ids, values, *_ = one.new_prompt_logprobs_tensors
                scores = np.stack((values[:, 0], ids[:, 1], values[:, 1]), axis=1, dtype=np.float32)
                self._done.prompt_logprobs[self._row_of[one.request_id]] = scores
        return self._done

    def states(self, rows: np.ndarray, starts: np.ndarray, most: int) -> States:
        return self._rows.logged(rows, starts, most)

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        weights = self._format.of_files(state_dict)
        try:
            if self._config.tensor_parallel == 1:
                self._core.collective_rpc("replace_weights", kwargs={"weights": weights})
            else:
                with folder_of(weights) as folder:
                    self._core.collective_rpc("replace_weights", kwargs={"folder": folder})
        except wrong_value_errors() as error:  # those of vLLM's model classes
            raise WeightsError(
                f"vLLM cannot load new weights of {self._config.model}: {_reason_of(error)}. Fix: target.backend=hf"
            ) from error
        self._core.reset_prefix_cache(reset_running_requests=True)
        self.weight_version, self._decoding = version, None

    @functools.cached_property
    def _format(self) -> WeightFormat:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._core.vllm_config):  # vLLM may have decorated the model's class
            return WeightFormat(self._config.model, trust_remote_code=self._config.trust_remote_code)

    def prompt_logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        found = np.zeros((0, 3), np.float32)
        row = max(self._rows.requests, default=-1) + 1
        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=True)
        with self._requests_held():
            self.add(row, TargetRequest("probe", tuple(token_ids.tolist()), sampling))
            while row in self._rows.requests:
                found = self.step().prompt_logprobs.get(row, found)
            self.reset_prefix_cache()
        own: np.ndarray = found[:, 0]
        return own

    @contextlib.contextmanager
    def _requests_held(self) -> Iterator[None]:
        """Take all requests from vLLM's scheduler, which computes them again afterwards."""
        scheduler = self._core.scheduler
        self._core.reset_prefix_cache(reset_running_requests=True)  # running ones wait again
        held = list(scheduler.waiting)
        scheduler.waiting.remove_requests(held)
        self._decoding = None
        try:
            yield
        finally:
            scheduler.waiting.prepend_requests(reversed(held))  # the last one first
            self._decoding = None

    def stale_weights(self, state_dict: Mapping[str, Any]) -> list[str]:
        return []  # its own names and layouts

    def reset_prefix_cache(self) -> None:
        self._core.reset_prefix_cache()

    def sleep(self) -> None:
        if self.has_work():
            raise InputError("the engine cannot sleep while requests are running")
        self._core.sleep(level=1)

    def wake(self) -> None:
        self._core.wake_up()

    def close(self) -> None:
        for row in list(self._rows.requests):
            self.remove(row)
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


def _reason_of(error: Exception) -> str:
    """The text of vLLM's error on one line; of an assertion or a missing key its place, too."""
    text = " ".join(str(error).split())[:400]
    if text and not isinstance(error, LookupError | AssertionError):
        return text
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} {text} in {where.name}: {where.line}"


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
