"""A fixed sequence of tokens, and its log-probabilities by transformers' own code: the reference of every engine,
drafter and trainer after a load of weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

PROBE_LENGTH = 48


def probe_tokens(vocab_size: int, length: int = PROBE_LENGTH) -> np.ndarray:
    """int32 `(length,)`: the same tokens in every process, spread over the vocabulary."""
    return np.random.default_rng(0).integers(0, vocab_size, length, np.int32)


@torch.inference_mode()
def eager_logprobs(model: Any, tokens: np.ndarray) -> np.ndarray:
    """float32 `(n - 1,)`: log-probabilities of `tokens[1:]`, each after all tokens before it, in nats.

    One forward of an unchanged transformers model over the whole sequence, without a cache and with eager attention,
    which every other form of attention must equal.
    """
    ids = torch.from_numpy(tokens.astype(np.int64))[None].to(model.device)
    with _eager_attention(model):
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    chosen = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    return chosen.cpu().numpy()


@contextlib.contextmanager
def _eager_attention(model: Any) -> Iterator[None]:
    before, training = model.config._attn_implementation, model.training
    model.set_attn_implementation("eager")
    model.eval()
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        model.train(training)
