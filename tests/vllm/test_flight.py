"""Steps of the `vllm` engine in flight: their order, no wait for the device between launch and report, and what happens
to a step that runs while requests, weights or the engine change."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specactor_ray.core import machine
from specactor_ray.models.loading import load_model_config
from specactor_ray.models.shapes import GIB, token_bytes
from specactor_ray.sampling import keyed
from specactor_ray.target import vllm as target_vllm
from specactor_ray.target.vllm import VllmEngine
from specactor_ray.target.vllm_graphs import check_graphs
from tests.tiny import tiny_vllm_target
from tests.unit.engine_conformance import Collected, Driver, answers, noisy_tails, requests, run
from tests.unit.target.test_hf_engine import load
from tests.vllm import needs_vllm
from tests.vllm.test_vllm_engine import end_engines, hf, make, raw  # noqa: F401

pytestmark = [pytest.mark.vllm, needs_vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def engine() -> Driver:
    return make()


class Recorder:
    """Launches, plans and results of an engine's steps, in their order: (kind, number of the step)."""

    def __init__(self, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        self.positions: list[int] = []
        """Positions of the launched steps."""
        self._plans: list[Any] = []  # kept, so that no two have one id
        scheduler, executor = engine._core.scheduler, engine._core.model_executor
        numbers: dict[int, int] = {}
        schedule, execute, sample = scheduler.schedule, executor.execute_model, executor.sample_tokens

        def scheduled(*args: Any) -> Any:
            plan = schedule(*args)
            if plan.total_num_scheduled_tokens:
                numbers[id(plan)] = len(numbers)
                self.events.append(("plan", numbers[id(plan)]))
                self._plans.append(plan)
            return plan

        def executed(plan: Any, **options: Any) -> Any:
            if plan.total_num_scheduled_tokens:
                self.events.append(("launch", numbers.get(id(plan), -1)))
                self.positions.append(plan.total_num_scheduled_tokens)
            return execute(plan, **options)

        def sampled(*args: Any, **options: Any) -> Any:
            future, number = sample(*args, **options), self.events[-1][1]
            result = future.result

            def read() -> Any:
                self.events.append(("result", number))
                return result()

            future.result = read
            return future

        monkeypatch.setattr(scheduler, "schedule", scheduled)
        monkeypatch.setattr(executor, "execute_model", executed)
        monkeypatch.setattr(executor, "sample_tokens", sampled)


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
def test_the_next_step_is_planned_while_one_runs(monkeypatch: pytest.MonkeyPatch, engine: Driver, drafts: bool) -> None:
    batch = requests(6, 1.0, max_tokens=24, ignore_eos=True)
    truth = answers(hf(), batch)
    recorder = Recorder(engine.engine, monkeypatch)
    ours = answers(engine, batch, noisy_tails(truth.tokens, 2, engine.vocab_size) if drafts else None)
    assert ours.tokens == truth.tokens
    at = {event: i for i, event in enumerate(recorder.events)}
    last = max(number for _, number in at)
    assert last >= 8
    for n in range(last):
        assert at["launch", n] < at["plan", n + 1] < at["result", n]
        if not drafts:  # launched as well, so that the device never waits for the host
            assert at["launch", n + 1] < at["result", n]
    assert len(at) == len(recorder.events) == 3 * (last + 1)


def test_a_step_has_the_positions_of_its_drafts(monkeypatch: pytest.MonkeyPatch, engine: Driver) -> None:
    """Room that no draft fills is given back."""
    for request in requests(4, 1.0, max_tokens=40, ignore_eos=True):
        engine.add(request)
    while len(engine.decoding()) < 4:
        engine.step({})
    recorder = Recorder(engine.engine, monkeypatch)
    for lengths in ((0, 0, 0, 0), (3, 0, 1, 2), (5, 5, 5, 5), (0, 1, 0, 0)):
        names = [f"r{i}" for i in range(4)]
        engine.step({name: [1] * length for name, length in zip(names, lengths, strict=True)})
        assert recorder.positions[-1] == 4 + sum(lengths)
    run(engine)


def test_a_plain_step_with_a_new_request_is_launched_ahead(monkeypatch: pytest.MonkeyPatch, engine: Driver) -> None:
    """vLLM plans room for drafts where a request enters with a single position."""
    first, second, third = requests(3, 1.0, max_tokens=16, ignore_eos=True)
    third = replace(third, prompt_token_ids=third.prompt_token_ids[:1])
    truth = answers(hf(), [first, second, third])
    for request in (first, second):
        engine.add(request)
    collected, recorder = Collected(), Recorder(engine.engine, monkeypatch)
    for _ in range(6):
        collected.step(engine)
    engine.add(third)
    while engine.has_work():
        collected.step(engine)
    at = {event: i for i, event in enumerate(recorder.events)}
    for n in range(max(number for _, number in at)):
        assert at["launch", n + 1] < at["result", n]
    assert collected.tokens == truth.tokens and max(recorder.positions[3:]) == 3


def test_drafters_are_asked_where_the_next_step_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five positions of four requests have none, until one ends; then one draft of each of the others has."""
    engine = make(max_batch=4, max_step_tokens=6)
    batch = requests(4, 1.0, max_tokens=12, ignore_eos=True)
    for request in batch:
        engine.add(replace(request, prompt_token_ids=request.prompt_token_ids[:2]))
    recorder = Recorder(engine.engine, monkeypatch)
    for _ in range(6):
        engine.step({})
    assert recorder.positions[-1] == 4 and not engine.decoding()
    engine.step()
    engine.step()
    assert len(engine.decoding()) == 4, "the steps of an engine that drafts nothing are no longer those"
    engine.remove("r0")
    engine.step({})
    engine.step({})
    assert sorted(engine.decoding()) == ["r1", "r2", "r3"]
    engine.step({"r1": [1], "r2": [1, 2], "r3": [3]})
    assert recorder.positions[-1] == 6
    run(engine)


def test_a_step_that_depends_on_the_one_before_has_drafts(engine: Driver) -> None:
    """A request with drafts that may fill its context is planned after they are rejected."""
    request = replace(requests(1, 1.0, max_tokens=12, ignore_eos=True)[0], prompt_token_ids=(5,) * 250)
    truth = answers(hf(), [request]).tokens["r0"]
    collected = Collected()
    engine.add(request)
    while engine.has_work():
        done = len(collected.tokens.get("r0", ()))
        names = engine.decoding()
        assert bool(names) == (0 < done < 5), "the last token needs no draft"
        collected.step(engine, {name: [*truth[done : done + 1], 0, 0, 0, 0, 0] for name in names})
    assert collected.tokens["r0"] == truth[:6]


def test_requests_that_cannot_enter_take_no_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the smallest share of one: two requests fill the cache, and have 24 positions less 1 + 8."""
    per_token = token_bytes(load_model_config(str(tiny_vllm_target())).get_text_config(), 4)
    engine = make(max_step_tokens=24, max_model_len=128, kv_cache_gb=3 * 128 * per_token / GIB)
    for request in requests(3, 1.0, max_tokens=30, ignore_eos=True):
        engine.add(request)
    recorder = Recorder(engine.engine, monkeypatch)
    while len(engine.decoding()) < 2:
        engine.step({})
    engine.step({name: [1] * 8 for name in engine.decoding()})
    engine.step({name: [1] * 8 for name in engine.decoding()})
    assert recorder.positions[-1] == 14 and len(engine.engine._core.scheduler.waiting) == 1
    run(engine)


@pytest.mark.parametrize(
    ("temperature", "filters", "limits"),
    [(0.0, {}, {}), (1.0, {}, {"record_margins": True}), (0.7, {"top_k": 30, "top_p": 0.9}, {})],
)
def test_the_kernels_of_gpus_sample_the_same_and_nothing_waits(
    monkeypatch: pytest.MonkeyPatch, temperature: float, filters: dict[str, Any], limits: dict[str, Any]
) -> None:
    batch = requests(6, temperature, max_tokens=12, logprobs=3, **filters)
    engine = make(**limits)
    truth = answers(engine, batch)
    monkeypatch.setattr(keyed, "fitting", lambda *_: "triton")
    moves: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(torch.Tensor, name)

        def move(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            frame: Any = sys._getframe(1)
            moves[f"{name} in {frame.f_code.co_name}"] += frame.f_globals["__name__"].startswith("specactor_ray.")
            return real(tensor, *args, **options)

        return move

    for name in ("cpu", "cuda", "tolist", "item", "numpy", "__array__", "__int__", "__index__", "__bool__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    ours = answers(engine, batch, noisy_tails(truth.tokens, 3, engine.vocab_size))
    monkeypatch.undo()
    assert ours.tokens == truth.tokens and ours.reasons == truth.reasons
    for request_id, tops in truth.tops.items():
        assert [[token for token, _ in one] for one in tops] == [[t for t, _ in one] for one in ours.tops[request_id]]
        assert ours.logprobs[request_id] == pytest.approx(truth.logprobs[request_id], abs=1e-5)
    assert {name for name, count in moves.items() if count} <= {"numpy in get_output", "numpy in staging"}, (
        "only the report is read"
    )


def test_a_row_that_is_used_again_gets_no_token_of_the_one_before(engine: Driver) -> None:
    """Its last step runs while the next request enters, in the same row."""
    batch = requests(3, 1.0, max_tokens=20, ignore_eos=True)
    truth = answers(hf(), batch).tokens
    first, second, third = batch
    for use_drafts in (False, True):
        collected = Collected()
        engine.add(first)
        engine.add(second)
        for _ in range(5):
            tails = {name: [1, 2] for name in engine.decoding()} if use_drafts else None
            collected.step(engine, tails)
        engine.remove("r0")
        engine.add(third)
        assert engine.row("r2") == 0
        rest = run(engine)
        for request_id in ("r1", "r2"):
            assert collected.tokens.get(request_id, []) + rest.tokens.get(request_id, []) == truth[request_id]
        assert "r0" not in rest.tokens


@pytest.mark.parametrize("window", [0, 4])
def test_results_in_flight_survive_what_the_engine_waits_for(engine: Driver, window: int) -> None:
    """A probe, and the weights that the engine has, between any two steps."""
    batch = requests(3, 1.0, max_tokens=16, ignore_eos=True)
    truth, weights = answers(hf(), batch).tokens, load(tiny_vllm_target()).state_dict()
    collected = Collected()
    for request in batch:
        engine.add(request)
    turn = 0
    while engine.has_work():
        collected.step(engine, {} if window else None)
        turn += 1
        if turn == 3:
            engine.prompt_logprobs(np.arange(5, dtype=np.int32))
        if turn == 6:
            engine.load_weights(1, weights)
    assert collected.tokens == truth


def test_graphs_that_compute_something_else_are_found() -> None:
    engine = raw(max_drafts=3)
    weights: dict[str, torch.Tensor] = dict(load(tiny_vllm_target()).state_dict())
    noisy = {name: tensor + 0.3 * torch.randn_like(tensor) for name, tensor in weights.items()}
    problem = check_graphs(engine, lambda on: engine.load_weights(0, noisy if on else weights), 3, 1e-2)
    assert "nats on average" in problem or "tokens are equal" in problem
    engine.load_weights(0, weights)
    wrong = {"a token": iter([0] * 60 + [1] + [0] * 10**4)}
    commit = target_vllm.commit

    def committed(*args: Any) -> Any:
        result = commit(*args)
        result.tokens = result.tokens + next(wrong["a token"])
        return result

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(target_vllm, "commit", committed)
        assert "tokens are equal" in check_graphs(engine, lambda on: None, 3, 1e-2, exact=True)


@pytest.mark.parametrize(
    ("lengths", "named"),
    [
        ({None, 4}, None),
        ({1, 4}, "Steps other than those with 0 or 3 drafts of each request run as a CUDA graph per layer: FA has no"),
    ],
)
def test_graphs_are_checked_in_plain_mixed_and_whole_steps(
    monkeypatch: pytest.MonkeyPatch, lengths: set[int | None], named: str | None
) -> None:
    """Wherever there are graphs of whole steps; others are named."""
    engine, switched = raw(max_drafts=3), list[bool]()
    monkeypatch.setattr(machine, "_fallbacks", {})
    answer = {"whole_graphs": lambda: (lengths, "FA"), "use_graphs": switched.append}
    monkeypatch.setattr(engine._core, "collective_rpc", lambda method, args: [answer[method](*args)])
    recorder = Recorder(engine, monkeypatch)
    engine._prove_graphs()
    found = machine.fallbacks()
    assert (len(found) == 1 and found[0].startswith(named)) if named else not found
    assert switched == [False, True]
    assert {4, 10, 16} <= set(recorder.positions), "no drafts, some, and three of each request"


def test_an_engine_that_fails_after_its_start_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.core import EngineCore

    closed, shutdown = list[Any](), EngineCore.shutdown
    monkeypatch.setattr(EngineCore, "shutdown", lambda core: closed.append(core) or shutdown(core))
    monkeypatch.setattr(target_vllm, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True)))
    monkeypatch.setattr(VllmEngine, "_prove_graphs", lambda engine: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        raw(compiled=True, engine_arguments={"enforce_eager": True})
    assert len(closed) == 1
