"""All outputs a draft actor has seen, each visible to all others from its first token on.

One log for the whole run: outputs of earlier epochs, of other prompts, and of the samples that are generated right
now. The oldest tokens are overwritten first, so what older policies wrote fades away.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from specactor_ray.draft.lookup.token_log import TokenLog

_GROUP_NUMBERS = 1 << 30
_PROMPT_BYTES = 400
"""That a prompt takes beside the log: its digest and its group in two dictionaries."""


@dataclass(slots=True)
class Output:
    """One output of a prompt in the log."""

    prompt: bytes
    """Digest of the prompt: prompts may be long, and the history outlives their requests."""
    group: int
    last: int
    """Number of its last row, while it is not open."""
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32: what was written before it was opened."""


@dataclass(slots=True)
class _Group:
    number: int
    users: int = 0
    """Open outputs of this prompt."""


class RunHistory:
    """Outputs by prompt, in one bounded `TokenLog`.

    Each output stands behind the end of its prompt, so that its start is found too; those tokens are context only.
    An output that is closed unfinished (moved to another drafter, or opened afresh) is continued where it ended when
    its request comes back, so that nothing counts twice. The caller writes the tokens of open outputs.

    Args:
        max_tokens: Most tokens kept, outputs and the ends of their prompts, at least 1.
        min_match: Shortest match.
        max_match: Longest match.
        max_unfinished: So many unfinished outputs may be continued later.
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
        """Prompts that have open outputs, or may have tokens in the log."""
        return len(self._groups)

    @property
    def nbytes(self) -> int:
        """Bytes of the log, and about those of the prompts it distinguishes."""
        return self.log.nbytes + _PROMPT_BYTES * len(self)

    def open(self, request_id: str, prompt: np.ndarray, committed: np.ndarray) -> Output:
        """Begin an output of a prompt (int32), or go on with one that agrees with `committed` (int32); pair it with
        `close`."""
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
        """The output ends here, or may go on later where its tokens so far, `committed` (int32), are given. What was
        written stays; `last` is its last row."""
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
