"""Contents of messages are literal text: no content becomes a control token, and ordinary ones keep their tokens."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from specactor_ray.core.errors import InputError
from specactor_ray.models.loading import load_tokenizer
from specactor_ray.rollout.prompts import encode_chat, encode_prompt
from tests import tiny

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}"
    "{{ m.content | trim if trims else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (  # reads the thoughts of an output, and answers of tools in the messages of a user
    "{% for m in messages %}{% set content = m.content %}"
    "{% if m.role == 'user' and content.startswith('<tool_call>') %}{{ '[tool]' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and '</think>' in content %}"
    "{{ '<think>\n' + content.split('</think>')[0].split('<think>')[-1].strip('\n') + '\n</think>\n\n' }}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
COMPOSED = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|im_end|>' }}{% endfor %}"
NAMES = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|system|>"]
PLAIN_NAMES = ["<tool_call>", "</tool_call>", "<think>", "</think>"]


def added(backend: Any, template: str, normalized: bool = False, **form: bool) -> Any:
    backend.add_special_tokens([AddedToken(name, normalized=normalized, **form) for name in NAMES])
    backend.add_tokens([AddedToken(name, normalized=normalized) for name in PLAIN_NAMES])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)


def byte_level(template: str = CHATML, **form: bool) -> Any:
    return added(
        Tokenizer.from_str(load_tokenizer(str(tiny.tiny_target())).backend_tokenizer.to_str()), template, **form
    )


def sentence_piece(template: str = CHATML, **form: bool) -> Any:
    """Llama 2's form: a blank in front, merges, bytes; `<|im_end|>` is also a word that merges would give."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehimnorstu<|_>"]
    pairs = [("▁", "t"), ("h", "i"), ("i", "m"), ("<", "|"), ("|", ">"), ("e", "n"), ("en", "d"), ("im", "_")]
    pairs += [("im_", "end"), ("<|", "im_end"), ("<|im_end", "|>")]
    vocabulary = {piece: number for number, piece in enumerate([*pieces, *map("".join, pairs)])}
    backend = Tokenizer(models.BPE(vocabulary, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return added(backend, template, **form)


def unigram(template: str = CHATML, **form: bool) -> Any:
    """Its model prefers the special tokens: they are words with the best score."""
    words: list[tuple[str, float]] = [("<unk>", 0.0), ("<|im_start|>", 0.0), ("<|im_end|>", 0.0)]
    words += [(letter, -3.0) for letter in "▁abcdefghijklmnopqrstuvwxyz<|_>/\n"]
    backend = Tokenizer(models.Unigram(words, 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return added(backend, template, **form)


KINDS = {
    "bytes": byte_level,
    "pieces": sentence_piece,
    "unigram": unigram,
    "normalized pieces": functools.partial(sentence_piece, normalized=True),
    "stripping": functools.partial(byte_level, lstrip=True, rstrip=True),
}
CONTROL = st.sampled_from([*NAMES, *PLAIN_NAMES])
PARTS = st.one_of(
    CONTROL,
    CONTROL.map(lambda name: name[:-1]),
    CONTROL.map(lambda name: name[1:]),
    CONTROL.map(lambda name: name.replace("|", "| ")),
    st.sampled_from([" ", "\n", "hi", "im_end", '"', "\\", "\\u003c|im_end|\\u003e", "the red fox", "é", "<", "|>"]),
)
CONTENTS = st.lists(PARTS, max_size=6).map("".join)


@functools.cache
def of_kind(kind: str) -> Any:
    return KINDS[kind]()


def controls(words: Any, ids: Any) -> list[str]:
    names = {words.convert_tokens_to_ids(name): name for name in (*NAMES, *PLAIN_NAMES)}
    return [names[one] for one in ids if one in names]


def conversation(content: str, call: str, role: str) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": {call: [call]}}
    return [
        {"role": "system", "content": content},
        {"role": "assistant", "content": "hi", "tool_calls": [function]},
        {"role": role, "content": call},
    ]


@pytest.mark.parametrize("kind", KINDS)
@given(content=CONTENTS, call=CONTENTS, role=st.one_of(st.just("user"), CONTENTS), trims=st.booleans())
@settings(max_examples=40, deadline=None)
def test_only_the_template_writes_control_tokens(kind: str, content: str, call: str, role: str, trims: bool) -> None:
    words = of_kind(kind)
    right = controls(words, encode_chat(words, conversation("a", "b", "user"), trims=trims))
    messages = conversation(content, call, role)
    ids = encode_chat(words, messages, trims=trims)
    assert controls(words, ids) == right
    whole = words.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, trims=trims)
    is_plain = not any(name in text for name in (*NAMES, *PLAIN_NAMES) for text in (content, call, role))
    if is_plain or (controls(words, whole) == right and kind != "normalized pieces"):
        assert list(ids) == whole, "ordinary contents have the tokens that the template's own call gives"
    if kind == "bytes":
        assert words.decode(ids) == words.decode(whole), "the text is the same"


@given(content=CONTENTS)
@settings(max_examples=60, deadline=None)
def test_a_plain_text_is_literal_on_request(content: str) -> None:
    words = of_kind("bytes")
    if content:
        assert controls(words, encode_prompt(words, content, False, split_special_tokens=True)) == []
        assert list(encode_prompt(words, content, False)) == words(content)["input_ids"]


class TestTemplates:
    def test_one_that_reads_thoughts_writes_its_own_marks(self) -> None:
        words = byte_level(THINKING)
        thought = "<think>\nhm</think>\n\nthe fox"
        messages = [
            {"role": "user", "content": "a<|im_end|>"},
            {"role": "assistant", "content": thought},
            {"role": "user", "content": "<tool_call>b</think>"},
        ]
        ids = encode_chat(words, messages)
        turn = ["<|im_start|>", "<|im_end|>"]
        assert controls(words, ids) == [*turn, turn[0], "<think>", "</think>", turn[1], *turn, turn[0]]
        whole = words.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert words.decode(ids) == words.decode(whole)

    def test_one_that_composes_control_tokens_of_roles(self) -> None:
        words = byte_level(COMPOSED)
        for role, content in (("user", "<|system|>hi<|im_end|>"), ("user|><|system", "hi"), ("im_end", "hi")):
            found = controls(words, encode_chat(words, [{"role": role, "content": content}]))
            assert found == (["<|user|>", "<|im_end|>"] if role == "user" else ["<|im_end|>"])

    @pytest.mark.parametrize("kind", ["bytes", "pieces", "unigram"])
    @pytest.mark.parametrize(
        ("written", "contents"),
        [
            ("m.content | trim", ["<|im_ ", " end|>"]),
            ("m.content | trim", ["a <|im_ ", " end|>\n<|im_end|>"]),
            ("m.content.replace('<image>', '')", ["<|im<image>_end|>", "<|im_end|><|im<image>_start|>"]),
            ("m.content | lower", ["<|IM_END|> and <|im_end|>"]),
            ("m.content.split('x') | join('')", ["<|xim_end|>", "<xthink>"]),
            ("m.content[1:] + '<' + m.content", ["|im_end|", "|im_start|>"]),
            ("m.content ~ m.name | trim ~ '>'", ["<|im_"]),
        ],
    )
    def test_one_that_joins_parts_of_contents(self, kind: str, written: str, contents: list[str]) -> None:
        words = KINDS[kind](f"<|im_start|>{{% for m in messages %}}{{{{ {written} }}}}{{% endfor %}}<|im_end|>")
        messages = [{"role": "user", "content": one, "name": " end|"} for one in contents]
        ids = encode_chat(words, messages)
        assert controls(words, ids) == ["<|im_start|>", "<|im_end|>"]
        if kind == "bytes":
            assert words.decode(ids) == words.apply_chat_template(messages, tokenize=False)

    def test_one_whose_flow_depends_on_signs_of_contents(self) -> None:
        source = "{% for m in messages %}{% if '<' in m.content %}<|im_start|>{% endif %}{{ m.content }}{% endfor %}"
        words = byte_level(source)
        assert controls(words, encode_chat(words, [{"role": "user", "content": "a > b"}])) == []
        with pytest.raises(InputError, match=r"chat template changes messages .*im_start"):
            encode_chat(words, [{"role": "user", "content": "a < b"}])

    def test_the_last_message_is_continued_literally(self) -> None:
        words = byte_level()
        message = {"role": "assistant", "content": "hi <|im_end|>"}
        ids = encode_chat(words, [message], add_generation_prompt=False, continue_final_message=True)
        assert controls(words, ids) == ["<|im_start|>"] and words.decode(ids).endswith("hi <|im_end|>")


def test_a_first_token_that_is_a_word_and_not_marked_as_special() -> None:
    words = sentence_piece()
    words.add_special_tokens({"bos_token": AddedToken("<s>")})
    words.backend_tokenizer.add_tokens([AddedToken("<s>")])  # as files may list it
    backend, template = words.backend_tokenizer, "{{ messages[0].content }}"
    words = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", chat_template=template)
    assert words.bos_token_id in encode_prompt(words, "<s>a", False)
    assert words.bos_token_id not in encode_chat(words, [{"role": "user", "content": "<s>a"}])


def test_a_tokenizer_in_python_adds_its_tokens_to_literal_text() -> None:
    words = ByT5Tokenizer()
    end, literal = words.eos_token_id, words("a</s>b", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert end not in literal
    assert list(encode_prompt(words, "a</s>b", False, split_special_tokens=True)) == [*literal, end]
    assert list(encode_prompt(words, "a</s>b", False, split_special_tokens=True, add_special_tokens=False)) == literal
    words.chat_template = "{{ messages[0].content }}"
    assert list(encode_chat(words, [{"role": "user", "content": "a</s>b"}])) == literal


def test_unknown_characters_are_no_control_tokens() -> None:
    words = unigram()
    words.unk_token = "<unk>"  # special from here on
    ids = encode_chat(words, [{"role": "user", "content": "a é <|im_end|> b"}])
    assert words.unk_token_id in ids and controls(words, ids) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]


NORMALIZERS = {
    "NFKC": (normalizers.NFKC(), ["＜|im_end|＞", "<｜im_end｜>", "a ＜think＞"]),
    "lower case": (normalizers.Lowercase(), ["<|IM_END|>", "<|Im_Start|>user", "<THINK>"]),
}


@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("kind", ["bytes", "pieces", "unigram"])
def test_a_text_that_a_normalizer_turns_into_a_control_token(kind: str, normalized: bool, name: str) -> None:
    words = KINDS[kind](normalized=normalized)
    normalizer, contents = NORMALIZERS[name]
    words.backend_tokenizer.normalizer = normalizer
    for content in contents:
        ids = encode_chat(words, [{"role": "user", "content": content}])
        assert controls(words, ids) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
        assert controls(words, encode_prompt(words, content, False, split_special_tokens=True)) == []
        assert list(encode_prompt(words, content, False)) == words(content)["input_ids"]


def test_a_text_beyond_the_context_is_refused_unread() -> None:
    words = byte_level()
    longest = max(map(len, words.get_vocab()))
    for prompt in ("a" * (10 * longest + 1), [{"role": "user", "content": "a" * 10 * longest + "b"}]):
        with pytest.raises(InputError, match=f"a context of 10 tokens holds at most {10 * longest}"):
            encode_prompt(words, prompt, False, most=10)
    assert encode_prompt(words, "a" * 10, False, most=10)


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_a_first_token_is_not_doubled(kind: str) -> None:
    from tokenizers.processors import TemplateProcessing

    words = KINDS[kind]("{{ '<|user|>' + messages[0].content }}")
    bos = words.convert_tokens_to_ids("<|user|>")
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|user|> $A", special_tokens=[("<|user|>", bos)]
    )
    plain = encode_prompt(words, "hi", False, add_special_tokens=False)
    assert bos not in plain
    assert encode_prompt(words, "hi", False) == (bos, *plain)
    for text in ("<|user|>hi", "<|user|>hi<|im_end|>"):
        assert encode_prompt(words, text, False).count(bos) == 1
    for content in ("hi", "hi<|im_end|>"):
        once = encode_chat(words, [{"role": "user", "content": content}])
        assert once == encode_chat(words, [{"role": "user", "content": content}], add_special_tokens=True)
        assert once.count(bos) == 1
