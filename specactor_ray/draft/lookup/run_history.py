"""The outputs of a run in one log, each visible to all requests from its first token on.

It holds earlier epochs, other prompts and running samples. The oldest tokens, those of older policies, are overwritten
first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from specactor_ray.draft.lookup.token_log import TokenLog

_GROUP_NUMBERS = 1 << 30
_PROMPT_BYTES = 400
"""Bytes of a prompt beside the log: its digest and group in two dictionaries."""


@dataclass(slots=True)
class Output:
    """One output of a prompt in the log."""

    prompt: bytes
    """Digest of the prompt."""
    group: int
    last: int
    """Number of its last row when it was opened."""
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32, tokens written before it was opened."""


@dataclass(slots=True)
class _Group:
    number: int
    users: int = 0
    """Open outputs of this prompt."""


class RunHistory:
    """Outputs by prompt, in one bounded `TokenLog`.

    Each output follows the end of its prompt, as context only, so that its start is found too. An output that is closed
    unfinished (moved, or opened again) is continued when its request returns, so that no token counts twice. The caller
    writes the tokens of open outputs.

    Args:
        max_tokens: Most tokens kept, outputs and the ends of their prompts, at least 1.
        min_match: Shortest match.
        max_match: Longest match.
        max_unfinished: Most unfinished outputs that are kept for continuation.
        scopes: See `TokenLog`.
    """

    def __init__(
        self, max_tokens: int, min_match: int, max_match: int, max_unfinished: int = 64, scopes: int = 2
    ) -> None:
        self.log = TokenLog(max_tokens, min_match, max_match, scopes)
        self._lead, self._max_unfinished = max_match, max_unfinished
        self._groups: dict[bytes, _Group] = {}
        self._idle: OrderedDict[bytes, int] = OrderedDict()
        self._unfinished: OrderedDict[str, Output] = OrderedDict()
        self._next_group = 0

    def __len__(self) -> int:
        """Prompts with open outputs or tokens in the log."""
        return len(self._groups)

    @property
    def nbytes(self) -> int:
        """Bytes of the log and, estimated, of its prompts."""
        return self.log.nbytes + _PROMPT_BYTES * len(self)

    def open(self, request_id: str, prompt: np.ndarray, committed: np.ndarray) -> Output:
        """Begin an output of a prompt (int32), or continue one that agrees with `committed` (int32)."""
        key = hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(self._next_group)
            self._next_group = (self._next_group + 1) % _GROUP_NUMBERS
        group.users += 1
        self._idle.pop(key, None)
        output = self._unfinished.pop(request_id, None)
        if output is None or output.group != group.number or not _agree(output.tokens, committed):
            output = Output(key, group.number, self.log.begin(prompt[-self._lead :]))
        return output

    def close(self, request_id: str, output: Output, last: int, committed: np.ndarray | None) -> None:
        """End an output; its tokens stay.

        Args:
            request_id: Of its request.
            output: From `open`.
            last: Number of its last row.
            committed: int32, its tokens if it may be continued; None if it is finished.
        """
        if committed is not None:
            tokens = committed.copy() if len(committed) > len(output.tokens) else output.tokens
            self._unfinished[request_id] = Output(output.prompt, output.group, last, tokens)
            if len(self._unfinished) > self._max_unfinished:
                self._unfinished.popitem(last=False)
        group = self._groups[output.prompt]
        group.users -= 1
        if group.users == 0:
            self._idle[output.prompt] = self.log.count
        self._forget_prompts()

    def add(self, request_id: str, prompt: np.ndarray, tokens: np.ndarray) -> None:
        """A finished output of a prompt (int32 both) that another process has seen."""
        output = self.open(request_id, prompt, tokens)
        begin = len(prompt) + len(output.tokens)
        last = self.log.write(np.concatenate([prompt, tokens]), begin, output.group, output.last)
        self.close(request_id, output, last, None)

    def _forget_prompts(self) -> None:
        """Drop prompts without open outputs whose tokens are all overwritten."""
        while self._idle:
            prompt, written = next(iter(self._idle.items()))
            if self.log.remembers(written - 1):
                return
            del self._idle[prompt], self._groups[prompt]


def _agree(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether one is a prefix of the other."""
    length = min(len(one), len(other))
    return bool((one[:length] == other[:length]).all())
