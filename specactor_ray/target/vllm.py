"""Target engine over vLLM: vLLM's scheduler, paged attention and kernels; this package's drafts, keyed sampling
(`vllm_worker.py`) and stops (`rows.py`). vLLM ends outputs at their length only.

Only this module and its counterparts in vLLM's workers, `vllm_worker.py` and `vllm_weights.py`, import vLLM and use
its non-public parts: this module steps `EngineCore` directly. `core/upstream.py` looks them up before the
start. `docs/design/vllm.md` gives the reasons.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import shutil
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.errors import ConfigError, InputError, ModelLoadError, WeightsError, clipped
from specactor_ray.core.machine import fall_back
from specactor_ray.core.ragged import begins, places
from specactor_ray.core.types import SamplingParams
from specactor_ray.models.loading import load_empty_model, load_eos_token_ids, wrong_value_errors
from specactor_ray.models.weight_buckets import as_in_files, from_wire
from specactor_ray.sampling.keyed import Found
from specactor_ray.sampling.probable import top_tokens
from specactor_ray.table.requests import Finish, TargetRequest
from specactor_ray.table.table import RequestTable
from specactor_ray.target.base import NO_DRAFTS, Drafts, StepResult
from specactor_ray.target.rows import commit, cut, export, fewest_first
from specactor_ray.target.vllm_cpu import is_cpu_build, kernel_scan_without_llvmlite
from specactor_ray.target.vllm_flight import Flight
from specactor_ray.target.vllm_graphs import check_graphs
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
    """The sampler's report of one step: the `n` requests of its batch, those that only prefilled included."""

    names: list[str]
    """`n` ids of vLLM's requests."""
    counts: np.ndarray
    """int64 `(n,)`: number of each request's positions in the forward."""
    drafted: np.ndarray
    """int64 `(n,)`: number of draft tokens among these."""
    sampled: np.ndarray
    """bool `(n,)`: whether the request sampled."""
    packed: np.ndarray
    """Buffer of `Found`, all requests included."""
    tops: tuple[np.ndarray, np.ndarray] | None = None
    """Most probable tokens of each row of the logits, `(n + sum(drafted), most)` as `ranked` returns them, if a request
    asks for them."""


_Read = tuple[CoreStep | None, dict[str, np.ndarray]]


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
        if is_cpu_build():
            what = "vLLM's CPU build runs its model runner in Triton's interpreter, for tests and development"
            fall_back(logger, f"{what}: target.backend=hf is faster")
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        remove_what_killed_ones_left()
        others, self._record = shared_memory(), None
        eos = load_eos_token_ids(config.model, trust_remote_code=config.trust_remote_code)
        max_drafts = max(max_drafts, bool(config.hidden_layers))  # vLLM exports them beside a speculator only
        arguments = engine_arguments(config, max_drafts)
        try:
            settings = EngineArgs(**arguments).create_engine_config()
            settings.scheduler_config.async_scheduling = True  # vLLM's CPU platform switches it off
            with kernel_scan_without_llvmlite(), _ranks():
                self._core = EngineCore(settings, Executor.get_class(settings), log_stats=False)
        except wrong_value_errors() as error:  # vLLM's checks of the model and its settings
            _name_argument(error, config.engine_arguments)
            fix = " Fix: raise target.kv_cache_gb (what vLLM calls its cache memory), or lower target.max_model_len."
            reason = _reason_of(error)
            hint = fix if "cache" in str(error).lower() else ""
            raise ModelLoadError(f"vllm cannot serve {config.model}: {reason}{hint}") from error
        self._config, self._max_drafts = config, max_drafts
        self._flight = Flight(self._core, max_drafts)
        self._read: list[_Read] = []
        """Reports of steps that ran out before their turn."""
        self._ids: dict[int, str] = {}
        """Row → its request's id in vLLM, which is never used twice, since vLLM drops an id one step late."""
        self._row_of: dict[str, int] = {}
        self._numbers = itertools.count()
        self.vocab_size = int(settings.model_config.get_vocab_size())
        self.max_model_len = int(settings.model_config.max_model_len)
        self.weight_version, self.exports = 0, bool(config.hidden_layers)
        self._lacks_weights = False
        """Whether a sleep has discarded them."""
        self._cached: dict[int, tuple[Sequence[Any], int]] = {}
        """With `exports`: `_cache_of` of each row when the last report was read, since vLLM frees what has ended."""
        context = {"vocab_size": self.vocab_size, "max_model_len": self.max_model_len}
        self.table = RequestTable(**context, eos_token_ids=eos)
        try:
            self._group, self._block = states_group(self._core.scheduler.kv_cache_config)
            if config.tensor_parallel > 1:
                self._record = record_shared_memory(others)
            if max_drafts and config.compiled and torch.cuda.is_available():
                self._prove_graphs()
        except BaseException:
            self.close()
            raise

    def _prove_graphs(self) -> None:
        """Compare steps in graphs of whole steps with steps without, where drafts are verified."""

        def rpc(method: str, *args: Any) -> Any:
            return self._core.collective_rpc(method, args=args)[0]

        lengths, backend = rpc("whole_graphs")
        if None not in lengths:
            whole = " or ".join(str(length - 1) for length in sorted(lengths))
            which = f"Steps other than those with {whole} drafts of each request" if lengths else "All steps"
            lacks = f"{backend or 'target.engine_arguments'} has no graphs of whole steps for mixed numbers"
            fall_back(logger, f"{which} run as a CUDA graph per layer: {lacks}")
        if not lengths:
            return
        switch, tolerance = functools.partial(rpc, "use_graphs"), 1e-2 if self._config.dtype == "float32" else 0.2
        if problem := check_graphs(self, switch, self._max_drafts, tolerance, self._config.batch_invariant):
            rpc("drop_full_graphs")
            fall_back(
                logger, f"Steps run as a CUDA graph per layer, since those of whole steps are wrong here: {problem}"
            )

    def add(self, row: int) -> None:
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.v1.engine import EngineCoreRequest

        request, context = self.table.requests[row], self.table.lines[row, : self.table.lengths[row]]
        sampling = request.sampling
        rule = [sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed, sampling.logprobs]
        keyed = {"base": sampling.first_position - len(request.prompt_token_ids), "rule": rule}
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
        unused = dict.fromkeys(("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank"))
        given = {"prompt_token_ids": context.tolist(), "sampling_params": params, "arrival_time": time.time()}
        queued = EngineCoreRequest(request_id=core_id, **given, **unused)
        self._core.add_request(*self._core.preprocess_add_request(queued))

    def remove(self, row: int) -> None:
        if (core_id := self._ids.pop(row, None)) is not None:
            del self._row_of[core_id]
            self._core.abort_requests([core_id])
            if not self._row_of:
                self._run_out()

    def decoding(self) -> np.ndarray:
        rows = [self._row_of.get(name, -1) for name in self._flight.decoding()]
        return np.array([row for row in rows if row >= 0], np.int32)

    def has_work(self) -> bool:
        return bool(self._ids)

    def step(self, drafts: Drafts = NO_DRAFTS, window: int = 0) -> StepResult:
        begin = time.perf_counter()
        done, scores = self._read.pop(0) if self._read else self._run(drafts, window)
        if done is None:
            return StepResult()
        result = self._commit(done)
        for name, values in scores.items():  # vLLM treats tokens committed earlier as prompt
            if (row := self._row_of.get(name)) is not None:
                result.prompt_logprobs[row] = values[: self.table.prompts[row] - 1]
        for row in result.rows[result.finish != Finish.RUNNING].tolist():
            self.remove(row)
        context = done.counts - done.drafted
        result.num_tokens, result.num_prefill_tokens = int(done.counts.sum()), int(context[context > 1].sum())
        result.forward_s = time.perf_counter() - begin
        return result

    def _run(self, drafts: Drafts, window: int, *, ahead: bool = True) -> _Read:
        """Run one step; see `Flight.run`. Returns its report, None without positions, and the requested
        log-probabilities of prompts by the id of the request."""
        tails = self._tails(drafts) if len(drafts.tokens) else {}
        output, groups = self._flight.run(tails, window, ahead=ahead, on_read=self._note_caches)
        scores = dict[str, np.ndarray]()
        for one in [one for group in groups.values() for one in group.outputs]:
            if one.new_prompt_logprobs_tensors is not None:
                ids, values, *_ = one.new_prompt_logprobs_tensors
                scores[one.request_id] = np.stack((values[:, 0], ids[:, 1], values[:, 1]), axis=1, dtype=np.float32)
        return getattr(output, KEY, None), scores

    def _tails(self, drafts: Drafts) -> dict[str, list[int]]:
        """Drafts of the requests that decode, by the id of the request, as far as they may be verified."""
        rows = self.decoding()
        firsts, lengths = cut(self.table, rows, drafts, self._max_drafts, self._config.max_step_tokens - len(rows))
        flat, ends = drafts.tokens[places(firsts, lengths)].tolist(), begins(lengths).tolist()
        return {self._ids[row]: flat[ends[i] : ends[i + 1]] for i, row in enumerate(rows.tolist())}

    def _commit(self, done: CoreStep) -> StepResult:
        """Commit the tokens of the requests that are still here."""
        rows = np.array([self._row_of.get(name, -1) for name in done.names], np.int32)
        here = rows >= 0
        sampled = here & done.sampled
        found, tops = Found(done.packed[sampled]), None
        if done.tops is not None:
            offsets = (begins(done.drafted) + np.arange(len(rows) + 1))[:-1][sampled]
            tops = top_tokens(*done.tops, offsets, found, rows[sampled], self.table.rules)
        margins = self._config.record_margins
        result = commit(self.table, rows[sampled], done.drafted[sampled], found, margins, tops)
        if self.exports:
            result.states = export(self.table, self.states, rows[sampled])
        return result

    def _run_out(self) -> None:
        """Run the steps that are planned or in flight, without drafts; `step` returns their results."""
        while not self._flight.is_empty:
            done, scores = self._run(NO_DRAFTS, 0, ahead=False)
            if done is not None and self._row_of:
                self._read.append((done, scores))

    def states(self, rows: np.ndarray, starts: np.ndarray, most: int) -> States:
        caches, block = [self._cached.get(row) or self._cache_of(row) for row in rows.tolist()], self._block
        ids, ends = list[np.ndarray](), list[int]()
        for (blocks, computed), row, start in zip(caches, rows.tolist(), starts.tolist(), strict=True):
            end, first = min(computed, int(self.table.lengths[row]) - 1), start // block
            ids.append(np.array([one.block_id for one in blocks[first : -(-end // block)]], np.int64))
            ends.append(end if ids[-1].all() else start)  # 0: outside of a window
        chosen, lengths = fewest_first(np.array(ends, np.int64), starts, most)
        rows, starts, slots = rows[chosen], starts[chosen], []
        if not len(rows):
            return States(rows, starts, lengths, torch.empty(0))
        for i, start, length in zip(chosen.tolist(), starts.tolist(), lengths.tolist(), strict=True):
            at = np.arange(start, start + length)
            slots.append(ids[i][at // block - start // block] * block + at % block)
        states = self._core.collective_rpc("states", args=(np.concatenate(slots),))[0]
        return States(rows, starts, lengths, states if torch.is_tensor(states) else from_wire(states))

    def _cache_of(self, row: int) -> tuple[Sequence[Any], int]:
        """vLLM's blocks of a request in its cache, and the number of positions that launched steps computed there,
        rejected drafts included."""
        scheduler, name = self._core.scheduler, self._ids.get(row, "")
        if (request := scheduler.requests.get(name)) is None:
            return (), 0
        blocks = scheduler.kv_cache_manager.get_blocks(name).blocks[self._group]
        return blocks, request.num_computed_tokens - self._flight.held(name)

    def _note_caches(self) -> None:
        if self.exports:
            caches = {row: self._cache_of(row) for row in self._ids}
            self._cached = {row: (list(blocks), computed) for row, (blocks, computed) in caches.items()}

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        weights = as_in_files(self._empty_model, state_dict)
        self._run_out()
        if self._core.model_executor.is_sleeping:  # on GPUs nothing is mapped then; the cache stays asleep
            self._core.model_executor.wake_up(["weights"])
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
        self.weight_version, self._lacks_weights = version, False

    @functools.cached_property
    def _empty_model(self) -> Any:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._core.vllm_config):  # vLLM may have decorated the model's class
            return load_empty_model(self._config.model, trust_remote_code=self._config.trust_remote_code)

    def prompt_logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        found = np.zeros((0, 3), np.float32)
        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=True)
        row = self.table.open(TargetRequest("probe", tuple(token_ids.tolist()), sampling))
        try:
            with self._requests_held():
                self.add(row)
                while row in self._ids:
                    found = self.step().prompt_logprobs.get(row, found)
                self.reset_prefix_cache()
        finally:
            self.table.close(row)
        own: np.ndarray = found[:, 0]
        return own

    @contextlib.contextmanager
    def _requests_held(self) -> Iterator[None]:
        """Take all requests from vLLM's scheduler, which computes them again afterwards."""
        scheduler = self._core.scheduler
        self._run_out()
        read, self._read = self._read, []
        self._core.reset_prefix_cache(reset_running_requests=True)  # running ones wait again
        held = list(scheduler.waiting)
        scheduler.waiting.remove_requests(held)
        try:
            yield
        finally:
            self._run_out()
            scheduler.waiting.prepend_requests(reversed(held))  # the last one first
            self._read = read

    def reset_prefix_cache(self) -> None:
        self._run_out()
        self._core.reset_prefix_cache()

    def sleep(self, keep_weights: bool = True) -> None:
        if self.has_work():
            raise InputError("the engine cannot sleep while requests are running")
        self._run_out()
        self._lacks_weights |= not keep_weights
        self._core.sleep(level=1 if keep_weights else 2)

    def wake(self) -> None:
        if self._lacks_weights:
            raise WeightsError("the engine slept without its weights, and no new ones came")
        self._core.wake_up()

    def close(self) -> None:
        self._ids.clear()
        try:
            self._flight.close()  # raises what the step in flight raised
        finally:
            self._core.shutdown()
            if self._record is not None:
                shutil.rmtree(self._record, ignore_errors=True)


def _ranks() -> contextlib.AbstractContextManager[None]:
    """See `vllm_rank`, which only vLLM's CPU build needs."""
    if not is_cpu_build():
        return contextlib.nullcontext()
    from specactor_ray.target.vllm_rank import ranks_with_interpreter

    return ranks_with_interpreter()


def states_group(caches: Any) -> tuple[int, int]:
    """Number and block size of the group of layers in vLLM's `KVCacheConfig` that gives hidden states their slots: one
    that keeps all tokens where there is one."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    specs = [group.kv_cache_spec for group in caches.kv_cache_groups]
    full = (isinstance(getattr(spec, "first_spec", spec), FullAttentionSpec) for spec in specs)
    number = next((i for i, keeps_all in enumerate(full) if keeps_all), 0)
    return number, int(specs[number].block_size) if specs else 1


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
