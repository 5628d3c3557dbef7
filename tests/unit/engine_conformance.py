"""What every target engine must do. A backend's test module subclasses `EngineConformance` and builds the engine.

The oracle is the engine itself without drafts: keyed sampling makes its tokens a function of weights, context, seed
and position, so anything else the engine is put through has to give the same tokens.
"""

from __future__ import annotations

import abc
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specactor_ray.core.errors import InputError
from specactor_ray.core.types import SamplingParams
from specactor_ray.table.requests import Finish, TargetRequest
from specactor_ray.target.base import Drafts, StepResult, TargetEngine
from tests.tiny import tiny_prompt_ids

Tail = Sequence[int]
Guess = Callable[[str, int], Tail]
"""(request id, committed length) → draft tokens."""

seeds = st.integers(0, 2**32)
# Every backend inherits these tests, so an example that failed for one is tried with the next: that is wanted.
few = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.differing_executors])


@dataclass
class Output:
    """What a step committed for one request."""

    request_id: str
    start: int
    token_ids: list[int]
    logprobs: list[float]
    margins: list[float] | None
    num_drafted: int
    num_accepted: int
    finish_reason: str | None
    error: str
    tops: list[list[tuple[int, float]]]
    """The most probable tokens of each position, if they were asked for."""


class Driver:
    """An engine and its table, with requests by name. Other attributes are those of the engine."""

    result = StepResult()
    """Result of the last step."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.table = engine, engine.table
        self.committed: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    @property
    def requests(self) -> dict[int, TargetRequest]:
        return dict(self.table.requests)

    def row(self, request_id: str) -> int:
        return self.table.row_of.get(request_id, 10**4)

    def add(self, request: TargetRequest) -> Finish | None:
        row = self.table.open(request)
        finish: Finish | None = self.table.end_of(row)
        if finish is None:
            self.engine.add(row)
            self.committed[request.request_id] = len(request.committed_token_ids)
        else:
            self.table.close(row)
        return finish

    def remove(self, request_id: str) -> None:
        row = self.row(request_id)
        self.engine.remove(row)
        if row in self.table.requests:
            self.table.close(row)

    def decoding(self) -> list[str]:
        rows = self.engine.decoding()
        assert rows.dtype == np.int32
        return [self.requests[row].request_id for row in rows.tolist()]

    def step(self, tails: Mapping[str, Tail] | None = None) -> list[Output]:
        drafts = Drafts.of({self.row(name): tail for name, tail in (tails or {}).items()})
        self.result = self.engine.step(drafts, 0 if tails is None else 64)
        assert isinstance(self.result, StepResult)
        return list(self._outputs(self.result))

    def _outputs(self, result: StepResult) -> Iterator[Output]:
        integers = (result.rows, result.starts, result.lengths, result.tokens, result.drafted, result.accepted)
        assert all(array.dtype == np.int32 for array in integers) and result.logprobs.dtype == np.float32
        assert len({len(array) for array in (*integers[:3], *integers[4:], result.finish)}) == 1
        assert len(set(result.rows.tolist())) == len(result.rows), "a row comes once"
        assert result.lengths.sum() == len(result.tokens) == len(result.logprobs)
        assert result.margins is None or len(result.margins) == len(result.tokens)
        assert not len(result.finish) or result.finish.dtype == np.uint8
        end, end_of_tops = 0, 0
        for at, (row, tokens, finish) in enumerate(result.outputs()):
            begin, end, name = end, end + len(tokens), self.requests[row].request_id
            assert result.starts[at] == self.committed[name]
            self.committed[name] += len(tokens)
            margins = None if result.margins is None else result.margins[begin:end].tolist()
            tops, end_of_tops = tops_of(result, at, end_of_tops)
            assert bool(tops) == bool(tokens and self.requests[row].sampling.logprobs)
            counts = int(result.drafted[at]), int(result.accepted[at])
            reason, error = None if finish is Finish.RUNNING else finish.reason, result.errors.get(row, "")
            assert self.table.output(row)[self.committed[name] - len(tokens) :].tolist() == tokens
            if reason is not None:
                self.table.close(row)
            logprobs = result.logprobs[begin:end].tolist()
            yield Output(name, int(result.starts[at]), tokens, logprobs, margins, *counts, reason, error, tops)
        assert result.tops is None or end_of_tops == len(result.tops.tokens) == len(result.tops.logprobs)


def tops_of(result: StepResult, at: int, begin: int) -> tuple[list[list[tuple[int, float]]], int]:
    """The most probable tokens of each position of a step's request, and where the next one's begin."""
    if result.tops is None:
        return [], begin
    assert result.tops.counts.dtype == result.tops.tokens.dtype == np.int32 and result.tops.logprobs.dtype == np.float32
    count, length = int(result.tops.counts[at]), int(result.lengths[at])
    pairs = list(zip(result.tops.tokens.tolist(), result.tops.logprobs.tolist(), strict=True))
    firsts = range(begin, begin + count * length, max(count, 1))
    return [pairs[first : first + count] for first in firsts], begin + count * length


class Collected:
    """Outputs of a run, by request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.tops: dict[str, list[list[tuple[int, float]]]] = {}
        self.reasons: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.outputs: list[Output] = []
        self.prompt_logprobs: dict[str, np.ndarray] = {}
        self.states: dict[str, list[tuple[int, Any]]] = {}
        """Per request the first positions and the states of its spans."""
        self.prefilled = 0
        """Prompt positions that were computed."""

    def step(self, engine: Driver, tails: Mapping[str, Tail] | None = None) -> None:
        """One step of the engine."""
        names = {row: request.request_id for row, request in engine.requests.items()}
        outputs, result = engine.step(tails), engine.result
        self.prefilled += result.num_prefill_tokens
        for row, start, states in result.states.split() if result.states is not None else ():
            self.states.setdefault(names[row], []).append((start, states))
        for row, values in result.prompt_logprobs.items():
            assert values.dtype == np.float32
            self.prompt_logprobs[names[row]] = values
        for output in outputs:
            self._take(output)

    def _take(self, output: Output) -> None:
        self.outputs.append(output)
        self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
        self.logprobs.setdefault(output.request_id, []).extend(output.logprobs)
        self.tops.setdefault(output.request_id, []).extend(output.tops)
        assert output.num_accepted <= output.num_drafted
        if output.finish_reason is not None:
            assert output.request_id not in self.reasons, "a request ended twice"
            self.reasons[output.request_id] = output.finish_reason
            self.errors[output.request_id] = output.error


def run(engine: Driver, drafts: Guess | None = None, max_steps: int = 5000) -> Collected:
    """Step until the engine is empty."""
    collected = Collected()
    for _ in range(max_steps):
        if not engine.has_work():
            return collected
        tails = None if drafts is None else {name: drafts(name, engine.committed[name]) for name in engine.decoding()}
        collected.step(engine, tails)
    raise AssertionError("the engine did not finish")


def answers(engine: Driver, batch: Iterable[TargetRequest], drafts: Guess | None = None) -> Collected:
    """Add these requests and step until the engine is empty."""
    for request in batch:
        engine.add(request)
    return run(engine, drafts)


def requests(n: int, temperature: float, max_tokens: int = 48, **sampling: Any) -> list[TargetRequest]:
    """`n` requests of the tiny model's domain with seeds of their own."""
    return [
        TargetRequest(f"r{i}", ids, SamplingParams(temperature, max_tokens=max_tokens, seed=1000 + i, **sampling))
        for i, ids in enumerate(tiny_prompt_ids(n))
    ]


def noisy_tails(truth: Mapping[str, Sequence[int]], seed: int, vocab_size: int) -> Guess:
    """Tails right as far as chance has it, with tokens outside the vocabulary, far too long, or none at all."""
    rng = random.Random(seed)

    def drafts(request_id: str, committed: int) -> Tail:
        tokens = list(truth[request_id][committed:][: rng.randint(0, 6)])
        if tokens and rng.random() < 0.6:
            tokens[rng.randrange(len(tokens))] = rng.randrange(vocab_size)
        if rng.random() < 0.5:
            tokens += [rng.randrange(vocab_size) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.1:
            tokens.insert(rng.randint(0, len(tokens)), rng.choice([-1, vocab_size, 10**9]))
        if rng.random() < 0.02:
            tokens += [rng.randrange(vocab_size) for _ in range(70)]
        return tokens

    return drafts


class EngineConformance:
    """Subclasses define `make_engine(**limits)`: a fresh engine over the tiny model."""

    cuts_bad_drafts = False
    """Whether a draft ends before a token outside the vocabulary."""

    @classmethod
    @abc.abstractmethod
    def make_engine(cls, **limits: Any) -> TargetEngine: ...

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Driver:
        return Driver(cls.make_engine())

    @few
    @given(seed=seeds, temperature=st.sampled_from([0.0, 0.7, 1.0]), filtered=st.booleans())
    def test_tails_of_any_quality_change_no_token(
        self, engine: Driver, seed: int, temperature: float, filtered: bool
    ) -> None:
        filters = {"top_k": 20, "top_p": 0.9} if filtered else {}
        batch = {request.request_id: request for request in requests(5, temperature, max_tokens=32, **filters)}
        truth = answers(engine, list(batch.values()))
        drafts = noisy_tails(truth.tokens, seed, engine.vocab_size)
        handed: dict[tuple[str, int], Tail] = {}

        def noted(request_id: str, committed: int) -> Tail:
            return handed.setdefault((request_id, committed), drafts(request_id, committed))

        drafted = answers(engine, batch.values(), noted)
        assert drafted.tokens == truth.tokens and drafted.reasons == truth.reasons
        for request_id, expected in truth.logprobs.items():
            assert drafted.logprobs[request_id] == pytest.approx(expected, abs=1e-5, rel=1e-5)
        for output in drafted.outputs if self.cuts_bad_drafts else ():
            tail = handed.get((output.request_id, output.start), ())
            room = batch[output.request_id].sampling.max_tokens - output.start - 1
            usable = list(itertools.takewhile(lambda token: 0 <= token < engine.vocab_size, tail[:room]))
            stopped = output.finish_reason == "stop" and output.num_accepted == len(output.token_ids)
            assert output.num_drafted == (output.num_accepted if stopped else len(usable))
            right = truth.tokens[output.request_id][output.start :]
            agreed = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(usable, right, strict=False))
            assert output.num_accepted == len(list(agreed))

    def test_full_match_yields_the_bonus(self, engine: Driver) -> None:
        request = requests(1, 0.0, ignore_eos=True)[0]
        truth = answers(engine, [request]).tokens["r0"]
        collected = answers(engine, [request], lambda rid, done: truth[done : done + 4])
        assert collected.tokens["r0"] == truth
        decode = [output for output in collected.outputs if output.num_drafted == 4]
        assert decode and all(len(output.token_ids) == 5 and output.num_accepted == 4 for output in decode)

    def test_neighbours_and_admission_change_no_token(self, engine: Driver) -> None:
        batch = requests(10, 1.0)
        together = answers(engine, batch)
        alone: dict[str, list[int]] = {}
        for request in batch:
            alone.update(answers(engine, [request]).tokens)
        assert together.tokens == alone
        small = Driver(self.make_engine(max_batch=3))
        assert answers(small, batch).tokens == together.tokens

    def test_chunked_prefill_changes_no_token(self, engine: Driver) -> None:
        batch = requests(6, 1.0)
        chunked = Driver(self.make_engine(max_batch=4, max_step_tokens=5))
        truth = answers(engine, batch)
        assert answers(chunked, batch, noisy_tails(truth.tokens, 1, engine.vocab_size)).tokens == truth.tokens

    def test_a_request_goes_on_from_a_journal(self, engine: Driver) -> None:
        for request in requests(5, 1.0):
            truth = answers(engine, [request])
            tokens = truth.tokens[request.request_id]
            if len(tokens) < 4:
                continue
            half = len(tokens) // 2
            engine.add(TargetRequest("moved", request.prompt_token_ids, request.sampling, tuple(tokens[:half])))
            moved = run(engine)
            assert moved.outputs[0].start == half
            assert tokens[:half] + moved.tokens["moved"] == tokens
            assert moved.reasons["moved"] == truth.reasons[request.request_id]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_request_goes_on_from_its_output_sent_as_a_prompt(self, engine: Driver, temperature: float) -> None:
        for request in requests(5, temperature, ignore_eos=True):
            tokens = answers(engine, [request]).tokens[request.request_id]
            half, sampling = len(tokens) // 2, request.sampling
            rest = replace(sampling, max_tokens=len(tokens) - half, first_position=half)
            engine.add(TargetRequest("sent", (*request.prompt_token_ids, *tokens[:half]), rest))
            assert (
                run(engine, noisy_tails({"sent": tokens[half:]}, 1, engine.vocab_size)).tokens["sent"] == tokens[half:]
            )

    def test_a_request_whose_committed_tokens_end_it_takes_no_row(self, engine: Driver) -> None:
        for request in requests(8, 1.0):
            truth = answers(engine, [request])
            tokens, sampling = truth.tokens[request.request_id], request.sampling
            ended = TargetRequest("ended", request.prompt_token_ids, sampling, tuple(tokens))
            reason = engine.add(ended)
            assert reason is not None and reason.reason == truth.reasons[request.request_id]
            if len(tokens) > 1:
                cut = TargetRequest("cut", request.prompt_token_ids, replace(sampling, max_tokens=1), tuple(tokens[:2]))
                assert engine.add(cut) in (Finish.LENGTH, Finish.STOP)
            stop = tokens[0]
            stopping = replace(sampling, stop_token_ids=(stop,), max_tokens=100)
            assert engine.add(replace(ended, sampling=stopping, committed_token_ids=(stop,))) is Finish.STOP
        assert not engine.has_work()

    def test_removed_requests_leave_no_trace(self, engine: Driver) -> None:
        batch = requests(4, 1.0)
        truth = answers(engine, batch).tokens
        for request in batch:
            engine.add(request)
        collected = Collected()
        for _step in range(3):
            collected.step(engine)
        engine.remove("r1")
        engine.remove("unknown")
        rest = run(engine)
        for request_id in ("r0", "r2", "r3"):
            assert collected.tokens.get(request_id, []) + rest.tokens.get(request_id, []) == truth[request_id]
        assert "r1" not in rest.tokens

    def test_drafts_of_rows_that_do_not_decode_are_ignored(self, engine: Driver) -> None:
        batch = requests(3, 1.0)
        truth = answers(engine, batch).tokens
        for request in batch:
            engine.add(request)
        collected = Collected()
        while engine.has_work():
            collected.step(engine, {request.request_id: [1, 2] for request in engine.requests.values()})
        assert collected.tokens == truth


class ModelConformance(EngineConformance):
    """And what engines with a model do: filters, stop ids, limits of the vocabulary and of the context."""

    cuts_bad_drafts = True

    def test_the_most_probable_tokens_come_where_they_are_asked_for(self, engine: Driver) -> None:
        asked = [0, 3, 20, 0, 1, 5]
        batch = [
            replace(one, sampling=replace(one.sampling, logprobs=count, temperature=temperature))
            for one, count, temperature in zip(
                requests(6, 1.0, max_tokens=40), asked, (1.0, 0.0, 0.6, 0.6, 1.3, 1.0), strict=True
            )
        ]
        truth = answers(engine, batch)
        drafted = answers(engine, batch, noisy_tails(truth.tokens, 5, engine.vocab_size))
        assert drafted.tokens == truth.tokens
        for request, count in zip(batch, asked, strict=True):
            name = request.request_id
            assert len(truth.tops[name]) == (len(truth.tokens[name]) if count else 0)
            for plain, other in zip(truth.tops[name], drafted.tops[name], strict=True):
                assert [token for token, _ in plain] == [token for token, _ in other] and len(plain) == count
                assert [value for _, value in plain] == pytest.approx([value for _, value in other], abs=1e-4)
            for token, own, top in zip(truth.tokens[name], truth.logprobs[name], truth.tops[name], strict=False):
                values = [value for _, value in top]
                assert values == sorted(values, reverse=True) and sum(map(math.exp, values)) < 1.0 + 1e-5
                assert dict(top).get(token, own) == own and own <= values[0]

    def test_log_probabilities_of_prompts(self, engine: Driver) -> None:
        """An output that comes as a part of the prompt has the log-probabilities that it was sampled with."""
        sampled = answers(engine, requests(4, 1.0, ignore_eos=True))
        prompts = {f"r{i}": (*ids, *sampled.tokens[f"r{i}"]) for i, ids in enumerate(tiny_prompt_ids(4))}
        sampling = {
            name: SamplingParams(0.7, max_tokens=20, seed=i, ignore_eos=True, prompt_logprobs=i != 2)
            for i, name in enumerate(prompts)
        }
        batch = [TargetRequest(name, prompt, sampling[name]) for name, prompt in prompts.items()]
        truth = answers(engine, [replace(one, sampling=replace(one.sampling, prompt_logprobs=False)) for one in batch])
        assert not truth.prompt_logprobs
        moved = [replace(one, committed_token_ids=tuple(truth.tokens[one.request_id][:3])) for one in batch]
        chunked = Driver(self.make_engine(max_batch=4, max_step_tokens=7))
        for driver, rows in ((engine, batch), (chunked, batch), (engine, moved)):
            found = answers(driver, rows, noisy_tails(truth.tokens, 3, engine.vocab_size))
            assert set(found.prompt_logprobs) == {"r0", "r1", "r3"}
            for request in rows:
                name, begin = request.request_id, len(request.committed_token_ids)
                assert found.tokens[name] == truth.tokens[name][begin:]
                if (values := found.prompt_logprobs.get(name)) is not None:
                    assert values.shape == (len(prompts[name]) - 1, 3)
                    own, best, most = values.T
                    assert own[-len(sampled.tokens[name]) :] == pytest.approx(sampled.logprobs[name], abs=1e-3)
                    is_best = best == prompts[name][1:]
                    assert (own[is_best] == most[is_best]).all() and (own[~is_best] <= most[~is_best]).all()
                    assert 0 < is_best.sum() < len(best)

    def test_stops(self, engine: Driver) -> None:
        free = answers(engine, requests(8, 1.0, max_tokens=60))
        assert "stop" in free.reasons.values()
        ended = next(rid for rid, reason in free.reasons.items() if reason == "stop")
        index = int(ended[1:])
        unstopped = requests(8, 1.0, max_tokens=60, ignore_eos=True)[index]
        longer = answers(engine, [unstopped])
        assert longer.tokens[ended][: len(free.tokens[ended])] == free.tokens[ended]
        assert longer.reasons[ended] == "length" and len(longer.tokens[ended]) == 60
        stop_id = free.tokens[ended][2]
        first = free.tokens[ended].index(stop_id)
        stopped = requests(8, 1.0, max_tokens=60, stop_token_ids=(stop_id,))[index]
        for drafts in (None, lambda rid, done: free.tokens[ended][done : done + 6]):
            collected = answers(engine, [stopped], drafts)
            assert collected.tokens[ended] == free.tokens[ended][: first + 1]
            assert collected.reasons[ended] == "stop"
            # What was drafted behind the end was neither right nor wrong.
            assert all(output.num_drafted == output.num_accepted for output in collected.outputs)

    def test_context_full_ends_by_length(self) -> None:
        request = requests(1, 1.0, max_tokens=400, ignore_eos=True)[0]
        limit = len(request.prompt_token_ids) + 9
        engine = Driver(self.make_engine(max_model_len=limit))
        collected = answers(engine, [request], lambda rid, done: [3] * 20)
        assert len(collected.tokens["r0"]) == 9 and collected.reasons["r0"] == "length"

    def test_poison_is_refused_and_others_go_on(self, engine: Driver) -> None:
        good = requests(2, 0.0)
        truth = answers(engine, good).tokens
        engine.add(good[0])
        with pytest.raises(InputError, match="outside the vocabulary"):
            engine.add(TargetRequest("bad", (1, engine.vocab_size), SamplingParams()))
        with pytest.raises(InputError, match="must stay within"):
            engine.add(TargetRequest("long", (1,) * engine.max_model_len, SamplingParams()))
        with pytest.raises(InputError, match="no tokens"):
            engine.add(TargetRequest("empty", (), SamplingParams()))
        assert answers(engine, [good[1]]).tokens == truth


class LoadedConformance(ModelConformance):
    """And what engines do with the memory and the weights of their models."""

    short: Mapping[str, Any]
    """Limits of an engine without room for the requests below at the same time."""

    @classmethod
    @abc.abstractmethod
    def weights(cls) -> dict[str, Any]:
        """The state dict of the engine's model."""

    def test_memory_pressure_preempts_without_changing_tokens(self, engine: Driver) -> None:
        batch = requests(6, 1.0, max_tokens=180, ignore_eos=True)
        truth, short = answers(engine, batch), Driver(self.make_engine(**self.short))
        found = answers(short, batch, noisy_tails(truth.tokens, 3, engine.vocab_size))
        assert found.tokens == truth.tokens
        assert found.prefilled > sum(len(request.prompt_token_ids) for request in batch), "some were computed again"

    def test_weights_are_replaced_and_restored_and_bad_ones_change_nothing(self) -> None:
        engine, original, batch = Driver(self.make_engine()), self.weights(), requests(4, 1.0)
        before = answers(engine, batch).tokens
        engine.load_weights(1, {name: tensor * 1.3 for name, tensor in original.items()})
        assert engine.weight_version == 1
        changed = answers(engine, batch).tokens
        assert changed != before
        with pytest.raises(InputError, match="missing"):
            engine.load_weights(2, {name: t for name, t in original.items() if "layers.1" not in name})
        with pytest.raises(InputError, match="shape"):
            engine.load_weights(2, {**original, "model.norm.weight": original["model.norm.weight"][:3]})
        assert engine.weight_version == 1 and answers(engine, batch).tokens == changed
        engine.load_weights(2, {**original, "model.norm.weight": original["model.norm.weight"] * math.nan})
        failed = answers(engine, batch)
        assert set(failed.reasons.values()) == {"error"} and all("NaN" in text for text in failed.errors.values())
        engine.load_weights(3, original)
        assert answers(engine, batch).tokens == before

    def test_sleeping_is_refused_with_requests_and_changes_nothing(self, engine: Driver) -> None:
        batch = requests(3, 1.0)
        before = answers(engine, batch).tokens
        engine.sleep()
        engine.wake()
        assert answers(engine, batch).tokens == before
        engine.wake()
        engine.add(batch[0])
        with pytest.raises(InputError, match="running"):
            engine.sleep()
        assert run(engine).tokens["r0"] == before["r0"]
