"""`ngram`: look-ups in the request's own text and in outputs of the same prompt.

Prompt lookup decoding (Saxena, 2023) with the other samples of the prompt, as in SuffixDecoding (arXiv 2411.04975). It
fills the window wherever there is a match; `suffix.py` also looks at other prompts and limits its drafts.
"""

from __future__ import annotations

from typing import Self

from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.draft.lookup.proposer import LookupProposer
from specactor_ray.draft.registry import BUILT_IN

DEFAULT_HISTORY_TOKENS = 1 << 16


class NgramProposer(LookupProposer):
    """The `ngram` method; arguments as in `LookupProposer`."""

    method = "ngram"
    traits = BUILT_IN[method].traits

    def __init__(
        self, min_match: int = 2, max_match: int = 8, history_tokens: int = DEFAULT_HISTORY_TOKENS, max_batch: int = 64
    ) -> None:
        super().__init__(min_match, max_match, history_tokens, max_batch, scopes=1)

    @classmethod
    def from_config(cls, config: DrafterConfig, target: TargetConfig, device: str) -> Self:
        kept = DEFAULT_HISTORY_TOKENS if config.history_tokens is None else config.history_tokens
        return cls(config.min_match, config.max_match, kept, config.max_batch)
