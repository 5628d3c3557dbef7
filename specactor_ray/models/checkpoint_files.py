"""Files of a model's directory: configuration, weights, tokenizer. A missing or damaged one is a `ModelLoadError`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specactor_ray.core.errors import ModelLoadError
from specactor_ray.core.files import expanded, parse_json, read_foreign

_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
_INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_COPY_AGAIN = "Fix: name the directory that `save_pretrained` wrote, or copy the missing files into it."


def weight_files(path: Path) -> list[Path]:
    """The weight files of a directory, all files of its index."""
    shards = {shard for index in _INDEX_FILES for shard in _shards_of(path / index)}
    missing = sorted(shard for shard in shards if not (path / shard).is_file())
    if missing:
        raise ModelLoadError(f"The model directory {path} lacks the weight files {', '.join(missing)}. {_COPY_AGAIN}")
    files = [path / shard for shard in sorted(shards)]
    files = files or sorted(found for pattern in _WEIGHT_FILES for found in path.glob(pattern))
    if not files:
        raise ModelLoadError(f"The model directory {path} has no weights (model.safetensors). {_COPY_AGAIN}")
    for file in files:
        _require_whole(file)
    return files


def _require_whole(file: Path) -> None:
    """Refuse a safetensors file whose header cannot be read, or does not describe the file's size."""
    from safetensors import SafetensorError, safe_open

    if file.suffix != ".safetensors":
        return
    try:
        with safe_open(file, "np"):
            pass
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{file} is damaged: {error}. {_COPY_AGAIN}") from error


def known_number(folder: Path | None, name: str) -> int | None:
    """A whole number of the text model by the `config.json` in a directory, if there is one and it has it."""
    facts = {} if folder is None else read_config(folder)
    nested = facts.get("text_config")
    value = (nested if isinstance(nested, dict) else facts).get(name)
    return value if isinstance(value, int) else None


def read_config(path: Path) -> dict[str, Any]:
    """Contents of `config.json` in a directory."""
    file = path / "config.json"
    if not file.is_file():
        if (path / "weights" / "config.json").is_file():  # of a training step
            raise ModelLoadError(f"{path} is the checkpoint of a run. Fix: name its model, {path / 'weights'}")
        raise ModelLoadError(f"The model directory {path} has no config.json. {_COPY_AGAIN}")
    try:
        facts = parse_json(read_foreign(file))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} is not valid JSON: {error}. {_COPY_AGAIN}") from error
    if not isinstance(facts, dict):
        raise ModelLoadError(f"{file} is not valid: it holds no keys. {_COPY_AGAIN}")
    return facts


def require_tokenizer(name: str) -> None:
    """Refuse a directory without tokenizer files."""
    path = expanded(name)
    wanted = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if path.is_dir() and not any((path / file).is_file() for file in wanted):
        raise ModelLoadError(
            f"The model directory {name} has no tokenizer (tokenizer.json). Fix: save the tokenizer into it with "
            "`tokenizer.save_pretrained`."
        )


def require_head(folder: Path) -> Path:
    """The folder of an EAGLE head."""
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"There is no EAGLE head at {str(folder)!r} (no config.json). Fix: name its directory.")
    if not describes_head(folder):
        raise ModelLoadError(
            f"{folder / 'config.json'} does not describe an EAGLE-3 head (no draft_vocab_size). Fix: name the "
            "directory of a head, or use method: draft_model if this is a model."
        )
    return folder


def describes_head(folder: Path) -> bool:
    """Whether the `config.json` in a directory is that of an EAGLE head, of either format, and not that of a model."""
    return not {"draft_vocab_size", "speculators_model_type"}.isdisjoint(read_config(folder))


def _shards_of(index: Path) -> set[str]:
    if not index.is_file():
        return set()
    try:
        return set(parse_json(read_foreign(index))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index} is not an index of weight files: {error!r}. Fix: copy it again.") from error
