"""Published measurements, and what the cost models say in their place.

A gain is `acceptance length · plain step / round`, with the acceptance of the source. A round of w draft tokens with a
verify step of V seconds and D seconds per draft token takes

    coupled    V + w·D
    decoupled  max(V, w·D) after a full match (probability p^w), V + w·D after a miss: the drafter starts again from the
               token that the verifier chose, and the verifier waits for it

where p is the probability per token for which w tokens give the accepted length of the source. Nothing is fitted per
point; docs/design/cost-models.md has the assumptions.
"""

from __future__ import annotations

from dataclasses import dataclass

from specactor_ray.simulation.hardware import DeviceSpec, RooflineCost, RooflineHardware, load_hardware

TOLERANCE = 0.15
"""Largest difference of a prediction."""

_CONTEXT = 1024
"""Assumed tokens of context per request where a source names none."""
_SGLANG_PR = "sgl-project/sglang pull request 22520, math"
_NEMO_RL = "arXiv 2604.26779, Qwen3-8B"

_SGLANG_GAINS = (
    # batch, draft tokens accepted of 5, gain
    (1, 1.621, 1.806),
    (4, 1.392, 1.831),
    (8, 1.536, 1.914),
    (16, 1.569, 1.813),
    (32, 1.468, 1.555),
    (64, 1.516, 1.209),
)
_SGLANG_WINDOW = 5
_SGLANG_PLAIN_TOKENS_PER_S = 64.847
"""Plain decoding of Llama-3.3-70B with 8 GPUs at batch 1."""
_SGLANG_PLAIN_64_TOKENS_PER_S = 51.171


@dataclass(frozen=True, slots=True)
class PublishedPoint:
    """One figure of a source beside the prediction."""

    name: str
    published: float
    predicted: float
    source: str

    @property
    def difference(self) -> float:
        """(predicted - published) / published."""
        return self.predicted / self.published - 1.0

    @property
    def within(self) -> bool:
        return abs(self.difference) <= TOLERANCE


def published_points() -> list[PublishedPoint]:
    """All points, computed from the shipped hardware files."""
    h100, gb200 = roofline("h100"), roofline("gb200")
    return [_plain_step(h100), _more_rows(h100), _memory_bound(h100), *_decoupled(h100), *_inline_heads(gb200)]


def roofline(name: str) -> RooflineHardware:
    hardware = load_hardware(name)
    assert isinstance(hardware, RooflineHardware)
    return hardware


def _plain_step(h100: RooflineHardware) -> PublishedPoint:
    predicted = h100.cost("llama-3.1-8b").seconds(1, 1, _CONTEXT)
    source = "SGLang documentation, speculative decoding: MT-Bench, 1 H100, 158.34 tokens/s"
    return PublishedPoint("Llama-3.1-8B: plain step at batch 1, ms", 1e3 / 158.34, 1e3 * predicted, source)


def ridge(device: DeviceSpec) -> float:
    """FLOP per byte of the data sheet at which neither bound is the lower."""
    return device.peak_tflops / device.memory_bandwidth_tb_s


def crossover(device: DeviceSpec) -> float:
    """Positions from which a bf16 linear takes longer to compute than its weights to read: 2 flops per 2 bytes."""
    return ridge(device) * device.compute_share / device.bandwidth_share


def draft_seconds(cost: RooflineCost, rows: int, tokens_per_row: int, context_tokens: int) -> float:
    """Seconds to draft `tokens_per_row` tokens for every row, one after the other. An EAGLE head fuses the target's
    hidden states once. `context_tokens`: cached tokens over all rows when drafting starts."""
    if rows <= 0 or tokens_per_row <= 0:
        return 0.0
    grown = context_tokens + rows * (tokens_per_row - 1) // 2  # on average over the steps
    return tokens_per_row * cost.seconds(rows, rows, grown) + cost.fusion_seconds(rows)


def _more_rows(h100: RooflineHardware) -> PublishedPoint:
    cost = h100.cost("qwen2.5-32b", 4)
    base = cost.seconds(128, 128, 128 * _CONTEXT)
    predicted = cost.seconds(256, 256, 256 * _CONTEXT) / base
    return PublishedPoint("Qwen2.5-32B: 256 against 128 positions, times", 1.4, predicted, "arXiv 2511.16193")


def _memory_bound(h100: RooflineHardware) -> PublishedPoint:
    name = "H100: batch x (k+1) that ends the memory-bound regime"
    return PublishedPoint(name, 296.0, crossover(h100.device), "peak / bandwidth, NVIDIA H100 data sheet")


def _decoupled(h100: RooflineHardware) -> list[PublishedPoint]:
    name, drafter = "Llama-3.3-70B TP8, 1B drafter", h100.cost("llama-3.2-1b")
    bare = h100.cost("llama-3.3-70b", 8)
    host_s = 1.0 / _SGLANG_PLAIN_TOKENS_PER_S - bare.seconds(1, 1, _CONTEXT)
    target = h100.cost("llama-3.3-70b", 8, host_s=host_s)
    points = [
        PublishedPoint(
            f"{name}: gain at batch {batch}", published, _decoupled_gain(target, drafter, batch, accepted), _SGLANG_PR
        )
        for batch, accepted, published in _SGLANG_GAINS
    ]
    step, published = 1e3 * target.seconds(64, 64, 64 * _CONTEXT), 1e3 / _SGLANG_PLAIN_64_TOKENS_PER_S
    return [*points, PublishedPoint("Llama-3.3-70B TP8: plain step at batch 64, ms", published, step, _SGLANG_PR)]


def _decoupled_gain(target: RooflineCost, drafter: RooflineCost, batch: int, accepted: float) -> float:
    window, context = _SGLANG_WINDOW, batch * _CONTEXT
    verify_s = target.seconds(batch, batch * (window + 1), context)
    draft_s = draft_seconds(drafter, batch, window, context)
    full_match = _probability(accepted, window) ** window
    round_s = verify_s + (1.0 - full_match) * draft_s + full_match * max(draft_s - verify_s, 0.0)
    return (1.0 + accepted) * target.seconds(batch, batch, context) / round_s


def _inline_heads(gb200: RooflineHardware) -> list[PublishedPoint]:
    rows, window, context = 32, 3, 4096
    target, head = gb200.cost("qwen3-8b"), gb200.cost("qwen3-8b-eagle3")
    plain_s = target.seconds(rows, rows, rows * context)
    verify_s = target.seconds(rows, rows * (window + 1), rows * context)
    round_s = verify_s + draft_seconds(head, rows, window, rows * context)
    return [
        PublishedPoint(f"{what}: gain of rollout", gain, length * plain_s / round_s, _NEMO_RL)
        for what, length, gain in (
            ("Qwen3-8B, EAGLE-3, acceptance length 2.47", 2.47, 1.8),
            ("Qwen3-8B, EAGLE-3, acceptance length 2.05", 2.05, 1.54),
        )
    ]


def _probability(accepted: float, window: int) -> float:
    """The chance per token with which `accepted` of `window` draft tokens are right on average."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(1, window + 1)) < accepted else (low, middle)
    return low
