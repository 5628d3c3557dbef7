"""Norms, gated MLPs, rotary attention and residual sums of transformers' models, in few calls.

In a decode step of a small model the many small operators between linear layers take as long as the linear layers. A
module is replaced only if a form stands for the source of its class (`sources.py`), and if the form gives the same
results in one forward at load; any other module stays. The operators are compiled by numba on CPUs
(`cpu_attention.py`), by Triton on GPUs (`_layers_triton.py`), where layers that read the same input have one product,
too. A result depends on its own row alone, which is not so for PyTorch's float32 SiLU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specactor_ray.core.errors import InputError
from specactor_ray.models import cpu_attention
from specactor_ray.models.cpu_attention import AttentionRules
from specactor_ray.models.offload import held_by, offload, reload
from specactor_ray.models.packed_linear import PackedLinear
from specactor_ray.models.paged_cache import PagedCache
from specactor_ray.models.ragged_attention import RaggedBatch
from specactor_ray.models.sources import ATTENTIONS, GATED_MLPS, LAYERS, NORMS, OFFSET_NORM, source_of

_GATES = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh", "GELUActivation": "gelu"}


def operators(device: torch.device) -> Any:
    """The module of operators for a device."""
    if device.type == "cpu":
        return cpu_attention
    from specactor_ray.models import _layers_triton

    return _layers_triton


def fuse(model: nn.Module, forward: Callable[[], object]) -> None:
    """Replace the modules of a model by forms that agree with them in `forward`; on CPUs those with packed linears."""
    own = operators(next(model.parameters()).device)
    forms = {module: found for module in model.modules() if (found := list(_forms(module, own)))}
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
    if own is not cpu_attention:
        join_weights(model)
        _link(model)
        forward()  # compiles what only fused modules call


def join_weights(model: nn.Module) -> None:
    """Lay out the weights that one product reads one behind the other, after the model came to its device."""
    for module in model.modules():
        if isinstance(form := vars(module).get("forward"), (_GatedMlp, _Attention)):
            form.inputs.join()
    torch.cuda.empty_cache()  # no larger tensor fits where the parts were


def sleep(model: torch.nn.Module, cache: PagedCache) -> None:
    """Free the memory of a model's cache, and on a GPU that of its weights; every row must be free."""
    cache.release()
    if cache.device.type != "cpu":
        offload(held_by(model))


def wake(model: torch.nn.Module, cache: PagedCache) -> None:
    """Allocate the memory again after `sleep`."""
    reload(held_by(model), cache.device)
    join_weights(model)
    cache.allocate()


def add(x: torch.Tensor, y: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
    """`x + y`; a replaced norm on a GPU reads the sum in the same kernel, for when it is called with it."""
    form = None if norm is None else vars(norm).get("forward")
    return form.of_sum(x, y) if isinstance(form, _RmsNorm) else x + y


def _link(model: nn.Module) -> None:
    """Each layer adds its last sum for the norm of the next one."""
    for parent in model.modules():
        if isinstance(layers := getattr(parent, "layers", None), nn.ModuleList):
            norms = [getattr(layer, "input_layernorm", None) for layer in layers[1:]]
            for layer, norm in zip(layers, [*norms, getattr(parent, "norm", None)], strict=False):
                if isinstance(form := vars(layer).get("forward"), _Layer):
                    form.following = norm


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


def _forms(module: nn.Module, own: Any) -> Iterator[Any]:
    """Forms that may replace a module."""
    children = dict(module.named_children())
    linear = {name for name, child in children.items() if own is not cpu_attention or type(child) is PackedLinear}
    source = source_of(type(module))  # type: ignore[arg-type]
    if "forward" in vars(module) or source is None:  # replaced already, or its computation is unknown
        return
    if source in NORMS and not children:
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if isinstance(eps, float) and isinstance(getattr(module, "weight", None), nn.Parameter):
            yield _RmsNorm(module, own, eps, int(NORMS[source] == OFFSET_NORM))
    elif source in GATED_MLPS and children.keys() == {*_GatedMlp.LINEAR, "act_fn"}:
        kind = _GATES.get(type(module.act_fn).__name__, "")
        yield from [_GatedMlp(module, own, kind)] if kind in own.GATES and linear >= _GatedMlp.LINEAR else []
    elif source in ATTENTIONS and children.keys() - {"q_norm", "k_norm"} == _Attention.LINEAR <= linear:
        yield from [_Attention(module, own)] if hasattr(module, "head_dim") and hasattr(module, "layer_idx") else []
    elif source in LAYERS and own is not cpu_attention:
        yield _Layer(module)


class _RmsNorm:
    """`x / sqrt(mean(x^2) + eps) * (weight + offset)` over the last dimension."""

    def __init__(self, module: Any, own: Any, eps: float, offset: int) -> None:
        self.module, self.eps, self.offset, self._own = module, eps, offset, own
        self._read: tuple[torch.Tensor, torch.Tensor] | None = None
        """The sum of `of_sum`, and its norm."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        read, self._read = self._read, None
        if read is not None and read[0] is x:
            return read[1]
        found: torch.Tensor = self._own.rms_norm(x, self.module.weight, self.eps, self.offset)
        return found

    def of_sum(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`x + y`."""
        if self._own is cpu_attention or x.shape != y.shape or x.dtype != y.dtype:
            return x + y
        self._read = self._own.rms_norm(x, self.module.weight, self.eps, self.offset, y)
        return self._read[0]


class _Inputs:
    """Linear layers that read the same input."""

    def __init__(self, linears: Sequence[Any]) -> None:
        self._linears, self._calls = linears, [linear.forward for linear in linears]
        self._parts: list[tuple[nn.Parameter, ...]] = []

    def __call__(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        # A model that went to another memory has separate weights again.
        if not self._parts or any(len({p.untyped_storage().data_ptr() for p in part}) > 1 for part in self._parts):
            return [call(x) for call in self._calls]
        rows = [len(parameter) for parameter in self._parts[0]]
        wholes = (part[0].as_strided((sum(rows), *part[0].shape[1:]), part[0].stride()) for part in self._parts)
        return functional.linear(x, *wholes).split(rows, dim=-1)

    def join(self) -> None:
        """Let the weights, and the biases, be parts of one tensor each; they stay parameters of their layers."""
        if any(type(linear) is not nn.Linear for linear in self._linears):  # quantized
            return
        parts = list(zip(*((linear.weight, linear.bias) for linear in self._linears), strict=True))
        parts = parts[: 1 if parts[1] == (None,) * len(parts[1]) else 2]
        if any(len({getattr(parameter, "dtype", None) for parameter in part}) > 1 for part in parts):
            return
        for part in parts:
            whole = torch.cat([parameter.data for parameter in part])
            for parameter, data in zip(part, whole.split([len(p) for p in part]), strict=True):
                parameter.data = data
        self._parts = parts


class _GatedMlp:
    """`down_proj(act_fn(gate_proj(x)) * up_proj(x))`."""

    LINEAR = frozenset({"gate_proj", "up_proj", "down_proj"})

    def __init__(self, module: Any, own: Any, kind: str) -> None:
        self.inputs, self._down = _Inputs([module.gate_proj, module.up_proj]), module.down_proj.forward
        self._own, self._kind = own, kind

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._down(self._own.gated(*self.inputs(x), self._kind))
        return found


class _Attention:
    """Projections, norms of heads, rotation, the cache and attention."""

    LINEAR = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})

    def __init__(self, module: Any, own: Any) -> None:
        self._layer, self._dim, self._own = module.layer_idx, module.head_dim, own
        self.inputs, self._out = _Inputs([module.q_proj, module.k_proj, module.v_proj]), module.o_proj.forward
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
        tokens, norms = hidden_states.shape[1], self._head_norms()
        heads = [x.view(tokens, -1, self._dim) for x in self.inputs(hidden_states)]
        if norms is None:
            heads[:2] = [x if norm is None else norm(x) for x, norm in zip(heads, self._norms, strict=False)]
        query, key, value = (x.transpose(0, 1)[None] for x in heads)
        rotary = position_embeddings[0][0], position_embeddings[1][0]
        output = ragged_batch.attend(self._layer, query, key, value, self.rules, rotary, norms)
        return self._out(output.view(1, tokens, -1)), None

    def _head_norms(self) -> Any:
        """Norms that the kernel of the keys computes, too; None: they are modules, or there are none."""
        query, key = (None if norm is None else vars(norm).get("forward") for norm in self._norms)
        if self._own is cpu_attention or not (isinstance(query, _RmsNorm) and isinstance(key, _RmsNorm)):
            return None
        alike = (query.eps, query.offset) == (key.eps, key.offset)
        weights = query.module.weight, key.module.weight
        return (*weights, query.eps, query.offset) if alike else None


class _Layer:
    """Attention and MLP with norms before them, or before and after them, and residual sums."""

    def __init__(self, module: Any) -> None:
        self._module, self.following = module, None

    def __call__(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        module = self._module
        before, after = module.post_attention_layernorm, getattr(module, "post_feedforward_layernorm", None)
        x = module.self_attn(hidden_states=module.input_layernorm(hidden_states), **kwargs)[0]
        if after is not None:
            x, before = before(x), module.pre_feedforward_layernorm
        total = add(hidden_states, x, before)
        x = module.mlp(before(total))
        return add(total, x if after is None else after(x), self.following)
