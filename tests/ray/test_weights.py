"""New weights: outputs are those of the new checkpoint, heads get theirs, and no output mixes two versions."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
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
from specactor_ray.controller.controller import start_controller
from specactor_ray.controller.members import ActorClasses
from specactor_ray.core.console import make_console
from specactor_ray.core.errors import InputError, WeightsError
from specactor_ray.draft.eagle.checkpoint import load_head, trained_weights
from specactor_ray.learner.batching import Sample
from specactor_ray.models.loading import load_model, load_tokenizer
from specactor_ray.models.weight_buckets import pack
from specactor_ray.rollout import rollout as rollout_module
from specactor_ray.trainer.run import train
from specactor_ray.trainer.trainer_ranks import TrainerGroup
from tests.fakes.dropping import DROPPED, DroppingVerifier
from tests.plain_decoding import plain_tokens
from tests.tiny import tiny_draft, tiny_eagle, tiny_target
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
TARGET = {"dtype": "float32", "kv_cache_gb": 0.05}
PROMPTS = ["Tell me about the red fox.", "Count from 3 to 9.", "Add 3 and 4."]
SAMPLING = SamplingParams(temperature=1.0, max_tokens=24, seed=3)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, namespace="specactor", logging_level="ERROR")
    yield
    ray.shutdown()


def config(model: Path, mode: str = "plain", **more: Any) -> Config:
    """Buckets of weights are much smaller than the model."""
    target = {**TARGET, "model": str(model), **more.pop("target", {})}
    cluster = {"pin_cores": False, "health_interval_s": 0.5}
    trainer = {"learning_rate": 0.003, "prompts_per_step": 2, "weight_bucket_mb": 1}
    return from_mapping({"mode": mode, "target": target, "cluster": cluster, "trainer": trainer, **more})


def start(model: Path) -> Rollout:
    return Rollout(config(model, "coupled", drafters=[{"method": "ngram"}]))


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


def drop_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts of this process start verifiers with an engine that drops a tensor."""
    actors = ActorClasses(DroppingVerifier, DraftActor)
    monkeypatch.setattr(
        rollout_module, "start_controller", lambda config, held: start_controller(config, actors, held=held)
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_engine_that_drops_one_tensor_is_found_and_not_replaced(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop_a_tensor(monkeypatch)
    weights = load_model(str(tiny_target())).state_dict()
    with Rollout(config(tiny_target(), target={**TARGET, "replicas": replicas})) as rollout:
        for version in (1, 2):
            with pytest.raises(WeightsError, match=rf"version {version} .*; not loaded: {DROPPED}\."):
                rollout.update_weights(changed(weights, seed=version))
        # The first answer ends the update; the others arrive later.
        wait_until(lambda: all(DROPPED in row["note"] for row in rollout.status()), "every verifier's reason")
        assert len(rollout.status()) == replicas
        assert rollout.update_weights(weights) == 3, "the tensor as it was"
        assert tokens(rollout)


def test_a_training_that_an_engine_does_not_follow_fails_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop_a_tensor(monkeypatch)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "Count from 3 to 9.", "answer": "3"}\n' * 4)
    settings = config(
        tiny_target(),
        run={"dir": str(tmp_path), "name": "dropped"},
        data={"path": str(tmp_path / "tasks.jsonl"), "n": 2},
        sampling={"max_tokens": 12},
        reward={"functions": [{"name": "tests.fakes.reward_functions:hissing"}]},
        tracking={"tensorboard": False},
    )
    with pytest.raises(WeightsError, match=rf"version \d+ .*{DROPPED}"):
        train(settings, make_console(sys.stderr))
    summary = json.loads((tmp_path / "dropped" / "summary.json").read_text())
    assert summary["status"] == "failed" and DROPPED in summary["error"]


def samples() -> list[Sample]:
    rng, zeros, own = np.random.default_rng(0), np.zeros(12, dtype=np.float32), np.ones(12, dtype=np.bool_)
    ids = [(rng.integers(4, 400, 6), rng.integers(4, 400, 12)) for _ in range(8)]
    return [Sample(*one, zeros, 1.0, 1.0 - 2.0 * (number % 2), own) for number, one in enumerate(ids)]


def verifier(rollout: Rollout) -> dict[str, Any]:
    return next(row for row in rollout.status() if row["kind"] == "verifier" and row["phase"] == "ready")


def test_updates_reach_verifiers_also_a_replacement_for_a_killed_one() -> None:
    settings = config(tiny_target())
    with Rollout(settings) as rollout, TrainerGroup(settings, rollout.run_name) as trainer:
        before = tokens(rollout)
        rollout.sleep()
        rollout.wake()
        assert tokens(rollout) == before
        rollout.sleep()
        assert tokens(rollout) == before, "a stream wakes them"
        trainer.update(samples(), 0, 0)
        rollout.update_weights(trainer.export_weights(1))
        after = tokens(rollout)
        assert after != before
        assert {t.weight_version for t in rollout.generate(PROMPTS, SAMPLING)} == {1}

        old = verifier(rollout)
        os.kill(old["pid"], signal.SIGKILL)
        assert tokens(rollout) == after  # from its replacement, which had to be given the weights first
        new = verifier(rollout)
        assert new["id"] != old["id"] and new["weight_version"] == 1

        trainer.update(samples(), 1, 1)
        rollout.update_weights(trainer.export_weights(2))
        assert tokens(rollout) != after


@pytest.mark.parametrize("mode", ["decoupled", "coupled"])
def test_heads_get_every_version_that_they_are_taught(mode: str) -> None:
    """The second one is no numbers: it guesses nothing, and the alarm is raised."""
    head = {"method": "eagle", "model": str(tiny_eagle()), "kv_cache_gb": 0.05, "online": {"where": "trainer"}}
    settings = config(tiny_target(), mode, drafters=[head], speculation={"verify": "all", "draft_wait_s": 1.0})
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
        if mode == "decoupled":
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
