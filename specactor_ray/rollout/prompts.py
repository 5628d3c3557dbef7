"""Prompts: read from files, turned into token ids, and continued turn by turn."""

from __future__ import annotations

import itertools
import json
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from datetime import datetime
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from specactor_ray.config.load import find_file
from specactor_ray.config.schema import DataConfig
from specactor_ray.core.errors import InputError, clipped
from specactor_ray.core.files import parse_json
from specactor_ray.rollout.literal import Rendered, control_tokens, tokenize
from specactor_ray.rollout.rendering import render, texts_of

Prompt = str | list[dict[str, Any]] | list[int]
"""Text, chat messages (`{"role": ..., "content": ...}`), or token ids. The content of a message is text, or a list of
`{"type": "text", "text": ...}` parts, which are joined by newlines."""
Row = Mapping[str, Any]
"""A prompt under `prompt`, `messages` or `prompt_token_ids`, with other columns, such as `answer` and `id`."""
Encoded = tuple[tuple[int, ...], str]
"""Token ids and error; the error is empty on success."""
_KINDS = ("prompt", "messages", "prompt_token_ids")
JSON_LINES = (".jsonl", ".json", ".ndjson")
"""Suffixes of files with a JSON value a line, in small letters; other files have a text a line."""
_TABLES = (".csv", ".tsv", ".parquet", ".arrow")
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip")
Message = dict[str, Any]
"""`{"role": ..., "content": ...}`, as in prompts."""
_OUTPUT = "0utput"
"""Placeholder for an output in renderings of the template."""
_LONG = "Sign\u00e9:\t<b>1 & 2</b>\r\n  [3] \u6f22\u5b57 " * 1000
"""An output that templates might shorten, wrap or escape."""
_KEEP = "a template that appends, or environment.keep_outputs=true, with which outputs stay in the context as sampled"
_OPENING: Sequence[Message] = ({"role": "user", "content": "Question"},)
_LATER: Sequence[Message] = (*_OPENING, {"role": "assistant", "content": "Answer"}, *_OPENING)
_KINDS_IN_WORDS = '"prompt", "messages" or "prompt_token_ids"'


def read_prompts(path: str | Path, limit: int | None = None, key: str = "data.path") -> list[Prompt]:
    """The prompts of `read_rows`, without other columns. `key`: key or option that names the file, for messages."""
    return [split_row(row)[0] for row in read_rows(path, limit, key=key)]


def split_row(row: Prompt | Row, where: str = "the row") -> tuple[Prompt, dict[str, Any]]:
    """Prompt and other columns of a row; a bare prompt has none. InputError: the row has no prompt; `where` begins the
    message."""
    if not isinstance(row, Mapping):
        return row, {}
    return _prompt_of(row, where), {key: value for key, value in row.items() if key not in _KINDS}


def read_rows(
    path: str | Path, limit: int | None = None, num_ids: int | None = None, key: str = "data.path"
) -> list[Prompt | Row]:
    """Rows of a file of `JSON_LINES` (per line an object with `prompt`, `messages` or `prompt_token_ids`) or of a text
    file (one per line), without blank lines. An InputError has the number of a malformed line. `num_ids`: size of the
    target's vocabulary, if it is known; `key` as of `read_prompts`."""
    if str(path).startswith(("hf:", "reasoning_gym:")):
        raise InputError(f"{key}: {path} names tasks, which only `specactor train` reads. Fix: name a file of prompts")
    path = Path(path)
    if path.suffix.lower() in JSON_LINES:
        lines = read_jsonl(path, key)
        found: Iterator[Prompt | Row] = (_checked_row(row, f"{path}, line {at}", num_ids) for at, row in lines)
    else:
        found = iter(read_text(path, key))
    rows = list(itertools.islice(found, limit))
    if not rows:
        raise InputError(f"{key}: {path} has no prompts. Fix: write one JSON object with {_KINDS_IN_WORDS} per line")
    return rows


def _checked_row(row: Any, where: str, num_ids: int | None) -> Row:
    prompt = _prompt_of(row, where)
    if num_ids is not None and is_token_ids(prompt) and (largest := max(prompt)) >= num_ids:
        problem = f"token id {largest} is outside the target's vocabulary (0 to {num_ids - 1})"
        raise InputError(f"{where}: {problem}. Fix: encode prompts with the target's tokenizer")
    return row  # type: ignore[no-any-return]


def read_text(path: str | Path, key: str = "data.path") -> list[str]:
    """Lines of a text file that are not blank; InputError if it cannot be read, or is not UTF-8."""
    return [line for _, line in _lines(Path(path), key)]


def read_jsonl(path: str | Path, key: str = "data.path") -> Iterator[tuple[int, Any]]:
    """Yield `(line number, value)` of every line of a JSONL file that is not blank. An InputError has the number of a
    line that is not JSON."""
    for number, line in _lines(Path(path), key):
        try:
            yield number, parse_json(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {number}: not valid JSON ({error.msg} at column {error.colno})") from None


def _lines(path: Path, key: str) -> list[tuple[int, str]]:
    fix, suffix = "Fix: name a file of prompts", path.suffix.lower()
    if suffix in _PACKED:
        raise InputError(f"{key}: {path} is packed. Fix: unpack it")
    if suffix in _TABLES:
        rows = f"write its rows as JSONL, one object with {_KINDS_IN_WORDS} a line"
        raise InputError(f"{key}: {path} is a table. Fix: {rows}")
    try:
        # Only a newline ends a line: JSON may contain the other characters at which str.splitlines splits.
        lines = find_file(path).read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise InputError(f"{key}: there is no file {path}. {fix}") from None
    except IsADirectoryError:
        raise InputError(f"{key}: {path} is a folder. {fix}") from None
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        problem = f"{path}, line {number}: not UTF-8 text (byte {error.start} of the file)"
        raise InputError(f"{problem}. Fix: save it as UTF-8 (iconv -f latin1 -t utf-8)") from None
    except OSError as error:
        raise InputError(f"{key}: {path} cannot be read ({error.strerror}). {fix} that you may read") from None
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _prompt_of(row: Any, where: str) -> Prompt:
    given = [kind for kind in _KINDS if isinstance(row, Mapping) and kind in row]
    if len(given) > 1:
        both = " and ".join(f'"{kind}"' for kind in given)
        raise InputError(f"{where}: the line has {both}, and a prompt is one of them; remove the others")
    if not given:
        raise InputError(f"{where}: expected an object with one of {_KINDS_IN_WORDS}, not {clipped(row)}")
    kind, found = given[0], row[given[0]]
    if kind == "prompt" and isinstance(found, list) and found:  # as in datasets of TRL
        kind = "prompt_token_ids" if is_token_ids(found) else "messages"
    if kind == "prompt":
        if not isinstance(found, str) or not found:
            raise InputError(f'{where}: "prompt" must be a non-empty string, or a list of messages or token ids')
        return found
    if kind == "prompt_token_ids":
        if not isinstance(found, list) or not found or not all(type(id_) is int and 0 <= id_ < 2**31 for id_ in found):
            raise InputError(f'{where}: "{given[0]}" must be a non-empty list of whole numbers of 0 or more')
        return found
    if not isinstance(found, list) or not found:
        raise InputError(f'{where}: "{given[0]}" must be a non-empty list of {{"role": text, "content": text}} objects')
    try:
        plain_messages(found)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return found


def is_token_ids(prompt: Prompt) -> TypeGuard[list[int]]:
    """Whether the prompt is a list of token ids, which needs no tokenizer."""
    if not isinstance(prompt, list | tuple):
        return False
    return all(issubclass(kind, int | np.integer) and kind is not bool for kind in set(map(type, prompt)))


def plain_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages, with the content of each as one text; InputError if one has no role or no text."""
    plain = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise InputError(f'message {number} is {clipped(message)}, not a {{"role": text, "content": text}} object')
        if not isinstance(message.get("role"), str):
            raise InputError(f"message {number} has no role; give it one, such as user")
        plain.append({**message, "content": _plain_content(message.get("content"), number)})
    return plain


def _plain_content(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        problem = f"the content of message {number} is {clipped(content)}"
        raise InputError(f"{problem}; it must be text or a list of text parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise InputError(f"message {number} has a part of type {clipped(kind)}; only text parts can be used")
    return "\n".join(part["text"] for part in content)


def encode_prompt(
    tokenizer: Any,
    prompt: Prompt,
    chat: bool,
    *,
    add_special_tokens: bool = True,
    split_special_tokens: bool = False,
    most: int | None = None,
) -> tuple[int, ...]:
    """Token ids of a prompt; InputError if it is empty or malformed, or there is no tokenizer or chat template for it.

    Args:
        tokenizer: A transformers tokenizer, or None when only token ids are used.
        prompt: Text, chat messages or token ids. Contents of messages are literal text.
        chat: Wrap text as one user message if the tokenizer has a chat template.
        add_special_tokens: Add the tokenizer's BOS to plain text, unless the text begins with it.
        split_special_tokens: Read plain text literally, too; otherwise its control tokens are read as such.
        most: Size of the context in tokens; a text that is too long for it is refused before it is tokenized.
    """
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if not isinstance(prompt, str | list | tuple):
        raise InputError(f"a prompt is text, a list of chat messages or a list of token ids, not {prompt!r}")
    if is_token_ids(prompt):
        return _not_empty(list(map(operator.index, prompt)))  # type: ignore[arg-type]
    if isinstance(prompt, str):
        if not prompt:
            raise InputError("the prompt is empty")
        messages = _checked_messages([{"role": "user", "content": prompt}])
        if tokenizer is not None and not (chat and tokenizer.chat_template):
            refuse_long(tokenizer, [prompt], most)
            options = {"add_special_tokens": add_special_tokens, "literal": split_special_tokens}
            return _not_empty(_tokenize(tokenizer, Rendered(prompt), **options))
        return encode_chat(tokenizer, messages, most=most)
    return encode_chat(tokenizer, prompt, most=most)


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Any],
    *,
    add_special_tokens: bool = False,
    most: int | None = None,
    **template: Any,
) -> tuple[int, ...]:
    """Token ids of chat messages; InputError if one is malformed, or there is no chat template, or it refuses them.
    Messages are those of a `Prompt`, or of role `assistant` with `tool_calls` in place of content; `template` are more
    arguments of `apply_chat_template`, such as `tools`, and the others those of `encode_prompt`."""
    plain = _checked_messages([{**one, "content": ""} if _only_calls(one) else one for one in messages])
    if not plain:
        raise InputError("there are no messages")
    if tokenizer is None:
        raise InputError("the model has no tokenizer; give prompts as lists of token ids")
    if not tokenizer.chat_template:
        raise InputError(
            "the prompt is a list of chat messages, but the model's tokenizer has no chat template; send a prompt of "
            "text or token ids"
        )
    try:
        refuse_long(tokenizer, texts_of([*(list(one.values()) for one in plain), template]), most)
        rendered = render(tokenizer, plain, **template)
    except RecursionError:
        raise InputError("the messages, or the arguments of the chat template, are nested too deeply") from None
    return _not_empty(_tokenize(tokenizer, rendered, add_special_tokens=add_special_tokens))


def refuse_long(tokenizer: Any, texts: Iterable[str], most: int | None) -> None:
    """Raises InputError for texts that have more characters together than a context of `most` tokens can hold."""
    if most is None:
        return
    size, longest = sum(map(len, texts)), control_tokens(tokenizer).longest
    if size > most * longest:
        raise InputError(
            f"the prompt has {size} characters, and a context of {most} tokens holds at most {most * longest} "
            f"(the longest token has {longest})"
        )


def _only_calls(message: Any) -> bool:
    return isinstance(message, dict) and bool(message.get("tool_calls")) and message.get("content") is None


def encode_prompts(tokenizer: Any, prompts: Sequence[Prompt], chat: bool, **options: Any) -> list[Encoded]:
    """`encode_prompt` for each prompt; a prompt that cannot be encoded has the reason in place of token ids."""
    encoded: list[Encoded] = []
    for prompt in prompts:
        try:
            encoded.append((encode_prompt(tokenizer, prompt, chat, **options), ""))
        except InputError as error:
            encoded.append(((), str(error)))
    return encoded


def text_options(data: DataConfig) -> dict[str, bool]:
    """Options of `encode_prompt` for plain text."""
    return {"add_special_tokens": data.add_special_tokens, "split_special_tokens": data.split_special_tokens}


def _not_empty(token_ids: Sequence[Any]) -> tuple[int, ...]:
    if not token_ids:
        raise InputError("the prompt has no tokens")
    return tuple(token_ids)


def _checked_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """`plain_messages`, refused if one has half a character."""
    plain = plain_messages(messages)
    for message in plain:
        try:
            message["content"].encode("utf-8")
        except UnicodeEncodeError as error:
            problem = f"the prompt is not valid Unicode: half a surrogate pair at character {error.start}"
            raise InputError(problem) from None
    return plain


def _tokenize(tokenizer: Any, rendered: Rendered, **options: Any) -> list[int]:
    try:
        return tokenize(tokenizer, rendered, **options)
    except InputError:
        raise
    except Exception as error:  # for example half a surrogate pair, with any exception type
        raise InputError(f"the tokenizer refuses this prompt: {error}") from error


class ChatTurns:
    """Tokens between an output and the next one under a model's chat template; InputError if that does not append.

    In a conversation token by token the next prompt is all tokens so far, then these. An output is not tokenized again:
    its text may have other tokens than the sampled ones, and then neither log-probabilities nor the verifier's cache
    would fit. The template must therefore write outputs as they are, thoughts and white space too, in every later turn.

    Args:
        tokenizer: A transformers tokenizer.
        keep_outputs: Accept a template that changes outputs: they stay in the context as sampled, and what follows them
            is the text that the template writes behind a short output.
    """

    def __init__(self, tokenizer: Any, keep_outputs: bool = False) -> None:
        self._tokenizer, self._keeps = tokenizer, keep_outputs
        self._now = datetime.now()
        """Time of the conversation, for templates that write it."""
        if tokenizer is None or not tokenizer.chat_template:
            raise InputError("a conversation needs a chat template, and the model's tokenizer has none")
        self._outputs = (_OUTPUT,) if keep_outputs else _outputs_to_try(str(tokenizer.chat_template))
        self._accepted = set[frozenset[str]]()
        """Roles of appended messages with which the template keeps every output."""
        end = self._render((*_OPENING, _message_of(_OUTPUT)), False).text.partition(_OUTPUT)[2]
        for output in self._outputs:
            begin = self._render(_OPENING, True).text
            written = self._render((*_OPENING, _message_of(output)), False).text
            if not keep_outputs and written != begin + output + end:
                raise InputError(
                    "the model's chat template changes an output, or writes an output elsewhere than behind its "
                    "generation prompt"
                    f"{_difference(begin + output + end, written)}"
                )

    def now(self) -> ChatTurns:
        """The same for a conversation that begins now."""
        turns = copy(self)
        turns._now = datetime.now()
        return turns

    def begin(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of the first prompt."""
        return encode_chat(self._tokenizer, messages, strftime_now=self._now.strftime)

    def between(self, messages: Sequence[Message], output: Sequence[int]) -> tuple[int, ...]:
        """Token ids from the end of an output to the beginning of the next one, with these messages between them. If
        the output ends with the template's end-of-turn token, that is not repeated. An InputError if the template
        refuses the messages, or changes the earlier text when they are appended."""
        roles = frozenset(str(message["role"]) for message in messages)
        whole = self._after(_OUTPUT, messages, roles)
        if roles not in self._accepted:
            for other in self._outputs:
                self._after(other, messages, roles)
            later = self._after(_OUTPUT, messages, roles, _LATER)
            if later.text != whole.text:
                raise InputError(
                    "the model's chat template writes a later turn in another way"
                    f"{_difference(whole.text, later.text, 'a template that does not count turns')}"
                )
            self._accepted.add(roles)
        ids = _tokenize(self._tokenizer, whole)
        if output and output[-1] in ids:
            at = ids.index(output[-1])
            if not self._tokenizer.decode(ids[:at]).strip() and output[-1] in self._tokenizer.all_special_ids:
                ids = ids[at + 1 :]
        return tuple(ids)

    def _after(
        self, output: str, messages: Sequence[Message], roles: frozenset[str], opening: Sequence[Message] = _OPENING
    ) -> Rendered:
        """What the template writes behind an output that these messages follow."""
        answered = (*opening, _message_of(output))
        whole = self._render((*answered, *_checked_messages(messages)), True)
        if self._keeps and output in whole.text:
            return whole[whole.text.index(output) + len(output) :]
        begin = self._render(opening, True).text + output
        before = self._render(answered, False).text
        if not before.startswith(begin) or not whole.text.startswith(before):
            raise InputError(
                "the model's chat template changes earlier messages when it appends "
                f"{' and '.join(sorted(roles))} messages{_difference(before, whole.text)}"
            )
        return whole[len(begin) :]

    def _render(self, messages: Sequence[Message], generation_prompt: bool) -> Rendered:
        return render(
            self._tokenizer, messages, add_generation_prompt=generation_prompt, strftime_now=self._now.strftime
        )


def _message_of(output: str) -> Message:
    return {"role": "assistant", "content": output}


def _outputs_to_try(template: str) -> Sequence[str]:
    """Outputs that templates are known to change, and one with each text of this template's source."""
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 * 3"}}\n</tool_call>'
    thought = f"<think>\nA thought.\n</think>\n\n{_OUTPUT}"
    quoted = (text for pair in re.findall(r"'([^'\\\n]+)'|\"([^\"\\\n]+)\"", template) for text in pair if text)
    others = (f" \n{_OUTPUT}\n ", "", call, _LONG, *(f"a {one} b" for one in quoted))
    return tuple(dict.fromkeys([_OUTPUT, thought, *others]))


def _difference(expected: str, found: str, fix: str = _KEEP) -> str:
    """End of an error: both texts from where they begin to differ."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(expected, found, strict=False))
    at = sum(1 for _ in same)
    begin = max(0, at - 20)
    return (
        ", so that a conversation cannot be continued token by token: "
        f"{expected[begin : at + 60]!r} becomes {found[begin : at + 60]!r}. Fix: {fix}"
    )
