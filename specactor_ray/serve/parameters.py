"""Fields of a request → sampling parameters. Unsupported fields that would change an output are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from specactor_ray.core.errors import InputError, clipped, did_you_mean
from specactor_ray.core.types import SamplingParams
from specactor_ray.sampling.unavailable import UNAVAILABLE, refuse
from specactor_ray.serve.refusal import Refusal, refusal_of

MOST_CHOICES = 1024
"""Most outputs of a request."""
_TRANSLATED = (
    *("temperature", "top_p", "top_k", "max_tokens", "seed", "stop", "stop_token_ids", "include_stop_str_in_output"),
    *("ignore_eos", "first_position", "logprobs", "prompt_logprobs"),
)
"""Fields that `SamplingParams` has as well."""
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "detokenize": (True,),
    "add_special_tokens": (True,),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "chat_template": (),
    "documents": ([],),
    "vllm_xargs": ({},),
    "extra_args": ({},),
    "reasoning_effort": (),
    "prediction": (),
    "audio": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
}
"""Fields of prompts and texts with one supported form → their allowed values besides null."""
HARMLESS = frozenset(
    (
        *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "cache_salt"),
        *("prompt_cache_retention", "request_id", "session", "priority", "stream", "stream_options", "output_kind"),
        *("return_token_ids", "return_tokens_as_token_ids", "parallel_tool_calls", "kv_transfer_params", "verbosity"),
    )
)
"""Fields that change no token: read elsewhere, or ignored."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Sampling options that a request sets."""

    sampling: SamplingParams
    """Its seed is that of the request; the seeds of several choices are derived from it."""
    n: int = 1
    """Number of choices of each prompt."""
    logprobs: int | None = None
    """Number of reported alternatives per token; None reports no log-probabilities."""


def wanted_of(given: Mapping[str, Any], default: SamplingParams, seed: int) -> Wanted:
    """Read the fields of a request that concern sampling.

    Args:
        given: All fields; null counts as not given. `top_k` -1 means off. Fields in `HARMLESS` are skipped.
        default: Values of fields that are not given.
        seed: Seed for a request without one.

    Raises:
        Refusal: A value is out of range, or a field is unsupported or unknown.
    """
    values = {name: value for name, value in given.items() if value is not None and name not in HARMLESS}
    n = _number_of_choices(values.pop("n", 1))
    own = {name: values.pop(name) for name in _TRANSLATED if name in values}
    if values.get("best_of") == n:
        del values["best_of"]
    for name, value in values.items():
        _refuse_unless_fixed(name, value)
    if own.get("top_k") == -1:
        own["top_k"] = 0
    if "prompt_logprobs" in own:
        own["prompt_logprobs"] = _asks_for_prompt_logprobs(own["prompt_logprobs"])
    if isinstance(own.get("stop"), str):
        if not own["stop"]:
            raise Refusal("stop is ''; it must have 1 or more characters", param="stop")
        own["stop"] = (own["stop"],)
    try:
        refuse(values)
        sampling = replace(default, **{"seed": seed, "logprobs": 0, **own})
    except InputError as error:
        raise refusal_of(error) from None
    return Wanted(sampling, n, sampling.logprobs if "logprobs" in own else None)


def _asks_for_prompt_logprobs(value: Any) -> bool:
    """`false` requests nothing; in vLLM 0 requests the log-probabilities of the prompt's own tokens."""
    if value not in (0, 1):
        problem = "log-probabilities of a prompt are those of its own tokens: 0 or 1"
        raise Refusal(f"prompt_logprobs is {clipped(value)}; {problem}", param="prompt_logprobs")
    return value is not False


def _refuse_unless_fixed(name: str, value: Any) -> None:
    if name in UNAVAILABLE:
        return
    if name not in _FIXED:
        known = ("n", *_TRANSLATED, *UNAVAILABLE, *_FIXED, *HARMLESS)
        raise Refusal(f"{clipped(name)} is not known here; leave it out.{did_you_mean(name, known)}", param=name[:64])
    if value not in _FIXED[name]:
        raise Refusal(f"{name}={clipped(value)} is not available; leave it out", param=name)


def _number_of_choices(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MOST_CHOICES:
        raise Refusal(f"n is {clipped(value)}; it must be a whole number from 1 to {MOST_CHOICES}", param="n")
    return value
