"""Seconds of work on a device, and CUDA graphs of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_FEWEST, _MOST = 3, 20
_ENOUGH_S = 0.15


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(call: Callable[[], object], device: torch.device, warm_ups: int = 2) -> float:
    """Median seconds of a call from launch to completion, as a step that needs its result sees it.

    3 to 20 repeats, as many as fit into 0.15 s.
    """
    for _ in range(warm_ups):
        call()
    synchronize(device)
    times: list[float] = []
    while len(times) < _FEWEST or (len(times) < _MOST and sum(times) < _ENOUGH_S):
        begin = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the call, which has to use the same tensors every time.

    Raises:
        RuntimeError: Something in it cannot be captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries allocate their workspaces outside of the capture
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph
