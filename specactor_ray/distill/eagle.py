"""An EAGLE head in training: examples, batches, a new head, and the loss of several depths.

At inference the head starts from a true feature at an *anchor* `a` and then reads its own outputs: at depth `k` it is
at sequence position `a + k` and attends to the true features up to the anchor and to its own of depths 1..k. In
training every position is an anchor, all at once (EAGLE-3's training-time test, arXiv 2503.01840). Keys of depth 0 are
shared by all anchors (causal attention); those of deeper steps belong to one anchor only, so each adds one column to
the scores.

Loss per depth: cross entropy against the target's own distribution over the draft vocabulary, plus the distance between
the inputs of the head's output layer and of the target's. The second term makes small data sufficient: every position
provides `hidden` numbers instead of one distribution (as in EAGLE, arXiv 2401.15077; EAGLE-3 does without it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specactor_ray.core.errors import InputError
from specactor_ray.distill.corpus import CorpusRecord
from specactor_ray.draft.eagle.head import EagleHead, EagleHeadConfig, default_aux_layers
from specactor_ray.learner.batching import Sample
from specactor_ray.models.ragged_model import HEAD_INPUT

INIT_SCALE = 0.05
"""Scale of weights not copied from the target: small, so that the head starts close to the target's own last layer."""
_DECAY, _REGRESSION = 0.8, 2.0
"""Factor of the loss from one depth to the next; weight of the distance between inputs of output layers."""
FROZEN = ("embed_tokens.weight", "lm_head.weight")
"""Weights that stay the target's: most of all weights; the output layer also converts the target's states into the
distributions to learn."""


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
    own: tuple[bool, ...] | None = None
    """Which of the `L` tokens the target may have sampled, None for all: those of an environment are only context."""

    def __len__(self) -> int:
        return len(self.states)


def hidden_layers_of(model: Any) -> tuple[int, ...]:
    """Indices of the target's layers whose states a new head is trained on, the input of the output layer last."""
    layers = int(model.config.get_text_config().num_hidden_layers)
    return (*(layer - 1 for layer in default_aux_layers(layers)), HEAD_INPUT)


def example_of(record: CorpusRecord) -> EagleExample:
    """A recorded rollout with the states of `hidden_layers_of`."""
    states = torch.from_numpy(record.states())
    hidden = states.shape[1] // 4
    tokens = (*record.prompt_token_ids, *record.output_token_ids)
    temperature = record.sampling.temperature or 1.0
    return EagleExample(tokens, len(record.prompt_token_ids), states[:, :-hidden], states[:, -hidden:], temperature)


def sampled_example(sample: Sample, states: torch.Tensor) -> EagleExample:
    """A sample of a training step."""
    tokens, own = (*sample.prompt.tolist(), *sample.output.tolist()), sample.loss_mask.tolist()
    return EagleExample(tokens, len(sample.prompt), states, own=(*[False] * len(sample.prompt), *own))


@dataclass(frozen=True, slots=True)
class EagleBatch:
    """Sequences of different lengths, padded on the right to `T` positions.

    Position `i` of a sequence `x` of `L` tokens holds the target's states of `x_i` and, as `next_ids`, `x_{i+1}`.
    """

    states: torch.Tensor
    """`(B, T, feature_size)`: auxiliary hidden states of the target."""
    next_ids: torch.Tensor
    """`(B, T)` int64."""
    predicts_output: torch.Tensor
    """`(B, T)` bool: position `i` predicts, like the target, a token `x_{i+1}` that counts: one of the output."""
    teacher: torch.Tensor
    """`(M, draft_vocab)`: the target's log-probabilities for `x_{i+1}` over the draft vocabulary, at the `M` positions
    where `predicts_output` holds, in its order."""
    final: torch.Tensor | None = None
    """`(M, hidden)`: input of the target's output layer at these positions."""


@torch.no_grad()
def make_batch(examples: Sequence[EagleExample], head: EagleHead) -> EagleBatch:
    """A padded batch on the head's device. The head's output layer, which is the target's, computes the target's
    distributions from its input; if sampled tokens replace them, tokens outside the draft vocabulary do not count."""
    device, final = head.lm_head.weight.device, None
    size, longest = len(examples), max(map(len, examples))
    states = torch.zeros(size, longest, head.config.feature_size)
    next_ids = torch.zeros(size, longest, dtype=torch.long)
    counts = torch.zeros(size, longest, dtype=torch.bool)
    for row, example in enumerate(examples):
        n = len(example)
        states[row, :n] = example.states.float()
        next_ids[row, :n] = torch.tensor(example.token_ids[example.first + 1 : example.first + 1 + n])
        counts[row, max(example.num_prompt - 1 - example.first, 0) : n] = True
        if example.own is not None:
            counts[row, :n] &= torch.tensor(example.own[example.first + 1 : example.first + 1 + n])
    finals = [
        example.final[row[: len(example)]]
        for example, row in zip(examples, counts, strict=True)
        if example.final is not None
    ]
    if finals:
        final = torch.cat(finals).float().to(device)
        temperatures = torch.cat(
            [torch.full((len(one), 1), example.temperature) for one, example in zip(finals, examples, strict=True)]
        )
        teacher = torch.log_softmax(head.lm_head(final).float() / temperatures.to(device), dim=-1)
    else:
        draft_of = torch.full((head.config.vocab_size,), -1, dtype=torch.long)
        draft_of[head.draft_token_ids().cpu()] = torch.arange(head.config.draft_vocab_size)
        counts &= draft_of[next_ids] >= 0
        wanted = draft_of[next_ids[counts]]
        teacher = torch.full((len(wanted), head.config.draft_vocab_size), float("-inf"))
        teacher = teacher.scatter_(1, wanted.unsqueeze(1), 0.0).to(device)
    return EagleBatch(states.to(device), next_ids.to(device), counts.to(device), teacher, final)


# ---- a new head ----


@torch.no_grad()
def expected_counts(model: Any, example: EagleExample) -> torch.Tensor:
    """`(vocab,)`: the target's probability of each token, summed over the positions of the output. Needs far fewer
    rollouts than counts of sampled tokens."""
    assert example.final is not None
    final = example.final[example.num_prompt - 1 - example.first :].to(model.dtype)
    logits = model.get_output_embeddings()(final).float() / example.temperature
    return torch.softmax(logits, dim=-1).sum(0)


def new_head(model: Any, name: str, counts: torch.Tensor, draft_vocab_size: int) -> EagleHead:
    """Create a head for this target, a transformers model of the Llama family, that starts from its own last layer.

    The feature starts as the high layer's state alone, and attention, MLP, norms and output layer are those of the
    target's last layer and head; only the parts that read the embedding, and those of the lower layers, start small.
    `counts` `(vocab,)`, the frequency of each token, chooses the draft vocabulary.
    """
    settings = model.config.get_text_config()
    eos = settings.eos_token_id
    always = eos if isinstance(eos, list) else [] if eos is None else [eos]
    draft_ids = most_frequent_ids(counts, draft_vocab_size, always)
    head = EagleHead(_config_of(settings, name, len(draft_ids)))
    head.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))
    with torch.no_grad():
        _copy_last_layer(head, model, draft_ids)
    head.embed_tokens.requires_grad_(False)
    head.lm_head.requires_grad_(False)
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


def reject_foreign_layers(model: Any, name: str) -> None:
    """Check the target's last layer, which a head copies at its start. Raises InputError for another architecture."""
    layers = getattr(model.get_decoder(), "layers", None)
    last = layers[-1] if layers is not None else nn.Module()
    norms = ("input_layernorm", "post_attention_layernorm")
    for wanted in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", *norms):
        try:
            last.get_submodule(wanted)
        except AttributeError:
            raise InputError(
                f"--target: a head cannot be made for {name} ({type(model).__name__}): its layers have no {wanted}. "
                "Fix: a target of the Llama family (Llama, Qwen, Mistral, SmolLM)"
            ) from None


# ---- the loss ----


@dataclass(slots=True)
class _Unroll:
    """Keys and values of all depths; `attend` is the head's attention.

    Depth 0 has those of every position; deeper ones have them for the anchors from `begin` on, fewer each time.
    """

    begin: int
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def attend(self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`q` `(B, heads, N, dim)` of the next depth."""
        self.keys.append(k)
        self.values.append(v)
        if len(self.keys) == 1:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            return out.transpose(1, 2).flatten(2)
        batch, heads, count, dim = q.shape
        kv_heads, end = k.shape[1], self.begin + count
        grouped = q.view(batch, kv_heads, heads // kv_heads, count, dim) * dim**-0.5
        shared = grouped @ self.keys[0][:, :, None, :end].transpose(-1, -2)
        future = torch.ones(count, end, dtype=torch.bool, device=q.device).triu(self.begin + 1)
        own = [(grouped * key[:, :, None, :count]).sum(-1, keepdim=True) for key in self.keys[1:]]
        weights = torch.softmax(torch.cat([shared.masked_fill(future, float("-inf")), *own], dim=-1), dim=-1)
        out = weights[..., :end] @ self.values[0][:, :, None, :end]
        for depth, value in enumerate(self.values[1:]):
            out = out + weights[..., end + depth, None] * value[:, :, None, :count]
        return out.reshape(batch, heads, count, dim).transpose(1, 2).flatten(2)


def unroll(head: EagleHead, batch: EagleBatch, depths: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Predictions at depth 0, 1, ..., `depths - 1`, of the anchors that have a target at that depth and count.

    Yields:
        `(outputs, rows)`: input of the head's output layer, `(N, hidden)`, and `(N,)` row in `batch.teacher` and
        `batch.final` of the target's side of the same prediction.
    """
    total, device = batch.next_ids.shape[1], batch.next_ids.device
    row_of = torch.full_like(batch.next_ids, -1)
    row_of[batch.predicts_output] = torch.arange(len(batch.teacher), device=device)
    counting = batch.predicts_output.any(dim=0).nonzero()
    # Most of a prompt is never predicted: beyond depth 0, which has its keys, it is left out.
    begin = max(int(counting[0]) - depths, 0) if len(counting) else 0
    positions = torch.arange(total, device=device)
    inputs, attention = head.fuse(batch.states), _Unroll(begin)
    for depth in range(depths):
        # Anchor a predicts x_{a + depth + 2}, like the target at position a + depth + 1.
        last = total - depth - 1
        if last <= begin:
            return
        first, end = (0, last + 1) if depth == 0 else (begin, last)
        at = positions[first + depth : end + depth].expand(len(inputs), -1)
        outputs = head(inputs[:, : end - first], batch.next_ids[:, first + depth : end + depth], at, attention.attend)
        outputs = outputs[:, begin - first : last - first]
        rows = row_of[:, begin + depth + 1 :]
        # The output layer costs as much as the rest, so only positions that count go on.
        yield head.norm(outputs[rows >= 0]), rows[rows >= 0]
        inputs = outputs


def unroll_loss(head: EagleHead, batch: EagleBatch, depths: int) -> torch.Tensor:
    """Loss per position: cross entropy against the target's distribution, and the distance of the inputs of the two
    output layers (smooth L1, if the batch has it), summed over depths with falling weights."""
    loss = batch.states.new_zeros(())
    for depth, (outputs, rows) in enumerate(unroll(head, batch, depths)):
        if not len(rows):
            continue
        log_probs, probs = torch.log_softmax(head.lm_head(outputs).float(), dim=-1), batch.teacher[rows].exp()
        lost = -(probs * log_probs).sum(-1).mean()
        if batch.final is not None:
            lost = lost + _REGRESSION * F.smooth_l1_loss(outputs.float(), batch.final[rows])
        loss = loss + _DECAY**depth * lost
    return loss
