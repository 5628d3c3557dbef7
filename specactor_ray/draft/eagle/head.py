"""The EAGLE head: one decoder layer that predicts the target's next tokens from the target's hidden states.

EAGLE-3 (arXiv 2503.01840). At sequence position `i` the input is the target's hidden states of position `i` (of a low,
a middle and a high layer, fused by `fc` into one *feature*) and the token of position `i + 1`; the output predicts the
token of position `i + 2`. Further ahead the head's own output replaces the feature. The draft vocabulary holds the
target's most frequent ids; `d2t` maps back.

    feature      h_i = fc([low_i, middle_i, high_i])          (from the target) or g_{i-1} (own output)
    layer        a = h_i + attention([norm_e(embed(x_{i+1})), norm_h(h_i)]);  g_i = a + mlp(norm_a(a))
    logits       lm_head(norm(g_i)) over the draft vocabulary

Weights are stored under the names of the `speculators` format, which vLLM loads (`draft/eagle/checkpoint.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from specactor_ray.models.layers import add
from specactor_ray.models.rotary import fix_positions

Attend = Callable[..., torch.Tensor]
"""(attention module, query `(B, heads, N, dim)`, key and value `(B, kv_heads, N, dim)`, keyword arguments of the head's
forward) → `(B, N, heads * dim)`."""


@dataclass(frozen=True)
class EagleHeadConfig:
    """Shape of a head."""

    layer: dict[str, Any]
    """Keys of a transformers Llama configuration of one layer, with the target's vocab_size."""
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    """vLLM's numbering: `i` is the input of decoder layer `i`, the output of layer `i - 1`."""
    norm_before_residual: bool = False
    """Whether the residual stream starts from the normalised feature."""
    verifier: str = ""
    """Name of the target for which the head was trained, and its number of decoder layers, if known."""
    verifier_layers: int | None = None

    @property
    def hidden_size(self) -> int:
        return int(self.layer["hidden_size"])

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the target."""
        return int(self.layer["vocab_size"])

    @property
    def text(self) -> SimpleNamespace:
        """The configuration of the layer in the form of a model's."""
        return SimpleNamespace(**{**self.layer, "num_hidden_layers": 1})

    @property
    def feature_size(self) -> int:
        """Width of the streamed hidden states: all auxiliary layers side by side."""
        return len(self.aux_layers) * self.target_hidden_size

    @property
    def exported_layers(self) -> tuple[int, ...]:
        """The auxiliary layers as indices of exported decoder layer outputs (`target.hidden_layers`)."""
        return tuple(layer - 1 for layer in self.aux_layers)


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer in vLLM's numbering; from 8 layers on those of published EAGLE-3 heads."""
    if num_layers < 8:
        return (1, max(num_layers // 2, 1), max(num_layers - 1, 1))
    return (2, num_layers // 2, num_layers - 3)


class EagleAttention(nn.Module):
    """Grouped-query attention over `[embedding, feature]`, twice the hidden size wide."""

    layer_idx = 0

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, width, bias = config.head_dim, 2 * config.hidden_size, bool(config.attention_bias)
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=bias)

    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attend: Attend, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """Has the signature of transformers' attention, so that a fused form can replace it
        (`models/layers.py`)."""
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        batch, count, _ = x.shape
        q, k, v = (
            linear(x).view(batch, count, -1, self.head_dim).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *rope)
        return self.o_proj(attend(self, q, k, v, **kwargs)), None


class EagleLayer(nn.Module):
    """The decoder layer."""

    def __init__(self, config: Any, norm_before_residual: bool) -> None:
        from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

        super().__init__()
        self.norm_before_residual = norm_before_residual
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.hidden_norm = LlamaRMSNorm(size, eps), LlamaRMSNorm(size, eps)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self.self_attn, self.mlp = EagleAttention(config), LlamaMLP(config)

    def forward(
        self,
        embeds: torch.Tensor,
        features: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
        **kwargs: Any,
    ) -> torch.Tensor:
        normed = self.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        joined = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        attended = add(residual, self.self_attn(joined, rope, attend, **kwargs)[0], self.post_attention_layernorm)
        return attended + self.mlp(self.post_attention_layernorm(attended))


class EagleHead(nn.Module):
    """The head with its embedding (the target's, frozen) and reduced output layer."""

    d2t: torch.Tensor
    """int64 `(draft_vocab,)`: draft token `j` is the target's id `j + d2t[j]`."""

    def __init__(self, config: EagleHeadConfig) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

        super().__init__()
        self.config = config
        llama = LlamaConfig(**{**config.layer, "num_hidden_layers": 1})
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([EagleLayer(llama, config.norm_before_residual)])
        self.norm = LlamaRMSNorm(config.hidden_size, llama.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(llama)
        if not self.rotary.inv_freq.is_meta:
            fix_positions(self.rotary)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))

    def draft_token_ids(self) -> torch.Tensor:
        """int64 `(draft_vocab,)`: the target's id of each draft token."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """Features `(..., hidden)` from the target's auxiliary hidden states `(..., aux layers * target hidden)`."""
        return self.fc(states)

    def forward(
        self, features: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, **kwargs: Any
    ) -> torch.Tensor:
        """One pass of the layer over features or own outputs `(B, N, hidden)` and the token after each position: inputs
        of `logits`, and features of the next positions. `attend` receives the keyword arguments."""
        rope = self.rotary(features, positions)
        return self.layers[0](self.embed_tokens(token_ids), features, rope, attend, **kwargs)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Logits `(..., draft_vocab)` from outputs `(..., hidden)`."""
        return self.lm_head(self.norm(outputs))
