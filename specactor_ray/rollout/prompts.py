"""Reading prompts from files, and turning prompts into token ids."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specactor_ray.config.shipped import find_file
from specactor_ray.errors import InputError, clipped_text, did_you_mean
from specactor_ray.json_text import parse_json

Prompt = str | list[dict[str, Any]] | list[int]
"""Text, chat messages (`{"role": ..., "content": ...}`), or token ids."""
_KEYS = ("prompt", "messages")


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Prompts of a `.jsonl` file (an object with `prompt` or `messages` a line) or of a text file (one a line).

    Blank lines are skipped.

    Raises:
        InputError: The file is missing, empty or not UTF-8, or a line is malformed (its number is named).
    """
    path = Path(path)
    if path.suffix in (".jsonl", ".json"):
        found: Iterator[Prompt] = (_prompt_of(row, f"{path}, line {number}") for number, row in read_jsonl(path))
    else:
        found = iter(read_text(path))
    prompts = list(itertools.islice(found, limit))
    if not prompts:
        raise InputError(f"{path}: no prompts in it; write one JSON object with `prompt` or `messages` per line")
    return prompts


def read_text(path: str | Path) -> list[str]:
    """The lines of a text file that are not blank.

    Raises:
        InputError: The file cannot be read, or is not UTF-8.
    """
    return [line for _, line in _lines(Path(path))]


def read_jsonl(path: str | Path) -> Iterator[tuple[int, Any]]:
    """`(line number, value)` of every line of a JSONL file that is not blank.

    Raises:
        InputError: The file cannot be read or is not UTF-8, or a line is not JSON (its number is named).
    """
    for number, line in _lines(Path(path)):
        try:
            yield number, parse_json(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {number}: not valid JSON ({error.msg} at column {error.colno})") from None


def _lines(path: Path) -> list[tuple[int, str]]:
    if path.is_dir():
        raise InputError(f"data.path: {path} is a folder; name a file of prompts")
    try:
        # Only a newline ends a line: JSON may hold the other characters that str.splitlines splits at.
        lines = find_file(path).read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise InputError(f"data.path: there is no file {path}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise InputError(f"data.path: {path} cannot be read ({error.strerror})") from None
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _prompt_of(row: Any, where: str) -> Prompt:
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise InputError(f'{where}: expected an object with either "prompt" or "messages"{_unknown_keys(row)}')
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise InputError(f'{where}: "prompt" must be a non-empty string')
        return row["prompt"]
    messages = row["messages"]
    good = isinstance(messages, list) and messages and all(_is_message(message) for message in messages)
    if not good:
        raise InputError(f'{where}: "messages" must be a non-empty list of {{"role": text, "content": text}} objects')
    return messages


def _unknown_keys(row: Any) -> str:
    """Keys of a line without a prompt, and what one of them may have been meant to be."""
    if not isinstance(row, dict) or not row or "prompt" in row:
        return ""
    meant = next((hint for key in row if (hint := did_you_mean(key, _KEYS))), "")
    return f"; its keys are {clipped_text(', '.join(row))}.{meant}"


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def encode_prompt(tokenizer: Any, prompt: Prompt, chat: bool) -> tuple[int, ...]:
    """Token ids of a prompt.

    Args:
        tokenizer: A transformers tokenizer, or None when only token ids are used.
        prompt: Text, chat messages or token ids.
        chat: Wrap text as one user message where the tokenizer has a chat template.

    Raises:
        InputError: The prompt is empty, or messages are given but there is no chat template.
    """
    token_ids: Sequence[Any]
    if not isinstance(prompt, str | list | tuple):
        raise InputError(f"a prompt is text, a list of chat messages or a list of token ids, not {prompt!r}")
    _reject_half_characters(prompt)
    if isinstance(prompt, list | tuple) and all(isinstance(token, int) for token in prompt):
        token_ids = prompt
    elif tokenizer is None:
        raise InputError("the model has no tokenizer; give prompts as lists of token ids")
    elif isinstance(prompt, str) and not (chat and tokenizer.chat_template):
        token_ids = _tokenize(tokenizer, prompt)
    else:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not tokenizer.chat_template:
            raise InputError("the prompt is a list of chat messages, but the model's tokenizer has no chat template")
        token_ids = _apply_template(tokenizer, messages)
    if not token_ids:
        raise InputError("the prompt has no tokens")
    return tuple(token_ids)


def _reject_half_characters(prompt: Prompt) -> None:
    texts = [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt if isinstance(m, dict)]
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"the prompt is not valid Unicode: half a surrogate pair at character {error.start}"
            ) from None


def _tokenize(tokenizer: Any, prompt: str) -> Any:
    try:
        return tokenizer(prompt)["input_ids"]
    except Exception as error:  # half a surrogate pair, for one, is refused with whatever the tokenizer likes
        raise InputError(f"the tokenizer refuses this prompt: {error}") from error


def _apply_template(tokenizer: Any, messages: Any) -> list[int]:
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # templates are code of the checkpoint's and raise what they like
        raise InputError(f"the model's chat template refuses these messages: {error}") from error
