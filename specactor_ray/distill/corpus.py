"""The corpus: the target's own rollouts, recorded on disk so that a killed collection can continue. It is a function of
its recipe, since seeds are keyed; existing parts are never made again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.errors import InputError
from specactor_ray.core.files import parse_json, read_foreign, replacing, write_json
from specactor_ray.core.progress import PhaseProgress, show_tokens
from specactor_ray.core.types import SamplingParams
from specactor_ray.distill.card import DrafterRecipe
from specactor_ray.models.shapes import model_identity
from specactor_ray.models.weight_buckets import from_wire, to_wire
from specactor_ray.sampling.seeds import derive_seed
from specactor_ray.table.requests import Finish, TargetRequest
from specactor_ray.target.base import StepResult, TargetEngine

logger = logging.getLogger(__name__)

TokenIds = tuple[int, ...]
TRAIN, HELD_OUT, GREEDY = "train", "heldout", "heldout-greedy"
"""Parts of a corpus: rollouts to train on; held-out ones at the same temperature; held-out ones at temperature 0."""
_HELD_OUT_SEED = 1
_MOST_HELD_OUT = 32


@dataclass(frozen=True, slots=True)
class CorpusRecord:
    """One recorded rollout."""

    index: int
    """Number of its request within its part of the corpus."""
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    sampling: SamplingParams
    path: Path = field(compare=False)
    """File with the output and its hidden states."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def states(self) -> np.ndarray:
        """`(tokens - 1, width)`: hidden states of the target, row i of position i, including the prompt."""
        with safe_open(self.path, framework="pt") as file:
            states: np.ndarray = file.get_tensor("states").float().numpy()
        return states


class RecordStore:
    """Rollouts of some requests: a safetensors file each, complete or absent, in a folder that is created with the
    first one. A file holds the output and the target's hidden states, which stay on disk until they are read."""

    def __init__(self, requests: Sequence[TargetRequest], folder: Path, part: str) -> None:
        self.requests, self._folder, self._part = requests, folder, part
        self.known: dict[int, CorpusRecord] = {}
        """Index of the request → record."""
        for path in sorted(folder.glob(f"{part}-[0-9]*.safetensors")):
            with reading(path), safe_open(path, framework="pt") as file:
                self._keep(int(path.stem.rpartition("-")[2]), file.get_tensor("output").tolist(), path)

    def num_tokens(self, before: int | None = None) -> int:
        """Number of recorded output tokens, of the requests before this one or of all."""
        known = self.known.items()
        return sum(len(one.output_token_ids) for index, one in known if before is None or index < before)

    def missing(self, token_budget: int | None) -> list[int]:
        """Indices of the requests without a record; none if the records before the first of them fill the budget."""
        left = [index for index in range(len(self.requests)) if index not in self.known]
        is_short = left and (token_budget is None or self.num_tokens(left[0]) < token_budget)
        return left if is_short else []

    def add(self, index: int, output: Sequence[int], states: np.ndarray) -> None:
        """Add a record, and write it. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._part}-{index:06d}.safetensors"
        with replacing(path, path.with_suffix(".partial")) as partial:
            save_file({"output": torch.tensor(output, dtype=torch.int32), "states": _as_stored(states)}, partial)
        self._keep(index, output, path)

    def beginning(self, token_budget: int | None) -> list[CorpusRecord]:
        """Records of the first requests, as many as fill the budget of output tokens (None: all); failed requests are
        skipped."""
        tokens, found = 0, list[CorpusRecord]()
        for index in sorted(self.known):
            if token_budget is not None and tokens >= token_budget:
                break
            found.append(self.known[index])
            tokens += len(found[-1].output_token_ids)
        return found

    def _keep(self, index: int, output: Sequence[int], path: Path) -> None:
        request = self.requests[index]
        self.known[index] = CorpusRecord(index, request.prompt_token_ids, tuple(output), request.sampling, path)


@dataclass(slots=True)
class _Running:
    index: int
    tokens: list[int] = field(default_factory=list)
    states: list[np.ndarray] = field(default_factory=list)


def collect(
    engine: TargetEngine,
    store: RecordStore,
    token_budget: int | None = None,
    max_open: int = 64,
    on_progress: Callable[[int], None] | None = None,
) -> list[CorpusRecord]:
    """Roll out the store's requests in their order until `token_budget` output tokens are recorded (None: all of them),
    and return the records that fill it. Existing records are not made again, and the result does not depend on the
    point of an interruption.

    The engine must be a fresh one that exports hidden states; at most `max_open` requests are in it. `on_progress` is
    called with the number of output tokens so far.
    """
    waiting = deque(store.missing(token_budget))
    budget = float("inf") if token_budget is None else token_budget
    running: dict[int, _Running] = {}
    while True:
        underway = sum(len(entry.tokens) for entry in running.values())  # all before the first that waits
        while waiting and len(running) < max_open and store.num_tokens(waiting[0]) + underway < budget:
            index = waiting.popleft()
            row = engine.table.open(store.requests[index])
            engine.add(row)
            running[row] = _Running(index)
        if not running:
            break
        result = engine.step()
        _take(result, running, store)
        for row in result.rows[result.finish != Finish.RUNNING].tolist():
            engine.table.close(row)
        if on_progress is not None:
            on_progress(store.num_tokens() + sum(len(entry.tokens) for entry in running.values()))
    return store.beginning(token_budget)


def _take(result: StepResult, running: dict[int, _Running], store: RecordStore) -> None:
    """Record the requests that have ended."""
    assert result.states is not None  # the engine exports them
    for row, _, states in result.states.split():
        running[row].states.append(to_wire(states))
    for row, tokens, finish in result.outputs():
        entry = running[row]
        entry.tokens += tokens
        if finish is Finish.RUNNING:
            continue
        del running[row]
        if finish is Finish.ERROR:
            logger.warning("rollout %d failed and is left out: %s", entry.index, result.errors[row])
            continue
        store.add(entry.index, entry.tokens, np.concatenate(entry.states))


def _as_stored(states: np.ndarray) -> torch.Tensor:
    """Hidden states in half precision, which halves the corpus and changes logits by less than a thousandth; in full
    precision if a state is beyond its range."""
    whole = from_wire(states)
    half = whole.half()
    return half if bool(half.isfinite().all()) else whole.float()


# ---- the rollouts of a recipe ----


@dataclass(frozen=True, slots=True)
class Prompts:
    """Encoded prompts to train on and to measure on; no prompt is in both."""

    train: tuple[TokenIds, ...]
    held_out: tuple[TokenIds, ...]

    def digest(self) -> str:
        """Digest that identifies the set of prompts."""
        text = json.dumps([self.train, self.held_out]).encode()
        return hashlib.blake2b(text, digest_size=8).hexdigest()


def split_prompts(prompts: Sequence[TokenIds], held_out: Sequence[TokenIds] | None, max_prompt: int) -> Prompts:
    """Divide prompts; those longer than `max_prompt` tokens and repetitions are left out. Without `held_out` every
    tenth is held out, at most 32. Raises InputError if nothing is left to train or to measure on."""
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


def requests_of(part: str, prompts: Prompts, recipe: DrafterRecipe) -> list[TargetRequest]:
    """Rollouts of one part in the order of their making: a sample of every prompt, then the next of each."""
    chosen, samples = (prompts.train, recipe.samples) if part == TRAIN else (prompts.held_out, 1)
    temperature = 0.0 if part == GREEDY else recipe.temperature
    run_seed = recipe.seed if part == TRAIN else derive_seed(recipe.seed, _HELD_OUT_SEED, 0)
    requests = []
    for sample in range(samples):
        for index, prompt in enumerate(chosen):
            seed = derive_seed(run_seed, index, sample)
            sampling = SamplingParams(temperature=temperature, max_tokens=recipe.max_tokens, seed=seed)
            requests.append(TargetRequest(f"{part}-{sample}-{index}", prompt, sampling))
    return requests


def target_config(recipe: DrafterRecipe, layers: Sequence[int] = ()) -> TargetConfig:
    """Configuration section of the engine that rolls out."""
    return TargetConfig(
        model=recipe.target,
        dtype="float32",
        max_batch=recipe.max_batch,
        max_step_tokens=max(512, recipe.max_batch),
        kv_cache_gb=recipe.kv_cache_gb,
        trust_remote_code=recipe.trust_remote_code,
        hidden_layers=list(layers),
    )


class Corpus:
    """The parts of one corpus folder, with the hidden states of some layers, recorded as far as they are needed. Raises
    InputError if the folder has other rollouts, or is no corpus."""

    def __init__(
        self,
        recipe: DrafterRecipe,
        prompts: Prompts,
        layers: Sequence[int],
        folder: Path,
        console: Console,
    ) -> None:
        target = model_identity(recipe.target, "float32", recipe.trust_remote_code)["config_hash"]
        facts = {**recipe.rollout_facts(), "target": target, "prompts": prompts.digest()}
        claim_folder(folder, folder / "corpus.json", {**facts, "hidden_layers": list(layers)}, "corpus")
        self.recipe, self._prompts, self._layers, self._console = recipe, prompts, layers, console
        parts = (TRAIN, HELD_OUT, GREEDY) if recipe.temperature > 0.0 else (TRAIN, HELD_OUT)
        self._stores = {part: RecordStore(requests_of(part, prompts, recipe), folder, part) for part in parts}
        self.records: dict[str, list[CorpusRecord]] = {}
        """Part → records, in the order of their requests."""

    def collect(self, tokens: int) -> None:
        """Record missing rollouts; the target is loaded only if there are any. `tokens` limits the training part."""
        engine: Any = None
        for part, store in self._stores.items():
            budget = tokens if part == TRAIN else None
            if store.missing(budget):
                engine = engine or self._make_engine()
                most = len(store.requests) * self.recipe.max_tokens
                with PhaseProgress(self._console, f"rollouts, {part}", min(budget or most, most)) as progress:
                    collect(engine, store, budget, self.recipe.max_batch, show_tokens(progress))
            self.records[part] = store.beginning(budget)
            if not self.records[part]:
                raise InputError(f"the target {self.recipe.target} failed on every prompt ({part}); see the log")
        if engine is not None:
            engine.close()

    def held_out(self) -> dict[str, Sequence[CorpusRecord]]:
        return {part: self.records[part] for part in (HELD_OUT, GREEDY) if part in self.records}

    def _make_engine(self) -> Any:
        from specactor_ray.target.hf import HfEngine

        engine = HfEngine.from_config(target_config(self.recipe, self._layers), self.recipe.device)
        longest = max(map(len, (*self._prompts.train, *self._prompts.held_out))) + self.recipe.max_tokens
        if engine.max_model_len < longest:
            raise InputError(
                f"kv_cache_gb: the cache holds {engine.max_model_len} tokens, and the longest rollout may take "
                f"{longest}. Fix: a larger cache, or a lower max_tokens"
            )
        return engine


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of a damaged file into an InputError."""
    try:
        yield
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} is damaged ({error}). Fix: remove it, or name another folder") from None


def claim_folder(folder: Path, note: Path, facts: dict[str, Any], kind: str) -> None:
    """Create a folder and record the facts that determine its content in a file `note` inside, or check those of an
    existing one. Raises InputError if it has other facts, holds other files, or cannot be written to."""
    if note.is_file():
        with reading(note):
            there, wanted = dict(parse_json(read_foreign(note))), json.loads(json.dumps(facts))
        differing = [
            f"{key} {there.get(key)!r} there, {wanted.get(key)!r} wanted"
            for key in sorted({*there, *wanted})
            if there.get(key) != wanted.get(key)
        ]
        if differing:
            raise InputError(
                f"{folder} holds a {kind} of another recipe ({'; '.join(differing)}). Fix: name another folder, or "
                "repeat its own options to go on with it"
            )
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and holds no {kind}. Fix: name another folder")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_json(note, facts)
    except OSError as error:
        raise InputError(f"{folder} cannot be written to ({error.strerror})") from None
