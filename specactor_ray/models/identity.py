"""Identity of models and draft methods in measured figures."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from specactor_ray.config.schema import DrafterConfig
from specactor_ray.models.checkpoint_files import read_config
from specactor_ray.models.loading import load_model_config

_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "_attn_implementation")
_NOT_THE_METHOD = (
    "hosted",
    "replicas",
    "min_replicas",
    "max_replicas",
    "cores",
    "gpus",
    "window",
    "max_batch",
    "kv_cache_gb",
    "online",
    "model",
)
"""Keys of a drafter's section that change neither its cost per token nor its guesses."""


def model_identity(name: str, dtype: str, trust_remote_code: bool = False) -> dict[str, Any]:
    """Name, data type, and a hash of the model's configuration (its shape, not its weights: those change in training).
    Raises ModelLoadError if there is no such model."""
    path = Path(name).expanduser() / "config.json"
    if path.is_file():
        config = read_config(path.parent)
    else:
        config = load_model_config(name, trust_remote_code=trust_remote_code).to_dict()
    for key in _NOT_THE_MODEL:
        config.pop(key, None)
    canonical = json.dumps(config, sort_keys=True, default=str)
    return {"name": name, "dtype": dtype, "config_hash": hashlib.sha256(canonical.encode()).hexdigest()[:16]}


def method_identity(drafter: DrafterConfig) -> dict[str, Any]:
    """Identity of a draft method's figures: its settings, and its model if it has one. Raises as `model_identity`."""
    settings = {name: value for name, value in vars(drafter).items() if name not in _NOT_THE_METHOD}
    if not drafter.model:
        del settings["dtype"]
    model = drafter.model and model_identity(drafter.model, drafter.dtype, drafter.trust_remote_code)
    return {**settings, "model": model}


def same_method(measured: dict[str, Any], here: dict[str, Any]) -> bool:
    """Whether figures of one method hold for the other. The model's path and keys added later are ignored."""
    common = (measured.keys() & here.keys()) - {"model"}
    if any(measured[name] != here[name] for name in common):
        return False
    hashes = [identity["model"] and identity["model"]["config_hash"] for identity in (measured, here)]
    return bool(hashes[0] == hashes[1])


def gpu_name() -> str | None:
    """Product name of the first GPU; None where there is none."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
