"""Learning while there is nothing to draft: what a draft loop does with its idle time, if it is told to.

Knows no torch: what learns, and what it learns from, comes in from above (`drafter_training/online.py`,
`drafter_training/recording.py`). New weights are only announced. They come into use, here as everywhere, when whoever
keeps the draft actors together brings them back under their version; so one version is one set of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from specactor_ray.messages import DraftOpen, Features


class Learner(Protocol):
    """Learns weights in short steps."""

    steps: int
    skipped: int
    tokens: int

    @property
    def version(self) -> int:
        """Version of the weights that others should have; never falls."""

    def add(self, example: Any) -> None:
        """Learn from this example too."""

    def step(self) -> Mapping[str, float] | None:
        """One step; None when there is nothing to learn from."""

    def weights(self) -> Mapping[str, Any]:
        """The weights as they are now; the next step may change them."""


class Recorder(Protocol):
    """Makes examples of finished requests."""

    def open(self, message: DraftOpen) -> None: ...

    def commit(self, request_id: str, start: int, token_ids: Sequence[int], features: Sequence[Features]) -> None: ...

    def close(self, request_id: str) -> Any | None:
        """The example of a request that has ended, if there is one."""

    def forget(self, request_id: str) -> None: ...


class IdleLearning:
    """Feeds a learner with what a draft loop sees, and lets it learn when the loop says so.

    Args:
        learner: What learns.
        recorder: Makes examples.
        announce: Called with (version, weights) whenever there is a new version; must not keep the weights.
    """

    def __init__(
        self, learner: Learner, recorder: Recorder, announce: Callable[[int, Mapping[str, Any]], None]
    ) -> None:
        self._learner, self._recorder, self._announce = learner, recorder, announce
        self._last: Mapping[str, float] = {}

    def open(self, message: DraftOpen) -> None:
        """The proposer mirrors a request."""
        self._recorder.open(message)

    def commit(self, request_id: str, start: int, token_ids: Sequence[int], features: Sequence[Features]) -> None:
        """It has taken a commit."""
        self._recorder.commit(request_id, start, token_ids, features)

    def close(self, request_id: str, finished: bool) -> None:
        """The request has ended, or moved away."""
        example = self._recorder.close(request_id) if finished else None
        if example is not None:
            self._learner.add(example)
        elif not finished:
            self._recorder.forget(request_id)

    def forget(self, request_id: str) -> None:
        """The request is mirrored no more, and did not end."""
        self._recorder.forget(request_id)

    def learn(self) -> bool:
        """One step. Returns False when there was nothing to learn from."""
        before = self._learner.version
        metrics = self._learner.step()
        if metrics is None:
            return False
        self._last = dict(metrics)
        if self._learner.version > before:
            self._announce(self._learner.version, self._learner.weights())
        return True

    def snapshot(self) -> dict[str, Any]:
        """Version, steps, positions that are kept and the last step's metrics, for status displays; may be called from
        any thread."""
        learner = self._learner
        counters = {
            "version": learner.version,
            "steps": learner.steps,
            "skipped": learner.skipped,
            "tokens": learner.tokens,
        }
        return {**counters, "last_step": self._last}
