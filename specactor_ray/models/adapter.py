"""A low-rank adapter of the policy, by peft: `W + alpha / rank * B A` in place of the frozen W of linear layers (LoRA,
arXiv 2106.09685, section 4.1).

The layers are replaced inside the model, which stays a model of transformers. The adapter has no dropout: the update is
that of the policy that the rollout ran. peft is imported on use, since it is an optional package.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from specactor_ray.config.schema import TargetConfig
from specactor_ray.config.training_schema import LoraConfig
from specactor_ray.core.errors import ConfigError, clipped_text
from specactor_ray.models.loading import load_empty_model, named_weights
from specactor_ray.models.probe import eager_logprobs, far_from, probe_model

_NAME = "default"
_BASE = ".base_layer"
_CHECKSUM = "base.crc32"
"""File with the checksum of the weights to which an adapter adds."""
_TRIED = 0.25
"""Norm of what a random adapter adds to a weight, as a share of the weight's."""
_EXPERTS = {"gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"}
"""Last names that peft takes for fused experts, in some families that have those, wherever such a layer is."""


def adapted_layers(model: Any, lora: LoraConfig) -> list[str]:
    """Names of the linear layers of a model, which may be on `meta`, that an adapter with these targets changes.
    ConfigError: a target names none of them."""
    from transformers.pytorch_utils import Conv1D

    output, parameters = model.get_output_embeddings(), dict(model.named_parameters())
    fused = any(weight.dim() == 3 and ".conv" not in name for name, weight in parameters.items())
    linear = [
        name
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Conv1D) and module is not output and not (fused and _last(name) in _EXPERTS)
    ]
    chosen = [] if lora.targets else linear
    for target in lora.targets:
        found = [name for name in linear if f".{name}".endswith(f".{target}")]
        if not found:
            there = any(f".{target}." in f".{name}." for name in parameters)
            what = "is no layer that an adapter can change" if there else "matches nothing"
            problem = f"{clipped_text(repr(target))} {what} in {type(model).__name__}."
            known = ", ".join(sorted({_last(name) for name in linear}))
            raise ConfigError("trainer.lora.targets", problem, f"use some of {known}, or [] for all of them.")
        chosen = [*chosen, *found]
    return list(dict.fromkeys(chosen))


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def adapter_size(target: TargetConfig, lora: LoraConfig) -> int:
    """Number of parameters of an adapter of the target. ConfigError: as `adapted_layers`."""
    model = load_empty_model(target.model, trust_remote_code=target.trust_remote_code)
    shapes = (model.get_parameter(f"{name}.weight").shape for name in adapted_layers(model, lora))
    return sum(int(lora.rank or 0) * sum(shape) for shape in shapes)


class Adapter:
    """An adapter in a frozen model of float32 weights: that of a folder of `save`, or a new one, which changes nothing
    yet. ConfigError: as `adapted_layers`; peft refuses a layer; the folder's adapter belongs to other weights; or the
    model does not compute with an adapter what it does with the sum, which verifiers run."""

    def __init__(self, model: Any, lora: LoraConfig, folder: Path | None, seed: int) -> None:
        import peft

        self._base = _checksum(model)
        if folder is not None:
            if (folder / _CHECKSUM).read_text() != self._base:
                problem = f"its weights are not those on which the adapter of {folder.parent} was trained."
                raise ConfigError("target.model", problem, "name the model that the run began with.")
            self._peft: Any = peft.PeftModel.from_pretrained(model, str(folder), is_trainable=True)
        else:
            self._peft = self._new(model, lora, seed)
        self._refuse_unequal_sums(model)

    @staticmethod
    def _new(model: Any, lora: LoraConfig, seed: int) -> Any:
        import peft

        names = adapted_layers(model, lora)
        settings = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=names, task_type="CAUSAL_LM")
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):  # about Conv1D
            torch.manual_seed(seed)  # all ranks begin with the same one
            try:
                return peft.get_peft_model(model, settings)
            except ValueError as error:  # for example of layers whose weights a kernel reads
                problem = f"peft cannot adapt {type(model).__name__}: {clipped_text(str(error))}."
                raise ConfigError("trainer.lora.targets", problem, "name other layers.") from error

    def _refuse_unequal_sums(self, model: Any) -> None:
        """ConfigError if log-probabilities with some adapter differ from those with the sums in its place: a model may
        read the weights of a layer without calling it, as kernels of recurrent layers do. The adapter stays."""
        layers = {one.name.split(".")[-2]: one.layer for one in policy_weights(model) if one.layer is not None}
        if not (far := self._difference(model, set(layers))):
            return
        bad = [kind for kind in layers if self._difference(model, {kind})] or list(layers)
        problem = (
            f"{type(model).__name__} gives other log-probabilities with an adapter of {', '.join(bad)} than with the "
            f"merged weights, which verifiers run: they differ by {far}."
        )
        others = ", ".join(kind for kind in layers if kind not in bad)
        fix = f"use trainer.lora.targets=[{others}]" if others else "train all weights (trainer.lora.rank=null)"
        raise ConfigError("trainer.lora.targets", problem, f"{fix}.")

    @torch.no_grad()
    def _difference(self, model: Any, kinds: set[str]) -> str:
        """What `far_from` says of a random adapter of the layers with these last names and of the sums."""
        adapted = [(one.name.split(".")[-2], one.layer) for one in policy_weights(model) if one.layer is not None]
        kept, generator = list[tuple[torch.Tensor, torch.Tensor]](), torch.Generator().manual_seed(0)
        try:
            for kind, layer in adapted:
                matrix = layer.lora_B[_NAME].weight
                kept.append((matrix, matrix.clone()))
                matrix.copy_(torch.randn(matrix.shape, generator=generator))
                size = layer.get_base_layer().weight.norm() / layer.get_delta_weight(_NAME).norm()
                matrix.mul_(_TRIED * size if kind in kinds else 0.0)
            with self.off(), _sums(layer for _, layer in adapted):
                truth = probe_model(model)
            return far_from(truth, eager_logprobs(model, truth.token_ids), exact=True)
        finally:
            for matrix, before in kept:
                matrix.copy_(before)

    def off(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model computes what it did without the adapter, to the last bit."""
        off: contextlib.AbstractContextManager[None] = self._peft.disable_adapter()
        return off

    def save(self, folder: Path, matrices: Mapping[str, torch.Tensor]) -> None:
        """Write the adapter, whose `PolicyWeight.matrices` these are, in the format of peft."""
        self._peft.save_pretrained(folder, state_dict=matrices, save_embedding_layers=False)
        (folder / _CHECKSUM).write_text(self._base)


class _Sum(nn.Module):
    """W to the sum."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self._change = functools.partial(layer.get_delta_weight, _NAME)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self._change()


@contextlib.contextmanager
def _sums(layers: Iterable[Any]) -> Iterator[None]:
    """Inside, each read of the weight of one of these layers of peft, by whichever code, computes the sum: there is no
    second copy of the weights."""
    kept = [(base, dict(base._parameters), layer) for layer in layers for base in [layer.get_base_layer()]]
    try:
        for base, _, layer in kept:
            parametrize.register_parametrization(base, "weight", _Sum(layer), unsafe=True)
        yield
    finally:
        for base, parameters, _ in kept:
            if parametrize.is_parametrized(base):
                parametrize.remove_parametrizations(base, "weight", leave_parametrized=False)
            base._parameters.clear()
            base._parameters.update(parameters)  # in their order


def _checksum(model: nn.Module) -> str:
    """Checksum of some elements of each weight, which tells models of the same shape apart."""
    value = 0
    for weight in model.parameters():
        some = weight.detach().flatten()[:: max(weight.numel() // 64, 1)]
        value = zlib.crc32(some.cpu().numpy().tobytes(), value)
    return f"{value:08x}"


class PolicyWeight(NamedTuple):
    """A weight of the policy under its name in the base model."""

    name: str
    weight: torch.Tensor
    layer: Any = None
    """peft's layer, if it adds to the weight."""

    @property
    def matrices(self) -> dict[str, nn.Parameter]:
        """A and B, by their names in peft's `PeftModel`."""
        kinds = ("lora_A", "lora_B") if self.layer is not None else ()
        where = f"base_model.model.{self.name.rpartition('.')[0]}"
        return {f"{where}.{kind}.{_NAME}.weight": getattr(self.layer, kind)[_NAME].weight for kind in kinds}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those of which ranks may hold a share; every rank has whole buffers."""
        own = [self.weight] if isinstance(self.weight, nn.Parameter) else []
        return [*own, *self.matrices.values()]

    @property
    def numel(self) -> int:
        """Number of elements, also if ZeRO-3 holds only a share of it."""
        return int(getattr(self.weight, "ds_numel", self.weight.numel()))

    @torch.no_grad()
    def merged(self) -> torch.Tensor:
        """Its value with what the adapter adds; the policy's own parameters stay as they are."""
        return self.weight if self.layer is None else self.weight + self.layer.get_delta_weight(_NAME)


def policy_weights(model: nn.Module) -> Iterator[PolicyWeight]:
    """The whole persistent state of a policy, with or without an adapter: as `named_weights` has that of its base."""
    for name, weight in named_weights(model):
        if ".lora_" in name:
            continue
        module, _, kind = name.rpartition(".")
        adapted = module.endswith(_BASE) and kind == "weight"
        layer = model.get_submodule(module.removesuffix(_BASE)) if adapted else None
        yield PolicyWeight(name.replace(f"{_BASE}.", "."), weight, layer)
