"""Fields of a request → how to sample. What would change sampling and is not there is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from specactor_ray.errors import InputError, clipped, did_you_mean
from specactor_ray.messages import SamplingParams
from specactor_ray.serve.refusal import Refusal, refusal_of

MOST_STOPS = 16
"""Stop strings of a request."""
MOST_CHOICES = 1024
"""Outputs of a request."""
_TRANSLATED = ("temperature", "top_p", "top_k", "max_tokens", "seed", "stop_token_ids", "ignore_eos", "first_position")
"""Fields that `SamplingParams` has, too."""
_OTHERS = ("n", "stop", "logprobs")
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "detokenize": (True,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "vllm_xargs": ({},),
    "extra_args": ({},),
}
"""Fields that are not available → the values, beside null, that ask for nothing."""
HARMLESS = frozenset(
    (
        *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "cache_salt"),
        *("prompt_cache_retention", "request_id", "session", "priority", "stream", "stream_options", "features"),
        *("return_token_ids", "return_tokens_as_token_ids", "parallel_tool_calls", "output_kind", "kv_transfer_params"),
        *("top_logprobs", "flat_logprobs", "verbosity"),
    )
)
"""Fields that change no token: read elsewhere, or ignored."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks for."""

    sampling: SamplingParams
    """Its seed is the request's, from which those of several choices are derived."""
    n: int = 1
    """Choices of each prompt."""
    stop: tuple[str, ...] = ()
    """Texts that end an output and are cut off it."""
    logprobs: int | None = None
    """Alternatives of each token that are reported; None reports no log-probabilities."""


def wanted_of(given: Mapping[str, Any], default: SamplingParams, seed: int) -> Wanted:
    """Read the fields of a request that concern sampling.

    Args:
        given: All fields; null is as if it was not given. `top_k` -1 is off. Those in `HARMLESS` are left to others.
        default: Of what is not given.
        seed: Of a request that brings none.

    Raises:
        Refusal: A value is out of range, a field is not available here, or is unknown.
    """
    values = {name: value for name, value in given.items() if value is not None and name not in HARMLESS}
    n = _whole("n", values.pop("n", 1), 1, MOST_CHOICES)
    logprobs = values.pop("logprobs", None)
    stop = _stops(values.pop("stop", ()))
    own = {name: values.pop(name) for name in _TRANSLATED if name in values}
    for name, value in values.items():
        _refuse_unless_neutral(name, value, n)
    if own.get("top_k") == -1:
        own["top_k"] = 0
    if isinstance(own.get("stop_token_ids"), list):
        own["stop_token_ids"] = tuple(own["stop_token_ids"])
    try:
        sampling = replace(default, seed=seed)
        sampling = replace(sampling, **own)
    except InputError as error:
        raise refusal_of(error) from None
    return Wanted(sampling, n, stop, None if logprobs is None else _whole("logprobs", logprobs, 0, 20))


def _refuse_unless_neutral(name: str, value: Any, n: int) -> None:
    if name not in NEUTRAL:
        known = (*_TRANSLATED, *_OTHERS, *NEUTRAL, *HARMLESS)
        raise Refusal(f"{clipped(name)} is not known here{did_you_mean(name, known)}", param=name[:64])
    if value not in NEUTRAL[name] and not (name == "best_of" and value == n):
        raise Refusal(
            f"{name} is not available: an output depends on weights, prompt, seed and position only. Leave it out",
            param=name,
        )


def _whole(name: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise Refusal(f"{name} is {clipped(value)}; it must be a whole number from {least} to {most}", param=name)
    return value


def _stops(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    good = isinstance(texts, list | tuple) and len(texts) <= MOST_STOPS
    if not good or not all(isinstance(one, str) and one for one in texts):
        raise Refusal(
            f"stop is {clipped(value)}; it must be a text or up to {MOST_STOPS} texts, none of them empty", param="stop"
        )
    return tuple(texts)
