"""Tool calls in outputs: what is a call, what is text, and the same in streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specactor_ray.serve.tool_calls import opens_thought, parsed_calls
from tests.fakes.scripted_queue import ScriptedQueue, events, post

GOOD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
EDIT = '<tool_call>{"name": "edit", "arguments": {"text": "x </tool_call> <tool_call> <think> </think> y"}}</tool_call>'
CASES: dict[str, tuple[str, str, list[tuple[str, Any]]]] = {
    "one": (GOOD, "", [("add", {"a": 1})]),
    "marks within arguments": (
        f"{EDIT}\n{GOOD}",
        "",
        [("edit", json.loads(EDIT[11:-12])["arguments"]), ("add", {"a": 1})],
    ),
    "text around": (f"Sure: {GOOD} and then {GOOD}!", "Sure:  and then !", [("add", {"a": 1})] * 2),
    "in a thought": (f"<think>Maybe {GOOD}</think>No.", f"<think>Maybe {GOOD}</think>No.", []),
    "behind a thought": (f"<think>{GOOD}</think>\n{GOOD}", f"<think>{GOOD}</think>\n", [("add", {"a": 1})]),
    "thought begun in the prompt": (f"Maybe {GOOD}</think>{GOOD}", f"Maybe {GOOD}</think>", [("add", {"a": 1})]),
    "thought without end": (f"<think>{GOOD}", f"<think>{GOOD}", []),
    "one is malformed": (f"<tool_call>{{name</tool_call>{GOOD}", "<tool_call>{name</tool_call>", [("add", {"a": 1})]),
    "malformed last": (f"{GOOD}<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", [("add", {"a": 1})]),
    "not a number": ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "same", []),
    "infinite": ('<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', "same", []),
    "text behind the object": ('<tool_call>{"name": "f"}}</tool_call>', "same", []),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', "same", []),
    "without end": ('<tool_call>{"name": "f"}', "", [("f", {})]),
    "deep": ("<tool_call>" + "[" * 50_000, "same", []),
    "encoded twice": ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", {"x": 1})]),
    "arguments of text": ('<tool_call>{"name": "f", "arguments": "NaN"}</tool_call>', "", [("f", "NaN")]),
}


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("case", CASES)
def test_calls_and_text(case: str) -> None:
    text, content, expected = CASES[case]
    found, calls = parsed_calls(text)
    assert found == (text if content == "same" else content)
    functions = [call["function"] for call in calls]
    assert [(one["name"], json.loads(one["arguments"], parse_constant=pytest.fail)) for one in functions] == expected


def test_a_prompt_may_open_the_thought() -> None:
    assert opens_thought("<|assistant|><think>\n") and not opens_thought("<think></think>")
    assert parsed_calls(GOOD, in_thought=True) == (GOOD, [])


@pytest.mark.parametrize("part", [1, 500])
@pytest.mark.parametrize("case", [case for case in CASES if case != "deep"])
def test_a_stream_has_the_same_content_and_calls(case: str, part: int) -> None:
    engine = ScriptedQueue(part=part)
    tokens = engine.tokenizer(CASES[case][0])["input_ids"]
    engine.script, engine.finish_reason = lambda _prompt, _sampling: tokens, "length"
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 400}
    message = post("/v1/chat/completions", body, engine).json()["choices"][0]["message"]
    deltas = [
        one["choices"][0]["delta"] for one in events(post("/v1/chat/completions", {**body, "stream": True}, engine))
    ]
    assert "".join(delta.get("content", "") for delta in deltas) == (message["content"] or "")
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    streamed = [call["function"] for call in calls]
    assert [(call["index"], call["type"]) for call in calls] == [(at, "function") for at in range(len(calls))]
    assert streamed == [call["function"] for call in message.get("tool_calls", ())]
    assert [call["name"] for call in streamed] == [name for name, _ in CASES[case][2]]


def test_without_tools_or_with_none_calls_are_text() -> None:
    engine = ScriptedQueue()
    tokens = engine.tokenizer(GOOD)["input_ids"]
    engine.script = lambda _prompt, _sampling: tokens
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 300, **more}, engine)
        assert answer.json()["choices"][0]["message"]["content"] == GOOD


def test_answers_of_tools_go_into_the_prompt() -> None:
    called = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    called_by = {"role": "assistant", "content": None, "tool_calls": [called]}
    messages = [*MESSAGES, called_by, {"role": "tool", "content": "3", "tool_call_id": "1"}]
    assert post("/v1/chat/completions", {"messages": messages, "tools": TOOLS}).status_code == 200
