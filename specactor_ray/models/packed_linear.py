"""Linear layers with weights laid out once for oneDNN, so that a few rows cost little more than one.

On CPUs the time of a decode step is the time to read the weights. `torch.nn.functional.linear` lays the weight out
anew for every call; oneDNN can keep it in its blocked layout. Two properties matter here: five rows cost hardly more
than one, so verifying drafts is cheap; and the bits of a row's result do not depend on the number of rows in the call,
so a verify step equals a decode step. The few row counts at which they do are padded.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from specactor_ray.core.errors import InputError
from specactor_ray.models.loading import named_weights

_ROWS_HINT = 16


class PackedLinear(nn.Module):
    """`nn.Linear` without gradients, in the dtype of its weight, which is in oneDNN's blocked layout."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.set_weight(weight, bias)

    def set_weight(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(self.dtype).contiguous(), _ROWS_HINT)
        self._bias = None if bias is None else bias.detach().to(self.dtype).clone()

    @property
    def weight(self) -> torch.Tensor:
        """A copy of the weight, for modules that read it (routers)."""
        return self._packed.to_dense()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN supports device and dtype: float32, and bfloat16 where the CPU multiplies it (AVX512_BF16)."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported())


def pack_linears(model: nn.Module) -> None:
    """Replace every plain `nn.Linear` of a model by a `PackedLinear`; the original weights are freed."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child.weight, child.bias))


def assign_weights(model: nn.Module, state_dict: Mapping[str, torch.Tensor], tied: Mapping[str, str]) -> None:
    """Copy a full set of weights into a model whose linears may be packed.

    Args:
        model: The model; unpacked parameters and buffers are overwritten in place.
        state_dict: Hugging Face names → tensors. Every weight of the model is required; extra names are refused.
        tied: Name → name with which it shares its values (`loading.tied`); the latter is enough.

    Raises:
        InputError: A name is missing or unknown, or a shape differs; nothing was changed.
    """
    packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    plain = dict(named_weights(model, every_name=True))
    shapes = {name: tuple(tensor.shape) for name, tensor in plain.items()}
    for name, module in packed.items():
        shapes[f"{name}.weight"] = (module.out_features, module.in_features)
        if module._bias is not None:
            shapes[f"{name}.bias"] = (module.out_features,)
    new = whole_weights(state_dict, shapes, tied)
    with torch.no_grad():
        for name, module in packed.items():
            module.set_weight(new[f"{name}.weight"], new.get(f"{name}.bias"))
        for name, tensor in plain.items():
            tensor.copy_(new[name])


def whole_weights(
    weights: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """The weights under both names of `tied` ones. Raises InputError if they lack a name of `shapes`, have an extra
    name, or another shape."""
    new = {**{name: weights[owner] for name, owner in tied.items() if owner in weights}, **weights}
    missing, unknown = sorted(shapes.keys() - new.keys()), sorted(new.keys() - shapes.keys())
    if missing or unknown:
        raise InputError(
            f"weights do not fit the model: {len(missing)} missing (first: {missing[:3]}), "
            f"{len(unknown)} unknown (first: {unknown[:3]})"
        )
    for name, shape in shapes.items():
        if tuple(new[name].shape) != shape:
            raise InputError(f"weight {name} has shape {tuple(new[name].shape)}; the model wants {shape}")
    return new


def cheapest_row_counts(layers: Sequence[PackedLinear], up_to: int = 12, repeats: int = 5) -> list[int]:
    """For n = 0..up_to rows, the number of rows m >= n to pad to.

    oneDNN has other kernels for few rows. Some add in another order (one row of 1536 -> 576 does): those counts are
    padded, so that a row's result does not depend on the other rows. Some are slower: padding to m is used if it takes
    at least a tenth less time. Returns `up_to + 1` counts.
    """
    widest = max(layers, key=lambda layer: layer.in_features * layer.out_features)
    shapes = {(layer.in_features, layer.out_features): layer for layer in layers}
    same = set(range(1, up_to + 1)).intersection(*(_invariant_counts(layer, up_to) for layer in shapes.values()))
    seconds = {n: _seconds(widest, n, repeats) for n in same}
    choice = [0]
    for rows in range(1, up_to + 1):
        first, *others = [n for n in sorted(same) if n >= rows] or [rows]
        best = min(others, key=lambda n: seconds[n], default=first)
        choice.append(best if others and seconds[best] < 0.9 * seconds[first] else first)
    return choice


def _invariant_counts(layer: PackedLinear, up_to: int, company: int = 32) -> set[int]:
    """Row counts up to `up_to` at which rows have the same bits as among `company` rows. With weights of 1 and rows
    that sum to 0 a result is the rounding of the order of additions."""
    made = torch.Generator().manual_seed(0)
    half = torch.randn(company, layer.in_features // 2, generator=made)
    half *= 2.0 ** torch.randint(-12, 13, half.shape, generator=made)
    x = torch.zeros(company, layer.in_features)
    x[:, : 2 * half.shape[1]] = torch.cat([half, -half.flip(1)], dim=1)
    x = x.to(layer.dtype)
    ones = PackedLinear(torch.ones(layer.out_features, layer.in_features, dtype=layer.dtype), None)
    together = ones(x)
    return {n for n in range(1, up_to + 1) if torch.equal(ones(x[:n]), together[:n])}


def _seconds(layer: PackedLinear, rows: int, repeats: int) -> float:
    x = torch.zeros(rows, layer.in_features, dtype=layer.dtype)
    layer(x)
    best = float("inf")
    for _ in range(repeats):
        begin = time.process_time()
        layer(x)
        best = min(best, time.process_time() - begin)
    return best
