"""Assignment of CPU cores to actors: the decoupling of drafting and verification on CPU machines.

Ray counts CPUs but does not assign core ids. The ledger gives every actor its own core ids; the actor's process binds
to them (`bind_to_cores`). The ledger uses no Ray and is not thread-safe.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Sequence

from specactor_ray.config.schema import DrafterConfig
from specactor_ray.core.errors import ClusterError

_ROUNDING = 1e-6
"""Tolerance of sums of shares: ten shares of 0.1 fill a core despite float rounding."""
SPINS = 3_000
"""Looks of an idle OpenMP thread for work before it sleeps. With GNU OpenMP's default of 300,000 it occupies a core for
milliseconds: beside a busy process a forward then takes 30 times as long (docs/design/engine.md)."""


class CoreLedger:
    """The usable core ids of every node, and their owners.

    Nodes on the same `machine` share one pool: two Ray nodes on one host see the same physical cores. A whole core has
    one owner. A share below one core is placed on a core together with other shares, never on a wholly owned core.
    """

    def __init__(self) -> None:
        self._machine_of: dict[str, str] = {}
        self._held: dict[str, dict[int, dict[str, float]]] = {}
        """Machine → usable core → owner → share; an owner of whole cores has a share of 1 in each."""

    def add_node(self, node: str, cores: Iterable[int], machine: str = "") -> None:
        """Add the cores that processes on `node` may use; a known node is not changed. Without `machine` the node is
        its own machine."""
        if node not in self._machine_of:
            self._machine_of[node] = machine or node
            known = self._held.setdefault(machine or node, {})
            self._held[machine or node] = {core: known.get(core, {}) for core in sorted({*cores, *known})}

    def take(self, node: str, count: float, owner: str) -> tuple[int, ...]:
        """Assign cores of `node` to `owner`, which holds none yet: a whole number of exclusive cores, or a share below
        1 of a shared core. Returns their ids, ascending. After a ClusterError, which lists the owners, nothing was
        taken."""
        held = self._held[self._machine_of[node]]
        chosen = [core for core, shares in held.items() if not shares][: max(int(count), 1)]
        if 0 < count < 1:
            filled = {core: sum(shares.values()) for core, shares in held.items() if shares}
            roomy = [core for core, share in filled.items() if share + count <= 1 + _ROUNDING]
            if roomy:  # the fullest core with room, so that whole cores stay free
                chosen = [min(roomy, key=lambda core: (-filled[core], core))]
        if len(chosen) < count:
            raise ClusterError(self._refusal(node, count, owner))
        taken = tuple(chosen) if count else ()
        for core in taken:
            held[core][owner] = min(count, 1.0)
        return taken

    def release(self, owner: str) -> None:
        """Release all cores of `owner`. Idempotent."""
        for cores in self._held.values():
            for shares in cores.values():
                shares.pop(owner, None)

    def holders(self, node: str) -> dict[str, tuple[int, ...]]:
        """Owner → core ids on the machine of `node`, ascending."""
        found: dict[str, tuple[int, ...]] = {}
        for core, shares in self._held[self._machine_of[node]].items():
            for owner in shares:
                found[owner] = (*found.get(owner, ()), core)
        return found

    def _refusal(self, node: str, count: float, owner: str) -> str:
        held = self._held[self._machine_of[node]]
        holders = ", ".join(f"{other} {_ids(cores)}" for other, cores in sorted(self.holders(node).items()))
        free = [core for core, shares in held.items() if not shares]
        return (
            f"{owner} needs {count:g} CPU cores without a verifier on node {node[:8]}; {len(free)} of {len(held)} are "
            f"free ({_ids(free)}; held: {holders or 'none'}). Fix: ask for fewer cores or replicas, let draft "
            "actors share a core (drafters.N.cores=0.25), use a machine with more cores, mode=coupled (drafters share "
            "the verifier's cores), or, for development only, cluster.pin_cores=false."
        )


def cores_needed(sizes: Iterable[float]) -> int:
    """Whole cores that actors of these sizes take on one machine, with shares combined as in the ledger."""
    ledger, sizes = CoreLedger(), list(sizes)
    ledger.add_node("all", range(sum(math.ceil(size) for size in sizes)))
    return len({core for number, size in enumerate(sizes) for core in ledger.take("all", size, str(number))})


def draft_cores(drafters: Iterable[DrafterConfig]) -> int:
    """Whole CPU cores of all draft actors of these sections; shares of a core are put together."""
    return cores_needed(drafter.cores for drafter in drafters for _ in range(drafter.replicas))


def usable_cores() -> tuple[str, tuple[int, ...]]:
    """`(machine, cores)` of the calling process: an id of the running kernel, and the cores it may use."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            machine = file.read().strip()
    except OSError:  # hidden by the container: each Ray node is then its own machine
        machine = ""
    return machine, tuple(sorted(os.sched_getaffinity(0)))


def limit_spins() -> dict[str, str]:
    """Environment variables that limit the spins of idle threads in a process that has not loaded torch yet, unless
    this process's environment sets them."""
    return {} if "GOMP_SPINCOUNT" in os.environ else {"GOMP_SPINCOUNT": str(SPINS)}


def bind_to_cores(cores: Sequence[int]) -> None:
    """Bind all present and future threads of this process to `cores`, with one torch thread per core. Call it before
    torch computes anything: thread pools keep the size they started with. ClusterError if a core cannot be used."""
    wanted = set(cores)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = str(len(wanted))
    os.environ.update(limit_spins())
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
