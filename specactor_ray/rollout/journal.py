"""The journal: what was committed for every request, and who may commit for it.

Pure bookkeeping. Each time a request is handed to a verifier begins a new attempt, and only events of the present
attempt count: a verifier that was taken for dead and comes back, or a message that comes late, cannot do harm. A
request ends exactly once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from specactor_ray.messages import Finished, Progress, SamplingParams
from specactor_ray.targets.base import TargetRequest


@dataclass(slots=True)
class JournalEntry:
    """One request: its fixed part, and what has been committed so far."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    weight_version: int = 0
    """Version of the policy's weights that all of its tokens come from."""
    owner: str | None = None
    """Verifier that is authoritative for it now; None while it waits to be handed out."""
    attempt: int = 0
    """How often it was handed to a verifier."""
    moves: int = 0
    """How often it was moved from one healthy verifier to another."""
    stalls: int = 0
    """How often it stopped making progress at a verifier that answered."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] | None = None
    finished: Finished | None = None


class Journal:
    """All requests of a rollout that have not been yielded yet."""

    def __init__(self) -> None:
        self.entries: dict[str, JournalEntry] = {}
        self.committed_tokens = 0
        """Tokens journaled since the start, over all requests."""
        self._loads: Counter[str] = Counter()

    def add(self, entry: JournalEntry) -> None:
        if entry.request_id in self.entries:
            raise ValueError(f"request {entry.request_id} is in the journal already")
        self.entries[entry.request_id] = entry

    def hand_to(self, request_id: str, verifier_id: str) -> TargetRequest:
        """Make this verifier the owner, in place of an earlier one if there is any; returns what to hand it.

        What an earlier owner still says is ignored, so tokens that it committed and that are not journaled yet are
        computed again.
        """
        entry = self.entries[request_id]
        self._set_owner(entry, verifier_id)
        entry.attempt += 1
        return TargetRequest(
            request_id,
            entry.prompt_token_ids,
            entry.sampling,
            tuple(entry.token_ids),
            attempt=entry.attempt,
            weight_version=entry.weight_version,
        )

    def release(self, request_id: str) -> JournalEntry:
        """Take a request off its verifier; it continues elsewhere from the journaled tokens."""
        entry = self.entries[request_id]
        self._set_owner(entry, None)
        return entry

    def owned_by(self, verifier_id: str) -> list[JournalEntry]:
        """The requests of this verifier."""
        return [entry for entry in self.entries.values() if entry.owner == verifier_id]

    def is_current(self, request_id: str, attempt: int) -> bool:
        """Whether this attempt at a request is under way."""
        entry = self.entries.get(request_id)
        return entry is not None and entry.owner is not None and entry.attempt == attempt

    def progress(self, message: Progress) -> list[str]:
        """Append committed tokens. Nothing changes for what is repeated or another attempt's; returns the requests of
        which tokens in between are missing."""
        end, gapped = 0, []
        tokens, logprobs = message.tokens.tolist(), message.logprobs.tolist()
        margins = message.margins.tolist() if message.margins is not None else None
        starts, lengths = message.starts.tolist(), message.lengths.tolist()
        for (request_id, attempt), start, length in zip(message.requests, starts, lengths, strict=True):
            begin, end = end, end + length
            if not self.is_current(request_id, attempt):
                continue
            entry = self.entries[request_id]
            if start != len(entry.token_ids):
                gapped.append(request_id)
                continue
            entry.token_ids.extend(tokens[begin:end])
            entry.logprobs.extend(logprobs[begin:end])
            if margins is not None:
                entry.margins = [*(entry.margins or ()), *margins[begin:end]]
            self.committed_tokens += length
        return gapped

    def finish(self, message: Finished) -> JournalEntry | None:
        """End a request. None when the message is another attempt's or repeated, or tokens before it are missing."""
        if not self.is_current(message.request_id, message.attempt):
            return None
        if not message.error and message.num_tokens != len(self.entries[message.request_id].token_ids):
            return None
        return self.end(message)

    def end(self, message: Finished) -> JournalEntry:
        """End a request, whoever has it."""
        entry = self.entries.pop(message.request_id)
        self._set_owner(entry, None)
        entry.finished = message
        return entry

    def load(self, verifier_id: str) -> int:
        """Requests this verifier owns."""
        return self._loads[verifier_id]

    def clear(self) -> None:
        """Forget all requests."""
        self.entries.clear()
        self._loads.clear()

    def _set_owner(self, entry: JournalEntry, owner: str | None) -> None:
        if entry.owner is not None:
            self._loads[entry.owner] -= 1
            if not self._loads[entry.owner]:
                del self._loads[entry.owner]
        if owner is not None:
            self._loads[owner] += 1
        entry.owner = owner
