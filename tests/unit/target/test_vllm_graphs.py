"""Which steps of vLLM are captured on a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from specactor_ray.target.vllm_graphs import capture_sizes, graph_arguments

FULL = {"cudagraph_mode": "FULL"}


@pytest.mark.parametrize(
    ("capability", "mode"), [((9, 0), FULL), ((8, 0), None), ((8, 9), None), ((10, 0), None), ((12, 0), None)]
)
def test_whole_steps_of_mixed_lengths_are_captured_on_hopper(capability: tuple[int, int], mode: Any) -> None:
    arguments = graph_arguments(capability, True, 128, 8, 2048)
    assert arguments.get("compilation_config") == mode
    assert arguments["cudagraph_capture_sizes"] == capture_sizes(128, 8, 2048)


@pytest.mark.parametrize(
    ("capability", "compiled", "drafts", "step_tokens"),
    [(None, True, 8, 2048), ((9, 0), False, 8, 2048), ((9, 0), True, 0, 2048), ((9, 0), True, 8, 8)],
    ids=["cpu", "eager", "plain", "no row fits"],
)
def test_vllm_decides_elsewhere(
    capability: tuple[int, int] | None, compiled: bool, drafts: int, step_tokens: int
) -> None:
    assert graph_arguments(capability, compiled, 128, drafts, step_tokens) == {}


@pytest.mark.parametrize("batch", [1, 7, 128, 512])
@pytest.mark.parametrize("drafts", [1, 3, 8, 64])
@pytest.mark.parametrize("step_tokens", [512, 2048, 8192])
def test_sizes_cover_every_step_that_decodes(batch: int, drafts: int, step_tokens: int) -> None:
    row, sizes = 1 + drafts, capture_sizes(batch, drafts, step_tokens)
    assert sizes == sorted(set(sizes)) and all(size % row == 0 for size in sizes)
    assert min(batch * row, step_tokens) - row < sizes[-1] <= min(batch * row, step_tokens)
    assert sizes[0] == min(sizes[-1], -(-8 // row) * row)
    assert all(after - before <= 64 + row for before, after in itertools.pairwise(sizes))
