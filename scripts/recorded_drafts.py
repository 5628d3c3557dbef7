"""Outputs of a target with the draft of every method at every position, and decoding with them by the product's policy.

Outputs are drawn by the `hf` engine with keyed noise, so they are those of any run with or without drafts. Proposers
are the product's, and follow the outputs token by token: a draft is made from the committed tokens alone. Decoding
with the recorded drafts repeats the decisions of a coupled verifier without a model.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from specactor_ray.config.methods import Checkpoint, DrafterSpec, traits
from specactor_ray.config.schema import RaceName, SpeculationConfig, TargetConfig, VerifyPolicy
from specactor_ray.core.files import replacing
from specactor_ray.core.step_cost import StepCost
from specactor_ray.core.types import SamplingParams
from specactor_ray.distill.corpus import CorpusRecord, RecordStore, collect
from specactor_ray.distill.evaluation import Step, replay
from specactor_ray.draft.eagle.checkpoint import read_head_config
from specactor_ray.draft.proposer import Proposer, build_proposer
from specactor_ray.models.loading import load_model, load_tokenizer
from specactor_ray.models.ragged_model import HEAD_INPUT
from specactor_ray.rollout.prompts import encode_prompt, read_prompts
from specactor_ray.sampling.seeds import derive_seed
from specactor_ray.table._kernels import Committed
from specactor_ray.table.requests import TargetRequest
from specactor_ray.table.table import RequestTable
from specactor_ray.target.hf import HfEngine
from specactor_ray.verify.acceptance import Acceptance
from specactor_ray.verify.drafting import warm_up
from specactor_ray.verify.policy import Drafter, DraftPolicy, Seconds

WINDOW = 8
TEMPERATURES = (0.0, 0.6, 1.0)
NONE, WRONG = -1, -2
"""No draft token; one behind a wrong one, which was not drafted."""
_LONGEST_PROMPT = 512
_AT_ONCE = 64
"""Most requests in the engine and in a proposer."""


@dataclass(frozen=True)
class Recorded:
    """`n` output tokens of a workload at one temperature, one output behind the other."""

    most: int
    """Most tokens of an output."""
    lengths: np.ndarray
    """int64 `(outputs,)`."""
    tokens: np.ndarray
    """int32 `(n,)`."""
    entropy: np.ndarray
    """float32 `(n,)`: nats of the distribution of which the token was drawn; at temperature 0 of that of 1."""
    tails: Mapping[str, np.ndarray]
    """Method → int32 `(n, WINDOW)`: its draft where this token is the next one, `NONE` behind its end."""

    @property
    def begins(self) -> np.ndarray:
        """int64 `(outputs,)`: index of the first token of each output."""
        found: np.ndarray = np.cumsum(self.lengths) - self.lengths
        return found

    def right(self, method: str) -> np.ndarray:
        """int32 `(n,)`: number of draft tokens at each position that are right, all before them included."""
        left = np.repeat(self.begins + self.lengths, self.lengths) - np.arange(len(self.tokens))
        column = np.arange(WINDOW)
        truth = self.tokens[np.minimum(np.arange(len(self.tokens))[:, None] + column, len(self.tokens) - 1)]
        same = (self.tails[method] == truth) & (column < left[:, None])
        found: np.ndarray = np.logical_and.accumulate(same, axis=1).sum(axis=1).astype(np.int32)
        return found

    def drafted(self, method: str) -> np.ndarray:
        """int32 `(n,)`: number of draft tokens at each position."""
        found: np.ndarray = (self.tails[method] != NONE).sum(axis=1).astype(np.int32)
        return found


# ---- recording ----


@dataclass(frozen=True)
class Recipe:
    """Models and sizes of recordings. `drafters`: method → model, None for a lookup."""

    target: str
    drafters: Mapping[str, str | None]
    dtype: str = "bfloat16"
    prompts: int = 12
    samples: int = 2
    """Outputs of a prompt, except at temperature 0."""
    max_tokens: int = 160

    @property
    def head(self) -> str | None:
        return self.drafters.get("eagle")


def record(recipe: Recipe, prompts: Path, folder: Path) -> dict[float, Recorded]:
    """Outputs of the first prompts of a file by temperature, with drafts; those that `folder` has are read."""
    files = {temperature: folder / f"{prompts.stem}-{temperature:g}.npz" for temperature in TEMPERATURES}
    if not all(file.is_file() for file in files.values()):
        store = folder / f"{prompts.stem}-outputs"
        records = outputs_of(recipe, prompts, store)
        entropies = _entropies(recipe, records)
        tails = {method: tails_of(recipe, method, records, store / f"{method}.npy") for method in recipe.drafters}
        owners = np.repeat([one.sampling.temperature for one in records], [len(one) for one in entropies])
        for temperature, file in files.items():
            mine = [one.output_token_ids for one in records if one.sampling.temperature == temperature]
            arrays = {method: found[owners == temperature] for method, found in tails.items()}
            arrays["lengths"] = np.array([len(one) for one in mine])
            arrays["tokens"] = np.array([token for one in mine for token in one], np.int32)
            arrays["entropy"] = np.concatenate(entropies)[owners == temperature]
            with replacing(file) as partial, partial.open("wb") as stream:
                np.savez_compressed(stream, most=recipe.max_tokens, **arrays)
        shutil.rmtree(store)
    return {temperature: _read(file) for temperature, file in files.items()}


def _read(file: Path) -> Recorded:
    with np.load(file) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    own = {name: found.pop(name) for name in ("lengths", "tokens", "entropy")}
    return Recorded(int(found.pop("most")), **own, tails=found)


def _layers(recipe: Recipe) -> list[int]:
    """Layers whose hidden states are recorded; the input of the output layer is the last one."""
    head = recipe.head
    return [*(read_head_config(head, recipe.target).exported_layers if head else ()), HEAD_INPUT]


def outputs_of(recipe: Recipe, prompts: Path, store: Path) -> list[CorpusRecord]:
    """Outputs of the first prompts of a file, with hidden states, in the folder `store`; those there are not made
    again."""
    tokenizer, requests = load_tokenizer(recipe.target), list[TargetRequest]()
    encoded = [encode_prompt(tokenizer, prompt, True) for prompt in read_prompts(prompts)[: recipe.prompts]]
    for temperature in TEMPERATURES:
        for index, prompt in enumerate(encoded):
            for sample in range(recipe.samples if temperature else 1):
                seed = derive_seed(0, index, sample)
                sampling = SamplingParams(temperature=temperature, max_tokens=recipe.max_tokens, seed=seed)
                if len(prompt) <= _LONGEST_PROMPT:
                    requests.append(TargetRequest(f"{temperature:g}-{index}-{sample}", prompt, sampling))
    target = TargetConfig(
        model=recipe.target, dtype=recipe.dtype, max_batch=_AT_ONCE, kv_cache_gb=1.0, hidden_layers=_layers(recipe)
    )
    engine = HfEngine.from_config(target)
    records = collect(engine, RecordStore(requests, store, prompts.stem), None, _AT_ONCE)
    engine.close()
    return records


@torch.inference_mode()
def _entropies(recipe: Recipe, records: Sequence[CorpusRecord]) -> list[np.ndarray]:
    """`Recorded.entropy` of each record."""
    model, found = load_model(recipe.target, dtype=recipe.dtype), list[np.ndarray]()
    output_layer = model.get_output_embeddings()
    for one in records:
        states = torch.from_numpy(one.states()[len(one.prompt_token_ids) - 1 :, -output_layer.in_features :])
        logits = output_layer(states.to(model.dtype)).float() / (one.sampling.temperature or 1.0)
        logarithms = torch.log_softmax(logits, dim=-1)
        found.append(-(logarithms.exp() * logarithms).sum(dim=-1).numpy())
    return found


def tails_of(recipe: Recipe, method: str, records: Sequence[CorpusRecord], file: Path) -> np.ndarray:
    """`Recorded.tails` of all records, one behind the other, kept in `file`. The first token of an output has no draft.
    Lookups learn from the outputs of the same temperature."""
    if file.is_file():
        found: np.ndarray = np.load(file)
        return found
    tails = {one.index: np.full((len(one.output_token_ids), WINDOW), NONE, np.int32) for one in records}
    width = read_head_config(recipe.head, recipe.target).feature_size if recipe.head else None
    # The next token of a draft model depends on the text alone, so a draft is right as long as its first tokens are.
    window = 1 if (depends_on_text := traits(method).checkpoint is Checkpoint.MODEL) else WINDOW

    def judge(table: RequestTable, row: int, one: CorpusRecord, tail: Sequence[int], window: int) -> Step:
        at = int(table.committed[row])
        tails[one.index][at, : len(tail)] = tail
        table.length[0, row, 0] = 0  # drafts anew from the next token
        start, length = np.array([[at], [1]], np.int32)
        table.follow(np.array([row], np.int32), start, length, np.array([one.output_token_ids[at]], np.int32))
        return len(tail), 0, 1

    groups = TEMPERATURES if traits(method).keeps_history else (None,)
    for group in groups:
        mine = [one for one in records if group is None or one.sampling.temperature == group]
        replay(proposer_of(recipe, method), mine, window, _AT_ONCE, width=width, judge=judge)
    if depends_on_text:
        tails = {one.index: chained(tails[one.index][:, 0], one.output_token_ids) for one in records}
    with replacing(file) as partial, partial.open("wb") as stream:
        np.save(stream, np.concatenate(list(tails.values())))
    return np.load(file)


def chained(first: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """int32 `(n, WINDOW)`: drafts of which each token is the first one, `(n,)`, at its position, up to a wrong one."""
    size = len(first)
    found = np.full((size + WINDOW, WINDOW), WRONG, np.int32)
    right = np.append(first == np.array(tokens), np.zeros(WINDOW, np.bool_))
    found[:size, 0] = first
    for at in range(size - 1, -1, -1):
        if right[at]:
            found[at, 1:] = found[at + 1, :-1]
    found[:size][first == NONE] = NONE
    return found[:size]


def proposer_of(recipe: Recipe, method: str) -> Proposer:
    """The proposer of a method, as a verifier hosts it."""
    spec = DrafterSpec(method=method, model=recipe.drafters[method], max_batch=_AT_ONCE, window=WINDOW)
    spec = replace(spec, dtype=recipe.dtype, kv_cache_gb=1.0, traits=traits(method))
    return build_proposer(spec, TargetConfig(model=recipe.target, dtype=recipe.dtype), "cpu")


def shorten(target: str, folder: Path) -> Path:
    """A draft model in `folder`, made once: the target without the two layers in the middle."""
    if not (folder / "config.json").is_file():
        model, made = load_model(target), folder.with_suffix(".partial")
        middle = len(model.model.layers) // 2
        del model.model.layers[middle - 1 : middle + 1]
        model.config.num_hidden_layers = len(model.model.layers)
        if getattr(model.config, "layer_types", None):
            del model.config.layer_types[middle - 1 : middle + 1]
        model.save_pretrained(made)
        load_tokenizer(target).save_pretrained(made)
        made.rename(folder)
    return folder


# ---- decoding ----


@dataclass(frozen=True)
class Prices:
    """Seconds of a verify step by its positions, `(positions + 1,)`, and of a draft token of all rows by method, 0 for
    lookups. The product's policy verifies and drafts what pays."""

    verify: np.ndarray
    draft: Mapping[str, float]


class _KnownCost(StepCost):
    """Seconds of steps that are known, not learned."""

    is_known = True

    def __init__(self, seconds: np.ndarray) -> None:
        super().__init__()
        self._known_s = seconds

    def record(self, num_tokens: int, seconds: float) -> None:
        pass

    def curve(self, num_rows: int, most: int) -> np.ndarray:
        return self._known_s[num_rows : num_rows + most + 1]

    def difference(self, num_tokens: int, fewer: int) -> float:
        return float(self._known_s[num_tokens] - self._known_s[fewer])


@dataclass
class Decoded:
    """Totals of decoding: steps of rows, committed tokens, draft tokens that were verified and those that the target's
    tokens have tested, right ones, seconds."""

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    tested: int = 0
    right: int = 0
    seconds: float = 0.0

    @property
    def length(self) -> float:
        """Acceptance length."""
        return self.tokens / max(self.steps, 1)

    @property
    def chance(self) -> float:
        """Share of draft tokens that are right, of those behind right ones."""
        return self.right / max(self.tested, 1)

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class _Decoding:
    """Recorded outputs, `rows` at a time, through the table and the policy of a verifier."""

    def __init__(self, recorded: Recorded, methods: Sequence[str], prices: Prices | None, rows: int) -> None:
        warm_up()
        self.recorded, self.methods, self.prices, self.rows = recorded, methods, prices, rows
        self.right, self.have = np.zeros((2, max(len(methods), 1), len(recorded.tokens)), np.int32)
        self.table, self.acceptance = RequestTable(WINDOW), Acceptance()
        self.table.fit_seats(max(len(methods), 2))
        verify = VerifyPolicy.auto if prices else VerifyPolicy.all
        config = SpeculationConfig(window=WINDOW, race=RaceName.always, verify=verify)
        seconds = prices.verify if prices else np.ones(1 + rows * (1 + WINDOW))
        drafters = dict[int, Drafter]()
        for seat, method in enumerate(methods):
            self.right[seat], self.have[seat] = recorded.right(method), recorded.drafted(method)
            self.table.clear_seat(seat, self.acceptance.number(method))
            spec = DrafterSpec(method=method, window=WINDOW, max_batch=rows, traits=traits(method))
            drafters[seat] = Drafter(method, spec, prices.draft[method] if prices else 0.0, hosted=True)
        self.policy = DraftPolicy(config, self.table, self.acceptance, _KnownCost(seconds), drafters)
        self.total, self._seconds = Decoded(), seconds

    def run(self, oracle: bool = False) -> Decoded:
        recorded, table = self.recorded, self.table
        waiting = deque(np.flatnonzero(recorded.lengths > 1).tolist())
        begins, ends = np.zeros((2, self.rows), np.int64)
        while waiting or len(table):
            while waiting and len(table) < self.rows:
                output = waiting.popleft()
                first = int(recorded.tokens[recorded.begins[output]])
                request = TargetRequest(str(output), (0,), SamplingParams(max_tokens=recorded.most), (first,))
                row = table.open(request)
                begins[row], ends[row] = recorded.begins[output], recorded.lengths[output]
                for seat in range(len(self.methods)):
                    table.assign(seat, row)
            rows = np.array(list(table.requests), np.int32)
            self._step(rows, begins[rows], ends[rows], oracle)
            for row in rows[table.committed[rows] >= ends[rows]].tolist():
                table.close(row)
        return self.total

    def _step(self, rows: np.ndarray, begins: np.ndarray, ends: np.ndarray, oracle: bool) -> None:
        table, total = self.table, self.total
        committed = table.committed[rows]
        at, left = begins + committed, (ends - committed).astype(np.int32)
        seats, lengths, drafting_s = (self._best if oracle else self._chosen)(rows, at)
        accepted = np.where(seats >= 0, np.minimum(self.right[seats, at], lengths), 0).astype(np.int32)
        counts = np.minimum(accepted + 1, left).astype(np.int32)
        tokens = [self.recorded.tokens[begin : begin + count] for begin, count in zip(at, counts, strict=True)]
        table.append(rows, counts, np.concatenate(tokens))
        self.acceptance.settle(table, Committed(rows, counts, seats, lengths, accepted))
        positions = len(rows) + int(lengths.sum())
        seconds = drafting_s + float(self._seconds[positions])
        self.policy.record(len(rows), positions, 0, int(accepted.sum()), Seconds(seconds, seconds - drafting_s, 0.0))
        total.steps += len(rows)
        total.tokens += int(counts.sum())
        total.drafted += int(lengths.sum())
        total.tested += int(np.minimum(np.minimum(accepted + 1, lengths), left).sum())
        total.right += int(accepted.sum())
        total.seconds += seconds

    def _chosen(self, rows: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """Seats and verified draft tokens of each row by the policy, and the seconds of drafting."""
        policy, drafting_s = self.policy, 0.0
        self.table.length[:, rows] = 0
        for seat, method in enumerate(self.methods):
            if traits(method).looks_up:
                self._write(seat, rows, at, WINDOW)
        for seat, most in policy.turns(rows).items():
            self._write(seat, rows, at, most)
            spent = most * policy.drafters[seat].token_s
            policy.spent(seat, spent, most, 0)
            drafting_s += spent
        return *policy.choose(rows), drafting_s

    def _best(self, rows: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """The same with the method whose draft is right the longest, the first one of several, and its right tokens
        alone. Models draft as many as the row that uses most."""
        right = np.minimum(self.right[:, at], self.policy._room(rows))
        seats = right.argmax(axis=0).astype(np.int32)
        lengths = right.max(axis=0).astype(np.int32)
        rounds = [int(lengths[seats == seat].max(initial=0)) for seat in range(len(self.methods))]
        drafting_s = sum(rounds[seat] * one.token_s for seat, one in self.policy.drafters.items())
        self.table.length[:, rows] = 0
        return seats, lengths, drafting_s

    def _write(self, seat: int, rows: np.ndarray, at: np.ndarray, most: int) -> None:
        """Let the method write up to `most` tokens of its tails."""
        self.table.tail[seat, rows, 0] = self.recorded.tails[self.methods[seat]][at]
        self.table.length[seat, rows, 0] = np.minimum(self.have[seat, at], most)


def decode(
    recorded: Recorded, methods: Sequence[str], prices: Prices | None = None, rows: int = 1, oracle: bool = False
) -> Decoded:
    """Decode the recorded outputs, `rows` at a time, with the drafts of some methods. Without `prices` whole windows
    are drafted and verified, and a step takes a second. Several methods race in every step. `oracle`: the best of them
    is known at each position."""
    return _Decoding(recorded, methods, prices, rows).run(oracle)


# ---- analysis ----


def by_entropy(recorded: Sequence[Recorded], method: str, bins: int = 10) -> np.ndarray:
    """`(bins, 3)`: mean entropy, share of first draft tokens that are right, and their number, in as many parts of the
    same size; positions without a draft are left out."""
    found = [(one.drafted(method) > 0, one.right(method) > 0, one.entropy) for one in recorded]
    there, right, entropy = (np.concatenate(part) for part in zip(*found, strict=True))
    right, entropy = right[there], entropy[there]
    parts = np.array_split(np.argsort(entropy, kind="stable"), bins)
    return np.array([(entropy[part].mean(), right[part].mean(), len(part)) for part in parts if len(part)])


def line(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Intercept, slope and r² of the straight line of least squares."""
    slope, intercept = np.polyfit(x, y, 1)
    spread = float(((y - y.mean()) ** 2).sum())
    return float(intercept), float(slope), 1.0 - float(((y - intercept - slope * x) ** 2).sum()) / spread
