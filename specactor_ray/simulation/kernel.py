"""A deterministic kernel: synchronous code runs as coroutines of one thread, on virtual time.

Code that takes a `Clock` runs here unmodified. Each task is a greenlet; a wait passes control to the kernel, which
takes the next event from one heap ordered by (time, seeded random number, sequence number): the seed determines the
order of simultaneous events, and `digest` is a checksum of all of them. Simulated processes group tasks: they can be
frozen, slowed down and killed as a whole, and their clocks have different offsets.
"""

from __future__ import annotations

import heapq
import random
import struct
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar
from zlib import crc32

from greenlet import getcurrent, greenlet

from specactor_ray.core.clock import Clock

T = TypeVar("T")

_MAX_EVENTS_AT_ONCE = 500_000
_MAX_READS_AT_ONCE = 200_000
"""Number of events at one time, and of reads of a clock without a wait, above which code counts as spinning."""
_STAMP = struct.Struct("<dI").pack


class SimulationError(Exception):
    """The simulated program cannot continue: it spins without a wait, or waits for an impossible event."""


@dataclass(eq=False)
class Process:
    """A simulated process; its tasks stop, slow down and end together."""

    name: str
    offset_s: float = 0.0
    """Seconds on its clocks at virtual time 0."""
    slowness: float = 1.0
    """Factor of the durations of `work`."""
    dead: bool = False
    frozen: bool = False
    held: list[tuple[Fiber, int]] = field(default_factory=list)
    """Tasks that became ready while it was frozen, each with the number of its wait."""


@dataclass(slots=True, eq=False)
class Fiber:
    """One coroutine: `threading.Thread` on virtual time."""

    kernel: Kernel
    target: Callable[[], None]
    name: str
    process: Process
    label: int
    coroutine: greenlet | None = None
    """None until it runs for the first time."""
    wake_id: int = 0
    """Number of its current wait; a wake-up of an earlier wait has no effect."""
    done: bool = False
    waiters: list[tuple[Fiber, int]] = field(default_factory=list)

    def is_alive(self) -> bool:
        return not self.done

    def join(self, timeout: float | None = None) -> None:
        if not self.done:
            self.waiters.append(self.kernel.arm())
            self.kernel.block(timeout)


class Kernel:
    """Runs tasks and callbacks on virtual time. `seed` determines the order of simultaneous events."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        """Virtual time in seconds."""
        self.events = 0
        self.digest = 0
        """Checksum of all events so far: equal for equal runs."""
        self.crashes: list[tuple[str, BaseException]] = []
        """Names and errors of tasks that raised, in processes that were not killed."""
        self.closed = False
        self._random = random.Random(f"kernel {seed}").random
        self._heap: list[tuple[float, float, int, Fiber | None, Any]] = []
        self._number = self._tasks = self.reads = 0
        self._hub = getcurrent()
        self._running: Fiber | None = None
        self._alive: dict[Fiber, None] = {}
        self._dead: list[Fiber] = []
        """Tasks of killed processes, kept so that none of their `finally` blocks runs during the simulation."""

    # ---- tasks ----

    def spawn(self, target: Callable[[], None], name: str, process: Process) -> Fiber:
        """Start a task, which runs at the kernel's next opportunity."""
        self._tasks += 1
        task = Fiber(self, target, name, process, self._tasks)
        self._alive[task] = None
        self._push(self.now, task, 0)
        return task

    def _work(self) -> None:
        """Body of a coroutine: run the task that was resumed."""
        task = self.current()
        try:
            task.target()
        except Exception as error:  # noqa: BLE001 - `crashes` is read by the caller of `run`
            if not task.process.dead and not self.closed:
                self.crashes.append((f"{task.process.name}/{task.name}", error))
        task.done = True
        self._alive.pop(task, None)
        for waiter in task.waiters:
            self.wake(waiter)

    def current(self) -> Fiber:
        """The running task. Its coroutine is the current greenlet."""
        if self._running is None:
            raise SimulationError("a wait outside a task of the simulation")
        return self._running

    def block(self, seconds: float | None) -> None:
        """Suspend the running task until it is woken, at most this long; call `arm` before."""
        task = self.current()
        if self.closed:
            raise SimulationError("the simulation is over")
        if seconds is not None and seconds != float("inf"):
            self._push(self.now + seconds, task, task.wake_id)
        self.reads = 0
        self._hub.switch()

    def arm(self) -> tuple[Fiber, int]:
        """Begin a wait. Returns the running task and the number of the wait, for `wake`."""
        task = self.current()
        task.wake_id += 1
        return task, task.wake_id

    def wake(self, waiter: tuple[Fiber, int]) -> None:
        """End a wait. Idempotent."""
        task, wake_id = waiter
        if wake_id == task.wake_id:
            self._push(self.now, task, wake_id)

    def at(self, time: float, callback: Callable[[], None]) -> None:
        """Call a function at a virtual time, outside of all processes. It must not wait."""
        self._push(time, None, callback)

    def kill(self, process: Process) -> None:
        """End a process at once: its `finally` blocks do not run."""
        process.dead = True
        process.held.clear()
        for task in [task for task in self._alive if task.process is process]:
            del self._alive[task]
            self._dead.append(task)

    def freeze(self, process: Process) -> None:
        process.frozen = True

    def thaw(self, process: Process) -> None:
        process.frozen = False
        held, process.held = process.held, []
        for task, wake_id in held:
            self._push(self.now, task, wake_id)

    # ---- the loop ----

    def run(self, until: float = float("inf"), done: Callable[[], bool] = lambda: False) -> None:
        """Run events until `done` holds, time passes `until`, or no event is left. Raises SimulationError if code spins
        at one moment of virtual time."""
        heap, pop = self._heap, heapq.heappop
        at_once, moment = 0, self.now
        while heap and not done():
            if heap[0][0] > until:
                self.now = until
                return
            time, _tie, _number, task, what = pop(heap)
            if time > moment:
                at_once, moment = 0, time
                self.now = time
            at_once += 1
            if at_once > _MAX_EVENTS_AT_ONCE:
                raise SimulationError(f"more than {_MAX_EVENTS_AT_ONCE} events at {time:.6f} s: something spins")
            if task is None:
                self._count(0)
                what()
            else:
                self._resume(task, what)

    def close(self) -> None:
        """End all tasks. No code of the simulation may run afterwards."""
        self.closed = True
        for task in [*self._alive, *self._dead]:
            if task.coroutine is not None and not task.coroutine.dead:
                self._running = task
                try:
                    task.coroutine.throw()
                except BaseException:  # noqa: BLE001 - errors of a task during its end are ignored
                    continue
                finally:
                    self._running = None
        self._alive.clear()
        self._dead.clear()

    def _resume(self, task: Fiber, wake_id: int) -> None:
        if wake_id != task.wake_id or task.done or task.process.dead:
            return
        if task.process.frozen:
            task.process.held.append((task, wake_id))
            return
        task.wake_id += 1
        self._count(task.label)
        self._running = task
        if task.coroutine is None:
            task.coroutine = greenlet(self._work, parent=self._hub)
        task.coroutine.switch()
        self._running = None

    def _push(self, time: float, task: Fiber | None, what: Any) -> None:
        self._number += 1
        heapq.heappush(self._heap, (time, self._random(), self._number, task, what))

    def _count(self, label: int) -> None:
        self.events += 1
        self.digest = crc32(_STAMP(self.now, label), self.digest)


class VirtualClock(Clock):
    """The `Clock` of a simulated process."""

    def __init__(self, kernel: Kernel, process: Process) -> None:
        self.kernel, self.process = kernel, process

    def now(self) -> float:
        """The time of the process's clock."""
        kernel = self.kernel
        kernel.reads += 1
        if kernel.reads > _MAX_READS_AT_ONCE:
            raise SimulationError(f"{kernel.current().name} reads the clock without a wait: it spins")
        return kernel.now + self.process.offset_s

    def sleep(self, seconds: float) -> None:
        self.kernel.arm()
        self.kernel.block(max(seconds, 0.0))

    def work(self, seconds: float) -> None:
        """Be busy for the time that this work takes at the process's speed."""
        self.sleep(seconds * self.process.slowness)

    def event(self) -> Any:
        return VirtualEvent(self.kernel)

    def condition(self) -> Any:
        return VirtualCondition(self.kernel)

    def spawn(self, target: Callable[[], None], name: str) -> Any:
        return self.kernel.spawn(target, name, self.process)

    def result(self, future: Future[T], timeout_s: float) -> T:
        if not future.done():
            arrived = self.event()
            future.add_done_callback(lambda _future: arrived.set())
            if not arrived.wait(timeout_s):
                raise TimeoutError
        return future.result(0)


class VirtualEvent:
    """`threading.Event` on virtual time."""

    __slots__ = ("_is_set", "_kernel", "_waiters")

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._is_set = kernel, False
        self._waiters: list[tuple[Fiber, int]] = []

    def set(self) -> None:
        self._is_set = True
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                self._kernel.wake(waiter)

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set and (timeout is None or timeout > 0.0):
            self._waiters.append(self._kernel.arm())
            self._kernel.block(timeout)
        return self._is_set


class VirtualCondition:
    """`threading.Condition` on virtual time. Tasks switch at waits only, so there is nothing to lock."""

    __slots__ = ("_changed",)

    def __init__(self, kernel: Kernel) -> None:
        self._changed = VirtualEvent(kernel)

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_error: object) -> None:
        pass

    def notify_all(self) -> None:
        self._changed.set()
        self._changed.clear()

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        kernel = self._changed._kernel
        end = kernel.now + (float("inf") if timeout is None else timeout)
        while not predicate():
            if kernel.now >= end:
                return False
            self._changed.wait(end - kernel.now)
        return True
