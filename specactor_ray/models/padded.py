"""A checkpoint padded by zeros to a larger size: the same logits, at the cost of a model of that size.

The hidden state gets f times as many values, the new ones 0. Then the mean of its squares is 1/f of what it was, so a
norm computes the same with `eps / f` and `weight / sqrt(f)`. New heads and new values of the MLP are 0, too. Groups of
query heads per key head keep their size, so that the old heads read the old keys. Gradients of the zeros are 0: in
training they stay what they are. In the files the zeros are holes, which take no room on most file systems.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specactor_ray.core.console import START_LOG
from specactor_ray.core.errors import ModelLoadError
from specactor_ray.core.files import write_json
from specactor_ray.models.checkpoint_files import read_config, weight_files

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(START_LOG)
_UNIT = 128
"""Hidden and inner sizes are multiples of it, as kernels and tensor parallelism want them."""
_FILE_BYTES = 2_000_000_000
"""Most bytes of a file, unless one weight has more: Linux maps none that is larger than the memory."""
_PAGE = 4096
"""Bytes of a page of a file."""


def padded_shape(config: Mapping[str, Any], parameters: float) -> dict[str, int]:
    """Entries of the `config.json` of a Llama padded to about so many parameters (to two percent): of the possible
    hidden sizes the one with the old ratio of MLP and hidden size. ModelLoadError: so few are not possible."""
    hidden, inner, heads = (int(config[key]) for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    layers, dim, group = int(config["num_hidden_layers"]), hidden // heads, heads // int(config["num_key_value_heads"])
    tables = int(config["vocab_size"]) * (1 if config["tie_word_embeddings"] else 2)

    def around_mlp(size: int) -> int:
        return size * (tables + 1) + layers * (2 * size * size * (group + 1) // group + 2 * size)

    unit = math.lcm(_UNIT, dim * group)  # whole groups of heads
    size, smallest = -(-hidden // unit) * unit, -(-inner // _UNIT) * _UNIT
    fewest, found = around_mlp(size) + 3 * layers * size * smallest, list[tuple[float, int, int]]()
    while (room := (parameters - around_mlp(size)) / (3 * layers * size)) >= smallest - _UNIT / 2:
        width = max(round(room / _UNIT) * _UNIT, smallest)
        found.append((abs(math.log(width / size * hidden / inner)), size, width))
        size += unit
    if not found:
        fix = f"ask for {math.ceil(fewest / 1e6)} million or more, or name the model itself"
        raise ModelLoadError(f"{parameters / 1e6:g} million parameters are too few for it. Fix: {fix}.")
    _, size, width = min(found)
    parts = {"num_attention_heads": size // dim, "num_key_value_heads": size // dim // group, "head_dim": dim}
    return {"hidden_size": size, "intermediate_size": width, **parts}


def pad_checkpoint(source: Path, parameters: float, folder: Path) -> None:
    """Write the Llama in `source`, float32, padded to about so many parameters into `folder`; with its tokenizer.

    Raises:
        ModelLoadError: It cannot be so small, or there is no room for the files.
        OSError: The files cannot be written.
    """
    config = read_config(source)
    shape = padded_shape(config, parameters)
    factor = shape["hidden_size"] / config["hidden_size"]
    for file in source.iterdir():
        if file.name != "config.json" and file not in weight_files(source):
            shutil.copy(file, folder)
    write_json(folder / "config.json", {**config, **shape, "rms_norm_eps": config["rms_norm_eps"] / factor})
    _write_weights(source, _shapes(folder), factor, folder)


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of a model by its configuration, tied ones once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


def _write_weights(source: Path, shapes: Mapping[str, tuple[int, ...]], factor: float, folder: Path) -> None:
    """Write safetensors files of these shapes with the weights of `source` in the low corner of each."""
    from safetensors.torch import load_file

    old = {name: weight for file in weight_files(source) for name, weight in load_file(file).items()}
    size = sum(4 * math.prod(shape) for shape in shapes.values())
    held = (weight.numel() // weight.shape[-1] * (4 * weight.shape[-1] + 2 * _PAGE) for weight in old.values())
    _require_room(folder, size, min(size, sum(held)))
    files, filled = list[dict[str, tuple[int, ...]]]([{}]), 0
    for name, shape in shapes.items():
        if filled and filled + 4 * math.prod(shape) > _FILE_BYTES:
            files, filled = [*files, {}], 0
        files[-1][name], filled = shape, filled + 4 * math.prod(shape)
    index = dict[str, str]()
    for number, part in enumerate(files, start=1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write_file(folder / file, part, old, factor)
        index |= dict.fromkeys(part, file)
    if len(files) > 1:
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": index})


def _write_file(
    path: Path, shapes: Mapping[str, tuple[int, ...]], old: Mapping[str, torch.Tensor], factor: float
) -> None:
    header, size = dict[str, Any](__metadata__={"format": "pt"}), 0
    for name, shape in shapes.items():
        end = size + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (size, end)}
        size = end
    text = json.dumps(header).encode()
    begin = -(-(8 + len(text)) // _PAGE) * _PAGE
    with open(path, "xb") as file:
        file.write((begin - 8).to_bytes(8, "little") + text.ljust(begin - 8))
        file.truncate(begin + size)
        for name, shape in shapes.items():
            weight = old[name] / math.sqrt(factor) if "norm" in name else old[name]
            rows = weight.float().reshape(-1, weight.shape[-1]).numpy()
            for number, row in enumerate(rows):
                file.seek(begin + header[name]["data_offsets"][0] + 4 * shape[-1] * number)
                file.write(row)


def _require_room(folder: Path, size: int, held: int) -> None:
    """Refuse a disk without room for the `held` bytes of a file of `size` bytes that are no holes."""
    free = shutil.disk_usage(folder).free
    sizes = folder.name.strip(".").removesuffix(".partial"), size / 1e9, held / 1e9
    logger.info("making %s, files of %.1f GB that take %.1f GB of the disk; this is done once", *sizes)
    if held > free:
        problem = f"{folder} needs {held / 1e9:.1f} GB for it, and {free / 1e9:.1f} GB are free"
        raise ModelLoadError(f"{problem}. Fix: make room there, or name another folder in SPECACTOR_CACHE.")
