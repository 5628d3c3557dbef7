"""`suffix`: look-ups in all outputs of the run, with drafts as long as their estimated probability allows.

SuffixDecoding (arXiv 2411.04975) over the many samples per prompt of reinforcement learning; recent outputs count more,
as in DAS (arXiv 2511.13841). Beyond `ngram` it

- has a third source, all outputs of the run;
- adds the target's noise to the votes at temperatures above 0;
- stops at `length_factor` tokens per matched one, or when the path's probability falls below `min_probability`.
"""

from __future__ import annotations

from typing import Self

from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.draft.lookup.proposer import LookupProposer
from specactor_ray.draft.registry import BUILT_IN

DEFAULT_HISTORY_TOKENS = 1 << 20


class SuffixProposer(LookupProposer):
    """The `suffix` method; arguments as in `LookupProposer`, `length_factor` above 0."""

    method = "suffix"
    traits = BUILT_IN[method].traits

    def __init__(
        self,
        min_match: int = 2,
        max_match: int = 8,
        history_tokens: int = DEFAULT_HISTORY_TOKENS,
        max_batch: int = 64,
        length_factor: float = 2.0,
        min_probability: float = 0.1,
        *,
        shared_noise: bool = True,
    ) -> None:
        if not 0.0 < length_factor < float("inf") or not 0.0 <= min_probability < 1.0:
            raise ValueError(
                f"length_factor is {length_factor} (above 0), min_probability is {min_probability} (0 to below 1)"
            )
        super().__init__(
            min_match, max_match, history_tokens, max_batch, scopes=2, length_factor=length_factor,
            min_probability=min_probability, shared_noise=shared_noise,
        )  # fmt: skip

    @classmethod
    def from_config(cls, config: DrafterConfig, target: TargetConfig, device: str) -> Self:
        kept = DEFAULT_HISTORY_TOKENS if config.history_tokens is None else config.history_tokens
        limits = (config.min_match, config.max_match, kept, config.max_batch)
        return cls(*limits, config.length_factor, config.min_probability, shared_noise=config.shared_noise)
