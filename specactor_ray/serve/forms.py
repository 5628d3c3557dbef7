"""Outputs in OpenAI's form: whole, and as the events of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

from specactor_ray.rollout.handle import Token
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.serve.bodies import ChatBody, CompletionBody, SamplingBody
from specactor_ray.serve.chat import parsed_calls
from specactor_ray.serve.outputs import Part
from specactor_ray.serve.parameters import Wanted

if TYPE_CHECKING:
    from specactor_ray.serve.service import Service

_LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""

as_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


class Form:
    """The answer to one request.

    Args:
        service, body, wanted: Service, body and sampling options of the request.
        prompts: Token ids of each prompt.
    """

    prefix = kind = chunk_kind = ""

    def __init__(self, service: Service, body: SamplingBody, prompts: Sequence[Sequence[int]], wanted: Wanted) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(16)}"
        self._service, self._prompts, self._n, self._logprobs = service, prompts, wanted.n, wanted.logprobs
        self._with_ids, self._as_ids = bool(body.return_token_ids), bool(body.return_tokens_as_token_ids)
        self._created = int(time.time())
        head = {"id": self.id, "object": self.chunk_kind, "created": self._created, "model": service.model}
        self._head = as_json(head)[:-1]

    def whole(self, outputs: Sequence[Trajectory]) -> dict[str, Any]:
        """The complete answer, not streamed."""
        return {
            "id": self.id,
            "object": self.kind,
            "created": self._created,
            "model": self._service.model,
            "choices": [self._choice(index, output) for index, output in enumerate(outputs)],
            "usage": self._usage(outputs),
            "system_fingerprint": _fingerprint(outputs),
        }

    def events(self, part: Part) -> Iterator[str]:
        """Events of one part of a choice."""
        raise NotImplementedError

    def first_events(self, choices: int) -> Iterator[str]:
        """Events before the first part."""
        del choices
        yield from ()

    def usage_event(self, outputs: Sequence[Trajectory]) -> str:
        """Usage event after the last part."""
        end = {"choices": [], "usage": self._usage(outputs), "system_fingerprint": _fingerprint(outputs)}
        return f"{self._head},{as_json(end)[1:]}"

    def _choice(self, index: int, output: Trajectory) -> dict[str, Any]:
        raise NotImplementedError

    def _event(self, choice: dict[str, Any], output: Trajectory | None = None) -> str:
        """One event; `output` is the complete output, given with the last event of a choice."""
        end = "" if output is None else f',"system_fingerprint":"{_fingerprint([output])}"'
        return f'{self._head},"choices":[{as_json(choice)}]{end}}}'

    def _end_of(self, output: Trajectory) -> dict[str, Any]:
        """Fields of a complete choice, and of its last event, besides the output."""
        begin, versions = 0, []
        for version, end in (*output.versions, (output.weight_version, len(output.token_ids))):
            versions.append({"version": version, "start": begin, "end": end})
            begin = end
        return {
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "seed": output.sampling.seed,
            "weight_versions": versions,
            **({} if output.prompt_logprobs is None else {"prompt_logprobs": prompt_report(self._service, output)}),
        }

    def _usage(self, outputs: Sequence[Trajectory]) -> dict[str, int]:
        prompt, output = sum(map(len, self._prompts)), sum(len(one.token_ids) for one in outputs)
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._service.token_texts[token_id].text


class CompletionForm(Form):
    """Answers of `/v1/completions`."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, service: Service, body: CompletionBody, prompts: Sequence[Sequence[int]], wanted: Wanted
    ) -> None:
        super().__init__(service, body, prompts, wanted)
        self._echo: list[str] | None = None
        if body.echo:
            given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
            texts = given if isinstance(given[0], str) else map(service.tokenizer.decode, prompts)
            self._echo = list(texts)
        self._offsets: dict[int, int] = {}
        """Choice → number of characters of its tokens so far."""

    def events(self, part: Part) -> Iterator[str]:
        choice: dict[str, Any] = {"index": part.index, "text": part.text, "logprobs": None, "finish_reason": None}
        if self._logprobs is not None:
            choice["logprobs"] = self._report(part.index, part.tokens)
        if self._with_ids:
            choice["token_ids"] = [token.token_id for token in part.tokens]
        if part.output is not None:
            choice |= self._end_of(part.output)
            choice |= self._prompt_ids(part.index)
        yield self._event(choice, part.output)

    def _choice(self, index: int, output: Trajectory) -> dict[str, Any]:
        choice = {"index": index, "text": output.text, "logprobs": None, **self._end_of(output)}
        tokens = tokens_of(output)
        if self._echo is not None:
            choice["text"] = self._echo[index // self._n] + output.text
            tokens = [*map(Token, output.prompt_token_ids, (0.0, *(output.prompt_logprobs or ()))), *tokens]
        if self._logprobs is not None:
            choice["logprobs"] = report = self._report(index, tokens)
            if self._echo is not None:  # a first token has no prediction
                report["token_logprobs"][0] = report["top_logprobs"][0] = None
        if self._with_ids:
            choice["token_ids"] = output.token_ids
        return choice | self._prompt_ids(index)

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompts[index // self._n]} if self._with_ids else {}

    def _report(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        names, offsets, at = [], [], self._offsets.get(index, 0)
        for token in tokens:
            names.append(self._name(token.token_id))
            offsets.append(at)
            at += len(names[-1])
        self._offsets[index] = at
        values = [finite(token.logprob) for token in tokens]
        tops = [
            {name: value} | {self._name(other): finite(theirs) for other, theirs in token.top}
            for name, value, token in zip(names, values, tokens, strict=True)
        ]
        return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


class ChatForm(Form):
    """Answers of `/v1/chat/completions`; with `wants_calls`, tool calls are parsed from the outputs."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, service: Service, body: ChatBody, prompts: Sequence[Sequence[int]], wanted: Wanted, wants_calls: bool
    ) -> None:
        super().__init__(service, body, prompts, wanted)
        self.wants_calls = wants_calls

    def whole(self, outputs: Sequence[Trajectory]) -> dict[str, Any]:
        answer = super().whole(outputs)
        if outputs[0].prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_report(self._service, outputs[0])
        return answer | ({"prompt_token_ids": self._prompts[0]} if self._with_ids else {})

    def first_events(self, choices: int) -> Iterator[str]:
        for index in range(choices):
            delta = {"role": "assistant", "content": ""}
            yield self._event({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def events(self, part: Part) -> Iterator[str]:
        delta: dict[str, Any] = {"content": part.text} if part.text else {}
        choice: dict[str, Any] = {"index": part.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if self._logprobs is not None:
            choice["logprobs"] = {"content": self._report(part.tokens)}
        if self._with_ids:
            choice["token_ids"] = [token.token_id for token in part.tokens]
        if part.output is not None:
            choice |= self._end_of(part.output)
            if self.wants_calls:
                self._put_calls(choice, part.text)
            if self._with_ids:
                choice["prompt_token_ids"] = self._prompts[0]
        yield self._event(choice, part.output)

    def _put_calls(self, choice: dict[str, Any], text: str) -> None:
        content, calls = parsed_calls(text)
        if calls:
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            choice["delta"] = {"tool_calls": numbered} | ({"content": content} if content else {})
            choice["finish_reason"] = _with_calls(choice["finish_reason"])

    def _choice(self, index: int, output: Trajectory) -> dict[str, Any]:
        content, calls = parsed_calls(output.text) if self.wants_calls else (output.text, [])
        message: dict[str, Any] = {"role": "assistant", "content": content}
        choice = {"index": index, "message": message, "logprobs": None, **self._end_of(output)}
        if calls:
            message["tool_calls"], message["content"] = calls, content or None
            choice["finish_reason"] = _with_calls(output.finish_reason)
        if self._logprobs is not None:
            choice["logprobs"] = {"content": self._report(tokens_of(output))}
        if self._with_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def _report(self, tokens: Sequence[Token]) -> list[dict[str, Any]]:
        return [
            {
                **self._one(token.token_id, token.logprob),
                "top_logprobs": [self._one(*other) for other in token.top],
            }
            for token in tokens
        ]

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        utf8 = self._service.token_texts[token_id].utf8
        return {"token": self._name(token_id), "logprob": finite(logprob), "bytes": utf8}


def with_json(known: dict[str, Any], name: str, value: str) -> str:
    """JSON of an object plus a field whose value is JSON already. Building objects for every token costs more."""
    return f'{as_json(known)[:-1]},"{name}":{value}}}'


def prompt_report(service: Service, output: Trajectory) -> list[dict[str, Any] | None] | None:
    """Log-probabilities of a prompt in the form of vLLM: None for the first token. None if they were not computed."""
    if output.prompt_logprobs is None:
        return None
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs, strict=True)
    texts = service.token_texts
    return [None, *({str(one): {"logprob": finite(value), "decoded_token": texts[one].text}} for one, value in pairs)]


def tokens_of(output: Trajectory) -> list[Token]:
    """Tokens of an output in their streamed form."""
    return list(map(Token, output.token_ids, output.logprobs, output.top_logprobs or repeat(())))


def _with_calls(finish_reason: str) -> str:
    return "tool_calls" if finish_reason == "stop" else finish_reason


def _fingerprint(outputs: Sequence[Trajectory]) -> str:
    """Identifies the weights: a request with the same seed and weights has the same output."""
    return f"weights-{max(output.weight_version for output in outputs)}"


def finite(logprob: float) -> float:
    """Log-probability clipped at `_LEAST_LOGPROB`, since JSON has no infinity."""
    return max(float(logprob), _LEAST_LOGPROB)
