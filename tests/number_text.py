"""A tokenizer for simulated outputs, so that stop texts can end them."""

from __future__ import annotations

from collections.abc import Sequence

from specactor_ray.core.types import SamplingParams
from specactor_ray.simulation.text import HashedText, true_output


class NumberText:
    """Token n reads `n,`."""

    def __len__(self) -> int:
        return HashedText.vocab_size

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"{token}," for token in tokens)

    def batch_decode(self, rows: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        return list(map(self.decode, rows))


def stopped_output(sampling: SamplingParams, version: int = 0) -> tuple[tuple[int, ...], str]:
    """Tokens and text of a whole output, up to its first stop text."""
    tokens, text = true_output(sampling, version), NumberText()
    for end in range(1, len(tokens) + 1) if sampling.stop else ():
        part = text.decode(tokens[:end])
        if begins := [part.find(stop) for stop in sampling.stop if stop in part]:
            return tokens[:end], part[: min(begins)]
    return tokens, text.decode(tokens)
