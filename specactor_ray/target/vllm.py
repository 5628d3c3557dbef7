"""Target engine over vLLM: vLLM's scheduler, paged attention and kernels; this package's drafts, keyed sampling
(`vllm_worker.py`) and stops (`rows.py`). vLLM ends outputs at their length only.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.errors import InputError
from specactor_ray.core.ragged import places
from specactor_ray.models.loading import load_eos_token_ids, weight_shapes
from specactor_ray.models.packed_linear import check_names_and_shapes
from specactor_ray.target.base import NO_DRAFTS, Drafts, Finish, StepResult, TargetRequest
from specactor_ray.target.rows import EngineRows
from specactor_ray.target.vllm_bridge import EngineCoreHandle


class VllmEngine:
    """`TargetEngine` over vLLM's engine core in this process.

    Args:
        config: The target's section, with a data type and a cache size.
        max_drafts: Most draft tokens of a request in one step.

    Raises:
        ConfigError, ModelLoadError: See `EngineCoreHandle`.
    """

    def __init__(self, config: TargetConfig, max_drafts: int) -> None:
        self._core = EngineCoreHandle(config, max_drafts)
        self._config, self._max_drafts = config, max_drafts
        self.vocab_size, self.max_model_len = self._core.vocab_size, self._core.max_model_len
        self.weight_version = 0
        eos = load_eos_token_ids(config.model, trust_remote_code=config.trust_remote_code)
        self._rows = EngineRows(self.vocab_size, self.max_model_len, eos)
        self._decoding: np.ndarray | None = None
        """Rows that decode; None after a change."""

    def add(self, row: int, request: TargetRequest) -> Finish | None:
        if (finish := self._rows.open(row, request)) is not None:
            return finish
        sampling, committed = request.sampling, len(request.committed_token_ids)
        context = [*request.prompt_token_ids, *request.committed_token_ids]
        self._core.add(row, context, sampling, len(request.prompt_token_ids), sampling.max_tokens - committed)
        return None

    def remove(self, row: int) -> None:
        if self._rows.close(row):
            self._core.abort(row)
            self._decoding = None

    def decoding(self) -> np.ndarray:
        if self._decoding is None:
            self._decoding = self._core.decoding()
        return self._decoding

    def has_work(self) -> bool:
        return bool(self._rows.requests)

    def step(self, drafts: Drafts = NO_DRAFTS) -> StepResult:
        begin = time.perf_counter()
        rows = self.decoding()
        firsts, lengths = self._rows.cut(rows, drafts, self._max_drafts, self._config.max_step_tokens - len(rows))
        self._decoding = None
        done = self._core.step(rows, lengths, drafts.tokens[places(firsts, lengths)])
        forward_s = time.perf_counter() - begin - done.sampling_s
        margins, sampled = self._config.record_margins, done.sampled
        result = self._rows.commit(done.rows[sampled], done.drafted[sampled], done.found, margins, done.tops)
        if done.states is not None:
            result.states = self._rows.export(done.states, done.rows, done.firsts, done.counts)
        for row, scores in done.prompt_logprobs.items():  # vLLM treats tokens committed earlier as prompt
            result.prompt_logprobs[row] = scores[: self._rows.prompt[row] - 1]
        for row in result.rows[result.finish != Finish.RUNNING].tolist():
            self.remove(row)
        context = done.counts - done.drafted
        result.forward_s, result.sampling_s = forward_s, done.sampling_s
        result.num_tokens, result.num_prefill_tokens = int(done.counts.sum()), int(context[context > 1].sum())
        return result

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        shapes, tied = self._expected_weights
        shared = {name: state_dict[source] for name, source in tied.items() if source in state_dict}
        check_names_and_shapes({**shared, **state_dict}, shapes)
        self._core.load_weights(state_dict)
        self.weight_version, self._decoding = version, None

    @functools.cached_property
    def _expected_weights(self) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        """Shapes and ties of weights, which no update changes."""
        return weight_shapes(self._config.model, trust_remote_code=self._config.trust_remote_code)

    def reset_prefix_cache(self) -> None:
        self._core.reset_prefix_cache()

    def sleep(self) -> None:
        if self.has_work():
            raise InputError("the engine cannot sleep while requests are running")
        self._core.sleep()

    def wake(self) -> None:
        self._core.wake()

    def close(self) -> None:
        for row in list(self._rows.requests):
            self.remove(row)
        self._core.close()
