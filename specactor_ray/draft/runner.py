"""Runs a proposer over a table: measures it, watches how many draft tokens are right, and survives its errors."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np

from specactor_ray.config.methods import Checkpoint, Traits
from specactor_ray.config.schema import MAX_BRANCHES
from specactor_ray.core.clock import SYSTEM, Clock
from specactor_ray.core.errors import clipped
from specactor_ray.core.machine import fallbacks
from specactor_ray.core.step_cost import StepCost
from specactor_ray.draft.proposer import Failures, Proposer
from specactor_ray.table.view import TableView
from specactor_ray.transport.messages import FinishedOutput

logger = logging.getLogger(__name__)

_MOST_COSTS = 31
"""Most measurements of the seconds per draft token that are kept."""
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


class Health:
    """Counts since the newest weights, and the alarm of a drafter. Not thread-safe, except `to_dict`. Methods without
    weights have no alarm: a lookup finds nothing right where outputs do not repeat."""

    def __init__(self, drafter_id: str, method: str, traits: Traits) -> None:
        self._drafter_id, self._method = drafter_id, method
        self._has_weights = traits.checkpoint is not Checkpoint.NONE
        self._version, self._checksum = 0, ""
        self._tried = self._right = self._missed = 0
        self._seen = (0, 0)
        self._alarm = False

    def renew(self, version: int, weights: str) -> None:
        """Begin the counts of new weights with this checksum. An alarm stays until a token is right."""
        self._version, self._checksum = version, weights
        self._tried = self._right = self._missed = 0

    def observe(self, tried: int, right: int) -> str:
        """Take the totals of `RequestTable.judged`. Returns a message for the log when the alarm begins or ends."""
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
                "Fix: compare the checksum with those of other drafters (specactor status); check drafters.N.model "
                "and online of the method, or remove it"
            )
        if was and not self._alarm:
            return f"{name}: its draft tokens are right again, with weights of version {self._version}"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Method, version and checksum of the weights, draft tokens `tried` and `right` since then, `missed` since the
        last right one, and `alarm`."""
        names = ("method", "version", "checksum", "tried", "right", "missed", "alarm")
        return {name: getattr(self, f"_{name}") for name in names}


class DraftRunner:
    """Runs one proposer. Not thread-safe, except `snapshot`. `drafter_id`: incarnation id of the drafter."""

    def __init__(self, drafter_id: str, proposer: Proposer, clock: Clock = SYSTEM) -> None:
        self.drafter_id, self.proposer, self._clock = drafter_id, proposer, clock
        self.counters = dict.fromkeys(("opens", "resyncs", "extends", "tails", "branches"), 0)
        """Totals; those of requests and messages are counted by the owner."""
        self.failures = Failures()
        """Failed turns and requests."""
        self.failures_in_a_row = 0
        self.token_s = 0.0
        """Seconds per draft token of a model: lower quartile of the newest turns, which leaves out delayed forwards and
        those that read prompts; 0 for a lookup."""
        self._costs = deque[float](maxlen=_MOST_COSTS)
        self._cost = StepCost()
        """Seconds of a forward by its rows, each with one token."""
        self._health = Health(drafter_id, proposer.method, proposer.traits)
        self._open = 0

    def run(self, view: TableView, rows: np.ndarray, most: int = 1) -> np.ndarray:
        """`Proposer.propose` with up to `most` tokens for each chain. An error is logged and counted, and the proposer
        is reset: no request has a tail."""
        self._open = len(rows)
        try:
            return self._run(view, rows, most)
        except BaseException as error:  # noqa: BLE001 - a user's class may call sys.exit; the thread has to go on
            self.failures_in_a_row += 1
            self.failures.add(f"{self.drafter_id}: a draft step failed; its requests are opened again", error)
            view.clear()
            self.attempt("it does not forget its requests", self.proposer.reset)
            view.lost.update(rows.tolist())
            return np.zeros(0, np.int32)

    def _run(self, view: TableView, rows: np.ndarray, most: int) -> np.ndarray:
        proposer, begin = self.proposer, self._clock.now()
        proposer.burst = most
        if proposer.traits.branches:
            proposer.budget = len(rows) * (1 + MAX_BRANCHES) if self._cost.is_known else 0
            proposer.forward_s = self._cost.curve(0, proposer.budget)
        changed = self._checked(proposer.propose(view, rows), rows, len(view.table.generation))
        if len(changed):
            if not proposer.traits.looks_up:
                self._costs.append((self._clock.now() - begin) / max(proposer.drafted, 1))
                self._cost.record(proposer.rows_drafted, self._costs[-1])
                self.token_s = sorted(self._costs)[len(self._costs) // 4]
            self.counters["extends"] += 1
            self.failures_in_a_row = 0
        if news := self._health.observe(*view.table.judged[view.seat].tolist()):
            logger.warning("%s", news)
        return changed

    def _checked(self, found: Any, rows: np.ndarray, most: int) -> np.ndarray:
        """What `propose` returned, int32 `(n,)`, without rows that are not among `rows`. TypeError: no rows at all."""
        changed = np.asarray(found)
        if changed.ndim != 1 or (len(changed) and changed.dtype.kind not in "iu"):
            raise TypeError(f"propose returned {clipped(found)}; return the rows, int32 (n,), that have an answer")
        is_mine = np.zeros(most, np.bool_)
        is_mine[rows] = True
        good = (changed >= 0) & (changed < most)
        good[good] = is_mine[changed[good]]
        if not good.all():
            wrong = IndexError(f"propose returned {clipped(changed[~good].tolist())}; return some of its `rows`")
            self.failures.add(f"{self.drafter_id}: rows that are not its requests are passed over", wrong)
            changed = changed[good]
        return changed.astype(np.int32)

    def learn(self, outputs: Sequence[FinishedOutput]) -> None:
        """Pass finished outputs to the proposer; an error is logged and counted."""
        self.attempt("finished outputs are not learned", self.proposer.learn, outputs)

    def attempt(self, failure: str, action: Any, *arguments: Any) -> bool:
        """Run an action of the proposer. Returns whether it went well; an error is logged as this failure."""
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001 - it is logged
            self.failures.add(f"{self.drafter_id}: {failure}", error)
            return False
        return True

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        """Replace the proposer's weights; raises its errors."""
        self.proposer.load_weights(version, state_dict)
        self._health.renew(version, checksum(state_dict))

    def snapshot(self) -> dict[str, Any]:
        """Counters, requests of the newest turn, seconds per draft token of a model (`token_s`), points of the cost of
        forwards, `Health.to_dict`, failures, and the size of the proposer's history."""
        counters: dict[str, Any] = {**self.counters, "open_requests": self._open, "token_s": self.token_s}
        counters |= {"fallbacks": fallbacks(), "health": self._health.to_dict(), "cost": self._cost.points()}
        counters["failures"] = len(self.failures) + len(getattr(self.proposer, "failures", ()))
        if hasattr(self.proposer, "history_tokens"):
            counters["history_tokens"] = self.proposer.history_tokens
        return counters
