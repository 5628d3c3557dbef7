"""Shared parts of all dialects: rollout, tokenizer, seeds, limits, and the abort of requests whose client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from specactor_ray.core.errors import SpecActorError
from specactor_ray.rollout.handle import Handle
from specactor_ray.rollout.preflight import context_tokens, load_target_config
from specactor_ray.rollout.prompts import Prompt, encode_prompt
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.sampling.seeds import derive_seed
from specactor_ray.serve.control import Control
from specactor_ray.serve.metrics import ServerMetrics
from specactor_ray.serve.parameters import MOST_CHOICES, Wanted, wanted_of
from specactor_ray.serve.refusal import CLIENT_GONE, FAILED, NOT_FOUND, Refusal, refusal_of
from specactor_ray.serve.text import TokenTexts

if TYPE_CHECKING:
    from starlette.requests import Request

    from specactor_ray.rollout.rollout import Rollout

_T = TypeVar("_T")
_SEEDS = 2**63
"""Prompt index in the seed derivation for requests without a seed; no stream has as many prompts."""
_LONG_TEXT = 4096
"""Characters from which on a prompt is encoded in another thread."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of clients' requests."""

    max_body_bytes: int = 16 << 20
    max_requests: int = 2048
    """Most HTTP requests at a time; more are answered with 429."""
    max_connections: int = 4096
    max_header_bytes: int = 32 << 10
    drain_s: float = 10.0
    """Seconds that running requests may continue when the server ends."""


class Service:
    """Requests of HTTP clients on a rollout. All coroutines belong to one event loop.

    Args:
        rollout: Generates the outputs.
        model: Name under which the model is served.
        context: Most tokens of prompt plus output.
        vocabulary: Number of the model's token ids.
        limits: Limits of requests.
    """

    def __init__(
        self, rollout: Rollout, model: str, context: int, vocabulary: int, limits: Limits | None = None
    ) -> None:
        self.rollout, self.engine, self.model = rollout, rollout.engine, model
        self.tokenizer = copy.deepcopy(rollout.engine.tokenizer)
        """Tokenizer of this event loop: a long text encoded in another thread does not delay the engine."""
        self._encoding = asyncio.Lock()
        self.limits = limits or Limits()
        self.context, self.vocabulary = context, vocabulary
        self.created = int(time.time())
        """Start time of the server, in Unix seconds."""
        self.token_texts = TokenTexts(self.tokenizer)
        self.metrics = ServerMetrics(self)
        self.is_ending = False
        """True while the server ends: requests that are cancelled then are answered as refused."""
        self._numbers = itertools.count()
        self._open: dict[Handle, str] = {}
        """Running choices → the name of their request."""
        self.control = Control(self)

    @classmethod
    def of(cls, rollout: Rollout, model: str, limits: Limits | None = None) -> Service:
        """The service of this rollout, with context and vocabulary of its target."""
        vocabulary = load_target_config(rollout.config).get_text_config().vocab_size
        return cls(rollout, model, context_tokens(rollout.config), vocabulary, limits)

    # ---- fields of requests ----

    def wanted(self, given: Mapping[str, Any]) -> Wanted:
        """Sampling options from the fields of a request. The configuration supplies missing values, the run's sequence
        a missing seed.

        Raises:
            Refusal: See `wanted_of`.
        """
        return wanted_of(given, self.engine.sampling, self._next_seed())

    def require_model(self, name: str | None) -> None:
        """Raises Refusal (404) for another model's name."""
        if name is not None and name != self.model:
            raise Refusal(f"the model {name[:200]!r} is not served here; {self.model!r} is", NOT_FOUND, "model")

    async def encode(self, prompt: Prompt, chat: bool = False) -> tuple[int, ...]:
        """Token ids of text, chat messages or token ids; with `chat` text is wrapped as a user message.

        Raises:
            Refusal: It cannot be encoded.
        """
        is_long = not isinstance(prompt, str) or len(prompt) > _LONG_TEXT
        return await self.encoded(partial(encode_prompt, self.tokenizer, prompt, chat), "prompt", is_long)

    async def encoded(self, encode: Callable[[], tuple[int, ...]], field: str, is_long: bool = True) -> tuple[int, ...]:
        """Result of a tokenizer call, one call at a time; in another thread if it may take long.

        Raises:
            Refusal: The input cannot be encoded; the message names the request field.
        """
        try:
            async with self._encoding:
                return await asyncio.to_thread(encode) if is_long else encode()
        except SpecActorError as error:
            raise Refusal(str(error), param=field) from None

    def seeds(self, seed: int, prompts: int, n: int) -> list[int]:
        """Seed of each choice, prompt by prompt: that of the request for a single choice, else derived from it as
        `Rollout.generate` derives the seeds of its samples."""
        if prompts * n == 1:
            return [seed]
        return [derive_seed(seed, prompt, sample) for prompt in range(prompts) for sample in range(n)]

    # ---- requests ----

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        wanted: Wanted,
        *,
        name: str = "",
        session: str | None = None,
        priority: int = 0,
    ) -> list[Handle]:
        """Begin `wanted.n` choices of each prompt, prompt by prompt; the caller must always `drop` them at the end.

        Args:
            prompts: Token ids.
            wanted: Sampling options.
            name: Name of the request, for `Control.abort`.
            session, priority: As in `Engine.submit`.

        Raises:
            Refusal: The prompts cannot run, or too many requests wait.
        """
        self.control.require_awake()
        if len(prompts) * wanted.n > MOST_CHOICES:
            raise Refusal(f"the request has {len(prompts) * wanted.n} choices; at most {MOST_CHOICES} are allowed")
        for prompt in prompts:
            self._check_prompt(prompt)
        seeds = self.seeds(wanted.sampling.seed, len(prompts), wanted.n)
        each = [prompt for prompt in prompts for _ in range(wanted.n)]
        handles: list[Handle] = []
        try:
            for prompt, seed in zip(each, seeds, strict=True):
                sampling = wanted.sampling if seed == wanted.sampling.seed else replace(wanted.sampling, seed=seed)
                handles.append(self.engine.submit(list(prompt), sampling, session=session, priority=priority))
        except SpecActorError as error:
            self.drop(handles)
            raise refusal_of(error) from None
        self._open.update(dict.fromkeys(handles, name))
        self.metrics.began(prompts, wanted.n)
        return handles

    def drop(self, handles: Sequence[Handle]) -> None:
        """Abort those choices that have not ended."""
        for handle in handles:
            self._open.pop(handle, None)
            if not handle.done():
                self.engine.drop(handle)

    def running(self, name: str | None = None) -> list[Handle]:
        """Running or waiting choices of the requests with this name, or of all."""
        return [handle for handle, own in self._open.items() if name in (None, own) and not handle.done()]

    @property
    def open_choices(self) -> int:
        """Number of running or waiting outputs."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Number of outputs that wait for a verifier."""
        return self.rollout.dispatcher.waiting

    async def outputs(self, handles: Sequence[Handle]) -> list[Trajectory]:
        """The outputs of all choices.

        Raises:
            Refusal: One of them failed.
        """
        return [self.checked(await self.guarded(handle)) for handle in handles]

    async def outputs_for(self, request: Request, handles: Sequence[Handle]) -> list[Trajectory]:
        """`outputs`; running choices are aborted when the client leaves or one of them failed.

        Raises:
            Refusal: See `outputs` and `unless_gone`.
        """
        try:
            return await self.unless_gone(request, self.outputs(handles))
        finally:
            self.drop(handles)

    async def guarded(self, work: Awaitable[_T]) -> _T:
        """Result of `work`; errors of this package become refusals."""
        try:
            return await work
        except SpecActorError as error:
            raise refusal_of(error) from None

    def checked(self, output: Trajectory) -> Trajectory:
        """Return an output that has ended, unless it failed.

        Raises:
            Refusal: The output failed; the message is its error.
        """
        self.metrics.ended(output)
        if output.finish_reason == "error":
            raise Refusal(output.error, FAILED if output.token_ids else 400)
        return output

    async def unless_gone(self, request: Request, work: Awaitable[_T]) -> _T:
        """Result of `work`, which is cancelled when the client leaves.

        Raises:
            Refusal: The client has left.
        """
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left(request))
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise Refusal("the client has left", CLIENT_GONE)
        finally:
            leaving.cancel()
            if not working.done():
                working.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await working

    def require_known(self, token_ids: Sequence[int], field: str = "prompt") -> None:
        """Raises Refusal if an id is not in the vocabulary."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocabulary:
            raise Refusal(f"{field} has a token id that is not from 0 to {self.vocabulary - 1}", param=field)

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise Refusal("the prompt has no tokens", param="prompt")
        if len(prompt) >= self.context:
            problem = f"the prompt has {len(prompt)} tokens; prompt and output have at most {self.context} together"
            raise Refusal(problem, param="prompt")
        self.require_known(prompt)

    def _next_seed(self) -> int:
        return derive_seed(self.engine.sampling.seed, _SEEDS, next(self._numbers))


async def left(request: Request) -> None:
    """Return when the client has left; the body of the request must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
