"""A fixed sequence of tokens, and its log-probabilities by transformers' own code: the reference of every engine,
drafter and trainer after a load of weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from specactor_ray.core.errors import WeightsError
from specactor_ray.core.types import Probe
from specactor_ray.models.builtin import quiet_transformers
from specactor_ray.models.loading import load_empty_model, parse_dtype
from specactor_ray.models.rotary import fix_positions

PROBE_LENGTH = 48
LONGEST_WINDOW = 512
"""Largest attention window, in tokens, that the comparison at load exceeds; a larger one costs too long a forward."""


def probe_tokens(vocab_size: int, length: int = PROBE_LENGTH) -> np.ndarray:
    """int32 `(length,)`: the same tokens in every process, spread over the vocabulary."""
    return np.random.default_rng(0).integers(0, vocab_size, length, np.int32)


def probe_of(
    name: str,
    dtype: str,
    weights: Mapping[str, torch.Tensor],
    *,
    trust_remote_code: bool = False,
    max_model_len: int | None = None,
) -> Probe:
    """What transformers computes on the CPU for the model `name` in `dtype` with these weights, which are not copied,
    and with the positions of a context of `max_model_len` tokens (None: the model's). Raises WeightsError if they are
    incomplete, or give no finite numbers."""
    empty = load_empty_model(name, trust_remote_code=trust_remote_code)
    state, kind = dict(weights), parse_dtype(dtype)
    with quiet_transformers():
        model, info = type(empty).from_pretrained(  # also makes the tables that are not weights
            None, config=empty.config, state_dict=state, dtype=kind, output_loading_info=True
        )
    if info["missing_keys"]:
        raise WeightsError(f"the weights lack {sorted(info['missing_keys'])[0]}")
    fix_positions(model, max_model_len)
    tokens = _tokens_for(model)
    model.eval()
    logprobs = eager_logprobs(model, tokens)
    if not np.isfinite(logprobs).all():
        raise WeightsError(
            "the new weights give log-probabilities that are no finite numbers; the training has diverged"
        )
    return _with_tolerance(model, tokens, logprobs, (name, dtype))


def probe_model(model: Any) -> Probe:
    """What transformers computes for a loaded, unchanged model, on its device and in its data type; `PROBE_LENGTH`
    tokens beyond its window if that is small."""
    text = model.config.get_text_config()
    found = [window for name in _WINDOWS if isinstance(window := getattr(text, name, None), int)]
    longest = max((window for window in found if window <= LONGEST_WINDOW), default=0)
    tokens = _tokens_for(model, PROBE_LENGTH + longest)
    return _with_tolerance(model, tokens, eager_logprobs(model, tokens), None)


_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "local_attention")


def _tokens_for(model: Any, length: int = PROBE_LENGTH) -> np.ndarray:
    """`probe_tokens` of a model, at most `length`, as many as its context takes."""
    config = model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or PROBE_LENGTH
    return probe_tokens(config.vocab_size, min(length, longest))


def _with_tolerance(model: Any, tokens: np.ndarray, logprobs: np.ndarray, key: tuple[str, str] | None) -> Probe:
    """A probe with the tolerance of the model's data type. `key`: under which its noise is kept."""
    probe = Probe(tokens, logprobs, _EXACT_NATS)
    if model.dtype == torch.float32:
        return probe
    noise = _noise.get(key) if key else None
    if noise is None:
        noise = probe.gap(logprobs_as_set(model, tokens))
    if key:
        _noise[key] = noise
    return probe._replace(tolerance=max(_ROUNDED_NATS, _TIMES_NOISE * noise))


_EXACT_NATS, _ROUNDED_NATS, _TIMES_NOISE = 1e-3, 0.05, 6.0
"""Tolerance in float32; least tolerance in 16 bits, and its ratio to the noise of the model."""
_FURTHEST_NATS = 0.01
"""Largest difference of one log-probability in float32 that rounding explains."""
_noise: dict[tuple[str, str], float] = {}
"""Model and data type → gap between two forms of attention, in nats, with its first weights here: it depends on the
model and costs a forward."""


def far_from(probe: Probe, logprobs: np.ndarray, exact: bool) -> str:
    """How far log-probabilities of a probe's tokens, or of the first ones, are from it, if rounding does not explain
    it; else empty. `exact`: they were computed in float32, where none may be far."""
    gap, furthest = probe.gap(logprobs), float(np.abs(logprobs - probe.logprobs[: len(logprobs)]).max())
    if gap <= probe.tolerance and (not exact or furthest <= _FURTHEST_NATS):  # the former is false for NaN
        return ""
    return f"{gap:.3g} nats on average and {furthest:.3g} at most, and rounding explains {probe.tolerance:.3g}"


def eager_logprobs(model: Any, tokens: np.ndarray) -> np.ndarray:
    """float32 `(n - 1,)`: log-probabilities of `tokens[1:]`, each after all tokens before it, in nats.

    One forward of an unchanged transformers model over the whole sequence, without a cache and with eager attention,
    which every other form of attention must equal.
    """
    with _eager_attention(model):
        return logprobs_as_set(model, tokens)


@torch.inference_mode()
def logprobs_as_set(model: Any, tokens: np.ndarray) -> np.ndarray:
    """`eager_logprobs` with the attention and the mode that the model is set to."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None].to(model.device)
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
