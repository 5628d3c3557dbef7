"""A drafter right in a chosen share of its draws: the target with seeded noise on its matrices.

How much noise is found by measurement: both models read the target's own answers to shipped prompts, and draw at every
position, at temperature 1 and with the same keyed noise, as in a rollout. Its draws are right where they are equal.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from specactor_ray.config.load import SHIPPED
from specactor_ray.core.console import START_LOG
from specactor_ray.core.errors import ModelLoadError
from specactor_ray.core.files import parse_json, write_json
from specactor_ray.core.machine import hardware
from specactor_ray.core.types import SamplingParams
from specactor_ray.models.checkpoint_files import weight_files
from specactor_ray.sampling.keyed import sample_rows
from specactor_ray.sampling.seeds import derive_seed

logger = logging.getLogger(START_LOG)
_PROMPTS = ("arithmetic", "chat", "demo", "editing")
_DRAWS = 4
"""Draws at each position, each with noise of its own."""
_LEAST, _MOST = 0.02, 4.0
"""Noise that leaves almost all draws right, and hardly any, in standard deviations of each matrix."""
_TOLERANCE, _MOST_TRIALS = 0.005, 12


class DrawnText(NamedTuple):
    """An answer of the target, which both models read."""

    token_ids: list[int]
    draws: list[tuple[int, ...]]
    """Each position's tokens by the target, one for each of the seeds; the first is the answer's."""


Chat = Sequence[Mapping[str, str]]
"""Messages, of which the last one asks."""


def shipped_prompts() -> list[Chat]:
    """Every second shipped prompt."""
    lines = [line for name in _PROMPTS for line in (SHIPPED / "prompts" / f"{name}.jsonl").read_text().splitlines()]
    rows = [parse_json(line) for line in lines[::2]]
    return [row.get("messages") or [{"role": "user", "content": row["prompt"]}] for row in rows]


def add_noise(source: Path, share: float, folder: Path) -> None:
    """Write the model in `source`, float32, into `folder`, with noise that leaves this share of its draws right in
    answers to the shipped prompts."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    logger.info("looking for the noise that leaves %g of the draws right, minutes on a CPU; this is done once", share)
    dtype = torch.bfloat16 if "avx512_bf16" in hardware()["vector"] else torch.float32  # as a rollout on this machine
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
    answers = answers_of(model, AutoTokenizer.from_pretrained(source), shipped_prompts())
    own = {name: weight for file in weight_files(source) for name, weight in load_file(file).items()}
    found, measured = find_noise(model, own, answers, share)
    for file in source.iterdir():
        if file not in weight_files(source):
            shutil.copy(file, folder)
    save_file(noisy(own, found), folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "noise.json", {"deviations": found, "right": measured, "draws": _count(answers)})


@torch.inference_mode()
def answers_of(model: Any, tokenizer: Any, prompts: Sequence[Chat], max_tokens: int = 64) -> list[DrawnText]:
    """The model's answers to prompts at temperature 1, by keyed sampling, with its draws."""
    options = {"add_generation_prompt": True, "return_dict": False}
    inputs = [list(tokenizer.apply_chat_template(one, **options)) for one in prompts]
    width, rules, cache = max(map(len, inputs)), [_rules(number) for number in range(len(inputs))], None
    step = torch.tensor([[0] * (width - len(ids)) + ids for ids in inputs])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in inputs])
    answers = [DrawnText(list(ids), []) for ids in inputs]
    for position in range(max_tokens):
        places = (mask.cumsum(1) - 1).clamp(0)[:, -step.shape[1] :]
        output = model(step, attention_mask=mask, position_ids=places, past_key_values=cache, logits_to_keep=1)
        cache, step = output.past_key_values, torch.zeros(len(inputs), 1, dtype=torch.long)
        columns = [_drawn(output.logits[:, 0], one, [position] * len(inputs)) for one in zip(*rules, strict=True)]
        mask = torch.cat([mask, torch.ones_like(step)], 1)
        for number, (answer, draws) in enumerate(zip(answers, zip(*columns, strict=True), strict=True)):
            step[number] = draws[0]
            if not position or answer.token_ids[-1] != tokenizer.eos_token_id:
                answer.token_ids.append(draws[0])
                answer.draws.append(draws)
    return answers


@torch.inference_mode()
def right_share(model: Any, answers: Sequence[DrawnText]) -> float:
    """Share of a model's draws that equal the target's in these answers."""
    right = 0
    for number, (ids, draws) in enumerate(answers):
        logits = model(torch.tensor([ids[:-1]]), use_cache=False, logits_to_keep=len(draws)).logits[0]
        for rule, tokens in zip(_rules(number), zip(*draws, strict=True), strict=True):
            own = _drawn(logits, [rule] * len(draws), range(len(draws)))
            right += sum(mine == token for mine, token in zip(own, tokens, strict=True))
    return right / _count(answers)


def noisy(weights: Mapping[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """The weights with seeded noise on the matrices of the layers, `scale` times the standard deviation of each."""
    generator, found = torch.Generator().manual_seed(0), dict(weights)
    for name, weight in sorted(weights.items()):
        if weight.dim() == 2 and ".layers." in name:
            found[name] = weight + torch.randn(weight.shape, generator=generator) * (scale * weight.std())
    return found


def find_noise(
    model: Any, weights: Mapping[str, torch.Tensor], answers: Sequence[DrawnText], share: float
) -> tuple[float, float]:
    """The scale of `noisy` at which a model with the noisy form of these weights is right in about this share of its
    draws, and the measured share. ModelLoadError: there is none."""
    low, high, measured = (_LEAST, 0.99), (_MOST, 0.01), 1.0
    for _ in range(_MOST_TRIALS):
        bend = [math.log(one / (1 - one)) for one in (low[1], share, high[1])]
        scale = low[0] * (high[0] / low[0]) ** min(max((bend[0] - bend[1]) / (bend[0] - bend[2]), 0.1), 0.9)
        model.load_state_dict(noisy(weights, scale), strict=False)
        measured = min(max(right_share(model, answers), 0.01), 0.99)
        logger.info("noise of %.4f standard deviations: %.3f of the draws are right", scale, measured)
        if abs(measured - share) <= _TOLERANCE:
            return scale, measured
        low, high = ((scale, measured), high) if measured > share else (low, (scale, measured))
    problem = f"no noise was found that leaves {share:g} of the draws right; {measured:.3f} is the last of the trials"
    raise ModelLoadError(f"{problem}. Fix: ask for another share.")


def _rules(number: int) -> list[SamplingParams]:
    return [SamplingParams(seed=derive_seed(0, number, draw)) for draw in range(_DRAWS)]


def _drawn(logits: torch.Tensor, rules: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    found = sample_rows(logits, rules, positions)
    if problems := found.problems(np.zeros(len(rules), np.int64)):
        raise ModelLoadError(f"the noise cannot be measured: {problems[min(problems)]}")
    tokens: list[int] = found.tokens[:, 0].tolist()
    return tokens


def _count(answers: Sequence[DrawnText]) -> int:
    return _DRAWS * sum(len(answer.draws) for answer in answers)
