"""CUDA graphs of vLLM's steps: captured sizes, and support for rows with any number of draft tokens."""

from __future__ import annotations

from typing import Any

GRAPH_ARGUMENTS = {"compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "optimization_level"}
"""Arguments of vLLM's engine that determine graphs; if a user sets one of them, none is added."""
_HOPPER = 9
"""Major compute capability whose attention (FlashAttention 3) is captured for any mix of lengths. On other devices
vLLM's graphs of whole steps hold rows of one length, so steps with mixed lengths run in a graph per layer."""
_STRIDES = ((256, 8), (512, 16), (1024, 32), (1 << 20, 64))
"""(number of positions, stride of captured sizes up to it)."""


def graph_arguments(
    capability: tuple[int, int] | None, compiled: bool, max_batch: int, max_drafts: int, max_step_tokens: int
) -> dict[str, Any]:
    """Arguments of vLLM's engine for steps that verify drafts of mixed lengths.

    Args:
        capability: Compute capability of the device, major and minor; None on CPUs.
        compiled: Whether the model is compiled; vLLM captures nothing otherwise.
        max_batch: Most rows of a step.
        max_drafts: Most draft tokens of a row.
        max_step_tokens: Most positions of a step.
    """
    sizes = {"cudagraph_capture_sizes": capture_sizes(max_batch, max_drafts, max_step_tokens)}
    if capability is None or not compiled or not max_drafts or not sizes["cudagraph_capture_sizes"]:
        return {}  # vLLM's own sizes fit steps of one token per row
    return {**sizes, "compilation_config": {"cudagraph_mode": "FULL"}} if capability[0] == _HOPPER else sizes


def capture_sizes(max_batch: int, max_drafts: int, max_step_tokens: int) -> list[int]:
    """Numbers of positions of the captured steps, ascending: multiples of the longest row, to which vLLM would round
    them, up to the largest step that only decodes."""
    row = 1 + max_drafts
    most = min(max_batch * row, max_step_tokens) // row * row
    sizes, at = {most} - {0}, 0
    for end, stride in _STRIDES:
        while at < min(end, most):
            at += stride
            sizes.add(min(-(-at // row) * row, most))
    return sorted(sizes)
