"""`Rollout.update_weights` with what any trainer holds: afterwards the outputs are those of the new checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from specactor_ray import Rollout, SamplingParams
from specactor_ray.config.load import from_mapping
from specactor_ray.core.errors import InputError
from specactor_ray.models.loading import load_model, load_tokenizer
from tests.plain_decoding import plain_tokens
from tests.tiny import tiny_draft, tiny_target

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
PROMPTS = ["Tell me about the red fox.", "Count from 3 to 9.", "Add 3 and 4."]
SAMPLING = SamplingParams(temperature=1.0, max_tokens=24, seed=3)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, namespace="specactor", logging_level="ERROR")
    yield
    ray.shutdown()


def start(model: Path) -> Rollout:
    """A verifier with drafts, and buckets much smaller than the model."""
    settings = {
        "mode": "coupled",
        "target": {"model": str(model), "dtype": "float32", "kv_cache_gb": 0.05},
        "drafters": [{"method": "ngram"}],
        "cluster": {"pin_cores": False},
        "trainer": {"weight_bucket_mb": 1},
    }
    return Rollout(from_mapping(settings))


def tokens(rollout: Rollout) -> list[Sequence[int]]:
    done = rollout.generate(PROMPTS, SAMPLING)
    assert not any(trajectory.error for trajectory in done)
    return [trajectory.token_ids for trajectory in done]


def trained(model: Path, seed: int, folder: Path) -> Any:
    """The model after a training step of a kind; its checkpoint is in `folder`."""
    policy = load_model(str(model))
    noise = torch.Generator().manual_seed(seed)
    for weight in policy.parameters():
        if weight.dim() > 1:
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=noise)
    policy.save_pretrained(folder)
    load_tokenizer(str(model)).save_pretrained(folder)
    return policy


@pytest.mark.parametrize("model", [tiny_target, tiny_draft], ids=["untied", "tied"])
def test_outputs_are_those_of_the_new_checkpoint(model: Any, tmp_path: Path) -> None:
    first, second = (trained(model(), seed, tmp_path / str(seed)) for seed in (1, 2))
    expected = [list(plain_tokens(tmp_path / str(seed), PROMPTS, SAMPLING).values()) for seed in (1, 2)]
    with start(model()) as rollout:
        before = tokens(rollout)
        assert len({str(outputs) for outputs in (before, *expected)}) == 3
        assert rollout.update_weights(first.state_dict()) == 1  # with lm_head.weight, also where it is tied
        assert tokens(rollout) == expected[0]
        assert rollout.update_weights(second.named_parameters()) == 2
        assert tokens(rollout) == expected[1]
        rollout.sleep()
        assert rollout.update_weights(tmp_path / "1") == 3
        assert tokens(rollout) == expected[0]
        assert {trajectory.weight_version for trajectory in rollout.generate(PROMPTS, SAMPLING)} == {3}


def test_what_does_not_fit_changes_nothing() -> None:
    weights = load_model(str(tiny_target())).state_dict()
    nothing = iter([])
    with start(tiny_target()) as rollout:
        before = tokens(rollout)
        with pytest.raises(InputError, match=r"no lm_haed\.weight\. Did you mean lm_head\.weight"):
            rollout.update_weights({**weights, "lm_haed.weight": weights["lm_head.weight"]})
        with pytest.raises(InputError, match=r"lm_head\.weight has shape \(512, 63\)"):
            rollout.update_weights({**weights, "lm_head.weight": weights["lm_head.weight"][:, 1:]})
        with pytest.raises(InputError, match=r"model\.embed_tokens\.weight and \d+ more missing"):
            rollout.update_weights(nothing)
        stream = rollout.stream(PROMPTS, SAMPLING)
        next(stream)
        untouched = iter(weights.items())
        with pytest.raises(InputError, match="weights cannot change while a stream is open"):
            rollout.update_weights(untouched)
        assert len(list(untouched)) == len(weights), "nothing was read"
        with pytest.raises(InputError, match="stream is open"):
            rollout.sleep()
        stream.close()
        assert tokens(rollout) == before
        assert {trajectory.weight_version for trajectory in rollout.generate(PROMPTS, SAMPLING)} == {0}
        assert rollout.update_weights(weights) == 1
        assert tokens(rollout) == before
    for use in (rollout.sleep, rollout.status, lambda: rollout.update_weights(weights)):
        with pytest.raises(InputError, match="this rollout is closed"):
            use()
