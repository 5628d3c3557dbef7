"""Selection of the recorded rollouts: prompts, their split into training and held-out ones, and the engine for them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.errors import InputError
from specactor_ray.core.progress import PhaseProgress, show_tokens
from specactor_ray.core.types import SamplingParams
from specactor_ray.distill.card import TargetIdentity
from specactor_ray.distill.corpus import CorpusRecord, RecordStore, RolloutRequest, collect, shortest_beginning
from specactor_ray.distill.recipe import CorpusRecipe
from specactor_ray.sampling.seeds import derive_seed

TokenIds = tuple[int, ...]
TRAIN, HELD_OUT, GREEDY = "train", "heldout", "heldout-greedy"
"""Parts of a corpus: rollouts to train on; held-out ones at the same temperature; held-out ones at temperature 0."""
_HELD_OUT_SEED = 1
_MOST_HELD_OUT = 32


@dataclass(frozen=True, slots=True)
class Prompts:
    """Encoded prompts to train on and to measure on; no prompt is in both."""

    train: tuple[TokenIds, ...]
    held_out: tuple[TokenIds, ...]

    def digest(self) -> str:
        """Digest that identifies the set of prompts."""
        text = json.dumps([self.train, self.held_out]).encode()
        return hashlib.blake2b(text, digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Resources of the engine that rolls out. They change no result."""

    device: str = "cpu"
    max_batch: int = 64
    kv_cache_gb: float = 1.0


def split_prompts(prompts: Sequence[TokenIds], held_out: Sequence[TokenIds] | None, max_prompt: int) -> Prompts:
    """Divide prompts; those longer than `max_prompt` tokens and repetitions are left out.

    Args:
        held_out: Held-out prompts, if the user names them; else every tenth is held out, at most 32.
        max_prompt: Longest prompt in tokens, so that an output still fits the context.

    Raises:
        InputError: Nothing is left to train or to measure on.
    """
    usable = [prompt for prompt in dict.fromkeys(prompts) if len(prompt) <= max_prompt]
    if held_out is None:
        wanted = min(max(len(usable) // 10, 1), _MOST_HELD_OUT)
        chosen = {usable[(i * len(usable)) // wanted] for i in range(wanted)} if len(usable) > 1 else set()
        kept = [prompt for prompt in usable if prompt in chosen]
    else:
        kept = [prompt for prompt in dict.fromkeys(held_out) if len(prompt) <= max_prompt]
    train = [prompt for prompt in usable if prompt not in set(kept)]
    for what, left in (("--data", train), ("--heldout" if held_out is not None else "--data", kept)):
        if not left:
            raise InputError(
                f"{what}: of {len(prompts)} prompts none is left to {'train' if left is train else 'measure'} on: each "
                f"is longer than {max_prompt} tokens, held out, or the only one. Fix: more or shorter prompts"
            )
    return Prompts(tuple(train), tuple(kept))


def requests_of(part: str, prompts: Prompts, recipe: CorpusRecipe) -> list[RolloutRequest]:
    """Rollouts of one part in the order of their making: a sample of every prompt, then the next of each."""
    chosen, samples = (prompts.train, recipe.samples) if part == TRAIN else (prompts.held_out, 1)
    temperature = 0.0 if part == GREEDY else recipe.temperature
    run_seed = recipe.seed if part == TRAIN else derive_seed(recipe.seed, _HELD_OUT_SEED, 0)
    requests = []
    for sample in range(samples):
        for index, prompt in enumerate(chosen):
            seed = derive_seed(run_seed, index, sample)
            sampling = SamplingParams(temperature=temperature, max_tokens=recipe.max_tokens, seed=seed)
            requests.append(RolloutRequest(sample * len(chosen) + index, prompt, sampling))
    return requests


def corpus_facts(
    recipe: CorpusRecipe, target: TargetIdentity, prompts: Prompts, layers: Sequence[int]
) -> dict[str, Any]:
    """Facts that determine the records of a corpus folder."""
    facts = {**asdict(recipe), "target": asdict(replace(target, name="")), "prompts": prompts.digest()}
    del facts["trust_remote_code"]
    return {**facts, "hidden_layers": list(layers)}


def target_config(recipe: CorpusRecipe, limits: EngineLimits, layers: Sequence[int]) -> TargetConfig:
    """Configuration section of the engine."""
    return TargetConfig(
        model=recipe.target,
        dtype="float32",
        max_batch=limits.max_batch,
        max_step_tokens=max(512, limits.max_batch),
        kv_cache_gb=limits.kv_cache_gb,
        trust_remote_code=recipe.trust_remote_code,
        hidden_layers=list(layers),
    )


class Corpus:
    """The parts of one corpus folder, recorded as far as they are needed."""

    def __init__(
        self, recipe: CorpusRecipe, prompts: Prompts, folder: Path, limits: EngineLimits, console: Console
    ) -> None:
        self._recipe, self._prompts, self.limits, self._console = recipe, prompts, limits, console
        present = {TRAIN: bool(prompts.train), HELD_OUT: True, GREEDY: recipe.temperature > 0.0}
        self.stores = {part: RecordStore(folder, part) for part, is_there in present.items() if is_there}
        self.records: dict[str, list[CorpusRecord]] = {}
        self.speed: dict[str, float] = {}
        """Part recorded by this object → output tokens per second."""

    def collect(self, hidden_layers: Sequence[int], tokens: int | None) -> None:
        """Record missing rollouts; the target is loaded only if there are any."""
        engine: Any = None
        for part, store in self.stores.items():
            requests = requests_of(part, self._prompts, self._recipe)
            missing = any(request.index not in store for request in requests)
            have = sum(len(record.output_token_ids) for record in store.records())
            budget = tokens if part == TRAIN else None
            if missing and (budget is None or have < budget):
                engine = engine or self._make_engine(hidden_layers)
                most = len(requests) * self._recipe.max_tokens
                with PhaseProgress(self._console, f"rollouts, {part}", min(budget or most, most)) as progress:
                    limit = self.limits.max_batch
                    found = collect(engine, requests, store, budget, limit, show_tokens(progress))
                    self.speed[part] = progress.rate
            else:
                found = shortest_beginning(requests, store, budget)
            if not found:
                raise InputError(f"the target {self._recipe.target} failed on every prompt ({part}); see the log")
            self.records[part] = found
        if engine is not None:
            engine.close()

    def held_out(self) -> dict[str, Sequence[CorpusRecord]]:
        return {part: self.records[part] for part in (HELD_OUT, GREEDY) if part in self.records}

    def _make_engine(self, hidden_layers: Sequence[int]) -> Any:
        from specactor_ray.target.hf import HfEngine

        engine = HfEngine.from_config(target_config(self._recipe, self.limits, hidden_layers), self.limits.device)
        longest = max(map(len, (*self._prompts.train, *self._prompts.held_out))) + self._recipe.max_tokens
        if engine.max_model_len < longest:
            raise InputError(
                f"--kv-cache-gb: the cache holds {engine.max_model_len} tokens, and the longest rollout may take "
                f"{longest}. Fix: a larger cache, or a lower --max-tokens"
            )
        return engine
