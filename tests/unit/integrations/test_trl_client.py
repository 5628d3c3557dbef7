"""TRL's client over HTTP, on a real server of scripted outputs, with more than any one request may have."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specactor_ray.core.metrics import verifier_rows
from specactor_ray.core.types import SamplingParams
from specactor_ray.integrations import trl
from specactor_ray.integrations.trl import RolloutClient, ServerClient
from specactor_ray.models.loading import named_weights
from specactor_ray.sampling.seeds import sample_of
from specactor_ray.serve.requests import MOST_CHOICES
from specactor_ray.serve.run import serving
from specactor_ray.serve.service import Limits
from tests.fakes.scripted_queue import ScriptedQueue, make_service, tokenizer
from tests.families import make_model

SAMPLING = SamplingParams(max_tokens=2, seed=9, ignore_eos=True)


def outputs(prompts: list[list[int]], n: int, engine: ScriptedQueue, limits: Limits | None = None) -> Any:
    trainer = SimpleNamespace(_tokenizer=tokenizer())
    with serving(make_service(engine, limits)) as url:
        return ServerClient(trainer, url).roll_out(prompts, SAMPLING, n)


def expected(number: int, sample: int) -> list[int]:
    """What the scripted engine gives for the seed that the sample has in the whole batch."""
    seed = sample_of(SAMPLING, number, sample).seed
    return [10 + (seed + at) % 300 for at in range(2)]


def test_more_than_a_request_may_have_and_a_full_server(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trl._MOST_CHOICES <= MOST_CHOICES and Limits().max_body_bytes > trl._MOST_BYTES
    monkeypatch.setattr(trl, "_MOST_BYTES", 4000)
    prompts = [[300] * 400 for _ in range(40)]  # 2 kB each
    done = outputs(prompts, 8, ScriptedQueue(max_waiting=64), Limits(max_body_bytes=5000))
    assert [ids for ids, _ in done] == [expected(number, sample) for number in range(40) for sample in range(8)]
    assert all(logprobs == [-0.5, -0.5] for _, logprobs in done) and len(done) > trl._MOST_CHOICES
    assert list(trl._parts([[1]] * 3, 1000)) == [range(1), range(1, 2), range(2, 3)]


def test_what_drafts_did_is_logged_by_trl() -> None:
    """Of both verifiers, between two reports; nothing where no request ran."""
    service = make_service(ScriptedQueue())
    counters: dict[str, Any] = dict.fromkeys(("committed_tokens", "row_steps", "supplied_row_steps", "plain_s"), 0)
    times = dict.fromkeys(("forward_s", "sampling_s", "waiting_s", "protocol_s"), 0.0)
    others = ("steps", "suspended_steps", "supplied_tokens", "drafted_tokens", "accepted_tokens", "running", "busy_s")
    rest = {**dict.fromkeys((*others, "weight_version"), 0), "hosted": {}}
    actors = ("verifier-0", "verifier-1")
    service.rollout.metric_rows = lambda: [
        one for actor in actors for one in verifier_rows(actor, {**rest, **counters, **times})
    ]
    metrics: Any = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer = SimpleNamespace(_tokenizer=tokenizer(), _metrics=metrics, model=SimpleNamespace(training=True))
    with serving(service) as url:
        client = ServerClient(trainer, url)
        before = client.totals()
        client._log(before, before)
        counters.update(committed_tokens=60, row_steps=40, supplied_row_steps=10, plain_s=9.0)
        times.update(forward_s=4.0, sampling_s=1.0, waiting_s=0.5, protocol_s=0.5)
        client._log(before, client.totals())
    saved = {"specactor/saved_s": [2 * (9.0 - 6.0)]}
    logged = {"specactor/acceptance_length": [1.5], "specactor/drafted_share": [0.25], **saved}
    assert metrics["train"] == logged and not metrics["eval"]


@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v3", "llama-tied"])
@pytest.mark.parametrize("all_of_it", [False, True])
def test_a_model_arrives_whole(name: str, all_of_it: bool) -> None:
    """TRL sends parameters; the buffers of the trained model come after them."""
    model, client = make_model(name), object.__new__(RolloutClient)
    accelerator = SimpleNamespace(unwrap_model=lambda wrapped: wrapped)
    client._trainer = SimpleNamespace(accelerator=accelerator, model=model)
    pairs: Any = named_weights(model) if all_of_it else model.named_parameters()
    sent = list(client._whole(pairs))
    assert sorted(key for key, _ in sent) == sorted(key for key, _ in named_weights(model)), "each once"
    assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in sent)


def test_a_rollout_of_this_process_needs_no_httpx() -> None:
    code = "import sys; sys.modules['httpx'] = None; import specactor_ray.integrations.trl"
    subprocess.run([sys.executable, "-c", code], check=True)
