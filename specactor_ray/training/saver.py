"""Saves the newest state of a run once, and only between updates."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from specactor_ray.training.checkpoint import CheckpointStore, TrainState

logger = logging.getLogger(__name__)


class Saver:
    """Writes checkpoints of the state that the trainer's weights are at.

    Args:
        write: Fills a checkpoint's folder with the trainer's files.
        saved: That state need not be saved.
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
        """After the last update that was whole."""
        self.failures = 0
        """Checkpoints that could not be written."""
        self.problem = ""
        """Why the last one that was wanted is not there; empty if it is."""
        self._store, self._write, self._check = store, write, check
        self._saved_step = state.step if saved else -1
        self._updating = False

    def begin_update(self) -> None:
        """From now on the weights are between two steps, and cannot be saved as either of them."""
        self._updating = True

    def advance(self, state: TrainState) -> None:
        """The update is whole: the weights are at this state."""
        self.state, self._updating = state, False

    def save(self) -> bool:
        """Save the state unless it is saved. Returns whether it is; `problem` says why not.

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
