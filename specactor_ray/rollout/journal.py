"""The journal: what was committed for every request, and who may commit for it.

Pure bookkeeping. Each request has at most one owner (a verifier's incarnation id); messages of anyone else are
ignored, so a verifier that was taken for dead and comes back cannot do harm. A request ends exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specactor_ray.messages import Finished, Progress, SamplingParams
from specactor_ray.targets.base import TargetRequest


@dataclass(slots=True)
class JournalEntry:
    """One request: its fixed part, and what has been committed so far."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    owner: str | None = None
    """Verifier that is authoritative for it now; None while it waits to be handed out."""
    issues: int = 0
    """How often it was handed to a verifier because it was new or its verifier had died."""
    moves: int = 0
    """How often it was moved from one healthy verifier to another."""
    owners: set[str] = field(default_factory=set)
    """Every verifier that it was handed to."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] | None = None
    finished: Finished | None = None

    def to_request(self) -> TargetRequest:
        """The request as a verifier takes it, going on after the journaled tokens."""
        return TargetRequest(self.request_id, self.prompt_token_ids, self.sampling, tuple(self.token_ids))


class Journal:
    """All requests of a rollout that have not been yielded yet."""

    def __init__(self) -> None:
        self.entries: dict[str, JournalEntry] = {}
        self.committed_tokens = 0
        """Tokens journaled since the start, over all requests."""

    def add(self, entry: JournalEntry) -> None:
        if entry.request_id in self.entries:
            raise ValueError(f"request {entry.request_id} is in the journal already")
        self.entries[entry.request_id] = entry

    def assign(self, request_id: str, verifier_id: str) -> TargetRequest:
        """Make this verifier the owner; returns what to hand it."""
        self.entries[request_id].issues += 1
        return self._hand_to(request_id, verifier_id)

    def move(self, request_id: str, verifier_id: str) -> TargetRequest:
        """Make this verifier the owner in place of one that is alive; returns what to hand it.

        What the old owner still says is ignored, so tokens that it committed and that are not journaled yet are
        computed again.
        """
        self.entries[request_id].moves += 1
        return self._hand_to(request_id, verifier_id)

    def _hand_to(self, request_id: str, verifier_id: str) -> TargetRequest:
        entry = self.entries[request_id]
        entry.owner = verifier_id
        entry.owners.add(verifier_id)
        return entry.to_request()

    def release(self, verifier_id: str) -> list[JournalEntry]:
        """Take all unfinished requests off a verifier; they go on elsewhere from the journaled tokens."""
        released = [entry for entry in self.entries.values() if entry.owner == verifier_id and entry.finished is None]
        for entry in released:
            entry.owner = None
        return released

    def progress(self, verifier_id: str, message: Progress) -> bool:
        """Append committed tokens. False (and nothing changes) for a stranger's, a repeated or a gapped message."""
        entry = self.entries.get(message.request_id)
        if entry is None or entry.owner != verifier_id or entry.finished is not None:
            return False
        if message.start != len(entry.token_ids):
            return False
        entry.token_ids.extend(message.token_ids)
        entry.logprobs.extend(message.logprobs)
        if message.margins is not None:
            entry.margins = [*(entry.margins or ()), *message.margins]
        self.committed_tokens += len(message.token_ids)
        return True

    def finish(self, verifier_id: str, message: Finished) -> JournalEntry | None:
        """End a request. None when the message is a stranger's, repeated, or tokens before it are missing."""
        entry = self.entries.get(message.request_id)
        if entry is None or entry.owner != verifier_id or entry.finished is not None:
            return None
        if not message.error and message.num_tokens != len(entry.token_ids):
            return None
        entry.finished = message
        return self.entries.pop(message.request_id)

    def fail(self, request_id: str, message: Finished) -> JournalEntry:
        """End a request from the rollout's side (no verifier could run it)."""
        entry = self.entries.pop(request_id)
        entry.finished = message
        return entry

    def load(self, verifier_id: str) -> int:
        """Requests this verifier owns."""
        return sum(entry.owner == verifier_id for entry in self.entries.values())
