"""Weights on their way from a trainer to actors: checked against the target, in a few large arrays.

An object store passes arrays without a copy. numpy has no bfloat16, so its bits are sent as int16.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from specactor_ray.core.errors import InputError, did_you_mean
from specactor_ray.models.checkpoint_files import weight_files
from specactor_ray.models.loading import load_model, parse_dtype

T = TypeVar("T", bound=torch.Tensor)


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Several tensors in one array."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    data: np.ndarray
    """`(numbers,)`: the tensors one after the other, by `to_wire`."""


def grouped(
    tensors: Iterable[tuple[str, T]], size_of: Callable[[T], int], max_bytes: int
) -> Iterator[list[tuple[str, T]]]:
    """Consecutive named tensors of at most `max_bytes` together; a larger tensor stands alone."""
    group: list[tuple[str, T]] = []
    filled = 0
    for name, tensor in tensors:
        size = size_of(tensor)
        if group and filled + size > max_bytes:
            yield group
            group, filled = [], 0
        group.append((name, tensor))
        filled += size
    if group:
        yield group


def pack(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> WeightBucket:
    """Copy named tensors into one bucket, converted to `dtype`."""
    names, parts = zip(*tensors, strict=True)
    flat = torch.cat([part.detach().reshape(-1).to("cpu", dtype) for part in parts])
    return WeightBucket(names, tuple(tuple(part.shape) for part in parts), to_wire(flat))


def unpack(bucket: WeightBucket) -> Iterator[tuple[str, torch.Tensor]]:
    """The named tensors as views of the bucket's array."""
    parts = from_wire(bucket.data).split([math.prod(shape) for shape in bucket.shapes])
    for name, shape, part in zip(bucket.names, bucket.shapes, parts, strict=True):
        yield name, part.view(shape)


warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # as those of an object store


def to_wire(tensor: torch.Tensor) -> np.ndarray:
    """float32, float16 or bfloat16 numbers on any device → an array."""
    tensor = tensor.detach().to("cpu").contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def from_wire(array: np.ndarray) -> torch.Tensor:
    """A view of an array of `to_wire`, to be read only."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor


# ---- checks ----

Weights = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | str | Path
"""A state dict, pairs of name and tensor, or the directory of a Hugging Face checkpoint; names are Hugging Face's."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class WeightLayout:
    """Names, shapes and data type of the target's weights, for any process that holds weights of the policy."""

    shapes: Mapping[str, tuple[int, ...]]
    """Name → shape of every weight."""
    tied: Mapping[str, str]
    """Name → name of the weight with which it shares its values."""
    dtype: str
    """Data type of the target, such as `float32`."""
    bucket_bytes: int

    def buckets(self, weights: Weights) -> Iterator[WeightBucket]:
        """The weights in buckets. Raises the errors of `fitting_weights`."""
        dtype = parse_dtype(self.dtype)
        fitting = fitting_weights(weights, self.shapes, self.tied, dtype)
        for bucket in grouped(fitting, lambda tensor: tensor.nbytes, self.bucket_bytes):
            yield pack(bucket, dtype)


def fitting_weights(
    weights: Weights, shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies of a complete set of weights, on the CPU and in the target's dtype.

    Each tensor is copied before the next one is requested, so that trainers that gather shards can free them.

    `shapes` and `tied` as in `WeightLayout`; one of two tied weights is enough, and two must be equal.

    Raises:
        InputError: A tensor is unknown, missing, repeated, not a whole floating-point tensor, or has another shape; or
            tied weights differ.
    """
    shared = set(tied.values())
    taken: dict[str, tuple[str, int]] = {}
    for name, tensor in _named_tensors(weights, shapes):
        _require_fit(name, tensor, shapes)
        owner, copy = tied.get(name, name), tensor.detach().to("cpu", dtype, copy=True).contiguous()
        checksum = zlib.crc32(copy.reshape(-1).view(torch.uint8).numpy().data) if owner in shared else 0
        if owner not in taken:
            if not bool(torch.isfinite(copy.abs().max())):  # the largest is NaN if any is
                raise InputError(f"weights: {name} has a value that is no finite number")
            taken[owner] = (name, checksum)
            yield owner, copy
        elif taken[owner][0] == name:
            raise InputError(f"weights: {name} comes twice")
        elif taken[owner][1] != checksum:
            raise InputError(
                f"weights: {name} differs from {taken[owner][0]}, and the target ties the two. Fix: tie them in "
                "training, or serve a target whose config.json has tie_word_embeddings=false"
            )
    missing = [name for name in shapes if tied.get(name, name) not in taken]
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise InputError(f"weights: {missing[0]}{more} missing. Fix: give every weight of the target, in one call")


def _named_tensors(weights: Any, known: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(weights, str | Path):
        yield from _checkpoint_tensors(Path(weights).expanduser(), known)
        return
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    if not isinstance(pairs, Iterable):
        raise InputError(
            f"weights are a state dict, pairs of name and tensor, or a directory; this is {type(weights).__name__}. "
            "Fix: of a module give model.state_dict() or model.named_parameters()"
        )
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise InputError(f"weights are pairs of name and tensor; one item is {type(pair).__name__}")
        yield pair[0], pair[1]


def _checkpoint_tensors(folder: Path, known: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a checkpoint, file by file; through transformers if the names differ and there is a configuration."""
    from safetensors import SafetensorError, safe_open

    if not folder.is_dir():
        raise InputError(f"weights: there is no directory {folder}. Fix: name one that `save_pretrained` wrote")
    files = weight_files(folder)
    try:
        with_names = [(file, safe_open(file, "pt")) for file in files if file.suffix == ".safetensors"]
        names = [name for _, tensors in with_names for name in tensors.keys()]  # noqa: SIM118
        if names and (not (folder / "config.json").exists() or known.keys() >= set(names)):
            for _, tensors in with_names:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    yield name, tensors.get_tensor(name)
            return
    except (OSError, SafetensorError) as error:
        raise InputError(f"weights: {folder} cannot be read ({error}). Fix: copy it again") from error
    yield from load_model(str(folder)).named_parameters()


def _require_fit(name: str, tensor: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if name not in shapes:
        hint = did_you_mean(name, shapes)
        raise InputError(f"weights: the target has no {name}.{hint} Fix: give Hugging Face's names, without prefixes")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
        kind = "on the meta device" if isinstance(tensor, torch.Tensor) and tensor.is_meta else type(tensor).__name__
        raise InputError(f"weights: {name} is {kind}; give whole tensors (of a DTensor its full_tensor())")
    if tensor.dtype not in _DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise InputError(f"weights: {name} is {str(tensor.dtype).removeprefix('torch.')}; allowed are {allowed}")
    if tuple(tensor.shape) != tuple(shapes[name]):
        raise InputError(f"weights: {name} has shape {tuple(tensor.shape)}; the target's has {tuple(shapes[name])}")
