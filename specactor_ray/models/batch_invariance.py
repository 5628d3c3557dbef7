"""Forwards on GPUs in which the bits of a row do not depend on the other rows (`target.batch_invariant`).

Within `Invariant` the products and sums that transformers' models call run in kernels of our own
(`_products_triton.py`): cuBLAS and torch's reductions choose kernels by the number of rows. Attention is ours
already, torch's own layer norms give each row a thread block, and all else is computed element by element. A model
that multiplies or adds in another way is refused by the name of the operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import NotImplementedType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specactor_ray.core.errors import ConfigError
from specactor_ray.core.identity import uncovered

KEY = "target.batch_invariant"
FIX = "set target.batch_invariant=false."
_LEAST_CAPABILITY = (8, 0)
_FEW = 16
"""Most terms of sums that are computed term by term: those over the experts of a token."""
_MOVED = {
    "_to_copy", "amax", "amin", "arange", "argsort", "cat", "concat", "constant_pad_nd", "copy", "dropout", "embedding",
    "empty", "empty_like", "fill", "flip", "full", "full_like", "gather", "glu", "hardswish", "histc", "index",
    "index_copy", "index_put", "index_select", "layer_norm", "log_sigmoid", "masked_fill", "max", "min",
    "native_layer_norm", "new_empty", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "outer", "pad", "polar",
    "prelu", "repeat", "repeat_interleave", "roll", "scatter", "set", "sort", "stack", "topk", "tril", "triu",
    "type_as", "zero", "zeros", "zeros_like",
}  # fmt: skip
"""Operators that give a number its bits in every batch, beside views and those that torch tags as computed element by
element. In any other, the order of a sum may depend on the number of rows."""
_KEYWORDS = {"weight", "bias", "dim", "keepdim", "dtype", "offs", "_stacklevel"}
"""Keyword arguments of torch's functions that the own ones take; calls with others are left to torch."""
_Found = Tensor | NotImplementedType


class Invariant(TorchFunctionMode):
    """Takes products and sums over to kernels that give a row the same bits in every batch. Can be entered again."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (own := _own().get(func)) is not None:
            given = {name: value for name, value in (kwargs or {}).items() if value is not None}
            first = [given.pop("input")] if "input" in given else []
            if given.keys() <= _KEYWORDS and (found := own(*first, *args, **given)) is not NotImplemented:
                return found
        return func(*args, **(kwargs or {}))


def invariant(model: Any, device: torch.device) -> AbstractContextManager[Any]:
    """The mode for a model on a GPU; on CPUs there is nothing to take over. ConfigError: the model or the GPU has no
    such kernels."""
    if problem := uncovered("hf", model.config.to_dict()):
        raise ConfigError(KEY, problem, FIX)
    if device.type == "cpu":
        return nullcontext()
    if (kind := getattr(model.config, "_experts_implementation", None)) not in (None, "eager", "grouped_mm"):
        problem = f"the experts run by {kind}, which depends on the number of rows."
        raise ConfigError(KEY, problem, f"leave experts_implementation out of the model's config.json, or {FIX}")
    require_device(device)
    return Invariant()


def require_device(device: torch.device | None = None) -> None:
    """ConfigError: a GPU (None: the current one), or what is installed, has no batch-invariant kernels."""
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        least = ".".join(map(str, _LEAST_CAPABILITY))
        problem = f"{torch.cuda.get_device_name(device)} has a compute capability below {least}, the kernels' least."
        raise ConfigError(KEY, problem, f"use another GPU, or {FIX}")
    try:
        _own()
    except ImportError as error:
        raise ConfigError(KEY, f"the kernels need triton ({error}).", f"pip install triton, or {FIX}") from error


class OtherOperators(TorchDispatchMode):
    """Names of the operators with results of floating point that may round several numbers to one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        results = found if isinstance(found, (tuple, list)) else [found]
        floats = any(isinstance(one, Tensor) and one.is_floating_point() for one in results)
        plain = name.removesuffix("_") in _MOVED or func.is_view or torch.Tag.pointwise in func.tags
        adds = "reduce" in func._overloadname or (name.startswith("index_put") and True in args[3:])
        if floats and (adds or not plain):
            self.seen.add(name)
        return found


@functools.cache
def _own() -> Mapping[Any, Callable[..., _Found]]:
    """Function of torch → the one that takes its place, which returns NotImplemented for what it leaves to torch."""
    _kernels()  # ImportError: there is no triton
    tensor: Any = Tensor
    by_function: dict[Callable[..., _Found], tuple[Any, ...]] = {
        _linear: (functional.linear,),
        _addmm: (torch.addmm, tensor.addmm),
        _matmul: (torch.matmul, torch.mm, torch.bmm, tensor.matmul, tensor.mm, tensor.bmm, tensor.__matmul__),
        _grouped: tuple(found for name, owner in (("grouped_mm", functional), ("_grouped_mm", torch))
                        if (found := getattr(owner, name, None)) is not None),
        _sum: (torch.sum, tensor.sum),
        _mean: (torch.mean, tensor.mean),
        _softmax: (functional.softmax, torch.softmax, tensor.softmax),
    }  # fmt: skip
    return {name: own for own, names in by_function.items() for name in names}


def _kernels() -> Any:
    from specactor_ray.models import _products_triton

    return _products_triton


def _fits(*factors: Tensor) -> bool:
    return factors[0].dtype in _kernels().DTYPES and len({factor.dtype for factor in factors}) == 1


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None, ends: Tensor | None = None) -> _Found:
    """`(..., inner)` by `(inner, columns)`, or by as many matrices as `ends` has entries."""
    if not _fits(x, weight, *([] if bias is None else [bias])):
        return NotImplemented
    found = _kernels().product(x.reshape(1, -1, x.shape[-1]), weight if weight.ndim == 3 else weight[None], bias, ends)
    return found.view(*x.shape[:-1], weight.shape[-1])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Found:
    return _product(x, weight.t(), bias) if weight.ndim == 2 else NotImplemented


def _addmm(bias: Tensor, x: Tensor, weight: Tensor) -> _Found:
    return _product(x, weight, bias) if bias.ndim == 1 else NotImplemented


def _matmul(x: Tensor, weight: Tensor) -> _Found:
    if min(x.ndim, weight.ndim) < 2 or not _fits(x, weight):
        return NotImplemented
    if x.shape[-1] == 1:
        return x * weight  # one term each: nothing is added
    if weight.ndim == 2:
        return _product(x, weight)
    batch = torch.broadcast_shapes(x.shape[:-2], weight.shape[:-2])
    whole = [one.expand(*batch, *one.shape[-2:]).reshape(-1, *one.shape[-2:]) for one in (x, weight)]
    return _kernels().product(*whole).view(*batch, x.shape[-2], weight.shape[-1])


def _grouped(x: Tensor, weight: Tensor, offs: Tensor | None = None, bias: Tensor | None = None) -> _Found:
    return NotImplemented if offs is None or bias is not None or x.ndim > 2 else _product(x, weight, None, offs)


def _sum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> _Found:
    [dim] = dim if isinstance(dim, (tuple, list)) and len(dim) == 1 else [dim]
    if not isinstance(dim, int) or not _fits(x) or dtype not in (None, torch.float32, x.dtype):
        return NotImplemented
    if 0 < x.shape[dim] <= _FEW:
        first, *others = x.unbind(dim)
        found = sum(others, first.float())
    else:
        found = _kernels().sums(x.movedim(dim, -1))
    found = found.to(dtype or x.dtype)
    return found.unsqueeze(dim) if keepdim else found


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> _Found:
    found = _sum(x, dim, keepdim, dtype=torch.float32)
    if found is NotImplemented:
        return found
    [dim] = dim if isinstance(dim, (tuple, list)) else [dim]
    return (found / x.shape[dim]).to(dtype or x.dtype)


def _softmax(x: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> _Found:
    if dim is None or not _fits(x) or dtype not in (None, torch.float32, x.dtype):
        return NotImplemented
    weights = (x.float() - x.float().amax(dim, keepdim=True)).exp()
    found = _sum(weights, dim, keepdim=True)
    return NotImplemented if found is NotImplemented else (weights / found).to(dtype or x.dtype)
