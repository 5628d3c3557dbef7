"""New weights: outputs are those of the new checkpoint, heads get theirs, and no output mixes two versions."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from rich.console import Console

from specactor_ray import Rollout, SamplingParams
from specactor_ray.actors.loops import DraftActor
from specactor_ray.actors.process import put_weights
from specactor_ray.cli.report import status_table
from specactor_ray.cluster.calls import Calls
from specactor_ray.config.load import from_mapping
from specactor_ray.config.schema import Config
from specactor_ray.config.training_schema import WeightTransport
from specactor_ray.controller.controller import start_controller
from specactor_ray.core.errors import InputError, WeightsError
from specactor_ray.draft.eagle.checkpoint import load_head, trained_weights
from specactor_ray.learner.trainer import WEIGHTS
from specactor_ray.models.loading import load_model, load_tokenizer
from specactor_ray.models.weight_buckets import pack
from specactor_ray.rollout import rollout as rollout_module
from specactor_ray.trainer.trainer_ranks import trainer_group
from tests.fakes.broadcasting import KILLS, NotingVerifier
from tests.fakes.dropping import DroppingVerifier
from tests.local_ray import local_ray
from tests.plain_decoding import plain_tokens
from tests.tiny import tiny_eagle, tiny_target
from tests.unit.learner.test_update import make_samples
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
TARGET = {"dtype": "float32", "kv_cache_gb": 0.05}
PROMPTS = ["Tell me about the red fox.", "Count from 3 to 9.", "Add 3 and 4."]
SAMPLING = SamplingParams(temperature=1.0, max_tokens=24, seed=3)
STORE_MB = 80
"""Object store of the node."""


cluster = local_ray(4, object_store_memory=STORE_MB << 20)


def config(model: Path, mode: str = "plain", **more: Any) -> Config:
    """Buckets of weights are much smaller than the model."""
    target = {**TARGET, "model": str(model), **more.pop("target", {})}
    cluster = {"pin_cores": False, "health_interval_s": 0.5}
    trainer = {"learning_rate": 0.003, "prompts_per_step": 2, "weight_bucket_mb": 1}
    return from_mapping({"mode": mode, "target": target, "cluster": cluster, "trainer": trainer, **more})


@pytest.fixture(scope="module")
def rollout() -> Iterator[Rollout]:
    """For tests that leave it as it was."""
    with Rollout(config(tiny_target(), "coupled", drafters=[{"method": "ngram"}])) as rollout:
        yield rollout


def tokens(rollout: Rollout) -> list[Sequence[int]]:
    done = rollout.generate(PROMPTS, SAMPLING)
    assert not any(trajectory.error for trajectory in done)
    return [trajectory.token_ids for trajectory in done]


def changed(weights: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The weights after training of a kind: matrices, norms and biases move so far that outputs change, whatever the
    tiny model has learnt."""
    noise = torch.Generator().manual_seed(seed)
    return {
        name: value + 0.5 * value.abs().mean() * torch.randn(value.shape, generator=noise)
        for name, value in weights.items()
    }


def trained(model: Path, seed: int, folder: Path) -> Any:
    """The model with changed weights; its checkpoint is in `folder`."""
    policy = load_model(str(model))
    policy.load_state_dict(changed(dict(policy.named_parameters()), seed), strict=False)
    policy.save_pretrained(folder)
    load_tokenizer(str(model)).save_pretrained(folder)
    return policy


def test_what_does_not_fit_changes_nothing(rollout: Rollout) -> None:
    weights = load_model(str(tiny_target())).state_dict()
    before = tokens(rollout)
    for strange, named in (
        ({**weights, "lm_haed.weight": weights["lm_head.weight"]}, "lm_haed.weight"),
        ({**weights, "lm_head.weight": weights["lm_head.weight"][:, 1:]}, "lm_head.weight"),
        (iter([]), "model.embed_tokens.weight"),
    ):
        with pytest.raises(InputError, match=re.escape(named)):
            rollout.update_weights(strange)
    stream = rollout.stream(PROMPTS, SAMPLING)
    next(stream)
    untouched = iter(weights.items())
    with pytest.raises(InputError):
        rollout.update_weights(untouched)
    assert len(list(untouched)) == len(weights), "nothing was read"
    with pytest.raises(InputError):
        rollout.sleep()
    stream.close()
    assert tokens(rollout) == before
    assert {trajectory.weight_version for trajectory in rollout.generate(PROMPTS, SAMPLING)} == {0}
    assert rollout.update_weights(weights) == 1
    assert tokens(rollout) == before


@ray.remote(num_cpus=0)
def hold_object_store(seconds: float) -> int:
    """Fill the object store of this node, and hold it for a while. Returns the number of MB."""
    held: list[Any] = []
    with contextlib.suppress(ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError):
        while 8 * len(held) < STORE_MB:
            reference = ray.put(np.ones(8 << 20, dtype=np.uint8))
            held.append((reference, ray.get(reference)))  # what is in use cannot be spilled
    threading.Event().wait(seconds)
    return 8 * len(held)


def test_weights_arrive_although_the_object_store_is_full(rollout: Rollout) -> None:
    before, held = tokens(rollout), hold_object_store.remote(2.0)
    version = rollout.update_weights(tiny_target())
    done = rollout.generate(PROMPTS, SAMPLING)
    assert [one.token_ids for one in done] == before and {one.weight_version for one in done} == {version}
    assert ray.get(held, timeout=60) > STORE_MB / 2


def test_outputs_are_those_of_the_new_checkpoint(rollout: Rollout, tmp_path: Path) -> None:
    first, second = (trained(tiny_target(), seed, tmp_path / str(seed)) for seed in (1, 2))
    expected = [list(plain_tokens(tmp_path / str(seed), PROMPTS, SAMPLING).values()) for seed in (1, 2)]
    assert len({str(outputs) for outputs in (tokens(rollout), *expected)}) == 3
    version = rollout.update_weights(first.state_dict())
    assert tokens(rollout) == expected[0]
    assert rollout.update_weights(second.named_parameters()) == version + 1
    assert tokens(rollout) == expected[1]
    rollout.sleep()
    assert rollout.update_weights(tmp_path / "1") == version + 2
    assert tokens(rollout) == expected[0]
    assert {trajectory.weight_version for trajectory in rollout.generate(PROMPTS, SAMPLING)} == {version + 2}
    rollout.sleep()
    assert tokens(rollout) == expected[0], "a stream wakes the verifiers"


def start_with(verifier: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts of this process start verifiers of this class."""
    actors = (verifier, DraftActor)
    monkeypatch.setattr(
        rollout_module, "start_controller", lambda config, held: start_controller(config, actors, held=held)
    )


def test_an_engine_that_drops_one_tensor_is_found_and_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    start_with(DroppingVerifier, monkeypatch)
    weights = load_model(str(tiny_target())).state_dict()
    with Rollout(config(tiny_target(), target={**TARGET, "replicas": 2})) as rollout:
        for version in (1, 2):
            with pytest.raises(WeightsError, match="did not arrive"):
                rollout.update_weights(changed(weights, seed=version))
        # The first answer ends the update; the others arrive later.
        wait_until(lambda: all("did not arrive" in row["note"] for row in rollout.status()), "every verifier's reason")
        assert len(rollout.status()) == 2
        assert rollout.update_weights(weights) == 3, "the tensor as it was"
        assert tokens(rollout)
    for use in (rollout.sleep, rollout.status, lambda: rollout.update_weights(weights)):
        with pytest.raises(InputError, match="closed"):
            use()


def all_have(rollout: Rollout, version: int) -> bool:
    return [one["weight_version"] for one in rollout.status()] == [version] * 2


def test_weights_by_broadcast_are_those_of_the_object_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Version 2 loses a verifier in the middle; its replacement comes after the plan."""
    start_with(NotingVerifier, monkeypatch)
    settings = config(tiny_target(), target={"replicas": 2}, run={"dir": str(tmp_path)})
    settings.trainer.weight_transport = WeightTransport.broadcast
    with Rollout(settings) as rollout, trainer_group(settings, rollout.run_name) as trainer:
        prompts, outputs = make_samples(3), set[str]()
        for version in (1, 2, 3):
            trainer.update(prompts, version, seed=version)
            trainer.save(tmp_path / str(version))
            if version == 2:
                (tmp_path / KILLS).write_text("2")
            rollout.update_weights(trainer.export_weights(version))
            expected = list(plain_tokens(tmp_path / str(version) / WEIGHTS, PROMPTS, SAMPLING).values())
            assert tokens(rollout) == expected
            outputs.add(str(expected))
            if version == 2:
                wait_until(functools.partial(all_have, rollout, 2), "a replacement with the version", 120.0)
                assert tokens(rollout) == expected
        assert len(outputs) == 3 and rollout.update_weights(tmp_path / "3" / WEIGHTS) == 4
        assert tokens(rollout) == expected, "which came from the object store"
    ways = [(tmp_path / f"version-{version}").read_text().splitlines() for version in (1, 2, 3, 4)]
    assert ways[0] == ways[2] == ["broadcast"] * 2 and ways[3] == ["object store"] * 2
    assert len(ways[1]) == 2 and ways[1][1] == "object store", "the late one needs no group"


def test_heads_get_every_version_that_they_are_taught() -> None:
    """The second one is no numbers: it guesses nothing, and the alarm is raised."""
    head = {"method": "eagle", "model": str(tiny_eagle()), "kv_cache_gb": 0.05, "online": {"where": "trainer"}}
    settings = config(tiny_target(), "decoupled", drafters=[head], speculation={"verify": "all", "draft_wait_s": 1.0})
    good = trained_weights(load_head(str(tiny_eagle()), str(tiny_target())))
    broken = {name: torch.full_like(weight, float("nan")) for name, weight in good.items()}
    with Rollout(settings) as rollout:
        before = tokens(rollout)
        for version, weights in ((1, good), (2, broken), (3, good)):
            rollout.update_drafter(
                put_weights(version, [pack(weights.items(), dict.fromkeys(weights, torch.float32))], Calls(), "eagle")
            )
            assert await_alarm(rollout, version, weights is broken)["version"] == version
        assert tokens(rollout) == before
        rollout.scale({"eagle": 2})
        wait_until(lambda: [one["version"] for one in rollout.drafters()] == [3, 3], "a second one with them")
        assert len({one["checksum"] for one in rollout.drafters()}) == 1


def await_alarm(rollout: Rollout, version: int, alarm: bool) -> dict[str, Any]:
    """Rolls out until the only drafter has the version, and its alarm is on, or off. The same tokens all the time."""
    greedy, outputs = SamplingParams(temperature=0.0, max_tokens=24), set()

    def reported() -> dict[str, Any] | None:
        outputs.add(str([trajectory.token_ids for trajectory in rollout.generate(PROMPTS, greedy)]))
        (drafter,) = rollout.drafters()
        return drafter if drafter["version"] == version and drafter["tried"] and drafter["alarm"] is alarm else None

    drafter: dict[str, Any] = wait_until(reported, f"alarm {alarm}", 90.0)
    assert len(outputs) == 1
    console = Console(file=io.StringIO(), width=250)
    console.print(status_table(rollout.status()))
    assert ("NONE RIGHT" in console.file.getvalue()) is alarm  # type: ignore[attr-defined]
    return drafter
