"""The `hf` engine: conformance, the model library as oracle, memory pressure, weights, hidden states, odd models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from specactor_ray.core.types import SamplingParams
from specactor_ray.models.ragged_model import HEAD_INPUT, RaggedModel
from specactor_ray.table.requests import TargetRequest
from specactor_ray.target.base import TargetEngine
from specactor_ray.target.hf import HfEngine
from tests.fakes.capturer import FakeCapturer
from tests.tiny import tiny_prompt_ids, tiny_target
from tests.unit.engine_conformance import Collected, Driver, LoadedConformance, answers, noisy_tails, requests, run


def load(folder: Path | None = None) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder or tiny_target(), dtype=torch.float32)


def raw(model: Any = None, cache_bytes: int = 64 << 20, **limits: Any) -> HfEngine:
    hidden = limits.pop("hidden_layers", ())
    model = model or load()
    eos = model.generation_config.eos_token_id
    return HfEngine(RaggedModel(model, cache_bytes, hidden), [eos], **limits)


def make(*args: Any, **limits: Any) -> Driver:
    return Driver(raw(*args, **limits))


class TestConformance(LoadedConformance):
    short: ClassVar = {"cache_bytes": 128 * 4 * 1024}

    @classmethod
    def make_engine(cls, **limits: Any) -> TargetEngine:
        return raw(**limits)

    @classmethod
    def weights(cls) -> dict[str, Any]:
        return load().state_dict()


class TestCapturedConformance(TestConformance):
    """With decode steps as on a GPU."""

    @classmethod
    def make_engine(cls, **limits: Any) -> TargetEngine:
        return raw(capturer=FakeCapturer(), **limits)


def test_logprobs_are_those_of_a_fresh_forward() -> None:
    batch = requests(4, 0.8, max_tokens=24, top_k=30)
    engine = make()
    ours = answers(engine, batch)
    model = load()
    for request in batch:
        tokens = ours.tokens[request.request_id]
        context = torch.tensor([[*request.prompt_token_ids, *tokens]])
        with torch.no_grad():
            logits = model(context).logits[0, len(request.prompt_token_ids) - 1 : -1]
        expected = torch.log_softmax(logits / 0.8, dim=-1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        assert ours.logprobs[request.request_id] == pytest.approx(expected.tolist(), abs=1e-3)


def test_the_next_turn_prefills_only_what_is_new() -> None:
    (first,) = requests(1, 1.0, max_tokens=60, ignore_eos=True)
    engine, fresh = make(), make()
    output = answers(engine, [first]).tokens["r0"]
    new = tiny_prompt_ids(2)[1]
    second = TargetRequest(
        "second", (*first.prompt_token_ids, *output, *new), SamplingParams(1.0, max_tokens=20, seed=5)
    )
    turn = answers(engine, [second])
    assert turn.prefilled == 1 + len(new)  # the last token of the output was sampled, but never fed
    alone = answers(fresh, [second])
    assert turn.tokens == alone.tokens and turn.logprobs == alone.logprobs


def test_samples_of_a_prompt_share_its_prefill() -> None:
    prompt = tuple(tiny_prompt_ids(1)[0]) * 6
    batch = [TargetRequest(f"s{i}", prompt, SamplingParams(1.0, max_tokens=30, seed=i)) for i in range(6)]
    shared, truth = answers(make(), batch), {}
    assert len(prompt) > 64
    assert shared.prefilled == len(prompt)  # the others feed their last prompt token alone
    for one in batch:
        fresh = make()
        truth |= answers(fresh, [one]).tokens
    assert shared.tokens == truth


def test_a_prefix_of_a_running_request_is_shared_while_it_runs() -> None:
    prompt, other = tuple(tiny_prompt_ids(1)[0]) * 2, make()  # more than a page
    first = TargetRequest("r0", prompt, SamplingParams(1.0, max_tokens=100, seed=1, ignore_eos=True))
    engine, begun = make(), Collected()
    engine.add(first)
    for _ in range(40):
        begun.step(engine)
    branch = TargetRequest("branch", (*first.prompt_token_ids, *begun.tokens["r0"][:30]), SamplingParams(seed=9))
    engine.add(branch)
    engine.step()
    assert engine.result.num_prefill_tokens == 0, "all but the last token were cached"
    rest = run(engine)
    other.add(first)
    apart = answers(other, [branch])
    assert rest.tokens["r0"] == apart.tokens["r0"][-len(rest.tokens["r0"]) :]
    assert apart.tokens["branch"][-len(rest.tokens["branch"]) :] == rest.tokens["branch"]


def test_prefixes_give_way_to_requests_that_run() -> None:
    """Ended requests hold every page, and then some that run need more than there is."""
    probe = RaggedModel(load(), 64 << 20)
    tight = make(cache_bytes=probe.cache.bytes_per_token * 128 * 2)
    batch, roomy = requests(9, 1.0, max_tokens=80, ignore_eos=True), make()
    for engine in (roomy, tight):
        for request in batch:
            engine.add(request)
    truth = run(roomy).tokens
    assert run(tight).tokens == truth
    assert tight._model.cache.free_slots < tight._model.cache.slots, "contexts stay"
    for request in batch[:4]:
        tight.add(request)
    assert run(tight).tokens == {request.request_id: truth[request.request_id] for request in batch[:4]}
    for request in batch[:2]:
        tight.add(request)
        tight.step(None)
        tight.remove(request.request_id)
    tight.reset_prefix_cache()
    assert tight._model.cache.free_slots == tight._model.cache.slots, "cache was leaked"


def test_no_context_of_old_weights_is_used() -> None:
    (request,), engine = requests(1, 1.0, max_tokens=40, ignore_eos=True), make()
    answers(engine, [request])
    engine.load_weights(1, {name: tensor * 1.2 for name, tensor in load().state_dict().items()})
    again = replace(request, request_id="again")
    assert answers(engine, [again]).prefilled == len(request.prompt_token_ids)


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_step_tokens": 9, "max_batch": 3},
        {"cache_bytes": 128 * 5 * 1024},
        {"capturer": FakeCapturer()},
    ],
)
def test_hidden_states_cover_every_position_once(limits: dict[str, Any]) -> None:
    """Also with a prefill in small chunks, when requests are preempted and computed again, and in captured steps."""
    engine = make(hidden_layers=[0, 3, HEAD_INPUT], **limits)
    tight = "cache_bytes" in limits
    batch = requests(3, 1.0, max_tokens=300 if tight else 20, ignore_eos=tight)
    truth = answers(engine, batch)
    collected = answers(engine, batch, noisy_tails(truth.tokens, 2, 512))
    assert (collected.prefilled > sum(len(one.prompt_token_ids) for one in batch)) == tight, "only then preempted"
    model = load()
    for request in batch:
        spans = collected.states[request.request_id]
        ends = [start + len(states) for start, states in spans]
        assert [start for start, _ in spans] == [0, *ends[:-1]]
        ours = torch.cat([states for _, states in spans])
        tokens = collected.tokens[request.request_id]
        width = model.config.hidden_size
        assert ours.shape == (len(request.prompt_token_ids) + len(tokens) - 1, 3 * width)
        context = torch.tensor([[*request.prompt_token_ids, *tokens]])
        with torch.no_grad():
            layers = model(context, output_hidden_states=True).hidden_states
        # The last entry of `hidden_states` is normalised; the raw output of the last layer is checked by its norm.
        assert torch.allclose(ours[:, :width], layers[1][0, :-1], atol=1e-4)
        with torch.no_grad():
            normed = model.model.norm(ours[:, width : 2 * width])
        assert torch.allclose(normed, layers[-1][0, :-1], atol=1e-3)
        assert torch.allclose(ours[:, 2 * width :], normed, atol=1e-4)


def test_new_weights_in_mid_request_equal_a_fresh_start_from_there() -> None:
    """Caches of the old weights are forgotten: the rest is what the new weights say about the whole context."""
    original = load().state_dict()
    changed = {name: tensor * 1.1 for name, tensor in original.items()}
    request = requests(1, 1.0, max_tokens=30, ignore_eos=True)[0]
    engine = make()
    engine.add(request)
    first = [token for _ in range(8) for output in engine.step() for token in output.token_ids]
    engine.load_weights(1, changed)
    rest = run(engine).tokens["r0"]
    engine.add(TargetRequest("again", request.prompt_token_ids, request.sampling, tuple(first)))
    assert run(engine).tokens["again"] == rest
