"""Conversations token by token: the next prompt is all tokens so far, then the chat template's text between turns.

An output is not tokenized again: its text may have other tokens than the sampled ones, and then neither
log-probabilities nor the verifier's cache would fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specactor_ray.core.errors import InputError
from specactor_ray.rollout.prompts import render_messages, tokenize_text

Message = dict[str, Any]
"""`{"role": ..., "content": ...}`, as in prompts."""
_OUTPUT = "0utput"
"""Placeholder for an output in renderings of the template."""
_OPENING: Sequence[Message] = ({"role": "user", "content": "Question"}, {"role": "assistant", "content": _OUTPUT})


class ChatTurns:
    """Tokens between an output and the next one under a model's chat template.

    Args:
        tokenizer: A transformers tokenizer with a chat template.

    Raises:
        InputError: There is no chat template, or it puts an output elsewhere than at the beginning of generation.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise InputError("a conversation needs a chat template, and the model's tokenizer has none")
        self._before = render_messages(tokenizer, _OPENING, False)
        self._end = self._before.rfind(_OUTPUT) + len(_OUTPUT)
        begin = render_messages(tokenizer, _OPENING[:1], True)
        if self._before[: self._end] != begin + _OUTPUT:
            raise InputError(
                "the model's chat template writes an output elsewhere than behind its generation prompt, so that a "
                "conversation cannot be continued token by token: it ends the prompt with "
                f"{begin[-40:]!r} and writes {self._before[-80:]!r}. Fix: a template that appends"
            )

    def between(self, messages: Sequence[Message], output: Sequence[int]) -> tuple[int, ...]:
        """Token ids from the end of an output to the beginning of the next one.

        Args:
            messages: Messages between the outputs, at least one.
            output: Token ids of the output. If it ends with the template's end-of-turn token, that is not repeated.

        Raises:
            InputError: The template refuses the messages, or changes the earlier text when they are appended.
        """
        whole = render_messages(self._tokenizer, (*_OPENING, *messages), True)
        if not whole.startswith(self._before):
            raise InputError(
                "the model's chat template changes earlier messages when it appends "
                f"{' and '.join(sorted({str(message['role']) for message in messages}))} messages, so that a "
                f"conversation cannot be continued token by token: {self._before[-80:]!r} becomes "
                f"{whole[: len(self._before)][-80:]!r}. Fix: messages of another role, or a template that appends"
            )
        ids = tokenize_text(self._tokenizer, whole[self._end :])
        if output and output[-1] in ids:
            at = ids.index(output[-1])
            if not self._tokenizer.decode(ids[:at]).strip() and output[-1] in self._tokenizer.all_special_ids:
                ids = ids[at + 1 :]
        return tuple(ids)
