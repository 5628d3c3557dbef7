"""Stop texts: the token that completes one, whatever arrives together, with every kind of tokenizer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specactor_ray.core.types import SamplingParams
from specactor_ray.models.loading import load_tokenizer
from specactor_ray.rollout.detokenizer import Detokenizer, StopFinder, decoded
from specactor_ray.rollout.journal import RECORD, Journal, JournalEntry
from specactor_ray.rollout.trajectory import trajectory_of
from specactor_ray.transport.messages import Progress, RequestStats
from tests.tiny import tiny_target


def byte_level() -> Any:
    """The tiny model's."""
    return load_tokenizer(str(tiny_target()))


def sentence_pieces() -> Any:
    """Spaces at the beginning of tokens, the first one of a text dropped; unknown characters as bytes; spaces before
    punctuation, which transformers would remove."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    pieces = ["<s>", "▁", "▁a", "▁ab", "b", "ab", "a", ".", "\n", "▁.", "\n\n", "é", *bytes_]
    tokenizer = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, "<s>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", clean_up_tokenization_spaces=True)


def random_tokens(tokenizer: Any, rng: random.Random) -> list[int]:
    """Tokens that decode to whole characters: many of several bytes, and special ones between them."""
    text = "".join(rng.choice(["a", "ab ", ".", "\n", "é", "€", "漢", "🦊🦊", "the "]) for _ in range(40))
    if "<0x00>" not in tokenizer.get_vocab():
        found = tokenizer(text)["input_ids"]
        return [token for one in found for token in ([one, tokenizer.eos_token_id] if rng.random() < 0.05 else [one])]
    tokens: list[int] = []
    while text:
        pieces = [
            piece for piece in ("▁ab", "▁a", "ab", "a", "é", "\n", ".", "▁") if text.startswith(piece.replace("▁", " "))
        ]
        piece = rng.choice(pieces) if pieces else ""
        names = [piece] if piece else [f"<0x{number:02X}>" for number in text[0].encode()]
        tokens += tokenizer.convert_tokens_to_ids(names)
        text = text[max(1, len(piece)) :]
    return tokens


def by_whole_texts(tokenizer: Any, tokens: Sequence[int], stops: Sequence[str]) -> tuple[int, str] | None:
    """Tokens and text of the output that the first stop text ends: by decoding the output after every token."""
    before = 0
    for end in range(1, len(tokens) + 1):
        text = decoded(tokenizer, tokens[:end])
        found = [(text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in stops]
        if begins := [begin for begin, _stop in found if begin >= 0]:
            return end, text[: min(begins)]
        before = len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
    return None


def found_in_parts(finder: StopFinder, tokens: Sequence[int], rng: random.Random) -> Any:
    end = 0
    while end < len(tokens):
        end = min(len(tokens), end + rng.randint(1, 9))
        if (stop := finder.find(np.array(tokens[:end], np.int32))) is not None:
            return stop
    return None


@pytest.mark.parametrize("made", [byte_level, sentence_pieces])
def test_the_first_token_that_completes_a_stop_text_is_found_in_any_parts(made: Any) -> None:
    tokenizer, rng, ended = made(), random.Random(1), 0
    for _ in range(300):
        tokens = random_tokens(tokenizer, rng)
        if made is byte_level and rng.random() < 0.3:  # bytes that are no characters, too
            tokens = [rng.randrange(400) for _ in range(40)]
        whole = decoded(tokenizer, tokens)
        at = rng.randrange(max(1, len(whole) - 4))
        stops = (whole[at : at + rng.randint(1, 4)] or "x", rng.choice(["é", "\n\n", ". ", "🦊.", "漢漢"]))
        finder = StopFinder(tokenizer, SamplingParams(stop=stops))
        expected, stop = by_whole_texts(tokenizer, tokens, stops), found_in_parts(finder, tokens, rng)
        if expected is None:
            assert stop is None
            continue
        ended += 1
        text = decoded(tokenizer, tokens[: stop.num_tokens])
        assert (stop.num_tokens, text[: len(text) - stop.cut]) == expected
    assert ended > 200


def test_the_earliest_stop_text_counts_and_may_be_included() -> None:
    tokenizer = byte_level()
    tokens = np.array(tokenizer("the red fox sleeps.")["input_ids"])
    cases = {("ox", "fox"): "the red ", ("sleeps", "d f"): "the re", ("x", "fox"): "the red "}
    for stops, left in cases.items():
        for included in (False, True):
            sampling = SamplingParams(stop=stops, include_stop_str_in_output=included)
            stop = StopFinder(tokenizer, sampling).find(tokens)
            assert stop is not None
            text = tokenizer.decode(tokens[: stop.num_tokens])
            assert text[: len(text) - stop.cut] == (left + stop.text if included else left)


def journaled(tokenizer: Any, sampling: SamplingParams, tokens: Sequence[int], steps: Sequence[int]) -> Any:
    """What becomes of an output that comes in steps of so many tokens."""
    journal = Journal()
    entry = JournalEntry("r", (1,), sampling, stops=StopFinder(tokenizer, sampling))
    journal.add(entry)
    journal.hand_to("r", "v")
    for length in steps:
        start, part = entry.num_tokens, np.array(tokens[entry.num_tokens : entry.num_tokens + length], np.int32)
        begin, count = (np.array([number], np.int32) for number in (start, len(part)))
        margins = part.astype(np.float32)
        assert not journal.progress(Progress((("r", 1),), begin, count, part, -margins, margins))
        if journal.stopped:
            assert journal.stopped == {"r": ""} and journal.committed_tokens == entry.num_tokens
            break
    reported = sum(steps[: len(entry.steps)])
    assert journal.discarded_tokens == entry.discarded == min(reported, len(tokens)) - entry.num_tokens
    return replace(trajectory_of(entry, tokenizer), stats=RequestStats(), steps=())


def test_an_output_is_cut_at_its_stop_text_whatever_arrives_together() -> None:
    tokenizer = byte_level()
    tokens = tokenizer("the red fox sleeps by the river.")["input_ids"]
    sampling = SamplingParams(stop=("d fox s", "river"))
    outputs = [journaled(tokenizer, sampling, tokens, steps) for steps in ([1] * 40, [40], [2, 3] * 10, [3, 40])]
    assert all(output == outputs[0] for output in outputs)
    output, *_ = outputs
    assert output.text == "the re" and output.stop_reason == "d fox s"
    assert len(output.token_ids) == len(output.logprobs) == len(output.margins or ())
    assert tokenizer.decode(output.token_ids).startswith("the red fox s")


def test_an_output_that_cannot_be_decoded_fails_alone() -> None:
    class Broken:
        def decode(self, tokens: Sequence[int], **_options: bool) -> str:
            raise KeyError("x")

    journal, sampling = Journal(), SamplingParams(stop=("x",))
    entry = JournalEntry("r", (1,), sampling, stops=StopFinder(Broken(), sampling))
    journal.add(entry)
    journal.hand_to("r", "v")
    one = np.ones(1, np.int32)
    journal.progress(Progress((("r", 1),), one - 1, one, one, one.astype(np.float32)))
    assert journal.stopped == {"r": "its output cannot be decoded: KeyError('x')"}
    assert len(entry.records) == RECORD.itemsize


@pytest.mark.parametrize("made", [byte_level, sentence_pieces])
def test_what_arrives_is_a_beginning_of_the_whole_text(made: Any) -> None:
    """Tokens at random: runs of bytes that are no text, cut anywhere."""
    tokenizer, rng = made(), random.Random(3)
    bytes_ = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in (0x0A, 0xF0, 0x9F, 0xA6, 0x41, 0xC3, 0xA9)]
    some = bytes_ if made is sentence_pieces else range(len(tokenizer))
    for _ in range(300):
        tokens = [rng.choice(some) if rng.random() < 0.6 else rng.randrange(len(tokenizer)) for _ in range(9)]
        growing, arrived = Detokenizer(tokenizer), ""
        for number, token in enumerate(tokens, start=1):
            arrived += growing.add((token,))
            assert arrived + growing.pending == decoded(tokenizer, tokens[:number])
            assert decoded(tokenizer, tokens).startswith(arrived)
