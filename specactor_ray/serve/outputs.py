"""Outputs of every dialect: their text as it grows, and answers, whole or as a stream of events."""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

from fastapi.responses import Response, StreamingResponse

from specactor_ray.rollout.detokenizer import PARTIAL, Detokenizer, decoded
from specactor_ray.rollout.handle import Handle, Token
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.serve.requests import Wanted, as_json, error_body, note_failure, refusal_of

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from specactor_ray.serve.service import Service

_BUFFERED = 64
"""Most buffered parts of a stream of several choices with a slow client."""
_LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

# ---- text ----


class GrowingText:
    """Text of an output that can be sent as its tokens arrive. Held back are a possible beginning of the texts in
    `hold`, which may end the output, and if `trimmed` the newest token, since the text of the one that ends it is
    removed."""

    def __init__(self, tokenizer: Any, hold: Sequence[str] = (), special: bool = False, trimmed: bool = False) -> None:
        self._detokenizer, self._hold = Detokenizer(tokenizer, special), hold
        self._trimmed, self._newest = trimmed, list[int]()
        self._longest = max(map(len, hold), default=1) - 1
        self._held = ""
        self._length = 0
        """Number of characters returned so far."""

    def add(self, token_ids: Sequence[int]) -> str:
        """The further text with these tokens; may be empty."""
        if self._trimmed:
            token_ids = [*self._newest, *token_ids]
            token_ids, self._newest = token_ids[:-1], token_ids[-1:]
        text = self._held + self._detokenizer.add(token_ids)
        keep = len(text) - self._beginning_of_a_held(text)
        self._held, text = text[keep:], text[:keep]
        self._length += len(text)
        return text

    def rest(self, whole: str) -> str:
        """Rest of the whole text at the end of the output."""
        return whole[self._length :]

    def _beginning_of_a_held(self, text: str) -> int:
        """Number of characters at the end of a text that may begin a held text, or that start with a whole one."""
        if found := [at for held in self._hold if (at := text.find(held)) >= 0]:
            return len(text) - min(found)
        for length in range(min(self._longest, len(text)), 0, -1):
            if any(held.startswith(text[-length:]) for held in self._hold):
                return length
        return 0


# ---- parts ----


@dataclass(slots=True)
class Part:
    """New content of an output since the previous part; a whole output is one part."""

    index: int
    """Number of the choice."""
    text: str
    tokens: list[Token] = field(default_factory=list)
    output: Trajectory | None = None
    """The complete output, set in the last part."""

    @property
    def token_ids(self) -> list[int]:
        """Ids of the tokens."""
        return [token.token_id for token in self.tokens]


def text_of(tokenizer: Any, output: Trajectory, special: bool, trimmed: bool) -> str:
    """Text of an output; `special`: with special tokens, `trimmed`: without the token that ended it."""
    ids, stop = output.token_ids, output.stop_reason
    trimmed &= output.finish_reason == "stop" and not isinstance(stop, str)
    if not special and not trimmed:
        return output.text
    text = decoded(tokenizer, ids[:-1] if trimmed else ids, special)
    if not isinstance(stop, str):
        return text
    before = decoded(tokenizer, ids[:-1], special).rstrip(PARTIAL)
    end = text.find(stop, max(0, len(before) - len(stop) + 1))  # the last token completes it
    if end < 0:  # a special token stands within the stop text
        return output.text
    return text[: end + len(stop) * output.sampling.include_stop_str_in_output]


def whole_part(form: Form, index: int, output: Trajectory) -> Part:
    """An output as one part."""
    tokens = map(Token, output.token_ids, output.logprobs, output.top_logprobs or repeat(()))
    return Part(index, form.text(output), list(tokens), output)


async def parts_of(form: Form, handle: Handle, index: int) -> AsyncIterator[Part]:
    """Yield choice number `index` in parts; tokens that arrive together, or that form one character, are one part."""
    service = form.service
    came, count, text = time.monotonic(), 0, ""
    hold = [*form.wanted.sampling.stop, *filter(None, (form.until,))]
    growing, tokens = GrowingText(service.tokenizer, hold, form.wanted.special, form.trimmed), list[Token]()
    async for fresh in handle.batches():
        now = time.monotonic()
        service.metrics.arrived(now - came, len(fresh), not count)
        came, count, tokens = now, count + len(fresh), tokens + fresh
        text += growing.add([token.token_id for token in fresh])
        if text and not form.at_once and not handle.done():
            yield Part(index, text, tokens)
            text, tokens = "", []
    output = service.checked(await handle)
    yield Part(index, text + growing.rest(form.text(output)), tokens, output)


async def merged(streams: Sequence[AsyncIterator[Part]]) -> AsyncIterator[Part]:
    """Yield the parts of several outputs as they arrive. Raises what one of them raises."""
    if len(streams) == 1:
        async for part in streams[0]:
            yield part
        return
    queue: asyncio.Queue[Part | Exception] = asyncio.Queue(_BUFFERED)

    async def read(stream: AsyncIterator[Part]) -> None:
        try:
            async for part in stream:
                await queue.put(part)
        except Exception as error:  # noqa: BLE001 - raised by the reader of the queue
            await queue.put(error)

    readers = [asyncio.ensure_future(read(stream)) for stream in streams]
    left = len(streams)
    try:
        while left:
            got = await queue.get()
            if isinstance(got, Exception):
                raise got
            yield got
            left -= got.output is not None
    finally:
        for reader in readers:
            reader.cancel()


# ---- answers ----


class Form(abc.ABC):
    """The answer to one request in a dialect; all values are objects for JSON."""

    until: str = ""
    """Only the last part has this text and all that follows it."""
    at_once = False
    """Whether an output is one event of a stream."""
    trims = False
    """Whether a text lacks the token that ended its output, where it is no special token."""
    has_labels = True
    """Whether versions of the weights have the trainer's names."""
    with_ids = True
    """Whether choices have their token ids."""

    def __init__(self, service: Service, prompts: Sequence[Sequence[int]], wanted: Wanted) -> None:
        self.service, self.prompts, self.wanted = service, prompts, wanted

    @abc.abstractmethod
    def whole(self, parts: Sequence[Part]) -> Any:
        """The answer that is not streamed, of one part for each choice."""

    def event(self, part: Part) -> Any:
        """The event of a part, where streams are available."""
        raise NotImplementedError

    def first_events(self, choices: int) -> Iterable[Any]:
        """Events before the first part."""
        return ()

    def last_events(self, outputs: Sequence[Trajectory]) -> Iterable[Any]:
        """Events after the last part."""
        return ()

    @property
    def trimmed(self) -> bool:
        """Whether texts lack the token that ended their output."""
        return (self.trims or self.wanted.special) and not self.wanted.sampling.include_stop_str_in_output

    def text(self, output: Trajectory) -> str:
        """Text of a complete output."""
        return text_of(self.service.tokenizer, output, self.wanted.special, self.trimmed)

    def frame(self, part: Part) -> dict[str, Any]:
        """Fields of a choice besides its content, as in OpenAI and vLLM."""
        choice: dict[str, Any] = {"index": part.index, "logprobs": None, "finish_reason": None}
        if self.with_ids:
            choice["token_ids"] = part.token_ids
        if (output := part.output) is not None:
            choice |= {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
            choice |= {"seed": output.sampling.seed, "weight_versions": self.spans(output)}
        return choice

    def spans(self, output: Trajectory) -> list[dict[str, Any]]:
        """Token ranges by the weights that sampled them: `{version, start, end}`, `end` exclusive."""
        name: Callable[[int], Any] = self.service.control.label_of if self.has_labels else int
        return [{"version": name(version), "start": begin, "end": end} for version, begin, end in output.spans()]

    def prompt_report(self, output: Trajectory | None) -> list[dict[str, Any] | None] | None:
        """Log-probabilities of a prompt as in vLLM: None for the first token. None if they were not computed."""
        if output is None or output.prompt_logprobs is None:
            return None
        report: list[dict[str, Any] | None] = [None]
        for token_id, value in zip(output.prompt_token_ids[1:], output.prompt_logprobs, strict=True):
            text = self.service.vocabulary.name(token_id)
            report.append({str(token_id): {"logprob": finite(value), "decoded_token": text}})
        return report

    def usage(self, outputs: Iterable[Trajectory | None]) -> dict[str, int]:
        """Numbers of tokens of the request."""
        prompt, tokens = sum(map(len, self.prompts)), sum(len(one.token_ids) for one in outputs if one is not None)
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


async def answer(request: Request, form: Form, *, stream: bool | None, **submission: Any) -> Response:
    """Generate, and answer a request, by events if `stream`; if its client leaves, its outputs are aborted. The others
    are arguments of `Service.submit`."""
    service = form.service
    handles = service.submit(form.prompts, form.wanted, **submission)
    if stream:
        streams = [parts_of(form, handle, index) for index, handle in enumerate(handles)]
        return EventStream(_events(form, streams, request.scope["path"]), partial(service.drop, handles))
    outputs = await service.outputs(request, handles)
    whole = form.whole([whole_part(form, index, output) for index, output in enumerate(outputs)])
    return Response(as_json(whole), media_type="application/json")


async def _events(form: Form, streams: Sequence[AsyncIterator[Part]], path: str) -> AsyncGenerator[bytes, None]:
    outputs = []
    try:
        for event in form.first_events(len(streams)):
            yield _data(as_json(event))
        async for part in merged(streams):
            if part.output is not None:
                outputs.append(part.output)
            yield _data(as_json(form.event(part)))
        for event in form.last_events(outputs):
            yield _data(as_json(event))
    except Exception as error:  # noqa: BLE001 - the client has got a status of success; an event is all that can follow
        refusal = refusal_of(error)
        note_failure(path, refusal)
        yield _data(as_json(error_body(refusal)))
    yield _data(b"[DONE]")


def _data(text: bytes) -> bytes:
    return b"data: %b\n\n" % text


class EventStream(StreamingResponse):
    """Server-sent events; `at_end` is called at the end, also when the client has left."""

    def __init__(self, events: AsyncGenerator[bytes, None], at_end: Callable[[], None]) -> None:
        super().__init__(events, headers=_HEADERS, media_type="text/event-stream")
        self._events, self._at_end = events, at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._at_end()
            await self._events.aclose()


def finite(logprob: float) -> float:
    """Log-probability clipped at `_LEAST_LOGPROB`, since JSON has no infinity."""
    return max(float(logprob), _LEAST_LOGPROB)
