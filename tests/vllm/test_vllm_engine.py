"""The `vllm` engine: the conformance suite of all engines, and what only vLLM can get wrong."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from specactor_ray.config.schema import TargetConfig
from specactor_ray.models.ragged_model import HEAD_INPUT
from specactor_ray.table.requests import TargetRequest
from specactor_ray.target.base import TargetEngine
from specactor_ray.target.vllm import VllmEngine
from tests.tiny import tiny_vllm_target
from tests.unit.engine_conformance import Collected, Driver, LoadedConformance, answers, noisy_tails, requests
from tests.unit.target.test_hf_engine import load
from tests.unit.target.test_hf_engine import make as make_hf
from tests.vllm import needs_vllm

pytestmark = [pytest.mark.vllm, needs_vllm, pytest.mark.timeout(600)]

LAYERS = (0, 3, HEAD_INPUT)
_engines: list[VllmEngine] = []


def raw(max_drafts: int = 64, **limits: Any) -> VllmEngine:
    settings: dict[str, Any] = {
        "model": str(tiny_vllm_target()),
        "dtype": "float32",
        "max_model_len": 256,
        "max_batch": 16,
        "max_step_tokens": 512,
        "kv_cache_gb": 1 / 32,
        "compiled": False,  # starts faster
        **limits,
    }
    config = TargetConfig(**settings)
    engine = VllmEngine(config, min(max_drafts, config.max_step_tokens - max(config.max_batch, 2)))
    _engines.append(engine)
    return engine


def make(**limits: Any) -> Driver:
    return Driver(raw(**limits))


@pytest.fixture(scope="module", autouse=True)
def end_engines() -> Iterator[None]:
    yield
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gc, "collect", lambda *_: 0)  # vLLM collects for each engine, a second every time
        for engine in _engines:
            engine.close()
    _engines.clear()
    gc.collect()


class TestConformance(LoadedConformance):
    short: ClassVar = {"kv_cache_gb": 400 / (1 << 20)}

    @classmethod
    def make_engine(cls, **limits: Any) -> TargetEngine:
        return raw(**limits)

    @classmethod
    def weights(cls) -> dict[str, Any]:
        return load(tiny_vllm_target()).state_dict()


def hf(**limits: Any) -> Driver:
    """The other engine with the same weights."""
    return make_hf(load(tiny_vllm_target()), **limits)


@pytest.mark.parametrize(
    ("temperature", "filters", "limits"),
    [
        (0.0, {}, {}),
        (1.0, {}, {"compiled": True}),
        (0.7, {"top_k": 30, "top_p": 0.9}, {}),
        (1.0, {}, {"hidden_layers": LAYERS, "max_step_tokens": 24}),
        (1.0, {}, {"hidden_layers": LAYERS, "tensor_parallel": 2, "cores": 2}),
    ],
)
def test_tokens_and_states_are_those_of_hf(temperature: float, filters: dict[str, Any], limits: dict[str, Any]) -> None:
    """Also with drafts, and when a prompt comes in pieces."""
    batch = requests(12, temperature, **filters)
    engine, reference = make(**limits), hf(hidden_layers=limits.get("hidden_layers", ()))
    theirs, plain = answers(reference, batch), answers(engine, batch)
    ours = answers(engine, batch, noisy_tails(theirs.tokens, 2, engine.vocab_size))
    assert plain.tokens == ours.tokens == theirs.tokens and ours.reasons == theirs.reasons
    for request_id, expected in theirs.logprobs.items():
        assert ours.logprobs[request_id] == pytest.approx(expected, abs=1e-3)
    assert bool(ours.states) == ("hidden_layers" in limits)
    for request_id, spans in ours.states.items():
        ends = [start + len(states) for start, states in spans]
        assert [start for start, _ in spans] == [0, *ends[:-1]]
        assert torch.allclose(states_of(ours, request_id), states_of(theirs, request_id), atol=1e-3)


def states_of(collected: Collected, request_id: str) -> torch.Tensor:
    return torch.cat([states for _, states in collected.states[request_id]])


@pytest.mark.parametrize("limits", [{}, {"kv_cache_gb": 960 / (1 << 20), "max_step_tokens": 100}], ids=["", "tight"])
def test_samples_share_a_prompt_and_its_hidden_states(limits: dict[str, Any]) -> None:
    """States of cached positions are those of the request that computed them; also after preemptions, and for a reader
    that begins late, while a step is in flight or held."""
    engine, reference = make(hidden_layers=LAYERS, max_model_len=384, **limits), hf(hidden_layers=LAYERS)
    (short,) = requests(1, 1.0)
    prompt = (short.prompt_token_ids * 40)[:150]
    sampling = [replace(short.sampling, seed=i, max_tokens=121 if i % 3 else 1, ignore_eos=True) for i in range(6)]
    batch = [TargetRequest(f"r{i}", prompt, one) for i, one in enumerate(sampling)]
    theirs, ours = answers(reference, batch), Collected()
    drafts = noisy_tails(theirs.tokens, 3, engine.vocab_size)
    for request in batch[:3]:
        engine.add(request)
    for number in range(2000):
        if number == 3:
            for request in batch[3:]:
                engine.add(request)
        if not engine.has_work():
            break
        if number % 20 > 9:
            ours.step(engine)
        else:
            ours.step(engine, {name: drafts(name, engine.committed[name]) for name in engine.decoding()})
        rows = np.array(sorted(engine.requests), np.int32)
        late = engine.engine.states(rows, np.zeros(len(rows), np.int32), 1 << 40)
        for row, start, states in late.split():
            name = engine.requests[row].request_id
            known = states_of(theirs, name)[: len(states)]
            assert start == 0 and len(states) < len(prompt) + max(engine.committed[name], 1)
            assert torch.allclose(states, known, atol=1e-3)
    assert ours.tokens == theirs.tokens
    for one in batch:
        assert torch.allclose(states_of(ours, one.request_id), states_of(theirs, one.request_id), atol=1e-3)
    assert (ours.prefilled > 3 * len(prompt)) == bool(limits), "only then preempted; six samples in any case"


def test_an_engine_starts_where_triton_was_imported_before_and_keeps_states_without_drafts() -> None:
    """As in a process that has loaded a model with transformers."""
    code = """
import sys
import torch._dynamo, triton
from specactor_ray.config.schema import TargetConfig
from specactor_ray.target.build import build_engine
from tests.unit.engine_conformance import Driver, answers, requests

limits = {"max_model_len": 128, "max_batch": 4, "max_step_tokens": 64, "kv_cache_gb": 1 / 64}
config = TargetConfig(sys.argv[1], backend="vllm", dtype="float32", compiled=False, hidden_layers=[0, 2], **limits)
engine = Driver(build_engine(config, "cpu", 0))
found = answers(engine, requests(2, 1.0, max_tokens=8))
assert {name: sum(len(part) for _, part in parts) for name, parts in found.states.items()}
print("tokens", found.tokens)
engine.close()
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code, str(tiny_vllm_target())]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=400
    )
    expected = answers(hf(), requests(2, 1.0, max_tokens=8)).tokens
    assert f"tokens {expected}" in done.stdout, done.stderr[-3000:]


def test_a_request_near_the_end_of_its_context_takes_no_drafts_from_others() -> None:
    """vLLM's own proposers draft nothing for the whole batch then."""
    engine = make(max_model_len=96)
    short, long = requests(2, 0.0, max_tokens=400, ignore_eos=True)
    prompt = (long.prompt_token_ids * 40)[: 96 - 4]
    truth = answers(engine, [short]).tokens["r0"]
    batch = [short, TargetRequest("long", prompt, long.sampling)]
    collected = answers(engine, batch, lambda rid, done: truth[done : done + 4] if rid == "r0" else [1, 2, 3, 4])
    assert collected.tokens["r0"] == truth and len(collected.tokens["long"]) == 4
    long_ends = max(i for i, output in enumerate(collected.outputs) if output.request_id == "long")
    assert any(o.request_id == "r0" and o.num_accepted == 4 for o in collected.outputs[: long_ends + 2])
