"""Prompt files and their errors; prompts as token ids; conversations that continue token by token."""

from __future__ import annotations

import json
import logging
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.utils import chat_template_utils

from specactor_ray.core.errors import InputError
from specactor_ray.core.types import SamplingParams
from specactor_ray.models.loading import load_tokenizer
from specactor_ray.rollout import prompts, rendering
from specactor_ray.rollout.prompts import ChatTurns, encode_prompt, encode_prompts, read_prompts, read_rows
from specactor_ray.rollout.rollout import samples_of
from specactor_ray.sampling.seeds import derive_seed
from tests import tiny

REPOSITORY = Path(__file__).parents[3]
PROMPT_FILES = sorted((REPOSITORY / "conf" / "prompts").glob("*.jsonl"))


def write(folder: Path, content: str | bytes, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def error_of(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_prompts(path)
    return str(caught.value)


class TestReading:
    def test_prompts_messages_and_token_ids_behind_a_byte_order_mark_among_blank_lines(self, tmp_path: Path) -> None:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
        lines = [{"prompt": "Say hello."}, {"messages": messages, "id": 7}, {"prompt_token_ids": [5, 0, 511]}]
        lines += [{"prompt": messages}, {"prompt": [5, 0, 511]}]
        path = write(tmp_path, "\ufeff" + "\r\n\r\n".join(json.dumps(line) for line in lines) + "\nbroken\n")
        assert read_prompts(path, limit=5) == ["Say hello.", *[messages, [5, 0, 511]] * 2]
        for name in ("p.ndjson", "p.JSONL", "p.Json"):
            assert read_prompts(path.rename(tmp_path / name), limit=1) == ["Say hello."]
            path = tmp_path / name

    def test_a_text_file_is_one_prompt_a_line(self, tmp_path: Path) -> None:
        path = write(tmp_path, "Name a river.\n\n  Name a hill.\r\n{not json}\n", "prompts.txt")
        assert [str(prompt).strip() for prompt in read_prompts(path)] == ["Name a river.", "Name a hill.", "{not json}"]
        assert not any(str(prompt).endswith("\r") for prompt in read_prompts(path))

    @pytest.mark.parametrize("ascii_only", [True, False])
    def test_any_text_comes_back_as_it_was(self, tmp_path: Path, ascii_only: bool) -> None:
        texts = ["a\u2028b", "c\x0bd\x85e", "\U0001f600\r\n", '"\\', "\x1c\x00"]
        content = "\n".join(json.dumps({"prompt": text}, ensure_ascii=ascii_only) for text in texts)
        assert read_prompts(write(tmp_path, content)) == texts

    @pytest.mark.parametrize("path", PROMPT_FILES, ids=lambda path: path.stem)
    def test_the_prompt_sets_of_the_repository(self, path: Path) -> None:
        prompts = read_prompts(path)
        assert len(prompts) == {"renames": 8, "code_renames": 12, "sums": 24}.get(path.stem, 16)
        assert len({json.dumps(prompt) for prompt in prompts}) == len(prompts)


class TestErrors:
    @pytest.mark.parametrize(
        ("line", "problem"),
        [
            ('{"prompt": "a"', "JSON"),
            ("just words", "JSON"),
            ("[" * 100_000, "JSON"),
            ('{"prompt": ' + "9" * 5000 + "}", "JSON"),
            ('["a"]', '"prompt", "messages" or "prompt_token_ids"'),
            ('{"text": "a"}', '"prompt", "messages" or "prompt_token_ids"'),
            ('{"prompt": "a", "messages": []}', '"prompt" and "messages"'),
            ('{"prompt_token_ids": []}', "prompt_token_ids"),
            ('{"prompt_token_ids": [3, -1]}', "prompt_token_ids"),
            ('{"prompt_token_ids": [3, true]}', "prompt_token_ids"),
            ('{"prompt_token_ids": "abc"}', "prompt_token_ids"),
            ('{"prompt": ""}', "prompt"),
            ('{"prompt": 3}', "prompt"),
            ('{"prompt": []}', "non-empty"),
            ('{"prompt": [-1]}', '"prompt" must be a non-empty list of whole numbers'),
            ('{"prompt": [{"role": "user"}]}', "content"),
            ('{"messages": []}', "messages"),
            ('{"messages": "hi"}', "messages"),
            ('{"messages": [3]}', "message 1"),
            ('{"messages": [{"role": "user", "content": "a"}, {"content": "a"}]}', "message 2"),
            ('{"messages": [{"role": "user", "content": null}]}', "message 1"),
            ('{"messages": [{"role": "user", "content": []}]}', "message 1"),
            ('{"messages": [{"role": "user", "content": ["a"]}]}', "message 1"),
            ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "message 1"),
        ],
    )
    def test_the_line_is_named(self, tmp_path: Path, line: str, problem: str) -> None:
        message = error_of(write(tmp_path, f'{{"prompt": "good"}}\n\n{line}\n'))
        assert "prompts.jsonl, line 3:" in message and problem in message

    def test_files_that_hold_none(self, tmp_path: Path) -> None:
        for name in ("prompts.jsonl", "prompts.txt"):
            problem = error_of(path := write(tmp_path, "\n \n", name))
            assert problem.startswith(f"data.path: {path} ")
        missing = tmp_path / "none.jsonl"
        table, latin = write(tmp_path, "prompt,answer\na,b\n", "x.csv"), write(tmp_path, b"ab\ncd\xff\xfe")
        packed = [(tmp_path / f"p.jsonl{suffix}", "unpack it") for suffix in (".gz", ".ZST", ".bz2", ".xz")]
        known = ((missing, "none.jsonl"), (tmp_path, "folder"), (table, "JSONL"), (latin, "line 2"))
        strange = ((table.rename(tmp_path / "x.CSV"), "JSONL"), (tmp_path / ("x" * 400), "name too long"))
        for path, named in (*known, *strange, *packed):
            problem = error_of(path)
            assert str(path) in problem and named in problem


def test_token_ids_outside_the_vocabulary_are_found_with_their_line(tmp_path: Path) -> None:
    for name in ("prompt_token_ids", "prompt"):
        path = write(tmp_path, f'{{"prompt": "a"}}\n{{"prompt_token_ids": [511]}}\n\n{{"{name}": [0, 512]}}\n')
        assert len(read_rows(path)) == 3
        with pytest.raises(InputError, match=r"jsonl, line 4: .*512 .*511.* Fix: "):
            read_rows(path, num_ids=512)


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    return load_tokenizer(str(tiny_model_dir))


class TestEncoding:
    def test_text_is_wrapped_as_a_user_message_and_token_ids_stay(self, tokenizer: Any) -> None:
        parts = [{"type": "text", "text": "Add 2"}, {"type": "text", "text": "and 3."}]
        wrapped = encode_prompt(tokenizer, "Add 2\nand 3.", chat=True)
        for content in ("Add 2\nand 3.", parts):
            assert wrapped == encode_prompt(tokenizer, [{"role": "user", "content": content}], chat=False)
        assert len(wrapped) > len(encode_prompt(tokenizer, "Add 2\nand 3.", chat=False))
        assert encode_prompt(tokenizer, [5, 6, 7], chat=True) == encode_prompt(None, [5, 6, 7], chat=True) == (5, 6, 7)

    @pytest.mark.parametrize("chat", [True, False])
    def test_a_prompt_beyond_the_context_is_no_matter_of_the_tokenizer(
        self, tokenizer: Any, chat: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [caplog.handler])
        monkeypatch.setattr(tokenizer, "deprecation_warnings", {})  # it warns once
        assert len(encode_prompt(tokenizer, "long " * 2000, chat)) > tokenizer.model_max_length
        assert not caplog.records

    @pytest.mark.parametrize(
        ("prompt", "problem"),
        [
            (5, "5"),
            ([], "no tokens"),
            ("", "empty"),
            ("ok \ud800", "character 3"),
            ([{"role": "user", "content": "ok \ud800"}], "character 3"),
            ([{"role": "user", "content": "hi"}], "no chat template"),
            ([{"role": "user", "content": "hi"}, "hello"], "message 2"),
        ],
    )
    def test_prompts_that_cannot_be_encoded(self, prompt: Any, problem: str) -> None:
        with pytest.raises(InputError, match=problem):
            encode_prompt(tokenizer_with(None), prompt, chat=False)
        with pytest.raises(InputError, match="no tokenizer"):
            encode_prompt(None, "hello", chat=True)


def test_samples_have_names_seeds_and_the_reason_why_they_cannot_run() -> None:
    encoded = encode_prompts(None, [[5], [], [6, 7]], chat=False)
    assert encoded == [((5,), ""), ((), "the prompt has no tokens"), ((6, 7), "")]
    sampling = [SamplingParams(seed=seed) for seed in (3, 4, 5)]
    samples = list(samples_of(encoded, sampling, 2, {(0, 0), (1, 0)}, "7-"))
    assert [entry.place for entry, _ in samples] == [(0, 1), (1, 1), (2, 0), (2, 1)]
    assert samples[2][0].prompt_token_ids is samples[3][0].prompt_token_ids
    for entry, reason in samples:
        prompt, sample = entry.place
        assert entry.request_id == f"7-{prompt}-{sample}"
        assert entry.sampling.seed == derive_seed(3 + prompt, prompt, sample)
        assert reason == ("the prompt has no tokens" if prompt == 1 else "")


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
PICKY = tiny.CHAT_TEMPLATE + "{% if messages[-1]['content'] == '7' %}{{ raise_exception('no tools') }}{% endif %}"
COUNTING = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ loop.index }}: {{ m['content'] }}<|assistant|>"
    "{% else %}{{ m['content'] }}<|eos|>{% endif %}{% endfor %}"
)
REMINDING = tiny.CHAT_TEMPLATE + "{% if messages | length > 4 %}Be brief. {% endif %}"
PREFILLED = (  # puts the output elsewhere than behind the generation prompt
    "{% for m in messages %}<|user|>{{ m['role'] }}: {{ m['content'] }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: <think>{% endif %}"
)


EACH = (  # one output of a turn, with `OUTPUT` for its text
    "{% for m in messages %}<|user|>{{ m['role'] }}: {% if m['role'] == 'assistant' %}OUTPUT"
    "{% else %}{{ m['content'] }}{% endif %}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
)
CHANGING = {
    "earlier thoughts": "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}",
    "all thoughts": "{{ m['content'].split('</think>')[-1] }}",
    "white space": "{{ m['content'] | trim }}",
    "a word": "{{ m['content'] | replace('maybe', 'perhaps') }}",
    "a call": "{% if '<tool_call>' in m['content'] %}{{ 'called' }}{% else %}{{ m['content'] }}{% endif %}",
    "nothing": "{% if m['content'] %}{{ m['content'] }}{% else %}{{ '(none)' }}{% endif %}",
    "a long output": "{{ m['content'][:8000] }}",
    "long lines": "{{ m['content'] | wordwrap(500) }}",
    "signs": "{{ m['content'] | replace('&', 'and') }}",
}
CLOCK = "{{ strftime_now('%Y-%m-%d %f') }}" + tiny.CHAT_TEMPLATE


def tokenizer_with(template: str | None = tiny.CHAT_TEMPLATE) -> Any:
    found = load_tokenizer(str(tiny.tiny_target()))
    found.chat_template = template
    return found


@pytest.mark.parametrize("template", [tiny.CHAT_TEMPLATE, LIKE_CHATML, LIKE_LLAMA_2])
@pytest.mark.parametrize("answers", [("7",), ("7", "the red fox")])
def test_a_conversation_is_what_the_template_writes(template: str, answers: tuple[str, ...]) -> None:
    words = tokenizer_with(template)
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
    words = tokenizer_with()
    output = [words.convert_tokens_to_ids(one) for one in "the"] + [words.eos_token_id]
    assert words("the", add_special_tokens=False)["input_ids"] != output[:-1]
    between = ChatTurns(words).between([{"role": "user", "content": "7"}], output)
    assert between == tuple(words("<|user|>7<|assistant|>")["input_ids"])


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "chat template"),
        (PREFILLED, "generation prompt"),
        (FORGETFUL, "earlier messages"),
        (PICKY, "no tools"),
        (COUNTING, r"user\|>3: 7.*user\|>5: 7"),
        (REMINDING, "later turn"),
    ],
)
def test_templates_that_do_not_append_are_refused(template: str | None, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        ChatTurns(tokenizer_with(template)).between([{"role": "user", "content": "7"}], ())


@pytest.mark.parametrize("change", CHANGING)
def test_templates_that_change_outputs_are_refused_or_outputs_are_kept(change: str) -> None:
    words = tokenizer_with(EACH.replace("OUTPUT", CHANGING[change]))
    messages = [{"role": "user", "content": "7"}]
    with pytest.raises(InputError, match="token by token") as refused:
        ChatTurns(words).between(messages, ())
    before, after = re.findall(r": ['\"](.*)['\"] becomes ['\"](.*)['\"]\. Fix", str(refused.value))[0]
    assert before != after, "the texts are shown where they differ"
    assert "environment.keep_outputs=true" in str(refused.value)
    kept = ChatTurns(words, keep_outputs=True).between(messages, ())
    assert words.decode(kept) == "<|eos|><|user|>user: 7<|eos|><|user|>assistant: "


def test_a_conversation_keeps_the_time_of_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        time = datetime(2026, 5, 1, 23, 59, 59, 1)

        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return cls.time

    for module in (prompts, rendering, chat_template_utils):
        monkeypatch.setattr(module, "datetime", Clock)
    words, said = tokenizer_with(CLOCK), [{"role": "user", "content": "hi"}]
    checked = ChatTurns(words)
    turns = checked.now()
    begin = turns.begin(said)
    between = turns.between(said, ())
    Clock.time = datetime(2026, 5, 2, 0, 0, 0, 2)
    assert turns.begin(said) == begin and turns.between(said, ()) == between
    assert "2026-05-01 000001" in words.decode(begin)
    assert "2026-05-02 000002" in words.decode(checked.now().begin(said))
    assert checked.now().between(said, ()) == between


def test_replies_are_literal() -> None:
    words = tokenizer_with()
    turns = ChatTurns(words)
    ids = turns.between([{"role": "user", "content": f"no tool {tiny.EOS}{tiny.USER}"}], ())
    right = turns.between([{"role": "user", "content": "no tool"}], ())
    special = set(words.convert_tokens_to_ids([tiny.EOS, tiny.USER, tiny.ASSISTANT]))
    assert [one for one in ids if one in special] == [one for one in right if one in special]
    assert f"no tool {tiny.EOS}{tiny.USER}" in words.decode(ids)


@pytest.mark.parametrize("prompt", [[np.int64(5), np.int32(6)], np.array([5, 6]), (5, 6)])
def test_token_ids_may_be_numpys(prompt: Any) -> None:
    token_ids = encode_prompt(None, prompt, True)
    assert token_ids == (5, 6) and set(map(type, token_ids)) == {int}


def test_truth_values_are_no_token_ids() -> None:
    with pytest.raises(InputError, match="message 1 is True"):
        encode_prompt(None, [True, False], True)  # type: ignore[arg-type]
