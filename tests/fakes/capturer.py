"""A device for bursts without a GPU: what is captured is repeated as Python on the same tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch


class FakeCapturer:
    """Implements `Capturer`, and counts."""

    def __init__(self, refuses: bool = False) -> None:
        self.captures = self.launches = self.fetches = 0
        self._refuses = refuses

    def capture(self, step: Callable[[], None]) -> Callable[[], object]:
        step()  # as warm-up
        if self._refuses:
            raise RuntimeError("operation not permitted when stream is capturing\nmore about it")
        self.captures += 1

        def replay() -> None:
            self.launches += 1
            step()

        return replay

    def fetch(self, tensor: torch.Tensor) -> np.ndarray:
        self.fetches += 1
        return tensor.cpu().numpy().copy()
