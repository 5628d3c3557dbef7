"""Sampling options of other engines: read as fields of `SamplingParams`, ignored, or refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from specactor_ray.core.errors import UnavailableError, clipped, did_you_mean
from specactor_ray.core.types import SamplingParams

FIELDS = tuple(one.name for one in fields(SamplingParams))

_LOGITS = "a draft token is verified against the model's own logits"
_SAMPLING = "sampling has temperature, top_k and top_p only"
_ONE_SAMPLE = "an output is one sample of the model"
_TEXT = "requests are of text, for the model as it is loaded"
_FORM = "prompts and outputs have one form"


UNAVAILABLE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), ((0,), _SAMPLING)),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "typical_p"), ((1,), _SAMPLING)),
    **dict.fromkeys(("min_p", "min_tokens", "min_new_tokens"), ((0,), _LOGITS)),
    **dict.fromkeys(("logit_bias", "bad_words", "allowed_token_ids", "logits_processors"), (({}, []), _LOGITS)),
    **dict.fromkeys(("custom_logit_processor", "custom_params"), (({},), _LOGITS)),
    **dict.fromkeys(
        (
            *("structured_outputs", "structured_outputs_regex", "structural_tag", "regex", "ebnf", "json_schema"),
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding"),
        ),
        ((), _LOGITS),
    ),
    "response_format": (({"type": "text"},), _LOGITS),
    "n": ((1,), "send a request for each sample"),
    "best_of": ((1,), _ONE_SAMPLE),
    **dict.fromkeys(("use_beam_search", "early_stopping"), ((False,), _ONE_SAMPLE)),
    **dict.fromkeys(("beam_width", "num_beams"), ((1,), _ONE_SAMPLE)),
    "flat_logprobs": ((False,), "log-probabilities have one form"),
    **dict.fromkeys(("skip_special_tokens", "detokenize", "add_special_tokens"), ((True,), _FORM)),
    "include_reasoning": ((True,), _FORM),
    **dict.fromkeys(("separate_reasoning", "stream_reasoning"), ((True, False), _FORM)),
    "modalities": ((["text"],), _FORM),
    "spaces_between_special_tokens": ((True, False), _FORM),
    **dict.fromkeys(("echo", "return_prompt_text"), ((False,), _FORM)),
    "do_sample": ((True,), "temperature 0 selects the most probable token"),
    "enable_thinking": ((), "templates get it in chat_template_kwargs"),
    "reasoning_effort": (("none",), "templates get it in chat_template_kwargs"),
    "function_call": (("auto", "none"), "outputs are not forced into a form"),
    "extra_args": (({},), _FORM),
    "chat_template": ((), "templates are programs; the model's is used"),
    "truncate_prompt_tokens": ((), "a prompt that is too long fails alone"),
    "truncation_side": (("left", "right"), "a prompt that is too long fails alone"),
    "thinking_token_budget": ((-1,), _LOGITS),
    **dict.fromkeys(("watermarking", "repetition_detection"), ((False,), _SAMPLING)),
    "logprob_token_ids": (([],), "log-probabilities have one form"),
    "routed_experts_prompt_start": ((0,), "routed experts are not recorded"),
    **dict.fromkeys(("lora_request", "lora_path", "features", "multi_modal_data", "prompt_embeds"), ((), _TEXT)),
}
"""Option that is not available, by its name in vLLM, SGLang, TRL or OpenAI's interface → values without effect, besides
null, and the reason."""


def requests_nothing(value: Any) -> bool:
    """Whether an unknown option has a value without effect: null, false, or an empty text, list or object."""
    return value is None or value is False or (isinstance(value, str | list | tuple | dict) and not value)


@dataclass(frozen=True, slots=True)
class Dialect:
    """The sampling options of one interface."""

    known: Sequence[str]
    """Options that are read, with the names of `SamplingParams`."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Options that are read, with other names → field of `SamplingParams`."""
    ignored: Collection[str] = ()
    """Options that change no token."""
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Option → values without effect, besides those of `UNAVAILABLE`."""
    others: Sequence[str] = ()
    """Options that the caller reads, for messages."""
    where: str = ""
    """Begin of messages, such as `TRL: `."""

    def read(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of `SamplingParams`; null counts as not given, and `top_k` -1 means all tokens, as in vLLM.

        Raises:
            UnavailableError: An option might be meant to change the output: one of `UNAVAILABLE` has an effect, or an
                unknown one requests something (`requests_nothing`).
        """
        names = {**dict(zip(self.known, self.known, strict=True)), **self.renamed}
        found = {}
        for name, value in options.items():
            if value is None or name in self.ignored or value in self.neutral.get(name, ()):
                continue
            if name in names:
                found[names[name]] = value
            elif (option := UNAVAILABLE.get(name)) is not None:
                neutral, reason = option
                if value not in neutral:
                    raise UnavailableError(name, clipped(value), reason, where=self.where)
            elif not requests_nothing(value):
                every = (*self.others, *names)
                reason, hint = f"the options are {', '.join(every)}", did_you_mean(name, every)
                raise UnavailableError(name, clipped(value), reason, f"leave it out.{hint}".rstrip("."), self.where)
        if found.get("top_k") == -1:
            found["top_k"] = 0
        if isinstance(found.get("stop"), str):
            found["stop"] = (found["stop"],)
        return found
