"""`drafter.json`, beside a trained drafter's files: method, target and measured acceptance."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specactor_ray.core.errors import InputError
from specactor_ray.core.files import parse_json, read_foreign, write_json
from specactor_ray.models.loading import load_model_config

CARD_FILE = "drafter.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class TargetIdentity:
    """Identity of a target, without its weights."""

    name: str
    config_hash: str
    """Hash of all configuration values that determine the model."""
    hidden_size: int
    num_layers: int
    vocab_size: int


def identify(name: str, trust_remote_code: bool = False) -> TargetIdentity:
    """Read a model's configuration. Raises ModelLoadError."""
    config = load_model_config(name, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    shape = {key: value for key, value in text.to_dict().items() if not key.startswith(("_", "transformers"))}
    for key in ("dtype", "torch_dtype"):  # the storage format is not part of the identity
        shape.pop(key, None)
    digest = hashlib.blake2b(json.dumps(shape, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
    return TargetIdentity(name, digest, int(text.hidden_size), int(text.num_hidden_layers), int(text.vocab_size))


def write_card(
    folder: Path, method: str, target: TargetIdentity, training: dict[str, Any], acceptance: list[dict[str, Any]]
) -> None:
    """Write `drafter.json` into a drafter's folder."""
    card = {"format": FORMAT, "method": method, "target": asdict(target)}
    write_json(folder / CARD_FILE, {**card, "training": training, "acceptance": acceptance}, shared=True)


def read_card(folder: Path) -> dict[str, Any] | None:
    """Content of `drafter.json`; None if there is none, as in a folder that was not made by this package.

    Raises:
        InputError: It cannot be read, or has a later format.
    """
    path = folder / CARD_FILE
    if not path.is_file():
        return None
    try:
        card = parse_json(read_foreign(path))
        method, number = str(card["method"]), int(card["format"])
        TargetIdentity(**card["target"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} cannot be read ({error!r}). Fix: train the drafter again, or remove the file"
        ) from None
    if number > FORMAT or not method:
        raise InputError(f"{path} has format {number}, and {FORMAT} is known. Fix: use a newer specactor-ray")
    return dict(card)


def check_vocabulary(drafter: str, target: TargetIdentity, trust_remote_code: bool = False) -> None:
    """Raise InputError if a draft model has another vocabulary than the target, ModelLoadError if it is not a model."""
    size = identify(drafter, trust_remote_code).vocab_size
    if size != target.vocab_size:
        raise InputError(
            f"{drafter} has a vocabulary of {size} tokens, the target {target.name} one of {target.vocab_size}. "
            "Fix: use a drafter that was made for this target"
        )
