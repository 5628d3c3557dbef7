"""Health of a drafter: its failures, its weights, and the number of its draft tokens that were right with them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any
from zlib import crc32

from specactor_ray.config.methods import Checkpoint, Traits

logger = logging.getLogger(__name__)

ENOUGH = 200
"""Wrong draft tokens in a row that raise the alarm. With 3% right tokens, one such row in 440 is a false alarm."""
_SAMPLED = 1024
"""Most values of a tensor in a checksum, evenly spread."""


def checksum(state_dict: Mapping[str, Any]) -> str:
    """Checksum of names and sampled values of tensors, on any device: eight hex digits, or empty without tensors."""
    total = 0
    for name in sorted(state_dict):
        values = state_dict[name].detach().reshape(-1)
        sample = values[:: values.numel() // _SAMPLED + 1].float().cpu().numpy()
        total = crc32(sample.tobytes(), crc32(name.encode(), total))
    return f"{total:08x}" if state_dict else ""


class Failures:
    """Counts failures by the kind of error. Logs the first one of a kind with its traceback, and then the 10th, the
    100th and so on."""

    def __init__(self) -> None:
        self._counts = Counter[str]()

    def __len__(self) -> int:
        """Number of failures."""
        return self._counts.total()

    def add(self, what: str, error: BaseException) -> None:
        """Count a failure; `what`: name of the failed work in the log."""
        kind = type(error).__name__
        self._counts[kind] += 1
        count = self._counts[kind]
        if count == 1:
            logger.error("%s; further failures with %s are counted", what, kind, exc_info=error)
        elif str(count).strip("0") == "1":
            logger.warning("%s: %s; %d failures with %s so far", what, error, count, kind)


class Health:
    """Counts since the newest weights, and the alarm of a drafter. Not thread-safe, except `to_dict`. Methods without
    weights have no alarm: a lookup finds nothing right where outputs do not repeat."""

    def __init__(self, drafter_id: str, method: str, traits: Traits) -> None:
        self._drafter_id, self._method = drafter_id, method
        self._has_weights = traits.checkpoint is not Checkpoint.NONE or (traits.draws_noise and not traits.looks_up)
        self._version, self._checksum = 0, ""
        self._tried = self._right = self._missed = 0
        self._seen = (0, 0)
        self._alarm = False

    def renew(self, version: int, weights: str) -> None:
        """Begin the counts of new weights with this checksum. An alarm stays until a token is right."""
        self._version, self._checksum = version, weights
        self._tried = self._right = self._missed = 0

    def observe(self, tried: int, right: int) -> str:
        """Take the totals of `Proposer.judged`. Returns a message for the log when the alarm begins or ends."""
        tries, hits = tried - self._seen[0], right - self._seen[1]
        if not tries:
            return ""
        self._seen = tried, right
        self._tried, self._right = self._tried + tries, self._right + hits
        self._missed = 0 if hits else self._missed + tries
        was, self._alarm = self._alarm, self._has_weights and self._missed >= (1 if self._alarm else ENOUGH)
        name = f"{self._drafter_id} ({self._method})"
        if self._alarm and not was:
            return (
                f"{name}: none of its last {self._missed} draft tokens was right, with weights of version "
                f"{self._version} (checksum {self._checksum or 'none'}). Outputs are not affected, their speed is. "
                "Fix: compare the checksum with those of other drafters (specactor status); check drafters.N.model, "
                "follow_policy and online of the method, or remove it"
            )
        if was and not self._alarm:
            return f"{name}: its draft tokens are right again, with weights of version {self._version}"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Method, version and checksum of the weights, draft tokens `tried` and `right` since then, `missed` since the
        last right one, and `alarm`."""
        names = ("method", "version", "checksum", "tried", "right", "missed", "alarm")
        return {name: getattr(self, f"_{name}") for name in names}
