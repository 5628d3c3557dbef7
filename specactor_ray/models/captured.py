"""Captured steps: a forward of many rows over static tensors, which a CUDA graph repeats with one launch.

A step has R rows with N tokens in all, each row as many as it likes. The host copies all inputs up and launches it.
Missing rows are empty; missing tokens belong to no row and write to a page that no row holds. Steps of a few R and N
are captured at the start and after a sleep, never in between.
"""

from __future__ import annotations

import abc
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from specactor_ray.core.device import parts, staging
from specactor_ray.core.machine import fall_back
from specactor_ray.models.cpu_attention import PageRows
from specactor_ray.models.paged_cache import PagedCache
from specactor_ray.models.ragged_attention import RaggedBatch
from specactor_ray.models.shapes import longest_tail, step_sizes
from specactor_ray.sampling.rules import Rules

logger = logging.getLogger(__name__)

MOST_ROWS = 512


class CudaCapturer:
    """One `torch.cuda.CUDAGraph` per step, in one memory pool of a device: no two run at the same time, and the results
    of a step are in tensors outside of the pool. Tests replace the class."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._pool: Any = None
        self._stream = torch.cuda.Stream(device)

    def capture(self, step: Callable[[], object], known: bool = False) -> Callable[[], object]:
        """Return a function that repeats a step over the same tensors. `known`: its size was captured before.
        RuntimeError: the step waits for the device or cannot be captured, or there is too little memory."""
        graph, mode = torch.cuda.CUDAGraph(), torch.cuda.get_sync_debug_mode()
        caller = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._stream):  # sets it back, too, as `graph` does not after a capture that failed
                if not known:
                    step()  # compiles kernels and makes workspaces outside of the capture
                    torch.cuda.set_sync_debug_mode("error")  # a wait would break the capture, and leave memory in it
                    step()
                with torch.cuda.graph(graph, self._pool, self._stream, "thread_local"):  # other threads may allocate
                    step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            caller.wait_stream(self._stream)
        self._pool = graph.pool()
        return graph.replay

    def release(self) -> None:
        """Forget the pool, once all steps are dropped."""
        self._pool = None

    def fetch(self, tensor: torch.Tensor) -> np.ndarray:
        """Wait for the device and copy a tensor to the host."""
        return np.asarray(tensor.cpu())


def capturer_for(device: torch.device) -> CudaCapturer | None:
    """CUDA graphs on GPUs; on CPUs nothing is captured."""
    return CudaCapturer(device) if device.type == "cuda" else None


class StaticBatch(RaggedBatch):
    """R rows with N tokens in the first entries of `views` (see `Captured`); `unused`: slot for writes never read."""

    replay: Callable[[], object]

    def __init__(self, cache: PagedCache, views: Sequence[Any], unused: int, rows: int, tokens: int) -> None:
        ids, positions, slots, words, *self.extras, starts, lengths, pages = views
        self.cache, self.rows, self.num_tokens, self.unused, self.rules = cache, rows, tokens, unused, None
        self.most_queries, self.most_keys = (1 if rows == tokens else tokens), pages.shape[1] * cache.page_size
        self.tokens, self.positions, self.slots = ids[:tokens], positions[:tokens], slots[:tokens]
        self.device_starts, self.device_lengths, self.device_pages = starts[: rows + 1], lengths[:rows], pages[:rows]
        self.sampling = Rules.over(words[:rows])
        self.longest = 0 if rows == tokens else longest_tail(rows)  # most draft tokens of a row

    @property
    def page_rows(self) -> PageRows:  # type: ignore[override] # inputs of tests on CPUs change under it
        starts, lengths = (x.numpy().astype(np.int64) for x in (self.device_starts, self.device_lengths))
        return PageRows(self.device_pages.numpy(), starts, lengths)


class Captured(abc.ABC):
    """The captured steps of a model, which take a page of its cache. `what` names them in a fallback. They have up to
    `rows` rows and `tokens` tokens; a row of the cache has up to `longest`. `extras`: further int64 inputs. A
    derived class sets what its step needs before it calls the constructor. Not thread-safe."""

    def __init__(
        self, cache: PagedCache, capturer: CudaCapturer, what: str, rows: int, tokens: int, longest: int,
        *extras: np.ndarray,
    ) -> None:  # fmt: skip
        self._cache, self._capturer, self._what, self._known = cache, capturer, what, False
        row = cache.open(1) if cache.pages > 1 else None
        self._sizes = [] if row is None else step_sizes(rows, tokens)
        self._unused = int(cache.page_table(np.array([row or 0]), np.ones(1))[0, 0]) * cache.page_size
        ints, pages = np.zeros((2, rows + 1), np.int32), (rows, -(-longest // cache.page_size))
        inputs = [*np.zeros((3, tokens), np.int64), np.zeros((rows, 5), np.int64), *extras, ints[0], ints[1, :rows]]
        """Tokens, sequence positions and slots `(N,)`; rules of each row; extras; begin of each row's tokens
        `(R + 1,)`; keys of each row; and pages, of which only those of the step's rows are copied."""
        self._staged, self._host = staging([*inputs, np.zeros(pages, np.int32)], cache.device)
        self._host[-1].fill(self._unused // cache.page_size)
        self.prepare()

    @abc.abstractmethod
    def _step(self, batch: StaticBatch) -> None:
        """The step: it waits for nothing, and leaves its results in tensors that it does not make."""

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture all steps, those with most tokens first: others find their memory in the pool. Steps for which there
        is too little memory are eager until the next call."""
        self.release()
        self._clear()
        self._buffer = torch.zeros_like(self._staged, device=self._cache.device)
        views, problem = parts(self._buffer, self._host), "" if self._sizes else ": the cache has a single page"
        self._batches = [StaticBatch(self._cache, views, self._unused, *size) for size in self._sizes]
        for batch in sorted(self._batches, key=lambda one: -one.num_tokens):
            self._buffer.copy_(self._staged, non_blocking=True)  # no rows; steps change their inputs
            try:
                batch.replay = self._capturer.capture(functools.partial(self._step, batch), self._known)
            except RuntimeError as error:
                if "out of memory" not in str(error):
                    problem = f": {str(error).splitlines()[0]}"
                    self.release()
                    break
                problem = f" from {batch.num_tokens} tokens on: out of memory, use a smaller kv_cache_gb"
                self._batches.remove(batch)
        self._known |= not problem
        if problem:
            fall_back(logger, f"{self._what} runs without CUDA graphs{problem}")

    def release(self) -> None:
        """Drop all steps and their memory, until `prepare`."""
        self._batches, self._buffer = list[StaticBatch](), torch.zeros(0)
        self._capturer.release()

    def find(self, counts: np.ndarray, drafts: int = 0) -> StaticBatch | None:
        """The smallest step for rows with these numbers of new tokens, `(n,)`, up to `drafts` of which are a row's
        drafts; None: there is none."""
        rows, tokens = len(counts), int(counts.sum())
        fits = (one for one in self._batches if one.rows >= rows and one.num_tokens >= tokens and one.longest >= drafts)
        return next((one for one in fits if one.num_tokens > one.rows or tokens == rows), None)

    def load(
        self, batch: StaticBatch, rows: np.ndarray, counts: np.ndarray, tokens: np.ndarray, positions: np.ndarray,
        ends: np.ndarray, rules: np.ndarray, *extras: np.ndarray,
    ) -> None:  # fmt: skip
        """Copy the inputs of the step that was found for `counts` to the device, without a wait, once the last step has
        been fetched. `ends`: tokens of each row for which it has room; `extras`: their first columns, others are 0."""
        cache, n, used = self._cache, len(rows), len(tokens)
        self._clear()
        ids, sequence, slots, words, *more, starts, keys, pages = self._host
        cached, table = cache.lengths[rows], cache.page_table(rows, ends)
        ids[:used], sequence[:used], slots[:used] = tokens, positions, cache.slots_of(table, cached, counts)
        starts[1 : n + 1], starts[n + 1 :] = counts.cumsum(), used
        keys[:n], words[:n], pages[:n, : table.shape[1]] = cached + counts, rules.view(np.int64).reshape(n, -1), table
        for target, source in zip(more, extras, strict=True):
            target[..., : source.shape[-1]] = source
        end = len(self._staged) - pages[batch.rows :].nbytes // 8
        self._buffer[:end].copy_(self._staged[:end], non_blocking=True)

    def _clear(self) -> None:
        for array in self._host[:-1]:
            array.fill(0)
        self._host[2].fill(self._unused)
