"""Plain decoding by the `hf` engine in this process: the truth for rollouts over Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from specactor_ray.core.types import SamplingParams
from specactor_ray.models.loading import load_tokenizer
from specactor_ray.rollout.prompts import encode_prompt
from specactor_ray.sampling.seeds import derive_seed
from specactor_ray.table.requests import TargetRequest
from tests.unit.engine_conformance import run
from tests.unit.target.test_hf_engine import load, make


def plain_tokens(
    model: Path, prompts: Sequence[str], sampling: SamplingParams, samples: int = 1
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Output tokens in float32 of each sample of each prompt, by both indices. `sampling` has the seed of the run."""
    engine, tokenizer = make(load(model), max_batch=64), load_tokenizer(str(model))
    places = {f"{prompt}/{sample}": (prompt, sample) for prompt in range(len(prompts)) for sample in range(samples)}
    for name, place in places.items():
        ids = encode_prompt(tokenizer, prompts[place[0]], chat=True)
        engine.add(TargetRequest(name, ids, replace(sampling, seed=derive_seed(sampling.seed, *place))))
    tokens = run(engine).tokens
    return {place: tuple(tokens[name]) for name, place in places.items()}


def cut_at_stops(model: Path, tokens: tuple[int, ...], stops: Sequence[str]) -> tuple[tuple[int, ...], str]:
    """Tokens and text of an output up to its first stop text, by decoding it after every token."""
    tokenizer = load_tokenizer(str(model))
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end], skip_special_tokens=True)
        if begins := [text.find(stop) for stop in stops if stop in text]:
            return tokens[:end], text[: min(begins)]
    return tokens, tokenizer.decode(tokens, skip_special_tokens=True)
