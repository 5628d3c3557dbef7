"""Identity of models in recorded files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from specactor_ray.models.checkpoint_files import read_config
from specactor_ray.models.loading import load_model_config

_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "_attn_implementation")


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
