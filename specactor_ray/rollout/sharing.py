"""Sharing of finished outputs with the lookups that other verifiers host: a history covers one verifier otherwise."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from specactor_ray.cluster.calls import Call, Calls
from specactor_ray.config.schema import VERIFIERS_PER_GROUP
from specactor_ray.rollout.journal import JournalEntry
from specactor_ray.rollout.verifiers import VerifierLink
from specactor_ray.transport.messages import FinishedOutput

_MOST_WAITING = 256
"""Most outputs that wait for a verifier; the oldest are dropped beyond."""
_DEADLINE_S = 30.0


class OutputSharing:
    """Sends finished outputs in batches, one batch at a time to each verifier. Lost outputs cost drafts only.

    Each output goes to at most seven others, those of the same eight in the order of the ids, so that the driver sends
    a bounded number of bytes per output.
    """

    def __init__(self, calls: Calls, links: Mapping[str, VerifierLink]) -> None:
        self._calls, self._links = calls, links
        self._waiting: dict[str, deque[FinishedOutput]] = {}
        """Verifier id → outputs to send."""
        self._on_its_way: dict[str, Call] = {}

    def add(self, verifier_id: str, entry: JournalEntry) -> None:
        """Add an output that was finished at this verifier."""
        names = sorted({*self._links, verifier_id})
        begin = names.index(verifier_id) // VERIFIERS_PER_GROUP * VERIFIERS_PER_GROUP
        others = [name for name in names[begin : begin + VERIFIERS_PER_GROUP] if name != verifier_id]
        if others and entry.num_tokens:
            output = FinishedOutput(entry.request_id, entry.prompt_token_ids, np.array(entry.token_ids, np.int32))
            for name in others:
                self._waiting.setdefault(name, deque(maxlen=_MOST_WAITING)).append(output)

    def send(self, at_end: bool = False) -> None:
        """Send waiting outputs without blocking. `at_end`: also to verifiers that have not confirmed the last batch."""
        self._on_its_way = {name: call for name, call in self._on_its_way.items() if not (at_end or call.poll())}
        for name in [name for name in self._waiting if name not in self._on_its_way]:
            outputs = list(self._waiting.pop(name))
            if link := self._links.get(name):
                call = self._calls.start(link.handle, "learn", outputs, deadline_s=_DEADLINE_S, retry=False)
                self._on_its_way[name] = call
