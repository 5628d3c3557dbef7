"""Names, bytes and places of tokens: the vocabulary's own encoding, and each value under its own name."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.core.types import SamplingParams
from specactor_ray.models.loading import load_tokenizer
from specactor_ray.rollout.detokenizer import decoded
from specactor_ray.rollout.handle import Token
from specactor_ray.serve.openai_answers import CompletionForm, Offsets
from specactor_ray.serve.requests import CompletionBody, Wanted
from specactor_ray.serve.vocabulary import Vocabulary
from tests.fakes.scripted_queue import ScriptedQueue, events, post
from tests.tiny import tiny_target

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@functools.cache
def byte_level() -> Any:
    return load_tokenizer(str(tiny_target()))


@functools.cache
def sentencepiece(kind: str = "strip") -> Any:
    """A tokenizer with byte tokens and spaces as in Llama 2 (`strip`), Gemma (`keep`) or T5 (`metaspace`)."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁the",
        "the",
        "▁",
        "▁▁",
        "A",
        "狐",
        ".",
    ]
    tokenizer = Tokenizer(
        models.BPE({word: at for at, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    )
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    parts += [decoders.Strip(" ", 1, 0)] if kind == "strip" else []
    tokenizer.decoder = decoders.Metaspace() if kind == "metaspace" else decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def joined(tokenizer: Any, ids: list[int], special: bool = False) -> str:
    vocabulary, utf8 = Vocabulary(tokenizer), b""
    for token_id in ids:
        utf8 += vocabulary.answer_bytes(token_id, special, not utf8)
    return utf8.decode("utf-8", "replace")


class TestBytes:
    @given(ids=st.lists(st.integers(0, 409), max_size=20), special=st.booleans())
    @settings(deadline=None)
    def test_any_byte_level_tokens_join_to_what_they_decode_to(self, ids: list[int], special: bool) -> None:
        assert joined(byte_level(), ids, special) == decoded(byte_level(), ids, special)

    @pytest.mark.parametrize("kind", ["strip", "keep", "metaspace"])
    @pytest.mark.parametrize("words", [["▁the", "the", "▁the"], ["the", "▁", "A"], ["<s>", "▁", "the", "</s>"], ["▁"]])
    def test_words_of_sentencepiece_join_to_the_text(self, kind: str, words: list[str]) -> None:
        tokenizer = sentencepiece(kind)
        ids = tokenizer.convert_tokens_to_ids(words)
        assert joined(tokenizer, ids) == decoded(tokenizer, ids)

    @pytest.mark.parametrize("kind", ["strip", "keep"])
    def test_tokens_of_sentencepiece_have_their_own_bytes(self, kind: str) -> None:
        tokenizer = sentencepiece(kind)
        vocabulary = Vocabulary(tokenizer)
        expected = {"▁the": b" the", "the": b"the", "<0x0A>": b"\n", "<0xE7>": b"\xe7", "狐": "狐".encode(), "▁": b" "}
        for token, utf8 in expected.items():
            assert vocabulary.utf8(tokenizer.convert_tokens_to_ids(token)) == utf8
        assert vocabulary.name(tokenizer.convert_tokens_to_ids("<0xE7>")) == "bytes:\\xe7"
        fox = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "狐".encode()]
        assert joined(tokenizer, fox) == "狐" == decoded(tokenizer, fox)

    def test_added_tokens_are_literal_and_ids_without_tokens_have_no_bytes(self) -> None:
        tokenizer = load_tokenizer(str(tiny_target()))
        tokenizer.add_tokens(["<a b>", "🦊ok"])
        vocabulary = Vocabulary(tokenizer)
        for token in ("<a b>", "🦊ok", "<|eos|>"):
            assert vocabulary.name(tokenizer.convert_tokens_to_ids(token)) == token
        assert (vocabulary.utf8(511), vocabulary.name(511)) == (b"", "token_id:511")

    def test_every_name_is_one_tokens(self) -> None:
        names = [Vocabulary(byte_level()).name(token_id) for token_id in range(len(byte_level()))]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("kind", ["byte level", "strip", "keep"])
def test_places_of_tokens(kind: str) -> None:
    if kind == "byte level":
        tokenizer, text = byte_level(), "a🦊b the"
        ids = tokenizer.encode(text, add_special_tokens=False)
        begins = [0, 1, 1, 1, 1, 2]
    else:
        tokenizer = sentencepiece(kind)
        words = ["<s>", "▁the", *(f"<0x{byte:02X}>" for byte in "狐".encode()), "the"]
        ids = tokenizer.convert_tokens_to_ids(words)
        size = 3 if kind == "strip" else 4
        begins = [0, 0, size, size, size, size + 1]
    vocabulary = Vocabulary(tokenizer)
    assert Offsets(vocabulary, False).add(ids)[: len(begins)] == begins
    halves = Offsets(vocabulary, False)
    assert halves.add(ids[:3]) + halves.add(ids[3:]) == Offsets(vocabulary, False).add(ids)


def test_a_part_of_a_character_that_never_ends_is_one_character() -> None:
    ids = [byte_level().convert_tokens_to_ids("ð"), *byte_level().encode("ab", add_special_tokens=False)]
    assert decoded(byte_level(), ids) == "\ufffdab" and Offsets(Vocabulary(byte_level()), False).add(ids) == [0, 1, 2]


def alternatives(tokenizer: Any, token: Token) -> dict[str, float]:
    """As `/v1/completions` names them."""
    service: Any = SimpleNamespace(tokenizer=tokenizer, vocabulary=Vocabulary(tokenizer), model="tiny")
    return CompletionForm(service, CompletionBody(prompt=[1]), [[1]], Wanted(SamplingParams())).alternatives(token)


def test_alternatives_keep_their_values_where_two_tokens_have_one_text() -> None:
    parts = byte_level().convert_tokens_to_ids(["ð", "ñ", "ò", "ó"])
    top = tuple((token_id, -2.0 - at) for at, token_id in enumerate((parts[1], parts[0], *parts[2:])))
    found = alternatives(byte_level(), Token(parts[0], -0.5, top))
    assert list(found.values()) == [-0.5, -2.0, -4.0, -5.0]
    letter, byte = sentencepiece().convert_tokens_to_ids(["A", "<0x41>"])
    found = alternatives(sentencepiece(), Token(byte, -9.0, ((letter, -0.1), (byte, -9.0))))
    assert found == {"A": -9.0, f"token_id:{letter}": -0.1}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("part", [1, 3])
@pytest.mark.parametrize("text", ["näïve 🦊 狐狸.", "one, two, three<|eos|>"])
def test_answers_and_streams_report_the_same(text: str, part: int, n: int) -> None:
    engine = ScriptedQueue(part=part)
    engine.script = lambda _prompt, _sampling: byte_level().encode(text)
    body = {"prompt": [5], "max_tokens": 100, "logprobs": 0, "n": n, "seed": 1}
    content, plain = (
        {"messages": [{"role": "user", "content": "a"}], **body, "logprobs": True},
        text.removesuffix("<|eos|>"),
    )
    del content["prompt"]
    whole, chat = (post(path, sent, engine).json()["choices"] for path, sent in ((COMPLETIONS, body), (CHAT, content)))
    for one, other in zip(whole, chat, strict=True):
        report = one["logprobs"]
        assert one["text"] == other["message"]["content"] == plain
        assert "".join(report["tokens"]).startswith(plain) or "bytes:" in "".join(report["tokens"])
        assert bytes(byte for token in other["logprobs"]["content"] for byte in token["bytes"]).decode() == plain
        for name, place in zip(report["tokens"], report["text_offset"], strict=True):
            assert name.startswith("bytes:") or name == "<|eos|>" or plain.startswith(name, place)
    streamed: list[dict[str, Any]] = [{} for _ in range(n)]
    for event in events(post(COMPLETIONS, {**body, "stream": True}, engine)):
        (choice,) = event["choices"]
        for name, values in choice["logprobs"].items():
            streamed[choice["index"]].setdefault(name, []).extend(values)
    assert streamed == [one["logprobs"] for one in whole]
    utf8: list[list[int]] = [[] for _ in range(n)]
    for event in events(post(CHAT, {**content, "stream": True}, engine)):
        (choice,) = event["choices"]
        utf8[choice["index"]] += [
            byte for token in (choice["logprobs"] or {"content": []})["content"] for byte in token["bytes"]
        ]
    assert [bytes(one).decode() for one in utf8] == [plain] * n
