"""Text of outputs that grow: every character once, when it is whole."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.models.loading import load_tokenizer
from specactor_ray.serve.outputs import GrowingText
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(tiny_target()))


def in_parts(growing: GrowingText, tokens: list[int], sizes: list[int]) -> list[str]:
    """What each part gives out; the last takes what is left."""
    parts, at = [], 0
    for size in [*sizes, len(tokens)]:
        parts.append(growing.add(tokens[at : at + size]))
        at += size
    return parts


SIZES = st.lists(st.integers(0, 5), max_size=40)
HOLD = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


class TestGrowingText:
    def test_a_character_comes_with_its_last_byte(self, tokenizer: Any) -> None:
        tokens = tokenizer("a🦊b")["input_ids"]
        assert len(tokens) == 6, "a byte a token"
        assert in_parts(GrowingText(tokenizer), tokens, [1] * 6)[:6] == ["a", "", "", "", "🦊", "b"]

    @given(tokens=st.lists(st.integers(0, 400), max_size=40), sizes=SIZES)
    def test_any_tokens_give_what_they_decode_to(self, tokenizer: Any, tokens: list[int], sizes: list[int]) -> None:
        whole = tokenizer.decode(tokens, skip_special_tokens=True)
        growing = GrowingText(tokenizer)
        parts = in_parts(growing, tokens, sizes)
        assert "".join(parts) + growing.rest(whole) == whole

    def test_an_output_that_is_no_text_is_not_kept_back_for_ever(self, tokenizer: Any) -> None:
        (lead,) = tokenizer.convert_tokens_to_ids(["ð"])  # the first byte of a character of four
        growing = GrowingText(tokenizer)
        given_out = "".join(in_parts(growing, [lead] * 1000, [1] * 1000))
        whole = tokenizer.decode([lead] * 1000)
        assert len(given_out) > 900 and given_out + growing.rest(whole) == whole

    @given(text=st.text(st.sampled_from("ab "), max_size=30), sizes=SIZES, hold=HOLD)
    def test_nothing_that_may_be_a_stop_text_is_given_out(
        self, tokenizer: Any, text: str, sizes: list[int], hold: list[str]
    ) -> None:
        tokens = tokenizer(text)["input_ids"] if text else []
        growing = GrowingText(tokenizer, hold)
        given_out = "".join(in_parts(growing, tokens, sizes))
        before = min((text.partition(one)[0] for one in hold), key=len)
        assert before.startswith(given_out), "what is cut off was not given out"
        assert given_out + growing.rest(before) == before
        if before == text:
            assert len(before) - len(given_out) < max(map(len, hold))
