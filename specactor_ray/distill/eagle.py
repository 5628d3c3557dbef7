"""Training data of an EAGLE head: the target's hidden states along its own rollouts, as batches for
`eagle_unroll.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specactor_ray.distill.eagle_unroll import EagleBatch
from specactor_ray.draft.eagle.head import EagleHead, EagleHeadConfig, default_aux_layers

INIT_SCALE = 0.05
"""Scale of weights not copied from the target: small, so that the head starts close to the target's own last layer."""


@dataclass(frozen=True, slots=True)
class EagleExample:
    """One rollout of the target."""

    token_ids: tuple[int, ...]
    """Prompt and output, `L` token ids."""
    num_prompt: int
    states: torch.Tensor
    """`(n, feature_size)`: auxiliary hidden states of the positions from `first` on, `n = L - 1 - first`."""
    final: torch.Tensor | None = None
    """`(n, target hidden)`: input of the target's output layer at the same positions. Without it the sampled tokens
    replace the target's distributions."""
    temperature: float = 1.0
    """Temperature of the target's distribution, above 0."""
    first: int = 0

    def __len__(self) -> int:
        return len(self.states)


def make_batch(examples: Sequence[EagleExample], head: EagleHead) -> EagleBatch:
    """A padded batch on the CPU. The head's output layer, which is the target's, computes the target's distributions
    from its input; if sampled tokens replace them, tokens outside the draft vocabulary do not count."""
    size, longest = len(examples), max(map(len, examples))
    states = torch.zeros(size, longest, head.config.feature_size)
    next_ids = torch.zeros(size, longest, dtype=torch.long)
    counts = torch.zeros(size, longest, dtype=torch.bool)
    for row, example in enumerate(examples):
        n = len(example)
        states[row, :n] = example.states.float()
        next_ids[row, :n] = torch.tensor(example.token_ids[example.first + 1 : example.first + 1 + n])
        counts[row, max(example.num_prompt - 1 - example.first, 0) : n] = True
    if all(example.final is not None for example in examples):
        final, teacher = _taught(examples, counts, head)
        return EagleBatch(states, next_ids, counts, teacher, final)
    draft_of = torch.full((head.config.vocab_size,), -1, dtype=torch.long)
    draft_of[head.draft_token_ids().cpu()] = torch.arange(head.config.draft_vocab_size)
    counts &= draft_of[next_ids] >= 0
    wanted = draft_of[next_ids[counts]]
    sampled = torch.full((len(wanted), head.config.draft_vocab_size), float("-inf"))
    sampled.scatter_(1, wanted.unsqueeze(1), 0.0)
    return EagleBatch(states, next_ids, counts, sampled)


@torch.no_grad()
def _taught(
    examples: Sequence[EagleExample], counts: torch.Tensor, head: EagleHead
) -> tuple[torch.Tensor, torch.Tensor]:
    states, temperatures = [], []
    for example, row in zip(examples, counts, strict=True):
        assert example.final is not None  # checked by the callers
        counted = row[: len(example)]
        states.append(example.final[counted].float())
        temperatures.append(torch.full((int(counted.sum()), 1), example.temperature))
    final, device = torch.cat(states), head.lm_head.weight.device
    logits = head.lm_head(final.to(device)).float().cpu()
    return final, torch.log_softmax(logits / torch.cat(temperatures), dim=-1)


@torch.no_grad()
def expected_counts(model: Any, example: EagleExample) -> torch.Tensor:
    """`(vocab,)`: the target's probability of each token, summed over the positions of the output. Needs far fewer
    rollouts than counts of sampled tokens."""
    assert example.final is not None
    final = example.final[example.num_prompt - 1 - example.first :].to(model.dtype)
    logits = model.get_output_embeddings()(final).float() / example.temperature
    return torch.softmax(logits, dim=-1).sum(0)


def new_head(model: Any, name: str, counts: torch.Tensor, draft_vocab_size: int) -> EagleHead:
    """Create a head for this target that starts from the target's own last layer.

    The feature starts as the high layer's state alone, and attention, MLP, norms and output layer are those of the
    target's last layer and head; only the parts that read the embedding, and those of the lower layers, start small.
    Embedding and output layer stay the target's: they are most of the weights, and the output layer also converts the
    target's states into the distributions to learn.

    Args:
        model: The target, a transformers model of the Llama family (RMS norms, gated MLP, rotary positions).
        counts: `(vocab,)`: frequency of each token; chooses the draft vocabulary.
    """
    settings = model.config.get_text_config()
    eos = settings.eos_token_id
    always = eos if isinstance(eos, list) else [] if eos is None else [eos]
    draft_ids = most_frequent_ids(counts, draft_vocab_size, always)
    head = EagleHead(_config_of(settings, name, len(draft_ids)))
    head.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))
    with torch.no_grad():
        _copy_last_layer(head, model, draft_ids)
    head.embed_tokens.weight.requires_grad_(False)
    head.lm_head.weight.requires_grad_(False)
    return head


def _config_of(settings: Any, name: str, draft_vocab_size: int) -> EagleHeadConfig:
    heads = int(settings.num_attention_heads)
    layer = {
        "hidden_size": int(settings.hidden_size),
        "intermediate_size": int(settings.intermediate_size),
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(settings, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(settings, "head_dim", None) or settings.hidden_size // heads),
        "rms_norm_eps": float(settings.rms_norm_eps),
        "vocab_size": int(settings.vocab_size),
        "max_position_embeddings": int(settings.max_position_embeddings),
        "rope_parameters": dict(settings.rope_parameters),
    }
    layers = int(settings.num_hidden_layers)
    return EagleHeadConfig(
        layer,
        draft_vocab_size,
        int(settings.hidden_size),
        default_aux_layers(layers),
        verifier=name,
        verifier_layers=layers,
    )


def most_frequent_ids(counts: torch.Tensor, size: int, always: Sequence[int] = ()) -> torch.Tensor:
    """The `size` ids with the largest `counts` `(vocab,)` and `always`, ascending: the draft vocabulary."""
    ranked = counts.to(torch.float64).clone()
    ranked[list(always)] = float("inf")
    order = torch.argsort(ranked, descending=True, stable=True)  # among equal counts the lower id comes first
    return order[:size].sort().values


def _copy_last_layer(head: EagleHead, model: Any, draft_ids: torch.Tensor) -> None:
    last: Any = model.get_decoder().layers[-1]
    layer: Any = head.layers[0]
    size = head.config.hidden_size
    head.embed_tokens.weight.copy_(model.get_input_embeddings().weight)
    head.lm_head.weight.copy_(model.get_output_embeddings().weight[draft_ids])
    head.norm.weight.copy_(model.get_decoder().norm.weight)
    head.fc.weight.mul_(INIT_SCALE)
    head.fc.weight[:, -head.config.target_hidden_size :] += torch.eye(size)
    layer.mlp.load_state_dict(last.mlp.state_dict())
    layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    layer.hidden_norm.weight.copy_(last.input_layernorm.weight)
    layer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(layer.self_attn, name).weight
        weight.mul_(INIT_SCALE * 6)
        weight[:, size:] = getattr(last.self_attn, name).weight
