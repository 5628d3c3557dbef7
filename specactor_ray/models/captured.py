"""Captured steps: a forward of many rows over static tensors, which a CUDA graph repeats with one launch.

A step has R rows with N tokens in all, each row as many as it likes. The host copies tokens, pages and rules up at once
and launches it. Missing rows are empty; missing tokens belong to no row and write to a page that no row holds. Steps of
a few R and N are captured at the start and after a sleep, never in between.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from specactor_ray.core.device import to_device
from specactor_ray.core.environment import fall_back
from specactor_ray.models.paged_cache import PagedCache
from specactor_ray.models.ragged_attention import RaggedBatch
from specactor_ray.sampling.rules import Rules

logger = logging.getLogger(__name__)

MOST_ROWS = 512
_ROWS = (1, 4, 16, 32, 64, 128, 256)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, *range(128, 512, 64), *range(512, 1024, 128), *range(1024, 2049, 256))
"""Sizes of steps. Padding to 128 tokens costs little: all weights are read. Launches of larger steps cost little."""


class CudaCapturer:
    """One `torch.cuda.CUDAGraph` per step, in one memory pool: no two run at the same time, and the results of a step
    are in tensors outside of the pool. Tests replace the class."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream = torch.cuda.Stream()

    def capture(self, step: Callable[[], object]) -> Callable[[], object]:
        """Run a step, which uses the same tensors every time, and return a function that repeats it. RuntimeError: an
        operation of the step cannot be captured, or there is too little memory."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # compiles kernels and makes workspaces outside of the capture
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(self._stream)
        # Other threads of the process may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            step()
        self._pool = graph.pool()
        return graph.replay

    def release(self) -> None:
        """Forget the pool, once all steps are dropped."""
        self._pool = None

    def fetch(self, tensor: torch.Tensor) -> np.ndarray:
        """Wait for the device and copy a tensor to the host."""
        array: np.ndarray = tensor.cpu().numpy()
        return array


def capturer_for(device: torch.device) -> CudaCapturer | None:
    """CUDA graphs on GPUs; on CPUs nothing is captured."""
    return CudaCapturer() if device.type == "cuda" else None


def longest_tail(rows: int) -> int:
    """Most draft tokens of a row in steps of `rows` rows."""
    return max(16, 128 // rows)


def sizes(rows: int, tokens: int) -> list[tuple[int, int]]:
    """(R, N) of the steps for up to `rows` rows with up to `tokens` tokens, the smallest first."""
    most = {r: min(r * (1 + longest_tail(r)), tokens, _TOKENS[-1]) for r in (*(r for r in _ROWS if r < rows), rows)}
    return [(r, n) for r, end in most.items() for n in sorted({r, end, *(n for n in _TOKENS if r < n < end)})]


class StaticBatch(RaggedBatch):
    """R rows with N tokens in static tensors, the first entries of `views` (see `Captured`). `unused`: slot for writes
    that are never read."""

    replay: Callable[[], object]

    def __init__(self, cache: PagedCache, views: Any, unused: int, rows: int, tokens: int) -> None:
        ids, positions, slots, starts, lengths, words, *self.extras, pages = views
        self.cache, self.rows, self.num_tokens, self.unused, self.rules = cache, rows, tokens, unused, None
        self.most_queries, self.most_keys = (1 if rows == tokens else tokens), pages.shape[1] * cache.page_size
        self.tokens, self.positions, self.slots = ids[:tokens], positions[:tokens], slots[:tokens]
        self.device_starts, self.device_lengths, self.device_pages = starts[: rows + 1], lengths[:rows], pages[:rows]
        self.sampling = Rules.over(words[:rows])
        self.longest = 0 if rows == tokens else longest_tail(rows)  # most draft tokens of a row


class Captured:
    """The captured steps of a model, which take a page of its cache. `what` names them in a fallback. They have up to
    `rows` rows and `tokens` tokens; a row of the cache has up to `longest`. `extras`: further int64 inputs. `run` is
    the step: it waits for nothing, and leaves its results in tensors that it does not make. Not thread-safe."""

    def __init__(
        self, cache: PagedCache, capturer: CudaCapturer, what: str, rows: int, tokens: int, longest: int,
        extras: Sequence[np.ndarray], run: Callable[[StaticBatch], object],
    ) -> None:  # fmt: skip
        self._cache, self._capturer, self._what, self._run = cache, capturer, what, run
        self._row, self._sizes = cache.open(1) if cache.pages > 1 else None, sizes(rows, tokens)
        self._unused = int(cache.page_table(np.array([self._row or 0]), np.ones(1))[0, 0]) * cache.page_size
        integers, halves = np.zeros((3, tokens), np.int64), np.zeros((2, rows + 1), np.int32)
        pages = np.full((rows, -(-longest // cache.page_size)), self._unused // cache.page_size, np.int32)
        self._host = [*integers, halves[0], halves[1, :rows], np.zeros((rows, 5), np.int64), *extras, pages]
        """Tokens, sequence positions and slots `(N,)`; begin of each row's tokens `(R + 1,)`; keys and rules of each
        row; extras; pages, of which only those of the step's rows are copied."""
        self.prepare()

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture all steps, the largest first: smaller ones find their memory in the pool."""
        words = sum(-(-array.nbytes // 8) for array in self._host)
        self._clear()
        try:
            self._buffer = torch.zeros(words, dtype=torch.int64, device=self._cache.device)
            if self._row is None:
                raise RuntimeError("the cache has a single page")
            views = self._send(len(self._host[-1]))
            self._batches = [StaticBatch(self._cache, views, self._unused, *size) for size in self._sizes]
            for batch in reversed(self._batches):
                self._send(batch.rows)  # no rows; steps change their inputs
                batch.replay = self._capturer.capture(functools.partial(self._step, batch))
        except RuntimeError as error:
            self._sizes = []
            self.release()
            fall_back(logger, f"{self._what} runs without CUDA graphs: {str(error).splitlines()[0]}")

    def release(self) -> None:
        """Drop all steps and their memory, until `prepare`."""
        self._batches, self._buffer = [], torch.zeros(0)
        self._capturer.release()

    def find(self, counts: np.ndarray) -> StaticBatch | None:
        """The smallest step for rows with these numbers of new tokens, `(n,)`; None: there is none."""
        rows, tokens = len(counts), int(counts.sum())
        fits = (one for one in self._batches if one.rows >= rows and one.num_tokens >= tokens)
        return next((one for one in fits if one.num_tokens > one.rows or tokens == rows), None)

    def load(
        self, batch: StaticBatch, rows: np.ndarray, counts: np.ndarray, tokens: np.ndarray, positions: np.ndarray,
        ends: np.ndarray, rules: np.ndarray, extras: Sequence[np.ndarray],
    ) -> None:  # fmt: skip
        """Copy the inputs of the step that was found for `counts` to the device, without a wait. `ends`: tokens of each
        row for which it has room; `extras`: their first columns, others are 0. ValueError: a row has no room."""
        cache, n, used = self._cache, len(rows), len(tokens)
        if (ends > cache.room(rows)).any():
            raise ValueError("a row has no room for its new tokens; reserve it first")
        self._clear()
        ids, sequence, slots, starts, keys, words, *more, pages = self._host
        cached, table = cache.lengths[rows], cache.page_table(rows, ends)
        ids[:used], sequence[:used], slots[:used] = tokens, positions, cache.slots_of(table, cached, counts)
        starts[1 : n + 1], starts[n + 1 :] = counts.cumsum(), used
        keys[:n], words[:n], pages[:n, : table.shape[1]] = cached + counts, rules.view(np.int64).reshape(n, -1), table
        for target, source in zip(more, extras, strict=True):
            target[..., : source.shape[-1]] = source
        self._send(batch.rows)

    def _clear(self) -> None:
        for array in self._host[:-1]:
            array.fill(0)
        self._host[2].fill(self._unused)

    def _send(self, rows: int) -> list[torch.Tensor]:
        return to_device((*self._host[:-1], self._host[-1][:rows]), self._cache.device, self._buffer)

    def _step(self, batch: StaticBatch) -> None:
        if self._cache.device.type == "cpu":  # attention there reads arrays
            batch.__dict__.pop("page_rows", None)
            starts, lengths = (x.numpy().astype(np.int64) for x in (batch.device_starts, batch.device_lengths))
            batch.starts, batch.lengths, batch.pages = starts, lengths, batch.device_pages.numpy()
        self._run(batch)
