"""Answers of OpenAI's endpoints, with vLLM's fields."""

from __future__ import annotations

import codecs
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from specactor_ray.rollout.detokenizer import decoded
from specactor_ray.rollout.handle import Token
from specactor_ray.rollout.prompts import is_token_ids
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.serve.outputs import Form, Part, finite
from specactor_ray.serve.requests import ChatBody, CompletionBody, SamplingBody, Wanted
from specactor_ray.serve.service import Service
from specactor_ray.serve.tool_calls import CALL, opens_thought, parsed_calls
from specactor_ray.serve.vocabulary import Vocabulary

_END = 16
"""Tokens at the end of a prompt in which a template may open a thought."""


class OpenAIForm(Form):
    """Fields of both endpoints' answers."""

    prefix = kind = chunk_kind = ""
    has_labels = False

    def __init__(self, service: Service, body: SamplingBody, prompts: Sequence[Sequence[int]], wanted: Wanted) -> None:
        super().__init__(service, prompts, wanted)
        self.id = f"{self.prefix}-{secrets.token_hex(16)}"
        self.with_ids = bool(body.return_token_ids)
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._with_usage = bool((body.stream_options or {}).get("include_usage"))
        self._with_prompt = body.prompt_logprobs is not None and body.prompt_logprobs is not False
        self._created = int(time.time())

    def whole(self, parts: Sequence[Part]) -> dict[str, Any]:
        outputs = [part.output for part in parts if part.output is not None]
        choices = [self.choice(part) for part in parts]
        return {**self._head(self.kind), "choices": choices, **self._end(outputs)}

    def event(self, part: Part) -> dict[str, Any]:
        event = {**self._head(self.chunk_kind), "choices": [self.choice(part, is_event=True)]}
        return event if part.output is None else event | {"system_fingerprint": _fingerprint([part.output])}

    def last_events(self, outputs: Sequence[Trajectory]) -> Iterable[Any]:
        if self._with_usage:
            yield {**self._head(self.chunk_kind), "choices": [], **self._end(outputs)}

    def choice(self, part: Part, is_event: bool = False) -> dict[str, Any]:
        """A choice, or its new content."""
        raise NotImplementedError

    def name(self, token_id: int) -> str:
        """Name of a token in reports."""
        return f"token_id:{token_id}" if self._as_ids else self.service.vocabulary.name(token_id)

    def frame(self, part: Part) -> dict[str, Any]:
        choice = super().frame(part)
        if self._with_prompt and (report := self.prompt_report(part.output)) is not None:
            choice["prompt_logprobs"] = report
        return choice

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.service.model}

    def _end(self, outputs: Sequence[Trajectory]) -> dict[str, Any]:
        return {"usage": self.usage(outputs), "system_fingerprint": _fingerprint(outputs)}


class Offsets:
    """Places in a text at which its tokens begin, from place `at` on; parts of one character begin at the same place.
    `special`: whether the text has special tokens."""

    def __init__(self, vocabulary: Vocabulary, special: bool, at: int = 0) -> None:
        self._vocabulary, self._special, self._at = vocabulary, special, at
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._has_begun = self._has_part = False

    def add(self, token_ids: Iterable[int]) -> list[int]:
        """Places of the next tokens."""
        places = []
        for token_id in token_ids:
            utf8 = self._vocabulary.answer_bytes(token_id, self._special, not self._has_begun)
            if self._has_part and utf8 and not 0x80 <= utf8[0] < 0xC0:  # the character remains a part
                self._at += len(self._decoder.decode(b"", True))
            places.append(self._at)
            if utf8:
                self._at += len(self._decoder.decode(utf8))
                self._has_begun, self._has_part = True, bool(self._decoder.getstate()[0])
        return places


class CompletionForm(OpenAIForm):
    """Answers of `/v1/completions`."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    only_prompts = False
    """The answer has no output."""

    def __init__(
        self, service: Service, body: CompletionBody, prompts: Sequence[Sequence[int]], wanted: Wanted
    ) -> None:
        super().__init__(service, body, prompts, wanted)
        self._offsets: dict[int, Offsets] = {}
        """Number of a choice → places of its tokens."""

    def choice(self, part: Part, is_event: bool = False) -> dict[str, Any]:
        choice = {**self.frame(part), "text": part.text}
        if self.wanted.logprobs is not None:
            offsets = self._offsets.setdefault(part.index, Offsets(self.service.vocabulary, self.wanted.special))
            choice["logprobs"] = self.report(part.tokens, offsets)
        if self.with_ids and part.output is not None:
            choice["prompt_token_ids"] = self.prompts[part.index // self.wanted.n]
        return choice

    def report(self, tokens: Sequence[Token], offsets: Offsets) -> dict[str, list[Any]]:
        """Log-probabilities of output tokens."""
        return {
            "tokens": [self.name(token.token_id) for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": list(map(self.alternatives, tokens)),
            "text_offset": offsets.add(token.token_id for token in tokens),
        }

    def alternatives(self, token: Token) -> dict[str, float]:
        """Values by name of a token and of its alternatives. A name that another token has becomes the token's id."""
        found = {self.name(token.token_id): finite(token.logprob)}
        for token_id, value in token.top:
            if token_id != token.token_id:
                name = self.name(token_id)
                found[f"token_id:{token_id}" if name in found else name] = finite(value)
        return found


class EchoForm(CompletionForm):
    """Answers that begin with the prompt: its text, and its log-probabilities if the request has `logprobs`. A choice
    is one event, since log-probabilities of prompts come with the end of an output."""

    at_once = True

    def __init__(
        self, service: Service, body: CompletionBody, prompts: Sequence[Sequence[int]], wanted: Wanted
    ) -> None:
        super().__init__(service, body, prompts, wanted)
        given = body.prompt
        self._given = given if isinstance(given, list) and not is_token_ids(given) else [given]

    def usage(self, outputs: Iterable[Trajectory | None]) -> dict[str, int]:
        return super().usage(() if self.only_prompts else outputs)

    def choice(self, part: Part, is_event: bool = False) -> dict[str, Any]:
        if (output := part.output) is None:
            return super().choice(part, is_event)
        number = part.index // self.wanted.n
        if self.only_prompts:
            part = Part(part.index, "", [], output)
        text, begin = self._texts(number, part)
        choice = {**super().choice(part, is_event), "text": text}
        if self.only_prompts:
            choice |= {"finish_reason": "length", "stop_reason": None, "weight_versions": []}
        if self.wanted.logprobs is not None:
            prompt = self.prompts[number]
            offsets = Offsets(self.service.vocabulary, self.wanted.special, begin)
            offsets.add(prompt)
            own, others = self._prompt_report(number, output), self.report(part.tokens, offsets)
            choice["logprobs"] = {name: own[name] + others[name] for name in own}
        return choice

    def _texts(self, number: int, part: Part) -> tuple[str, int]:
        """Text of a prompt and its output, and the place in it of the decoded prompt: below 0 if that is longer than
        the text that was sent."""
        tokenizer, special, given = self.service.tokenizer, self.wanted.special, self._given[number]
        prompt, ids = self.prompts[number], part.token_ids
        own, whole = (decoded(tokenizer, one, special) for one in (prompt, [*prompt, *ids]))
        cut = len(decoded(tokenizer, ids, special)) - len(part.text)
        text = whole[: len(whole) - cut]
        if not isinstance(given, str):
            return text, 0
        return given + (text[len(own) :] if text.startswith(own) else part.text), len(given) - len(own)

    def _prompt_report(self, number: int, output: Trajectory) -> dict[str, list[Any]]:
        prompt, given = self.prompts[number], self._given[number]
        names = list(map(self.name, prompt))
        scores, best = output.prompt_logprobs, output.prompt_best
        values, tops = list[float | None]([None]), list[dict[str, float] | None]([None])
        if scores is None or best is None:  # the request was aborted before they were computed
            values, tops = values * len(prompt), tops * len(prompt)
        else:
            most = min(1, self.wanted.logprobs or 0)
            rows = zip(prompt[1:], scores, best, strict=True)
            tokens = [Token(token_id, value, (top,)[:most]) for token_id, value, top in rows]
            values += [finite(token.logprob) for token in tokens]
            tops += map(self.alternatives, tokens)
        return {
            "tokens": names,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": self._prompt_offsets(prompt, given),
        }

    def _prompt_offsets(self, prompt: Sequence[int], given: Any) -> list[int]:
        """Places of a prompt's tokens in its text, which may contain special tokens, but not one that was added."""
        vocabulary, special = self.service.vocabulary, self.wanted.special
        if not isinstance(given, str):
            return Offsets(vocabulary, special).add(prompt)
        whole = decoded(self.service.tokenizer, prompt, True)
        special = whole.endswith(given)
        begin = len(given) - len(whole) if special else 0
        return [min(max(place, 0), len(given)) for place in Offsets(vocabulary, special, begin).add(prompt)]


class ChatForm(OpenAIForm):
    """Answers of `/v1/chat/completions`; tool calls are parsed from the outputs if the request has tools."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatBody, prompts: Sequence[Sequence[int]], wanted: Wanted) -> None:
        super().__init__(service, body, prompts, wanted)
        self.until = CALL if body.tools and body.tool_choice != "none" else ""
        end = service.tokenizer.decode(prompts[0][-_END:]) if self.until else ""
        self._in_thought = opens_thought(end)
        self._begun = set[int]()
        """Numbers of the choices with text that has begun."""

    def whole(self, parts: Sequence[Part]) -> dict[str, Any]:
        answer = super().whole(parts)
        if (report := self.prompt_report(parts[0].output)) is not None:
            answer["prompt_logprobs"] = report
        return answer | ({"prompt_token_ids": self.prompts[0]} if self.with_ids else {})

    def first_events(self, choices: int) -> Iterable[Any]:
        for index in range(choices):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield {**self._head(self.chunk_kind), "choices": [choice]}

    def choice(self, part: Part, is_event: bool = False) -> dict[str, Any]:
        content, calls = part.text, list[dict[str, Any]]()
        if self.until and part.output is not None:
            whole = self.text(part.output)
            content, calls = parsed_calls(whole, self._in_thought)
            content = content[len(whole) - len(part.text) :]
        choice = self.frame(part)
        if calls and choice["finish_reason"] == "stop":
            choice["finish_reason"] = "tool_calls"
        if self.wanted.logprobs is not None:
            choice["logprobs"] = {"content": [self._reported(part.index, token) for token in part.tokens]}
        if not is_event:
            message = {"role": "assistant", "content": content or None if calls else content}
            return choice | {"message": message | ({"tool_calls": calls} if calls else {})}
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        if self.with_ids and part.output is not None:
            choice["prompt_token_ids"] = self.prompts[0]
        return choice | {"delta": delta}

    def _reported(self, index: int, token: Token) -> dict[str, Any]:
        vocabulary = self.service.vocabulary
        utf8 = vocabulary.answer_bytes(token.token_id, self.wanted.special, index not in self._begun)
        if utf8:
            self._begun.add(index)
        others = [{**self._named(*other), "bytes": list(vocabulary.utf8(other[0]))} for other in token.top]
        return {**self._named(token.token_id, token.logprob), "bytes": list(utf8), "top_logprobs": others}

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.name(token_id), "logprob": finite(logprob)}


def _fingerprint(outputs: Sequence[Trajectory]) -> str:
    """Identifies the weights: a request with the same seed and weights has the same output."""
    return f"weights-{max(output.weight_version for output in outputs)}"
