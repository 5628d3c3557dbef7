"""Weights on their way from a trainer to actors: checked against the target, in a few large arrays.

An object store passes arrays without a copy. numpy has no bfloat16, so a bucket holds bytes.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from specactor_ray.core.errors import InputError, WeightsError, did_you_mean, first_of
from specactor_ray.core.files import expanded
from specactor_ray.core.types import Probe
from specactor_ray.models.checkpoint_files import weight_files
from specactor_ray.models.loading import (
    load_empty_model,
    load_model,
    named_weights,
    parse_dtype,
    weight_dtypes,
    weight_shapes,
    wrong_value_errors,
)
from specactor_ray.models.packed_linear import whole_weights
from specactor_ray.models.probe import probe_of

T = TypeVar("T")
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Several tensors in one array."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    data: Any
    """uint8 array: the tensors one after the other, each from a multiple of `_ALIGNMENT` bytes on."""


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


def pack(tensors: Iterable[tuple[str, torch.Tensor]], dtypes: Mapping[str, torch.dtype]) -> WeightBucket:
    """Copy named tensors into one bucket, converted to their `dtypes`: each once, from a GPU to page-locked memory and
    without a wait between two."""
    named = [(name, tensor.detach()) for name, tensor in tensors]
    kinds, on_gpu = tuple(dtypes[name] for name, _ in named), any(part.is_cuda for _, part in named)
    bucket = WeightBucket(tuple(name for name, _ in named), tuple(tuple(part.shape) for _, part in named), kinds, None)
    size = bucket_bytes(bucket)
    # numpy asks for huge pages, which makes the first write of a large array faster.
    data = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy() if on_gpu else np.empty(size, np.uint8)
    bucket = replace(bucket, data=data)
    for (_, place), (_, part) in zip(unpack(bucket), named, strict=True):
        place.copy_(part, non_blocking=True)
    if on_gpu:
        torch.cuda.synchronize()
    return bucket


def unpack(bucket: WeightBucket) -> Iterator[tuple[str, torch.Tensor]]:
    """The named tensors as views of the bucket's array."""
    begin, data = 0, torch.from_numpy(bucket.data)
    for name, shape, dtype in zip(bucket.names, bucket.shapes, bucket.dtypes, strict=True):
        size = math.prod(shape) * dtype.itemsize
        yield name, data[begin : begin + size].view(dtype).view(shape)
        begin += _padded(size)


def bucket_bytes(bucket: WeightBucket) -> int:
    """Bytes of a bucket, which may lack its data."""
    sizes = zip(bucket.shapes, bucket.dtypes, strict=True)
    return sum(_padded(math.prod(shape) * dtype.itemsize) for shape, dtype in sizes)


def padded_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor in a bucket."""
    return _padded(tensor.nbytes)


def _padded(size: int) -> int:
    return size + -size % _ALIGNMENT


warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # as those of an object store


def to_wire(tensor: torch.Tensor) -> np.ndarray:
    """float32, float16 or bfloat16 numbers on any device → an array."""
    tensor = tensor.detach().to("cpu").contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def from_wire(array: np.ndarray | torch.Tensor) -> torch.Tensor:
    """A view of an array of `to_wire`, to be read only; a tensor, which never was on a wire, as it is."""
    if isinstance(array, torch.Tensor):
        return array
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor


def as_in_files(model: Any, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a model, which may be on `meta`, as `save_pretrained` writes them and vLLM reads them, each tied
    one once; in some families, such as Mixtral, transformers' modules have other names.

    Raises:
        InputError: They do not fit the model.
        WeightsError: transformers cannot convert them.
    """
    from transformers.core_model_loading import revert_weight_conversion

    shapes, tied = weight_shapes(model)
    weights = whole_weights(state_dict, shapes, tied)
    try:
        return dict(revert_weight_conversion(model, {name: x for name, x in weights.items() if name not in tied}))
    except wrong_value_errors() as error:
        kind = type(model).__name__
        raise WeightsError(f"transformers cannot write the weights of {kind} for vLLM: {error}") from error


# ---- checks ----

Weights = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | str | Path
"""A state dict, pairs of name and tensor, or the directory of a Hugging Face checkpoint; names are Hugging Face's."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class WeightLayout:
    """The target and the names, shapes and data types of its weights, for any process that holds some of the policy."""

    model: str
    """Name of the target, and the data type in which engines load it, such as `float32`."""
    dtype: str
    trust_remote_code: bool
    shapes: Mapping[str, tuple[int, ...]]
    """Name → shape of every weight."""
    tied: Mapping[str, str]
    """Name → name of the weight with which it shares its values."""
    dtypes: Mapping[str, torch.dtype]
    """Name → data type in which it is sent (`weight_dtypes`)."""
    bucket_bytes: int
    max_model_len: int | None = None
    """Most tokens of a sequence in the engines; None: the model's whole context."""

    @classmethod
    def of(
        cls,
        model: str,
        dtype: str,
        bucket_bytes: int,
        *,
        trust_remote_code: bool = False,
        max_model_len: int | None = None,
    ) -> WeightLayout:
        """The layout for engines that load this model in `dtype`, such as `float32`. Reads no weights."""
        empty = load_empty_model(model, dtype=parse_dtype(dtype), trust_remote_code=trust_remote_code)
        shapes, tied = weight_shapes(empty)
        dtypes = weight_dtypes(empty)
        return cls(model, dtype, trust_remote_code, shapes, tied, dtypes, bucket_bytes, max_model_len)

    def buckets(self, weights: Weights) -> Iterator[WeightBucket]:
        """The weights in buckets. Raises the errors of `fitting_weights`."""
        for bucket in grouped(fitting_weights(weights, self), padded_bytes, self.bucket_bytes):
            yield pack(bucket, self.dtypes)

    def probe(self, buckets: Iterable[WeightBucket]) -> Probe:
        """What transformers computes with the weights in these buckets; see `probe_of`."""
        weights = {name: tensor for bucket in buckets for name, tensor in unpack(bucket)}
        trust, longest = self.trust_remote_code, self.max_model_len
        return probe_of(self.model, self.dtype, weights, trust_remote_code=trust, max_model_len=longest)


def fitting_weights(weights: Weights, layout: WeightLayout) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies of a complete set of weights, on the CPU and in the layout's data types.

    Each tensor is copied before the next one is requested, so that trainers that gather shards can free them. One of
    two tied weights is enough, and two must be equal.

    Raises:
        InputError: A tensor is unknown, missing, repeated, not whole, of another kind of numbers or another shape; or
            tied weights differ.
    """
    tied, shared = layout.tied, set(layout.tied.values())
    taken: dict[str, tuple[str, int]] = {}
    for name, tensor in _named_tensors(weights, layout.shapes):
        _require_fit(name, tensor, layout)
        owner, copy = tied.get(name, name), tensor.detach().to("cpu", layout.dtypes[name], copy=True).contiguous()
        checksum = zlib.crc32(copy.reshape(-1).view(torch.uint8).numpy().data) if owner in shared else 0
        if owner not in taken:
            # The largest is NaN if any is.
            if copy.is_floating_point() and copy.numel() and not bool(torch.isfinite(copy.abs().max())):
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
    missing = [name for name in layout.shapes if tied.get(name, name) not in taken]
    if missing:
        raise InputError(
            f"weights: {first_of(missing, 1)} missing. Fix: give every weight and buffer of the target, as "
            "model.state_dict() has them, in one call"
        )


def _named_tensors(weights: Any, known: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(weights, str | Path):
        yield from _checkpoint_tensors(expanded(weights), known)
        return
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    if not isinstance(pairs, Iterable):
        raise InputError(
            f"weights are a state dict, pairs of name and tensor, or a directory; this is {type(weights).__name__}. "
            "Fix: of a module give model.state_dict()"
        )
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise InputError(f"weights are pairs of name and tensor; one item is {type(pair).__name__}")
        yield pair[0], pair[1]


def _checkpoint_tensors(folder: Path, known: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a checkpoint, file by file; through transformers if the names differ and there is a configuration."""
    from safetensors import safe_open

    if not folder.is_dir():
        raise InputError(f"weights: there is no directory {folder}. Fix: name one that `save_pretrained` wrote")
    with_names = [safe_open(file, "pt") for file in weight_files(folder) if file.suffix == ".safetensors"]
    names = {name for tensors in with_names for name in tensors.keys()}  # noqa: SIM118 - not a mapping
    if names and (not (folder / "config.json").exists() or known.keys() >= names):
        for tensors in with_names:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                yield name, tensors.get_tensor(name)
        return
    yield from named_weights(load_model(str(folder)))


def _require_fit(name: str, tensor: Any, layout: WeightLayout) -> None:
    shapes = layout.shapes
    if name not in shapes:
        hint = did_you_mean(name, shapes)
        raise InputError(f"weights: the target has no {name}.{hint} Fix: give Hugging Face's names, without prefixes")
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not plain or tensor.is_meta or tensor.layout != torch.strided:
        kind = type(tensor).__name__ if not plain else "on the meta device" if tensor.is_meta else "sparse"
        raise InputError(f"weights: {name} is {kind}; give whole tensors (of a DTensor its full_tensor())")
    own = layout.dtypes[name]
    kinds = _DTYPES if own.is_floating_point else (own,)
    if tensor.dtype not in kinds:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in kinds)
        raise InputError(f"weights: {name} is {str(tensor.dtype).removeprefix('torch.')}; allowed are {allowed}")
    if tuple(tensor.shape) != tuple(shapes[name]):
        raise InputError(f"weights: {name} has shape {tuple(tensor.shape)}; the target's has {tuple(shapes[name])}")
