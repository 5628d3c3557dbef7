"""Norms, gated MLPs and rotary attention of transformers' models, each in one compiled call on CPUs.

In a decode step of a small model the many small operators between linear layers take as long as the linear layers. A
module is replaced only if a compiled form stands for the source of its class (`sources.py`), and if the form gives the
same results in one forward at load; any other module stays. A result depends on its own row alone, which is not so for
PyTorch's float32 SiLU.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from specactor_ray.core.errors import InputError
from specactor_ray.models.cpu_attention import AttentionRules, compiled
from specactor_ray.models.packed_linear import PackedLinear
from specactor_ray.models.ragged_attention import RaggedBatch
from specactor_ray.models.sources import ATTENTIONS, GATED_MLPS, NORMS, source_of
from specactor_ray.models.threads import KINDS, run

_NUMBERS_PER_THREAD = 100_000
"""Numbers per thread from which another thread pays: some 10 us."""
_NORM, _GATE = struct.Struct("=8qdq"), struct.Struct("=5q")


def fuse(model: nn.Module, forward: Callable[[], object]) -> None:
    """Replace the modules of a model with packed linears whose compiled forms agree with them in `forward`."""
    forms = {module: found for module in model.modules() if (found := list(_forms(module)))}
    ran: set[nn.Module] = set()

    def compare(module: nn.Module, args: Any, kwargs: Any, expected: Any) -> None:
        ran.add(module)
        forms[module] = [form for form in forms[module] if _agrees(form, expected, args, kwargs)]

    hooks = [module.register_forward_hook(compare, with_kwargs=True) for module in forms]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    for module in ran:
        if forms[module]:
            module.forward = forms[module][0]  # type: ignore[method-assign]


def _agrees(form: Any, expected: Any, args: Any, kwargs: Any) -> bool:
    """Whether a form takes these arguments and gives the module's result up to a few roundings."""
    if isinstance(form, _Attention):
        rules = getattr(kwargs.get("ragged_batch"), "rules", None)
        if rules is None:
            return False
        form.rules = rules
    try:
        found = form(*args, **kwargs)
    except (TypeError, RuntimeError, InputError):  # RuntimeError: shapes that the form does not take
        return False
    found, expected = (x[0] if isinstance(x, tuple) else x for x in (found, expected))
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    return bool(error <= max(2 * torch.finfo(expected.dtype).eps, 1e-5))


def _forms(module: nn.Module) -> Iterator[Any]:
    """Compiled forms that may replace a module."""
    children = dict(module.named_children())
    packed = {name for name, child in children.items() if type(child) is PackedLinear}
    others = children.keys() - packed
    source = source_of(type(module))  # type: ignore[arg-type]
    if "forward" in vars(module) or source is None:  # replaced already, or its computation is unknown
        return
    if source in NORMS and not children:
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if isinstance(eps, float) and isinstance(getattr(module, "weight", None), nn.Parameter):
            yield from (_RmsNorm(module, eps, offset) for offset in (0, 1))
    elif source in GATED_MLPS and packed == {"gate_proj", "up_proj", "down_proj"} and others == {"act_fn"}:
        yield from [_GatedMlp(module)] if type(module.act_fn).__name__ in ("SiLU", "SiLUActivation") else []
    elif source in ATTENTIONS and packed == {"q_proj", "k_proj", "v_proj", "o_proj"} and others <= {"q_norm", "k_norm"}:
        yield from [_Attention(module)] if hasattr(module, "head_dim") and hasattr(module, "layer_idx") else []


def _threads(numbers: int) -> int:
    return min(torch.get_num_threads(), 1 + numbers // _NUMBERS_PER_THREAD)


class _RmsNorm:
    """`x / sqrt(mean(x^2) + eps) * (weight + offset)` over the last dimension."""

    def __init__(self, module: Any, eps: float, offset: int) -> None:
        self._module, self._eps, self._offset = module, eps, offset

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight, dim = self._module.weight, x.shape[-1]
        if dim % 16 or weight.shape != x.shape[-1:]:
            raise InputError(f"a norm of {dim} numbers is not compiled")
        x = x.contiguous()
        out, count = torch.empty_like(x), x.numel()
        call = _NORM.pack(
            0, count // dim, dim, x.data_ptr(), weight.data_ptr(), out.data_ptr(), KINDS[x.dtype],
            KINDS[weight.dtype], self._eps, self._offset,
        )  # fmt: skip
        run(compiled().layers.rms_norm, call, _threads(count))
        return out


class _GatedMlp:
    """`down_proj(silu(gate_proj(x)) * up_proj(x))`."""

    def __init__(self, module: Any) -> None:
        self._gate, self._up, self._down = (getattr(module, f"{name}_proj").forward for name in ("gate", "up", "down"))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate(x), self._up(x)
        count = gate.numel()
        if gate.shape[-1] % 16:
            raise InputError(f"a gate of {gate.shape[-1]} numbers is not compiled")
        call = _GATE.pack(0, count // 16, gate.data_ptr(), up.data_ptr(), KINDS[gate.dtype])
        run(compiled().layers.silu_gate, call, _threads(count))
        return self._down(gate)


class _Attention:
    """Projections, norms of heads, rotation, the cache and attention."""

    def __init__(self, module: Any) -> None:
        self._module, self._layer, self._dim = module, module.layer_idx, module.head_dim
        self._projections = [getattr(module, f"{name}_proj").forward for name in "qkv"]
        self._out = module.o_proj.forward
        self._norms = [getattr(module, f"{name}_norm", None) for name in "qk"]
        self.rules = AttentionRules(1.0)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Any = None,
        past_key_values: Any = None,
        *,
        ragged_batch: RaggedBatch,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        tokens = hidden_states.shape[1]
        query, key, value = (project(hidden_states).view(tokens, -1, self._dim) for project in self._projections)
        query_norm, key_norm = self._norms
        query = query if query_norm is None else query_norm(query)
        key = key if key_norm is None else key_norm(key)
        rotary = position_embeddings[0][0], position_embeddings[1][0]
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        output = ragged_batch.attend(self._layer, query, key, value, self.rules, rotary)
        return self._out(output.view(1, tokens, -1)), None
