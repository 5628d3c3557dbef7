"""Conversations continue token by token: as the chat template writes them, and never by tokenizing an output again."""

from __future__ import annotations

from typing import Any

import pytest

from specactor_ray.core.errors import InputError
from specactor_ray.models.loading import load_tokenizer
from specactor_ray.rollout.prompts import ChatTurns, encode_prompt
from tests import tiny

LIKE_CHATML = (  # a default system message, and a line break behind the end of a turn
    "{% if messages[0]['role'] != 'system' %}<|pad|>system\nBe brief.<|eos|>\n{% endif %}"
    "{% for m in messages %}<|pad|>{{ m['role'] }}\n{{ m['content'] }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|pad|>assistant\n{% endif %}"
)
LIKE_LLAMA_2 = (  # a blank before the end of a turn
    "{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'] }} <|eos|>"
    "{% else %}<|pad|>[{{ m['content'] }}]{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} {% endif %}"
)
FORGETFUL = (  # writes thoughts in the last turn only
    "{% for m in messages %}<|user|>{{ m['role'] }}: "
    "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}{{ m['content'] }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: <think></think>{% endif %}"
)
PREFILLED = (  # puts the output elsewhere than behind the generation prompt
    "{% for m in messages %}<|user|>{{ m['role'] }}: {{ m['content'] }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: <think>{% endif %}"
)


def tokenizer(template: str | None = tiny.CHAT_TEMPLATE) -> Any:
    found = load_tokenizer(str(tiny.tiny_target()))
    found.chat_template = template
    return found


@pytest.mark.parametrize("template", [tiny.CHAT_TEMPLATE, LIKE_CHATML, LIKE_LLAMA_2])
@pytest.mark.parametrize("answers", [("7",), ("7", "the red fox")])
def test_a_conversation_is_what_the_template_writes(template: str, answers: tuple[str, ...]) -> None:
    words = tokenizer(template)
    said = [{"role": "user", "content": "Add 3 and 4."}]
    between = [{"role": "user", "content": one} for one in answers]
    output = words("3 plus 4", add_special_tokens=False)["input_ids"]
    whole = [*said, {"role": "assistant", "content": "3 plus 4"}, *between]
    turns = ChatTurns(words)
    expected = words.apply_chat_template(whole, add_generation_prompt=True, return_dict=False, tokenize=False)
    end = [words.eos_token_id]
    for ended in (output, output + end):  # one that was cut, and one that ended by itself
        ids = [*encode_prompt(words, said, True), *ended, *turns.between(between, ended)]
        assert ids.count(end[0]) == expected.count(tiny.EOS)
        assert words.decode(ids).replace(" ", "") == expected.replace(" ", "")


def test_an_output_is_not_tokenized_again() -> None:
    """Not even one whose text has other tokens."""
    words = tokenizer()
    output = [words.convert_tokens_to_ids(one) for one in "the"] + [words.eos_token_id]
    assert words("the", add_special_tokens=False)["input_ids"] != output[:-1]
    between = ChatTurns(words).between([{"role": "user", "content": "7"}], output)
    assert between == tuple(words("<|user|>7<|assistant|>")["input_ids"])


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "needs a chat template"),
        (PREFILLED, "writes an output elsewhere than behind its generation prompt"),
        (FORGETFUL, "changes earlier messages when it appends user messages"),
    ],
)
def test_templates_that_do_not_append_are_refused(template: str | None, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        ChatTurns(tokenizer(template)).between([{"role": "user", "content": "7"}], ())


def test_what_the_template_refuses_is_named() -> None:
    picky = tiny.CHAT_TEMPLATE + "{% if messages[-1]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    with pytest.raises(InputError, match="no tools"):
        ChatTurns(tokenizer(picky)).between([{"role": "tool", "content": "7"}], ())
