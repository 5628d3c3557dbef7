"""A device for captured steps without a GPU: what is captured is repeated as Python on the same tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch


class FakeCapturer:
    """Does what `CudaCapturer` does, and counts."""

    def __init__(self, refuses: bool = False) -> None:
        self.captures = self.launches = self.fetches = self.releases = 0
        self._refuses = refuses

    def capture(self, step: Callable[[], object]) -> Callable[[], object]:
        if self._refuses:
            raise RuntimeError("operation not permitted when stream is capturing\nmore about it")
        self.captures += 1
        releases = self.releases

        def replay() -> None:
            assert self.releases == releases, "memory of the step was freed"
            self.launches += 1
            step()

        return replay

    def release(self) -> None:
        self.releases += 1

    def fetch(self, tensor: torch.Tensor) -> np.ndarray:
        self.fetches += 1
        return tensor.cpu().numpy().copy()
