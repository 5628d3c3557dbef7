"""The journal: what was committed for every request, and which verifier may commit for it.

Pure bookkeeping. Each hand-over of a request to a verifier begins a new attempt, and only events of the present attempt
count. So a verifier that was considered dead and comes back, or a late message, has no effect. A request ends exactly
once.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.detokenizer import Stop, StopFinder
from specactor_ray.table.requests import TargetRequest
from specactor_ray.transport.messages import Finished, Progress, RequestStats, Verified

RECORD = np.dtype([("token", np.int32), ("logprob", np.float32)])
"""Record of one token: 8 bytes."""
MAX_UNCONFIRMED = 3
"""Number of verifier failures before confirmation after which a request is suspected as if they had confirmed it."""


@dataclass(slots=True)
class JournalEntry:
    """One request: its fixed part, and its committed tokens."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    session: str | None = None
    """Conversation to which this turn belongs; its turns go to one verifier."""
    priority: int = 0
    """Requests with a smaller number are handed out first."""
    stream: int = 0
    """Number of the stream of the request; 0: it was submitted alone."""
    name: str = ""
    """Name of the request for its caller. Default: `request_id`."""
    place: tuple[int, int] = (0, 0)
    """Index of the prompt, and number of the sample."""
    weight_version: int = 0
    """Version of the policy's weights for the next tokens."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Earlier versions, each with the number of output tokens at its end; empty if there is one version."""
    owner: str | None = None
    """Verifier that is authoritative for the request now; None while it waits to be handed out."""
    attempt: int = 0
    """Number of times the request was handed to a verifier."""
    unconfirmed: int = 0
    """Number of verifiers that failed before they had confirmed the request."""
    finished: Finished | None = None
    steps: array[int] = field(default_factory=lambda: array("I"), repr=False)
    """Number of tokens that each step, of all attempts, committed here."""
    drafts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Draft method → numbers of draft tokens that these steps verified, and of right ones."""
    discarded: int = 0
    """Number of tokens that a stop text removed."""
    prompt_scores: np.ndarray | None = None
    """Those that the newest attempt reported, as in `PromptScores`."""
    records: bytearray = field(default_factory=bytearray, repr=False)
    """Committed tokens as `RECORD`s; an array that grows by an eighth when it is full. For the dispatch thread until
    the request has ended."""
    margin_bytes: bytearray | None = field(default=None, repr=False)
    """float32 margins, one per token; None if they are not recorded."""
    top_bytes: bytearray | None = field(default=None, repr=False)
    """`RECORD`s of the `sampling.logprobs` most probable tokens of each position."""
    stops: StopFinder | None = field(default=None, repr=False)
    """Finds the stop texts in the output; None if there are none."""
    stop: Stop | None = None
    """The stop text that ended the output."""

    @property
    def num_tokens(self) -> int:
        """Number of committed output tokens."""
        return len(self.records) // RECORD.itemsize

    @property
    def token_ids(self) -> list[int]:
        """Output tokens; a copy, like `logprobs` and `margins`."""
        ids: list[int] = np.frombuffer(self.records, RECORD)["token"].tolist()
        return ids

    @property
    def logprobs(self) -> list[float]:
        values: list[float] = np.frombuffer(self.records, RECORD)["logprob"].tolist()
        return values

    def tokens_from(self, position: int) -> list[tuple[Any, ...]]:
        """Token and log-probability of the output positions from this one on, and the most probable tokens if they are
        recorded."""
        found: list[tuple[Any, ...]] = np.frombuffer(self.records, RECORD, offset=position * RECORD.itemsize).tolist()
        if self.top_bytes is None:
            return found
        return [(*pair, top) for pair, top in zip(found, self.tops(position), strict=True)]

    def tops(self, begin: int = 0) -> list[tuple[tuple[int, float], ...]]:
        """Most probable tokens with their log-probabilities, per position, from number `begin` on."""
        if self.top_bytes is None:
            return []
        width = self.sampling.logprobs
        flat = np.frombuffer(self.top_bytes, RECORD, offset=begin * width * RECORD.itemsize).tolist()
        return [tuple(flat[at : at + width]) for at in range(0, len(flat), width)]

    def cut_at_stop(self, stops: StopFinder) -> bool:
        """End the output at the first new token that completes a stop text. Returns whether there is one."""
        self.stop = stops.find(np.frombuffer(self.records, RECORD)["token"])
        if self.stop is None:
            return False
        end = self.stop.num_tokens
        self.discarded += self.num_tokens - end
        del self.records[end * RECORD.itemsize :]
        if self.margin_bytes is not None:
            del self.margin_bytes[4 * end :]
        if self.top_bytes is not None:
            del self.top_bytes[end * self.sampling.logprobs * RECORD.itemsize :]
        return True

    def raise_version(self, version: int) -> None:
        """Set the version of the weights for all further tokens."""
        if version != self.weight_version and self.records:
            self.versions.append((self.weight_version, self.num_tokens))
        self.weight_version = version

    @property
    def margins(self) -> list[float] | None:
        if self.margin_bytes is None:
            return None
        values: list[float] = np.frombuffer(self.margin_bytes, np.float32).tolist()
        return values

    @property
    def stats(self) -> RequestStats:
        """Counters of all steps with tokens that are here, regardless of the attempt."""
        drafted, accepted = map(sum, zip(*self.drafts.values(), strict=True)) if self.drafts else (0, 0)
        return RequestStats(len(self.steps), drafted, accepted, self.discarded, dict(self.drafts))

    def count_drafts(self, method: str, drafted: int, accepted: int) -> None:
        """Count the verified draft tokens of a step."""
        before = self.drafts.get(method, (0, 0))
        self.drafts[method] = before[0] + drafted, before[1] + accepted


class Journal:
    """All requests that have not ended."""

    def __init__(self) -> None:
        self.entries: dict[str, JournalEntry] = {}
        self.committed_tokens = 0
        """Number of tokens journaled since the start, over all requests."""
        self.discarded_tokens = 0
        """Number of tokens that verifiers committed and no output has: those behind a stop text or an abort, and of
        attempts that were over."""
        self.weight_version = 0
        """Version of the policy's weights for new requests."""
        self.begun = 0
        """Number of unfinished requests that have been handed to a verifier at least once."""
        self.stopped: dict[str, str] = {}
        """Requests to end: id → empty if a stop text ended the output, else the error of its search."""
        self._owned: dict[str, dict[str, JournalEntry]] = {}
        """Verifier → its requests by id."""

    def add(self, entry: JournalEntry) -> None:
        self.entries[entry.request_id] = entry

    def hand_to(self, request_id: str, verifier_id: str) -> TargetRequest:
        """Make this verifier the owner, replacing an earlier one; returns the request for it. Tokens that an earlier
        owner committed and that are not journaled yet are computed again."""
        entry = self.entries[request_id]
        self._set_owner(entry, verifier_id)
        self.begun += not entry.attempt
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
        return list(self._owned.get(verifier_id, {}).values())

    def is_current(self, request_id: str, attempt: int) -> bool:
        """Whether this attempt at a request is the present one."""
        entry = self.entries.get(request_id)
        return entry is not None and entry.owner is not None and entry.attempt == attempt

    def progress(self, message: Progress) -> list[str]:
        """Append committed tokens. Repeated messages and those of other attempts are ignored; returns the requests that
        miss tokens in between."""
        entries, size, end, gapped = self.entries, RECORD.itemsize, 0, []
        starts, lengths = message.starts.tolist(), message.lengths.tolist()
        records, margins, tops = _packed(message.tokens, message.logprobs), None, b""
        if message.margins is not None:
            margins = message.margins.astype(np.float32).tobytes()
        top_ends = [0] * len(starts)
        if message.tops is not None:
            tops = _packed(message.tops.tokens, message.tops.logprobs)
            top_ends = (np.cumsum(message.lengths * message.tops.counts) * size).tolist()
        top_end = 0
        drafts = None if message.verified is None else _drafts(message.verified)
        rows = zip(message.requests, starts, lengths, top_ends, strict=True)
        for row, ((request_id, attempt), start, length, next_top) in enumerate(rows):
            begin, end, top_begin, top_end = end, end + length, top_end, next_top
            entry = entries.get(request_id)
            if entry is None or entry.attempt != attempt or entry.owner is None:
                self.discarded_tokens += length
                continue
            if size * start != len(entry.records):
                self.discarded_tokens += length
                gapped.append(request_id)
                continue
            entry.steps.append(length)
            if drafts is not None and drafts[row][1]:
                entry.count_drafts(*drafts[row])
            entry.records += records[size * begin : size * end]
            if margins is not None:
                entry.margin_bytes = entry.margin_bytes or bytearray()
                entry.margin_bytes += margins[4 * begin : 4 * end]
            if top_end > top_begin:
                entry.top_bytes = entry.top_bytes or bytearray()
                entry.top_bytes += tops[top_begin:top_end]
            self.committed_tokens += length
            if entry.stops is not None:
                self._look_for_stop(entry, entry.stops)
        return gapped

    def _look_for_stop(self, entry: JournalEntry, stops: StopFinder) -> None:
        """Put the request into `stopped` if a new token completes a stop text."""
        before = entry.num_tokens
        try:
            if entry.cut_at_stop(stops):
                self.stopped[entry.request_id] = ""
        except Exception as error:  # noqa: BLE001 - tokenizers may be code of the checkpoint
            self.stopped[entry.request_id] = f"its output cannot be decoded: {error!r}"
        self.committed_tokens -= before - entry.num_tokens
        self.discarded_tokens += before - entry.num_tokens

    def finish(self, message: Finished) -> JournalEntry | None:
        """End a request. None if the message is of another attempt or repeated, or earlier tokens are missing."""
        if not self.is_current(message.request_id, message.attempt):
            return None
        if not message.error and message.num_tokens != self.entries[message.request_id].num_tokens:
            return None
        return self.end(message)

    def end(self, message: Finished) -> JournalEntry:
        """End a request, regardless of its owner."""
        entry = self.entries.pop(message.request_id)
        self.begun -= entry.attempt > 0
        self._set_owner(entry, None)
        entry.finished = message
        return entry

    def raise_version(self, version: int) -> None:
        """Run all requests handed out from now on with this version of the weights; none has a verifier now."""
        self.weight_version = version
        for entry in self.entries.values():
            entry.raise_version(version)

    @property
    def owned(self) -> int:
        """Number of requests owned by a verifier; for any thread."""
        return sum(map(len, list(self._owned.values())))

    def load(self, verifier_id: str) -> int:
        """Number of requests this verifier owns."""
        return len(self._owned.get(verifier_id, ()))

    def clear(self) -> None:
        """Remove all requests."""
        self.entries.clear()
        self._owned.clear()
        self.begun = 0

    def _set_owner(self, entry: JournalEntry, owner: str | None) -> None:
        """Set the owner, which ends the attempt."""
        if entry.owner is not None:
            mine = self._owned[entry.owner]
            del mine[entry.request_id]
            if not mine:
                del self._owned[entry.owner]
        if owner is not None:
            self._owned.setdefault(owner, {})[entry.request_id] = entry
        entry.owner = owner


def _drafts(verified: Verified) -> list[tuple[str, int, int]]:
    """Method, verified and right draft tokens of each request."""
    columns = verified.methods.tolist(), verified.drafted.tolist(), verified.accepted.tolist()
    return [(verified.names[method], drafted, right) for method, drafted, right in zip(*columns, strict=True)]


def _packed(tokens: Any, logprobs: Any) -> bytes:
    """These tokens as `RECORD`s."""
    records = np.empty(len(tokens), RECORD)
    records["token"], records["logprob"] = tokens, logprobs
    return records.tobytes()
