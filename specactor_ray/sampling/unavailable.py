"""Options of other engines that keyed sampling lacks, with their values without effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from specactor_ray.core.errors import InputError, UnavailableError, clipped

_LOGITS = "a draft token is verified against the model's own logits"
_CONTEXT = "a token depends on weights, context, seed and position only"
_ONE_SAMPLE = "an output is one sample of the model"
_TEXT = "requests are of text, for the model as it is loaded"


class Option(NamedTuple):
    """An option that is not available."""

    neutral: tuple[Any, ...]
    """Values without effect."""
    reason: str


UNAVAILABLE: Mapping[str, Option] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), Option((0, None), _CONTEXT)),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "typical_p"), Option((1, None), _CONTEXT)),
    **dict.fromkeys(("min_p", "min_tokens", "min_new_tokens"), Option((0, None), _LOGITS)),
    **dict.fromkeys(
        ("logit_bias", "bad_words", "allowed_token_ids", "logits_processors"), Option((None, {}, []), _LOGITS)
    ),
    **dict.fromkeys(("custom_logit_processor", "custom_params"), Option((None, {}), _LOGITS)),
    **dict.fromkeys(
        (
            *("structured_outputs", "structured_outputs_regex", "structural_tag", "regex", "ebnf", "json_schema"),
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding"),
        ),
        Option((None,), _LOGITS),
    ),
    "response_format": Option((None, {"type": "text"}), _LOGITS),
    "best_of": Option((None, 1), _ONE_SAMPLE),
    **dict.fromkeys(("use_beam_search", "early_stopping"), Option((None, False), _ONE_SAMPLE)),
    **dict.fromkeys(("beam_width", "num_beams"), Option((None, 1), _ONE_SAMPLE)),
    "flat_logprobs": Option((None, False), "log-probabilities have one form"),
    "truncate_prompt_tokens": Option((None,), "a prompt that is too long fails alone"),
    **dict.fromkeys(("lora_request", "lora_path", "features", "multi_modal_data"), Option((None,), _TEXT)),
}
"""Name in vLLM, SGLang, TRL or OpenAI's interface → option."""


def refuse(options: Mapping[str, Any], where: str = "") -> None:
    """Raise UnavailableError for the first unavailable option of `options` with a value other than a neutral one; names
    that are not listed pass. `where`: begin of the message, such as `TRL: `."""
    for name, value in options.items():
        option = UNAVAILABLE.get(name)
        if option is not None and value not in option.neutral:
            raise UnavailableError(name, clipped(value), option.reason, where)


def translated(
    options: Mapping[str, Any],
    known: Sequence[str],
    where: str,
    ignored: Sequence[str] = (),
    neutral: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """The options that `SamplingParams` has as well, the `known` ones, without null; `top_k` -1 means all tokens, as in
    vLLM. InputError: another option is set, but for `ignored` ones, which change no token, and those with their
    `neutral` value, null or an empty list."""
    refuse(options, where)
    for name, value in options.items():
        is_neutral = value in (None, [], ()) or (name in neutral and value == neutral[name])
        if name not in (*known, *ignored, *UNAVAILABLE) and not is_neutral:
            raise InputError(
                f"{where}{name}={value!r} is not available: sampling is keyed. Fix: leave it out; available are "
                f"{', '.join(known)}"
            )
    found = {name: options[name] for name in known if options.get(name) is not None}
    if found.get("top_k") == -1:
        found["top_k"] = 0
    return found
