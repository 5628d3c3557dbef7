"""A device for captured steps without a GPU: what is captured is repeated as Python on the same tensors."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import numpy as np
import torch


class FakeCapturer:
    """Does what `CudaCapturer` does, and counts. `refuses`: whether nothing can be captured; `most`: tokens of the
    largest step for which there is memory. As a CUDA graph, a captured step keeps no object alive."""

    def __init__(self, refuses: bool = False, most: int = 1 << 30) -> None:
        self.captures = self.warm_ups = self.launches = self.fetches = self.releases = 0
        self.most, self._refuses = most, refuses

    def capture(self, step: Callable[[], object], known: bool = False) -> Callable[[], object]:
        if self._refuses:
            raise RuntimeError("operation not permitted when stream is capturing\nmore about it")
        assert isinstance(step, functools.partial)
        if step.args[0].num_tokens > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB")
        self.captures += 1
        self.warm_ups += not known
        releases, run, batch = self.releases, weakref.WeakMethod(step.func), weakref.ref(step.args[0])

        def replay() -> None:
            assert self.releases == releases, "memory of the step was freed"
            self.launches += 1
            run()(batch())  # type: ignore[misc]

        return replay

    def release(self) -> None:
        self.releases += 1

    def fetch(self, tensor: torch.Tensor) -> np.ndarray:
        self.fetches += 1
        return tensor.cpu().numpy().copy()
