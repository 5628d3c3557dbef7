"""Rotary positions that do not depend on the other sequences of a forward.

In models with `longrope` (Phi-3 128k, Phi-4-mini) or `dynamic` positions transformers chooses the frequencies of a
whole forward by its longest sequence, so a sequence would change when it crosses a length, or beside a longer one. Here
they are chosen once, for the longest sequence that can occur: `longrope` has its long factors whenever this exceeds the
original length, as in vLLM.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

_BY_LENGTH = ("longrope", "dynamic")
"""Kinds of positions whose frequencies depend on the longest sequence."""


def fix_positions(model: Any, max_model_len: int | None = None) -> None:
    """Choose the frequencies of a loaded transformers model as transformers does for a sequence of `max_model_len`
    tokens; None: of the model's whole context. No sequence may be longer. Other kinds of positions are left as they
    are; a second call changes nothing."""
    if not depends_on_length(model.config):
        return
    longest = max_model_len or model.config.get_text_config().max_position_embeddings
    for module in model.modules():
        if hasattr(module, "inv_freq") or "rotary" in type(module).__name__.lower():
            _fix(module, longest)


def depends_on_length(config: Any) -> bool:
    """Whether a configuration, or the text configuration in it, has positions that `fix_positions` fixes."""
    parts = [getattr(config, "rope_parameters", None)]
    parts += [inner for part in parts if isinstance(part, dict) for inner in part.values()]
    kinds = {str(part.get("rope_type", part.get("type"))) for part in parts if isinstance(part, dict)}
    text = config.get_text_config()
    return not kinds.isdisjoint(_BY_LENGTH) or (text is not config and depends_on_length(text))


def _fix(module: Any, max_model_len: int) -> None:
    config = getattr(module, "config", None)
    if config is None or not depends_on_length(config):
        return
    last, kind = max_model_len - 1, getattr(module, "rope_type", None)
    layer_types = list(kind) if isinstance(kind, dict) else [None]
    for layer_type in layer_types:
        name = kind[layer_type] if isinstance(kind, dict) else kind
        if name is None or name == "default":
            continue
        options = {} if layer_type is None else {"layer_type": layer_type}
        _angles(module, [0, last], options)  # transformers keeps the frequencies of the longest sequence so far
        if isinstance(kind, dict):
            kind[layer_type] = "default"  # whose frequencies are never chosen again
        else:
            module.rope_type = "default"
        if not _same(_angles(module, [0, 1], options), _angles(module, [0, 1, last], options)):
            module.forward = functools.partial(_beside_the_last, module.forward, last)


def _angles(module: Any, positions: list[int], options: dict[str, Any]) -> Any:
    device = getattr(module, "inv_freq", torch.empty(0)).device
    places = torch.tensor([positions], device=device)
    return module(torch.zeros(1, 1, 1, device=device), places, **options)


def _same(short: Any, long: Any) -> bool:
    pairs = zip(short, long, strict=True) if isinstance(short, tuple) else [(short, long)]
    return all(torch.equal(a, b[..., : a.shape[-2], :]) for a, b in pairs)


def _beside_the_last(forward: Any, last: int, x: torch.Tensor, position_ids: torch.Tensor, **options: Any) -> Any:
    """Angles of `position_ids` as if each forward had the position `last`, too (PhiMoE's scale)."""
    positions = nn.functional.pad(position_ids, (0, 1), value=last)
    angles = forward(x, positions, **options)
    return tuple(a[..., :-1, :] for a in angles) if isinstance(angles, tuple) else angles[..., :-1, :]
