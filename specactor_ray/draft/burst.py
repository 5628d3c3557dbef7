"""Bursts: several tokens of the same chains by forwards over static tensors, which a CUDA graph holds.

One step reads a token of each row, draws the next one and writes it to the inputs of the next step. The host copies
rows and page tables in, launches one step per token, and waits once at the end. Rows are padded to a bucket, and each
bucket is captured once. Padding, and rows that have drafted their share, write to a page that no chain holds.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from specactor_ray.core.device import to_device
from specactor_ray.core.environment import fall_back
from specactor_ray.models.paged_cache import PagedCache
from specactor_ray.models.ragged_attention import RaggedBatch
from specactor_ray.sampling.candidates import Candidates, candidates_on_device, unpacked
from specactor_ray.sampling.rules import Rules, filtered

logger = logging.getLogger(__name__)

LONGEST = 8
"""Most tokens of a burst."""
_BUCKETS = (8, 16, 32, 64, 128, 256, 512)
"""Row counts of captured steps. Fewer than 8 rows save nothing on a GPU."""
_WARM_UPS = 2


class CudaCapturer:
    """One `torch.cuda.CUDAGraph` per step, in one memory pool: no two run at the same time, and the results of a step
    are in tensors outside of the pool. Tests replace the class."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream = torch.cuda.Stream()

    def capture(self, step: Callable[[], object]) -> Callable[[], object]:
        """Run a step, which uses the same tensors every time, and return a function that repeats it. RuntimeError: an
        operation of the step cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # compiles kernels and makes workspaces outside of the capture
            for _ in range(_WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(self._stream)
        # Other threads of the process may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            step()
        self._pool = graph.pool()
        return graph.replay

    def fetch(self, tensor: torch.Tensor) -> np.ndarray:
        """Wait for the device and copy a tensor to the host."""
        array: np.ndarray = tensor.cpu().numpy()
        return array


class Runner(Protocol):
    """A model and its cache: `RaggedModel` or `EagleRunner`."""

    cache: PagedCache
    dtype: torch.dtype
    vocab_size: int
    max_positions: int
    ids: np.ndarray | None
    """See `candidates`."""
    feature_size: int
    """Input numbers of a position beside its token, and output numbers for the next position; 0 except for EAGLE."""

    def step(
        self, batch: RaggedBatch, tokens: torch.Tensor, positions: torch.Tensor, features: torch.Tensor, /
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `(n, V)` and features of the next tokens, for rows with one new token each: tokens `(n,)`, sequence
        positions `(n,)`, features `(n, feature_size)`. Nothing waits for the device."""


class Burst(NamedTuple):
    """Rows of a burst, `(n,)` each."""

    rows: np.ndarray
    """Rows of the cache, with room for their shares."""
    tokens: np.ndarray
    """The token that each row reads first; `places` and `features` are its sequence position and its features."""
    ends: np.ndarray
    """Index in the line of the token that each row draws first; tokens to draft, 1 to `LONGEST`."""
    shares: np.ndarray
    places: np.ndarray
    rules: np.ndarray
    """Entries of `Rules.table`."""
    features: torch.Tensor


class Bursts:
    """Runs bursts of rows of up to `longest` tokens, with `most` candidates a draw, over the cache of a model, of which
    it takes a page. Not thread-safe."""

    def __init__(self, runner: Runner, longest: int, most: int, capturer: CudaCapturer) -> None:
        cache = runner.cache
        self._runner, self._cache, self._most, self._capturer = runner, cache, most, capturer
        self._columns = -(-longest // cache.page_size)
        row = cache.open(1) if cache.pages > 1 else None
        self._scratch = None if row is None else int(cache.page_table(np.array([row]), np.ones(1))[0, 0])
        """Page for writes that are never read; None: there are no bursts."""
        self._steps: dict[tuple[int, bool], _Step] = {}
        """(rows, whether some of them filter tokens) → step."""

    def takes(self, rows: np.ndarray, rules: np.ndarray) -> bool:
        """Whether a burst serves these rows of the cache, and the device can capture it."""
        return self._scratch is not None and len(rows) <= _BUCKETS[-1] and self._step(len(rows), rules) is not None

    @torch.inference_mode()
    def run(self, burst: Burst) -> tuple[list[Candidates], torch.Tensor]:
        """Draft the shares of all rows, which `takes` has accepted; their lengths in the cache grow by the shares.
        Returns for each step the draws of all rows, undefined past their shares; and the features of the next tokens,
        `(steps, n, feature_size)`."""
        n, steps, step = len(burst.rows), int(burst.shares.max()), self._step(len(burst.rows), burst.rules)
        assert step is not None
        step.load(burst)
        for _ in range(steps):
            step.replay()
        self._cache.lengths[burst.rows] += burst.shares
        packed = self._capturer.fetch(step.drawn[:steps, :n])
        return [unpacked(one, self._most) for one in packed], step.outputs[:steps, :n]

    @torch.inference_mode()
    def _step(self, rows: int, rules: np.ndarray) -> _Step | None:
        """The step of a bucket, captured at its first use; None if the capture has failed."""
        key = _BUCKETS[bisect.bisect_left(_BUCKETS, rows)], bool(filtered(rules).any())
        if key not in self._steps:
            try:
                step = _Step(self, *key)
                step.replay = self._capturer.capture(step)
            except RuntimeError as error:
                self._scratch, self._steps = None, {}
                fall_back(logger, f"Drafting runs without CUDA graphs: {str(error).splitlines()[0]}")
                return None
            self._steps[key] = step
        return self._steps[key]


class _Step(RaggedBatch):
    """One token of each of `rows` rows, padding included, in static tensors. `filters`: whether top-k or top-p may
    leave out tokens."""

    def __init__(self, bursts: Bursts, rows: int, filters: bool) -> None:
        cache, columns, scratch, runner = bursts._cache, bursts._columns, bursts._scratch, bursts._runner
        assert scratch is not None
        self._bursts, self._filled, device = bursts, scratch, cache.device
        self.replay: Callable[[], object] = self
        self._state = torch.zeros(6, rows, dtype=torch.int64, device=device)
        """int64 `(6, rows)`: token to read; tokens of the row in the cache; their number after its share; offset from
        the place of a token in the cache to its sequence position, and to the index in the line of the token that is
        drawn from it; number of the step."""
        self._pages = torch.full((rows, columns), scratch, dtype=torch.int32, device=device)
        self._keys = torch.ones(rows, dtype=torch.int64, device=device)
        self._rules = Rules(rows, device)
        self._rules.any_filtered = filters
        width = 5 if bursts._most == 1 else 4 + bursts._most
        self.drawn = torch.zeros(LONGEST, rows, width, dtype=torch.int64, device=device)
        self.outputs = torch.zeros(LONGEST, rows, runner.feature_size, dtype=runner.dtype, device=device)
        self._features = torch.zeros_like(self.outputs[0])
        # A `RaggedBatch` of these tensors.
        self.cache, self.num_tokens, self.most_queries = cache, rows, 1
        self.most_keys = columns * cache.page_size
        self.counts, self.starts = np.ones(rows, np.int64), np.arange(rows + 1)
        self.slots = torch.zeros(rows, dtype=torch.int64, device=device)
        self.device_starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.device_lengths, self.device_pages = self._keys.to(torch.int32), self._pages
        if device.type == "cpu":
            self.lengths, self.pages = self._keys.numpy(), self._pages.numpy()

    def load(self, burst: Burst) -> None:
        """Copy the rows of a burst to the device; the rest is padding."""
        n, cache = len(burst.rows), self.cache
        cached, rows = cache.lengths[burst.rows], len(self._keys)
        state, rules = np.zeros((6, rows), np.int64), np.zeros(rows, burst.rules.dtype)
        state[:5, :n] = burst.tokens, cached, cached + burst.shares, burst.places - cached, burst.ends - cached
        rules[:n] = burst.rules
        self._rules.table[:] = rules
        pages = cache.page_table(burst.rows, cached + burst.shares)
        table = np.full((rows, pages.shape[1]), self._filled, np.int32)
        table[:n] = pages
        on_device = to_device((state, rules.view(np.int64).reshape(rows, -1), table), cache.device)
        targets = self._state, self._rules.words, self._pages[:, : table.shape[1]]
        for target, source in zip(targets, on_device, strict=True):
            target.copy_(source)
        self._features[:n] = burst.features

    def __call__(self) -> None:
        """Read a token of each row, and draw the next one."""
        bursts, (tokens, cached, ends, positions, draws, number) = self._bursts, self._state
        size, newest = self.cache.page_size, torch.minimum(cached, ends - 1).clamp_(min=0)
        slots = self._pages.gather(1, (newest // size)[:, None])[:, 0] * size + newest % size
        self.slots.copy_(torch.where(cached < ends, slots, self._filled * size))
        self._keys.copy_(newest + 1)
        self.device_lengths.copy_(self._keys)
        logits, features = bursts._runner.step(self, tokens, newest + positions, self._features)
        drawn = candidates_on_device(logits, newest + draws, self._rules, bursts._most, ids=bursts._runner.ids)
        self.drawn.index_copy_(0, number[:1], drawn[None])
        self.outputs.index_copy_(0, number[:1], features[None])
        self._features.copy_(features)
        tokens.copy_(torch.where(drawn[:, 0] > 0, drawn[:, 2], tokens))
        cached.add_(1)
        number.add_(1)
