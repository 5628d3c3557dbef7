"""Target engine over a transformers model: continuous batching, chunked prefill, packed verification.

A step is `admit → plan → forward → verify → commit`. The plan gives every admitted request its pending tokens (the part
of prompt and output that is not in the cache yet; one token while decoding) and, once those fit, its draft tail. The
model runs all of it as one packed sequence. A prefix in the cache, of a running or an ended request, is not computed
again. On GPUs most steps are captured, with the sampler behind the forward.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.device import to_device
from specactor_ray.core.errors import InputError
from specactor_ray.core.ragged import begins, places
from specactor_ray.core.types import TopTokens
from specactor_ray.models.captured import Captured, CudaCapturer, StaticBatch, capturer_for
from specactor_ray.models.layers import sleep, wake
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.models.shapes import longest_tail
from specactor_ray.sampling.keyed import Found, verify_arrays, verify_on_device, warm_up
from specactor_ray.sampling.probable import most_probable, prompt_scores
from specactor_ray.table.requests import Finish
from specactor_ray.table.table import RequestTable
from specactor_ray.target.admission import Admission
from specactor_ray.target.base import NO_DRAFTS, Drafts, StepResult
from specactor_ray.target.rows import commit, cut, export, fewest_first
from specactor_ray.transport.messages import States

_MOST_SCORED = 512
"""Most positions of a prompt per forward when its log-probabilities are computed: all their logits are in memory."""


class _Plan(NamedTuple):
    """Inputs of `n` rows to this step's forward: context tokens, then draft tokens. Decoding rows come first."""

    rows: np.ndarray
    """int32 `(n,)`: rows of the requests."""
    cached: np.ndarray
    """`(n,)`: number of context tokens in the cache."""
    context: np.ndarray
    """`(n,)`: number of context tokens in this forward."""
    samples: np.ndarray
    """bool `(n,)`: whether all pending tokens are included, so that this step samples for the row."""
    drafted: np.ndarray
    """`(n,)`: number of draft tokens; 0 where the row does not sample."""
    firsts: np.ndarray
    """`(n,)`: begin of the row's draft tokens in the tokens of the drafts."""
    scored: np.ndarray
    """`(n,)`: number of context tokens in this forward that precede a prompt token, for rows in `HfEngine._scores`."""

    @property
    def sampled(self) -> np.ndarray:
        """`(n,)`: number of positions at which tokens are sampled, the last ones of each row."""
        return np.where(self.samples, 1 + self.drafted, 0)


class _CapturedSteps(Captured):
    """Captured steps: forward, sampler and comparison of drafts, with one copy up, one launch and one copy down.
    `ranks`: as in `verify_arrays`; the other sizes are those of `Captured`."""

    def __init__(
        self, model: RaggedModel, capturer: CudaCapturer, ranks: int, rows: int, tokens: int, longest: int
    ) -> None:
        self._model, self._ranks = model, ranks
        most = rows * (2 + 3 * (1 + longest_tail(1)))
        self._found = torch.zeros(most, dtype=torch.int64, device=model.device)
        extras = (np.zeros(size, np.int64) for size in (rows, rows + 1, tokens, rows))
        """Begin of each row's logits and of its drafts, drafts, positions."""
        super().__init__(model.cache, capturer, "The engine", rows, tokens, longest, *extras)

    @torch.inference_mode()
    def run(
        self, batch: StaticBatch, cache_rows: np.ndarray, counts: np.ndarray, drafted: np.ndarray, tokens: np.ndarray,
        tails: np.ndarray, positions: np.ndarray, rules: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        """Run the batch that was found for `counts` and `drafted`, int64 `(n,)`, with the drafts `tails` among the
        `tokens` of all rows. `positions` and `rules`, `(n,)`, are those of the first token that each row samples.
        Returns the buffer of `Found`, which means nothing for rows that do not sample."""
        cache, n, ends = self._model.cache, len(counts), begins(drafted)
        places_of, lengths = places(cache.lengths[cache_rows], counts), cache.lengths[cache_rows] + counts
        ends = np.concatenate([ends, np.full(batch.rows - n, ends[-1])])  # missing rows draft nothing
        extras = counts.cumsum() - 1 - drafted, ends, tails, positions
        self.load(batch, cache_rows, counts, tokens, places_of, lengths, rules, *extras)
        batch.replay()
        cache.lengths[cache_rows] = lengths
        return self._capturer.fetch(self._result(batch)[:n])

    def _result(self, batch: StaticBatch) -> torch.Tensor:
        """int64 `(R, columns)`: the buffer of `Found`."""
        columns = 2 + 3 * (1 + batch.longest)
        return self._found[: batch.rows * columns].view(batch.rows, columns)

    def _step(self, batch: StaticBatch) -> None:
        logits, _ = self._model.step(batch, batch.tokens, batch.positions)
        (firsts, ends, tails, positions), n = batch.extras, batch.rows
        rows = firsts[:n], ends[: n + 1], tails[: batch.num_tokens], batch.longest, positions[:n]
        self._result(batch).copy_(verify_on_device(logits, *rows, batch.sampling, self._ranks))


class HfEngine:
    """`TargetEngine` over a `RaggedModel`, which it owns with its cache. `eos_token_ids` end an output unless the
    request ignores them; `capturer`: of decode steps, None takes CUDA graphs on GPUs, and no capture on CPUs; the other
    arguments are keys of `target` (`config/schema.py`).

    Eager are steps with log-probabilities of prompts or of the most probable tokens, and those for which
    `step_sizes` has no size: more tokens of prompts than in any, or a longer tail than `longest_tail`.
    """

    def __init__(
        self,
        model: RaggedModel,
        eos_token_ids: Sequence[int] = (),
        max_model_len: int | None = None,
        max_batch: int = 16,
        max_step_tokens: int = 512,
        record_margins: bool = False,
        capturer: CudaCapturer | None = None,
    ) -> None:
        self._model = model
        self.vocab_size = model.vocab_size
        self.max_step_tokens = max(max_step_tokens, max_batch)
        longest = min(max_model_len or model.max_positions, model.max_positions, model.cache.slots)
        warm_up(model.device, model.dtype, 1 + record_margins)
        self._decode: _CapturedSteps | None = None
        if (capturer := capturer or capturer_for(model.device)) is not None:
            most = max_batch, self.max_step_tokens, longest
            self._decode = _CapturedSteps(model, capturer, 1 + record_margins, *most)
        self.max_model_len = min(longest, model.cache.free_slots)  # captured steps keep a page
        self.record_margins = record_margins
        self.weight_version, self.exports = 0, bool(model.cache.states.shape[1])
        self._asleep = False
        self.table = RequestTable(
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=eos_token_ids,
            device=model.device,
        )
        self._admission = Admission(self.table, model.cache, max_batch)
        self._scores: dict[int, np.ndarray] = {}
        """Row → requested log-probabilities of its prompt's tokens from the second on."""

    @classmethod
    def from_config(cls, config: TargetConfig, device: str = "cpu") -> Self:
        """Load the configured model; `config` has a data type and a cache size. Raises ModelLoadError."""
        from specactor_ray.models.loading import eos_token_ids, load_model

        trust, longest = config.trust_remote_code, config.max_model_len
        loaded = load_model(
            config.model, dtype=config.dtype, device=device, trust_remote_code=trust, max_model_len=longest
        )
        eos = eos_token_ids(loaded.generation_config, loaded.config)
        ragged = RaggedModel(loaded, int(config.kv_cache_gb * 2**30), config.hidden_layers, config.batch_invariant)
        return cls(ragged, eos, config.max_model_len, config.max_batch, config.max_step_tokens, config.record_margins)

    # ---- requests ----

    def add(self, row: int) -> None:
        self._admission.add(row)
        if self.table.requests[row].sampling.prompt_logprobs:
            self._scores[row] = np.zeros((int(self.table.prompts[row]) - 1, 3), np.float32)

    def remove(self, row: int) -> None:
        self._scores.pop(row, None)
        self._admission.remove(row)

    def decoding(self) -> np.ndarray:
        rows, cached = self._admission.admitted()
        decoding: np.ndarray = rows[self.table.lengths[rows] - cached == 1]
        return decoding

    def has_work(self) -> bool:
        return len(self._admission) > 0

    def close(self) -> None:
        for row in self._admission.rows():
            self.remove(row)
        self._admission.prefixes.clear()
        if self._decode is not None:
            self._decode.release()
        self._model.cache.release()
        del self._model, self._decode

    def load_weights(self, version: int, state_dict: Mapping[str, Any]) -> None:
        self._model.load_weights(state_dict)
        self.weight_version = version
        self._admission.prefixes.clear()
        self._model.cache.truncate(self._admission.cache_rows(self._admission.admitted()[0]), 0)

    def prompt_logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        model, parts = self._model, list[np.ndarray]()
        if (row := model.cache.open(len(token_ids))) is None:
            self.reset_prefix_cache()
            if (row := model.cache.open(len(token_ids))) is None:
                raise InputError(f"the cache has no room for {len(token_ids)} tokens beside its requests")
        for begin in range(0, len(token_ids) - 1, _MOST_SCORED):
            inputs, targets = (token_ids[at : at + _MOST_SCORED] for at in (begin, begin + 1))
            inputs = inputs[: len(targets)]
            count = np.array([len(inputs)])
            parts.append(prompt_scores(model.forward(np.array([row]), count, inputs, count), targets)[:, 0])
        model.cache.free(row)
        return np.concatenate(parts or [np.zeros(0, np.float32)])

    def reset_prefix_cache(self) -> None:
        self._admission.prefixes.clear()

    def sleep(self, keep_weights: bool = True) -> None:
        if self.has_work():
            raise InputError("the engine cannot sleep while requests are running")
        self._asleep = True
        self._admission.prefixes.clear()
        if self._decode is not None:
            self._decode.release()
        sleep(self._model.model, self._model.cache)

    def wake(self) -> None:
        if self._asleep:
            wake(self._model.model, self._model.cache)
            if self._decode is not None:
                self._decode.prepare()
            self._asleep = False

    def states(self, rows: np.ndarray, starts: np.ndarray, most: int) -> States:
        cache, known = self._model.cache, np.minimum(self._admission.num_cached(rows), self.table.lengths[rows] - 1)
        chosen, lengths = fewest_first(known, starts, most)
        rows, starts = rows[chosen], starts[chosen]
        pages = cache.page_table(self._admission.cache_rows(rows), starts + lengths)
        places = to_device([cache.slots_of(pages, starts, lengths)], cache.device)
        return States(rows, starts, lengths, cache.states.index_select(0, *places))

    # ---- the step ----

    def step(self, drafts: Drafts = NO_DRAFTS, window: int = 0) -> StepResult:
        self._admission.admit(alone=self._scores)  # log-probabilities of prompts need every position
        plan = self._plan(drafts)
        if not len(plan.rows):
            return StepResult()
        begin = time.perf_counter()
        counts = plan.context + plan.drafted
        tails = drafts.tokens[places(plan.firsts, plan.drafted)]
        tokens, cache_rows = self._tokens(plan, counts, tails), self._admission.cache_rows(plan.rows)
        rows, drafted = plan.rows[plan.samples], plan.drafted[plan.samples]
        scores, tops = dict[int, np.ndarray](), None
        batch = self._step_for(plan, counts)
        if batch is not None and self._decode is not None:
            positions, rules = self.table.lengths[plan.rows], self.table.rules.table[plan.rows]
            inputs = cache_rows, counts, plan.drafted, tokens, tails, positions, rules
            found = Found(self._decode.run(batch, *inputs)[plan.samples])
            forward_s, sampling_s = time.perf_counter() - begin, 0.0
        else:
            num_logits = np.where(plan.scored > 0, counts, plan.sampled)
            logits = self._model.forward(cache_rows, counts, tokens, num_logits)
            forward_s = time.perf_counter() - begin
            begin = time.perf_counter()
            if plan.scored.any():
                logits, scores = self._score(logits, plan, begins(num_logits))
            found, tops = self._verify(logits, rows, drafted, tails)
            sampling_s = time.perf_counter() - begin
        result = self._commit(rows, drafted, found, tops)
        result.prompt_logprobs = scores
        result.forward_s, result.sampling_s, result.num_tokens = forward_s, sampling_s, int(counts.sum())
        result.num_prefill_tokens = int(plan.context[plan.context > 1].sum())
        return result

    def _step_for(self, plan: _Plan, counts: np.ndarray) -> StaticBatch | None:
        """The captured step for a plan; None: it is eager."""
        rules = self.table.rules
        if self._decode is None or plan.scored.any() or (rules.any_tops and rules.tops[plan.rows].any()):
            return None
        return self._decode.find(counts, int(plan.drafted.max()))

    def _plan(self, drafts: Drafts) -> _Plan:
        """Plan a step: decoding rows first, with one token each; then their tails; prefill chunks fill the rest."""
        rows, cached = self._admission.admitted()
        pending = self.table.lengths[rows] - cached
        order = np.argsort(pending > 1, kind="stable")
        rows, cached, pending = rows[order], cached[order], pending[order]
        decoding = int(np.count_nonzero(pending == 1))
        budget = self.max_step_tokens - decoding
        firsts, drafted = np.zeros((2, len(rows)), np.int64)
        firsts[:decoding], drafted[:decoding] = cut(self.table, rows[:decoding], drafts, self.max_model_len, budget)
        budget += decoding - int(drafted.sum())
        unscored, most = np.zeros(len(rows), np.int64), pending
        if self._scores:
            scores = np.array([len(self._scores.get(row, ())) for row in rows.tolist()])
            unscored = np.maximum(scores - cached, 0)
            most = np.where(unscored > 0, np.minimum(pending, _MOST_SCORED), pending)
        context = np.clip(budget - (np.cumsum(most) - most), 0, most)
        planned = (context > 0) & self._admission.reserve(rows, cached + context, drafted)
        plan = _Plan(rows, cached, context, context == pending, drafted, firsts, np.minimum(unscored, context))
        return _Plan(*(column[planned] for column in plan))

    def _tokens(self, plan: _Plan, counts: np.ndarray, tails: np.ndarray) -> np.ndarray:
        """Input tokens of the plan, int32, row by row."""
        tokens, offsets = np.empty(counts.sum(), np.int32), begins(counts)[:-1]
        context = self.table.lines[np.repeat(plan.rows, plan.context), places(plan.cached, plan.context)]
        tokens[places(offsets, plan.context)] = context
        tokens[places(offsets + plan.context, plan.drafted)] = tails
        return tokens

    def _score(self, logits: Any, plan: _Plan, offsets: np.ndarray) -> tuple[Any, dict[int, np.ndarray]]:
        """Compute log-probabilities of prompts' tokens; `offsets`: begin of each row's logits. Returns the logits of
        the positions at which tokens are sampled, and the rows whose prompts are complete."""
        complete = dict[int, np.ndarray]()
        for i in np.flatnonzero(plan.scored).tolist():
            row, begin, count = int(plan.rows[i]), int(plan.cached[i]), int(plan.scored[i])
            tokens = self.table.lines[row, begin + 1 : begin + 1 + count]
            part = logits[offsets[i] : offsets[i] + count]
            self._scores[row][begin : begin + count] = prompt_scores(part, tokens)
            if begin + count == len(self._scores[row]):
                complete[row] = self._scores[row].copy()
        sampled = places(offsets[1:] - plan.sampled, plan.sampled)
        return logits[sampled], complete

    def _verify(
        self, logits: Any, rows: np.ndarray, drafted: np.ndarray, tails: np.ndarray
    ) -> tuple[Found, TopTokens | None]:
        offsets, positions = begins(drafted), self.table.lengths[rows].astype(np.int64)
        firsts = offsets[:-1] + np.arange(len(rows))
        rules, margins = self.table.rules, self.record_margins
        found = verify_arrays(logits, firsts, offsets, tails, positions, rows, rules, 1 + margins)
        return found, most_probable(logits, firsts, found, rows, rules)

    def _commit(self, rows: np.ndarray, drafted: np.ndarray, found: Found, tops: TopTokens | None) -> StepResult:
        table, admission = self.table, self._admission
        result = commit(table, rows, drafted, found, self.record_margins, tops)
        if self.exports:
            result.states = export(table, self.states, rows)
        running = rows[result.finish == Finish.RUNNING]
        self._model.cache.truncate(admission.cache_rows(running), table.lengths[running] - 1)
        for row, finish in zip(rows.tolist(), result.finish.tolist(), strict=True):
            if finish == Finish.RUNNING:
                continue
            self._scores.pop(row, None)
            if finish == Finish.ERROR:
                admission.discard(row)
            else:
                admission.release(row, int(table.lengths[row]) - 1)
        return result
