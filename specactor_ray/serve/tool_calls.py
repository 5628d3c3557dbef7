"""Tool calls in outputs, in the Hermes form that Qwen and others write: `<tool_call>{...}</tool_call>`."""

from __future__ import annotations

import json
import re
import secrets
from typing import Any, NoReturn

CALL = "<tool_call>"
_CALL_END, _THOUGHT, _THOUGHT_END = "</tool_call>", "<think>", "</think>"
_MARKS = re.compile("|".join((CALL, _THOUGHT, _THOUGHT_END)))
_SPACE = re.compile(r"\s*")


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def opens_thought(prompt: str) -> bool:
    """Whether the output of a prompt begins within a thought."""
    return prompt.rstrip().endswith(_THOUGHT)


def parsed_calls(text: str, in_thought: bool = False) -> tuple[str, list[dict[str, Any]]]:
    """Text without its tool calls, and the calls as OpenAI's clients expect them.

    What is no call stays in the text: malformed calls, calls in a thought, and all text beside calls except white space
    behind them. The result begins with the text before the first `CALL`. `in_thought`: the text begins in a thought.
    """
    calls, kept, begin, at = list[dict[str, Any]](), list[str](), 0, 0
    while (mark := _MARKS.search(text, at)) is not None:
        at = mark.end()
        if mark[0] == CALL:
            if not in_thought and (found := _call_at(text, at)) is not None:
                call, at = found
                calls.append(call)
                kept.append(text[begin : mark.start()])
                begin = at
        elif mark[0] == _THOUGHT:
            in_thought = True
        else:
            if not in_thought:  # the thought began before the output: nothing so far is a call
                calls, kept, begin = [], [], 0
            in_thought = False
    kept.append(text[begin:])
    return kept[0] + "".join(one for one in kept[1:] if not one.isspace()), calls


def _call_at(text: str, begin: int) -> tuple[dict[str, Any], int] | None:
    """The call behind a `CALL`, and its end; None if it is malformed."""
    try:
        call, end = _DECODER.raw_decode(text, _after_space(text, begin))
        end = _after_space(text, end)
        if text.startswith(_CALL_END, end):
            end += len(_CALL_END)
        elif end < len(text) and not text.startswith(CALL, end):
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        function = {"name": call["name"], "arguments": _encoded(call.get("arguments"))}
    except (ValueError, RecursionError):
        return None
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}, end


def _encoded(arguments: Any) -> str:
    """Arguments as JSON text; they may be that already. Raises ValueError for a number that JSON cannot represent."""
    if isinstance(arguments, str):
        try:
            json.dumps(_DECODER.decode(arguments), allow_nan=False)
            return arguments
        except ValueError:
            pass
    return json.dumps({} if arguments is None else arguments, allow_nan=False)


def _after_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return at if space is None else space.end()
