"""Who may use which CPU core: the decoupling of drafting and verification on CPU machines.

Ray counts CPUs but does not say which ones. The ledger gives every actor core ids of its own; the actor binds
itself to them (`bind_to_cores`). Pure bookkeeping, no Ray; not thread-safe.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from specactor_ray.errors import ClusterError


class CoreLedger:
    """The usable core ids of every node, and who holds which.

    Nodes on the same `machine` share one pool: two Ray nodes on one host see the same physical cores.
    """

    def __init__(self) -> None:
        self._machine_of: dict[str, str] = {}
        self._usable: dict[str, tuple[int, ...]] = {}
        self._held: dict[str, dict[int, str]] = {}

    def add_node(self, node: str, cores: Iterable[int], machine: str = "") -> None:
        """Make known which cores processes on `node` may use. Known nodes are left as they are.

        Args:
            node: Ray node id.
            cores: Core ids, as `os.sched_getaffinity` gives them there.
            machine: What tells machines apart; default: every node is one of its own.
        """
        if node in self._machine_of:
            return
        machine = machine or node
        self._machine_of[node] = machine
        self._usable[machine] = tuple(sorted({*cores, *self._usable.get(machine, ())}))
        self._held.setdefault(machine, {})

    def knows(self, node: str) -> bool:
        return node in self._machine_of

    def take(self, node: str, count: int, owner: str) -> tuple[int, ...]:
        """Give `count` free cores of `node` to `owner`, who holds none yet.

        Returns:
            Core ids, ascending.

        Raises:
            ClusterError: Fewer are free; the message lists who holds the others. Nothing was taken.
            KeyError: The node was never added.
        """
        machine = self._machine_of[node]
        if self.held_by(owner):
            raise ValueError(f"{owner} holds cores already")
        held = self._held[machine]
        free = [core for core in self._usable[machine] if core not in held]
        if len(free) < count:
            raise ClusterError(self._refusal(node, count, owner, free))
        cores = tuple(free[:count])
        held.update(dict.fromkeys(cores, owner))
        return cores

    def held_by(self, owner: str) -> tuple[int, ...]:
        """The cores that `owner` holds, ascending; empty when it holds none."""
        return tuple(sorted(core for held in self._held.values() for core, who in held.items() if who == owner))

    def release(self, owner: str) -> None:
        """Take back all cores of `owner`; harmless when it holds none."""
        for held in self._held.values():
            for core in [core for core, who in held.items() if who == owner]:
                del held[core]

    def holders(self, node: str) -> dict[str, tuple[int, ...]]:
        """Owner → core ids on the machine of `node`."""
        held = self._held[self._machine_of[node]]
        return {owner: tuple(sorted(c for c, who in held.items() if who == owner)) for owner in set(held.values())}

    def _refusal(self, node: str, count: int, owner: str, free: Sequence[int]) -> str:
        usable = self._usable[self._machine_of[node]]
        holders = ", ".join(f"{who} holds {_ids(cores)}" for who, cores in sorted(self.holders(node).items()))
        return (
            f"{owner} needs {count} CPU core(s) of its own on node {node[:8]}, and {len(free)} of {len(usable)} "
            f"are free ({holders or 'none is held'}; free: {_ids(free)}). Fix: ask for fewer cores or replicas, use a "
            "machine with more cores, mode=coupled (drafters share the verifier's cores), or, for development only, "
            "cluster.pin_cores=false."
        )


def usable_cores() -> tuple[str, tuple[int, ...]]:
    """`(machine, cores)` of the calling process: an id of the running kernel, and the cores it may use."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            machine = file.read().strip()
    except OSError:  # hidden by the container: the Ray node then stands for itself
        machine = ""
    return machine, tuple(sorted(os.sched_getaffinity(0)))


def bind_to_cores(cores: Sequence[int]) -> None:
    """Run every thread of this process, those to come included, on `cores` only, with one torch thread per core.

    Call it before torch computes anything: thread pools keep the size they started with. Torch need not be
    loaded yet; it then takes the number of threads from the environment.

    Raises:
        ClusterError: A core does not exist or is outside what this process may use.
    """
    wanted = set(cores)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = str(len(wanted))
    try:
        os.sched_setaffinity(0, wanted)
    except OSError as error:
        raise ClusterError(f"cannot bind to CPU cores {_ids(cores)}: {error.strerror}") from None
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), wanted)
        except ProcessLookupError:  # the thread ended meanwhile
            continue
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(len(wanted))


def _ids(cores: Iterable[int]) -> str:
    return ",".join(str(core) for core in sorted(cores)) or "none"
