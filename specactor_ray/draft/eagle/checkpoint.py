"""EAGLE-3 heads on disk.

The module writes the `speculators` format, which vLLM loads: `config.json` with `speculators_model_type: eagle3` beside
`model.safetensors`. It reads this format and that of the EAGLE authors (a Llama `config.json` with `draft_vocab_size`,
weights under `midlayer.`). A checkpoint without embeddings uses the target's.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.errors import ModelLoadError
from specactor_ray.core.files import expanded, to_json
from specactor_ray.draft.eagle.head import EagleHead, EagleHeadConfig, default_aux_layers
from specactor_ray.models.checkpoint_files import read_config, require_head
from specactor_ray.models.loading import load_model, load_model_config, locate_model, parse_dtype, wrong_value_errors

_OWN_KEY = "specactor_ray"
"""Key of the section of `config.json` for values outside of the format."""
_WINDOW = 5
"""Recommended draft tokens per step in written checkpoints."""
_EMBEDDING = "embed_tokens.weight"
_EMBEDDING_NAMES = (_EMBEDDING, "wte.weight", "embed_in.weight")
_AUX = "eagle_aux_hidden_state_layer_ids"
_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
_LAYER_KEYS = (
    *_SIZES, "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "attention_bias", "mlp_bias"
)  # fmt: skip
_LAYER_DEFAULTS = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
"""Defaults of Llama, written out because vLLM reads the layer's configuration as it is."""
_MOST_APART = 64
"""Number of draft tokens of which no two can be neighbours in the target's vocabulary."""
_Kind = tuple[Callable[[Any], bool], str]
_SIZE: _Kind = (lambda value: type(value) is int and 1 <= value < 2**31, "a whole number of 1 or more")
_SECTION: _Kind = (lambda value: isinstance(value, dict), "a section of keys and values")
_LAYERS: _Kind = (
    lambda value: isinstance(value, list) and all(type(index) is int and 0 < index < 2**16 for index in value),
    "a list of layers from 1 on",
)


def read_head_config(name: str, target: str, *, trust_remote_code: bool = False) -> EagleHeadConfig:
    """Read the shape of the head in directory `name`. ModelLoadError: there is no head, it has another type, or it was
    made for another target; both are named."""
    model = load_model_config(target, trust_remote_code=trust_remote_code).get_text_config()
    config = _parse(require_head(expanded(name)), model)
    _reject_other_target(config, name, target, model)
    return config


def empty_head(name: str, target: TargetConfig) -> EagleHead:
    """The head in directory `name` without its weights."""
    config = read_head_config(name, target.model, trust_remote_code=target.trust_remote_code)
    with torch.device("meta"):
        return EagleHead(config)


def load_head(
    name: str, target: str, *, dtype: str = "float32", device: str = "cpu", trust_remote_code: bool = False
) -> EagleHead:
    """Load a head; its embedding is the target's if the checkpoint has none. ModelLoadError: as `read_head_config`; or
    weights are missing or unknown, or have another shape."""
    config = read_head_config(name, target, trust_remote_code=trust_remote_code)
    weights = {_our_name(key): tensor for key, tensor in _read_weights(expanded(name)).items()}
    target_has_draft = weights.pop("t2d", None)
    if _EMBEDDING not in weights:
        weights[_EMBEDDING] = target_embedding(target, trust_remote_code=trust_remote_code)
    if "d2t" not in weights and config.draft_vocab_size == config.vocab_size:
        weights["d2t"] = torch.zeros(config.vocab_size, dtype=torch.long)
    try:
        head = EagleHead(config)
    except wrong_value_errors() as error:
        reason = " ".join(str(error).split())
        raise ModelLoadError(f"{name}/config.json does not describe a layer that can be made: {reason}.") from error
    try:
        head.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ModelLoadError(f"The weights of the EAGLE head {name!r} do not fit its config.json: {reason}") from error
    ids = head.draft_token_ids()
    if ids.min() < 0 or ids.max() >= config.vocab_size or len(ids.unique()) < len(ids):
        raise ModelLoadError(f"The mapping d2t of the EAGLE head {name!r} does not fit the target's vocabulary.")
    _reject_contradiction(name, head, target_has_draft)
    return head.to(device, parse_dtype(dtype)).eval().requires_grad_(False)


def _reject_contradiction(name: str, head: EagleHead, t2d: torch.Tensor | None) -> None:
    """Refuse a `d2t` that is not of offsets, which makes every draft wrong in silence."""
    vocab, fix = head.config.vocab_size, "Fix: d2t[j] must be the target's id of draft token j, minus j."
    if t2d is not None:
        if t2d.shape != (vocab,):
            raise ModelLoadError(f"t2d of the EAGLE head {name!r} has shape {tuple(t2d.shape)}, not ({vocab},). {fix}")
        expected = torch.zeros(vocab, dtype=torch.bool)
        expected[head.draft_token_ids()] = True
        if wrong := int((t2d.bool() != expected).sum()):
            raise ModelLoadError(f"d2t and t2d of the EAGLE head {name!r} contradict each other at {wrong} ids. {fix}")
    # Offsets of a vocabulary of frequent tokens stay equal from one id to the next; ids never do.
    elif len(head.d2t) >= _MOST_APART and bool((head.d2t.diff() > 0).all()):
        raise ModelLoadError(f"d2t of the EAGLE head {name!r} holds ids, not offsets: no two are equal. {fix}")


def save_head(head: EagleHead, folder: Path) -> None:
    """Write `config.json` and `model.safetensors`, without the embedding, into an existing folder."""
    from safetensors.torch import save_file

    config = head.config
    facts = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
        "transformer_layer_config": {"model_type": "llama", **_LAYER_DEFAULTS, **config.layer, "num_hidden_layers": 1},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _WINDOW}],
            "verifier": {"name_or_path": config.verifier, "architectures": []},
        },
        _OWN_KEY: {"verifier_layers": config.verifier_layers},
    }
    target_has_draft = torch.zeros(config.vocab_size, dtype=torch.bool)
    target_has_draft[head.draft_token_ids().cpu()] = True
    weights = {**trained_weights(head), "d2t": head.d2t, "t2d": target_has_draft}
    save_file(
        {key: tensor.detach().cpu().contiguous() for key, tensor in weights.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(to_json(facts, indent=2, default=str) + "\n", encoding="utf-8")


def trained_weights(head: EagleHead) -> dict[str, torch.Tensor]:
    """Name → tensor of the weights that training changes; an update of a running head carries these."""
    return {key: tensor for key, tensor in head.state_dict().items() if key not in (_EMBEDDING, "d2t", "t2d")}


def target_embedding(target: str, *, trust_remote_code: bool = False) -> torch.Tensor:
    """`(vocab, hidden)`: the target's input embedding, read alone from safetensors files."""
    from safetensors import safe_open

    source, _ = locate_model(target)
    for path in sorted(source.glob("*.safetensors")) if isinstance(source, Path) else ():
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                if key.endswith(_EMBEDDING_NAMES):
                    return file.get_tensor(key)
    model: Any = load_model(target, trust_remote_code=trust_remote_code)
    return model.get_input_embeddings().weight.detach()


def _value(path: Path, facts: Mapping[str, Any], key: str, kind: _Kind, default: Any = None) -> Any:
    """The value at a key of a section of `config.json`, or the default. ModelLoadError: it has another type."""
    value, (is_right, allowed) = facts.get(key), kind
    if value is not None and not is_right(value):
        raise ModelLoadError(f"{path}: {key} is {value!r:.80}, not {allowed}.")
    return default if value is None else value


def _parse(folder: Path, target: Any) -> EagleHeadConfig:
    """Read `config.json` of a head for a target with this configuration."""
    facts, path = read_config(folder), folder / "config.json"
    read = functools.partial(_value, path)
    kind, layer = facts.get("speculators_model_type"), read(facts, "transformer_layer_config", _SECTION) or facts
    if kind not in (None, "eagle3"):
        raise ModelLoadError(f"{folder} holds a {kind!r} head. Fix: use one of the kind eagle3.")
    sizes = {key: read(layer, key, _SIZE) for key in _SIZES}
    draft_vocab_size = read(facts, "draft_vocab_size", _SIZE)
    if None in (draft_vocab_size, sizes["hidden_size"], sizes["vocab_size"]):
        raise ModelLoadError(f"{path} does not describe an EAGLE-3 head (no draft_vocab_size).")
    if read(layer, "num_hidden_layers", _SIZE, 1) != 1:
        raise ModelLoadError(f"{folder} has {layer['num_hidden_layers']} layers; heads of one are supported.")
    own, about, eagle = (read(facts, key, _SECTION, {}) for key in (_OWN_KEY, "speculators_config", "eagle_config"))
    hidden = read(layer, "target_hidden_size", _SIZE, int(target.hidden_size))
    aux = read(facts, _AUX, _LAYERS) or read(eagle, _AUX, _LAYERS) or default_aux_layers(int(target.num_hidden_layers))
    return EagleHeadConfig(
        layer={key: layer[key] for key in _LAYER_KEYS if layer.get(key) not in (None, _LAYER_DEFAULTS.get(key))},
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=read(facts, "target_hidden_size", _SIZE, hidden),
        aux_layers=tuple(aux),
        norm_before_residual=bool(facts.get("norm_before_residual", False)),
        verifier=str(read(about, "verifier", _SECTION, {}).get("name_or_path") or ""),
        verifier_layers=read(own, "verifier_layers", _SIZE),
    )


def _reject_other_target(config: EagleHeadConfig, name: str, target: str, model: Any) -> None:
    """Raise if vocabulary, width or layers of the target differ from those of the head."""
    made_for = f" (made for {config.verifier})" if config.verifier else ""
    has = int(model.num_hidden_layers)
    layers = max(config.aux_layers) if max(config.aux_layers) > has else config.verifier_layers or has
    for what, wanted, is_ in (
        ("a vocabulary of {} tokens", config.vocab_size, int(model.vocab_size)),
        ("hidden states of {} numbers", config.target_hidden_size, int(model.hidden_size)),
        ("{} decoder layers", layers, has),
    ):
        if wanted != is_:
            raise ModelLoadError(
                f"The EAGLE head {name!r}{made_for} needs a target with {what.format(wanted)}; the target {target!r} "
                f"has {is_}. Fix: use a head trained for this target (specactor drafter train)."
            )


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    try:
        if files:
            return {key: tensor for file in files for key, tensor in load_file(file).items()}
        path = folder / "pytorch_model.bin"
        if path.is_file():
            weights = torch.load(path, map_location="cpu", weights_only=True)
            if isinstance(weights, dict) and all(isinstance(value, torch.Tensor) for value in weights.values()):
                return weights
            raise ValueError(f"{path.name} holds something else than names and tensors")
    except (OSError, SafetensorError, RuntimeError, ValueError, pickle.UnpicklingError, EOFError) as error:
        raise ModelLoadError(f"The weights of the EAGLE head {str(folder)!r} cannot be read: {error}.") from error
    raise ModelLoadError(f"The EAGLE head {str(folder)!r} has no weights (model.safetensors).")


def _our_name(key: str) -> str:
    """Map `midlayer.` to the one layer; strips the prefixes `model.` and `draft_model.`."""
    for prefix in ("model.", "draft_model."):
        key = key.removeprefix(prefix)
    return f"layers.0.{key.removeprefix('midlayer.')}" if key.startswith("midlayer.") else key
