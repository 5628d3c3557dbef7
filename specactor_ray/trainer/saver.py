"""Saves the newest state of a run once, and only between updates."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from specactor_ray.runs.checkpoint import CheckpointStore, TrainState

logger = logging.getLogger(__name__)


class Saver:
    """Writes checkpoints of the state of the trainer's weights.

    Args:
        write: Fills a checkpoint's folder with the trainer's files.
        saved: Whether `state` needs no saving.
        check: Raises if this process must not write any more.
    """

    def __init__(
        self,
        store: CheckpointStore,
        write: Callable[[Path], None],
        state: TrainState,
        saved: bool,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.state = state
        """State after the last complete update."""
        self.failures = 0
        """Number of checkpoints that could not be written."""
        self.problem = ""
        """Reason why the last wanted checkpoint is missing; empty if it exists."""
        self._store, self._write, self._check = store, write, check
        self._saved_step = state.step if saved else -1
        self._updating = False

    def begin_update(self) -> None:
        """Begin an update: from now on the weights are between two steps, and cannot be saved."""
        self._updating = True

    def advance(self, state: TrainState) -> None:
        """Complete the update: the weights have this state."""
        self.state, self._updating = state, False

    def save(self) -> bool:
        """Save the state unless it is saved. Returns whether it is; `problem` has the reason if not.

        Raises:
            SpecActorError: The trainer failed, or another process has taken over the run.
        """
        if self.state.step == self._saved_step:
            return True
        if self._updating:
            self.problem = f"the update after step {self.state.step} was broken off, and the weights are between steps"
            return False
        self._check()
        try:
            self._store.save(self.state, self._write)
        except OSError as error:
            self.failures += 1
            self.problem = str(error)
            logger.error("the checkpoint of step %d was not written: %s", self.state.step, error)
            return False
        self._saved_step, self.problem = self.state.step, ""
        return True
