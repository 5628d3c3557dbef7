"""Processes of actors: their identity, and their verified end.

`ray.kill` is a request; a process that is stopped (SIGSTOP) or stuck may not act on it. So the process of every
removed actor is watched on its own node until it has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

from specactor_ray.cluster.calls import Calls, Transport
from specactor_ray.cluster.cores import usable_cores
from specactor_ray.cluster.placement import on_node
from specactor_ray.core.clock import SYSTEM
from specactor_ray.core.errors import SpecActorError
from specactor_ray.core.leftovers import start_ticks

logger = logging.getLogger(__name__)

KILL_GRACE_S = 1.0
"""Seconds from `ray.kill` to SIGKILL, in which a process may end by itself."""
_KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """Identity of an actor's process."""

    pid: int
    start_ticks: int
    """Start time in clock ticks since boot: distinguishes a process from a later one with the same pid."""
    node_id: str
    gpus: tuple[str, ...] = ()
    """Ids of the GPUs that Ray assigned to it."""


def process_facts(_actor: Any) -> ProcessFacts:
    """Identity of the actor's process; runs in the actor (`__ray_call__`), also while it still loads."""
    context = ray.get_runtime_context()
    gpus = tuple(str(gpu) for gpu in context.get_accelerator_ids().get("GPU", ()))
    return ProcessFacts(os.getpid(), start_ticks(os.getpid()) or 0, context.get_node_id(), gpus)


def family(facts: ProcessFacts) -> list[psutil.Process]:
    """This process of this machine and its descendants, such as the ranks of a split model, parents first; empty when
    it is gone. Call it while the process lives: afterwards nothing relates the descendants to it."""
    with contextlib.suppress(psutil.Error):
        if start_ticks(facts.pid) == facts.start_ticks:
            process = psutil.Process(facts.pid)
            return [process, *process.children(recursive=True)]
    return []


def is_alive(process: psutil.Process) -> bool:
    """Whether this very process still exists and is not a zombie."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def end_process(facts: ProcessFacts, grace_s: float = KILL_GRACE_S, timeout_s: float = _KILL_TIMEOUT_S) -> bool:
    """Wait for the end of a process of this machine and its children, with SIGKILL after `grace_s`. False if any of
    them still runs after `timeout_s`."""
    dying, begin = _Dying(facts, 0.0), SYSTEM.now()
    while not dying.is_over(SYSTEM.now() - begin, grace_s):
        if SYSTEM.now() - begin >= timeout_s:
            return False
        SYSTEM.sleep(0.05)
    return True


class _Dying:
    """A process of this machine that is being ended, and the children it had then (ranks of a split model)."""

    def __init__(self, facts: ProcessFacts, since: float) -> None:
        self.since = since
        self._family = family(facts)

    def is_over(self, waited_s: float, grace_s: float) -> bool:
        """Whether all of them are gone; those left after `grace_s` are killed."""
        left = [process for process in self._family if is_alive(process)]
        if waited_s >= grace_s or left[:1] != self._family[:1]:  # or the parent is gone
            for process in left:
                _kill(process)
        return not left


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass
    except psutil.AccessDenied:
        logger.error("process %d belongs to another user and cannot be killed", process.pid)


class ActorReaper:
    """Ends actors and watches their processes until they are gone; never blocks."""

    def __init__(self, calls: Calls) -> None:
        self._clock, self._transport = calls.clock, calls.transport
        self._here = ray.get_runtime_context().get_node_id()
        self._local: dict[ProcessFacts, _Dying] = {}
        self._remote: dict[Any, ProcessFacts] = {}
        self._end_remotely = ray.remote(end_process)

    def reap(self, handle: Any, facts: ProcessFacts | None) -> None:
        """End this actor for good. Without facts (it never answered) the end of its process is not verified."""
        if facts is not None and facts.node_id == self._here:
            self._local[facts] = _Dying(facts, self._clock.now())
        try:
            ray.kill(handle, no_restart=True)
        except (RayError, ValueError) as error:
            logger.debug("ray.kill: %s", error)
        if facts is not None and facts.node_id != self._here:
            self._remote[self._end_remotely.options(**on_node(facts.node_id)).remote(facts)] = facts

    def poll(self) -> int:
        """Check the processes that are being ended. Returns how many may still exist."""
        now = self._clock.now()
        for facts in [name for name, dying in self._local.items() if dying.is_over(now - dying.since, KILL_GRACE_S)]:
            del self._local[facts]
        for reference in self._transport.wait(list(self._remote), 0.0) if self._remote else ():
            facts = self._remote.pop(reference)
            try:
                if not self._transport.take(reference):
                    logger.error("process %d on node %s does not end", facts.pid, facts.node_id[:8])
            except SpecActorError as error:  # the node is gone, and the process with it
                logger.debug("node %s: %s", facts.node_id[:8], error)
        return len(self._local) + len(self._remote)


class CoreSurvey:
    """Finds the cores that processes on a node may use, by a tiny task there, once per node; never blocks."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._here = ray.get_runtime_context().get_node_id()
        self._known: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._asked: dict[str, Any] = {}
        self._usable_cores = ray.remote(usable_cores)

    def look(self, node_id: str) -> tuple[str, tuple[int, ...]] | None:
        """`(machine, core ids)` of a node; None until the answer has arrived."""
        if node_id == self._here:
            return usable_cores()
        if node_id in self._known:
            return self._known[node_id]
        if node_id not in self._asked:
            self._asked[node_id] = self._usable_cores.options(**on_node(node_id)).remote()
        if not self._transport.wait([self._asked[node_id]], 0.0):
            return None
        try:
            self._known[node_id] = self._transport.take(self._asked.pop(node_id))
        except SpecActorError as error:
            logger.warning("node %s did not tell its cores, asking again: %s", node_id[:8], error)
            return None
        return self._known[node_id]
